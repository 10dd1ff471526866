//! max_pending: enqueueing is refused when a destination is full, and only then.

use super::publish;
use postgres::error::SqlState;
use support::oracle::judge;
use support::*;
use support::{Broker, Cluster, StopMode, fresh_names};

/// A cluster whose default destination is paused and has the limit `max_pending`, and the queue of the destination.
fn paused_cluster(broker: &Broker, max_pending: u32) -> (Cluster, String) {
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &[&format!("outbox.max_pending = {max_pending}")]);
    cluster.exec(DB, "select outbox_pause()");
    wait_stats(
        &cluster,
        "default",
        &format!("pending = 0 and max_pending = {max_pending}"),
    );
    (cluster, queue)
}

#[track_caller]
fn assert_full(cluster: &Cluster, sql: &str) {
    let error = refused(cluster, sql);
    assert_eq!(
        error.code(),
        &SqlState::CONFIGURATION_LIMIT_EXCEEDED,
        "{sql}: {error:?}"
    );
    assert!(
        error.hint().is_some_and(|hint| hint.contains("max_pending")),
        "{error:?}"
    );
    assert!(
        error.detail().is_some_and(|detail| detail.contains("max_pending is")),
        "{error:?}"
    );
}

#[test]
fn a_full_destination_refuses_every_way_to_enqueue_until_it_has_room() {
    let broker = Broker::shared();
    let (cluster, queue) = paused_cluster(broker, 5);
    cluster.exec(
        DB,
        "create table journal (seq bigint); select outbox_attach('journal', key => '''k''');
         create table thing (id int primary key); select outbox_capture('thing');
         create server spare foreign data wrapper outbox_amqp options (max_pending '0')",
    );
    let mut sent: Vec<_> = (1..=5).map(|n| publish(&cluster, format!("m{n}"))).collect();
    cluster.draw_seqs(99);
    for sql in [
        "select outbox_publish('T', '{}')",
        "select outbox_enqueue(99, 'k')",
        "select outbox_enqueue_many('{98,99}', 'k')",
        "select outbox_store('{}')",
        "insert into journal values (99)",
        "insert into thing values (1)",
    ] {
        assert_full(&cluster, sql);
    }
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_events"),
        5,
        "a refused message left a row"
    );
    assert_eq!(cluster.query_one::<i64>(DB, "select outbox_enqueue_many('{}')"), 0);
    let problem = wait_for_problem(&cluster, "room");
    assert!(
        problem.contains("5 of 5 messages pending") && problem.contains("is refused"),
        "{problem}"
    );
    wait_stats(&cluster, "spare", "pending = 0 and max_pending is null");
    sent.push(publish(&cluster, Event::new("spare").key("s").to("spare"))); // this destination has no limit

    cluster.exec(DB, "select outbox_resume()");
    wait_stats(&cluster, "default", "pending = 0");
    sent.push(publish(&cluster, "m6"));
    wait_published(&cluster, 7);
    wait_healthy(&cluster, "room");
    judge(&sent, &arrived(&all_of(broker, &queue))).assert_perfect();
}

#[test]
fn a_transaction_counts_its_messages_without_those_it_rolled_back() {
    let broker = Broker::shared();
    let (cluster, _) = paused_cluster(broker, 4);
    let publish = "select outbox_publish('T', '{}')";
    let (mut one, mut other) = (cluster.connect(DB), cluster.connect(DB));
    one.run(&format!(
        "begin; {publish}; savepoint s; {publish}; {publish}; rollback to s"
    ));
    for _ in 0..3 {
        one.run(&format!("savepoint s; {publish}; release s"));
    }
    let error = one.batch_execute(publish).expect_err("the fifth");
    let error = error.as_db_error().expect("an error of the server");
    assert_eq!(error.code(), &SqlState::CONFIGURATION_LIMIT_EXCEEDED);
    assert!(
        error.hint().is_some_and(|hint| hint.contains("smaller pieces")),
        "{error:?}"
    );
    one.run("rollback");

    // Open transactions do not see each other, so together they may exceed the limit.
    for client in [&mut one, &mut other] {
        client.run(&format!("begin; {publish}; {publish}; {publish}"));
    }
    one.run("commit");
    other.run("commit");
    wait_stats(&cluster, "default", "pending = 6");
    assert_full(&cluster, publish);
}

#[test]
fn the_counter_follows_manual_actions_and_is_right_after_a_crash() {
    let broker = Broker::shared();
    let (cluster, _) = paused_cluster(broker, 4);
    for n in 1..=4 {
        publish(&cluster, Event::new(format!("m{n}")).key(format!("k{n}")));
    }
    let is_right = |what: &str| {
        let (counter, rows): (i64, i64) = {
            let row = cluster.connect(DB).query_one(
                "select pending, (select count(*) from outbox) + (select count(*) from outbox_waiting)
                 from outbox_destination_status where destination = 'default'",
                &[],
            );
            let row = row.expect("the counts");
            (row.get(0), row.get(1))
        };
        assert_eq!(counter, rows, "{what}");
    };
    assert_full(&cluster, "select outbox_publish('T', '{}')");
    cluster.exec(DB, "select outbox_discard(1); select outbox_discard(2)");
    is_right("discard");
    cluster.exec(DB, "select outbox_publish('T', '{}', available_at => now() + '1 h')");
    is_right("scheduled");
    cluster.exec(DB, "select outbox_purge(null, 'k3', dry_run => false)");
    is_right("purge");
    cluster.exec(
        DB,
        "update outbox set claim_token = null; with gone as (delete from outbox where seq = 4 returning *)
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
         select seq, enqueued_at, 1, partition, destination, key, 'by hand' from gone;
         select outbox_internal.record_pending('default', -1)",
    );
    is_right("a dead letter");
    cluster.exec(DB, "select outbox_retry_where(seq_from => 1, dry_run => false)");
    is_right("retry_where");
    cluster.exec(DB, "select outbox_enqueue_many('{3}', 'k')");
    is_right("enqueue_many");
    // A message that was accepted once may be replayed even if the destination is full.
    assert_eq!(
        cluster.query_one::<i64>(DB, "select outbox_replay(seq_from => 1, dry_run => false)"),
        2
    );
    is_right("replay");
    assert_full(&cluster, "select outbox_publish('T', '{}')");

    cluster.stop(StopMode::Immediate);
    cluster.start_again();
    wait_stats(&cluster, "default", "pending is not null and max_pending = 4");
    is_right("after a crash");
    assert_full(&cluster, "select outbox_publish('T', '{}')");
}

#[test]
fn a_limit_changes_without_a_new_connection_and_a_new_extension_starts_at_zero() {
    let stage = Stage::new(&[]);
    let (other, _) = fresh_names();
    stage.broker.declare_exchange(&other, "fanout", true);
    stage.exec(
        DB,
        &format!("create server audit foreign data wrapper outbox_amqp options (exchange '{other}', max_pending '1')"),
    );
    wait_stats(
        &stage,
        "audit",
        "state = 'connected' and max_pending = 1 and pending = 0",
    );
    let since = "select since::text from outbox_destination_status where destination = 'audit'";
    let before: String = stage.query_one(DB, since);
    stage.exec(DB, "alter server audit options (set max_pending '2')");
    wait_stats(&stage, "audit", "max_pending = 2");
    assert_eq!(stage.query_one::<String>(DB, since), before);

    stage.exec(DB, "select outbox_pause('audit'); select outbox_pause()");
    let publish = "select outbox_publish('T', '{}', destination => 'audit')";
    stage.exec(DB, &format!("{publish}; {publish}"));
    assert_full(&stage, publish);
    stage.exec(DB, "drop extension outbox cascade; create extension outbox");
    stage.exec(
        DB,
        &format!("create server audit foreign data wrapper outbox_amqp options (exchange '{other}', max_pending '2')"),
    );
    wait_stats(&stage, "audit", "max_pending = 2 and pending = 0");
    stage.exec(DB, publish);
}

/// The steps of docs/operate/sizes.md.
#[test]
fn truncate_leaves_no_trace_and_the_pending_messages_are_counted_again() {
    let stage = Stage::new(&["outbox.max_pending = 5"]);
    stage.exec(DB, "create role app in role outbox_admin; select outbox_pause()");
    wait_stats(&stage, "default", "max_pending = 5 and state = 'paused'");
    let publish = "select outbox_publish('T', '1', 'o', n::text) from generate_series(1, 5) n";
    stage.exec(DB, publish);
    let full = refused(&stage, "select outbox_publish('T', '2')");
    assert_eq!(full.code().code(), "53400");
    for table in ["outbox", "outbox_waiting", "outbox_dead", "outbox_events"] {
        let error = refused(&stage, &format!("set role app; truncate {table}"));
        assert_eq!(
            error.code().code(),
            "42501",
            "only the owner and superusers may truncate"
        );
        stage.exec(DB, &format!("truncate {table}"));
    }
    // Maintenance counts once a minute, and when settings have changed.
    stage.exec(DB, &format!("alter database {DB} set outbox.batch_size = 10"));
    wait_stats(&stage, "default", "pending = 0");
    assert_eq!(stage.query_one::<i64>(DB, "select pending from outbox_status"), 0);
    let traces =
        "select (select count(*) from outbox_history) + (select count(*) from outbox_audit where action <> 'pause')";
    assert_eq!(stage.query_one::<i64>(DB, traces), 0, "no trace");

    // The destination accepts messages again. Messages whose events are truncated become dead letters, and nothing is
    // sent.
    stage.exec(DB, publish);
    stage.exec(DB, "truncate outbox_events; select outbox_resume()");
    wait_true(
        &stage,
        "five dead letters",
        "select count(*) = 5 from outbox_dead where reason like '%no event%'",
    );
    stage.exec(DB, "select outbox_publish('T', '3')");
    wait_published(&stage, 1);
    let sent = stage.all();
    assert_eq!((sent.len(), sent[0].json()["payload"].clone()), (1, 3.into()));
}

#[test]
fn without_preload_messages_are_not_counted_and_none_is_refused() {
    let cluster = Cluster::builder().preload(false).conf("outbox.max_pending = 1").start();
    cluster.exec(DB, "create extension outbox");
    cluster.exec(DB, "select outbox_publish('T', '{}') from generate_series(1, 3)");
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox"), 3);
}
