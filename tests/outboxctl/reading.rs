//! Tests that outboxctl shows the state of the outbox, and explains why a message does not move.

use super::{Ctl, quiet_cluster};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::*;
use support::{Broker, Cluster, Receiver, Reply, fresh_names};

fn seqs(cluster: &Cluster, args: &[&str]) -> Vec<i64> {
    let mut all = vec!["list", "--json"];
    all.extend(args);
    let rows = Ctl::new(cluster, &all).run().json_lines();
    rows.iter().map(|row| row["seq"].as_i64().expect("a seq")).collect()
}

fn shown(cluster: &Cluster, seq: i64) -> Value {
    Ctl::new(cluster, &["show", &seq.to_string(), "--json"]).run().json()
}

fn whys(shown: &Value) -> Vec<String> {
    let reasons = shown["messages"][0]["why"].as_array().expect("reasons");
    let words = |reason: &Value| format!("{} | {}", reason["why"].as_str().expect("text"), reason["remedy"]);
    reasons.iter().map(words).collect()
}

/// One message of each status: 1 ready, 2 scheduled, 3 in flight, 4 retrying, 5 dead, 6 published, 7 discarded, 8
/// blocked by 5.
fn one_of_each(cluster: &Cluster) {
    cluster.exec(
        DB,
        "select outbox_publish(case n % 2 when 1 then 'Odd' else 'Even' end, '{}', 'order', case n when 8 then '5' else n::text end,
                               available_at => case n when 2 then now() + interval '1 day' end) from generate_series(1, 8) n;
         update outbox_partitions set lease_owner = 'w', lease_until = now() + interval '1 hour', lease_epoch = 7;
         update outbox set claim_token = 7 where seq = 3;
         insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key, last_error)
         select seq, enqueued_at, now() + interval '1 hour', 3, partition, 'b', destination, key, 'returned: NO_ROUTE' from outbox where seq = 4;
         insert into outbox_waiting (seq, enqueued_at, partition, state, destination, key)
         select seq, enqueued_at, partition, 'g', destination, key from outbox where seq = 8;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason, blocks)
         select seq, enqueued_at, 15, partition, destination, key, 'refused', true from outbox where seq = 5;
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, discarded, destination, key)
         select seq, enqueued_at, now(), 1, partition, seq = 7, destination, key from outbox where seq in (6, 7);
         delete from outbox where seq in (4, 5, 6, 7, 8)",
    );
}

#[test]
fn list_finds_messages_of_each_status() {
    let cluster = quiet_cluster();
    one_of_each(&cluster);
    for (args, expected) in [
        (&[][..], &[1, 2, 3, 4, 5, 8][..]),
        (&["--status", "ready"], &[1]),
        (&["--status", "blocked"], &[8]),
        (&["--status", "scheduled"], &[2]),
        (&["--status", "in-flight"], &[3]),
        (&["--status", "retrying"], &[4]),
        (&["--status", "dead"], &[5]),
        (&["--status", "published"], &[6]),
        (&["--status", "discarded"], &[7]),
        (&["--status", "dead", "--status", "published"], &[5, 6]),
        (&["--status", "dead", "--status", "published", "--limit", "1"], &[5]),
        (&["--newest-first", "--limit", "2"], &[8, 5]),
        (&["--newest-first", "--after", "5"], &[4, 3, 2, 1]),
        (&["--after", "2", "--limit", "2"], &[3, 4]),
        (&["--type", "Odd"], &[1, 3, 5]),
        (&["--aggregate-type", "order", "--aggregate-id", "5"], &[5, 8]),
        (&["--key", "order:5"], &[5, 8]),
        (&["--error-like", "returned%"], &[4]),
        (&["--destination", "default", "--status", "ready"], &[1]),
        (&["--destination", "elsewhere"], &[]),
        (&["--since", "1h"], &[1, 2, 3, 4, 5, 8]),
        (&["--since", "2100-01-01"], &[]),
        (&["order:5"], &[5, 8]),
        (&["Odd"], &[1, 3, 5]),
        (&["RETURNED"], &[4]),
        (&["--correlation-id", "request-7"], &[]),
    ] {
        assert_eq!(seqs(&cluster, args), expected, "{args:?}");
    }
    for (seq, column) in [
        (1, "id::text"),
        (6, "upper(id::text)"),
        (7, "replace(id::text, '-', '')"),
    ] {
        let id: String = cluster.query_one(DB, &format!("select {column} from outbox_events where seq = {seq}"));
        assert_eq!(seqs(&cluster, &["--id", &id]), [seq], "of any status");
    }
    let of_partition = "select array_agg(seq order by seq) from outbox_messages where partition_key = 'p05' and published_at is null and status <> 'discarded'";
    let expected: Option<Vec<i64>> = cluster.query_one(DB, of_partition);
    assert_eq!(seqs(&cluster, &["--partition", "p05"]), expected.unwrap_or_default());
    // The view lists each of the messages with the same values.
    for row in Ctl::new(
        &cluster,
        &["list", "--json", "--status", "ready", "--status", "blocked"],
    )
    .run()
    .json_lines()
    {
        let sql = format!(
            "select status || ' ' || key || ' ' || partition_key from outbox_messages where seq = {}",
            row["seq"]
        );
        let row_text = format!("{} {} {}", row["status"], row["key"], row["partition_key"]).replace('"', "");
        assert_eq!(row_text, cluster.query_one::<String>(DB, &sql));
    }
    let table = Ctl::new(&cluster, &["list"]).run();
    assert!(
        table.out.contains("seq  status") && table.out.contains("returned: NO_ROUTE"),
        "{}",
        table.out
    );
    assert!(!table.out.contains('\x1b'), "no colours without a terminal");
    assert_eq!(table.out.lines().count(), 7);
}

#[test]
fn pages_follow_each_other_without_a_gap_or_a_repetition() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server bus foreign data wrapper outbox_amqp options (exchange 'x');
         select outbox_publish('T', '{}', 'order', n::text) from generate_series(1, 300) n;
         select outbox_enqueue_many(array(select n from generate_series(1, 300, 3) n), destination => 'bus')",
    );
    let all = seqs(&cluster, &["--limit", "1000"]);
    assert_eq!(all.len(), 400);
    for newest_first in [false, true] {
        let mut paged = Vec::new();
        loop {
            let after = paged.last().map(|seq: &i64| seq.to_string());
            let mut args = vec!["--limit", "37"];
            args.extend(after.iter().flat_map(|after| ["--after", after]));
            args.extend(newest_first.then_some("--newest-first"));
            let page = seqs(&cluster, &args);
            if page.is_empty() {
                break;
            }
            paged.extend(page);
        }
        if newest_first {
            paged.reverse();
        }
        assert_eq!(paged, all);
    }
    let first_page = Ctl::new(&cluster, &["list", "--limit", "3"]).run();
    assert!(first_page.err.contains("--after 2"), "{}", first_page.err);
}

/// The first range of seq has 20,000 seqs, and each further one eight times as many.
#[test]
fn the_ranges_of_the_history_leave_no_gap() {
    let cluster = quiet_cluster();
    let all = [
        1, 20_000, 20_001, 20_002, 180_000, 180_001, 180_002, 820_000, 820_001, 980_000, 980_001, 1_000_000,
    ];
    cluster.exec(
        DB,
        &format!(
            "insert into outbox_events (seq, id, type, payload)
             select n, gen_random_uuid(), 'T', '{{}}' from unnest('{{1,1000000}}'::bigint[]) n;
             insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination)
             select n, now(), now(), 1, 1, 'default' from unnest(array{all:?}) n"
        ),
    );
    let listed = |args: &[&str]| seqs(&cluster, &[&["--status", "published"], args].concat());
    assert_eq!(listed(&[]), all);
    assert_eq!(listed(&["--after", "20001", "--limit", "4"]), all[3..7]);
    assert_eq!(listed(&["--after", "9223372036854775807"]), [0; 0]);
    let mut down = listed(&["--newest-first"]);
    down.reverse();
    assert_eq!(down, all);
    assert_eq!(
        listed(&["--newest-first", "--after", "180001", "--limit", "2"]),
        [180_000, 20_002]
    );
}

#[test]
fn a_page_reads_a_page_of_rows_with_any_backlog() {
    let cluster = support::quiet_cluster(); // maintenance reads pending messages
    cluster.exec(
        DB,
        "insert into outbox (seq, partition, key) select n, n % 16, n::text from generate_series(1, 200000) n",
    );
    cluster.exec(DB, "vacuum analyze outbox");
    cluster.exec(DB, "select pg_stat_reset()");
    for args in [
        &["list"][..],
        &["list", "--newest-first"],
        &["list", "--after", "100000"],
        &["list", "--partition", "p03"],
    ] {
        assert_eq!(Ctl::new(&cluster, args).run().well().lines().count(), 51, "{args:?}");
    }
    Ctl::new(&cluster, &["show", "200000"]).run().well();
    Ctl::new(&cluster, &["status"]).run().well();
    // The limit: a page for each of 16 lanes, the first row of each lane several times, and the start of the lane of
    // the message shown.
    let read = "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where relname = 'outbox'";
    wait_true(
        &cluster,
        "the sessions to report their statistics",
        &format!("select ({read}) > 10000"),
    );
    let read: i64 = cluster.query_one(DB, read);
    assert!(read < 10_000 + 6_000, "{read} rows of outbox read");
}

/// As after a bulk load: the planner underestimates a lane, and would read and sort all of it to find its first rows.
#[test]
fn a_page_reads_a_page_of_rows_without_table_statistics() {
    let cluster = quiet_cluster_with(&["autovacuum = off"]);
    cluster.exec(
        DB,
        "insert into outbox (seq, partition, key) select n, 3, n::text from generate_series(1, 200000) n",
    );
    for args in [
        &["list"][..],
        &["list", "--status", "ready"],
        &["list", "--newest-first"],
    ] {
        assert_eq!(Ctl::new(&cluster, args).run().well().lines().count(), 51, "{args:?}");
    }
    Ctl::new(&cluster, &["show", "200000"]).run().well();
    let read = "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where relname = 'outbox'";
    // This reads the start of the lane of the message shown.
    wait_true(
        &cluster,
        "the sessions to report their statistics",
        &format!("select ({read}) > 10000"),
    );
    let read: i64 = cluster.query_one(DB, read);
    assert!(read < 12_000, "{read} rows of outbox read");
}

#[test]
fn a_page_of_one_type_reads_a_page_of_its_events() {
    let cluster = support::quiet_cluster(); // maintenance reads pending messages
    cluster.exec(
        DB,
        "insert into outbox_events (id, type, payload)
         select gen_random_uuid(), 'T' || n % 20, '{}' from generate_series(1, 40000) n;
         insert into outbox (seq, partition, key) select n, n % 16, n::text from generate_series(1, 40000) n",
    );
    cluster.exec(DB, "vacuum analyze");
    cluster.exec(DB, "select pg_stat_reset()");
    let sevens: Vec<i64> = (0..50).map(|n| 7 + 20 * n).collect();
    assert_eq!(seqs(&cluster, &["--type", "T7"]), sevens);
    let read = "select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) from pg_stat_user_tables where relname = 'outbox'";
    wait_true(
        &cluster,
        "the session to report its statistics",
        &format!("select ({read}) > 0"),
    );
    let read: i64 = cluster.query_one(DB, read);
    assert!(read < 1000, "{read} rows of outbox read");
}

#[test]
fn show_explains_why_a_message_is_stuck_and_names_the_fix() {
    let cluster = quiet_cluster();
    one_of_each(&cluster);
    let assert_why = |seq: i64, parts: &[&str]| {
        let whys = whys(&shown(&cluster, seq)).join("\n");
        for part in parts {
            assert!(whys.contains(part), "{seq}: {part:?} in {whys}");
        }
    };
    assert_why(
        1,
        &[
            "workers is 0: nothing is delivered",
            "ALTER SYSTEM SET outbox.workers = '1'",
        ],
    );
    assert_why(2, &["scheduled for", "outboxctl retry 2 --destination default"]);
    assert_why(3, &["A worker holds it"]);
    assert_why(
        4,
        &[
            "next one is due at",
            "NO_ROUTE",
            "outboxctl retry 4 --destination default",
        ],
    );
    assert_why(
        5,
        &[
            "given up",
            "refused",
            "outboxctl retry 5 --destination default, or outboxctl discard 5 --destination default",
        ],
    );
    assert_why(
        8,
        &[
            "behind message 5 of its key, which is dead: refused",
            "outboxctl discard 5 --destination default",
        ],
    );
    assert_eq!(whys(&shown(&cluster, 6)), [""; 0]);
    cluster.draw_seqs(22);
    cluster.exec(
        DB,
        "create server lanes foreign data wrapper outbox_amqp options (exchange 'x', ordering 'partition');
         select outbox_enqueue(n, 'other', 'lanes', partition_key => 'p03') from generate_series(21, 22) n;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason, blocks)
         select seq, enqueued_at, 15, partition, destination, null, 'no such book', true from outbox where destination = 'lanes' and seq = 21;
         delete from outbox where destination = 'lanes' and seq = 21",
    );
    assert_why(22, &["behind message 21 of its partition, which is dead: no such book"]);
    cluster.exec(DB, "select outbox_pause(reason => 'the broker moves')");
    assert_why(1, &["is paused", "the broker moves", "outboxctl resume default"]);
    let unknown = Ctl::new(&cluster, &["show", "4711"]).run().failed(1);
    assert!(unknown.contains("4711"), "{unknown}");
}

#[test]
fn show_gives_the_event_as_it_is_stored() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        r#"select outbox_publish('OrderPlaced', '{"n": 12345678901234567890.123456789012345678901, "esc": "\u001b[2Jx"}', 'order', '42', 'placed',
                                 headers => '{"tenant": "a"}', actor => 'ann', correlation_id => 'c-1')"#,
    );
    let raw = Ctl::new(&cluster, &["show", "1", "--json"]).run().well();
    assert!(raw.contains("12345678901234567890.123456789012345678901"), "{raw}");
    let document: Value = serde_json::from_str(&raw).expect("JSON");
    assert_eq!(document["event"]["headers"], json!({ "tenant": "a" }));
    assert_eq!(document["event"]["actor"], "ann");
    let page = Ctl::new(&cluster, &["show", "1"]).run().well();
    for part in [
        "Message 1 to default",
        "order:42",
        "OrderPlaced",
        "12345678901234567890.123456789012345678901",
        "c-1",
        "\"tenant\": \"a\"",
    ] {
        assert!(page.contains(part), "{part} in {page}");
    }
    assert!(!page.contains('\x1b'), "{page:?}");
}

#[test]
fn show_lists_the_attempts_that_failed() {
    let broker = Broker::shared();
    let (exchange, _) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true); // and no queue: the broker returns each message
    let conf = ["outbox.retry_backoff = '1ms'", "outbox.max_attempts = 3"];
    let cluster = outbox_cluster_with(broker, &exchange, &conf);
    cluster.exec(DB, "select outbox_publish('T', '{}', 'order', '1')");
    wait_true(&cluster, "a dead letter", "select exists (select from outbox_dead)");
    let document = shown(&cluster, 1);
    let attempts = document["messages"][0]["failed_attempts"].as_array().expect("attempts");
    let listed: Vec<_> = attempts
        .iter()
        .map(|attempt| (attempt["attempt"].as_i64(), attempt["outcome"].as_str()))
        .collect();
    assert_eq!(
        listed,
        [
            (Some(1), Some("retried")),
            (Some(2), Some("retried")),
            (Some(3), Some("dead"))
        ]
    );
    assert!(
        attempts.iter().all(|attempt| attempt["error"]
            .as_str()
            .is_some_and(|error| error.contains("NO_ROUTE"))),
        "{attempts:?}"
    );
    let page = Ctl::new(&cluster, &["show", "1"]).run().well();
    assert!(
        page.contains("attempt 3") && page.contains("by server-1, dead: "),
        "{page}"
    );
}

#[test]
fn status_shows_counts_and_problems() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &[]);
    wait_for_problem(&cluster, "broker");
    cluster.exec(DB, "select outbox_publish('T', '{}') from generate_series(1, 3)");
    wait_true(&cluster, "three pending", "select pending = 3 from outbox_status");
    let status = Ctl::new(&cluster, &["status", "--json"]).run().json();
    assert_eq!(status["messages"]["pending"], 3);
    assert_eq!(status["standby"], false);
    assert_eq!(status["destinations"][0]["state"], "down");
    assert_eq!(status["workers"][0]["alive"], true);
    let problems = status["problems"].as_array().expect("problems");
    assert!(
        problems
            .iter()
            .any(|problem| problem["check"] == "broker" && problem["remedy"].is_string()),
        "{problems:?}"
    );
    let page = Ctl::new(&cluster, &["status"]).run().well();
    for part in [
        "pending",
        "default",
        "down",
        "cannot be reached",
        "Fix: start the broker",
    ] {
        assert!(page.contains(part), "{part} in {page}");
    }
    let show = Ctl::new(&cluster, &["show", "1"]).run().well();
    assert!(
        show.contains("cannot be reached") && show.contains("Fix: start the broker"),
        "{show}"
    );
    let check = Ctl::new(&cluster, &["check"]).run();
    assert_eq!(check.code, 1, "{check:?}");
    assert!(
        check.out.contains("connection") && check.out.contains("no"),
        "{}",
        check.out
    );
    let check: Value = serde_json::from_str(&Ctl::new(&cluster, &["check", "--json"]).run().out).expect("JSON");
    assert_eq!(check["ok"], false);
}

#[test]
fn a_standby_can_be_read_and_is_reported_as_a_standby() {
    let cluster = quiet_cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}', 'order', '1')");
    let standby = cluster.copy(true, &[]);
    let status = Ctl::new(&standby, &["status", "--json"]).run().json();
    assert_eq!(status["standby"], true);
    assert!(
        Ctl::new(&standby, &["status"])
            .run()
            .well()
            .contains("standby: nothing is delivered from here")
    );
    assert_eq!(seqs(&standby, &[]), [1]);
    assert!(
        Ctl::new(&standby, &["show", "1"])
            .run()
            .well()
            .contains("This server is a standby")
    );
    let refused = Ctl::new(&standby, &["discard", "1", "--yes"]).run().failed(5);
    assert!(
        refused.contains("read-only") || refused.contains("recovery"),
        "{refused}"
    );
    let target = format!("{} target_session_attrs=primary", standby.conn_string(DB));
    let way = super::connection::Way::to(&target);
    assert_eq!(way.as_psql(&standby), None);
    let way = super::connection::Way::to(target.replace("primary", "standby"));
    assert!(way.as_psql(&standby).is_some());
}

#[test]
fn a_destination_that_works_passes_its_check() {
    let receiver = Receiver::start(|_| Reply::status(200));
    let cluster = unconnected_cluster("", "x", &["outbox.http_allow = '127.0.0.1'"]);
    let url = receiver.url("/");
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    let connected =
        "select exists (select from outbox_destination_status where destination = 'hook' and state = 'connected')";
    wait_true(&cluster, "a worker to serve it", connected);
    let check = Ctl::new(&cluster, &["check", "hook", "--json"]).run().json();
    assert_eq!(check["ok"], true, "{check}");
    assert_eq!(Ctl::new(&cluster, &["check", "nowhere"]).run().code, 1);
}

#[test]
fn a_healthy_outbox_has_no_problem() {
    let cluster = Stage::new(&[]).cluster;
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    wait_published(&cluster, 1);
    let page = Ctl::new(&cluster, &["status"]).run().well();
    assert!(
        page.contains("No known problems.") && page.contains("connected"),
        "{page}"
    );
    assert!(page.lines().all(|line| line.chars().count() <= 120), "{page}");
    assert_eq!(seqs(&cluster, &[]), [0; 0]);
    assert_eq!(seqs(&cluster, &["--status", "published"]), [1]);
    Ctl::new(&cluster, &["check"]).run().well();
}

#[test]
fn a_monitor_reads_no_payload_and_changes_nothing() {
    let cluster = quiet_cluster();
    one_of_each(&cluster);
    cluster.exec(
        DB,
        "create role watcher login; grant outbox_monitor to watcher; create role outsider login",
    );
    let of = |user: &str, args: &[&str]| {
        let string = format!("host=127.0.0.1 port={} user={user} dbname={DB}", cluster.port());
        let args: Vec<&str> = args.iter().copied().chain(["-d", &string]).collect();
        Ctl::bare(&args).run()
    };
    of("watcher", &["status"]).well();
    let rows = of("watcher", &["list", "--json"]).json_lines();
    assert_eq!(rows.len(), 6);
    assert!(
        rows.iter().all(|row| row["type"].is_null()),
        "the type is part of the event"
    );
    let page = of("watcher", &["show", "5"]).well();
    assert!(page.contains("The event is not shown"), "{page}");
    for args in [
        &["retry", "5", "--yes"][..],
        &["discard", "5", "--yes"],
        &["pause"],
        &["replay", "--from", "1", "--yes"],
        &["list", "--type", "T"],
    ] {
        let refused = of("watcher", args).failed(5);
        assert!(refused.contains("outbox_admin"), "{args:?}: {refused}");
    }
    let by_type = of("watcher", &["list", "--type", "T"]).failed(5);
    assert!(by_type.contains("cannot filter messages by their events"), "{by_type}");
    let refused = of("outsider", &["status"]).failed(5);
    assert!(refused.contains("GRANT outbox_monitor"), "{refused}");
}

#[test]
fn a_reader_that_closes_the_pipe_after_one_line_causes_no_error() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', n::text) from generate_series(1, 5000) n",
    );
    let mut child = Command::new(support::program::outboxctl())
        .args(["list", "--limit", "5000", "-d", &cluster.conn_string(DB)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start outboxctl");
    let mut first = String::new();
    BufReader::new(child.stdout.take().expect("its output"))
        .read_line(&mut first)
        .expect("a line");
    assert!(first.contains("seq"), "{first}");
    let output = child.wait_with_output().expect("its end");
    assert!(
        output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("panic"),
        "{output:?}"
    );
}

#[test]
fn completions_and_man_pages_know_every_command() {
    let page = Ctl::bare(&["man"]).run().well();
    for command in ["status", "list", "retry", "relay"] {
        assert!(page.contains(command), "{command}");
        for shell in ["bash", "zsh", "fish"] {
            assert!(
                Ctl::bare(&["completions", shell]).run().well().contains(command),
                "{shell} {command}"
            );
        }
    }
    let directory = support::workdir::ServerDir::create("man");
    Ctl::bare(&["man", "--to", directory.path().to_str().expect("UTF-8")])
        .run()
        .well();
    let list = std::fs::read_to_string(directory.path().join("outboxctl-list.1")).expect("a page for each command");
    assert!(list.contains("newest\\-first"), "{list}");
    directory.finish();
    let version = Ctl::bare(&["--version"]).run().well();
    assert_eq!(version, format!("outboxctl {}\n", env!("CARGO_PKG_VERSION")));
}

/// The top-level names of a document, in its order.
fn names(document: &Value) -> Vec<&str> {
    let object = document.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}

#[test]
fn the_docs_list_the_keys_of_each_document() {
    let cluster = quiet_cluster();
    one_of_each(&cluster);
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/outboxctl.md")).expect("the page");
    let row = |command: &str| {
        let start = format!("| `{command}`");
        let keys = page.split("## Output").nth(1).expect("a chapter on output");
        keys.lines()
            .find(|line| line.starts_with(&start))
            .unwrap_or_else(|| panic!("no row for {command}"))
    };
    let named = |command: &str, document: &Value| {
        for name in names(document) {
            assert!(
                row(command).contains(&format!("`{name}`")),
                "{command}: {name} in {}",
                row(command)
            );
        }
    };
    let json = |args: &[&str]| {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        let ran = Ctl::new(&cluster, &args).run();
        serde_json::from_str::<Value>(ran.out.lines().next().expect("a document")).expect("JSON")
    };
    let status = json(&["status"]);
    named("status", &status);
    named("status", &status["messages"]);
    named("status", &status["problems"][0]);
    let check = json(&["check"]);
    named("check", &check);
    named("check", &check["steps"][0]);
    let list = json(&["list"]);
    named("list", &list);
    let show = json(&["show", "5"]);
    named("show", &show);
    for name in names(&show["messages"][0]) {
        let name = format!("`{name}`");
        assert!(
            row("show").contains(&name) || row("list").contains(&name),
            "show: {name}"
        );
    }
    named("show", &show["messages"][0]["why"][0]);
    named("retry", &json(&["retry", "--type", "none"]));
    let by_seq = json(&["discard", "5", "--dry-run"]);
    named("retry", &by_seq);
    named("retry", &by_seq["messages"][0]);
    named("pause", &json(&["resume"]));
    named("version", &json(&["version"]));
}

#[test]
fn json_that_is_deep_or_large_is_shown_as_it_is() {
    let cluster = quiet_cluster();
    let nested = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
    cluster.exec(DB, "select outbox_publish('Flat', '{\"a\": {\"b\": 1}}')");
    let flat = Ctl::new(&cluster, &["show", "1"]).run().well();
    assert!(flat.contains("\"b\": 1\n"), "{flat}");
    let mut client = cluster.connect(DB);
    client.run("set max_stack_depth = '6MB'"); // that the server reads so many levels at all
    for levels in [5_000, 20_000] {
        let seq: i64 = client.value(&format!("select outbox_publish('Deep', '{}')", nested(levels)));
        let shown = Ctl::new(&cluster, &["show", &seq.to_string()]).run().well();
        let brackets = shown.matches('[').count();
        assert!(
            brackets >= levels && shown.len() < 10 * levels,
            "{levels}: {} bytes",
            shown.len()
        );
    }
    let wide = format!("[{}1]", "1,".repeat(1_000_000));
    let seq: i64 = cluster.query_one(DB, &format!("select outbox_publish('Wide', '{wide}')"));
    let shown = Ctl::new(&cluster, &["show", &seq.to_string()]).run().well();
    assert!(shown.len() < 4_000_000, "{} bytes", shown.len());
}

#[test]
fn messages_are_listed_by_the_cause_of_their_failure() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create server hook foreign data wrapper outbox_http options (url 'https://hooks.example/');
         select outbox_publish('T', '{}', destination => case when n > 60 then 'hook' else 'default' end,
                               available_at => now() + interval '1 day') from generate_series(1, 70) n;
         update outbox_waiting set state = 'b', attempts = 2, last_error = 'order-' || seq || ' is unknown' where seq <= 68;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
           select seq, enqueued_at, 15, partition, destination, key, 'refused' from outbox_waiting where seq <= 3;
         delete from outbox_waiting where seq <= 3",
    );
    let causes = Ctl::new(&cluster, &["list", "--by-cause", "--json"]).run().json_lines();
    let shown: Vec<Value> = causes
        .iter()
        .map(|cause| json!([cause["messages"], cause["status"], cause["destination"], cause["error"]]))
        .collect();
    assert_eq!(
        shown,
        [
            json!([57, "retrying", "default", "order-# is unknown"]),
            json!([8, "retrying", "hook", "order-# is unknown"]),
            json!([3, "dead", "default", "refused"])
        ]
    );
    assert!(
        causes.iter().all(|cause| cause["oldest_age_s"].as_f64() > Some(0.0)),
        "{causes:?}"
    );
    let table = Ctl::new(&cluster, &["list", "--by-cause", "--destination", "hook"])
        .run()
        .well();
    assert!(
        table.starts_with("messages  status") && table.contains("order-# is unknown"),
        "{table}"
    );
}
