//! `make demo`: a private Postgres with the extension, a private RabbitMQ, and `outboxctl listen`. One transaction
//! rolls an event back, another commits one; the demo shows what both receivers get, and that a subscription chooses.
//! Then the receiver by HTTP rejects a message: outboxctl and its page show why, and retry it. The demo uses the same
//! servers as the tests. All output is that of real servers.

#[path = "demo/outside.rs"]
mod outside;

use std::io::{IsTerminal, stdin, stdout};
use std::time::Instant;

use outside::{Listening, Outside};
use postgres::Client;
use support::{Broker, Cluster, Consumer, LONG, wait_for, wait_until};

fn main() {
    step(
        "private servers under target/: the destination default is RabbitMQ; warehouse, a receiver by HTTP, gets OrderPlaced only",
    );
    let broker = Broker::shared();
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = 'amqp://127.0.0.1:{}'", broker.port()))
        .conf("outbox.exchange = 'shop'")
        .conf("outbox.exchange_type = 'topic'")
        .conf("outbox.http_allow = '127.0.0.1'")
        .start();
    broker.declare_exchange("shop", "topic", true);
    broker.declare_queue("orders", serde_json::Value::Null);
    broker.bind("orders", "shop", "order.*");
    let consumer = Consumer::new(broker, "orders");
    let outside = Outside::of(&cluster);
    let mut app = cluster.connect("postgres");
    run(&mut app, "create extension outbox");
    run(&mut app, "create table orders (id int primary key, total numeric)");
    let mut warehouse = outside.listen("0", &[]);
    println!("        {}", warehouse.first_line);
    let at = format!(
        "create server warehouse foreign data wrapper outbox_http options (url '{}')",
        warehouse.url()
    );
    run(&mut app, &at);
    run(
        &mut app,
        "select outbox_subscribe('warehouse', types => '{OrderPlaced}')",
    );
    wait_until("the worker is connected to the broker", LONG, || {
        let alive = "select count(*) from outbox_worker_status where alive and state = 'connected'";
        app.query_one(alive, &[]).is_ok_and(|row| row.get::<_, i64>(0) > 0)
    });

    step("a transaction that rolls back sends nothing, one that commits sends its event to both");
    run(&mut app, "begin; insert into orders values (41, 10.00)");
    run(&mut app, &publish("OrderPlaced", 41));
    run(&mut app, "rollback");
    run(&mut app, "begin; insert into orders values (42, 99.90)");
    run(&mut app, &publish("OrderPlaced", 42));
    let committed = Instant::now();
    run(&mut app, "commit");
    by_rabbitmq(&consumer, 2, Some(committed));
    by_http(&mut app, &mut warehouse, 2);

    step("an event of another type goes to RabbitMQ only");
    run(&mut app, &publish("OrderPaid", 42));
    by_rabbitmq(&consumer, 3, None);
    wait_for_end(&mut app, 3);
    let port = warehouse.port();
    assert!(
        warehouse.end().is_empty(),
        "the warehouse got an event that it did not ask for"
    );

    step("the warehouse rejects an order; RabbitMQ gets it all the same");
    let mut rejecting = outside.listen(&port, &["--answer", "422"]);
    run(&mut app, &publish("OrderPlaced", 43));
    by_rabbitmq(&consumer, 4, None);
    by_http(&mut app, &mut rejecting, 4);
    rejecting.end();

    step("what the database shows, and why a message is dead");
    show(
        &mut app,
        "select seq, type, key, destination, status, attempts from outbox_messages order by seq, destination",
    );
    let remedy = outside.show(&["show", "4", "--destination", "warehouse"]);

    step("the warehouse is repaired, and the message retried");
    let mut repaired = outside.listen(&port, &[]);
    if stdin().is_terminal() && stdout().is_terminal() {
        let page = outside.serve();
        step(&format!(
            "retry it on the page {}, or press Enter, and a command does it",
            page.url
        ));
        println!("      From another terminal in this directory, until then:");
        println!("      {}", outside.variables());
        println!("      {} top", outside.program());
        let _ = stdin().read_line(&mut String::new());
    }
    retry(&mut app, &outside, &remedy, &mut repaired);

    println!("\n  How to continue: README.md has the steps for your own server.");
}

/// Retries the message by the command that `show` named. At a terminal, a person may have retried it on the page
/// meanwhile, or discarded it.
fn retry(app: &mut Client, outside: &Outside, remedy: &str, warehouse: &mut Listening) {
    let is_dead = "select exists (select from outbox_dead where seq = 4 and destination = 'warehouse')";
    match app.query_one(is_dead, &[]).expect("the dead letters").get(0) {
        true => outside.run(&remedy.split(' ').chain(["--yes"]).collect::<Vec<_>>()),
        false => println!("      That was done on the page."),
    }
    let discarded: bool = wait_for("the message to end", LONG, || {
        let ended = "select discarded from outbox_history where seq = 4 and destination = 'warehouse'";
        Some(app.query_opt(ended, &[]).expect("the history")?.get(0))
    });
    match discarded {
        true => println!("      It was discarded, so the warehouse does not receive it."),
        false => by_http(app, warehouse, 4),
    }
}

/// Waits until no message of this event is pending.
fn wait_for_end(app: &mut Client, seq: i64) {
    wait_until("the messages to end", LONG, || {
        let pending = "select from outbox_messages where seq = $1 and status not in ('published', 'dead')";
        app.query(pending, &[&seq]).expect("the messages").is_empty()
    });
}

/// Prints the message that the consumer receives, as `outboxctl listen` does, and how long after its COMMIT.
fn by_rabbitmq(consumer: &Consumer, seq: i64, committed: Option<Instant>) {
    let message = consumer.recv(LONG).expect("the event reaches the consumer");
    let event = message.json();
    assert_eq!(event["seq"], seq);
    let body = String::from_utf8_lossy(&message.body);
    let payload = body
        .split_once("\"payload\":")
        .and_then(|(_, rest)| rest.split_once(",\"created_at\""));
    let (payload, _) = payload.expect("a payload");
    let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
    let took = committed.map_or_else(String::new, |committed| {
        let took = message.received_at.duration_since(committed);
        format!(", {:.1} ms after COMMIT was sent", took.as_secs_f64() * 1000.0)
    });
    println!(
        "      RabbitMQ:  #{seq} {} {} {payload}{took}",
        text("type"),
        text("key")
    );
}

/// Prints the line that `outboxctl listen` printed for this event.
fn by_http(app: &mut Client, listening: &mut Listening, seq: i64) {
    wait_for_end(app, seq); // it prints before it answers
    println!("      warehouse: {}", listening.event(seq));
}

fn publish(kind: &str, order: i32) -> String {
    format!(
        "select outbox_publish(type => '{kind}', payload => '{{\"order\": {order}}}', aggregate_type => 'order', aggregate_id => '{order}')"
    )
}

fn step(text: &str) {
    println!("\n  -- {text}");
}

fn run(client: &mut Client, sql: &str) {
    println!("      {sql};");
    client.batch_execute(sql).expect("the statement succeeds");
}

/// Prints the result of a query in columns, like psql.
fn show(client: &mut Client, sql: &str) {
    println!("      {sql};");
    let messages = client.simple_query(sql).expect("the query succeeds");
    let mut rows: Vec<Vec<String>> = Vec::new();
    for message in &messages {
        if let postgres::SimpleQueryMessage::Row(row) = message {
            if rows.is_empty() {
                rows.push(row.columns().iter().map(|column| column.name().to_string()).collect());
            }
            rows.push(
                (0..row.len())
                    .map(|i| row.get(i).unwrap_or_default().to_string())
                    .collect(),
            );
        }
    }
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len))
        .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    for row in &rows {
        let line: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        println!("        {}", line.join(" | ").trim_end());
    }
}
