//! `make demo`: a private Postgres with the extension and a private RabbitMQ; one transaction commits an event, another
//! rolls one back; shows what a consumer gets and what the views say. Uses the same servers as the tests.

use std::time::{Duration, Instant};
use support::{Broker, Cluster, Consumer, wait_until};

fn main() {
    step("starting a private Postgres and a private RabbitMQ under target/ (nothing of this machine's own is touched)");
    let broker = Broker::start();
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = 'amqp://127.0.0.1:{}'", broker.port()))
        .conf("outbox.exchange = 'shop'")
        .conf("outbox.exchange_type = 'topic'")
        .start();
    broker.declare_exchange("shop", "topic", true);
    broker.declare_queue("orders", serde_json::Value::Null);
    broker.bind("orders", "shop", "order.*");
    let consumer = Consumer::new(&broker, "orders");
    let mut app = cluster.connect("postgres");

    step("CREATE EXTENSION outbox");
    run(&mut app, "create extension outbox");
    run(&mut app, "create table orders (id int primary key, total numeric)");
    wait_until("the worker is connected to the broker", Duration::from_secs(30), || {
        let alive = "select count(*) from outbox_worker_status where alive and state = 'connected'";
        app.query_one(alive, &[]).is_ok_and(|row| row.get::<_, i64>(0) > 0)
    });

    step("one transaction writes an order and its event, and rolls back: nobody hears of it");
    run(&mut app, "begin");
    run(&mut app, "insert into orders values (41, 10.00)");
    run(&mut app, &publish(41, "10.00"));
    run(&mut app, "rollback");

    step("another does the same and commits");
    run(&mut app, "begin");
    run(&mut app, "insert into orders values (42, 99.90)");
    run(&mut app, &publish(42, "99.90"));
    let committed = Instant::now();
    run(&mut app, "commit");
    let message = consumer
        .recv(Duration::from_secs(10))
        .expect("the committed event reaches the consumer");
    let took = message.received_at.duration_since(committed);

    step(&format!(
        "the consumer has it, {:.1} ms after COMMIT was sent:",
        took.as_secs_f64() * 1000.0
    ));
    println!("      exchange     {}", message.exchange);
    println!("      routing key  {}", message.routing_key);
    println!(
        "      message id   {}",
        message.message_id.as_deref().unwrap_or_default()
    );
    println!("      body         {}", String::from_utf8_lossy(&message.body));
    assert_eq!(
        message.json()["aggregate_id"],
        "42",
        "the rolled back order must not be seen"
    );
    assert!(
        consumer.recv(Duration::from_millis(300)).is_none(),
        "nothing else may arrive"
    );

    step("what the database says");
    wait_until("the confirm is settled", Duration::from_secs(10), || {
        app.query_one("select published_total from outbox_status", &[])
            .is_ok_and(|row| row.get::<_, i64>(0) == 1)
    });
    show(
        &mut app,
        "select seq, status, type, key, partition_key, attempts from outbox_messages",
    );
    show(
        &mut app,
        "select pending, in_flight, dead, published_total from outbox_status",
    );
    show(&mut app, "select \"check\", ok, problem from outbox_health");

    println!("\n  How to go on: README.md has the six lines for your own server; `make install` installs there.");
}

fn publish(order: i32, total: &str) -> String {
    format!(
        "select outbox_publish('OrderPlaced', '{{\"order\": {order}, \"total\": {total}}}', 'order', '{order}', 'placed')"
    )
}

fn step(text: &str) {
    println!("\n  -- {text}");
}

fn run(client: &mut postgres::Client, sql: &str) {
    println!("      {sql};");
    client.batch_execute(sql).expect("the statement succeeds");
}

/// Prints a result as psql would.
fn show(client: &mut postgres::Client, sql: &str) {
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
