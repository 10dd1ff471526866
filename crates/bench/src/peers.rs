//! Row peers: a drain by the outbox ÷ the same number of messages relayed to the same queue by what people use instead:
//! a loop over a table of events, a queue in the manner of pgmq, and ulak, where `OUTBOX_BENCH_ULAK` names its library.
//! Each is set in its favour. Its program runs in this process, like the bare publisher.

use std::time::Instant;

use postgres::Row;
use support::{LONG, wait_until};

use crate::backlog::{self, KEYS};
use crate::bare::{BareMessage, BarePublisher};
use crate::events::{self, BODY_BYTES, EventMaker};
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Sample, Side};
use crate::servers::{BACKEND_PID, DB, EXCHANGE, QUEUE, Servers, ask};

/// The number of messages that a peer takes at once, and of a statement that fills its table.
const BATCH: usize = 1000;
const ALL_BUT_BROKER: &str = "CPU of all but the broker, a message";

/// A table, and the statements of a relay that empties it.
struct Table {
    create: &'static str,
    truncate: &'static str,
    /// Inserts the bodies in `$1`.
    fill: &'static str,
    /// Runs after a table is filled.
    vacuum: &'static str,
    /// The number of messages that are not published.
    rest: &'static str,
}

/// The statements of a relay outside the server.
struct Loop {
    table: Table,
    /// Returns the id and the body of each message of a batch.
    read: &'static str,
    /// Marks the ids in `$1` as published.
    mark: &'static str,
    /// Whether both are one transaction, which holds the locks of the batch until it is confirmed.
    is_one_transaction: bool,
}

/// The loop that most people write.
const HAND_LOOP: Loop = Loop {
    table: Table {
        create: "create table hand_events (id bigint generated always as identity primary key, body text not null,
                   created_at timestamptz not null default now(), published_at timestamptz);
                 create index on hand_events (id) where published_at is null",
        truncate: "truncate hand_events",
        fill: "insert into hand_events (body) select unnest($1::text[])",
        vacuum: "vacuum analyze hand_events",
        rest: "select count(*) from hand_events where published_at is null",
    },
    read: "select id, body from hand_events where published_at is null order by id limit 1000 for update skip locked",
    mark: "update hand_events set published_at = now() where id = any($1)",
    is_one_transaction: true,
};

/// The tables and statements of pgmq's read and archive. The program archives because the outbox keeps its history.
const PGMQ: Loop = Loop {
    table: Table {
        create: "create table q_bench (msg_id bigint generated always as identity primary key, read_ct integer not null default 0,
                   enqueued_at timestamptz not null default now(), vt timestamptz not null, message jsonb);
                 create index on q_bench (vt);
                 create table a_bench (msg_id bigint primary key, read_ct integer not null, enqueued_at timestamptz not null,
                   archived_at timestamptz not null default now(), vt timestamptz not null, message jsonb);
                 create index on a_bench (archived_at)",
        truncate: "truncate q_bench, a_bench",
        fill: "insert into q_bench (vt, message) select now(), body::jsonb from unnest($1::text[]) as body",
        vacuum: "vacuum analyze q_bench, a_bench",
        rest: "select count(*) from q_bench",
    },
    read: "with batch as (select msg_id from q_bench where vt <= clock_timestamp() order by msg_id limit 1000
                          for update skip locked)
           update q_bench q set vt = clock_timestamp() + interval '30 s', read_ct = read_ct + 1
           from batch where q.msg_id = batch.msg_id returning q.msg_id, q.message::text",
    mark: "with done as (delete from q_bench where msg_id = any($1)
                         returning msg_id, read_ct, enqueued_at, vt, message)
           insert into a_bench (msg_id, read_ct, enqueued_at, vt, message) select * from done",
    is_one_transaction: false,
};

pub fn peers(options: &Options, report: &mut BenchReport) {
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.pause();
    let maker = EventMaker::new();
    let json_maker = json_maker(&mut servers);
    servers.sql_execute(HAND_LOOP.table.create);
    compare(options, report, &mut servers, "hand loop", |servers, count| {
        relay(options, servers, &HAND_LOOP, &maker, count)
    });
    servers.sql_execute(PGMQ.table.create);
    compare(options, report, &mut servers, "pgmq-style", |servers, count| {
        relay(options, servers, &PGMQ, &json_maker, count)
    });
    drop(servers);
    if let Some(library) = std::env::var("OUTBOX_BENCH_ULAK").ok().filter(|name| !name.is_empty()) {
        ulak(options, report, &library);
    }
}

fn compare(
    options: &Options,
    report: &mut BenchReport,
    servers: &mut Servers,
    name: &'static str,
    peer: impl Fn(&mut Servers, u32) -> Sample,
) {
    let note = EventMaker::new().note;
    let run = |servers: &mut Servers, side, count| match side {
        Side::Ours => {
            backlog::replace(servers, &note, count, KEYS);
            let drained = backlog::drain(servers, count);
            let all = drained.cpu.workers + drained.cpu.postgres;
            drained.sample().detail(ALL_BUT_BROKER, "µs", all)
        }
        Side::Other => peer(servers, count),
    };
    // Warm-ups.
    run(servers, Side::Other, options.backlog.div_ceil(10));
    run(servers, Side::Ours, options.backlog.div_ceil(10));
    report.compare(&format!("peers, {name}"), ["outbox", name], |side| {
        run(servers, side, options.backlog)
    });
}

/// A maker of messages of the usual size for a column of jsonb, whose text has spaces that the envelope has not.
fn json_maker(servers: &mut Servers) -> EventMaker {
    let body = body(&EventMaker::new(), 0);
    let stored = (servers.sql).query_one("select octet_length($1::text::jsonb::text)", &[&body]);
    let bytes: i32 = stored.expect("a JSON object").get(0);
    EventMaker::sized(2 * BODY_BYTES - bytes.cast_unsigned() as usize)
}

fn body(maker: &EventMaker, n: u32) -> String {
    let message = maker.message(i64::from(n) + 100_000, &events::order(n % KEYS), &events::id(n.into()));
    String::from_utf8(message.body).expect("JSON")
}

/// Replaces the messages of an earlier run.
fn fill(servers: &mut Servers, table: &Table, maker: &EventMaker, count: u32) {
    servers.renew_queue();
    servers.sql_execute(table.truncate);
    let statement = servers.sql.prepare(table.fill).expect("prepare the load");
    let bodies: Vec<String> = (0..count).map(|n| body(maker, n)).collect();
    for some in bodies.chunks(BATCH) {
        servers.sql.execute(&statement, &[&some]).expect("load events");
    }
    servers.sql_execute(table.vacuum);
    servers.sql_execute("checkpoint");
}

fn check_that_all_are_published(servers: &mut Servers, table: &Table, count: u32) {
    assert_eq!(servers.ask::<i64>(table.rest), 0, "{}", table.rest);
    let all_are_there = || servers.broker.queue_len(QUEUE) == count;
    wait_until("the queue to have each message once", LONG, all_are_there);
}

/// Relays all messages: reads a batch, publishes it, awaits all its confirms, marks it.
fn relay(options: &Options, servers: &mut Servers, relay: &Loop, maker: &EventMaker, count: u32) -> Sample {
    fill(servers, &relay.table, maker, count);
    let mut sql = servers.cluster.connect(DB);
    let read = sql.prepare(relay.read).expect("prepare");
    let mark = sql.prepare(relay.mark).expect("prepare");
    let publisher = BarePublisher::connect(servers.broker.port());
    // As many bytes of properties and headers as those of the outbox.
    let like: BareMessage = maker.message(100_000, &events::order(0), &events::id(0)).into();
    let processes = servers.processes(&[ask(&mut sql, BACKEND_PID)]);
    let (before, started) = (processes.read(), Instant::now());
    let mut sent = 0;
    while sent < count as usize {
        if relay.is_one_transaction {
            sql.batch_execute("begin").expect("begin");
        }
        let rows = sql.query(&read, &[]).expect("read a batch");
        assert!(!rows.is_empty(), "{sent} of {count} messages were read");
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let message = |row: &Row| like.with(&events::id(row.get::<_, i64>(0).cast_unsigned()), row.get(1));
        // Ends this process unless every message is confirmed.
        publisher.run(rows.iter().map(message).collect(), options.bare_batch as usize);
        sql.execute(&mark, &[&ids]).expect("mark a batch");
        if relay.is_one_transaction {
            sql.batch_execute("commit").expect("commit");
        }
        sent += ids.len();
    }
    let took = started.elapsed();
    let cpu = processes.read().per_message(before, count);
    publisher.close();
    check_that_all_are_published(servers, &relay.table, count);
    Sample::default()
        .result("", "/s", f64::from(count) / took.as_secs_f64())
        .detail("CPU of the broker, a message", "µs", cpu.broker)
        .detail("CPU of the program, a message", "µs", cpu.bench)
        .detail("CPU of its sessions, a message", "µs", cpu.sessions)
        .detail("CPU of other Postgres, a message", "µs", cpu.postgres)
        .detail(ALL_BUT_BROKER, "µs", cpu.bench + cpu.sessions + cpu.postgres)
}

/// Ulak in the same server as the outbox; each waits while the other one drains. Its library must be built for AMQP.
fn ulak(options: &Options, report: &mut BenchReport, library: &str) {
    // A worker takes one batch each time it polls.
    const POLL_EVERY_MS: &str = "ulak.poll_interval";
    const TABLE: Table = Table {
        // After an ANALYZE of a full queue a drain by several workers takes many times as long.
        create: "create extension ulak; alter table ulak.queue set (autovacuum_enabled = off)",
        truncate: "truncate ulak.queue",
        fill: "insert into ulak.queue (endpoint_id, payload)
               select e.id, body::jsonb from ulak.endpoints e, unnest($1::text[]) as body",
        vacuum: "vacuum ulak.queue",
        rest: "select count(*) from ulak.queue where status <> 'completed'",
    };
    let preload = format!("shared_preload_libraries = 'outbox, {library}'");
    let conf = [
        &preload,
        "ulak.workers = 4",
        "ulak.batch_size = 1000",
        "ulak.amqp_batch_capacity = 1024",
    ];
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &conf, report);
    servers.pause();
    servers.sql_execute(TABLE.create);
    let endpoint = format!(
        "select ulak.create_endpoint('bench', 'amqp', '{{\"host\": \"127.0.0.1\", \"port\": {},
           \"exchange\": \"{EXCHANGE}\", \"routing_key\": \"order.placed\", \"persistent\": true, \"mandatory\": true}}')",
        servers.broker.port()
    );
    servers.sql_execute(&endpoint);
    let workers = "select array_agg(pid) from ulak.get_worker_status() where pid > 0";
    let maker = json_maker(&mut servers);
    compare(options, report, &mut servers, "ulak", |servers, count| {
        servers.cluster.set_conf(POLL_EVERY_MS, "100");
        servers.sql_execute("select ulak.disable_endpoint('bench')");
        fill(servers, &TABLE, &maker, count);
        let workers: Vec<i32> = servers.ask(workers);
        let begin = |servers: &mut Servers| servers.sql_execute("select ulak.enable_endpoint('bench')");
        let drained = backlog::watch(servers, &workers, count, begin, |servers| {
            servers.ask("select sum(messages_processed)::bigint from ulak.get_worker_status()")
        });
        check_that_all_are_published(servers, &TABLE, count);
        servers.sql_execute(TABLE.truncate);
        servers.cluster.set_conf(POLL_EVERY_MS, "60000"); // while the outbox drains
        let cpu = drained.cpu;
        Sample::default()
            .result("", "/s", drained.rate)
            .detail("CPU of the broker, a message", "µs", cpu.broker)
            .detail("CPU of its sessions, a message", "µs", cpu.sessions)
            .detail("CPU of other Postgres, a message", "µs", cpu.postgres)
            .detail(ALL_BUT_BROKER, "µs", cpu.sessions + cpu.postgres)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use outbox_core::message::Publication;

    #[test]
    fn a_message_of_a_peer_differs_in_its_body_and_its_id_only() {
        let maker = EventMaker::new();
        let message =
            |n: u32| -> Publication { maker.message(i64::from(n) + 100_000, &events::order(n), &events::id(n.into())) };
        let like: BareMessage = message(0).into();
        assert_eq!(body(&maker, 7).len(), BODY_BYTES);
        assert_eq!(
            like.with(&events::id(0), body(&maker, 0)),
            BareMessage::from(message(0))
        );
    }
}
