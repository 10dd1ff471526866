//! Tests of workers outside the server in databases that are not UTF-8. A message that they cannot read becomes a dead
//! letter, as in the server. What they write has only characters that the database has.

use std::process::Stdio;

use support::{Broker, Cluster, Receiver, Reply, process, wait_until};

use super::{Outside, without_workers, work_as};
use support::{LONG, all_of, exchange_and_queue};

const OTHER: &str = "other";

/// A server without workers, with a database of this encoding that has the extension.
fn with_database(broker: &Broker, exchange: &str, encoding: &str) -> Cluster {
    let cluster = without_workers(broker, exchange, &["outbox.http_allow = '127.0.0.1'"]);
    cluster.exec(
        super::DB,
        &format!("create database {OTHER} encoding '{encoding}' locale 'C' template template0"),
    );
    cluster.exec(OTHER, "create extension outbox");
    cluster
}

/// A worker for that database.
fn start(cluster: &Cluster) -> Outside {
    let mut command = work_as(cluster.port(), "courier", OTHER, &["--name", "reader"]);
    command.stdout(Stdio::null());
    let child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
    Outside { child: Some(child) }
}

fn wait(cluster: &Cluster, what: &str, sql: &str) {
    wait_until(what, LONG, || cluster.query_one(OTHER, sql));
}

#[test]
fn an_unreadable_message_becomes_a_dead_letter_and_the_others_are_delivered() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = with_database(broker, &exchange, "SQL_ASCII");
    cluster.exec(
        OTHER,
        r"create function bad() returns text language sql as $$ select convert_from('\x4aff'::bytea, 'SQL_ASCII') $$;
          do $$ begin execute format('create server %I foreign data wrapper outbox_amqp', 'to ' || bad()); end $$;
          insert into outbox_events (seq, id, type, actor, payload) values
            (1001, gen_random_uuid(), 'T', bad(), '{}'), (1003, gen_random_uuid(), 'T', null, to_jsonb(bad())),
            (1005, gen_random_uuid(), bad(), null, '{}'), (1007, gen_random_uuid(), 'T', null, '{}'),
            (1009, gen_random_uuid(), 'T', null, '{}');
          insert into outbox_events (seq, id, type, payload)
            select n, gen_random_uuid(), 'Good', '{}' from unnest('{1002,1004,1006,1008}'::int8[]) n;
          begin;
          select outbox_enqueue(n) from unnest('{1001,1002,1003,1004,1005,1006,1008}'::int8[]) n;
          insert into outbox (seq, destination, partition, key) values (1007, 'default', 1, bad()), (1009, 'default', 1, bad());
          insert into outbox_waiting (seq, destination, partition, key, state, enqueued_at, due_at, attempts)
            values (1010, 'default', 1, bad(), 'b', now(), now(), 1);
          commit;",
    );
    let outside = start(&cluster);
    wait(
        &cluster,
        "the outbox to be empty",
        "select not exists (select from outbox) and not exists (select from outbox_waiting)",
    );
    let dead: String = cluster.query_one(OTHER, "select string_agg(seq::text, ',' order by seq) from outbox_dead");
    assert_eq!(dead, "1001,1003,1005,1007,1009,1010");
    let reasons: String = cluster.query_one(
        OTHER,
        "select string_agg(distinct reason, '; ' order by reason) from outbox_dead where seq < 1009",
    );
    assert_eq!(
        reasons,
        "its key cannot be read: it cannot be converted from SQL_ASCII to UTF-8; \
         the event cannot be read: it cannot be converted from SQL_ASCII to UTF-8"
    );
    let mut arrived: Vec<_> = (all_of(broker, &queue).iter())
        .map(|message| message.json()["seq"].as_i64())
        .collect();
    arrived.sort();
    assert_eq!(arrived, [1002, 1004, 1006, 1008].map(Some));
    // The worker also goes on after it has read from the tables what an unreadable key blocks.
    cluster.exec(OTHER, "select outbox_publish('Good', '{}', 'o', '1')");
    wait(&cluster, "the next one", "select count(*) = 5 from outbox_history");
    assert_eq!(outside.stop(), Some(0));
}

#[test]
fn a_reason_with_characters_that_the_database_lacks_ends_its_message() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = with_database(broker, &exchange, "LATIN1");
    let receiver = Receiver::start(|_| Reply::Answer {
        status: 422,
        headers: String::new(),
        body: format!("José \u{2192} {}", "x".repeat(2000)),
    });
    cluster.exec(
        OTHER,
        &format!(
            "create server hook foreign data wrapper outbox_http options (url '{}', max_attempts '1');
             grant usage on foreign server hook to courier;
             select outbox_publish('T', '{{}}', 'o', '1', destination => 'hook')",
            receiver.url("/")
        ),
    );
    let outside = start(&cluster);
    wait(&cluster, "a dead letter", "select exists (select from outbox_dead)");
    let reason: String = cluster.query_one(OTHER, "select reason from outbox_dead");
    assert!(
        reason.starts_with("refused: HTTP 422 Unprocessable Entity: José ? x"),
        "{reason}"
    );
    assert_eq!(outside.stop(), Some(0));
}
