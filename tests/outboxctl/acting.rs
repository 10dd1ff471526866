//! Tests that outboxctl does what it is asked, changes no more than it announced, and ends as a script needs it.

use super::{Ctl, quiet_cluster};
use serde_json::{Value, json};
use support::Cluster;
use support::*;

/// Dead letters 1 to 6: alternately of types A and B, each with a different key, the first three unroutable.
fn dead_letters(cluster: &Cluster) {
    cluster.exec(
        DB,
        "select outbox_publish(case n % 2 when 1 then 'A' else 'B' end, '{}', 'order', n::text) from generate_series(1, 6) n;
         insert into outbox_dead (seq, enqueued_at, died_at, attempts, partition, destination, key, reason)
         select seq, enqueued_at, '2030-01-01Z'::timestamptz + seq * interval '1 day', 15, partition, destination, key,
                case when seq <= 3 then 'unroutable: 312 NO_ROUTE' else 'refused' end
         from outbox;
         delete from outbox",
    );
}

fn seqs(cluster: &Cluster, table: &str) -> Vec<i64> {
    cluster.query_one(
        DB,
        &format!("select coalesce(array_agg(seq order by seq), '{{}}') from {table}"),
    )
}

fn dry(cluster: &Cluster, args: &[&str]) -> Value {
    let all: Vec<&str> = args.iter().copied().chain(["--dry-run", "--json"]).collect();
    Ctl::new(cluster, &all).run().json()
}

#[test]
fn each_criterion_counts_its_messages_and_changes_nothing() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    for (criteria, wanted) in [
        (&["--type", "A"][..], 3),
        (&["--aggregate-type", "order"], 6),
        (&["--aggregate-id", "4"], 1),
        (&["--key", "order:4"], 1),
        (&["--error-like", "unroutable%"], 3),
        (&["--destination", "default"], 6),
        (&["--from", "2", "--to", "4"], 3),
        (&["--from", "2", "--max", "2"], 2),
        (&["--since", "2030-01-05T00:00Z"], 3),
        (&["--until", "2030-01-05T00:00Z"], 3),
        (&["--since", "1h"], 6),
        (&["--type", "A", "--error-like", "unroutable%"], 2),
        (&["--type", "none"], 0),
    ] {
        for verb in ["retry", "discard"] {
            let args: Vec<&str> = [verb].iter().chain(criteria).copied().collect();
            let counted = dry(&cluster, &args);
            assert_eq!(
                counted,
                json!({ "action": verb, "matched": wanted, "done": 0, "dry_run": true }),
                "{args:?}"
            );
        }
    }
    assert_eq!(seqs(&cluster, "outbox_dead"), [1, 2, 3, 4, 5, 6]);
    let none = Ctl::new(&cluster, &["retry", "--yes"]).run().failed(5);
    assert!(none.contains("no criterion"), "{none}");
}

#[test]
fn attempts_below_selects_messages_with_fewer_attempts() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    cluster.exec(DB, "update outbox_dead set attempts = seq");
    for (limit, wanted) in [("1", 0), ("2", 1), ("4", 3), ("100", 6)] {
        for verb in ["retry", "discard"] {
            let counted = dry(&cluster, &[verb, "--attempts-below", limit]);
            assert_eq!(counted["matched"], wanted, "{verb} --attempts-below {limit}");
        }
    }
    assert_eq!(
        dry(&cluster, &["retry", "--attempts-below", "4", "--type", "A"])["matched"],
        2
    );
    Ctl::new(&cluster, &["retry", "--attempts-below", "4", "--yes"])
        .run()
        .well();
    assert_eq!(seqs(&cluster, "outbox"), [1, 2, 3]);
    assert_eq!(seqs(&cluster, "outbox_dead"), [4, 5, 6]);
    Ctl::new(&cluster, &["discard", "--attempts-below", "6", "--yes"])
        .run()
        .well();
    assert_eq!(seqs(&cluster, "outbox_dead"), [6]);
    let refused = Ctl::new(&cluster, &["retry", "--attempts-below", "many"]).run();
    assert!(refused.failed(2).contains("--attempts-below"));
}

#[test]
fn without_a_terminal_and_without_yes_nothing_is_changed() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    for args in [&["retry", "--type", "A"][..], &["discard", "1"], &["retry", "1", "2"]] {
        let refused = Ctl::new(&cluster, args).run().failed(5);
        assert!(
            refused.contains("--yes") && refused.contains("nothing is changed"),
            "{refused}"
        );
    }
    assert_eq!(seqs(&cluster, "outbox_dead"), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn retry_and_discard_change_what_was_counted_and_audit_the_reason() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    let retried = Ctl::new(
        &cluster,
        &[
            "retry",
            "--error-like",
            "unroutable%",
            "--reason",
            "bound again",
            "--yes",
            "--json",
        ],
    )
    .run()
    .json();
    assert_eq!(
        retried,
        json!({ "action": "retry", "matched": 3, "done": 3, "dry_run": false })
    );
    assert_eq!(seqs(&cluster, "outbox"), [1, 2, 3]);
    let discarded = Ctl::new(&cluster, &["discard", "--type", "B", "--reason", "withdrawn", "-y"])
        .run()
        .well();
    assert!(discarded.contains("Discarded: 2 dead letters"), "{discarded}");
    assert_eq!(seqs(&cluster, "outbox_history"), [4, 6]);
    let audit: Value = cluster.query_one(
        DB,
        "select jsonb_agg(jsonb_build_array(action, count, reason) order by at) from outbox_audit",
    );
    assert_eq!(audit, json!([["retry", 3, "bound again"], ["discard", 2, "withdrawn"]]));
    Ctl::new(&cluster, &["retry", "5", "--reason", "a single message", "--yes"])
        .run()
        .well();
    let last = "select reason from outbox_audit order by at desc limit 1";
    assert_eq!(cluster.query_one::<String>(DB, last), "a single message");
    let nothing = Ctl::new(&cluster, &["discard", "--type", "B", "--yes"]).run().well();
    assert!(nothing.contains("nothing is changed"), "{nothing}");
}

#[test]
fn retry_names_the_messages_that_wait_for_their_next_attempt_and_tries_them_on_request() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "select outbox_publish(case n % 2 when 1 then 'A' else 'B' end, '{}', available_at => now() + interval '1 day')
         from generate_series(1, 5) n;
         update outbox_waiting set state = 'b', attempts = 7,
                last_error = case when seq <= 3 then 'HTTP 500' else 'timeout' end where seq < 5",
    );
    let due = "select coalesce(array_agg(seq order by seq), '{}') from outbox_waiting where due_at <= now()";
    let run = |args: &[&str]| Ctl::new(&cluster, &[&["retry"], args].concat()).run();
    let told = run(&["--error-like", "HTTP%"]);
    assert!(
        told.out.contains("0 dead letters matched; nothing is changed."),
        "{told:?}"
    );
    assert!(
        told.err
            .contains("3 messages are retrying: add --retrying for another attempt now"),
        "{told:?}"
    );
    let refused = run(&["--retrying", "--yes"]).failed(5);
    assert!(refused.contains("no criterion"), "{refused}");
    for (criteria, wanted) in [
        (&["--from", "1"][..], 4), // the fifth is scheduled
        (&["--error-like", "HTTP%", "--type", "A"], 2),
        (&["--from", "2", "--to", "3"], 2),
        (&["--from", "1", "--max", "3"], 3),
        (&["--destination", "audit"], 0),
    ] {
        let counted = dry(&cluster, &[&["retry", "--retrying"], criteria].concat());
        assert_eq!(counted["matched"], wanted, "{criteria:?}");
    }
    assert_eq!(cluster.query_one::<Vec<i64>>(DB, due), [] as [i64; 0]);
    let done = run(&["--retrying", "--type", "A", "--reason", "repaired", "--yes"]).well();
    assert_eq!(done, "Retried: 2 messages.\n");
    assert_eq!(cluster.query_one::<Vec<i64>>(DB, due), [1, 3]);
    let audit = "select array_agg(filter->>'seq' || ' ' || reason order by at) from outbox_audit";
    assert_eq!(
        cluster.query_one::<Vec<String>>(DB, audit),
        ["1 repaired", "3 repaired"]
    );
}

#[test]
fn a_message_is_found_by_its_seq_at_any_destination() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    cluster.exec(
        DB,
        "create server bus foreign data wrapper outbox_amqp options (exchange 'x');
         update outbox_dead set destination = 'bus' where seq = 2;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, reason)
         select 3, now(), 1, 0, 'bus', 'refused'",
    );
    let ran = Ctl::new(&cluster, &["retry", "1", "2", "3", "99", "--yes", "--json"]).run();
    assert_eq!(ran.code, 1, "{ran:?}");
    let document: Value = serde_json::from_str(&ran.out).expect("JSON");
    assert_eq!((&document["matched"], &document["done"]), (&json!(2), &json!(2)));
    let messages = document["messages"].as_array().expect("messages");
    let of = |seq: i64| {
        messages
            .iter()
            .find(|message| message["seq"] == seq)
            .expect("each has its answer")
    };
    assert_eq!((&of(1)["done"], &of(2)["destination"]), (&json!(true), &json!("bus")));
    assert!(
        of(3)["error"].as_str().expect("why").contains("bus and default"),
        "{messages:?}"
    );
    assert!(
        of(99)["error"].as_str().expect("why").contains("no message"),
        "{messages:?}"
    );
    Ctl::new(&cluster, &["discard", "3", "--destination", "bus", "--yes"])
        .run()
        .well();
    assert_eq!(
        seqs(&cluster, "outbox_dead"),
        [3, 4, 5, 6],
        "the message to default is still dead"
    );
    let both = Ctl::new(&cluster, &["retry", "99", "4", "--yes"]).run();
    assert_eq!(both.code, 1);
    assert!(
        both.err.contains("message 99") && both.out.contains("Retried: 1 message"),
        "{both:?}"
    );
}

#[test]
fn a_question_about_seqs_names_the_destinations() {
    let cluster = quiet_cluster();
    dead_letters(&cluster);
    cluster.exec(
        DB,
        "create server bus foreign data wrapper outbox_amqp options (exchange 'x');
         update outbox_dead set destination = 'bus' where seq = 2",
    );
    for (seqs, question) in [
        (&["2"][..], "Discard 1 message to bus?"),
        (&["1", "2", "3"], "Discard 3 messages to bus and default?"),
    ] {
        let asked = Ctl::new(&cluster, &[&["discard"], seqs].concat()).run().failed(5);
        assert!(asked.contains(question), "{asked}");
    }
}

#[test]
fn a_message_in_flight_is_refused_and_the_others_are_discarded() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', n::text) from generate_series(1, 2) n;
         update outbox_partitions set lease_owner = 'w', lease_until = now() + interval '1 hour', lease_epoch = 7;
         update outbox set claim_token = 7 where seq = 1",
    );
    let ran = Ctl::new(&cluster, &["discard", "1", "2", "--yes"]).run();
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("in flight"), "{ran:?}");
    assert_eq!(seqs(&cluster, "outbox"), [1]);
}

#[test]
fn published_messages_are_replayed() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', n::text) from generate_series(1, 3) n",
    );
    wait_published(&stage, 3);
    assert_eq!(dry(&stage, &["replay", "--from", "2"])["matched"], 2);
    Ctl::new(&stage, &["replay", "--from", "2"]).run().failed(5);
    let replayed = Ctl::new(
        &stage,
        &[
            "replay",
            "--from",
            "2",
            "--since",
            "1h",
            "--reason",
            "lost index",
            "--yes",
        ],
    )
    .run()
    .well();
    assert!(replayed.contains("Replayed: 2 messages"), "{replayed}");
    wait_published(&stage, 5);
    assert_eq!(stage.all().len(), 5);
    let page = Ctl::new(&stage, &["show", "2", "--json"]).run().json();
    assert_eq!(
        page["messages"].as_array().map(Vec::len),
        Some(2),
        "it was published twice"
    );
}

#[test]
fn a_replay_by_key_does_not_read_all_events() {
    let cluster = support::quiet_cluster(); // maintenance reads events
    cluster.exec(
        DB,
        "insert into outbox_events (id, type, payload) select gen_random_uuid(), 'T', '{}' from generate_series(1, 60000);
         insert into outbox_history (seq, enqueued_at, published_at, attempts, partition, destination, key)
         select n, now(), now(), 0, 0, 'default', 'k' || n % 20000 from generate_series(1, 60000) n;
         delete from outbox_events where seq = 40007",
    );
    cluster.exec(DB, "vacuum analyze");
    cluster.exec(DB, "select pg_stat_reset()");
    let counted = Ctl::new(&cluster, &["replay", "--dry-run", "--json", "--key", "k7"])
        .run()
        .json();
    assert_eq!(counted["matched"], 2, "the event of the third is gone: {counted}");
    let read = "select sum(idx_tup_read)::bigint from pg_stat_user_indexes where relname = 'outbox_events'";
    wait_true(
        &cluster,
        "the session to report its statistics",
        &format!("select ({read}) > 0"),
    );
    let read: i64 = cluster.query_one(DB, read);
    assert!(read < 1000, "{read} entries of indexes of outbox_events read");
}

#[test]
fn a_destination_is_paused_with_a_reason_and_resumed() {
    let cluster = quiet_cluster();
    let paused = Ctl::new(
        &cluster,
        &["pause", "default", "--reason", "the broker moves", "--json"],
    )
    .run()
    .json();
    assert_eq!(
        paused,
        json!({ "action": "pause", "destination": "default", "changed": true })
    );
    assert_eq!(
        cluster.query_one::<String>(DB, "select reason from outbox_paused"),
        "the broker moves"
    );
    assert!(Ctl::new(&cluster, &["pause"]).run().well().contains("already"));
    assert!(
        Ctl::new(&cluster, &["resume", "--reason", "it has moved"])
            .run()
            .well()
            .contains("is resumed")
    );
    assert_eq!(Ctl::new(&cluster, &["resume", "--json"]).run().json()["changed"], false);
    let audit: Value = cluster.query_one(
        DB,
        "select jsonb_agg(jsonb_build_array(action, filter, reason, application_name) order by at) from outbox_audit",
    );
    let to = json!({ "destination": "default" });
    assert_eq!(
        audit,
        json!([
            ["pause", to, "the broker moves", "outboxctl"],
            ["resume", to, "it has moved", "outboxctl"]
        ])
    );
    let unknown = Ctl::new(&cluster, &["pause", "nowhere"]).run().failed(5);
    assert!(unknown.contains("nowhere") && unknown.contains("HINT"), "{unknown}");
}

#[test]
fn relay_delivers_in_stored_order_and_ends_with_0_or_1() {
    let conf = [
        "outbox.routing_key = '{type}'",
        "outbox.max_attempts = 1",
        "outbox.workers = 2",
    ];
    let stage = Stage::new(&conf);
    let shared = "select count(*) = 2 from outbox_worker_status where alive and partitions = 8";
    wait_true(&stage, "both workers to own their partitions", shared);
    pause(&stage);
    stage.exec(
        DB,
        "select outbox_publish('good', '{}', 'order', n::text) from generate_series(1, 40) n",
    );
    let first = Ctl::new(&stage, &["relay", "-l", "2"]).run().well();
    assert!(first.contains("2 of 2 messages published."), "{first}");
    wait_published(&stage, 2);
    let rest = Ctl::new(&stage, &["relay", "--json"]).run().json();
    assert_eq!(
        (&rest["messages"], &rest["published"], &rest["ok"]),
        (&json!(38), &json!(38), &json!(true))
    );
    let seqs: Vec<i64> = stage
        .all()
        .iter()
        .map(|delivery| delivery.json()["seq"].as_i64().expect("a seq"))
        .collect();
    assert_eq!(seqs, Vec::from_iter(1..=40));
    // An event that is missing can never be sent; the messages after it are delivered.
    stage.draw_seqs(4712);
    stage.exec(
        DB,
        "select outbox_enqueue(4711, 'key'); select outbox_publish('good', '{}', 'order', '41')",
    );
    let ran = Ctl::new(&stage, &["relay"]).run();
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("message 4711 to default: "), "{ran:?}");
    assert!(ran.out.contains("1 of 2 messages published; 1 given up."), "{ran:?}");
    // A role with relay rights only sees no tables, but gets the counts.
    stage.exec(
        DB,
        "create role relaying login; grant outbox_relay to relaying; select outbox_enqueue(4712, 'other')",
    );
    let string = format!("host=127.0.0.1 port={} user=relaying dbname={DB}", stage.port());
    let ran = Ctl::bare(&["relay", "-d", &string]).run();
    assert!(
        ran.code == 1 && ran.out.contains("0 of 1 message published; 1 given up."),
        "{ran:?}"
    );
}

#[test]
fn relay_without_a_worker_is_refused_with_an_explanation() {
    let cluster = quiet_cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    let refused = Ctl::new(&cluster, &["relay"]).run().failed(5);
    assert!(refused.contains("worker"), "{refused}");
}
