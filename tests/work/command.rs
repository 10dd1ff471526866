//! Tests of the command: its flags, its output, its exit codes, and what it never prints.

use std::process::{Output, Stdio};

use serde_json::Value;
use support::{Authority, Broker, Cluster, fresh_names, process};

use super::{Outside, make_courier, run, wait_for_file, without_workers, work, work_as};
use support::{DB, LONG, all_of, exchange_and_queue, wait_published, wait_true};

const KEYS: [&str; 13] = [
    "claimed",
    "published",
    "failed",
    "duration_ms",
    "backoff_ms",
    "renewed_heartbeat",
    "purged_stale",
    "active_workers",
    "desired_count",
    "owned_count",
    "leased_count",
    "released_count",
    "ts",
];

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn publish(cluster: &Cluster, operation: &str, count: usize) {
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish('T', '{{}}', 'item', n::text, '{operation}') from generate_series(1, {count}) n"
        ),
    );
}

/// The sum of the numbers behind this word in lines for people.
fn sum(text: &str, word: &str) -> u64 {
    let words: Vec<&str> = text.split_whitespace().collect();
    let numbers = words.windows(2).filter(|pair| pair[0] == word);
    numbers.filter_map(|pair| pair[1].parse::<u64>().ok()).sum()
}

fn passes(text: &str) -> Vec<Value> {
    let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
    text.lines().map(line).collect()
}

#[test]
fn once_delivers_one_batch_reports_it_in_thirteen_keys_and_leaves_nothing_behind() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &["outbox.batch_size = 100"]);
    publish(&cluster, "x", 250);
    let mut published = 0;
    // The fair share of each partition makes a batch a little larger or smaller than requested.
    for round in 0..4 {
        let output = run(work(&cluster, &["--once", "--json"]));
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let passes = passes(&stdout(&output));
        let [pass] = passes.as_slice() else {
            panic!("one line, not {passes:?}")
        };
        let keys: Vec<&String> = pass.as_object().expect("an object").keys().collect();
        assert_eq!(keys, KEYS);
        let number = |key: &str| pass[key].as_u64().unwrap_or_else(|| panic!("{key} in {pass}"));
        assert_eq!((number("claimed"), number("failed")), (number("published"), 0));
        assert_eq!(
            (number("desired_count"), number("owned_count"), number("leased_count")),
            (16, 16, 16)
        );
        assert_eq!(
            (number("active_workers"), pass["renewed_heartbeat"].as_bool()),
            (1, Some(true))
        );
        assert!(pass["duration_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{pass}");
        assert_eq!(number("backoff_ms") > 0, number("claimed") == 0, "{pass}");
        assert!(
            pass["ts"]
                .as_str()
                .is_some_and(|ts| ts.len() == 20 && ts.ends_with('Z')),
            "{pass}"
        );
        published += number("published");
        assert!(
            published <= 250 && (round > 0 || (50..=150).contains(&published)),
            "{pass}"
        );
        let of_database = cluster.query_one::<i64>(DB, "select count(*) from outbox_history");
        assert_eq!(of_database as u64, published);
        let left = "select exists (select from outbox_workers) or exists (select from outbox_partitions where lease_owner is not null)";
        assert!(!cluster.query_one::<bool>(DB, left), "a worker or a lease is left");
    }
    assert_eq!(published, 250);
    assert_eq!(all_of(broker, &queue).len(), 250);
}

#[test]
fn the_exit_code_shows_what_failed() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "item.good");
    let cluster = without_workers(broker, &exchange, &[]);
    let ends = |args: &[&str], code: i32, words: &str| {
        let output = run(work(&cluster, args));
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert!(message.contains(words), "{args:?}: {message}");
        message
    };
    ends(&["--once"], 0, "");
    // 1: some messages failed.
    publish(&cluster, "bad", 1);
    ends(&["--once"], 1, "");
    // 2: invalid arguments, and no password is repeated.
    ends(&["--twice"], 2, "--twice");
    let message = ends(&["--once", "--url", "amqp://courier:hunter2@127.0.0.1"], 2, "password");
    assert!(!message.contains("hunter2"), "{message}");
    // 3: no session, or no connection to the broker.
    let elsewhere = work_as(1, "courier", DB, &["--once"]);
    assert_eq!(run(elsewhere).status.code(), Some(3));
    ends(&["--once", "--url", "amqp://127.0.0.1:1"], 3, "unreachable");
    // 4: no extension.
    cluster.exec(DB, "create database plain");
    let output = run(work_as(cluster.port(), "courier", "plain", &["--once"]));
    assert_eq!(output.status.code(), Some(4));
    assert!(
        stderr(&output).contains("CREATE EXTENSION outbox"),
        "{}",
        stderr(&output)
    );
    // 5: refused.
    cluster.exec(DB, "create role outsider login");
    let output = run(work_as(cluster.port(), "outsider", DB, &["--once"]));
    assert_eq!(output.status.code(), Some(5));
    assert!(stderr(&output).contains("outbox_relay"), "{}", stderr(&output));
}

#[test]
fn without_leasing_work_runs_alone_or_is_refused() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let alone = Outside::start_with(&cluster, "alone", &["--no-leasing"]);
    let refused = run(work(&cluster, &["--no-leasing", "--once"]));
    assert_eq!(refused.status.code(), Some(5));
    assert!(stderr(&refused).contains("work-alone-"), "{}", stderr(&refused));
    // A worker that starts later gets no partitions.
    let late = run(work(&cluster, &["--once", "--json"]));
    assert_eq!(passes(&stdout(&late))[0]["owned_count"], 0);
    publish(&cluster, "x", 10);
    wait_published(&cluster, 10);
    assert_eq!(all_of(broker, &queue).len(), 10);
    assert_eq!(alone.stop(), Some(0));
}

#[test]
fn work_prints_a_line_per_batch_or_per_interval_or_nothing() {
    let broker = Broker::shared();
    let (exchange, _queue) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let dir = cluster.data_dir();
    let start = |name: &str, args: &[&str]| {
        let path = dir.join(name);
        let mut command = work(&cluster, &["--name", name]);
        let file = std::fs::File::create(&path).expect("a file");
        command
            .args(args)
            .stdout(Stdio::from(file.try_clone().expect("the file")));
        command.stderr(Stdio::from(file));
        let child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
        (Outside { child: Some(child) }, path)
    };
    publish(&cluster, "x", 5);
    let (plain, path) = start("plain", &[]);
    // One line, or more on a slow machine: a pass is reported after a second at the latest.
    let text = wait_for_file(&path, "lines of five messages", |text| sum(text, "published") == 5);
    assert_eq!(sum(&text, "failed"), 0, "{text}");
    assert!(text.contains("partitions 16 of 16, 1 worker"), "{text}");
    assert_eq!(plain.stop(), Some(0));

    let (window, path) = start("window", &["--window", "1"]);
    publish(&cluster, "x", 5);
    let text = wait_for_file(&path, "a window", |text| text.contains(" passes, "));
    assert!(text.lines().any(|line| line.contains("claimed")), "{text}");
    assert_eq!(window.stop(), Some(0));

    let (silent, path) = start("silent", &["--silent"]);
    publish(&cluster, "x", 5);
    wait_published(&cluster, 15);
    assert_eq!(silent.stop(), Some(0));
    assert_eq!(std::fs::read_to_string(path).expect("what it printed"), "");

    // The first pass runs at once, and the next after a long interval.
    let (slow, path) = start("slow", &["--json", "--interval-ms", "600000"]);
    wait_for_file(&path, "a first pass", |text| text.contains('\n'));
    publish(&cluster, "x", 5);
    wait_true(
        &cluster,
        "a heartbeat between passes",
        "select exists (select from outbox_workers where heartbeat_at > started_at + interval '2 s')",
    );
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox"),
        5,
        "no pass runs within the interval"
    );
    assert_eq!(slow.stop(), Some(0));
}

#[test]
fn the_password_of_the_broker_comes_from_a_file_that_only_its_owner_reads() {
    use std::os::unix::fs::PermissionsExt;
    let broker = Broker::start();
    broker.add_user("mover", "hunter2");
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = support::unconnected_cluster("", &exchange, &["outbox.workers = 0"]);
    make_courier(&cluster);
    publish(&cluster, "x", 3);
    let file = cluster.data_dir().join("password");
    std::fs::write(&file, "hunter2\n").expect("a file");
    let url = format!("amqp://mover@127.0.0.1:{}", broker.port());
    let run_with = |mode: u32| {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("chmod");
        let mut command = work(&cluster, &["--once", "--password-file", &file.display().to_string()]);
        command.env("OUTBOX_URL", &url);
        run(command)
    };
    let open = run_with(0o644);
    assert_eq!(open.status.code(), Some(3), "{}", stderr(&open));
    assert!(stderr(&open).contains("chmod 6"), "{}", stderr(&open));
    let output = run_with(0o600);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!format!("{}{}", stdout(&output), stderr(&output)).contains("hunter2"));
    assert_eq!(all_of(&broker, &queue).len(), 3);
    // A wrong password is reported.
    std::fs::write(&file, "wrong\n").expect("a file");
    let refused = run_with(0o600);
    assert_eq!(refused.status.code(), Some(3));
    assert!(stderr(&refused).contains("auth_refused"), "{}", stderr(&refused));
    drop(cluster);
}

#[test]
fn sigint_ends_work_as_sigterm_does() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = without_workers(broker, &exchange, &[]);
    let mut outside = Outside::start(&cluster, "polite");
    let mut child = outside.child.take().expect("it runs");
    process::signal(child.id(), libc::SIGINT);
    assert_eq!(
        process::reap(&mut child, LONG).and_then(|status| status.code()),
        Some(0)
    );
    assert!(cluster.query_one::<bool>(DB, "select not exists (select from outbox_workers)"));
}

#[test]
fn over_tls_work_trusts_only_the_given_authority() {
    let (authority, stranger) = (Authority::new("ours"), Authority::new("theirs"));
    let broker = Broker::start_tls(&authority.issue("127.0.0.1"), None);
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = support::unconnected_cluster("", &exchange, &["outbox.workers = 0"]);
    make_courier(&cluster);
    publish(&cluster, "x", 3);
    let run_with = |authority: &Authority| {
        let file = cluster.data_dir().join("ca");
        std::fs::write(&file, &authority.cert_pem).expect("a file");
        let url = format!("amqps://127.0.0.1:{}", broker.tls_port());
        run(work(
            &cluster,
            &["--once", "--url", &url, "--tls-ca", &file.display().to_string()],
        ))
    };
    let refused = run_with(&stranger);
    assert_eq!(refused.status.code(), Some(3));
    assert!(stderr(&refused).contains("tls_failed"), "{}", stderr(&refused));
    let output = run_with(&authority);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(all_of(&broker, &queue).len(), 3);
    drop(cluster);
}
