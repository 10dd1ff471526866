//! Does a fault lose anything? The broker, the network, a worker and the server are disturbed while producers write;
//! then all that was committed must be in the queue, once nothing waits any more. No order is asked for here.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use common::load::{Load, Plan};
use common::oracle::{Arrived, Fate, Sent, Verdict, judge};
use common::{
    DB, LONG, all_of, exchange_and_queue, outbox_cluster, outbox_cluster_with, unconnected_cluster, wait_connected,
    wait_drained, wait_for_problem, wait_healthy, wait_published, wait_true,
};
use postgres::Client;
use serde_json::{Value, json};
use support::{Broker, Cluster, Mode, PrivateBroker, Proxy, fresh_names, process, wait_until};

/// What may be on its way to the broker at a time, and so may arrive again after a fault.
const WINDOW: usize = 2_000;

/// A worker that finds out in two seconds that nobody answers.
const IMPATIENT: [&str; 2] = ["outbox.connect_timeout = '2s'", "outbox.confirm_timeout = '2s'"];

/// Waits until so many messages more than now are published: delivery works.
fn wait_for_more_published(cluster: &Cluster, more: i64) {
    let goal = more + cluster.query_one::<i64>(DB, "select count(*) from outbox_history");
    let sql = format!("select count(*) >= {goal} from outbox_history");
    wait_true(cluster, &format!("{more} more published messages"), &sql);
}

/// Ends the load, waits until all of it is delivered, and compares.
fn verdict(cluster: &Cluster, broker: &Broker, queue: &str, load: Load) -> Verdict {
    let sent = load.stop();
    wait_drained(cluster);
    judge_queue(broker, queue, &sent)
}

fn judge_queue(broker: &Broker, queue: &str, sent: &[Sent]) -> Verdict {
    let arrived: Vec<Arrived> = all_of(broker, queue).iter().map(Arrived::new).collect();
    let verdict = judge(sent, &arrived);
    println!(
        "{} sent, {} arrived, {} doubled, {} out of order",
        sent.len(),
        arrived.len(),
        verdict.doubled.len(),
        verdict.reordered.len()
    );
    verdict
}

/// The fault was not the messages': no attempt is charged to any, none is dead.
fn assert_nothing_charged(cluster: &Cluster) {
    let charged: i64 = cluster.query_one(
        DB,
        "select (select count(*) from outbox_history where attempts <> 1) + (select count(*) from outbox_dead)",
    );
    assert_eq!(charged, 0, "messages that the fault was charged to");
}

fn worker_pid(cluster: &Cluster) -> i32 {
    cluster.query_one(DB, "select pid from outbox_worker_status")
}

fn publish(client: &mut Client, label: &str) -> i64 {
    let row = client.query_one(
        "select outbox_publish('Changed', $1, 'item', $2, 'changed')",
        &[&json!({"label": label}), &label],
    );
    row.expect("publish").get(0)
}

fn run(client: &mut Client, sql: &str) {
    client
        .batch_execute(sql)
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

// ---- the broker -----------------------------------------------------------------------------------------------------

#[test]
fn a_broker_that_is_stopped_or_crashes_under_load_loses_nothing_and_charges_nobody() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = outbox_cluster(&broker, &exchange);
    let load = Load::start(&cluster, &Plan::default());
    for end in [PrivateBroker::stop, PrivateBroker::kill] {
        wait_for_more_published(&cluster, 200);
        end(&broker);
        load.wait_for_more(200);
        let problem = wait_for_problem(&cluster, "broker");
        assert!(problem.contains("cannot be reached"), "{problem}");
        broker.start_again();
        wait_for_more_published(&cluster, 200);
        wait_healthy(&cluster, "broker");
    }
    verdict(&cluster, &broker, &queue, load).assert_nothing_lost(2 * WINDOW);
    assert_nothing_charged(&cluster);
}

#[test]
fn a_broker_that_does_not_answer_loses_nothing_and_is_named() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = outbox_cluster_with(&broker, &exchange, &IMPATIENT);
    let load = Load::start(&cluster, &Plan::default());
    wait_for_more_published(&cluster, 200);
    broker.suspend();
    let problem = wait_for_problem(&cluster, "broker");
    assert!(problem.contains("does not answer"), "{problem}");
    load.wait_for_more(200);
    broker.resume();
    wait_for_more_published(&cluster, 200);
    wait_healthy(&cluster, "broker");
    verdict(&cluster, &broker, &queue, load).assert_nothing_lost(WINDOW);
    assert_nothing_charged(&cluster);
}

#[test]
fn a_network_that_swallows_everything_loses_nothing_and_is_named() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = cluster_behind(&proxy, &exchange, &IMPATIENT);
    let load = Load::start(&cluster, &Plan::default());
    for mode in [Mode::Blackhole, Mode::DropReplies] {
        wait_for_more_published(&cluster, 200);
        proxy.mode(mode);
        let problem = wait_for_problem(&cluster, "broker");
        assert!(problem.contains("does not answer"), "{mode:?}: {problem}");
        load.wait_for_more(200);
        proxy.mode(Mode::Pass);
        proxy.reset_all();
        wait_for_more_published(&cluster, 200);
        wait_healthy(&cluster, "broker");
    }
    verdict(&cluster, broker, &queue, load).assert_nothing_lost(2 * WINDOW);
    assert_nothing_charged(&cluster);
}

#[test]
fn a_connection_that_is_reset_in_mid_batch_loses_nothing() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = cluster_behind(&proxy, &exchange, &[]);
    let as_fast_as_it_can = Plan {
        transactions_per_s: None,
        events_per_writer: 20_000,
        ..Plan::default()
    };
    let load = Load::start(&cluster, &as_fast_as_it_can);
    const RESETS: usize = 5;
    for _ in 0..RESETS {
        wait_for_more_published(&cluster, 200);
        let connections = proxy.accepted();
        proxy.reset_all();
        wait_until("the worker to connect again", LONG, || proxy.accepted() > connections);
    }
    wait_for_more_published(&cluster, 200);
    verdict(&cluster, broker, &queue, load).assert_nothing_lost(RESETS * WINDOW);
    assert_nothing_charged(&cluster);
}

fn cluster_behind(proxy: &Proxy, exchange: &str, conf: &[&str]) -> Cluster {
    let cluster = unconnected_cluster(&format!("amqp://127.0.0.1:{}", proxy.port()), exchange, conf);
    wait_connected(&cluster);
    cluster
}

#[test]
fn a_memory_alarm_of_the_broker_is_named_and_charges_nobody() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = outbox_cluster(&broker, &exchange);
    let load = Load::start(&cluster, &Plan::default());
    wait_for_more_published(&cluster, 200);
    broker.set_memory_alarm(true);
    let problem = wait_for_problem(&cluster, "blocked");
    assert!(problem.contains("memory"), "{problem}");
    load.wait_for_more(200);
    broker.set_memory_alarm(false);
    wait_for_more_published(&cluster, 200);
    wait_healthy(&cluster, "blocked");
    // Nothing broke: the same connection went on.
    verdict(&cluster, &broker, &queue, load).assert_perfect();
    assert_nothing_charged(&cluster);
}

// ---- the exchange ---------------------------------------------------------------------------------------------------

#[test]
fn a_missing_exchange_is_named_and_charges_nobody() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    let cluster = unconnected_cluster(&broker.url(), &exchange, &[]);
    let load = Load::start(&cluster, &Plan::default());
    load.wait_for_more(100);
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.contains("does not exist") && problem.contains(&exchange),
        "{problem}"
    );
    broker.declare_queue(&queue, Value::Null);
    declare(&cluster, broker, &exchange, &queue);
    wait_for_more_published(&cluster, 200);
    wait_healthy(&cluster, "broker");
    verdict(&cluster, broker, &queue, load).assert_perfect();
    assert_nothing_charged(&cluster);
}

#[test]
fn an_exchange_that_is_deleted_under_load_is_named_and_charges_nobody() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let load = Load::start(&cluster, &Plan::default());
    wait_for_more_published(&cluster, 200);
    broker.delete_exchange(&exchange);
    let problem = wait_for_problem(&cluster, "broker");
    assert!(
        problem.contains("does not exist") && problem.contains(&exchange),
        "{problem}"
    );
    load.wait_for_more(200);
    declare(&cluster, broker, &exchange, &queue);
    wait_for_more_published(&cluster, 200);
    wait_healthy(&cluster, "broker");
    verdict(&cluster, broker, &queue, load).assert_nothing_lost(WINDOW);
    assert_nothing_charged(&cluster);
}

/// Delivery pauses meanwhile: between the two steps all messages are unroutable.
fn declare(cluster: &Cluster, broker: &Broker, exchange: &str, queue: &str) {
    pause(cluster);
    broker.declare_exchange(exchange, "topic", true);
    broker.bind(queue, exchange, "#");
    cluster.set_conf("outbox.enabled", "on");
}

fn pause(cluster: &Cluster) {
    cluster.set_conf("outbox.enabled", "off");
    wait_true(
        cluster,
        "the worker to pause",
        "select bool_and(state = 'paused') from outbox_worker_status",
    );
}

// ---- the worker and the server --------------------------------------------------------------------------------------

#[test]
fn a_worker_that_is_ended_comes_back_and_loses_nothing_without_a_restart_of_the_server() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    const STARTED: &str = "select pg_postmaster_start_time()::text";
    let started: String = cluster.query_one(DB, STARTED);
    let load = Load::start(&cluster, &Plan::default());
    const TIMES: usize = 5;
    for _ in 0..TIMES {
        wait_for_more_published(&cluster, 50);
        let pid = worker_pid(&cluster);
        cluster.exec(DB, &format!("select pg_terminate_backend({pid})"));
        wait_true(
            &cluster,
            "another worker to be connected",
            &format!("select exists (select from outbox_worker_status where pid <> {pid} and state = 'connected')"),
        );
    }
    wait_for_more_published(&cluster, 50);
    verdict(&cluster, broker, &queue, load).assert_nothing_lost(TIMES * WINDOW);
    assert_nothing_charged(&cluster);
    assert_eq!(cluster.query_one::<String>(DB, STARTED), started);
    let log = cluster.log();
    assert!(
        !log.contains("was terminated by signal") && !log.contains("reinitializing"),
        "{log}"
    );
}

#[test]
fn a_worker_that_is_killed_restarts_the_server_and_loses_nothing() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let load = Load::start(&cluster, &Plan::default());
    wait_for_more_published(&cluster, 200);
    let offset = cluster.log_offset();
    process::signal(worker_pid(&cluster).cast_unsigned(), libc::SIGKILL);
    cluster.wait_for_log("was terminated by signal 9", offset);
    cluster.wait_for_log("database system is ready to accept connections", offset);
    load.wait_for_more(200);
    verdict(&cluster, broker, &queue, load).assert_nothing_lost(WINDOW);
    assert_nothing_charged(&cluster);
}

#[test]
fn a_server_that_is_killed_with_messages_on_their_way_loses_nothing() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = cluster_behind(&proxy, &exchange, &[]);
    let load = Load::start(&cluster, &Plan::default());
    wait_for_more_published(&cluster, 200);
    // What is sent from here on is claimed, and its confirm does not arrive before the crash.
    proxy.mode(Mode::DropReplies);
    wait_true(
        &cluster,
        "messages on their way",
        "select count(*) >= 50 from outbox_messages where status = 'in flight'",
    );
    cluster.kill_postmaster();
    proxy.reset_all();
    proxy.mode(Mode::Pass);
    cluster.start_again();
    load.wait_for_more(200);
    verdict(&cluster, broker, &queue, load).assert_nothing_lost(WINDOW);
    assert_nothing_charged(&cluster);
}

// ---- the password ---------------------------------------------------------------------------------------------------

/// Writes a password as the server wants it: readable to its user alone.
fn write_password(path: &Path, password: &str) {
    fs::write(path, password).expect("write the password file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("make it private");
    if let Some(account) = process::postgres_account() {
        chown(path, Some(account.uid), Some(account.gid)).expect("give it to the server's user");
    }
}

#[test]
fn a_wrong_password_is_named_and_no_password_shows_anywhere() {
    let broker = Broker::start();
    let (exchange, queue) = exchange_and_queue(&broker);
    let (right, wrong) = ("canary-right-5Yq", "canary-wrong-8Zt");
    broker.add_user("someone", right);
    let url = format!("amqp://someone@127.0.0.1:{}", broker.port());
    let cluster = unconnected_cluster(&url, &exchange, &["log_min_messages = debug5"]);
    let file = cluster.data_dir().join("password");
    write_password(&file, wrong);
    cluster.set_conf("outbox.password_file", &file.display().to_string());
    publish(&mut cluster.connect(DB), "waits");
    wait_until("the refusal in outbox_health", LONG, || {
        let (ok, problem) = common::health(&cluster, "broker");
        !ok && problem.contains("user or password")
    });
    assert_hidden(&cluster, &[wrong]);

    write_password(&file, right);
    cluster.reload();
    wait_published(&cluster, 1);
    assert_nothing_charged(&cluster);
    assert_eq!(broker.queue_len(&queue), 1);
    assert_hidden(&cluster, &[right, wrong]);
}

/// Looks for secrets in the log, in every relation of the extension, and where core shows what goes on.
fn assert_hidden(cluster: &Cluster, secrets: &[&str]) {
    let mut client = cluster.connect(DB);
    let relations = client.query(
        "select c.oid::regclass::text from pg_class c join pg_depend d on d.objid = c.oid and d.deptype = 'e'
         where c.relkind in ('r', 'v') and d.refclassid = 'pg_extension'::regclass
         union all values ('pg_settings'), ('pg_file_settings'), ('pg_stat_activity')",
        &[],
    );
    let relations = relations.expect("list the relations");
    assert!(relations.len() > 10);
    let mut places = vec![("the log".to_owned(), cluster.log())];
    for row in relations {
        let name: String = row.get(0);
        let sql = format!("select coalesce(string_agg(x::text, ' '), '') from {name} x");
        let text = client.query_one(&sql, &[]).expect("read a relation").get(0);
        places.push((name, text));
    }
    for secret in secrets {
        // Split, or pg_stat_activity would show our own words to us.
        let found = places.iter().find(|(_, text)| text.contains(secret));
        assert!(
            found.is_none(),
            "a password shows in {}",
            found.map_or("", |(place, _)| place)
        );
    }
}

// ---- the rows -------------------------------------------------------------------------------------------------------

#[test]
fn rewriting_the_outbox_under_load_loses_nothing() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let load = Load::start(
        &cluster,
        &Plan {
            transactions_per_s: None,
            ..Plan::default()
        },
    );
    for _ in 0..10 {
        for rewrite in ["vacuum full outbox", "cluster outbox using outbox_pkey"] {
            wait_for_more_published(&cluster, 20);
            cluster.exec(DB, rewrite);
        }
    }
    verdict(&cluster, broker, &queue, load).assert_perfect();
    assert_nothing_charged(&cluster);
}

#[test]
fn rows_that_move_or_vanish_between_claim_and_confirm_stop_nothing() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = cluster_behind(&proxy, &exchange, &[]);
    let mut client = cluster.connect(DB);
    // The confirms come late enough for all that happens meanwhile.
    proxy.mode(Mode::Delay(1_000));
    let labels = ["first", "deleted", "third", "last"];
    run(&mut client, "begin");
    let seqs = labels.map(|label| publish(&mut client, label));
    run(&mut client, "commit");
    let in_flight = "select count(*) = 4 from outbox_messages where status = 'in flight'";
    wait_true(&cluster, "all to be on their way", in_flight);
    run(&mut client, &format!("delete from outbox where seq = {}", seqs[1]));
    run(&mut client, "vacuum full outbox");
    let still: bool = client
        .query_one(
            "select count(*) = 3 from outbox_messages where status = 'in flight'",
            &[],
        )
        .expect("an answer")
        .get(0);
    assert!(still, "confirmed before the rows moved, so the test shows nothing");
    wait_published(&cluster, 3);
    proxy.mode(Mode::Pass);
    publish(&mut client, "after");
    wait_published(&cluster, 4);
    let sent = labels.iter().chain(&["after"]).map(|label| Sent {
        label: (*label).to_owned(),
        payload: json!({"label": label}),
        fate: Fate::Committed,
    });
    // The deleted one was on its way already; it is in no history.
    judge_queue(broker, &queue, &sent.collect::<Vec<_>>()).assert_perfect();
}

#[test]
fn deleted_pointers_and_missing_events_do_not_stop_the_rest() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let cluster = outbox_cluster(broker, &exchange);
    let mut client = cluster.connect(DB);
    pause(&cluster);
    let lost: Vec<i64> = (0..20).map(|n| publish(&mut client, &format!("lost {n}"))).collect();
    run(
        &mut client,
        &format!("delete from outbox where seq = {}; truncate outbox_events", lost[0]),
    );
    for n in 0..10 {
        publish(&mut client, &format!("kept {n}"));
    }
    cluster.set_conf("outbox.enabled", "on");
    wait_drained(&cluster);
    wait_published(&cluster, 10);
    let kept = (0..10).map(|n| Sent {
        label: format!("kept {n}"),
        payload: json!({"label": format!("kept {n}")}),
        fate: Fate::Committed,
    });
    judge_queue(broker, &queue, &kept.collect::<Vec<_>>()).assert_perfect();
    let dead: Vec<(i64, String)> = client
        .query("select seq, reason from outbox_dead order by seq", &[])
        .expect("the dead letters")
        .iter()
        .map(|row| (row.get(0), row.get(1)))
        .collect();
    let expected = lost[1..]
        .iter()
        .map(|seq| (*seq, format!("the event store has no event with seq {seq}")));
    assert_eq!(dead, expected.collect::<Vec<_>>());
}
