//! `make demo`: a private Postgres with the extension and a private RabbitMQ; one transaction commits an event, another
//! rolls one back; shows what a consumer gets and what the views say. Then a message that does not move: outboxctl and its
//! page say why, and mend it. Uses the same servers as the tests. Nothing that it prints is made up.

#[path = "demo/outside.rs"]
mod outside;

use std::io::{IsTerminal, stdin, stdout};
use std::time::{Duration, Instant};

use outside::{Outside, Page};
use support::{Broker, Cluster, Consumer, wait_for, wait_until};

const SHORT: Duration = Duration::from_secs(10);

fn main() {
    step("starting a private Postgres and a private RabbitMQ under target/ (nothing of this machine's own is touched)");
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
    let committed = place_order(&mut app, 42, "99.90");
    let message = consumer.recv(SHORT).expect("the committed event reaches the consumer");
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
    assert!(
        consumer.recv(Duration::from_millis(300)).is_none(),
        "nothing else may arrive"
    );

    step("what the database says");
    wait_until("the confirm is settled", SHORT, || {
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
    step("the same from outside the server, as long as this demo runs: the Outbox Monitor, a web page");
    println!("      {}", page.url());
    println!("\n      and a program, from another terminal in this directory:");
    println!("      {}", outside.variables());
    for command in ["status", "list --status published", "show 2", "top"] {
        println!("      {} {command}", outside.program());
    }

    let seq = a_message_that_does_not_move(&mut app, &outside);
    if stdin().is_terminal() && stdout().is_terminal() {
        step("find out why on the page, and mend it there with two clicks; or press Enter, and two commands do it");
        let _ = stdin().read_line(&mut String::new());
    } else {
        what_the_page_says(&page);
    }
    mended(&mut app, &outside, seq, &consumer);
    step("who did what, and why");
    show(
        &mut app,
        "select actor, action, filter, reason, application_name from outbox_audit",
    );

    println!(
        "\n  How to go on: README.md has the steps for your own server; `make install` and `make install-ctl` install there."
    );
}

/// Delivery is paused, and an order is placed. Returns the seq of its event.
fn a_message_that_does_not_move(app: &mut postgres::Client, outside: &Outside) -> i64 {
    step("somebody pauses delivery, and another order is placed: its event does not move");
    outside.run(&["pause", "--reason", "the broker moves to another host"]);
    // It takes up to a second until the worker holds still.
    wait_until("the worker to hear of it", SHORT, || {
        let holds = "select exists (select from outbox_connections where state = 'paused')";
        app.query_one(holds, &[]).is_ok_and(|row| row.get(0))
    });
    place_order(app, 43, "12.50");
    app.query_one("select max(seq) from outbox", &[])
        .expect("the message waits")
        .get(0)
}

/// Where nobody looks, the page is looked at once.
fn what_the_page_says(page: &Page) {
    step("what the page says, fetched once, as nobody sits here who could look at it:");
    let banner = wait_for("the page to say why", SHORT, || page.banner());
    println!("      {banner}");
}

/// Two commands: the first says why and what helps, and the second is what it says. Who sat here meanwhile may have done it on
/// the page, or something else.
fn mended(app: &mut postgres::Client, outside: &Outside, seq: i64, consumer: &Consumer) {
    step("why?");
    let said = outside.run(&["show", &seq.to_string()]);
    match said
        .lines()
        .find_map(|line| line.trim().strip_prefix("Fix: outboxctl "))
    {
        Some(remedy) => {
            step("what it says helps:");
            outside.run(&remedy.split(' ').collect::<Vec<_>>());
        }
        None => step("nothing keeps it any more: that was done on the page"),
    }
    let ended = "select discarded from outbox_history where seq = $1";
    let discarded = wait_for("the message to move", SHORT, || {
        let row = app.query_opt(ended, &[&seq]).expect("the history");
        row.map(|row| row.get::<_, bool>(0))
    });
    if discarded {
        return step("it was discarded, so nobody gets it");
    }
    let message = wait_for("the message that waited", SHORT, || {
        consumer.recv(SHORT).filter(|message| message.json()["seq"] == seq)
    });
    step("the consumer has it:");
    received(&message);
}

/// Returns when COMMIT was sent.
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
