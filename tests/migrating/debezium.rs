//! Runs docs/migrating/debezium.md: inserts that a replication slot reports. The tests read the slot with
//! pgoutput, as Debezium reads its own slot: each insert into a table of that name, once.

use serde_json::json;
use support::{Delivery, wait_until};

use super::page::{Page, Shop, ids, sorted};
use support::LONG;
use support::decoding::{self, Insert};

/// The table of Debezium's documents.
const TABLE: &str = "
create table outboxevent (
  id uuid not null primary key, aggregatetype varchar(255) not null, aggregateid varchar(255) not null,
  type varchar(255) not null, payload jsonb);";

fn id(n: u32) -> String {
    format!("406c07f3-26f0-4eea-a50c-{n:012}")
}

/// The insert of an application; returns the number of rows that the server reported as inserted.
fn write(shop: &Shop, n: u32, aggregate: &str, payload: Option<&str>) -> u64 {
    let payload = payload.map_or("null".into(), |text| format!("'{text}'"));
    let sql = format!(
        "insert into outboxevent values ('{}', 'Order', '{aggregate}', 'OrderPlaced', {payload})",
        id(n)
    );
    shop.application().execute(&sql, &[]).expect(&sql)
}

/// Inserts and deletes the row in one transaction, as applications do that leave nothing in the table. Returns the
/// number of rows inserted and the number of rows deleted.
fn write_and_delete(shop: &Shop, n: u32, aggregate: &str) -> (u64, u64) {
    let mut client = shop.application();
    let mut transaction = client.transaction().expect("begin");
    let insert = format!(
        "insert into outboxevent values ('{}', 'Order', '{aggregate}', 'OrderPlaced', '{{\"n\": {n}}}')",
        id(n)
    );
    let inserted = transaction.execute(&insert, &[]).expect(&insert);
    let delete = format!("delete from outboxevent where id = '{}'", id(n));
    let deleted = transaction.execute(&delete, &[]).expect(&delete);
    transaction.commit().expect("commit");
    (inserted, deleted)
}

/// The ids that Debezium would send, in the order of their commits.
fn read_slot(shop: &Shop) -> Vec<String> {
    let inserts = decoding::inserts(&mut shop.superuser(), "debezium", "dbz_publication");
    let id = |insert: &Insert| insert.columns["id"].clone().expect("an id");
    inserts.iter().map(id).collect()
}

#[test]
fn the_debezium_page_sends_each_event_through_one_of_the_two_systems_and_leads_back() {
    let shop = Shop::with(TABLE, &["wal_level = logical"]);
    let (exchange, queue) = shop.bind("topic");
    let page = Page::open("debezium.md", &[("'outbox.events'", &format!("'{exchange}'"))]);
    shop.exec("create publication dbz_publication for table outboxevent");
    decoding::make_slot(&mut shop.superuser(), "debezium");
    write(&shop, 1, "42", Some("{}"));
    write_and_delete(&shop, 2, "42");
    assert_eq!(read_slot(&shop), [id(1), id(2)], "sent before");
    write(&shop, 3, "42", Some("{}"));
    write_and_delete(&shop, 4, "43");

    switch(&shop, &page);
    assert_eq!(write(&shop, 5, "42", Some(r#"{"total": 99.90}"#)), 1);
    assert_eq!(write_and_delete(&shop, 6, "43"), (1, 1));
    assert_eq!(write(&shop, 7, "42", None), 1);
    assert_eq!(page.nth(&shop, "5. Let Debezium finish", 0), ["f"]);
    assert_eq!(
        shop.texts("select status || state from outbox.outbox_messages, outbox.outbox_destination_status")[0],
        "readypaused"
    );
    assert_eq!(read_slot(&shop), [id(3), id(4)], "what Debezium sends last");
    assert_eq!(page.section(&shop, "5. Let Debezium finish").concat(), ["t", "t"]);
    shop.wait_drained();
    let arrived = shop.arrived(&queue);
    assert_eq!(sorted(ids(&arrived)), [id(5), id(6), id(7)]);
    let of_key: Vec<Delivery> = arrived
        .into_iter()
        .filter(|d| d.headers["aggregate_id"] == "42")
        .collect();
    assert_eq!(ids(&of_key), [id(5), id(7)]);
    check_message(&of_key[0]);
    assert_eq!(of_key[1].body, b"null");
    let verified = page.section(&shop, "6. Verify").concat();
    assert_eq!(verified.len(), 4, "nothing is wrong: {verified:?}");
    assert!(
        verified[0].starts_with("0|0|0|3") && verified[1].starts_with("3|published|Order:42|"),
        "{verified:?}"
    );

    page.roll_back(&shop, || {
        write(&shop, 8, "42", Some("{}"));
        write_and_delete(&shop, 9, "43");
    });
    write(&shop, 10, "42", Some("{}"));
    assert_eq!(
        read_slot(&shop),
        [id(8), id(9), id(10)],
        "what Debezium sends after the way back"
    );

    switch(&shop, &page);
    write(&shop, 11, "42", Some("{}"));
    assert_eq!(read_slot(&shop), [] as [String; 0]);
    page.section(&shop, "5. Let Debezium finish");
    shop.wait_drained();
    assert_eq!(ids(&shop.arrived(&queue)), [id(11)]);
    page.section(&shop, "7. Clean up");
    assert!(
        shop.is_true(
            "select not exists (select from pg_replication_slots) and not exists (select from pg_publication)"
        )
    );
    page.finish();
}

fn switch(shop: &Shop, page: &Page) {
    page.section(shop, "1. Create the extension beside the old table");
    page.section(shop, "2. Say where to deliver");
    shop.wait_connected();
    page.section(shop, "3. Hold delivery");
    wait_until("delivery to be held", LONG, || {
        shop.is_true("select state = 'paused' from outbox.outbox_destination_status")
    });
    page.section(shop, "4. Switch");
}

fn check_message(message: &Delivery) {
    assert_eq!(message.json(), json!({"total": 99.90}));
    assert_eq!(message.routing_key, "outbox.event.Order");
    assert_eq!(message.headers["id"], id(5).as_str());
    assert_eq!(message.headers["eventType"], "OrderPlaced");
    assert_eq!(message.headers["aggregate_type"], "Order");
}
