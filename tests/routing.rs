//! Tests that a message carries the routing key that its template gives. On a real Postgres and a real RabbitMQ.

use postgres::error::SqlState;
use support::{DB, Session, Stage, wait_drained};

/// The longest value of `{partition}` is known at the call; the partition itself is not.
const TEMPLATE: &str =
    "outbox.routing_key = '{header:region|none}.{type:lower}.{partition}.{destination}.{key|no key}'";

#[test]
fn a_routing_key_is_built_from_headers_partition_destination_and_fallbacks() {
    let stage = Stage::new(&[TEMPLATE]);
    let mut client = stage.connect(DB);
    client.run(
        r#"select outbox_publish('Placed', '1', 'order', '42', headers => '{"region": "eu"}');
               select outbox_publish('Paid', '2', headers => '{"region": ""}');
               select outbox_publish('Sent', '3', headers => '{"region": 7}')"#,
    );
    wait_drained(&stage);
    let mut keys: Vec<String> = stage.all().into_iter().map(|m| m.routing_key).collect();
    keys.sort();
    let mut partition = |seq: i64| {
        let row = client.query_one("select partition_key from outbox_messages where seq = $1", &[&seq]);
        row.expect("the message").get::<_, String>(0)
    };
    let (first, second, third) = (partition(1), partition(2), partition(3));
    let mut expected = [
        format!("eu.placed.{first}.default.order:42"),
        format!("none.paid.{second}.default.no key"),
        format!("7.sent.{third}.default.no key"),
    ];
    expected.sort();
    assert_eq!(keys, expected);
}

#[test]
fn a_header_that_makes_the_routing_key_too_long_is_refused_at_the_call() {
    let cluster = Stage::new(&[TEMPLATE]).cluster;
    let mut client = cluster.connect(DB);
    let mut publish = |bytes: i32| {
        client.execute(
            "select outbox_publish('T', '1', headers => jsonb_build_object('region', repeat('r', $1)))",
            &[&bytes],
        )
    };
    let rest = ".t.p1023.default.no key".len() as i32;
    publish(255 - rest).expect("just fits");
    let error = publish(256 - rest).expect_err("one too long");
    let error = error.as_db_error().expect("an error of the server");
    assert_eq!(error.code(), &SqlState::PROGRAM_LIMIT_EXCEEDED);
    assert_eq!(error.message(), "the routing key is 256 bytes long; the limit is 255");
    assert!(error.hint().is_some());
}
