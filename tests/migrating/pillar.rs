//! Runs docs/migrating/pillar.md and pillar-worker.md: pointers to an event store, workers as artisan commands.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use support::{Delivery, wait_until};

use super::page::{Page, Shop, sorted};
use support::LONG;

/// The tables that Pillar's Laravel migrations create on Postgres.
const TABLES: &str = "
create table events (
  sequence bigserial primary key, stream_id varchar(191) not null, stream_sequence bigint not null, correlation_id uuid,
  event_type varchar(255) not null, event_version integer not null default 1, metadata json, event_data json not null,
  occurred_at timestamp(0) without time zone not null, unique (stream_id, stream_sequence));
create table outbox (
  global_sequence bigint primary key references events (sequence), attempts integer not null default 0,
  available_at timestamp(0) without time zone not null default CURRENT_TIMESTAMP,
  published_at timestamp(0) without time zone, partition_key varchar(64), claim_token varchar(36), last_error text);
create index outbox_published_at_available_at_index on outbox (published_at, available_at);
create index outbox_partition_key_index on outbox (partition_key, published_at, available_at);
create table outbox_partitions (
  partition_key varchar(64) primary key, lease_owner varchar(36), lease_until timestamp(0), lease_epoch bigint not null default 0,
  updated_at timestamp(0));
create table outbox_workers (id varchar(36) primary key, heartbeat_until timestamp(0) not null);";

const CORRELATION: &str = "7f6b6a3e-6a68-4a5c-9d3c-0d1f1f6f2a11";

/// The statements that the event store and DatabaseOutbox::enqueue() run in one transaction: event `n`, and its pointer
/// if the event is published.
fn append(n: i64, stream: &str, kind: &str, label: Option<&str>) -> String {
    let event = format!(
        "insert into events (sequence, stream_id, stream_sequence, correlation_id, event_type, event_version, metadata, event_data,
         occurred_at) values ({n}, '{stream}', {n}, '{CORRELATION}', '{kind}', 2, '{{\"ip\": \"10.0.0.7\"}}',
         '{{\"n\":{n}}}', '2026-11-01 10:00:00'::timestamp + {n} * interval '1 minute');"
    );
    let pointer = label.map(|label| {
        format!("insert into outbox (global_sequence, available_at, partition_key) values ({n}, CURRENT_TIMESTAMP, '{label}');")
    });
    format!("{event} {}", pointer.unwrap_or_default())
}

/// The global sequences; checks what all messages have in common.
fn seqs(deliveries: &[Delivery]) -> Vec<i64> {
    let seq = |delivery: &Delivery| {
        let n = delivery.headers["seq"].as_i64().expect("a seq");
        assert_eq!(delivery.json()["payload"], json!({"n": n}));
        assert_eq!(delivery.headers["event_version"], 2);
        assert_eq!(delivery.correlation_id.as_deref(), Some(CORRELATION));
        // 2026-11-01 10:00:00 UTC, plus `n` minutes
        assert_eq!(
            delivery.timestamp,
            Some(1_793_527_200 + u64::try_from(n).expect("positive") * 60)
        );
        n
    };
    deliveries.iter().map(seq).collect()
}

fn of_stream(deliveries: &[Delivery], stream: &str) -> Vec<i64> {
    let of_stream = deliveries
        .iter()
        .filter(|d| d.headers["aggregate_id"] == stream)
        .cloned();
    seqs(&of_stream.collect::<Vec<_>>())
}

fn pointers(shop: &Shop, condition: &str) -> Vec<String> {
    let sql = format!("select global_sequence::text from outbox where {condition} order by outbox.global_sequence");
    shop.texts(&sql)
}

fn forward(shop: &Shop, page: &Page) {
    page.section(shop, "1. Create the extension beside the old tables");
    page.section(shop, "2. Say where to deliver");
    shop.wait_connected();
    let live = page.section(shop, "3. Stop the workers").concat();
    assert_eq!(live, ["0"], "live workers of Pillar");
    page.section(shop, "4. Switch");
}

#[test]
fn the_pillar_page_moves_each_pointer_once_and_keeps_its_sequence_and_partition() {
    let shop = Shop::with(TABLES, &[]);
    let (exchange, queue) = shop.bind("topic");
    let page = Page::open("pillar.md", &[("exchange 'pillar'", &format!("exchange '{exchange}'"))]);
    shop.writes("insert into outbox_workers values ('artisan-1', now() - interval '1 minute')");
    shop.writes(&append(1, "order-42", "OrderPlaced", Some("p14")));
    shop.writes("update outbox set published_at = now(), attempts = 1");
    shop.writes(&append(2, "order-42", "OrderPaid", Some("p14")));
    shop.writes(&append(3, "tenant-7", "TenantMoved", Some("p09"))); // by a custom partitioner
    shop.writes(&append(4, "order-42", "OrderViewed", None)); // not to be published
    shop.writes(&append(5, "order-42", "OrderShipped", Some("p14")));
    // One that failed, and one that is claimed by a worker that was killed.
    shop.writes(
        "update outbox set attempts = 3, last_error = 'bus down', claim_token = 'c', available_at = now() + interval '1 hour'
         where global_sequence = 2",
    );

    forward(&shop, &page);
    shop.writes(&append(6, "order-42", "OrderReturned", Some("p14")));
    shop.writes(&format!(
        "begin; {} rollback;",
        append(7, "order-42", "OrderLost", Some("p14"))
    ));
    shop.writes(&append(8, "a", "CartEmptied", Some("p03")));
    shop.wait_drained();
    let arrived = shop.arrived(&queue);
    assert_eq!(sorted(seqs(&arrived)), [2, 3, 5, 6, 8]);
    assert_eq!(of_stream(&arrived, "order-42"), [2, 5, 6]);
    let labels: BTreeSet<(&str, &str)> = arrived
        .iter()
        .map(|d| {
            (
                d.headers["aggregate_id"].as_str().expect("text"),
                d.headers["partition_key"].as_str().expect("text"),
            )
        })
        .collect();
    assert_eq!(labels, [("a", "p03"), ("order-42", "p14"), ("tenant-7", "p09")].into());
    assert!(
        arrived.iter().all(|d| d.kind.as_deref() == Some(&d.routing_key)),
        "{arrived:?}"
    );
    // Pillar's CRC-32 gives the same labels as this database.
    assert!(
        shop.is_true(
            "select outbox.outbox_partition_of('order-42') = 'p14' and outbox.outbox_partition_of('a') = 'p03'"
        )
    );
    let verified = page.section(&shop, "5. Verify").concat();
    assert_eq!(verified.len(), 6, "nothing is wrong: {verified:?}");
    assert!(verified[0].starts_with("0|0|0|5"), "{verified:?}");
    assert_eq!(verified[1], "8|published|a|p03|1|");

    page.roll_back(&shop, || {
        shop.writes(&append(9, "order-42", "OrderRefunded", Some("p14")));
        shop.writes(&append(10, "tenant-7", "TenantLeft", Some("p09")));
    });
    assert!(shop.is_true("select relkind = 'r' from pg_class where oid = 'outbox'::regclass"));
    assert_eq!(
        pointers(&shop, "published_at is null and available_at <= now()"),
        ["9", "10"]
    );
    assert_eq!(
        pointers(&shop, "published_at is not null"),
        ["1", "2", "3", "5", "6", "8"]
    );
    assert_eq!(
        pointers(&shop, "partition_key = 'p09' and claim_token is null"),
        ["3", "10"]
    );

    forward(&shop, &page);
    shop.wait_drained();
    assert_eq!(sorted(seqs(&shop.arrived(&queue))), [9, 10]);
    page.finish();
}

#[test]
fn the_pillar_worker_page_sets_and_shows_what_the_command_did() {
    let shop = Shop::with(TABLES, &[]);
    let (exchange, queue) = support::fresh_names();
    shop.broker.declare_exchange(&exchange, "topic", true);
    shop.broker.declare_queue(&queue, Value::Null);
    shop.broker.bind(&queue, &exchange, "Order*");
    shop.broker.bind(&queue, &exchange, "OrderPlaced");
    forward(
        &shop,
        &Page::open("pillar.md", &[("exchange 'pillar'", &format!("exchange '{exchange}'"))]),
    );
    let page = Page::open("pillar-worker.md", &[]);

    let settings_sql = "select string_agg(name || '=' || setting, ' ' order by name) from pg_settings
                 where name in ('outbox.batch_size', 'outbox.claim_ttl', 'outbox.max_attempts', 'outbox.on_dead', 'outbox.retry_backoff',
                                'outbox.retry_backoff_max')";
    let before = shop.texts(settings_sql);
    page.section(&shop, "Settings");
    assert_eq!(
        shop.texts(settings_sql)[0],
        "outbox.batch_size=100 outbox.claim_ttl=15 outbox.max_attempts=2147483647 outbox.on_dead=skip outbox.retry_backoff=60000 \
         outbox.retry_backoff_max=60000"
    );
    // The worker reads the settings within a second. Only the delay of a retry shows that it has.
    let mut n = 0;
    wait_until("a retry that waits for 60 s and up to a quarter more", LONG, || {
        n += 1;
        shop.writes(&append(n, "lost", "Unroutable", Some("p01")));
        let waits = format!("select exists (select from outbox.outbox_waiting where seq = {n} and state = 'b')");
        shop.wait("a retry", &waits);
        shop.is_true(&format!(
            "select due_at - clock_timestamp() between '50 s' and '76 s' or not outbox.outbox_discard({n})
             from outbox.outbox_waiting where seq = {n}"
        ))
    });
    for n in 101..=110 {
        shop.writes(&append(n, "order-42", "OrderPlaced", Some("p14")));
    }
    assert_eq!(page.section(&shop, "One pass").concat(), ["0"], "left by a drain");
    let arrived = shop.arrived(&queue);
    assert_eq!(seqs(&arrived), (101..=110).collect::<Vec<_>>());

    shop.wait(
        "the counters, which follow a moment later",
        "select s.published_total = 10 and s.in_flight = 0 and t.published = 10 from outbox.outbox_status s,
                (select coalesce(sum(published), 0) as published from outbox.outbox_throughput) t",
    );
    let line: Value = serde_json::from_str(&page.section(&shop, "JSON").concat().concat()).expect("one line of JSON");
    let count = |name: &str| line[name].as_i64().unwrap_or_else(|| panic!("{name}: {line}"));
    assert_eq!((count("published"), count("dead"), count("in_flight")), (10, 0, 0));
    assert!(count("failed") >= 1 && count("pending") == 1, "{line}");
    assert_eq!(
        (count("active_workers"), count("desired_count"), count("owned_count")),
        (1, 16, 16)
    );
    assert!(line["ts"].as_str().is_some_and(|ts| ts.ends_with('Z')), "{line}");
    check_screen(&page.section(&shop, "What the screen showed"));

    page.section(&shop, "Without leases");
    assert!(shop.is_true("select leasing from outbox.outbox_settings"));
    page.nth(&shop, "Without leases", 0);
    assert!(shop.is_true("select not leasing from outbox.outbox_settings"));
    shop.writes(&append(111, "order-42", "OrderPlaced", Some("p14")));
    shop.wait(
        "delivery without leases",
        "select exists (select from outbox.outbox_history where seq = 111)",
    );
    let arrived = shop.arrived(&queue);
    assert_eq!(seqs(&arrived), [111]);
    assert!(
        arrived[0].headers["lease_epoch"]
            .as_i64()
            .is_some_and(|epoch| epoch < 0),
        "{arrived:?}"
    );

    page.section(&shop, "Roll back");
    assert_eq!(shop.texts(settings_sql), before);
    page.finish();
}

fn check_screen(screen: &[Vec<String>]) {
    let [summary, throughput, partitions, errors, health] = screen else {
        panic!("{screen:#?}");
    };
    let [worker] = &summary[..] else { panic!("{summary:?}") };
    assert!(
        worker.starts_with("server-1|") && worker.contains("|t|connected||"),
        "{summary:?}"
    );
    assert!(throughput[0].starts_with("1|0|0|"), "{throughput:?}");
    let minutes = throughput[1..]
        .iter()
        .filter_map(|line| line.rsplit('|').next()?.parse::<u32>().ok());
    assert_eq!(minutes.sum::<u32>(), 10, "{throughput:?}");
    assert_eq!(partitions.len(), 16);
    assert!(partitions[0].starts_with("p00|server-1|"), "{partitions:?}");
    let [error] = &errors[..] else { panic!("{errors:?}") };
    assert!(
        error.contains("|retrying|1|") && error.contains("unroutable"),
        "{errors:?}"
    );
    assert_eq!(health, &[] as &[String]);
}
