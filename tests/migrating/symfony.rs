//! Runs docs/migrating/symfony-outbox.md: messages stored for named transports.

use serde_json::json;
use support::Delivery;

use super::page::{Page, Shop, ids, sorted};

/// The table that Doctrine creates on Postgres.
const TABLE: &str = "
create table somework_cqrs_outbox (
  id UUID NOT NULL, body TEXT NOT NULL, headers TEXT NOT NULL, transport_name VARCHAR(190) DEFAULT NULL,
  created_at TIMESTAMP(0) WITHOUT TIME ZONE NOT NULL, published_at TIMESTAMP(0) WITHOUT TIME ZONE DEFAULT NULL,
  PRIMARY KEY(id));
create index idx_somework_cqrs_outbox_published on somework_cqrs_outbox (published_at, created_at);";

const TYPE: &str = r"App\Message\OrderPlaced";

fn id(n: u32) -> String {
    format!("0193d0c0-0000-7000-8000-{n:012}")
}

/// The insert of DbalOutboxStorage::store().
fn store(n: u32, transport: Option<&str>, created_at: &str) -> String {
    let transport = transport.map_or("null".into(), |name| format!("'{name}'"));
    let id = id(n);
    format!(
        r#"INSERT INTO somework_cqrs_outbox (id, body, headers, transport_name, created_at, published_at)
           VALUES ('{id}', '{{"order":{n},"lines":[]}}', '{{"type":"App\\Message\\OrderPlaced",
           "X-Message-Stamp-Symfony\\Component\\Messenger\\Stamp\\BusNameStamp":"[{{\"busName\":\"event.bus\"}}]",
           "Content-Type":"application\/json"}}', {transport}, '{created_at}', null);"#
    )
}

fn orders(deliveries: &[Delivery]) -> Vec<i64> {
    let order = |delivery: &Delivery| delivery.json()["order"].as_i64().expect("an order");
    let orders: Vec<i64> = deliveries.iter().map(order).collect();
    let named: Vec<String> = orders.iter().map(|n| id(u32::try_from(*n).expect("small"))).collect();
    assert_eq!(ids(deliveries), named);
    orders
}

fn unpublished(shop: &Shop) -> Vec<String> {
    shop.texts("select id::text from somework_cqrs_outbox where published_at is null order by created_at, id")
}

#[test]
fn the_symfony_page_moves_each_message_once_to_its_transport_and_back() {
    let shop = Shop::with(TABLE, &[]);
    let ((messages, asynchronous), (notices, notifications)) = (shop.bind("fanout"), shop.bind("fanout"));
    let page = Page::open(
        "symfony-outbox.md",
        &[
            ("exchange 'messages'", &format!("exchange '{messages}'")),
            ("exchange 'notifications'", &format!("exchange '{notices}'")),
        ],
    );
    shop.writes(&store(1, Some("async"), "2026-11-01 10:00:00"));
    shop.writes("update somework_cqrs_outbox set published_at = '2026-11-01 10:00:30'");
    shop.writes(&store(5, Some("async"), "2026-11-01 10:05:00"));
    shop.writes(&store(2, Some("async"), "2026-11-01 10:02:00"));
    shop.writes(&store(3, Some("notifications"), "2026-11-01 10:03:00"));
    shop.writes(&store(4, None, "2026-11-01 10:04:00"));
    shop.writes(&store(6, Some("mails"), "2026-11-01 10:06:00"));

    let checked = forward_to_the_switch(&shop, &page);
    assert_eq!(
        checked.last().expect("a block"),
        &[] as &[String],
        "bodies that are no JSON"
    );
    let refusal = page.refused(&shop, "4. Switch");
    assert!(refusal.contains("42704") && refusal.contains("mails"), "{refusal}");
    assert_eq!(unpublished(&shop).len(), 5, "nothing has changed");
    shop.writes(&format!("delete from somework_cqrs_outbox where id = '{}'", id(6)));

    page.section(&shop, "4. Switch");
    shop.writes(&store(7, Some("async"), "2026-11-01 10:07:00"));
    shop.writes(&format!(
        "begin; {} rollback",
        store(8, Some("async"), "2026-11-01 10:08:00")
    ));
    shop.writes(&store(9, Some("notifications"), "2026-11-01 10:09:00"));
    shop.wait_drained();
    let arrived = shop.arrived(&asynchronous);
    // Message 4 names no transport; it has no order with the others.
    let (named, unnamed): (Vec<i64>, Vec<i64>) = orders(&arrived).into_iter().partition(|order| *order != 4);
    assert_eq!((named, unnamed), (vec![2, 5, 7], vec![4]));
    assert_eq!(orders(&shop.arrived(&notifications)), [3, 9]);
    check_message(arrived.iter().find(|message| message.json()["order"] == 2).expect("2"));
    assert_eq!(shop.texts("select id::text from somework_cqrs_outbox_old"), [id(1)]);
    let verified = page.section(&shop, "5. Verify").concat();
    assert_eq!(
        verified.len(),
        4,
        "three destinations and a count, and nothing is wrong: {verified:?}"
    );
    assert!(
        verified.contains(&"notifications|connected|0|2|0|0".to_owned()),
        "{verified:?}"
    );
    assert_eq!(verified[3], "0");

    page.roll_back(&shop, || {
        shop.writes(&store(11, Some("notifications"), "2026-11-01 10:11:00"));
        shop.writes(&store(10, Some("async"), "2026-11-01 10:10:00"));
    });
    assert!(shop.is_true("select relkind = 'r' from pg_class where oid = 'somework_cqrs_outbox'::regclass"));
    assert_eq!(sorted(unpublished(&shop)), [id(10), id(11)]);
    let published = shop.texts("select id::text from somework_cqrs_outbox where published_at is not null");
    assert_eq!(sorted(published), [1, 2, 3, 4, 5, 7, 9].map(id));
    assert!(shop.is_true(
        r"select count(*) = 2 and bool_and(headers::json ->> 'type' = 'App\Message\OrderPlaced' and transport_name is not null)
          from somework_cqrs_outbox where published_at is null"
    ));

    forward_to_the_switch(&shop, &page);
    page.section(&shop, "4. Switch");
    shop.wait_drained();
    assert_eq!(orders(&shop.arrived(&asynchronous)), [10]);
    assert_eq!(orders(&shop.arrived(&notifications)), [11]);
    page.finish();
}

fn forward_to_the_switch(shop: &Shop, page: &Page) -> Vec<Vec<String>> {
    page.section(shop, "1. Create the extension beside the old table");
    let checked = page.section(shop, "2. Say where to deliver");
    shop.wait_connected();
    checked
}

fn check_message(message: &Delivery) {
    assert_eq!(message.json(), json!({"order": 2, "lines": []}));
    assert_eq!((message.routing_key.as_str(), message.delivery_mode), ("", Some(2)));
    // The fields that Symfony's serializer reads.
    assert_eq!(message.headers["type"], TYPE);
    let stamp = &message.headers[r"X-Message-Stamp-Symfony\Component\Messenger\Stamp\BusNameStamp"];
    assert_eq!(stamp, r#"[{"busName":"event.bus"}]"#);
    assert_eq!(message.headers["Content-Type"], "application/json");
    // 2026-11-01 10:02:00 UTC
    assert_eq!(message.timestamp, Some(1_793_527_320));
}
