//! Tests of `outbox.publish_after = standby`: a message is sent only once the named standbys have its commit, so a
//! promoted standby has every event that was ever published. With real servers that replicate through a proxy, which
//! loses what a failover loses.

mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use common::load::{Load, Plan};
use common::oracle::Arrived;
use common::{
    DB, LONG, all_of, exchange_and_queue, health, outbox_cluster_with, wait_drained, wait_for_problem, wait_healthy,
    wait_published, wait_true,
};
use support::{Broker, Cluster, Consumer, Mode, Proxy, StopMode};

/// A standby of `primary` that replicates through the proxy, under this name. Waits until it has all WAL.
fn follow(primary: &Cluster, proxy: &Proxy, name: &str) -> Cluster {
    let standby = primary.copy(true, &[]);
    let conninfo = format!(
        "host=127.0.0.1 port={} user=postgres application_name={name}",
        proxy.port()
    );
    standby.exec(DB, &format!("alter system set primary_conninfo = '{conninfo}'"));
    standby.reload();
    wait_until_it_follows(primary, name);
    standby
}

fn wait_until_it_follows(primary: &Cluster, name: &str) {
    let has_all = format!(
        "select coalesce(bool_or(flush_lsn >= pg_current_wal_flush_lsn()), false) from pg_stat_replication
         where application_name = '{name}'"
    );
    wait_true(primary, "the standby to have all WAL", &has_all);
}

fn publish(cluster: &Cluster, label: &str) {
    let sql = format!("select outbox_publish('T', '{{\"label\": \"{label}\"}}', 'thing', '1')");
    cluster.query_one::<i64>(DB, &sql);
}

fn label(consumer: &Consumer) -> String {
    Arrived::new(&consumer.recv(LONG).expect("a message")).label
}

/// Whether a message is claimed, and none is sent: it waits for the standby.
fn wait_until_held(cluster: &Cluster) {
    wait_true(
        cluster,
        "a claimed message that is not sent",
        "select in_flight > 0 from outbox_status",
    );
}

fn assert_nothing_is_sent(consumer: &Consumer) {
    let sent = consumer.drain_quiet(Duration::from_millis(300));
    assert!(sent.is_empty(), "sent before the standby had it: {sent:?}");
}

const AFTER_STANDBY: [&str; 2] = ["outbox.publish_after = standby", "outbox.standby_names = 's1'"];

#[test]
fn a_message_is_sent_once_the_standby_has_its_commit_and_not_before() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // Both ways to a worker: the table, and the fast path.
    for fast_path in ["on", "off"] {
        let fast_path = format!("outbox.fast_path = {fast_path}");
        let primary = outbox_cluster_with(broker, &exchange, &[&AFTER_STANDBY[..], &[&fast_path]].concat());
        assert_eq!(wait_for_problem(&primary, "standbys"), NOT_CONNECTED);
        let proxy = Proxy::start(primary.port());
        let _standby = follow(&primary, &proxy, "s1");
        wait_healthy(&primary, "standbys");
        let consumer = Consumer::new(broker, &queue);
        publish(&primary, "with the standby");
        assert_eq!(label(&consumer), "with the standby");
        wait_published(&primary, 1);

        proxy.mode(Mode::Blackhole);
        publish(&primary, "without the standby");
        wait_until_held(&primary);
        assert_nothing_is_sent(&consumer);
        proxy.mode(Mode::Pass);
        proxy.reset_all();
        assert_eq!(label(&consumer), "without the standby");
        wait_published(&primary, 2);
    }
}

const NOT_CONNECTED: &str = "messages wait for standbys that are not connected: s1";

#[test]
fn two_of_three_standbys_are_enough_with_a_quorum_of_two() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = [
        "outbox.publish_after = standby",
        "outbox.standby_names = 's1, s2, s3'",
        "outbox.standby_quorum = 2",
    ];
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let proxies = ["s1", "s2"].map(|_| Proxy::start(primary.port()));
    let first = follow(&primary, &proxies[0], "s1");
    publish(&primary, "one");
    wait_until_held(&primary);
    let problem = wait_for_problem(&primary, "standbys");
    assert_eq!(problem, "messages wait for standbys that are not connected: s2, s3");
    let _second = follow(&primary, &proxies[1], "s2");
    let consumer = Consumer::new(broker, &queue);
    assert_eq!(label(&consumer), "one");
    wait_healthy(&primary, "standbys");
    first.stop(StopMode::Immediate);
    publish(&primary, "two");
    wait_until_held(&primary);
    first.start_again();
    assert_eq!(label(&consumer), "two");
}

#[test]
fn after_the_timeout_messages_are_sent_without_the_standby_until_it_has_caught_up() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = [&AFTER_STANDBY[..], &["outbox.standby_timeout = '200ms'"]].concat();
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let consumer = Consumer::new(broker, &queue);
    let from = primary.log_offset();
    publish(&primary, "without it");
    assert_eq!(label(&consumer), "without it");
    primary.wait_for_log("messages are sent without them", from);
    let problem = wait_for_problem(&primary, "standbys");
    assert_eq!(
        problem,
        "standbys are not connected: s1; after 200ms messages are sent without them"
    );
    let proxy = Proxy::start(primary.port());
    let _standby = follow(&primary, &proxy, "s1");
    // The next message shows the worker that the standby is back.
    publish(&primary, "with it");
    assert_eq!(label(&consumer), "with it");
    primary.wait_for_log("messages wait for them again", from);
    wait_healthy(&primary, "standbys");
}

#[test]
fn settings_that_cannot_work_are_refused_or_shown() {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.publish_after = standby"]);
    let problem = wait_for_problem(&cluster, "standbys");
    assert_eq!(
        problem,
        "outbox.publish_after is standby, and outbox.standby_names is empty: messages wait"
    );
    for (sql, expected) in [
        (
            "alter system set outbox.publish_after = 'remote'",
            "invalid value for parameter \"outbox.publish_after\": \"remote\"",
        ),
        (
            "alter system set outbox.standby_names = 'a, a'",
            "outbox.standby_names is refused: \"a\" is in it twice",
        ),
        (
            "alter system set outbox.standby_names = 'a,'",
            "outbox.standby_names is refused: a name is empty",
        ),
    ] {
        assert_eq!(common::refused(&cluster, sql).message(), expected);
    }
    cluster.set_conf("outbox.publish_after", "local");
    wait_healthy(&cluster, "standbys");
}

/// Kills the primary under load at a moment when its standby has not received the last commits, and promotes the
/// standby. Returns the labels of the events that consumers have and the new primary lacks, and their number.
fn events_that_never_were(conf: &[&str]) -> (Vec<String>, usize) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    // The proxy swallows the standby's next attempt to connect, and a stop waits that long for it to log in.
    let conf = [conf, &["authentication_timeout = 1s"]].concat();
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let proxy = Proxy::start(primary.port());
    let standby = follow(&primary, &proxy, "s1");
    let load = Load::start(&primary, &Plan::default());
    load.wait_for_more(40);
    proxy.mode(Mode::Blackhole);
    load.wait_for_more(20);
    load.pause(true);
    primary.stop(StopMode::Immediate);
    drop(load);
    proxy.reset_all();
    assert!(standby.query_one::<bool>(DB, "select pg_promote()"));
    standby.set_conf("outbox.publish_after", "local"); // it has no standby of its own
    // What the new primary has is delivered again, or for the first time.
    wait_drained(&standby);
    let arrived: BTreeSet<String> = all_of(broker, &queue)
        .iter()
        .map(|sent| Arrived::new(sent).label)
        .collect();
    let rows = standby
        .connect(DB)
        .query("select payload->>'label' from outbox_events", &[]);
    let known: BTreeSet<String> = rows.expect("the events").iter().map(|row| row.get(0)).collect();
    assert!(
        known.is_subset(&arrived),
        "an event of the new primary was not delivered"
    );
    (arrived.difference(&known).cloned().collect(), arrived.len())
}

#[test]
fn a_promoted_standby_has_every_published_event_however_often_the_primary_is_killed() {
    for round in 0..10 {
        let (unknown, arrived) = events_that_never_were(&AFTER_STANDBY);
        assert!(unknown.is_empty(), "round {round}: consumers have {unknown:?}");
        assert!(arrived >= 20, "round {round}: {arrived} events arrived");
    }
}

#[test]
fn with_publish_after_local_a_failover_forgets_events_that_consumers_have() {
    let (unknown, _) = events_that_never_were(&[]);
    assert!(!unknown.is_empty(), "the rule would not be needed");
    println!("consumers have {} events that the new primary never had", unknown.len());
}

#[test]
fn a_commit_cancelled_while_it_waits_for_a_synchronous_standby_is_not_sent_before_that_has_it() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster_with(broker, &exchange, &AFTER_STANDBY);
    let proxy = Proxy::start(primary.port());
    let _standby = follow(&primary, &proxy, "s1");
    primary.set_conf("synchronous_standby_names", "s1");
    proxy.mode(Mode::Blackhole);
    let mut session = primary.connect(DB);
    let pid: i32 = session.query_one("select pg_backend_pid()", &[]).expect("a pid").get(0);
    let waiting = std::thread::spawn(move || {
        session.batch_execute("select outbox_publish('T', '{\"label\": \"cancelled\"}', 'thing', '1')")
    });
    // The other sessions of this test must not wait too.
    let waits =
        format!("select coalesce(bool_or(wait_event = 'SyncRep'), false) from pg_stat_activity where pid = {pid}");
    wait_true(&primary, "the commit to wait for the standby", &waits);
    primary.query_one::<bool>(DB, &format!("select pg_cancel_backend({pid})"));
    waiting
        .join()
        .expect("no panic")
        .expect("it is committed, with a warning");
    wait_until_held(&primary);
    let consumer = Consumer::new(broker, &queue);
    assert_nothing_is_sent(&consumer);
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    assert_eq!(label(&consumer), "cancelled");
    let (ok, _) = health(&primary, "standbys");
    assert!(ok);
}
