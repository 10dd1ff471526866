//! Tests of outbox_why(): each reason why a message is not delivered, with its word, its remedy, and a bounded cost.

use serde_json::Value;
use support::{Cluster, DB, Session, idle_cluster, quiet_cluster_with};

/// The reasons of a message, each as its word, sentence and remedy.
fn reasons(cluster: &Cluster, seq: i64) -> Vec<[String; 3]> {
    let sql = format!("select reason, why, coalesce(remedy, '') from outbox_why({seq})");
    let rows = cluster.connect(DB).query(&sql, &[]).expect("outbox_why");
    let text = |row: &postgres::Row, index: usize| row.get::<_, String>(index);
    rows.iter()
        .map(|row| [text(row, 0), text(row, 1), text(row, 2)])
        .collect()
}

/// The reasons of a message but that no worker runs here.
fn own_reasons(cluster: &Cluster, seq: i64) -> Vec<[String; 3]> {
    let mut found = reasons(cluster, seq);
    found.retain(|[reason, ..]| !matches!(reason.as_str(), "workers" | "destination"));
    found
}

fn words(found: &[[String; 3]]) -> Vec<&str> {
    found.iter().map(|[reason, ..]| reason.as_str()).collect()
}

/// Message 1 is ready, 2 is scheduled, 3 failed, 4 is behind 3, 5 is dead, 6 is behind 5, 7 is behind 1.
fn cluster() -> Cluster {
    let cluster = idle_cluster(&["max_prepared_transactions = 2"]);
    cluster.exec(
        DB,
        "select outbox_publish('T', '{}', 'order', k, available_at => case k when 'later' then now() + interval '1 day' end)
         from unnest('{one,later,failed,failed,dead,dead,one}'::text[]) with ordinality x (k, n) order by n;
         insert into outbox_waiting (seq, enqueued_at, due_at, attempts, partition, state, destination, key, last_error, error_code)
         select seq, enqueued_at, now() + interval '1 hour', 3, partition, 'b', destination, key, 'no queue', 'unroutable' from outbox where seq = 3;
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason, blocks)
         select seq, enqueued_at, 15, partition, destination, key, 'refused', true from outbox where seq = 5;
         delete from outbox where seq in (3, 5)",
    );
    cluster
}

#[test]
fn each_message_has_the_reasons_that_hold_it_back_the_most_specific_first() {
    let cluster = cluster();
    assert_eq!(words(&reasons(&cluster, 1))[0], "workers");
    let [[reason, why, remedy]] = &own_reasons(&cluster, 2)[..] else {
        panic!("not one reason")
    };
    assert!(
        reason == "scheduled" && why.starts_with("It is scheduled for 20"),
        "{why}"
    );
    assert_eq!(remedy, "select outbox_retry(2, 'default')");
    let [[reason, why, remedy]] = &own_reasons(&cluster, 3)[..] else {
        panic!("not one reason")
    };
    assert!(
        reason == "retrying" && why.contains("the next one is due at 20"),
        "{why}"
    );
    assert!(why.ends_with(": no queue"), "{why}");
    assert_eq!(
        remedy,
        "bind a queue to exchange \"x\" for routing key \"order.\"; then select outbox_retry(3, 'default')"
    );
    let dead = [
        "dead",
        "It was given up, and later messages of its key wait for it: refused",
    ];
    assert_eq!(own_reasons(&cluster, 5)[0][..2], dead);
    let both = "select outbox_retry(5, 'default'), or select outbox_discard(5, 'default')";
    assert_eq!(own_reasons(&cluster, 5)[0][2], both);
    for (seq, word, said, remedy) in [
        (
            4,
            "behind retrying",
            "message 3 of its key, which failed and is retried at ",
            "select outbox_retry(3, 'default')",
        ),
        (6, "behind dead", "message 5 of its key, which is dead: refused", both),
        (7, "behind", "message 1 of its key.", ""),
    ] {
        let found = own_reasons(&cluster, seq);
        assert_eq!(found[0][0], word, "{found:?}");
        assert!(found[0][1].contains(said) && found[0][2] == remedy, "{found:?}");
    }
    // It is typed as it is shown.
    assert!(cluster.query_one::<bool>(DB, &own_reasons(&cluster, 4)[0][2]));
    assert!(cluster.query_one::<bool>(DB, "select due_at <= now() from outbox_waiting where seq = 3"));

    cluster.exec(DB, "select outbox_pause('default', 'a move')");
    cluster.set_conf("outbox.enabled", "off");
    let mut open = cluster.connect(DB);
    open.run("begin; select outbox_publish('T', '{}', 'order', 'open')");
    let pid: i32 = open.value("select pg_backend_pid()");
    cluster.exec(
        DB,
        "begin; select outbox_publish('T', '{}', 'order', 'open'); prepare transaction 'it''s one'",
    );
    cluster.exec(DB, "select outbox_publish('T', '{}', 'order', 'after')");
    let last: i64 = cluster.query_one(DB, "select max(seq) from outbox_events");
    let found = support::wait_for("a transaction of more than a second", support::LONG, || {
        let found = own_reasons(&cluster, last);
        words(&found).contains(&"transaction").then_some(found)
    });
    assert_eq!(words(&found), ["enabled", "paused", "transaction"], "{found:?}");
    assert!(
        found[1][1].starts_with("Destination default is paused by ") && found[1][1].ends_with(": a move."),
        "{found:?}"
    );
    assert_eq!(found[1][2], "select outbox_resume('default')");
    assert_eq!(found[2][2], format!("end it, or select pg_terminate_backend({pid})"));
    open.run("rollback");
    let of_prepared = "COMMIT PREPARED 'it''s one', or ROLLBACK PREPARED 'it''s one'";
    support::wait_until("the remedy of a prepared transaction", support::LONG, || {
        own_reasons(&cluster, last)
            .iter()
            .any(|[.., remedy]| remedy == of_prepared)
    });
    cluster.exec(DB, "rollback prepared 'it''s one'");
}

#[test]
fn a_message_that_has_ended_or_does_not_exist_has_no_reason() {
    let cluster = cluster();
    cluster.exec(DB, "select outbox_discard(1)");
    assert_eq!(reasons(&cluster, 1), [[""; 3]; 0]);
    assert_eq!(reasons(&cluster, 4711), [[""; 3]; 0]);
    let elsewhere = "select count(*) from outbox_why(2, 'elsewhere')";
    assert_eq!(cluster.query_one::<i64>(DB, elsewhere), 0);
}

#[test]
fn a_monitor_may_ask_and_others_may_not() {
    let cluster = cluster();
    let sql = "set role watcher; select count(*) from outbox_why(2)";
    cluster.exec(DB, "create role watcher");
    support::refused(&cluster, sql);
    cluster.exec(DB, "grant outbox_monitor to watcher");
    cluster.exec(DB, sql);
}

/// Without statistics, too, as after a bulk load.
#[test]
fn the_question_costs_the_same_whatever_waits() {
    let cluster = quiet_cluster_with(&["autovacuum = off"]);
    let mut client = cluster.connect(DB);
    let mut blocks = |seq: i64| {
        let sql = format!("explain (analyze, buffers, format json, timing off) select * from outbox_why({seq})");
        let plan: Value = client.query_one(&sql, &[]).expect("a plan").get(0);
        let count = |name: &str| plan[0]["Plan"][name].as_i64().expect("a count");
        count("Shared Hit Blocks") + count("Shared Read Blocks")
    };
    let mut costs = Vec::new();
    for (from, to) in [(1, 12_000), (12_001, 200_000)] {
        cluster.exec(
            DB,
            &format!(
                "insert into outbox (seq, partition, key) select n, 3, n::text from generate_series({from}, {to}) n;
                 insert into outbox_waiting (seq, destination, partition, key, state, due_at, enqueued_at)
                 select 1000000 + n, 'default', 3, n::text, 's', now() + interval '1 day', now() from generate_series({from}, {to}) n"
            ),
        );
        costs.push([to, 1_000_000 + to].map(|seq| {
            blocks(seq); // what is read once in a session
            blocks(seq)
        }));
    }
    for (few, many) in costs[0].iter().zip(&costs[1]) {
        assert!(
            *many <= few + few / 5 + 100,
            "{few} blocks with 12,000, {many} with 200,000"
        );
    }
}
