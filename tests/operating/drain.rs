//! Tests that outbox_drain() waits for the messages that can be delivered, and for nothing else.

use postgres::error::SqlState;
use serde_json::Value;
use support::{Broker, fresh_names};

use support::*;

#[test]
fn drain_waits_for_deliverable_messages_and_leaves_the_others() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "routable.#");
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.retry_backoff = '1h'"]);
    cluster.draw_seqs(4713);
    let mut client = cluster.connect(DB);
    client.run(
        "select outbox_publish('Later', '{}', 'routable', '1', available_at => '2999-01-01');
             select outbox_publish('Backs off', '{}', 'nowhere', '1');
             select outbox_enqueue(4711, 'dead'), outbox_enqueue_many('{4712,4713}', 'dead')",
    );
    wait_true(
        &cluster,
        "one message that backs off, and one dead letter",
        "select exists (select from outbox_waiting where state = 'b') and exists (select from outbox_dead)",
    );
    client.run(
        "select outbox_publish('Behind', '{}', 'nowhere', '1');
             select outbox_publish('T', '{}', 'routable', n::text) from generate_series(1, 5000) n",
    );
    let left: i64 = client.value("select outbox_drain('1 min')");
    assert_eq!(left, 0);
    assert_eq!(broker.queue_len(&queue), 5000);
    let waiting = "select string_agg(state::text || coalesce(key, '-'), ' ' order by seq) from outbox_waiting";
    assert_eq!(
        cluster.query_one::<String>(DB, waiting),
        "gdead gdead sroutable:1 bnowhere:1 gnowhere:1"
    );
}

#[test]
fn drain_reports_the_number_of_messages_left_and_can_be_cancelled() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &[]);
    let mut client = cluster.connect(DB);
    client.run("select outbox_publish('T', '{}') from generate_series(1, 3)");
    let left: i64 = client.value("select outbox_drain('200 ms')");
    assert_eq!(left, 3);
    client.run("set statement_timeout = '300ms'");
    let cancelled = client
        .batch_execute("select outbox_drain('1 hour')")
        .expect_err("the drain must be canceled");
    assert_eq!(cancelled.code(), Some(&SqlState::QUERY_CANCELED), "{cancelled:?}");
}

/// In such a transaction drain would wait for itself.
#[test]
fn drain_is_refused_where_it_could_never_finish() {
    let cluster = unconnected_cluster("amqp://127.0.0.1:1", "x", &[]);
    let mut client = cluster.connect(DB);
    client.run("set statement_timeout = '20s'");
    for begin in [
        "begin; select outbox_publish('T', '{}')",
        "begin isolation level repeatable read",
    ] {
        client.run(begin);
        let refused = client.batch_execute("select outbox_drain('1 hour')").expect_err(begin);
        assert_eq!(refused.code(), Some(&SqlState::ACTIVE_SQL_TRANSACTION), "{refused:?}");
        assert!(refused.as_db_error().is_some_and(|error| error.hint().is_some()));
        client.run("rollback");
    }
}
