//! Runs docs/migrating/corewrite.md: a table OUTBOX whose publisher sends to a fanout exchange.

use std::thread;
use support::Session;

use postgres::error::SqlState;
use serde_json::{Value, json};
use support::Delivery;

use super::page::{Page, Shop, ids, sorted};

/// The table of CoreWrite's documents, with the quotes that Postgres needs for a column USER.
const OUTBOX: &str = r#"
create table OUTBOX (
  OUTBOX_ID VARCHAR(36) PRIMARY KEY, EVENT_TYPE VARCHAR(100) NOT NULL, AGGREGATE_ID VARCHAR(36) NOT NULL,
  AGGREGATE_TYPE VARCHAR(10) NOT NULL, OPERATION VARCHAR(10) NOT NULL, PAYLOAD TEXT NOT NULL, METADATA TEXT,
  "user" VARCHAR(255), CREATED_AT VARCHAR(14) NOT NULL, PUBLISHED_AT VARCHAR(14), STATUS VARCHAR(20) DEFAULT 'PENDING',
  RETRY_COUNT INT DEFAULT 0, ERROR_MESSAGE TEXT);
create index idx_outbox_status on OUTBOX(STATUS);
create index idx_outbox_created_at on OUTBOX(CREATED_AT);
create index idx_outbox_aggregate on OUTBOX(AGGREGATE_TYPE, AGGREGATE_ID);"#;

/// The id of the n-th event.
fn id(n: u32) -> String {
    format!("550e8400-e29b-41d4-a716-{n:012}")
}

/// The insert that CoreWrite's DataStore runs.
fn insert(n: u32, aggregate: &str, operation: &str, created_at: &str) -> String {
    let (dimension, record) = aggregate.split_once(':').expect("PRD:123");
    let kind = match operation {
        "POST" => "ProductCreated",
        "DELETE" => "ProductDeleted",
        _ => "ProductUpdated",
    };
    let id = id(n);
    format!(
        r#"INSERT INTO OUTBOX (OUTBOX_ID, EVENT_TYPE, AGGREGATE_ID, AGGREGATE_TYPE, OPERATION, PAYLOAD, METADATA, "user",
           CREATED_AT, STATUS) VALUES ('{id}', '{kind}', '{record}', '{dimension}', '{operation}',
           '{{"PRD_ID":"{record}","XPRD02":{n}.50,"TREC":"M"}}', '{{"source":"productManagement"}}', 'user@example.com',
           '{created_at}', 'PENDING');"#
    )
}

fn numbers(deliveries: &[Delivery]) -> Vec<u32> {
    let number = |id: &&str| id[24..].parse().expect("an id of ours");
    ids(deliveries).iter().map(number).collect()
}

fn of_status(shop: &Shop, status: &str) -> Vec<String> {
    let sql = format!("select outbox_id::text from outbox where status = '{status}' order by outbox_id");
    shop.texts(&sql)
}

fn are_waiting(n: usize) -> String {
    format!(
        "select count(*) >= {n} from pg_locks l join pg_stat_activity a using (pid)
         where not l.granted and l.locktype = 'relation' and a.datname = 'shop' and a.backend_type = 'client backend'"
    )
}

#[test]
fn the_corewrite_page_moves_each_event_once_under_writers_and_back() {
    let shop = Shop::with(OUTBOX, &["outbox.max_attempts = 1"]);
    let (exchange, queue) = shop.bind("fanout");
    let page = Page::open("corewrite.md", &[("'corewrite.fanout'", &format!("'{exchange}'"))]);
    shop.writes(&insert(1, "PRD:123", "POST", "20251219150000"));
    shop.writes("update OUTBOX set STATUS = 'PUBLISHED', PUBLISHED_AT = '20251219150001'");
    shop.writes(&insert(4, "PRD:123", "DELETE", "20251219180000"));
    shop.writes(&insert(3, "PRD:123", "PATCH", "20251219170000"));
    shop.writes(&insert(2, "ORD:5", "POST", "20251219160000"));
    shop.writes(&insert(5, "PRD:7", "PUT", "20251219190000"));
    shop.writes(&format!(
        "update OUTBOX set STATUS = 'FAILED', RETRY_COUNT = 2, ERROR_MESSAGE = 'refused' where OUTBOX_ID = '{}'",
        id(5)
    ));

    page.section(&shop, "1. Create the extension beside the old table");
    page.section(&shop, "2. Say where to deliver");
    shop.wait_connected();
    let mut session = shop.application();
    let prepared = session.prepare(&insert(15, "PRD:15", "POST", "20251219190007"));
    let prepared = prepared.expect("prepare before the switch");
    under_writers(
        &shop,
        &insert(6, "PRD:123", "PATCH", "20251219190001"),
        &insert(7, "PRD:123", "PATCH", "20251219190002"),
        || drop(page.section(&shop, "4. Switch")),
    );
    shop.writes(&insert(8, "ORD:6", "POST", "20251219190004"));
    shop.writes(&format!(
        "begin; {} rollback;",
        insert(9, "PRD:123", "PATCH", "20251219190005")
    ));
    session.execute(&prepared, &[]).expect("execute after the switch");
    check_inserts_into_the_view(&shop);
    shop.wait_drained();

    let arrived = shop.arrived(&queue);
    assert_eq!(sorted(numbers(&arrived)), [2, 3, 4, 5, 6, 7, 8, 15]);
    let of_key: Vec<Delivery> = arrived
        .iter()
        .filter(|d| d.headers["aggregate_id"] == "123")
        .cloned()
        .collect();
    assert_eq!(numbers(&of_key), [3, 4, 6, 7]);
    check_message(&of_key[0]);
    assert_eq!(shop.texts("select outbox_id::text from outbox_old"), [id(1)]);
    let verified = page.section(&shop, "5. Verify");
    assert_eq!(verified[0][..verified[0].len() - 1], [] as [&str; 0], "health");
    assert!(
        verified[0].last().is_some_and(|status| status.starts_with("0|0|0|")),
        "{verified:?}"
    );

    fail_and_retry(&shop, &page, &exchange, &queue);
    captured_in_the_same_json(&shop, &page, &queue);
    checks_see_captured_rows(&shop, &page, &queue);
    roll_back(&shop, &page, &exchange, &queue);
    // The way forward again: the old table is as it was before.
    page.section(&shop, "1. Create the extension beside the old table");
    page.section(&shop, "2. Say where to deliver");
    page.section(&shop, "4. Switch");
    shop.wait_drained();
    let arrived = numbers(&shop.arrived(&queue));
    let (of_key, other): (Vec<u32>, Vec<u32>) = arrived.into_iter().partition(|n| *n != 14);
    assert_eq!((of_key, other), (vec![11, 12, 13], vec![14]));
    page.finish();
}

/// Consumers see events of triggers as those of DataStore, previous values included.
fn captured_in_the_same_json(shop: &Shop, page: &Page, queue: &str) {
    page.section(shop, "Events by triggers, in the same JSON");
    shop.wait_drained();
    let mut bodies: Vec<Value> = shop.arrived(queue).iter().map(Delivery::json).collect();
    for body in &mut bodies {
        let body = body.as_object_mut().expect("an object");
        assert_eq!(
            body.remove("OUTBOX_ID").and_then(|id| id.as_str().map(str::len)),
            Some(36)
        );
        let at = body.remove("CREATED_AT");
        assert!(at.is_some_and(|at| at.as_str().is_some_and(|at| at.len() == 14)));
    }
    let expected = [
        json!({
            "EVENT_TYPE": "ProductCreated", "AGGREGATE_ID": "123", "AGGREGATE_TYPE": "PRD", "OPERATION": "POST",
            "PAYLOAD": {"prd_id": 123, "xprd02": 99.99}, "STATUS": "PENDING",
        }),
        json!({
            "EVENT_TYPE": "ProductUpdated", "AGGREGATE_ID": "123", "AGGREGATE_TYPE": "PRD", "OPERATION": "PATCH",
            "PAYLOAD": {"prd_id": 123, "xprd02": 89.99}, "PREVIOUS_PAYLOAD": {"xprd02": 99.99}, "STATUS": "PENDING",
        }),
    ];
    assert_eq!(bodies, expected);
}

/// The checks of CoreWrite count the events of outbox_capture, too, which are not in its JSON.
fn checks_see_captured_rows(shop: &Shop, page: &Page, queue: &str) {
    shop.exec(
        "create table category (id int primary key, name text);
         select outbox.outbox_capture('category', aggregate_type => 'CAT');
         select outbox.outbox_pause('default', 'to look at what waits')",
    );
    shop.exec(
        "begin; set local outbox.actor = 'ann'; set local outbox.metadata = '{\"source\": \"shop\"}';
         insert into category values (1, 'tools'); commit",
    );
    let row = r#"select concat_ws('|', event_type, aggregate_id, operation, payload, metadata, "user", status) from outbox
                 where aggregate_type = 'CAT'"#;
    assert_eq!(
        shop.texts(row),
        [r#"CategoryCreated|1|POST|{"id": 1, "name": "tools"}|{"source": "shop"}|ann|PENDING"#]
    );
    let checks = || page.section(shop, "5. Verify")[1].clone();
    let now = checks();
    assert_eq!((&*now[0], &*now[1], now[2].len(), &*now[3]), ("1", "0", 14, "0"));
    shop.exec("update outbox.outbox_events set created_at = now() - interval '61 s' where aggregate_type = 'CAT'");
    assert_eq!(checks()[3], "1", "later than a minute");
    shop.exec("select outbox.outbox_resume('default')");
    shop.wait_drained();
    assert_eq!(shop.arrived(queue).len(), 1);
}

/// Runs `done` between two writers. A transaction that has written `before` is open, so `done` waits for it. Another
/// session writes `after` meanwhile, and waits for `done`.
fn under_writers(shop: &Shop, before: &str, after: &str, done: impl FnOnce()) {
    let mut open = shop.application();
    open.run(&format!("begin; {before}"));
    thread::scope(|threads| {
        let later = threads.spawn(|| {
            shop.wait("one session to wait", &are_waiting(1));
            shop.writes(after);
        });
        let ends = threads.spawn(move || {
            shop.wait("two sessions to wait", &are_waiting(2));
            open.run("commit");
        });
        done();
        later.join().expect("the later writer");
        ends.join().expect("the first writer");
    });
}

/// Checks what docs/migrating/README.md states about inserts into such a view; the event is rolled back.
fn check_inserts_into_the_view(shop: &Shop) {
    let mut client = shop.cluster.connect("shop");
    let insert = insert(9, "PRD:123", "PATCH", "20251219190006");
    let insert = insert.trim_end_matches(';');
    let mut transaction = client.transaction().expect("begin");
    let returned = transaction.query_one(&format!("{insert} RETURNING OUTBOX_ID"), &[]);
    assert_eq!(returned.expect("RETURNING").get::<_, String>(0), id(9));
    let mut doubled = transaction.savepoint("doubled").expect("savepoint");
    let ignored = doubled.execute(&format!("{insert} ON CONFLICT DO NOTHING"), &[]);
    let code = ignored.expect_err("nothing is ignored").code().cloned();
    assert_eq!(code, Some(SqlState::UNIQUE_VIOLATION));
    drop(doubled);
    for (refused, code) in [
        (
            format!("{insert} ON CONFLICT (OUTBOX_ID) DO UPDATE SET STATUS = 'PENDING'"),
            SqlState::INVALID_COLUMN_REFERENCE,
        ),
        (
            "UPDATE OUTBOX SET STATUS = 'PUBLISHED'".into(),
            SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
        ),
        ("DELETE FROM OUTBOX".into(), SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE),
    ] {
        let mut attempt = transaction.savepoint("refused").expect("savepoint");
        let error = attempt.execute(&refused, &[]).expect_err(&refused);
        assert_eq!(error.code(), Some(&code), "{refused}: {error:?}");
    }
}

fn check_message(message: &Delivery) {
    let expected = json!({
        "OUTBOX_ID": id(3), "EVENT_TYPE": "ProductUpdated", "AGGREGATE_ID": "123", "AGGREGATE_TYPE": "PRD",
        "OPERATION": "PATCH", "PAYLOAD": {"PRD_ID": "123", "XPRD02": 3.50, "TREC": "M"},
        "METADATA": {"source": "productManagement"}, "USER": "user@example.com", "CREATED_AT": "20251219170000",
        "STATUS": "PENDING",
    });
    assert_eq!(message.json(), expected);
    assert_eq!(message.routing_key, "prd.patch");
    assert_eq!(message.content_type.as_deref(), Some("application/json"));
    assert_eq!(message.delivery_mode, Some(2));
    assert_eq!(message.kind.as_deref(), Some("ProductUpdated"));
    // 2025-12-19 17:00:00 UTC
    assert_eq!(message.timestamp, Some(1_766_163_600));
}

/// CoreWrite's checks show a message that fails as FAILED, and the page's command retries it.
fn fail_and_retry(shop: &Shop, page: &Page, exchange: &str, queue: &str) {
    shop.broker.unbind(queue, exchange, "#");
    shop.writes(&insert(10, "PRD:9", "POST", "20251219190006"));
    shop.wait("a dead letter", "select exists (select from outbox.outbox_dead)");
    assert_eq!(of_status(shop, "FAILED"), [id(10)]);
    shop.broker.bind(queue, exchange, "#");
    let verified = page.section(shop, "5. Verify");
    assert!(
        verified[0].iter().any(|line| line.starts_with("dead letters||f|")),
        "{verified:?}"
    );
    assert_eq!(verified[1], ["0", "1", "", "0"]);
    assert_eq!(verified[2], ["1"]);
    shop.wait_drained();
    assert_eq!(numbers(&shop.arrived(queue)), [10]);
    assert_eq!(page.section(shop, "5. Verify")[1], ["0", "0", "", "0"]);
}

/// The way back, with a dead letter, with messages written while delivery was stopped, and with writers at work.
fn roll_back(shop: &Shop, page: &Page, exchange: &str, queue: &str) {
    shop.broker.unbind(queue, exchange, "#");
    shop.writes(&insert(14, "PRD:14", "POST", "20251219190009"));
    shop.wait("a dead letter", "select exists (select from outbox.outbox_dead)");
    shop.broker.bind(queue, exchange, "#");
    page.stop_delivery(shop, || shop.writes(&insert(11, "PRD:123", "PATCH", "20251219200000")));
    under_writers(
        shop,
        &insert(12, "PRD:123", "PATCH", "20251219200001"),
        &insert(13, "PRD:123", "PATCH", "20251219200002"),
        || page.go_back(shop),
    );
    assert!(shop.is_true("select relkind = 'r' from pg_class where oid = 'outbox'::regclass"));
    shop.exec("update product set xprd02 = 79.99; insert into category values (2, 'toys')"); // tables without triggers
    assert_eq!(of_status(shop, "PENDING"), [id(11), id(12), id(13)]);
    let published: Vec<String> = (1..=8).chain([10, 15]).map(id).collect();
    let (ours, by_triggers): (Vec<String>, Vec<String>) = of_status(shop, "PUBLISHED")
        .into_iter()
        .partition(|id| id.starts_with("550e8400"));
    assert_eq!(ours, published);
    assert_eq!(by_triggers.len(), 3, "two events of product, one of category");
    assert_eq!(of_status(shop, "FAILED"), [id(14)]);
    assert!(
        shop.is_true("select retry_count = 1 and error_message like 'unroutable%' from outbox where status = 'FAILED'")
    );
    let payload = shop.texts("select payload from outbox where status = 'PENDING' order by created_at limit 1");
    let payload: Value = serde_json::from_str(&payload[0]).expect("JSON");
    assert_eq!(payload, json!({"PRD_ID": "123", "XPRD02": 11.50, "TREC": "M"}));
}
