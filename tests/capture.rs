//! Every write to a captured table makes its event, and the rows of an attached table are enqueued, for any kind of
//! table and any writer. One file per topic: tables, nested statements, rights, dumps. pg_test/ checks the contents of
//! each event.

mod arguments;
mod nested;
mod order;
mod random;
mod restore;
mod rights;
mod tables;

use postgres::Client;
use serde_json::{Value, json};
use support::{Broker, Cluster};
use support::{
    DB, LONG, Session, Stage, all_of, exchange_and_queue, idle_cluster, pause, wait_connected, wait_drained,
    wait_published, wait_true,
};

/// A server with the extension and no worker: messages stay in the outbox.
pub fn server() -> Cluster {
    idle_cluster(&[])
}

/// The SQLSTATE and message of the error that a statement ends in.
pub fn refused(client: &mut Client, sql: &str) -> (String, String) {
    let error = client.batch_execute(sql).expect_err(sql);
    let error = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error:?}"));
    (error.code().code().to_owned(), error.message().to_owned())
}

/// Runs statements. Returns and deletes the events that they made, in order, as `type id payload`. Asserts that each
/// event is enqueued once with its aggregate as key.
pub fn events_of(client: &mut Client, sql: &str) -> Vec<String> {
    client.run(sql);
    taken(client)
}

pub fn taken(client: &mut Client) -> Vec<String> {
    let sql = "select e.type || ' ' || e.aggregate_id || ' ' || e.payload,
                      (select count(*) from outbox o where o.seq = e.seq and o.key = e.aggregate_type || ':' || e.aggregate_id)
               from outbox_events e order by e.seq";
    let mut transaction = client.transaction().expect("begin");
    run_in(&mut transaction, "reset role; reset session authorization");
    let rows = transaction.query(sql, &[]).expect("the events");
    run_in(&mut transaction, "delete from outbox; delete from outbox_events");
    transaction.commit().expect("commit");
    rows.iter()
        .map(|row| {
            let event: String = row.get(0);
            assert_eq!(row.get::<_, i64>(1), 1, "enqueued: {event}");
            event
        })
        .collect()
}

fn run_in(transaction: &mut postgres::Transaction, sql: &str) {
    transaction.run(sql);
}

// ---- delivery to the consumer ---------------------------------------------------------------------------------------

#[test]
fn each_write_of_a_transaction_reaches_the_consumer_in_order_and_a_rollback_does_not() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    client.run(
        "create table product (id int primary key, name text, price numeric, deleted_at timestamptz);
         select outbox_capture('product', soft_delete_column => 'deleted_at')",
    );
    client.run(
        "begin; insert into product values (2, 'never', 1); rollback;
         begin;
         set local outbox.actor = 'ann'; set local outbox.correlation_id = 'req-7';
         set local outbox.metadata = '{\"source\": \"admin\"}'; set local outbox.headers = '{\"tenant\": \"acme\"}';
         insert into product values (1, 'Widget', 99.90);
         update product set price = 89.90;
         update product set deleted_at = '2026-01-31 12:00+00';
         commit;
         delete from product",
    );
    let consumer = stage.consumer();
    let deliveries = consumer.recv_n(4, LONG);
    wait_drained(&stage);
    consumer.assert_next_is_fence(stage.broker);
    let received: Vec<(Option<String>, String, Value, Value)> = deliveries
        .iter()
        .map(|delivery| {
            let body = delivery.json();
            assert_eq!(body["key"], "product:1");
            (
                delivery.kind.clone(),
                delivery.routing_key.clone(),
                body["payload"].clone(),
                body["previous_payload"].clone(),
            )
        })
        .collect();
    let (deleted_at, whole) = (
        "2026-01-31T12:00:00+00:00",
        json!({"id": 1, "name": "Widget", "price": 99.90, "deleted_at": null}),
    );
    let mut last = whole.clone();
    last["price"] = json!(89.90);
    last["deleted_at"] = json!(deleted_at);
    let change = |kind: &str, route: &str, payload: Value, previous: Value| {
        (Some(kind.to_owned()), route.to_owned(), payload, previous)
    };
    assert_eq!(
        received,
        [
            change("ProductCreated", "product.post", whole, Value::Null),
            change(
                "ProductUpdated",
                "product.patch",
                json!({"id": 1, "price": 89.90}),
                json!({"price": 99.90})
            ),
            change(
                "ProductDeleted",
                "product.delete",
                json!({"id": 1, "deleted_at": deleted_at}),
                json!({"deleted_at": null})
            ),
            change("ProductForceDeleted", "product.delete", json!({"id": 1}), last),
        ]
    );
    for delivery in &deliveries[..3] {
        let body = delivery.json();
        assert_eq!(
            (&body["actor"], &body["metadata"]),
            (&json!("ann"), &json!({"source": "admin"}))
        );
        assert_eq!(delivery.correlation_id.as_deref(), Some("req-7"));
        assert_eq!(delivery.headers["tenant"], "acme");
    }
    assert_eq!(
        deliveries[3].json()["actor"],
        Value::Null,
        "set local ends with its transaction"
    );
}

#[test]
fn rows_of_an_attached_event_table_that_match_the_condition_arrive_once_and_in_order() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    client.run(
        "create role shopkeeper in role outbox_writer; create schema shop authorization shopkeeper;
         create role app; grant usage on schema shop to app; set role shopkeeper;
         create table shop.journal (seq bigint generated always as identity primary key, kind text, at timestamptz default now(), n int);
         grant insert on shop.journal to app; reset role;
         select outbox_source_set('shop.journal', seq => 'seq', type => 'kind', created_at => 'at', payload => 'n',
                                  aggregate_type => $$'order'$$, aggregate_id => '1');
         set role shopkeeper; select outbox_attach('shop.journal', $$kind like 'Order%'$$); set role app;
         insert into shop.journal (kind, n)
         select case when g % 2 = 0 then 'OrderChanged' else 'Noise' end, g from generate_series(1, 20) g",
    );
    wait_published(&stage, 10);
    let payloads: Vec<Value> = stage
        .all()
        .iter()
        .map(|delivery| delivery.json()["payload"].clone())
        .collect();
    assert_eq!(payloads, (1..=10).map(|n| n * 2).collect::<Vec<i32>>());
}

/// The capture has drawn its seq, and its transaction is blocked before the row is inserted. If it announced its key
/// too late, the second message would go first.
#[test]
fn a_later_message_of_a_key_never_overtakes_a_capture_in_progress() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    client.run(
        "create table product (id int primary key, n int); insert into product select g from generate_series(1, 40) g;
         select outbox_capture('product');
         create function hold_up() returns trigger language plpgsql as $$
           begin if new.type = 'ProductUpdated' then perform pg_advisory_xact_lock(4711); end if; return new; end $$;
         create trigger hold_up before insert on outbox_events for each row execute function hold_up();
         select pg_advisory_lock(4711)",
    );
    let mut slow = stage.connect(DB);
    let slow = std::thread::spawn(move || slow.run("update product set n = 1"));
    wait_true(
        &stage,
        "the capture to be blocked",
        "select exists (select from pg_locks where locktype = 'advisory' and not granted)",
    );
    client.run(
        "select outbox_publish('Later', '{}', 'product', '1'); select outbox_publish('Other', '{}', 'other', '1')",
    );
    wait_published(&stage, 1); // only the message of the other key
    let open: i64 = stage.query_one(DB, "select count(*) from outbox_open_transactions()");
    assert_eq!(open, 1);
    client.run("select pg_advisory_unlock(4711)");
    slow.join().expect("the capture");
    wait_published(&stage, 42);
    let kinds: Vec<Option<String>> = stage
        .all()
        .into_iter()
        .filter(|delivery| ["product:1", "other:1"].contains(&delivery.json()["key"].as_str().unwrap_or_default()))
        .map(|delivery| delivery.kind)
        .collect();
    assert_eq!(
        kinds,
        ["Other", "ProductUpdated", "Later"].map(|kind| Some(kind.to_owned()))
    );
}

#[test]
fn a_prepared_capture_is_delivered_when_it_is_committed() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = support::outbox_cluster_with(broker, &exchange, &["max_prepared_transactions = 2"]);
    let mut client = cluster.connect(DB);
    client.run(
        "create table product (id int primary key); select outbox_capture('product');
         begin; insert into product values (1); prepare transaction 'p'",
    );
    pause(&cluster);
    cluster.set_conf("outbox.enabled", "on");
    wait_connected(&cluster);
    client.run("select outbox_publish('Fence', '\"fence\"')");
    wait_published(&cluster, 1);
    client.run("commit prepared 'p'");
    wait_published(&cluster, 2);
    let payloads = all_of(broker, &queue)
        .into_iter()
        .map(|delivery| delivery.json()["payload"].clone());
    assert_eq!(payloads.collect::<Vec<_>>(), [json!("fence"), json!({"id": 1})]);
}

// ---- in bulk --------------------------------------------------------------------------------------------------------

#[test]
fn ten_thousand_rows_of_one_statement_become_as_many_events_in_order_and_fast() {
    const ROWS: i64 = 10_000;
    /// The most rows that a row of the statement may make it read. A cost that grows quadratically reads thousands.
    const READ_MAX: i64 = 20;
    let cluster = server();
    let mut client = cluster.connect(DB);
    client.run(
        "create table item (id bigint primary key, name text, n int, at timestamptz default now());
         select outbox_capture('item')",
    );
    for (sql, kind) in [
        (
            "insert into item select g, 'item ' || g, 0 from generate_series(10000, 1, -1) g",
            "ItemCreated",
        ),
        ("update item set n = n + 1", "ItemUpdated"),
        ("delete from item", "ItemDeleted"),
    ] {
        client.run(&format!("begin; {sql}"));
        let read = "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_xact_all_tables";
        let read: i64 = client.value(read);
        assert!(read <= ROWS * READ_MAX, "{sql} read {read} rows");
        client.run("commit");
        // In the order of the statement: the first row had the highest id.
        let row = client
            .query_one(
                "select count(*), count(distinct e.id), bool_and(10001 - e.n = e.aggregate_id::bigint), count(o.seq)
                 from (select *, row_number() over (order by seq) as n from outbox_events where type = $1) e
                 left join outbox o on o.seq = e.seq and o.key = 'item:' || e.aggregate_id",
                &[&kind],
            )
            .expect("the events");
        assert_eq!(
            (row.get(0), row.get(1), row.get(2), row.get(3)),
            (ROWS, ROWS, true, ROWS),
            "{kind}"
        );
    }
}

#[test]
fn ten_thousand_rows_of_an_event_table_are_enqueued_at_once() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    cluster.draw_seqs(10_000);
    client.run(
        "create table journal (seq bigint primary key, kind text);
         select outbox_attach('journal', $$kind = 'a'$$, key => $$'k' || seq % 7$$);
         insert into journal select g, case when g % 4 = 0 then 'b' else 'a' end from generate_series(10000, 1, -1) g",
    );
    let row = client
        .query_one(
            "select count(*), count(distinct seq), bool_and(seq % 4 <> 0 and key = 'k' || seq % 7) from outbox",
            &[],
        )
        .expect("the messages");
    assert_eq!((row.get(0), row.get(1), row.get(2)), (7500_i64, 7500_i64, true));
}
