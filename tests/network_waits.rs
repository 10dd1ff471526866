//! What does a worker hold while it waits? No transaction while it waits for the network, and no statement takes over
//! 30 s. One outside the server waits in short statements. On a real Postgres, with peers that say nothing.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use postgres::Client;
use support::clock::cluster_with_clock;
use support::courier::{Outside, make_courier};
use support::load::{Load, Plan};
use support::wait::Pauses;
use support::*;

/// A worker at one moment.
#[derive(PartialEq)]
struct Seen {
    /// When it last began or ended a transaction.
    since: String,
    waits_for_network: bool,
    holds_nothing: bool,
}

/// Without a plan that reads the locks before the activity.
const WORKERS: &str = "with seen as materialized (select * from pg_stat_activity where backend_type = 'outbox worker')
    select pid, state_change::text, coalesce(wait_event_type = 'Extension', false),
           state = 'idle' and xact_start is null and backend_xmin is null
           and not exists (select from pg_locks where pg_locks.pid = seen.pid) from seen";

fn workers(client: &mut Client) -> HashMap<i32, Seen> {
    let rows = client.query(WORKERS, &[]).expect("pg_stat_activity");
    let seen = rows.iter().map(|row| {
        let seen = Seen {
            since: row.get(1),
            waits_for_network: row.get(2),
            holds_nothing: row.get(3),
        };
        (row.get(0), seen)
    });
    seen.collect()
}

#[test]
fn no_transaction_is_open_while_a_worker_waits_for_the_network() {
    let broker = Broker::start();
    let (exchange, _) = exchange_and_queue(&broker);
    let receiver = Receiver::start(|_| Reply::Hang);
    let conf = ["outbox.http_allow = '127.0.0.1'", "outbox.workers = 2"];
    let cluster = outbox_cluster_with(&broker, &exchange, &conf);
    let url = receiver.url("/");
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    broker.suspend();
    let plan = Plan {
        also_to: &["hook"],
        ..Plan::default()
    };
    let _load = Load::start(&cluster, &plan);
    let in_flight = "select count(*) = 2 from outbox_destination_status where in_flight > 0";
    wait_true(&cluster, "messages in flight to both", in_flight);
    let (mut client, mut waits) = (cluster.connect(DB), BTreeSet::new());
    let mut before = workers(&mut client);
    wait_until("waits between the transactions of both workers", LONG, || {
        for _ in 0..20 {
            for (pid, seen) in std::mem::replace(&mut before, workers(&mut client)) {
                // What was read in between belongs to this state, which has not changed.
                let is_certain = before.get(&pid).is_some_and(|now| now.since == seen.since);
                if is_certain && seen.waits_for_network {
                    assert!(seen.holds_nothing, "process {pid} since {}", seen.since);
                    waits.insert((pid, seen.since));
                }
            }
        }
        before
            .keys()
            .all(|pid| waits.iter().filter(|(of, _)| of == pid).count() >= 100)
    });
}

#[test]
fn a_worker_outside_waits_in_statements_of_at_most_100_ms_while_messages_are_in_flight() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = unconnected_cluster(&proxy.url(), &exchange, &["outbox.workers = 0"]);
    make_courier(&cluster);
    cluster.exec(DB, "alter role courier set log_statement = 'all'");
    let _worker = Outside::start(&cluster, "w");
    proxy.mode(Mode::DropReplies);
    cluster.publish("without an answer");
    // The second parameter of work_wait is the longest wait in ms, the third the number of messages in flight.
    let in_flight = |line: &str| {
        let (_, parameters) = line.split_once("$2 = '")?;
        let (longest_ms, rest) = parameters.split_once("', $3 = '")?;
        let (messages, _) = rest.split_once('\'')?;
        (messages != "0").then(|| longest_ms.parse::<u64>().expect("a number of ms"))
    };
    let waits = wait_for("20 waits while the message is in flight", LONG, || {
        let log = cluster.log();
        let calls = log.lines().zip(log.lines().skip(1));
        let waits = calls.filter(|(call, _)| call.contains("outbox_internal.work_wait("));
        let waits: Vec<u64> = waits.filter_map(|(_, parameters)| in_flight(parameters)).collect();
        (waits.len() >= 20).then_some(waits)
    });
    assert!(waits.iter().all(|ms| *ms <= 100), "{waits:?}");
}

/// The settle waits for an advisory lock, without a limit for the wait.
const SETTLE_WAITS: &str = "create function wait_for_test() returns trigger language plpgsql set lock_timeout = 0 as $$
    begin perform pg_advisory_xact_lock_shared(1); return new; end $$;
    create trigger wait_for_test before insert on outbox_history for each row execute function wait_for_test()";

/// The server looks at its timers, of which one limits the statement, when the first of them is over: here the one for
/// the search of deadlocks. By then its clock is 28 s ahead.
#[test]
fn a_statement_of_a_worker_ends_by_itself_after_30_s() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let (cluster, clock) = cluster_with_clock(broker, &exchange, &["deadlock_timeout = '2s'"]);
    cluster.exec(DB, SETTLE_WAITS);
    let (mut holder, mut client) = (cluster.connect(DB), cluster.connect(DB));
    let pauses = Pauses::watch();
    let mut ahead = 0;
    let (offset, began) = wait_for("a settle that waits when the clock is set", LONG, || {
        holder.run("select pg_advisory_lock(1)");
        cluster.exec(DB, "select outbox_publish('T', '{}')");
        let offset = cluster.log_offset();
        let sql = "select a.xact_start::text, l.waitstart::text from pg_locks l join pg_stat_activity a using (pid)
                   where a.backend_type = 'outbox worker' and not l.granted";
        let row = wait_for("a settle that waits", LONG, || {
            client.query_opt(sql, &[]).expect("pg_locks")
        });
        let (began, waits_since): (String, String) = (row.get(0), row.get(1));
        ahead += 28;
        clock.set(ahead, 0);
        let in_time = format!("select clock_timestamp() < '{waits_since}'::timestamptz + interval '30 s'");
        let in_time: bool = client.value(&in_time);
        if !in_time {
            holder.run("select pg_advisory_unlock(1)");
            wait_drained(&cluster);
        }
        in_time.then_some((offset, began))
    });
    cluster.wait_for_log("canceling statement due to statement timeout", offset);
    let took = format!("select extract(epoch from clock_timestamp() - '{began}')::float8");
    let took = Duration::from_secs_f64(cluster.query_one(DB, &took));
    let lost = pauses.end();
    assert!(
        took <= Duration::from_secs(31) + lost,
        "{took:?} while the machine lost {lost:?}"
    );
    holder.run("select pg_advisory_unlock(1)");
    wait_drained(&cluster);
}
