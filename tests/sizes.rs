//! Tests that large input takes down no server and delays no delivery. Sizes are refused before memory is allocated for
//! them, and where the process gets no memory the statement ends with an error.

use postgres::error::{DbError, SqlState};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use support::{Broker, Cluster, process};
use support::{DB, Stage, all_of, exchange_and_queue, idle_cluster, outbox_cluster, unconnected_builder, wait_drained};

/// 54000 or 53200: too large, or no memory. Any other error, such as a lost connection, is a defect.
fn refusal(cluster: &Cluster, sql: &str) -> DbError {
    let refused = cluster.connect(DB).batch_execute(sql).expect_err(sql);
    let refused = refused
        .as_db_error()
        .unwrap_or_else(|| panic!("{sql}: the session ended: {refused}"));
    let expected = [SqlState::PROGRAM_LIMIT_EXCEEDED, SqlState::OUT_OF_MEMORY];
    assert!(expected.contains(refused.code()), "{sql}: {refused:?}");
    refused.clone()
}

#[test]
fn when_memory_runs_out_the_statement_fails_and_the_server_survives() {
    let small = ["outbox.workers = 0", "shared_buffers = 16MB"];
    let builder = unconnected_builder("", "x", &small);
    // Otherwise the extension has 1 GiB before it asks the kernel, and only Postgres would get no memory.
    let cluster = builder.variable("MIMALLOC_ARENA_RESERVE", Path::new("32768")).start();
    cluster.exec(
        DB,
        "create table t (id int primary key, name text); select outbox_capture('t')",
    );
    let pid = cluster.pid().to_string();
    let mut refused = 0;
    // New sessions inherit the limit. Each step has memory for one or two more copies of the large value. So each copy,
    // of Postgres and of the extension, is once the one that gets no memory.
    const MB: usize = 40;
    const LIMITS_MB: usize = 8;
    for limit_mb in (330..).step_by(60).take(LIMITS_MB) {
        let limit = format!("--as={}:", limit_mb << 20);
        let mut prlimit = Command::new("prlimit");
        prlimit.args(["--pid", &pid, &limit]);
        process::run_as(&mut prlimit, process::postgres_account());
        assert!(prlimit.status().expect("run prlimit").success());
        let large = format!("repeat('x', {MB} * 1024 * 1024)");
        for sql in [
            format!("select outbox_publish('T', to_jsonb({large}))"),
            format!("select outbox_publish('T', '{{}}', actor => {large})"),
            format!("select outbox_publish({large}, '{{}}')"),
            format!("select outbox_publish('T', '{{}}', headers => jsonb_build_object('x', {large}))"),
            format!("select outbox_enqueue(1, {large})"),
            format!("insert into t select 1, {large}"),
            "insert into t select n, repeat('x', 15000000) from generate_series(1, 4) n; rollback to s".to_owned(),
            format!("select outbox_enqueue_many(array_fill(0::bigint, array[{MB} * 100000]))"),
        ] {
            let error = cluster.connect(DB).batch_execute(&sql).expect_err(&sql);
            let error = error
                .as_db_error()
                .unwrap_or_else(|| panic!("{limit_mb} MB, {sql}: the session ended: {error}"));
            refused += 1;
            let expected = [
                SqlState::PROGRAM_LIMIT_EXCEEDED,
                SqlState::OUT_OF_MEMORY,
                SqlState::INVALID_PARAMETER_VALUE,   // seq 0
                SqlState::NO_ACTIVE_SQL_TRANSACTION, // the rows were inserted
            ];
            assert!(expected.contains(error.code()), "{limit_mb} MB, {sql}: {error:?}");
            assert!(
                error.detail().is_none_or(|detail| !detail.contains("backtrace")),
                "{error:?}"
            );
        }
    }
    assert_eq!(refused, LIMITS_MB * 8);
    assert_eq!(cluster.pid().to_string(), pid);
}

#[test]
fn any_number_of_messages_is_enqueued_at_once() {
    let cluster = idle_cluster(&[]);
    cluster.draw_seqs(25_010);
    let enqueued: i64 = cluster.query_one(
        DB,
        "select outbox_enqueue_many(array(select n from generate_series(1, 25000) n), 'key')",
    );
    assert_eq!(enqueued, 25_000);
    let again: i64 = cluster.query_one(
        DB,
        "select outbox_enqueue_many(array(select n from generate_series(24990, 25010) n), 'key')",
    );
    assert_eq!(again, 10);
}

#[test]
fn all_text_of_an_event_counts() {
    let cluster = idle_cluster(&[]);
    for sql in [
        "select outbox_publish('T', '{}', actor => repeat('x', 17 << 20))",
        "select outbox_publish('T', to_jsonb(repeat('x', 9 << 20)), actor => repeat('x', 9 << 20))",
        "select outbox_publish('T', to_jsonb(repeat('x', 9 << 20)), metadata => jsonb_build_object('x', repeat('x', 9 << 20)))",
        "select outbox_publish('T', to_jsonb(repeat('x', 9 << 20)), actor => repeat('x', 9 << 20), available_at => now() + '1 h')",
    ] {
        assert_eq!(
            refusal(&cluster, sql).code(),
            &SqlState::PROGRAM_LIMIT_EXCEEDED,
            "{sql}"
        );
    }
    for setting in ["actor", "correlation_id", "metadata", "headers"] {
        let sql =
            format!("select set_config('outbox.{setting}', '{{\"x\": \"' || repeat('x', 2 << 20) || '\"}}', false)");
        let refused = cluster.connect(DB).batch_execute(&sql).expect_err(&sql);
        assert_eq!(
            refused.code(),
            Some(&SqlState::INVALID_PARAMETER_VALUE),
            "{sql}: {refused:?}"
        );
    }
    let bytes: i32 = cluster.query_one(
        DB,
        "with e as (select outbox_publish('T', '{}', actor => 'Änne') as seq) select 0 from e;",
    );
    assert_eq!(bytes, 0);
    assert_eq!(
        cluster.query_one::<i32>(DB, "select body_bytes from outbox_events"),
        2 + 5
    );
}

#[test]
fn a_stored_event_that_is_too_large_becomes_a_dead_letter_and_delays_no_other() {
    let stage = Stage::new(&[]);
    stage.exec(
        DB,
        "insert into outbox_events (seq, id, type, payload, actor) values
           (101, gen_random_uuid(), 'T', '{}', repeat('x', 60 << 20)), (102, gen_random_uuid(), 'T', '{}', 'ann'),
           (103, gen_random_uuid(), 'T', to_jsonb(repeat('x', 10 << 20)), repeat('x', 10 << 20)),
           (104, gen_random_uuid(), 'T', '{}', null);
         select outbox_enqueue(n) from unnest('{101,102,103,104}'::bigint[]) n",
    );
    wait_drained(&stage);
    let dead: String = stage.query_one(
        DB,
        "select string_agg(seq || ': ' || reason, '; ' order by seq) from outbox_dead",
    );
    assert!(
        dead.starts_with("101: ") && dead.contains("; 103: ") && dead.contains("62914560 bytes"),
        "{dead}"
    );
    assert_eq!(stage.all().len(), 2);
}

/// The broker takes 16 MiB, as RabbitMQ 4 does by default, and an envelope is larger than its event.
#[test]
fn the_largest_event_arrives_and_one_byte_more_is_refused_at_the_call() {
    let stage = Stage::new(&[]);
    let mut client = stage.connect(DB);
    const LIMIT: i32 = 15 << 20;
    const QUOTES: i32 = 2;
    let publish = "select outbox_publish('Largest', to_jsonb(repeat('x', $1)), 'item', 'large')";
    client
        .execute(publish, &[&(LIMIT - QUOTES)])
        .expect("publish the largest");
    let refused = client
        .execute(publish, &[&(LIMIT - QUOTES + 1)])
        .expect_err("a byte above the limit");
    let refused = refused.as_db_error().expect("an error of the server");
    assert_eq!(*refused.code(), SqlState::PROGRAM_LIMIT_EXCEEDED);
    assert_eq!(
        refused.message(),
        "the event has 15728641 bytes, which exceeds the limit of 15 MiB"
    );
    assert!(
        refused.detail().is_some_and(|detail| detail.contains("16 MiB")),
        "{refused:?}"
    );
    assert!(refused.hint().is_some(), "{refused:?}");

    wait_drained(&stage);
    let delivered = stage.all();
    let bodies: Vec<Value> = delivered
        .iter()
        .map(|message| serde_json::from_slice(&message.body).expect("JSON"))
        .collect();
    let lengths: Vec<Option<usize>> = bodies
        .iter()
        .map(|body| Some(body["payload"].as_str()?.len()))
        .collect();
    assert_eq!(lengths, [Some((LIMIT - QUOTES) as usize)]);
}

/// A broker's operator can allow less than an event may have. Only the broker knows, when it gets the message.
#[test]
fn a_dead_letter_names_the_limit_of_the_broker_that_its_body_exceeds() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    broker.set_max_message_size(100_000);
    let cluster = outbox_cluster(&broker, &exchange);
    cluster.exec(
        DB,
        "select outbox_publish('T', to_jsonb(repeat('x', 100000)), 'o', 'large');
         select outbox_publish('T', to_jsonb(repeat('x', 90000)), 'o', 'small')",
    );
    wait_drained(&cluster);
    let reason: String = cluster.query_one(
        DB,
        "select regexp_replace(reason, 'has [0-9]+', 'has N') from outbox_dead where reason like '%has 100___ bytes%'",
    );
    assert_eq!(
        reason,
        "refused: the body has N bytes; max_message_size of the broker is 100000"
    );
    assert_eq!(all_of(&broker, &queue).len(), 1);
}
