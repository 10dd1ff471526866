//! Tests that all who tell what is wrong say the same, from the first message on: outbox_health, outbox_why, outbox_check,
//! `outboxctl status`, `show` and `top`, the page, and the metrics, on which the alerts stand.

use serde_json::Value;
use support::{
    Broker, Cluster, DB, LONG, exchange_and_queue, outbox_cluster, outbox_cluster_with, wait_healthy, wait_published,
    wait_stats, wait_true, wait_until,
};

use crate::serve::monitor::Monitor;

/// A fault, the check that finds it, its code, and what ends it.
struct Fault {
    name: &'static str,
    make: &'static str,
    /// The state that the worker reports once it knows.
    state: &'static str,
    check: &'static str,
    code: &'static str,
    end: &'static str,
    /// Whether a message waits for its end, so that outbox_why names it.
    holds: bool,
}

const FAULTS: [Fault; 7] = [
    Fault {
        name: "a pause",
        make: "select outbox_pause('default')",
        state: "paused",
        check: "paused",
        code: "paused",
        end: "select outbox_resume('default')",
        holds: true,
    },
    Fault {
        name: "delivery that is switched off",
        make: "alter database postgres set outbox.enabled = off",
        state: "paused",
        check: "enabled",
        code: "disabled",
        end: "alter database postgres reset outbox.enabled",
        holds: true,
    },
    Fault {
        name: "a URL at which nobody listens",
        make: "",
        state: "down",
        check: "broker",
        code: "unreachable",
        end: "", // the test changes the setting
        holds: true,
    },
    Fault {
        name: "a trigger that undoes claims",
        make: "create function nothing() returns trigger language plpgsql set search_path = pg_catalog as
                 'begin return null; end';
               create trigger stop before update or delete on outbox for each row execute function nothing()",
        state: "connected",
        check: "triggers",
        code: "trigger_undoes",
        end: "drop trigger stop on outbox",
        holds: true,
    },
    Fault {
        name: "another owner of a table",
        make: "alter table outbox_waiting owner to postgres",
        state: "connected",
        check: "database",
        code: "other_owner",
        end: "alter table outbox_waiting owner to outbox_worker",
        holds: false,
    },
    Fault {
        name: "settings that belong to another role",
        make: "alter table outbox_settings owner to postgres",
        state: "connected",
        check: "database",
        code: "other_owner",
        end: "alter table outbox_settings owner to outbox_worker",
        holds: false,
    },
    Fault {
        name: "a role of the workers that is superuser",
        make: "alter role outbox_worker superuser",
        state: "connected",
        check: "role",
        code: "role_superuser",
        end: "alter role outbox_worker nosuperuser",
        holds: false,
    },
];

fn outboxctl(cluster: &Cluster, arguments: &[&str]) -> (bool, String) {
    let mut command = support::program::outboxctl_at(cluster, arguments);
    let output = command.output().expect("run outboxctl");
    (
        output.status.success(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}

#[test]
fn each_fault_is_told_by_all_who_tell_at_the_first_message() {
    let broker = Broker::shared();
    let (exchange, _queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let url: String = cluster.query_one(DB, "select current_setting('outbox.url')");
    let page = Monitor::start(&cluster, &[]);
    let mut published = 0;
    for fault in FAULTS {
        let Fault { name, check, code, .. } = fault;
        match fault.make {
            "" => cluster.set_conf("outbox.url", "amqp://127.0.0.1:1"),
            make => cluster.exec(DB, make),
        }
        wait_stats(&cluster, "default", &format!("state = '{}'", fault.state));
        let known = format!("select exists (select from outbox_health where not ok and code = '{code}')");
        wait_true(&cluster, name, &known);
        cluster.exec(DB, "select outbox_publish('T', '{}', 'order', '1')");
        published += 1;
        if fault.holds {
            let reasons = "select array_agg(reason) from outbox_why((select max(seq) from outbox_events))";
            let reasons: Vec<String> = cluster.query_one(DB, reasons);
            assert!(reasons.contains(&check.to_owned()), "{name}: {reasons:?}");
            let seq: i64 = cluster.query_one(DB, "select max(seq) from outbox_events");
            let (_, shown) = outboxctl(&cluster, &["show", &seq.to_string(), "--json"]);
            let shown: Value = serde_json::from_str(&shown).expect("JSON");
            let why = shown["messages"][0]["why"].as_array().expect("reasons");
            assert!(why.iter().any(|why| why["reason"] == check), "{name}: {shown}");
        }
        let failed = "select count(*) from outbox_check() where not ok";
        assert!(cluster.query_one::<i64>(DB, failed) > 0, "{name}: outbox_check");

        let problem = format!(r#"select problem from outbox_health where "check" = '{check}' and not ok limit 1"#);
        let problem: String = cluster.query_one(DB, &problem);
        let (is_well, status) = outboxctl(&cluster, &["status", "--exit-code", "--json"]);
        let status: Value = serde_json::from_str(&status).expect("JSON");
        let of_code = |problems: &Value| {
            let mut problems = problems.as_array().expect("problems").iter();
            problems.any(|problem| problem["code"] == code && problem["check"] == check)
        };
        assert!(!is_well && of_code(&status["problems"]), "{name}: {status}");
        let (_, top) = outboxctl(&cluster, &["top", "--once", "--json"]);
        let top: Value = serde_json::from_str(&top).expect("JSON");
        assert!(of_code(&top["problems"]), "{name}: {top}");
        let label = format!("check=\"{check}\"");
        let is_sample =
            |line: &str| line.starts_with("outbox_health_ok{") && line.contains(&label) && line.ends_with(" 0");
        wait_until(&format!("the page and the metrics to tell of {name}"), LONG, || {
            let begin: String = problem.chars().skip(1).take(15).collect(); // the page begins with a capital, and shortens
            let shown = page
                .page("/")
                .replace("&quot;", "\"")
                .replace("&#34;", "\"")
                .replace("&#x27;", "'");
            shown.contains(&begin) && page.page("/metrics").lines().any(is_sample)
        });

        match fault.end {
            "" => cluster.set_conf("outbox.url", &url),
            end => cluster.exec(DB, end),
        }
        wait_healthy(&cluster, check);
        wait_published(&cluster, published);
    }
}

/// The value of a card on the overview.
fn card(page: &str, title: &str) -> String {
    let card = page.split("<div class=\"card").find(|card| {
        let name = card.split("</dt>").next().unwrap_or_default();
        name.ends_with(&format!(">{title}")) || name.ends_with(&format!(">{title}</a>"))
    });
    let value = card.and_then(|card| card.split("<dd class=\"value\">").nth(1));
    let value = value.and_then(|value| value.split("</dd>").next());
    value.unwrap_or_else(|| panic!("no card {title}: {page}")).to_owned()
}

/// A value of the summary that `outboxctl status` prints.
fn fact(status: &str, name: &str) -> String {
    let words: Vec<&str> = status.split_whitespace().collect();
    let at = words.iter().position(|word| *word == name);
    at.and_then(|at| words.get(at + 1))
        .unwrap_or_else(|| panic!("no {name}: {status}"))
        .to_string()
}

fn sample(metrics: &str, name: &str) -> String {
    let line = metrics.lines().find(|line| line.split(' ').next() == Some(name));
    line.and_then(|line| line.split(' ').nth(1))
        .unwrap_or("none")
        .to_owned()
}

#[test]
fn each_number_is_the_same_for_all_who_tell_it() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.max_attempts = 1"]);
    broker.unbind(&queue, &exchange, "#");
    broker.bind(&queue, &exchange, "order.placed");
    cluster.exec(
        DB,
        "select outbox_publish('Placed', '{}', 'order', n::text, 'placed') from generate_series(1, 3) n;
         select outbox_publish('Lost', '{}', 'order', '4711', 'lost');
         select outbox_publish('Later', '{}', 'order', '5', 'placed', available_at => now() + '1 day') from generate_series(1, 2)",
    );
    wait_published(&cluster, 3);
    wait_true(&cluster, "the dead letter", "select dead = 1 from outbox_status");
    let page = Monitor::start(&cluster, &[]);
    let mut found = Vec::new();
    // What is read while a minute begins may differ.
    wait_until("all to tell the same numbers", LONG, || {
        let sql: String = cluster.query_one(
            DB,
            "select jsonb_build_object('pending', pending, 'in_flight', in_flight, 'dead', dead, 'published', published_total,
                                       'failed', failed_total, 'p95', coalesce(p95_ms, -1))::text from outbox_status",
        );
        let sql: Value = serde_json::from_str(&sql).expect("JSON");
        let (_, status) = outboxctl(&cluster, &["status", "--json"]);
        let (_, words) = outboxctl(&cluster, &["status"]);
        let (_, top) = outboxctl(&cluster, &["top", "--once", "--json"]);
        let [status, top]: [Value; 2] = [status, top].map(|text| serde_json::from_str(&text).expect("JSON"));
        let (overview, metrics) = (page.page("/"), page.page("/metrics"));
        let of = |row: &Value| {
            let number = |name: &str| row[name].as_f64().unwrap_or(-1.0);
            [
                "pending",
                "in_flight",
                "dead",
                "published_total",
                "failed_total",
                "p95_ms",
            ]
            .map(number)
        };
        let of_sql = ["pending", "in_flight", "dead", "published", "failed", "p95"];
        let of_sql = of_sql.map(|name| sql[name].as_f64().expect("a number"));
        let of_metrics = [
            "outbox_pending_messages",
            "outbox_in_flight_messages",
            "outbox_dead_messages",
            "outbox_messages_published_total{destination=\"default\"}",
            "outbox_attempts_failed_total{destination=\"default\"}",
            "outbox_publish_latency_p95_seconds",
        ];
        let mut of_metrics: [f64; 6] = of_metrics.map(|name| sample(&metrics, name).parse().unwrap_or(-1.0));
        if of_metrics[5] >= 0.0 {
            of_metrics[5] = (of_metrics[5] * 1e5).round() / 100.0;
        }
        let on_page = ["Pending", "In flight", "Dead", "p95 enqueue to confirm"].map(|title| card(&overview, title));
        let in_words = ["pending", "flight", "dead", "p95"].map(|name| fact(&words, name));
        let is_same = on_page
            .iter()
            .zip(&in_words)
            .all(|(page, words)| page.split(' ').next() == Some(words));
        found = vec![of_sql, of(&status["messages"]), of(&top["status"]), of_metrics];
        found.windows(2).all(|pair| pair[0] == pair[1]) && is_same
    });
    assert_eq!(found[0][..5], [2.0, 0.0, 1.0, 3.0, 1.0]);
}
