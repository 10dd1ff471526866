//! Tests of `outbox.publish_after = standby`: a message is sent only once the named standbys have its commit, so a
//! promoted standby has every event that was ever published. With real servers that replicate through a proxy, which
//! loses what a failover loses.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use support::chaos::rounds;
use support::load::{Load, Plan};
use support::{Broker, Cluster, Consumer, Mode, Proxy, StopMode, process, wait_for, wait_until};
use support::{
    DB, LONG, Remedy, Session, Stage, all_of, exchange_and_queue, health, outbox_cluster_with, type_sql,
    unconnected_cluster, wait_drained, wait_for_heartbeat, wait_for_problem, wait_healthy, wait_published, wait_true,
};

/// A standby of `primary` that replicates through the proxy, under this name. Waits until it has all WAL.
fn follow(primary: &Cluster, proxy: &Proxy, name: &str) -> Cluster {
    let standby = primary.copy(true, &[]);
    follow_at(&standby, proxy.port(), name);
    wait_until_it_follows(primary, name);
    standby
}

/// Makes the standby follow the server at this port of loopback, under this name.
fn follow_at(standby: &Cluster, port: u16, name: &str) {
    let conninfo = format!("host=127.0.0.1 port={port} user=postgres application_name={name}");
    standby.exec(DB, &format!("alter system set primary_conninfo = '{conninfo}'"));
    standby.reload();
}

fn wait_until_it_follows(primary: &Cluster, name: &str) {
    let has_all = format!(
        "select coalesce(bool_or(flush_lsn >= pg_current_wal_flush_lsn()), false) from pg_stat_replication
         where application_name = '{name}'"
    );
    wait_true(primary, "the standby to have all WAL", &has_all);
}

/// Whether a message is claimed, and none is sent: it waits for the standby.
fn wait_until_held(cluster: &Cluster) {
    wait_true(
        cluster,
        "a claimed message that is not sent",
        "select in_flight > 0 from outbox_status",
    );
}

/// Asserts that nothing is sent in two passes of the worker.
fn assert_nothing_is_sent(primary: &Cluster, broker: &Broker, consumer: &Consumer) {
    for _ in 0..2 {
        primary.reload(); // a heartbeat is due at once
        wait_for_heartbeat(primary);
    }
    consumer.assert_next_is_fence(broker);
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
        primary.publish("with the standby");
        assert_eq!(consumer.next().label(), "with the standby");
        wait_published(&primary, 1);

        proxy.mode(Mode::Blackhole);
        primary.publish("without the standby");
        wait_until_held(&primary);
        assert_nothing_is_sent(&primary, broker, &consumer);
        proxy.mode(Mode::Pass);
        proxy.reset_all();
        assert_eq!(consumer.next().label(), "without the standby");
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
    primary.publish("one");
    wait_until_held(&primary);
    let problem = wait_for_problem(&primary, "standbys");
    assert_eq!(
        problem,
        "messages wait for standbys that are not connected: s2, s3; connected: s1"
    );
    let _second = follow(&primary, &proxies[1], "s2");
    let consumer = Consumer::new(broker, &queue);
    assert_eq!(consumer.next().label(), "one");
    wait_healthy(&primary, "standbys");
    first.stop(StopMode::Immediate);
    primary.publish("two");
    wait_until_held(&primary);
    first.start_again();
    assert_eq!(consumer.next().label(), "two");
}

#[test]
fn a_standby_under_another_name_is_named_and_a_pattern_with_a_number_takes_it() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster_with(broker, &exchange, &AFTER_STANDBY);
    let consumer = Consumer::new(broker, &queue);
    let proxy = Proxy::start(primary.port());
    let _rebuilt = follow(&primary, &proxy, "s1-new");
    primary.publish("held");
    wait_until_held(&primary);
    let not_connected = format!("{NOT_CONNECTED}; connected: s1-new");
    assert_eq!(wait_for_problem(&primary, "standbys"), not_connected);
    // "All" of a pattern is no number.
    primary.set_conf("outbox.standby_names", "s1*");
    wait_until("the missing number", LONG, || {
        health(&primary, "standbys").1.contains("outbox.standby_quorum is 0")
    });
    assert_nothing_is_sent(&primary, broker, &consumer);
    type_sql(&primary, Remedy::wait(&primary, r#""check" = 'standbys'"#).command());
    assert_eq!(consumer.next().label(), "held");
    wait_healthy(&primary, "standbys");
    type_sql(
        &primary,
        "alter system set outbox.standby_quorum = 2; select pg_reload_conf()",
    );
    let problem = "messages wait for standbys that are not connected: s1*; connected: s1-new";
    assert_eq!(wait_for_problem(&primary, "standbys"), problem);
}

#[test]
fn a_subscriber_of_logical_replication_is_no_standby() {
    let cluster = unconnected_cluster("", "x", &[&AFTER_STANDBY[..], &["wal_level = logical"]].concat());
    cluster.exec(DB, "create publication p");
    cluster.exec(DB, "select pg_create_logical_replication_slot('s', 'pgoutput')");
    let mut subscriber = Command::new(cluster.installation().bin("pg_recvlogical"));
    let database = format!("{} application_name=s1", cluster.conn_string(DB));
    let options = ["proto_version=1", "publication_names=p"].map(|option| ["-o", option]);
    subscriber.args([
        "-d",
        &database,
        "--slot",
        "s",
        "--start",
        "-f",
        "-",
        "--status-interval",
        "1",
    ]);
    subscriber.args(options.as_flattened()).stdout(Stdio::null());
    let mut subscriber = process::spawn_bound(subscriber, libc::SIGKILL).expect("start pg_recvlogical");
    let reported =
        "select exists (select from pg_stat_replication where application_name = 's1' and flush_lsn is not null)";
    wait_true(&cluster, "its position", reported);
    assert_eq!(wait_for_problem(&cluster, "standbys"), NOT_CONNECTED);
    process::kill(&mut subscriber);
}

#[test]
fn after_the_timeout_messages_are_sent_without_the_standby_until_it_has_caught_up() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = [&AFTER_STANDBY[..], &["outbox.standby_timeout = '200ms'"]].concat();
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let consumer = Consumer::new(broker, &queue);
    let from = primary.log_offset();
    primary.publish("without it");
    assert_eq!(consumer.next().label(), "without it");
    primary.wait_for_log("messages are sent without them", from);
    let problem = wait_for_problem(&primary, "standbys");
    assert_eq!(
        problem,
        "standbys are not connected: s1; after 200ms messages are sent without them"
    );
    let proxy = Proxy::start(primary.port());
    let _standby = follow(&primary, &proxy, "s1");
    // The next message shows the worker that the standby is back.
    primary.publish("with it");
    assert_eq!(consumer.next().label(), "with it");
    primary.wait_for_log("messages wait for them again", from);
    wait_healthy(&primary, "standbys");
}

#[test]
fn a_worker_that_sends_without_the_standby_waits_for_it_once_the_timeout_is_switched_off() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = [&AFTER_STANDBY[..], &["outbox.standby_timeout = '200ms'"]].concat();
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let from = primary.log_offset();
    primary.publish("without it");
    primary.wait_for_log("messages are sent without them", from);
    primary.set_conf("outbox.standby_timeout", "-1");
    let waits = "select reason = 'standby' from outbox_destination_status where destination = 'default'";
    // The worker may send some messages before it reads the setting.
    wait_until("a message that waits for the standby", LONG, || {
        let before = broker.queue_len(&queue);
        primary.publish("held");
        wait_for("it to arrive or to wait", LONG, || {
            let waits = primary.query_one::<Option<bool>>(DB, waits) == Some(true);
            (waits || broker.queue_len(&queue) > before).then_some(waits)
        })
    });
    let proxy = Proxy::start(primary.port());
    let _standby = follow(&primary, &proxy, "s1");
    wait_drained(&primary);
}

#[test]
fn settings_that_cannot_work_are_refused_or_shown() {
    let cluster = Stage::new(&["outbox.publish_after = standby"]).cluster;
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
        assert_eq!(support::refused(&cluster, sql).message(), expected);
    }
    cluster.set_conf("outbox.publish_after", "local");
    wait_healthy(&cluster, "standbys");
}

/// Kills the primary under load at a moment when its standby has not received the last commits, and promotes the
/// standby. Returns the labels of the events that consumers have and the new primary lacks, and their number.
fn events_that_never_were(conf: &[&str]) -> (Vec<String>, usize) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster_with(broker, &exchange, conf);
    let proxy = Proxy::start(primary.port());
    let standby = follow(&primary, &proxy, "s1");
    let load = Load::start(&primary, &Plan::default());
    load.wait_for_more(40);
    let mut client = primary.connect(DB);
    // The proxy swallows the standby's next attempt to connect, and a stop waits that long for it to log in.
    primary.write_conf("authentication_timeout", "1s");
    client.run("select pg_reload_conf()");
    // A session reads the setting after the postmaster. New sessions would have only that time to log in.
    wait_until("the setting", LONG, || {
        let shown = client.query_one("show authentication_timeout", &[]);
        shown.expect("the setting").get::<_, String>(0) == "1s"
    });
    proxy.mode(Mode::Blackhole);
    let last = client.query_one("select max(seq) from outbox_events", &[]);
    let last: i64 = last.expect("the events").get(0);
    load.wait_for_more(20);
    load.pause(true);
    if conf.is_empty() {
        let forgotten = format!("select exists (select from outbox_history where seq > {last})");
        wait_true(&primary, "a published message that the standby lacks", &forgotten);
    }
    primary.stop(StopMode::Immediate);
    drop(load);
    proxy.reset_all();
    assert!(standby.query_one::<bool>(DB, "select pg_promote()"));
    standby.set_conf("outbox.publish_after", "local"); // it has no standby of its own
    // What the new primary has is delivered again, or for the first time.
    wait_drained(&standby);
    let arrived: BTreeSet<String> = all_of(broker, &queue).iter().map(|sent| sent.label()).collect();
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
    for round in 0..rounds(1) {
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

/// A session whose commit waits for a synchronous standby.
struct WaitingCommit {
    pid: i32,
    session: JoinHandle<Result<(), postgres::Error>>,
}

impl WaitingCommit {
    /// Publishes a message in a session with this `synchronous_commit`, and waits until the commit waits.
    fn publish(primary: &Cluster, label: &str, synchronous_commit: &str) -> Self {
        let mut session = primary.connect(DB);
        let pid: i32 = session.value("select pg_backend_pid()");
        let sql = format!(
            "set synchronous_commit = {synchronous_commit};
             select outbox_publish('T', '{{\"label\": \"{label}\"}}', 'thing', '1')"
        );
        let session = std::thread::spawn(move || session.batch_execute(&sql));
        let waits =
            format!("select coalesce(bool_or(wait_event = 'SyncRep'), false) from pg_stat_activity where pid = {pid}");
        wait_true(primary, "the commit to wait for the standby", &waits);
        Self { pid, session }
    }

    /// Cancels the wait. The transaction is committed, with a warning.
    fn cancel(self, primary: &Cluster) {
        primary.query_one::<bool>(DB, &format!("select pg_cancel_backend({})", self.pid));
        self.session.join().expect("no panic").expect("it is committed");
    }
}

/// From here on commits wait for these standbys, except those of the sessions that the tests use besides.
fn synchronous(primary: &Cluster, names: &str) {
    primary.exec(DB, "alter role postgres set synchronous_commit = local");
    primary.set_conf("synchronous_standby_names", names);
    let taken = format!(
        "select count(*) > 0 and bool_and((sync_priority > 0) = ('{names}' ~ application_name))
         from pg_stat_replication"
    );
    wait_true(primary, "the walsenders to have the setting", &taken);
    // The checkpointer publishes to all sessions that commits must wait. It reads the setting before this checkpoint.
    primary.exec(DB, "checkpoint");
}

#[test]
fn a_commit_cancelled_while_it_waits_for_a_synchronous_standby_is_not_sent_before_that_has_it() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster_with(broker, &exchange, &AFTER_STANDBY);
    let proxy = Proxy::start(primary.port());
    let _standby = follow(&primary, &proxy, "s1");
    synchronous(&primary, "s1");
    for synchronous_commit in ["on", "remote_write", "remote_apply"] {
        proxy.mode(Mode::Blackhole);
        WaitingCommit::publish(&primary, synchronous_commit, synchronous_commit).cancel(&primary);
        wait_until_held(&primary);
        let consumer = Consumer::new(broker, &queue);
        assert_nothing_is_sent(&primary, broker, &consumer);
        proxy.mode(Mode::Pass);
        proxy.reset_all();
        assert_eq!(consumer.next().label(), synchronous_commit);
        wait_healthy(&primary, "standbys");
        wait_until_it_follows(&primary, "s1");
    }
}

#[test]
fn a_commit_cancelled_while_the_standby_does_not_apply_it_is_sent_because_that_has_it_on_disk() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster_with(broker, &exchange, &AFTER_STANDBY);
    let proxy = Proxy::start(primary.port());
    let standby = follow(&primary, &proxy, "s1");
    synchronous(&primary, "s1");
    standby.exec(DB, "select pg_wal_replay_pause()");
    wait_true(
        &standby,
        "replay to pause",
        "select pg_get_wal_replay_pause_state() = 'paused'",
    );
    let waiting = WaitingCommit::publish(&primary, "not applied", "remote_apply");
    let consumer = Consumer::new(broker, &queue);
    assert_nothing_is_sent(&primary, broker, &consumer); // it is not visible yet
    waiting.cancel(&primary);
    assert_eq!(consumer.next().label(), "not applied");
    primary.stop(StopMode::Immediate);
    standby.exec(DB, "select pg_wal_replay_resume()");
    assert!(standby.query_one::<bool>(DB, "select pg_promote()"));
    let known = "select payload->>'label' from outbox_events";
    assert_eq!(standby.query_one::<String>(DB, known), "not applied");
}

#[test]
fn a_message_waits_for_its_own_standbys_whichever_standbys_its_commit_waits_for() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = ["outbox.publish_after = standby", "outbox.standby_names = 's1, s2'"];
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let proxies = ["s1", "s2"].map(|_| Proxy::start(primary.port()));
    let _standbys = [follow(&primary, &proxies[0], "s1"), follow(&primary, &proxies[1], "s2")];
    let consumer = Consumer::new(broker, &queue);
    let apart = |names: &str, cut: &Proxy, label_of: &str, waits: bool| {
        synchronous(&primary, names);
        cut.mode(Mode::Blackhole);
        match waits {
            true => WaitingCommit::publish(&primary, label_of, "on").cancel(&primary),
            false => primary.exec(
                DB,
                &format!(
                    "set synchronous_commit = on;
                     select outbox_publish('T', '{{\"label\": \"{label_of}\"}}', 'thing', '1')"
                ),
            ),
        }
        wait_until_held(&primary);
        assert_nothing_is_sent(&primary, broker, &consumer);
        cut.mode(Mode::Pass);
        cut.reset_all();
        assert_eq!(consumer.next().label(), label_of);
        ["s1", "s2"]
            .iter()
            .for_each(|name| wait_until_it_follows(&primary, name));
    };
    apart("ANY 1 (s1, s2)", &proxies[1], "a commit that any one released", false);
    apart("s1", &proxies[1], "a commit that the other one released", false);
    apart("s2", &proxies[1], "a canceled commit", true);
    apart("FIRST 2 (s1, s2)", &proxies[0], "a canceled commit of both", true);
}

/// Makes the primary forget the WAL that no slot keeps.
fn outgrow(primary: &Cluster) {
    for _ in 0..3 {
        primary.exec(
            DB,
            "create table grows (); drop table grows; select pg_switch_wal(); checkpoint",
        );
    }
}

#[test]
fn a_standby_with_a_slot_that_was_away_gets_the_wal_and_its_messages_go() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster_with(broker, &exchange, &AFTER_STANDBY);
    primary.exec(DB, "select pg_create_physical_replication_slot('s1', true)");
    let proxy = Proxy::start(primary.port());
    let standby = follow(&primary, &proxy, "s1");
    standby.set_conf("primary_slot_name", "s1");
    let active = "select active from pg_replication_slots where slot_name = 's1'";
    wait_true(&primary, "the standby to use its slot", active);
    standby.stop(StopMode::Fast);
    primary.publish("while it was away");
    wait_until_held(&primary);
    outgrow(&primary);
    assert_eq!(wait_for_problem(&primary, "standbys"), NOT_CONNECTED);
    let consumer = Consumer::new(broker, &queue);
    assert_nothing_is_sent(&primary, broker, &consumer);
    standby.start_again();
    assert_eq!(consumer.next().label(), "while it was away");
    wait_healthy(&primary, "standbys");
}

#[test]
fn messages_wait_for_a_standby_that_lost_its_wal_until_it_is_made_again() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = [&AFTER_STANDBY[..], &["wal_keep_size = 0"]].concat();
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let proxy = Proxy::start(primary.port());
    let standby = follow(&primary, &proxy, "s1");
    standby.stop(StopMode::Fast);
    primary.publish("while it was away");
    wait_until_held(&primary);
    outgrow(&primary);
    let from = standby.log_offset();
    standby.start_again();
    standby.wait_for_log("has already been removed", from);
    assert_eq!(wait_for_problem(&primary, "standbys"), NOT_CONNECTED);
    let consumer = Consumer::new(broker, &queue);
    assert_nothing_is_sent(&primary, broker, &consumer);
    drop(standby);
    let _again = follow(&primary, &proxy, "s1");
    assert_eq!(consumer.next().label(), "while it was away");
}

#[test]
fn a_standby_of_a_standby_does_not_count_until_it_follows_the_primary() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = ["outbox.publish_after = standby", "outbox.standby_names = 's1, s2'"];
    let primary = outbox_cluster_with(broker, &exchange, &conf);
    let proxy = Proxy::start(primary.port());
    let first = follow(&primary, &proxy, "s1");
    let second = primary.copy(true, &[]);
    follow_at(&second, first.port(), "s2");
    let cascades =
        "select exists (select from pg_stat_replication where application_name = 's2' and state = 'streaming')";
    wait_true(&first, "a standby of the standby", cascades);
    primary.publish("for two");
    wait_until_held(&primary);
    assert_eq!(
        wait_for_problem(&primary, "standbys"),
        "messages wait for standbys that are not connected: s2; connected: s1"
    );
    let remedy: String = primary.query_one(DB, r#"select remedy from outbox_health where "check" = 'standbys'"#);
    assert!(remedy.contains("only direct standbys of this server count"), "{remedy}");
    let waits = "select coalesce(bool_or(detail = 'waits for standby s2'), false) from outbox_destination_status";
    wait_true(&primary, "the destination to name it", waits);
    let consumer = Consumer::new(broker, &queue);
    assert_nothing_is_sent(&primary, broker, &consumer);
    // The one that counts becomes the primary. Then the other one is a standby of the primary.
    primary.stop(StopMode::Immediate);
    first.set_conf("outbox.standby_quorum", "1");
    assert!(first.query_one::<bool>(DB, "select pg_promote()"));
    assert_eq!(consumer.next().label(), "for two");
    wait_healthy(&first, "standbys");
}

#[test]
fn a_standby_that_is_connected_and_behind_is_named() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let primary = outbox_cluster_with(broker, &exchange, &AFTER_STANDBY);
    let proxy = Proxy::start(primary.port());
    let _standby = follow(&primary, &proxy, "s1");
    proxy.mode(Mode::Blackhole);
    let from = primary.log_offset();
    primary.publish("late");
    assert_eq!(
        wait_for_problem(&primary, "standbys"),
        "standbys are connected and behind: a worker waits for standby s1"
    );
    primary.wait_for_log("waits for standby s1", from);
    let (ok, problem) = health(&primary, "broker");
    assert!(ok, "the broker is well: {problem}");
    proxy.mode(Mode::Pass);
    proxy.reset_all();
    assert_eq!(Consumer::new(broker, &queue).next().label(), "late");
    wait_healthy(&primary, "standbys");
}
