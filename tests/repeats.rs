//! Publishing an id once: what a caller that repeats itself gets, alone, at the same time, and in an older snapshot. On
//! a real Postgres.

use postgres::IsolationLevel;
use postgres::error::SqlState;
use std::thread;
use support::{DB, Session, quiet_cluster, refused, wait_true};

const ID: &str = "01a1fc85-047b-72cc-b926-c7a014466422";

fn publish(label: &str) -> String {
    format!("select outbox_publish('T', '{{\"label\": \"{label}\"}}', id => '{ID}', if_exists => 'skip')")
}

#[test]
fn a_repeated_id_enqueues_nothing_and_returns_the_seq_of_the_first() {
    let cluster = quiet_cluster();
    let mut client = cluster.connect(DB);
    let first: i64 = client.value(&publish("one"));
    for again in [
        publish("two"),
        format!(
            "select outbox_publish('Other', '{{}}', 'order', '7', id => '{ID}', if_exists => 'skip', available_at => '2999-01-01')"
        ),
        format!("select outbox_store('x', id => '{ID}', if_exists => 'skip')"),
    ] {
        assert_eq!(client.value::<i64>(&again), first, "{again}");
    }
    let mut own = client.transaction().expect("begin");
    own.run("delete from outbox");
    assert_eq!(
        own.value::<i64>(&publish("three")),
        first,
        "an ended message is not sent again"
    );
    own.rollback().expect("rollback");
    let stored: String = client.value(
        "select string_agg(payload ->> 'label', ',') || count(*) || (select count(*) from outbox) from outbox_events",
    );
    assert_eq!(stored, "one11");
    // A new id is enqueued like any other, with all that a publish can say.
    let other: i64 =
        client.value("select outbox_publish('T', '{}', 'order', '7', id => gen_random_uuid(), if_exists => 'skip')");
    assert_eq!(
        client.value::<String>(&format!("select key from outbox where seq = {other}")),
        "order:7"
    );

    let error = refused(&cluster, &format!("select outbox_publish('T', '{{}}', id => '{ID}')"));
    assert_eq!(error.code(), &SqlState::UNIQUE_VIOLATION);
    assert!(
        error.hint().is_some_and(|hint| hint.contains("if_exists => 'skip'")),
        "{error:?}"
    );
    for (arguments, message) in [
        ("if_exists => 'skip'", "there is no id"),
        ("if_exists => 'ignore'", "is unknown"),
    ] {
        let error = refused(&cluster, &format!("select outbox_publish('T', '{{}}', {arguments})"));
        assert_eq!(error.code(), &SqlState::INVALID_PARAMETER_VALUE);
        assert!(error.message().contains(message), "{error:?}");
    }
}

#[test]
fn of_two_sessions_that_publish_an_id_the_second_waits_for_the_first() {
    let cluster = quiet_cluster();
    for commits in [true, false] {
        let (mut first, mut second) = (cluster.connect(DB), cluster.connect(DB));
        first.run("delete from outbox; delete from outbox_events");
        first.run("begin");
        let seq: i64 = first.value(&publish("first"));
        let waits = thread::spawn(move || second.value::<i64>(&publish("second")));
        wait_true(
            &cluster,
            "the second session to wait",
            "select exists (select from pg_locks where locktype = 'transactionid' and not granted)",
        );
        first.run(if commits { "commit" } else { "rollback" });
        let found = waits.join().expect("the second session");
        assert_eq!(found == seq, commits);
        let label: String = first.value("select payload ->> 'label' from outbox_events join outbox using (seq)");
        assert_eq!(label, if commits { "first" } else { "second" });
    }
}

#[test]
fn a_snapshot_that_does_not_see_the_first_fails_and_can_be_run_again() {
    let cluster = quiet_cluster();
    let (mut client, mut other) = (cluster.connect(DB), cluster.connect(DB));
    let mut old = client
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .start()
        .expect("begin");
    old.run("select 1");
    let seq: i64 = other.value(&publish("one"));
    let error = old.query_one(&publish("two"), &[]).expect_err("an older snapshot");
    assert_eq!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE));
    old.rollback().expect("rollback");
    assert_eq!(client.value::<i64>(&publish("two")), seq);
}

/// The event is written by a statement, so what a user adds to the table takes effect.
#[test]
fn an_event_that_a_trigger_leaves_out_is_an_error_and_no_repetition() {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create function nothing() returns trigger language plpgsql as 'begin return null; end';
         create trigger t before insert on outbox_events for each row execute function nothing()",
    );
    let error = refused(&cluster, &publish("one"));
    assert_eq!(error.code(), &SqlState::TRIGGERED_ACTION_EXCEPTION);
}
