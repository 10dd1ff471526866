//! Tests of docs/scaling/rabbitmq-cluster.md: a worker and three nodes of RabbitMQ, of which some fail or lose each
//! other. Is each committed message delivered, and does the queue have each message that the outbox calls published?

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Instant;

use support::markdown::blocks;
use support::workdir::ServerDir;
use support::{Broker, Cluster, Consumer, Host, Network, PrivateBroker, wait_for, wait_until};

use super::commands::run;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{Arrived, Sent, judge};
use support::{DB, LONG, server_file, wait_connected, wait_drained};

const QUEUE: &str = "orders";

/// The hosts of the page, and their servers.
struct Site {
    // Servers end before their hosts.
    postgres: Cluster,
    nodes: Vec<PrivateBroker>,
    db: Host,
    hosts: Vec<Host>,
    network: Network,
}

impl Site {
    /// Sets all up as the page says, and waits until the worker is connected to the first node.
    fn start(test: &str) -> Option<Self> {
        let network = Network::start(test)?;
        let (db, hosts) = (network.host(), [(); 3].map(|()| network.host()));
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/scaling/rabbitmq-cluster.md");
        let page = std::fs::read_to_string(page).expect("the page");
        let page = (1..).zip(&hosts).fold(page, |page, (number, host)| {
            page.replace(&format!("rabbit{number}"), &host.address().to_string())
        });
        let only = |language| <[String; 1]>::try_from(blocks(&page, language)).expect("one block")[0].clone();

        let conf = only("ini");
        // The default of net_ticktime is 60 s: only a partition that lasts longer is noticed.
        let conf: Vec<&str> = conf.lines().chain(["net_ticktime = 8"]).collect();
        let nodes: Vec<PrivateBroker> = std::thread::scope(|scope| {
            let starting = hosts
                .each_ref()
                .map(|host| scope.spawn(|| Broker::start_on(host, &conf)));
            starting.map(|node| node.join().expect("a node")).into()
        });
        let [join, define] = <[String; 2]>::try_from(blocks(&page, "sh")).expect("two blocks of commands");
        let files = ServerDir::create("definitions");
        let definitions = files.path().join("definitions.json");
        std::fs::write(&definitions, only("json")).expect("write the definitions");
        let define = define.replace("definitions.json", &definitions.display().to_string());
        nodes[1..].iter().for_each(|node| run(node, &join));
        run(&nodes[0], &define);

        let postgres = Cluster::builder().on(&db).start();
        let password = server_file(&postgres, "outbox.password", "the password\n", 0o600);
        let sql = only("sql").replace("/etc/postgresql/outbox.password", &password.display().to_string());
        sql.lines().for_each(|line| postgres.exec(DB, line));
        postgres.exec(DB, "create extension outbox");
        wait_connected(&postgres);
        let site = Self {
            postgres,
            nodes,
            db,
            hosts: hosts.into(),
            network,
        };
        assert_eq!(site.connected_to(), [site.hosts[0].address()]);
        Some(site)
    }

    /// The nodes that the server of Postgres has connections to.
    fn connected_to(&self) -> Vec<Ipv4Addr> {
        const ESTABLISHED: &str = "01";
        let table = self
            .db
            .enter(|| std::fs::read_to_string("/proc/thread-self/net/tcp"))
            .expect("the connections");
        let peers = table.lines().skip(1).filter_map(|line| {
            // "sl local remote state …", with the address as a number in the machine's order.
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (address, port) = fields[2].split_once(':')?;
            let address = u32::from_str_radix(address, 16).ok()?;
            let is_node = port == "1628" && fields[3] == ESTABLISHED; // 5672
            is_node.then(|| Ipv4Addr::from(address.to_ne_bytes()))
        });
        peers.collect()
    }

    /// Waits until the worker is connected to one of these nodes and to no other.
    fn wait_connected_to(&self, nodes: &[usize]) {
        let wanted: Vec<Ipv4Addr> = nodes.iter().map(|node| self.hosts[*node].address()).collect();
        wait_until(
            &format!("the worker to be connected to one of {wanted:?}"),
            LONG,
            || matches!(self.connected_to()[..], [node] if wanted.contains(&node)),
        );
    }

    /// The node that leads the queue, as node `from` sees it.
    fn leader(&self, from: usize) -> usize {
        wait_for("a leader of the queue", LONG, || {
            // Not list_queues: a node that was cut off has its own record of the leader until it restarts.
            let status = self.nodes[from].run("rabbitmq-queues", &["quorum_status", QUEUE]);
            let line = status.lines().find(|line| line.contains("leader"))?;
            let is_leader = |host: &Host| line.contains(&format!("rabbit@{}", host.address()));
            self.hosts.iter().position(is_leader)
        })
    }

    /// Waits until two nodes follow the leader of the queue, as node `from` sees it.
    fn wait_for_followers(&self, from: usize) {
        wait_until("two nodes to follow the leader", LONG, || {
            let status = self.nodes[from].run("rabbitmq-queues", &["quorum_status", QUEUE]);
            status.matches("follower").count() == 2
        });
    }

    /// Restarts a node that was cut off, and waits until it follows again. Without the restart RabbitMQ 3.10 at times
    /// never does: Mnesia has found a starting_partitioned_network.
    fn rejoin(&self, node: usize) {
        self.nodes[node].kill();
        let name = format!("rabbit@{}", self.hosts[node].address());
        // Nor does one that is back before the others have seen it go.
        for (_, other) in self.nodes.iter().enumerate().filter(|(number, _)| *number != node) {
            wait_until("the other nodes to see it go", LONG, || {
                let running = other.ctl(&["eval", "mnesia:system_info(running_db_nodes)."]);
                !running.contains(&name)
            });
        }
        start_again(&[&self.nodes[node]]);
        self.wait_for_followers(1);
    }

    /// Makes a partition of the network between these sides.
    fn cut(&self, side: &[&Host], other: &[&Host]) {
        side.iter()
            .for_each(|a| other.iter().for_each(|b| self.network.cut(a, b)));
    }

    fn heal(&self, side: &[&Host], other: &[&Host]) {
        side.iter()
            .for_each(|a| other.iter().for_each(|b| self.network.heal(a, b)));
    }

    /// Makes this node lead the queue, as another one sees it. Meanwhile the queue may not confirm in time.
    fn lead(&self, node: usize) {
        const OTHER: usize = 1;
        wait_until("the queue to have another leader", LONG, || {
            let leader = self.leader(OTHER);
            let [from, to] =
                [leader, node].map(|node| format!("{{'%2F_{QUEUE}', 'rabbit@{}'}}", self.hosts[node].address()));
            // It refuses while the other node is behind.
            leader == node || {
                self.nodes[OTHER].ctl(&["eval", &format!("ra:transfer_leadership({from}, {to}).")]);
                false
            }
        });
    }

    fn published(&self) -> i64 {
        self.postgres
            .query_one(DB, "select count(*) from outbox_history where not discarded")
    }

    /// Waits until this number of further messages is published.
    fn wait_for_published(&self, more: i64) {
        let goal = self.published() + more;
        wait_until(&format!("{more} more published messages"), LONG, || {
            self.published() >= goal
        });
    }

    /// Compares what was committed with what is in the queue and what the outbox calls published.
    fn judge(&self, sent: &[Sent], faults: &Faults) {
        wait_drained(&self.postgres);
        let mut client = self.postgres.connect(DB);
        let rows = client
            .query("select seq from outbox_history where not discarded", &[])
            .expect("the history");
        let published: BTreeSet<i64> = rows.iter().map(|row| row.get(0)).collect();
        // Not the first node: it may notice a partition after its end, and pause.
        let consumer = Consumer::new(&self.nodes[1], QUEUE);
        let mut missing = published.clone();
        let mut arrived = Vec::new();
        while !missing.is_empty() {
            let message = consumer.recv(LONG).map(|delivery| Arrived::new(&delivery));
            let message = message.unwrap_or_else(|| panic!("published, and not in the queue: {missing:?}"));
            missing.remove(&message.seq);
            arrived.push(message);
        }
        arrived.extend(consumer.finish().iter().map(Arrived::new));
        let verdict = judge(sent, &arrived);
        faults.assert_explain(&verdict, &messages(&self.postgres));
        assert_eq!(
            published.len(),
            arrived.len() - verdict.doubled.len(),
            "each one is published"
        );
        println!(
            "{} published, {} of them twice or more",
            published.len(),
            verdict.doubled.len()
        );
        let charged: i64 = self.postgres.query_one(DB, "select count(*) from outbox_dead");
        assert_eq!(charged, 0, "no fault of a node makes a dead letter");
    }
}

fn plan() -> Plan {
    Plan {
        transactions_per_s: Some(50),
        ..Plan::default()
    }
}

/// Starts nodes that may wait for each other.
fn start_again(nodes: &[&PrivateBroker]) {
    std::thread::scope(|scope| nodes.iter().for_each(|node| _ = scope.spawn(|| node.start_again())));
}

#[test]
fn killed_nodes_lose_no_message_and_the_worker_goes_to_another() {
    let Some(site) = Site::start("killed nodes lose no message and the worker goes to another") else {
        return;
    };
    let load = Load::start(&site.postgres, &plan());
    load.wait_for_more(100);

    // The node that the worker is connected to, which also leads the queue.
    let mut faults = Faults::default();
    faults.during(1, || site.lead(0));
    let killed = Instant::now();
    faults.during(1, || {
        site.nodes[0].kill();
        site.wait_connected_to(&[1]);
        println!("the worker is on another node after {:?}", killed.elapsed());
        wait_connected(&site.postgres);
        site.wait_for_published(1);
    });
    println!("it publishes after {:?}", killed.elapsed());
    site.wait_for_published(100);
    faults.during(1, || {
        start_again(&[&site.nodes[0]]);
        site.wait_for_followers(1);
        site.lead(2);
    });

    // The leader, while the worker is connected to a follower.
    let killed = Instant::now();
    faults.during(1, || {
        site.nodes[2].kill();
        site.wait_for_published(100);
    });
    println!(
        "100 further messages are published {:?} after the leader was killed",
        killed.elapsed()
    );
    assert_eq!(site.connected_to(), [site.hosts[1].address()]);

    // A second node: no queue has a majority, and the last node pauses.
    let mut started = Instant::now();
    faults.during(1, || {
        site.nodes[1].kill();
        wait_until("the last node to pause", LONG, || site.connected_to().is_empty());
        let published = site.published();
        load.wait_for_more(200);
        assert_eq!(site.published(), published, "without a majority nothing is published");
        started = Instant::now();
        start_again(&[&site.nodes[1], &site.nodes[2]]);
        site.wait_for_published(1);
    });
    println!("it publishes {:?} after the start of both nodes", started.elapsed());
    let sent = load.stop();
    site.judge(&sent, &faults);
}

#[test]
fn a_worker_on_the_smaller_side_of_a_partition_publishes_nothing_until_it_heals() {
    let Some(site) = Site::start("a worker on the smaller side of a partition publishes nothing until it heals") else {
        return;
    };
    let [first, second, third] = &site.hosts[..] else {
        unreachable!()
    };
    let load = Load::start(&site.postgres, &plan());
    site.wait_for_published(100);
    let mut faults = Faults::default();
    faults.during(1, || site.lead(0));
    let (cut, mut healed) = (Instant::now(), Instant::now());
    faults.during(1, || {
        site.cut(&[&site.db, first], &[second, third]);
        wait_until("the worker to lose its node", LONG, || site.connected_to().is_empty());
        println!("the worker loses its node after {:?}", cut.elapsed());
        let published = site.published();
        load.wait_for_more(200);
        assert_eq!(site.published(), published, "the smaller side confirms nothing");
        healed = Instant::now();
        site.heal(&[&site.db, first], &[second, third]);
        site.wait_for_published(1);
    });
    println!(
        "the worker publishes {:?} after the end of the partition",
        healed.elapsed()
    );
    let sent = load.stop();
    site.rejoin(0);
    site.judge(&sent, &faults);
}

#[test]
fn a_worker_on_the_larger_side_of_a_partition_goes_on_there() {
    let Some(site) = Site::start("a worker on the larger side of a partition goes on there") else {
        return;
    };
    let [first, second, third] = &site.hosts[..] else {
        unreachable!()
    };
    let load = Load::start(&site.postgres, &plan());
    site.wait_for_published(100);

    // Its node and the leader are on the other side.
    let mut faults = Faults::default();
    faults.during(1, || site.lead(0));
    assert_eq!(site.connected_to(), [first.address()]);
    let cut = Instant::now();
    faults.during(1, || {
        site.cut(&[first], &[&site.db, second, third]);
        site.wait_connected_to(&[1, 2]);
        println!("the worker is on another node after {:?}", cut.elapsed());
        site.wait_for_published(100);
    });
    println!("100 messages are published after {:?}", cut.elapsed());
    faults.during(1, || {
        site.heal(&[first], &[&site.db, second, third]);
        site.rejoin(0);
        site.lead(0);
    });

    // Only the leader is on the other side. The worker leaves its node only if that does not answer either.
    let cut = Instant::now();
    faults.during(1, || {
        site.cut(&[first], &[&site.db, second, third]);
        site.wait_for_published(100);
    });
    println!(
        "without the leader, 100 messages are published after {:?}",
        cut.elapsed()
    );
    site.wait_connected_to(&[1, 2]);
    site.heal(&[first], &[&site.db, second, third]);
    let sent = load.stop();
    site.rejoin(0);
    site.judge(&sent, &faults);
}
