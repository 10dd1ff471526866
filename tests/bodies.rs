//! Message bodies that a function makes: by AMQP and by HTTP, in each format, at a replay, after a restore, under load.
//! The tests of bodies/trouble.rs: which functions may be used, what a function may do, and what happens to the
//! messages it fails for. The tests of bodies/stubborn.rs: functions that trap a cancel.

mod stubborn;
mod trouble;

use std::process::Command;
use std::sync::{Arc, Mutex};

use postgres::NoTls;
use postgres::error::SqlState;
use serde_json::{Value, json};
use support::load::{Load, Plan};
use support::oracle::{Arrived, judge};
use support::*;
use support::{Broker, Cluster, Delivery, Receiver, Reply, wait_until};

/// A role without special rights, with functions in its schema.
pub const SHOP: &str = "create role shopkeeper; create schema shop authorization shopkeeper; set role shopkeeper;
  create function shop.whole(event jsonb) returns jsonb language sql immutable as 'select event';
  create function shop.short(event jsonb) returns json language sql stable as
    $$ select json_build_object('n', event->'payload'->'n', 'by', current_user) $$;
  create function shop.xml(event jsonb) returns text language plpgsql stable as
    $$ begin return '<order n=\"' || (event->'payload'->>'n') || '\"/>'; end $$;
  create function shop.raw(event jsonb) returns bytea language plpgsql as $$ begin return '\\x00ff'; end $$;
  -- Overloads with other argument types, which no destination may call.
  create function shop.whole(event text) returns text language sql immutable as $$ select 'another' $$;
  create function shop.whole(event json) returns text language sql immutable as $$ select 'another' $$;
  reset role;";

/// A stage with these functions. Its cluster may post to loopback.
pub fn shop_stage(conf: &[&str]) -> Stage {
    let stage = Stage::new(&[&["outbox.http_allow = '127.0.0.1'"], conf].concat());
    stage.exec(DB, SHOP);
    stage
}

/// Publishes events 1 to n, each with a different key, in one transaction.
pub fn publish(cluster: &Cluster, destination: &str, n: i32) {
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish('T', jsonb_build_object('n', i), 'order', i::text, destination => '{destination}')
             from generate_series(1, {n}) i"
        ),
    );
}

/// The payload field n of the deliveries, sorted.
pub fn numbers(deliveries: &[Delivery]) -> Vec<i64> {
    let number = |delivery: &Delivery| delivery.json()["n"].as_i64().expect("a number");
    let mut numbers: Vec<i64> = deliveries.iter().map(number).collect();
    numbers.sort_unstable();
    numbers
}

fn content_type(delivery: &Delivery) -> &str {
    delivery.content_type.as_deref().unwrap_or_default()
}

#[test]
fn a_function_makes_the_body_of_a_message_and_other_messages_are_unchanged() {
    let stage = shop_stage(&[]);
    let named = |name: &str, options: &str| stage.destination(stage.broker, name, options);
    let queues = [
        named("whole", "body 'shop.whole'"),
        named("short", "body 'Shop.Short', format 'payload'"),
        named("xml", r#"body '"shop"."xml"'"#),
        named("csv", "content_type 'text/csv', body 'shop.xml'"),
        named("raw", "body 'shop.raw'"),
        named("event", "body 'shop.short', format 'cloudevents'"),
        named("headed", "body 'shop.short', format 'cloudevents_binary'"),
    ];
    stage.exec(
        DB,
        r#"select outbox_enqueue(seq, 'order:42', destination)
           from outbox_publish('Placed', '{"n": 1.50}', 'order', '42', 'Added', '{"n": 0}', '{"ip": "::1"}', '{"tenant": "acme"}',
                               'kim', 'c-1') seq,
                unnest('{whole,short,xml,csv,raw,event,headed}'::text[]) destination"#,
    );
    wait_published(&stage, 8);
    let envelope = stage.all().remove(0);
    assert!(envelope.body.starts_with(br#"{"id":"#), "{envelope:?}");
    let [whole, short, xml, csv, raw, event, headed] = queues.map(|queue| all_of(stage.broker, &queue).remove(0));
    // The function gets the contents of the envelope, and all of them.
    assert_eq!(whole.json(), envelope.json());
    assert_eq!(envelope.json().as_object().map(serde_json::Map::len), Some(14));
    assert_eq!(content_type(&whole), "application/json");
    assert_eq!(short.json(), json!({"n": 1.5, "by": "shopkeeper"}));
    assert!(String::from_utf8_lossy(&short.body).contains("1.50"), "{short:?}");
    assert_eq!(
        (&*xml.body, content_type(&xml)),
        (&br#"<order n="1.50"/>"#[..], "text/plain; charset=utf-8")
    );
    assert_eq!((&csv.body, content_type(&csv)), (&xml.body, "text/csv"));
    assert_eq!(
        (&*raw.body, content_type(&raw)),
        (&[0, 255][..], "application/octet-stream")
    );
    assert_eq!(event.json()["data"], short.json());
    assert_eq!(content_type(&event), "application/cloudevents+json");
    assert_eq!(
        (&headed.body, headed.headers["ce-type"].as_str()),
        (&short.body, Some("Placed"))
    );
    for delivery in [&whole, &xml, &raw, &event] {
        assert_eq!(delivery.message_id, envelope.message_id);
        assert_eq!(delivery.routing_key, envelope.routing_key);
        assert_eq!(delivery.headers["tenant"], "acme");
    }
    assert_eq!(xml.headers["actor"], "kim"); // the headers of the payload format
}

#[test]
fn the_example_of_the_docs_makes_a_body() {
    let docs = include_str!("../docs/formats.md");
    let (_, section) = docs.split_once("## A body made by a function").expect("the section");
    let example = section
        .split("```")
        .nth(1)
        .expect("an example")
        .trim_start_matches("sql");
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let (default, _) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &default);
    assert!(example.contains("exchange 'search'"), "{example}");
    cluster.exec(
        DB,
        &example.replace("exchange 'search'", &format!("exchange '{exchange}'")),
    );
    cluster.exec(
        DB,
        r#"select outbox_publish('Placed', '{"total": 9.90}', 'order', '42', destination => 'search')"#,
    );
    wait_drained(&cluster);
    let body = all_of(broker, &queue)[0].json();
    assert_eq!((&body["id"], &body["total"]), (&json!("42"), &json!(9.9)));
}

#[test]
fn a_body_is_posted_like_a_payload() {
    let stage = shop_stage(&[]);
    let receiver = Receiver::start(|_| Reply::status(200));
    let url = |path: &str| receiver.url(path);
    stage.exec(
        DB,
        &format!(
            "create server xml foreign data wrapper outbox_http options (url '{}', body 'shop.xml', content_type 'text/xml');
             create server raw foreign data wrapper outbox_http options (url '{}', body 'shop.raw')",
            url("/xml"),
            url("/raw")
        ),
    );
    publish(&stage, "xml", 20);
    publish(&stage, "raw", 1);
    wait_published(&stage, 21);
    let requests = receiver.requests();
    let mut bodies: Vec<String> = Vec::new();
    for request in requests.iter().filter(|request| request.path == "/xml") {
        assert_eq!(request.header("content-type"), "text/xml");
        assert_eq!(request.header("outbox-type"), "T");
        bodies.push(String::from_utf8(request.body.clone()).expect("UTF-8"));
    }
    bodies.sort();
    let mut expected: Vec<String> = (1..=20).map(|n| format!("<order n=\"{n}\"/>")).collect();
    expected.sort();
    assert_eq!(bodies, expected);
    let raw = requests
        .iter()
        .find(|request| request.path == "/raw")
        .expect("a request");
    assert_eq!(
        (&*raw.body, raw.header("content-type")),
        (&[0, 255][..], "application/octet-stream")
    );
}

/// A STABLE function reads with the snapshot of its statement, which must not be older than the claim.
#[test]
fn a_function_reads_what_was_committed_with_the_event() {
    let stage = shop_stage(&["outbox.on_dead = 'skip'"]);
    stage.exec(
        DB,
        "create table shop.orders (seq bigint primary key, total int); grant select on shop.orders to shopkeeper;
         create function shop.sell(data jsonb, id text) returns bigint language sql as $$
           with e as (select outbox_publish('Sold', data, 'order', id, destination => 'search') as seq),
                o as (insert into shop.orders select e.seq, 7 from e)
           select e.seq from e $$;
         set role shopkeeper;
         create function shop.order_of(event jsonb) returns jsonb language sql stable as $$
           select event || jsonb_build_object('total', o.total) from shop.orders o where o.seq = (event->>'seq')::bigint $$",
    );
    let queue = stage.destination(stage.broker, "search", "body 'shop.order_of'");
    stage.exec(DB, "select outbox_check('search')"); // waits until the worker knows the destination
    let plan = Plan {
        writers: 4,
        transactions_per_s: None,
        events_per_writer: 1_000,
        statement: "select shop.sell($1::jsonb, $2::text)",
        ..Plan::default()
    };
    let sent = Load::start(&stage, &plan).finish();
    wait_drained(&stage);
    let blind: i64 = stage.query_one(DB, "select count(*) from outbox_dead");
    assert_eq!(blind, 0, "orders that the function did not see");
    let arrived = all_of(stage.broker, &queue);
    assert!(arrived.iter().all(|delivery| delivery.json()["total"] == 7));
    let arrived: Vec<Arrived> = arrived.iter().map(Arrived::new).collect();
    judge(&sent, &arrived).assert_perfect();
}

#[test]
fn events_of_a_custom_source_get_bodies_too() {
    let stage = shop_stage(&[]);
    let queue = stage.destination(stage.broker, "search", "body 'shop.short'");
    stage.exec(
        DB,
        "set role shopkeeper; create table shop.events (seq int primary key, data jsonb, at timestamptz default now());
         insert into shop.events select i, jsonb_build_object('n', i) from generate_series(1, 250) i; reset role;
         select outbox_source_set('shop.events', seq => 'seq', type => '''T''', created_at => 'at', payload => 'data');
         select outbox_enqueue_many(array(select generate_series(1, 250)), destination => 'search')",
    );
    wait_drained(&stage);
    assert_eq!(numbers(&all_of(stage.broker, &queue)), (1..=250).collect::<Vec<i64>>());
}

#[test]
fn bodies_that_fail_at_random_keep_the_order_of_their_keys() {
    let quick = [
        "outbox.retry_backoff = '10ms'",
        "outbox.max_attempts = 100",
        "outbox.workers = 2",
    ];
    let stage = shop_stage(&quick);
    stage.exec(
        DB,
        "set role shopkeeper; create function shop.chance(event jsonb) returns jsonb language plpgsql as $$
         begin if random() < 0.3 then raise 'by chance'; end if; return event; end $$",
    );
    let queue = stage.destination(stage.broker, r#""default""#, "body 'shop.chance'");
    stage.exec(DB, "select outbox_check('default')"); // waits until the workers know the destination
    let plan = Plan {
        mixed: true,
        ..Plan::default()
    };
    let load = Load::start(&stage, &plan);
    load.wait_for_more(600);
    let sent = load.stop();
    wait_drained(&stage);
    let retried: i64 = stage.query_one(DB, "select count(*) from outbox_history where attempts > 1");
    assert!(retried > 10, "{retried} messages tried again");
    let arrived = arrived(&all_of(stage.broker, &queue));
    judge(&sent, &arrived).assert_perfect();
}

#[test]
fn large_bodies_arrive_whole_and_with_leases_in_order() {
    for leasing in ["on", "off"] {
        let stage = shop_stage(&[&format!("outbox.leasing = {leasing}")]);
        stage.exec(
            DB,
            "set role shopkeeper; create function shop.large(event jsonb) returns jsonb language sql immutable as $$
             select jsonb_build_object('n', event->'payload'->'n', 'text', repeat('x', 1048576)) $$",
        );
        let queue = stage.destination(stage.broker, "large", "body 'shop.large'");
        stage.exec(
            DB,
            "select outbox_publish('T', jsonb_build_object('n', i), 'one', 'key', destination => 'large') from generate_series(1, 60) i",
        );
        wait_drained(&stage);
        let arrived = all_of(stage.broker, &queue);
        assert!(arrived.iter().all(|delivery| delivery.body.len() > 1_048_576));
        let order: Vec<i64> = arrived
            .iter()
            .map(|delivery| delivery.json()["n"].as_i64().expect("n"))
            .collect();
        match leasing {
            "on" => assert_eq!(order, (1..=60).collect::<Vec<i64>>()),
            _ => assert_eq!(numbers(&arrived), (1..=60).collect::<Vec<i64>>()),
        }
    }
}

#[test]
fn a_function_that_is_changed_makes_the_next_bodies_and_those_of_a_replay() {
    let stage = shop_stage(&[]);
    let queue = stage.destination(stage.broker, "search", "body 'shop.xml'");
    let mut arrived = Vec::new();
    let mut next = |change: &str, act: &str| {
        stage.exec(DB, &format!("set role shopkeeper; {change}"));
        stage.exec(DB, act);
        wait_drained(&stage);
        arrived.extend(all_of(stage.broker, &queue));
        arrived.last().cloned().expect("a message")
    };
    let one = "select outbox_publish('T', '{\"n\": 1}', destination => 'search')";
    assert_eq!(next("", one).body, br#"<order n="1"/>"#);
    let replaced =
        "create or replace function shop.xml(event jsonb) returns text language sql as $$ select 'replaced' $$";
    assert_eq!(next(replaced, one).body, b"replaced");
    // A function with the same name and another return type.
    let another = "drop function shop.xml(jsonb);
                   create function shop.xml(e jsonb) returns jsonb language plpgsql as $$ begin return '{\"n\": 7}'; end $$";
    let made = next(another, one);
    assert_eq!(
        (&*made.body, content_type(&made)),
        (&br#"{"n": 7}"#[..], "application/json")
    );
    let replayed = next("", "select outbox_replay(seq_from => 1, seq_to => 1, dry_run => false)");
    assert_eq!(
        (&*replayed.body, &replayed.headers["replayed"]),
        (&br#"{"n": 7}"#[..], &Value::Bool(true))
    );
    assert_eq!(arrived.len(), 4);
    assert_eq!(arrived[0].message_id, arrived[3].message_id);
}

#[test]
fn a_relay_gets_the_event_and_may_call_the_function() {
    let stage = shop_stage(&[]);
    stage.destination(stage.broker, "search", "body 'shop.xml'");
    stage.exec(DB, "select outbox_pause('search')");
    publish(&stage, "search", 1);
    let row = stage
        .connect(DB)
        .query_one(
            "select payload, shop.xml(jsonb_build_object('payload', payload)) from outbox_fetch_unpublished(1, 'search')",
            &[],
        )
        .expect("a message");
    assert_eq!(row.get::<_, Value>(0), json!({"n": 1}));
    assert_eq!(row.get::<_, String>(1), r#"<order n="1"/>"#);
}

#[test]
fn a_destination_is_dumped_with_its_function() {
    let stage = shop_stage(&["max_worker_processes = 20"]);
    stage.exec(
        DB,
        "set role shopkeeper; create table shop.orders (id int primary key, total int); insert into shop.orders values (1, 5);
         create function shop.order_of(event jsonb) returns jsonb stable
           return (select jsonb_build_object('n', o.total) from shop.orders o where o.id = (event->'payload'->>'n')::int);",
    );
    let queue = stage.destination(stage.broker, "search", "body 'shop.order_of'");
    pause(&stage);
    publish(&stage, "search", 1);
    stage.exec(DB, "create database copy");
    let programs = stage.installation().bin("psql");
    let done = Command::new("sh")
        .args([
            "-c",
            "pg_dump -h $H -p $P -U postgres postgres | psql -q -h $H -p $P -U postgres -v ON_ERROR_STOP=1 copy",
        ])
        .env(
            "PATH",
            format!("{}:/usr/bin:/bin", programs.parent().expect("a directory").display()),
        )
        .env("H", "127.0.0.1")
        .env("P", stage.port().to_string())
        .output()
        .expect("a shell");
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{errors}");
    stage.exec("copy", "select outbox_adopt()");
    stage.set_conf("outbox.enabled", "on");
    for database in [DB, "copy"] {
        let ended = "select count(*) = 1 from outbox_history";
        wait_until("the message to be delivered", LONG, || stage.query_one(database, ended));
    }
    assert_eq!(numbers(&all_of(stage.broker, &queue)), [5, 5]);
}

#[test]
fn a_body_option_that_no_message_could_use_is_refused_or_warned_about() {
    let cluster = idle_cluster(&[]);
    cluster.exec(DB, SHOP);
    let make = |options: &str| {
        format!("create server s foreign data wrapper outbox_http options (url 'https://h', {options})")
    };
    for options in [
        "body 'f'",
        "body ''",
        "body 'shop.whole(jsonb)'",
        "body 'shop.whole; drop table x'",
        "body 'shop.whole', format 'envelope'",
    ] {
        let error = refused(&cluster, &make(options));
        assert_eq!(error.code(), &SqlState::INVALID_PARAMETER_VALUE, "{options}: {error:?}");
        assert!(
            error.message().contains("\"body\"") && error.hint().is_some(),
            "{options}: {error:?}"
        );
    }
    let notices = Arc::new(Mutex::new(Vec::new()));
    let received = Arc::clone(&notices);
    let mut config: postgres::Config = cluster.conn_string(DB).parse().expect("a connection string");
    config.notice_callback(move |notice| received.lock().expect("no panic").push(notice.message().to_owned()));
    let mut client = config.connect(NoTls).expect("connect");
    let mut warnings = |sql: &str| {
        client.run(sql);
        std::mem::take(&mut *notices.lock().expect("no panic"))
    };
    assert!(warnings(&make("body 'shop.whole'")).is_empty());
    let messages = warnings("alter server s options (set body 'shop.nothing')");
    assert!(
        messages.len() == 1 && messages[0].contains("shop.nothing(jsonb) does not exist"),
        "{messages:?}"
    );
    let (ok, problem) = health(&cluster, "bodies");
    assert!(
        !ok && problem.contains("s: ") && problem.contains("does not exist"),
        "{problem}"
    );
    let step = r#"select ok::text || ' ' || detail from outbox_check('s') where step = 'body'"#;
    let checked: String = cluster.query_one(DB, step);
    assert!(checked.starts_with("false function shop.nothing(jsonb)"), "{checked}");
    assert!(warnings("alter server s options (set body 'shop.raw')").is_empty());
    assert!(health(&cluster, "bodies").0);
    assert_eq!(cluster.query_one::<String>(DB, step), "true its function can be called");
    assert_eq!(warnings("alter server s options (add format 'cloudevents')").len(), 1);
    assert!(warnings("alter server s options (drop body)").is_empty());
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_check('s') where step = 'body'"),
        0
    );
}
