//! What happens to messages when a worker outside the server loses the database, the broker, or has a slow link?
//! docs/scaling/workers-outside.md has the commands and the measurements of these tests.
//!
//! ```text
//! host db ──┬── host broker
//!           ├── host east, with outboxctl work
//!           └── host west, with outboxctl work
//! ```

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use support::{Broker, Cluster, Host, Network, PrivateBroker, process, wait_for, wait_until};

use support::courier::{Outside, make_courier};
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{Arrived, judge};
use support::{DB, LONG, all_of, exchange_and_queue, health, wait_drained, wait_true};

const EAST: &str = "lease_owner like 'work-east-%'";

/// The hosts, and the servers on them.
struct Site {
    network: Network,
    hosts: [Host; 4],
    broker: PrivateBroker,
    queue: String,
    cluster: Cluster,
}

impl Site {
    fn start(test: &str, conf: &[&str]) -> Option<Self> {
        let network = Network::start(test)?;
        let hosts = [(); 4].map(|()| network.host());
        let broker = Broker::start_on(&hosts[1], &[]);
        let (exchange, queue) = exchange_and_queue(&broker);
        let builder = Cluster::builder()
            .on(&hosts[0])
            .conf("outbox.workers = 0")
            .conf(&format!("outbox.url = '{}'", broker.url()))
            .conf(&format!("outbox.exchange = '{exchange}'"));
        let cluster = conf.iter().fold(builder, |builder, line| builder.conf(line)).start();
        cluster.exec(DB, "create extension outbox");
        make_courier(&cluster);
        Some(Self {
            network,
            hosts,
            broker,
            queue,
            cluster,
        })
    }

    fn db(&self) -> &Host {
        &self.hosts[0]
    }

    fn of_broker(&self) -> &Host {
        &self.hosts[1]
    }

    fn east(&self) -> &Host {
        &self.hosts[2]
    }

    fn log_file(&self, name: &str) -> PathBuf {
        self.cluster.data_dir().join(format!("log-{name}"))
    }

    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.log_file(name)).expect("the log of a worker")
    }

    /// Starts a worker on its host.
    fn work(&self, name: &str) -> Outside {
        let host = if name == "east" { &self.hosts[2] } else { &self.hosts[3] };
        host.enter(|| Outside::spawn_to(self.db(), name, &self.log_file(name)))
    }

    /// Starts both workers, and waits until each has half of the partitions.
    fn work_both(&self) -> (Outside, Outside) {
        let both = (self.work("east"), self.work("west"));
        self.wait_shared();
        both
    }

    fn wait_shared(&self) {
        let shared = "select count(*) = 2 and min(partitions) = 8 and bool_and(state = 'connected')
                      from outbox_worker_status where alive";
        wait_true(&self.cluster, "both workers to have half of the partitions", shared);
    }

    fn is_owned_by_west(&self) -> bool {
        let owned = "select count(*) = 16 from outbox_partitions where lease_owner like 'work-west-%'";
        self.cluster.query_one(DB, owned)
    }

    /// The messages that a worker has claimed, once no statement of it changes them any more.
    fn in_flight_of(&self, owner: &str) -> Vec<i64> {
        let sql = format!(
            "select coalesce(array_agg(seq order by seq), '{{}}') from outbox join outbox_partitions using (partition)
             where claim_token is not null and {owner}"
        );
        let mut before = vec![-1];
        wait_for("the messages in flight to stay the same", LONG, || {
            let now: Vec<i64> = self.cluster.query_one(DB, &sql);
            let is_same = now == before;
            before = now;
            is_same.then(|| before.clone())
        })
    }

    fn labels(&self, seqs: &[i64]) -> BTreeSet<String> {
        let sql = format!(
            "select coalesce(array_agg(payload->>'label'), '{{}}') from outbox_events where seq = any('{}')",
            array(seqs)
        );
        self.cluster.query_one::<Vec<String>>(DB, &sql).into_iter().collect()
    }

    /// Those of these messages that are in a table. `table` ends where a condition may follow.
    fn found(&self, table: &str, seqs: &[i64]) -> Vec<i64> {
        let sql = format!(
            "select coalesce(array_agg(seq order by seq), '{{}}') from {table} seq = any('{}')",
            array(seqs)
        );
        self.cluster.query_one(DB, &sql)
    }

    fn arrived(&self) -> Vec<Arrived> {
        all_of(&self.broker, &self.queue).iter().map(Arrived::new).collect()
    }

    /// Asserts that no message was charged with an attempt that failed.
    fn assert_nothing_charged(&self) {
        let charged =
            "select exists (select from outbox_history where attempts > 1) or exists (select from outbox_dead)";
        assert!(!self.cluster.query_one::<bool>(DB, charged), "a message was charged");
    }
}

fn array(seqs: &[i64]) -> String {
    let seqs: Vec<String> = seqs.iter().map(i64::to_string).collect();
    format!("{{{}}}", seqs.join(","))
}

fn plan() -> Plan {
    Plan {
        keys: 200,
        writers: 4,
        transactions_per_s: Some(50),
        mixed: true,
        ..Plan::default()
    }
}

#[test]
fn a_worker_that_loses_the_database_is_replaced_after_its_lease_and_its_late_settles_change_nothing() {
    let conf = ["outbox.lease_ttl = '8s'", "outbox.lease_renew = '1s'"];
    let Some(site) = Site::start("a worker that loses the database", &conf) else {
        return;
    };
    site.cluster
        .exec(DB, "alter role courier set log_min_duration_statement = 0");
    let (_east, _west) = site.work_both();
    let load = Load::start(&site.cluster, &plan());
    let (mut in_flight, mut is_proved) = (BTreeSet::new(), false);
    let mut faults = Faults::default();
    // The other worker may publish the messages before the late settle comes, or the first one gives them up without a
    // settle. Then there is another round.
    for _ in 0..20 {
        let began = SystemTime::now();
        let round = lose_the_database(&site, &load);
        faults.hung_since(began, 1);
        in_flight.extend(site.labels(&round.in_flight));
        println!(
            "{} in flight; its partitions moved after {:.1?}; {} claimed by the other worker; late settle: {}",
            round.in_flight.len(),
            round.moved_after,
            round.claimed,
            round.was_settled_late
        );
        is_proved = round.was_settled_late && round.claimed > 0;
        if is_proved {
            break;
        }
    }
    assert!(
        is_proved,
        "no late settle came while the other worker had the messages, so this test proved nothing"
    );
    load.wait_for_more(200);
    let sent = load.stop();
    wait_drained(&site.cluster);
    let verdict = judge(&sent, &site.arrived());
    faults.assert_explain(&verdict, &messages(&site.cluster));
    let others = verdict.doubled.iter().filter(|label| !in_flight.contains(*label));
    let others: Vec<&String> = others.collect();
    assert!(
        others.is_empty(),
        "repeats of messages that were not in flight: {others:?}"
    );
    site.assert_nothing_charged();
    println!(
        "{} of {} sent twice, {} out of order",
        verdict.doubled.len(),
        sent.len(),
        verdict.reordered.len()
    );
}

#[derive(Debug)]
struct Round {
    /// The messages that the worker had in flight when it lost the database.
    in_flight: Vec<i64>,
    moved_after: Duration,
    /// How many of them the other worker had in flight when the network healed.
    claimed: usize,
    was_settled_late: bool,
}

/// Cuts one worker off while it has messages in flight, which the broker confirms to it. The other worker claims them,
/// too, and gets no confirm before the first one settles them.
fn lose_the_database(site: &Site, load: &Load) -> Round {
    let session: i32 = site.cluster.query_one(
        DB,
        "select pid from outbox_worker_status where alive and worker_id like 'work-east-%'",
    );
    // An earlier round may have cost the worker its connection, and a suspended broker would never answer a new one.
    let now: String = site.cluster.query_one(DB, "select clock_timestamp()::text");
    load.wait_for_more(200);
    let publishes = format!(
        "select exists (select from outbox_history join outbox_partitions using (partition)
                        where published_at > '{now}' and {EAST})"
    );
    wait_true(&site.cluster, "the worker to publish", &publishes);
    process::suspend(site.broker.pid());
    // However few: the worker gives them up when the broker does not confirm them for a while.
    wait_until("messages in flight", LONG, || !site.in_flight_of(EAST).is_empty());
    load.pause(true);
    site.network.cut(site.east(), site.db());
    let (cut_at, in_flight) = (Instant::now(), site.in_flight_of(EAST));
    process::signal(site.broker.pid(), libc::SIGCONT);
    wait_until("the broker to have all messages", LONG, || {
        site.broker.queue_len(&site.queue) as usize >= load.committed() || site.is_owned_by_west()
    });
    process::suspend(site.broker.pid());

    wait_until("the other worker to own all partitions", LONG, || {
        site.is_owned_by_west()
    });
    let moved_after = cut_at.elapsed();
    wait_until("the other worker to claim what was in flight", LONG, || {
        let claimed = site.found("outbox where claim_token is not null and", &in_flight).len();
        claimed + site.found("outbox_history where", &in_flight).len() == in_flight.len()
    });
    let (claimed, offset) = (site.found("outbox where", &in_flight), site.cluster.log_offset());
    site.network.heal(site.east(), site.db());
    let mut was_settled_late = false;
    wait_until(
        "the first worker to settle, to go on or to lose its session",
        LONG,
        || {
            let log = site.cluster.log();
            let of_session = |line: &&str| line.contains(&format!("[{session}]")) && line.contains("  execute ");
            let lines = log[offset..].lines().filter(of_session);
            let executed = |call: &str| lines.clone().filter(|line| line.contains(call)).count();
            was_settled_late = executed("work_settle(") > 0;
            let goes_on = executed("outbox_internal.leases(") > 1; // it has read that its leases are lost
            // A session whose end was lost on the network stays in the server, so the next one of the worker counts,
            // too.
            let has_left = format!(
                "select not exists (select from pg_stat_activity where pid = {session})
                   or exists (select from outbox_worker_status
                              where alive and worker_id like 'work-east-%' and pid <> {session})"
            );
            was_settled_late || goes_on || site.cluster.query_one::<bool>(DB, &has_left)
        },
    );
    assert_eq!(
        site.found("outbox where", &in_flight),
        claimed,
        "a late settle took a message from the other worker"
    );
    process::signal(site.broker.pid(), libc::SIGCONT);
    load.pause(false);
    site.wait_shared();
    Round {
        in_flight,
        moved_after,
        claimed: claimed.len(),
        was_settled_late,
    }
}

#[test]
fn a_worker_that_loses_the_broker_keeps_its_partitions_until_it_is_stopped_and_nothing_is_lost() {
    let Some(site) = Site::start("a worker that loses the broker", &["outbox.lease_renew = '1s'"]) else {
        return;
    };
    let (east, _west) = site.work_both();
    let load = Load::start(&site.cluster, &plan());
    load.wait_for_more(200);

    // First the network heals by itself.
    let (mut faults, began) = (Faults::default(), SystemTime::now());
    site.network.cut(site.east(), site.of_broker());
    let cut_at = Instant::now();
    let down = "select coalesce(bool_or(state not in ('connected', 'paused')), false) from outbox_worker_status
                where alive and worker_id like 'work-east-%'";
    wait_true(&site.cluster, "the worker to notice", down);
    let noticed_after = cut_at.elapsed();
    let problem = wait_for("health to report the broker", LONG, || {
        let (ok, problem) = health(&site.cluster, "broker");
        (!ok && problem.contains("does not answer")).then_some(problem)
    });
    let others = "select bool_and(state = 'connected') from outbox_worker_status
                  where alive and worker_id not like 'work-east-%'";
    assert!(
        site.cluster.query_one::<bool>(DB, others),
        "the other worker is connected"
    );
    load.wait_for_more(200);
    let kept = format!("select count(*) = 8 from outbox_partitions where {EAST}");
    assert!(site.cluster.query_one::<bool>(DB, &kept), "it keeps its partitions");
    let waits = format!(
        "select count(*) > 0 and bool_and({EAST}) from outbox join outbox_partitions using (partition)
         where enqueued_at < now() - interval '5 s'"
    );
    wait_true(&site.cluster, "only messages of its partitions to wait", &waits);
    site.network.heal(site.east(), site.of_broker());
    let healed_at = Instant::now();
    site.wait_shared();
    let back_after = healed_at.elapsed();
    faults.since(began, 1);
    load.wait_for_more(100);

    // Then a person stops the worker.
    let began = SystemTime::now();
    site.network.cut(site.east(), site.of_broker());
    wait_true(&site.cluster, "the worker to notice", down);
    let stopped_at = Instant::now();
    let code = east.stop();
    wait_until("the other worker to own all partitions", LONG, || {
        site.is_owned_by_west()
    });
    let moved_after = stopped_at.elapsed();
    faults.since(began, 1);
    assert_eq!(code, Some(0), "{}", site.log("east"));
    load.wait_for_more(100);
    let sent = load.stop();
    wait_drained(&site.cluster);
    let verdict = judge(&sent, &site.arrived());
    faults.assert_explain(&verdict, &messages(&site.cluster));
    site.assert_nothing_charged();
    println!(
        "noticed after {noticed_after:.1?}; back {back_after:.1?} after it healed; moved {moved_after:.1?} after SIGTERM; {} of {} sent twice; {problem}",
        verdict.doubled.len(),
        sent.len()
    );
}

#[test]
fn a_worker_behind_a_slow_link_loses_and_reorders_nothing_and_delays_no_other_partition() {
    let Some(site) = Site::start("a worker behind a slow link", &[]) else {
        return;
    };
    let (_east, _west) = site.work_both();
    let load = Load::start(&site.cluster, &plan());
    load.wait_for_more(200);
    let east = format!("select array_agg(partition)::text from outbox_partitions where {EAST}");
    let east: String = site.cluster.query_one(DB, &east);
    // Of the partitions that each of the two has now.
    let epochs = || {
        ["", "not "].map(|not| {
            let sum = "select sum(lease_epoch)::int8 from outbox_partitions where";
            site.cluster
                .query_one::<i64>(DB, &format!("{sum} {not}partition = any ('{east}')"))
        })
    };
    let (mut faults, began, held) = (Faults::default(), SystemTime::now(), epochs());
    slow_down(site.east());
    let slowed_at = Instant::now();
    let behind = format!(
        "select count(*) filter (where {EAST}) > 400 and count(*) filter (where not ({EAST})) < 50
         from outbox join outbox_partitions using (partition)"
    );
    wait_true(
        &site.cluster,
        "a backlog behind the slow link, and none elsewhere",
        &behind,
    );
    let behind_after = slowed_at.elapsed();
    load.wait_for_more(400);
    let sent = load.stop();
    wait_drained(&site.cluster);
    let verdict = judge(&sent, &site.arrived());
    // A slow link is no fault as long as the leases are renewed over it. If not, the worker behind it says so, or
    // another one has taken its partitions and it has not noticed yet.
    let said = ["east", "west"].map(|name| site.log(name).matches("the leases have run out").count());
    let taken = held.iter().zip(epochs()).map(|(held, now)| usize::from(*held != now));
    let run_out: usize = said.iter().zip(taken).map(|(said, taken)| taken.max(*said)).sum();
    faults.hung_since(began, run_out);
    faults.assert_explain(&verdict, &messages(&site.cluster));
    site.assert_nothing_charged();
    println!(
        "400 messages behind after {behind_after:.1?}; leases run out {run_out} times; {} of {} sent twice, {} out of order",
        verdict.doubled.len(),
        sent.len(),
        verdict.reordered.len()
    );
}

/// Limits what a host sends and receives to 256 kbit/s, as a poor link over a distance does.
fn slow_down(host: &Host) {
    let limit = |device: &str| {
        let arguments = format!("qdisc add dev {device} root tbf rate 256kbit burst 16kb latency 400ms");
        let output = Command::new("/usr/sbin/tc").args(arguments.split(' ')).output();
        let output = output.unwrap_or_else(|error| panic!("run tc: {error}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    host.enter(|| limit("eth0"));
    let [.., number] = host.address().octets();
    limit(&format!("host{number}")); // its other end, in the network of the test
}
