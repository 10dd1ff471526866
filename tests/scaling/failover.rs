//! A primary and its standby on two hosts. The primary is cut off and the standby promoted. The old primary comes back
//! by pg_rewind or without it, and the roles change back. Settings and commands are those of docs/scaling/failover.md.

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

use support::chaos::rounds;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::markdown::blocks;
use support::oracle::{Fate, Sent, Verdict, arrived, judge};
use support::{Broker, Cluster, Host, Network, PrivateBroker, StopMode, process, program, wait_until};
use support::{
    DB, LONG, all_of, exchange_and_queue, health, wait_connected, wait_drained, wait_for_heartbeat, wait_for_problem,
    wait_healthy, wait_true,
};

const PAGE: &str = include_str!("../../docs/scaling/failover.md");

/// The settings of both servers, as the page has them.
fn settings() -> Vec<String> {
    let blocks = blocks(PAGE, "ini");
    blocks[0].lines().map(str::to_owned).collect()
}

/// The only command of the page that contains this.
fn command_with(part: &str) -> String {
    let all = blocks(PAGE, "sh").join("\n");
    let mut found = all.lines().filter(|line| line.contains(part));
    let command = found
        .next()
        .unwrap_or_else(|| panic!("the page has no command with {part}"));
    assert_eq!(found.next(), None, "two commands with {part}");
    command.to_owned()
}

/// Two servers of one broker, on three hosts.
struct Pair {
    network: Network,
    hosts: [Host; 2],
    servers: [Cluster; 2],
    broker: PrivateBroker,
    queue: String,
}

impl Pair {
    /// The server `pg1`, and `pg2` that follows it. `conf`: further settings of both.
    fn start(test: &str, conf: &[&str]) -> Option<Self> {
        let network = Network::start(test)?;
        let broker = Broker::start_on(&network.host(), &[]);
        let (exchange, queue) = exchange_and_queue(&broker);
        let hosts = [network.host(), network.host()];
        let mut first = Cluster::builder()
            .on(&hosts[0])
            .conf("cluster_name = 'pg1'")
            .conf(&format!("outbox.url = '{}'", broker.url()))
            .conf(&format!("outbox.exchange = '{exchange}'"));
        for line in settings().iter().map(String::as_str).chain(conf.iter().copied()) {
            first = first.conf(line);
        }
        let first = first.start();
        first.exec(DB, "create extension outbox");
        wait_connected(&first);
        let second = first.copy_on(&hosts[1], true, &["cluster_name = 'pg2'"]);
        let pair = Self {
            network,
            hosts,
            servers: [first, second],
            broker,
            queue,
        };
        pair.wait_until_follows(0);
        Some(pair)
    }

    /// Waits until the other server has all WAL of this primary.
    fn wait_until_follows(&self, primary: usize) {
        wait_true(
            &self.servers[primary],
            "the standby to have all WAL",
            "select coalesce(bool_or(flush_lsn >= pg_current_wal_flush_lsn()), false) from pg_stat_replication",
        );
    }

    /// Producers on the host of this server: they reach it also while the host is cut off.
    fn load(&self, server: usize, era: &str) -> Load {
        let plan = Plan {
            era: era.to_owned(),
            ..Plan::default()
        };
        self.hosts[server].enter(|| Load::start(&self.servers[server], &plan))
    }

    /// Connects the host again, and waits until it reaches the other server: a link needs a moment.
    fn plug(&self, host: usize) {
        self.network.plug(&self.hosts[host]);
        let other = (self.hosts[1 - host].address(), self.servers[1 - host].port());
        wait_until("the host to reach the other one", LONG, || {
            self.hosts[host].enter(|| TcpStream::connect(other)).is_ok()
        });
    }

    /// Waits until the broker has the end of each connection from this host.
    fn wait_until_disconnected(&self, host: usize) {
        let address = self.hosts[host].address().to_string();
        wait_until("the connections to end", LONG, || {
            let peers = self.broker.ctl(&["list_connections", "--silent", "peer_host"]);
            !peers.lines().any(|peer| peer == address)
        });
    }

    fn queued(&self) -> u32 {
        self.broker.queue_len(&self.queue)
    }

    /// Makes the stopped server a standby of the other one: by pg_rewind if it has commits that the other one lacks.
    fn follow(&self, standby: usize, rewinds: bool) {
        let (old, new) = (&self.servers[standby], &self.servers[1 - standby]);
        if rewinds {
            new.exec(DB, "checkpoint");
            // pg_rewind copies the configuration of the source, too.
            let config = old.data_dir().join("postgresql.conf");
            let kept = std::fs::read_to_string(&config).expect("read the configuration");
            let address = format!("host={}", self.hosts[1 - standby].address());
            let said = self.run_on(standby, &command_with("pg_rewind").replace("host=pg2", &address));
            assert!(said.contains("rewinding from last common checkpoint"), "{said}");
            std::fs::write(&config, kept).expect("write the configuration");
        } else {
            self.run_on(standby, &command_with("standby.signal"));
        }
        old.start_again();
        self.wait_until_follows(1 - standby);
    }

    /// Runs a command as the user of the server, on its host. Returns what it prints to stderr.
    fn run_on(&self, server: usize, command: &str) -> String {
        let cluster = &self.servers[server];
        let programs = cluster.installation().bin("postgres");
        let programs = programs.parent().expect("a directory").display();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = Command::new("/bin/sh");
        shell
            .args(["-c", command])
            .env("PGDATA", cluster.data_dir())
            .env("PATH", format!("{programs}:{path}"))
            .current_dir(cluster.data_dir());
        process::run_as(&mut shell, process::postgres_account());
        let output = self.hosts[server].enter(|| shell.output()).expect("run a shell");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command}: {said}");
        said
    }

    /// What consumers have, against what this primary has. Fails if an event of it has not arrived, or came in another
    /// order than its key has. Events that it lacks count as never committed: `invented` has those that arrived.
    fn judge(&self, primary: usize, sent: &[Sent]) -> (Verdict, usize) {
        let rows = self.servers[primary]
            .connect(DB)
            .query("select payload->>'label' from outbox_events", &[]);
        let known: BTreeSet<String> = rows.expect("the events").iter().map(|row| row.get(0)).collect();
        let fate = |sent: &Sent| match known.contains(&sent.label) {
            true => Fate::Committed,
            false => Fate::RolledBack,
        };
        let judged: Vec<Sent> = sent
            .iter()
            .map(|sent| Sent {
                fate: fate(sent),
                ..sent.clone()
            })
            .collect();
        let forgotten = sent
            .iter()
            .filter(|sent| sent.fate == Fate::Committed && !known.contains(&sent.label));
        let arrived = arrived(&all_of(&self.broker, &self.queue));
        (judge(&judged, &arrived), forgotten.count())
    }
}

fn promote(server: &Cluster) {
    assert!(server.query_one::<bool>(DB, "select pg_promote()"));
}

/// Waits until workers of this server have published a message. The counter begins at zero when the server starts.
fn wait_until_delivers(server: &Cluster) {
    wait_true(
        server,
        "a message of this server",
        "select published_total > 0 from outbox_status",
    );
}

/// Waits until the destination of this server says what it waits for.
fn wait_until_waits(server: &Cluster, awaited: &str) {
    let sql = format!("select coalesce(bool_or(detail = '{awaited}'), false) from outbox_destination_status");
    wait_true(server, awaited, &sql);
}

fn assert_no_worker_runs(server: &Cluster) {
    let workers = "select count(*) from pg_stat_activity where backend_type like 'outbox%'";
    assert_eq!(server.query_one::<i64>(DB, workers), 0);
}

/// Asserts that the database delivers here without being adopted.
fn assert_adopted(server: &Cluster) {
    assert_eq!(health(server, "identity"), (true, String::new()));
}

const FOR_ONE: &str = "waits for 1 of the standbys pg1, pg2";

#[test]
fn a_failover_a_rewind_and_a_switch_back_lose_invent_and_reorder_nothing() {
    let Some(pair) = Pair::start("a failover, a rewind and a switch back", &[]) else {
        return;
    };
    let [first, second] = &pair.servers;
    let (mut faults, mut sent) = (Faults::default(), Vec::new());
    for round in 0..rounds(1) {
        let load = pair.load(0, &format!("{round} first "));
        load.wait_for_more(200);
        let failed = SystemTime::now();
        pair.network.unplug(&pair.hosts[0]);
        load.wait_for_more(100); // the standby never gets these
        sent.extend(load.stop());

        promote(second);
        assert_adopted(second);
        let load = pair.load(1, &format!("{round} second "));
        load.wait_for_more(100);
        // The new primary has no standby yet. What it would send now could be forgotten by the next failover.
        wait_until_waits(second, FOR_ONE);

        first.stop(StopMode::Immediate);
        pair.plug(0);
        pair.wait_until_disconnected(0); // what it had sent before the cut arrives first
        let queued = pair.queued();
        wait_for_heartbeat(second);
        assert_eq!(pair.queued(), queued, "sent without a standby");
        let began = Instant::now();
        pair.follow(0, true);
        wait_until("messages of the new primary", LONG, || pair.queued() > queued);
        faults.since(failed, 1);
        println!(
            "the new primary delivers {:?} after the beginning of pg_rewind",
            began.elapsed()
        );
        wait_healthy(second, "standbys");
        load.wait_for_more(100);
        assert_no_worker_runs(first);

        // Switch back: a fast stop waits until the standby has all WAL.
        let stopped = SystemTime::now();
        second.stop(StopMode::Fast);
        sent.extend(load.stop());
        let began = Instant::now();
        promote(first);
        let load = pair.load(0, &format!("{round} third "));
        pair.follow(1, false);
        wait_until_delivers(first);
        faults.since(stopped, 1);
        println!("switched back, and delivers after {:?}", began.elapsed());
        assert_adopted(first);
        assert_no_worker_runs(second);
        load.wait_for_more(100);
        sent.extend(load.stop());
        wait_drained(first);
    }

    let (verdict, forgotten) = pair.judge(0, &sent);
    println!(
        "{} events, {forgotten} forgotten, {} doubled",
        sent.len(),
        verdict.doubled.len()
    );
    faults.assert_explain(&verdict, &messages(first));
    assert!(forgotten > 0, "the standby missed no commit");
}

/// Cuts the servers off from each other, not from broker and applications, and promotes the standby: both are
/// primaries, with producers. They reach each other again, and the old one is restarted. Returns what consumers have
/// and the new primary lacks, and the number of events that the new primary lacks.
fn split_brain(test: &str, after: &str) -> Option<(Vec<String>, usize)> {
    let after = format!("outbox.publish_after = {after}");
    let pair = Pair::start(test, &[&after])?;
    let [old, new] = &pair.servers;
    let old_load = pair.load(0, "old ");
    old_load.wait_for_more(200);
    let (mut faults, cut) = (Faults::default(), SystemTime::now());
    pair.network.cut(&pair.hosts[0], &pair.hosts[1]);
    old_load.wait_for_more(100);
    let alone = &blocks(PAGE, "sql")[0]; // it has no standby
    alone.lines().for_each(|statement| new.exec(DB, statement));
    let began = Instant::now();
    promote(new);
    let new_load = pair.load(1, "new ");
    wait_until_delivers(new);
    faults.since(cut, 1);
    println!(
        "the new primary delivers {:?} after the order to promote it",
        began.elapsed()
    );
    new_load.wait_for_more(100);
    pair.network.heal(&pair.hosts[0], &pair.hosts[1]);
    old_load.wait_for_more(100);
    let mut sent = new_load.stop();
    sent.extend(old_load.stop());
    old.restart();
    wait_connected(old);
    let is_promised = after.ends_with("standby");
    match is_promised {
        true => {
            wait_until_waits(old, FOR_ONE);
            let problem = wait_for_problem(old, "standbys");
            assert_eq!(problem, "messages wait for standbys that are not connected: pg1, pg2");
        }
        false => wait_drained(old),
    }
    wait_drained(new);
    let (verdict, forgotten) = pair.judge(1, &sent);
    match is_promised {
        true => faults.assert_explain_repeats(&verdict, &messages(new)),
        false => assert_eq!((&verdict.lost, &verdict.altered), (&vec![], &vec![]), "lost, altered"),
    }
    Some((verdict.invented, forgotten))
}

#[test]
fn an_old_primary_that_lives_on_sends_nothing_that_the_new_primary_lacks() {
    let Some((invented, forgotten)) = split_brain("an old primary lives on", "standby") else {
        return;
    };
    println!("{forgotten} events of the old primary, none of them sent");
    assert_eq!(invented, Vec::<String>::new());
    assert!(forgotten > 100, "the old primary committed {forgotten} events alone");
}

#[test]
fn with_publish_after_local_an_old_primary_that_lives_on_sends_what_the_new_primary_lacks() {
    let Some((invented, forgotten)) = split_brain("an old primary lives on with local", "local") else {
        return;
    };
    println!("{forgotten} events of the old primary, {} of them sent", invented.len());
    assert!(!invented.is_empty(), "the rule would not be needed");
}

#[test]
fn a_worker_outside_follows_the_primary_to_the_other_host() {
    let Some(pair) = Pair::start("a worker outside follows the primary", &["outbox.workers = 0"]) else {
        return;
    };
    let [first, second] = &pair.servers;
    first.exec(DB, "create role courier login in role outbox_relay");
    pair.wait_until_follows(0);
    let [pg1, pg2] = pair.hosts.each_ref().map(Host::address);
    let mut work = Command::new(program::outboxctl());
    let hosts = command_with("outboxctl work").replace("pg1,pg2", &format!("{pg1},{pg2}"));
    let conninfo = hosts.split('"').nth(1).expect("the connection string of the page");
    work.args(["work", "-d", conninfo]).env_remove("OUTBOX_URL");
    work.stdin(Stdio::null()).stdout(Stdio::null());
    let mut worker = process::spawn_bound(work, libc::SIGKILL).expect("start outboxctl");
    let publish = "select outbox_publish('T', '{}', 'thing', '1')";
    first.exec(DB, publish);
    wait_true(first, "a message", "select count(*) = 1 from outbox_history");
    pair.wait_until_follows(0);

    pair.network.unplug(&pair.hosts[0]);
    let alone = &blocks(PAGE, "sql")[0];
    alone.lines().for_each(|statement| second.exec(DB, statement));
    let began = Instant::now();
    promote(second);
    second.exec(DB, publish);
    wait_true(second, "both messages", "select count(*) = 2 from outbox_history");
    println!("the worker delivers from the new primary after {:?}", began.elapsed());
    process::kill(&mut worker);
}
