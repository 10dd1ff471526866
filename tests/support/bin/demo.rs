//! `make demo`: a private Postgres with the extension and a private RabbitMQ. One transaction commits an event, another
//! rolls one back; the demo shows what a consumer receives and what the views show. Then a message is not delivered:
//! outboxctl and its page show why, and fix it. The demo uses the same servers as the tests. All output is that of real
//! servers.

#[path = "demo/outside.rs"]
mod outside;

use std::io::{IsTerminal, stdin, stdout};
use std::time::Instant;

use outside::{Outside, Page};
use support::{Broker, Cluster, Consumer, LONG, wait_for, wait_until};

fn main() {
    step(
        "starting a private Postgres and a private RabbitMQ under target/ (no other server of this machine is touched)",
    );
    let broker = Broker::shared();
    let cluster = Cluster::builder()
        .conf(&format!("outbox.url = 'amqp://127.0.0.1:{}'", broker.port()))
        .conf("outbox.exchange = 'shop'")
        .conf("outbox.exchange_type = 'topic'")
        .start();
    broker.declare_exchange("shop", "topic", true);
    broker.declare_queue("orders", serde_json::Value::Null);
    broker.bind("orders", "shop", "order.*");
    let consumer = Consumer::new(broker, "orders");
    let mut app = cluster.connect("postgres");

    step("CREATE EXTENSION outbox");
    run(&mut app, "create extension outbox");
    run(&mut app, "create table orders (id int primary key, total numeric)");
    wait_until("the worker is connected to the broker", LONG, || {
        let alive = "select count(*) from outbox_worker_status where alive and state = 'connected'";
        app.query_one(alive, &[]).is_ok_and(|row| row.get::<_, i64>(0) > 0)
    });

    step("a transaction writes an order and its event, and rolls back: no consumer receives the event");
    run(&mut app, "begin");
    run(&mut app, "insert into orders values (41, 10.00)");
    run(&mut app, &publish(41, "10.00"));
    run(&mut app, "rollback");

    step("another transaction does the same and commits");
    let committed = place_order(&mut app, 42, "99.90");
    let message = consumer.recv(LONG).expect("the committed event reaches the consumer");
    let took = message.received_at.duration_since(committed);

    step(&format!(
        "the consumer has it, {:.1} ms after COMMIT was sent:",
        took.as_secs_f64() * 1000.0
    ));
    received(&message);
    assert_eq!(
        message.json()["aggregate_id"],
        "42",
        "the rolled back order must not be seen"
    );

    step("what the database shows");
    wait_until("the confirm is settled", LONG, || {
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

    let outside = Outside::of(&cluster);
    let page = outside.serve();
    step("the same from outside the server, while this demo runs: the Outbox Monitor, a web page");
    println!("      {}", page.url());
    println!("\n      and a program, from another terminal in this directory:");
    println!("      {}", outside.variables());
    for command in ["status", "list --status published", "show 2", "top"] {
        println!("      {} {command}", outside.program());
    }

    let seq = a_message_that_is_not_delivered(&mut app, &outside);
    if stdin().is_terminal() && stdout().is_terminal() {
        step("find out why on the page, and fix it there with two clicks; or press Enter, and two commands fix it");
        let _ = stdin().read_line(&mut String::new());
    } else {
        what_the_page_shows(&page);
    }
    find_and_fix(&mut app, &outside, seq, &consumer);
    step("who did what, and why");
    show(
        &mut app,
        "select actor, action, filter, reason, application_name from outbox_audit",
    );

    println!(
        "\n  How to continue: README.md has the steps for your own server; `make install` and `make install-ctl` \
         install there."
    );
}

/// Pauses delivery and places an order. Returns the seq of its event.
fn a_message_that_is_not_delivered(app: &mut postgres::Client, outside: &Outside) -> i64 {
    step("an operator pauses delivery, and another order is placed: its event is not delivered");
    outside.run(&["pause", "--reason", "the broker moves to another host"]);
    // The worker takes up to a second to pause.
    wait_until("the worker to pause", LONG, || {
        let is_paused = "select exists (select from outbox_connections where state = 'paused')";
        app.query_one(is_paused, &[]).is_ok_and(|row| row.get(0))
    });
    place_order(app, 43, "12.50");
    app.query_one("select max(seq) from outbox", &[])
        .expect("the message waits")
        .get(0)
}

/// Fetches the page once, since no person is at a terminal to open it.
fn what_the_page_shows(page: &Page) {
    step("what the page shows, fetched once, since there is no terminal:");
    let banner = wait_for("the page to show why", LONG, || page.banner());
    println!("      {banner}");
}

/// Runs two commands: the first shows the reason and the fix, and the second is that fix. At a terminal, a person may
/// have resumed delivery on the page meanwhile, or discarded the message.
fn find_and_fix(app: &mut postgres::Client, outside: &Outside, seq: i64, consumer: &Consumer) {
    step("why?");
    let shown = outside.run(&["show", &seq.to_string()]);
    match shown
        .lines()
        .find_map(|line| line.trim().strip_prefix("Fix: outboxctl "))
    {
        Some(remedy) => {
            step("the fix that it shows:");
            outside.run(&remedy.split(' ').collect::<Vec<_>>());
        }
        None => step("nothing blocks it any more: that was done on the page"),
    }
    let ended = "select discarded from outbox_history where seq = $1";
    let discarded = wait_for("the message to leave the outbox", LONG, || {
        let row = app.query_opt(ended, &[&seq]).expect("the history");
        row.map(|row| row.get::<_, bool>(0))
    });
    if discarded {
        return step("it was discarded, so no consumer receives it");
    }
    let message = wait_for("the message that waited", LONG, || {
        let message = consumer.recv(LONG)?;
        assert_ne!(
            message.json()["aggregate_id"],
            "41",
            "the rolled back order must not be seen"
        );
        Some(message).filter(|message| message.json()["seq"] == seq) // a person may have sent another
    });
    step("the consumer has it:");
    received(&message);
}

/// Places an order in one transaction. Returns the time just before COMMIT is sent.
fn place_order(app: &mut postgres::Client, order: i32, total: &str) -> Instant {
    run(app, "begin");
    run(app, &format!("insert into orders values ({order}, {total})"));
    run(app, &publish(order, total));
    let committed = Instant::now();
    run(app, "commit");
    committed
}

fn received(message: &support::Delivery) {
    println!("      exchange     {}", message.exchange);
    println!("      routing key  {}", message.routing_key);
    println!(
        "      message id   {}",
        message.message_id.as_deref().unwrap_or_default()
    );
    println!("      body         {}", String::from_utf8_lossy(&message.body));
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

/// Prints the result of a query in columns, like psql.
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
