//! Tests /metrics as Prometheus reads it, and the alerts and the dashboard of contrib/.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::monitor::{Monitor, encoded};
use super::{MARKUP, quiet_cluster, stage};
use support::http::ask;
use support::port::free_port;
use support::wait::try_wait_for;
use support::{DB, LONG};
use support::{process, wait_for, wait_until};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A Prometheus that scrapes a monitor every second, with the alerts of contrib/.
struct Prometheus {
    child: Child,
    port: u16,
    data: PathBuf,
}

impl Prometheus {
    fn start(target: u16) -> Self {
        let port = free_port();
        let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("prometheus-{port}"));
        std::fs::create_dir_all(&data).expect("make a directory");
        let rules = root()
            .join("contrib/prometheus-rules.yml")
            .canonicalize()
            .expect("the rules");
        let config = format!(
            "global:\n  scrape_interval: 1s\n  evaluation_interval: 1s\n\
             rule_files: ['{}']\n\
             scrape_configs:\n  - job_name: outbox\n    static_configs:\n      - targets: ['127.0.0.1:{target}']\n",
            rules.display()
        );
        std::fs::write(data.join("prometheus.yml"), config).expect("write its configuration");
        let log = std::fs::File::create(data.join("log")).expect("make a log");
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", data.join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", data.join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = process::spawn_bound(command, libc::SIGKILL).expect("start prometheus; is it installed?");
        let this = Self { child, port, data };
        wait_until("Prometheus to be ready", LONG, || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
                && ask(port, "GET", "/-/ready", &[], "").status == 200
        });
        this
    }

    fn get(&self, path: &str) -> Value {
        let answer = ask(self.port, "GET", path, &[("Accept-Encoding", "identity")], "");
        let body = answer.body;
        // Long responses come in chunks: the JSON is between the first brace and the last.
        let json = match answer
            .headers
            .iter()
            .any(|(name, _)| name.eq_ignore_ascii_case("transfer-encoding"))
        {
            true => unchunked(&body),
            false => body,
        };
        serde_json::from_str(&json).unwrap_or_else(|error| panic!("{path}: {error}: {json}"))
    }

    /// The rows that an expression returns now.
    fn query(&self, expression: &str) -> Vec<Value> {
        let answer = self.get(&format!("/api/v1/query?query={}", encoded(expression)));
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        answer["data"]["result"].as_array().cloned().unwrap_or_default()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        process::kill(&mut self.child);
        let _ = std::fs::remove_dir_all(&self.data);
    }
}

fn unchunked(body: &str) -> String {
    let (mut rest, mut whole) = (body, String::new());
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or_default();
        if size == 0 {
            break;
        }
        whole.push_str(&after[..size]);
        rest = after.get(size + 2..).unwrap_or_default();
    }
    whole
}

#[test]
fn prometheus_reads_the_metrics_and_each_panel_finds_its_series() {
    if support::skip_without("Prometheus reads the metrics", &["prometheus"]) {
        return;
    }
    let cluster = stage(MARKUP);
    let monitor = Monitor::start(&cluster, &[]);
    let answer = monitor.get("/metrics");
    assert_eq!(
        answer.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    assert!(answer.body.ends_with("# EOF\n"), "{}", answer.body);
    let prometheus = Prometheus::start(monitor.port);
    // rate() needs two scrapes.
    wait_until("two scrapes", LONG, || {
        !prometheus.query("count_over_time(outbox_up[1m]) >= 2").is_empty()
    });
    // A scrape that takes longer than a second fails, and its series are missing until the next one.
    let value = |expression: &str| -> Option<f64> {
        let rows = prometheus.query(expression);
        rows.first()?["value"][1].as_str()?.parse().ok()
    };
    let shows = |expression: &str, expected: f64| {
        let mut last = None;
        let found = try_wait_for(LONG, || {
            last = value(expression).or(last);
            (last == Some(expected)).then_some(())
        });
        assert!(found.is_some(), "{expression}: {last:?} and not {expected}");
    };
    shows("outbox_up", 1.0);
    shows(r#"outbox_messages_published_total{destination="default"}"#, 130.0);
    // The histogram counts each published message once, and its last bucket has all of them.
    for series in [
        "count{destination=\"default\"}",
        "bucket{destination=\"default\",le=\"+Inf\"}",
    ] {
        shows(&format!("outbox_delivery_seconds_{series}"), 130.0);
    }
    let p95 = r#"histogram_quantile(0.95, outbox_delivery_seconds_bucket{destination="default"})"#;
    let p95 = wait_for(p95, LONG, || value(p95));
    assert!(p95.is_finite() && p95 > 0.0 && p95 < 600.0, "{p95}");
    shows("outbox_dead_messages", 12.0);
    shows("outbox_live_workers", 2.0);
    shows(r#"outbox_destination_state{destination="audit",state="paused"}"#, 1.0);
    // It exists once maintenance has counted the messages.
    shows(r#"outbox_destination_pending_messages{destination="audit"}"#, 20.0);
    let blocked: i64 = cluster.query_one(DB, "select count(distinct partition) from outbox_dead where blocks");
    shows("outbox_blocked_partitions", blocked as f64);
    assert!(
        prometheus.query(r#"{__name__=~"outbox_.+", key!=""}"#).is_empty(),
        "a key is a label"
    );

    let text = std::fs::read_to_string(root().join("contrib/grafana-dashboard.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    assert!(panels.len() >= 10, "{} panels", panels.len());
    for panel in panels {
        for target in panel["targets"].as_array().expect("targets") {
            let expression = target["expr"].as_str().expect("an expression");
            let filled = expression.replace("$__rate_interval", "1m").replace("$instance", ".*");
            wait_for(&format!("series of {}: {filled}", panel["title"]), LONG, || {
                (!prometheus.query(&filled).is_empty()).then_some(())
            });
        }
    }
}

#[test]
fn messages_that_have_failed_three_times_count_as_retrying_for_their_destination() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server audit foreign data wrapper outbox_http options (url 'https://hooks.example/');
         select outbox_publish('T', '{}', destination => 'audit', available_at => now() + interval '1 day')
         from generate_series(1, 4);
         update outbox_waiting set state = 'b', attempts = seq, last_error = 'HTTP 500' where seq > 1",
    );
    let monitor = Monitor::start(&cluster, &[]);
    let is_counted = |destination: &str, n: i64| {
        let sample = format!("outbox_destination_retrying_messages{{destination=\"{destination}\"}} {n}\n");
        wait_until(&sample, LONG, || monitor.get("/metrics").body.contains(&sample));
    };
    is_counted("audit", 2);
    is_counted("default", 0);
}

#[test]
fn the_alert_rules_are_valid_and_fire_when_they_should() {
    if support::skip_without("the alert rules are valid", &["promtool"]) {
        return;
    }
    let rules = root().join("contrib/prometheus-rules.yml");
    let test = root().join("tests/serve/alerts.yml");
    for arguments in [["check", "rules"], ["test", "rules"]] {
        let file = if arguments[0] == "check" { &rules } else { &test };
        let output = Command::new("promtool")
            .args(arguments)
            .arg(file)
            .output()
            .expect("run promtool; is it installed?");
        let printed = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {printed}");
    }
    // Each alert has a test.
    let (rules, test) = (std::fs::read_to_string(rules), std::fs::read_to_string(test));
    let test = test.expect("the test");
    for line in rules
        .expect("the rules")
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
    {
        assert!(
            test.contains(&format!("alertname: {line}\n")),
            "{line} is never fired by tests/serve/alerts.yml"
        );
    }
}
