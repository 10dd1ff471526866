//! Tests of docs/scaling/shards.md: three servers with an outbox each, and one broker that spreads the keys over
//! queues. Is the order of each key kept when consumers, a shard or queues come and go?

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::SystemTime;

use support::markdown::blocks;
use support::workdir::ServerDir;
use support::{Broker, Cluster, Consumer, Delivery, Network, PrivateBroker, wait_until};

use super::commands::run;
use support::chaos::rounds;
use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::{Arrived, Sent, judge};
use support::{DB, LONG, server_file, wait_connected, wait_drained, wait_true};

/// The statements of the producers: each shard has keys of its own.
const PUBLISH: [&str; 3] = [
    "select outbox_publish('Loaded', $1::jsonb, 'first', $2::text, 'written')",
    "select outbox_publish('Loaded', $1::jsonb, 'second', $2::text, 'written')",
    "select outbox_publish('Loaded', $1::jsonb, 'third', $2::text, 'written')",
];
const PREFIXES: [&str; 3] = ["first:", "second:", "third:"];

/// The hosts of the page, and their servers.
struct Site {
    // Servers end before their hosts.
    shards: [Cluster; 3],
    consumers: Consumers,
    broker: PrivateBroker,
    page: Page,
    _network: Network,
}

/// The blocks of the page, with the names of the test.
struct Page {
    files: ServerDir,
    broker: String,
    text: String,
}

impl Page {
    fn block(&self, language: &str, number: usize) -> String {
        let block = blocks(&self.text, language)[number].replace("relay@broker", &format!("relay@{}", self.broker));
        [("json", "definitions.json"), ("json", "fourth.json")]
            .iter()
            .fold(block, |block, (_, file)| {
                block.replace(file, &self.files.path().join(file).display().to_string())
            })
    }

    /// Writes a block of definitions to the file that the page names.
    fn write(&self, file: &str, number: usize) {
        std::fs::write(self.files.path().join(file), self.block("json", number)).expect("write the definitions");
    }
}

impl Site {
    /// Sets all up as the page says, with two consumers for each queue.
    fn start(test: &str) -> Option<Self> {
        let network = Network::start(test)?;
        let (broker_host, hosts) = (network.host(), [(); 3].map(|()| network.host()));
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/scaling/shards.md");
        let page = Page {
            files: ServerDir::create("definitions"),
            broker: broker_host.address().to_string(),
            text: std::fs::read_to_string(page).expect("the page"),
        };
        let broker = Broker::start_on(&broker_host, &[]);
        page.write("definitions.json", 0);
        run(&broker, &page.block("sh", 0));
        let shards = hosts.each_ref().map(|host| {
            let shard = Cluster::builder().on(host).start();
            let password = server_file(&shard, "outbox.password", "the password\n", 0o600);
            let sql = page.block("sql", 0);
            let sql = sql.replace("/etc/postgresql/outbox.password", &password.display().to_string());
            sql.lines().for_each(|line| shard.exec(DB, line));
            shard.exec(DB, "create extension outbox");
            shard
        });
        shards.iter().for_each(wait_connected);
        let mut consumers = Consumers::default();
        (1..=3).for_each(|queue| consumers.join(&broker, queue));
        Some(Self {
            shards,
            consumers,
            broker,
            page,
            _network: network,
        })
    }

    fn load(&self) -> [Load; 3] {
        let plan = |statement| Plan {
            transactions_per_s: Some(20),
            mixed: true,
            statement,
            ..Plan::default()
        };
        [0, 1, 2].map(|shard| Load::start(&self.shards[shard], &plan(PUBLISH[shard])))
    }

    /// Compares what each shard committed with what the consumers got. Returns the keys of each queue.
    fn judge(&mut self, sent: &[Vec<Sent>; 3], faults: &[Faults; 3]) -> BTreeMap<usize, BTreeSet<String>> {
        self.shards.iter().for_each(wait_drained);
        self.wait_consumed();
        let queues = std::mem::take(&mut self.consumers.got);
        for (shard, prefix) in PREFIXES.iter().enumerate() {
            let of_shard = |delivery: &&Delivery| delivery.routing_key.starts_with(prefix);
            // In the order of arrival: the queues may take turns, a key is in one at a time.
            let mut deliveries: Vec<&Delivery> = queues.values().flatten().filter(of_shard).collect();
            deliveries.sort_by_key(|delivery| delivery.received_at);
            // What a consumer did not acknowledge before its end, the broker delivers again. On a busy machine the next
            // consumer may have it before the first one reads its socket.
            let mut sent_times: BTreeMap<_, usize> = BTreeMap::new();
            for delivery in deliveries.iter().filter(|delivery| !delivery.redelivered) {
                *sent_times.entry(&delivery.message_id).or_default() += 1;
            }
            let mut seen: BTreeMap<_, usize> = BTreeMap::new();
            deliveries.retain(|delivery| {
                let id = &delivery.message_id;
                let nth = seen.entry(id).or_default();
                *nth += 1;
                *nth <= sent_times.get(id).copied().unwrap_or(1)
            });
            let arrived: Vec<Arrived> = deliveries.into_iter().map(Arrived::new).collect();
            let verdict = judge(&sent[shard], &arrived);
            faults[shard].assert_explain(&verdict, &messages(&self.shards[shard]));
            println!(
                "{prefix} {} arrived, {} of them again",
                arrived.len(),
                verdict.doubled.len()
            );
        }
        let keys = |deliveries: Vec<Delivery>| deliveries.into_iter().map(|delivery| delivery.routing_key).collect();
        queues
            .into_iter()
            .map(|(queue, deliveries)| (queue, keys(deliveries)))
            .collect()
    }

    /// Waits until the consumers have all that is published, and the command of the page shows that.
    fn wait_consumed(&mut self) {
        let published = "select count(*) from outbox_history where not discarded";
        let published: i64 = self
            .shards
            .iter()
            .map(|shard| shard.query_one::<i64>(DB, published))
            .sum();
        wait_until("the consumers to have all messages", LONG, || {
            self.consumers.count() as i64 >= published
        });
        let command = self.page.block("sh", 1);
        let words: Vec<&str> = command.split(' ').skip(1).collect();
        wait_until("the queues to be empty", LONG, || {
            let printed = self.broker.ctl(&words);
            let rows: Vec<&str> = printed.lines().filter(|line| line.starts_with("orders-")).collect();
            rows.len() >= 3 && rows.iter().all(|row| row.ends_with("\t0"))
        });
    }
}

/// The consumers of all queues, and what they and their predecessors got, by queue.
#[derive(Default)]
struct Consumers {
    live: BTreeMap<usize, Vec<Consumer>>,
    got: BTreeMap<usize, Vec<Delivery>>,
}

impl Consumers {
    /// Two further consumers for a queue.
    fn join(&mut self, broker: &Broker, queue: usize) {
        let pair = [(); 2].map(|()| Consumer::new(broker, &format!("orders-{queue}")));
        self.live.entry(queue).or_default().extend(pair);
    }

    /// Ends all consumers as if their hosts failed: the broker delivers again what they have not acknowledged.
    fn crash(&mut self, broker: &PrivateBroker) {
        broker.ctl(&["close_all_user_connections", "guest", "the test ends the consumers"]);
        for (queue, consumers) in std::mem::take(&mut self.live) {
            let got = consumers.into_iter().flat_map(Consumer::finish);
            self.got.entry(queue).or_default().extend(got);
        }
    }

    /// The number of different messages so far.
    fn count(&mut self) -> usize {
        for (queue, consumers) in &self.live {
            let got = consumers.iter().flat_map(Consumer::drain);
            self.got.entry(*queue).or_default().extend(got);
        }
        let ids: BTreeSet<&str> = self
            .got
            .values()
            .flatten()
            .filter_map(|got| got.message_id.as_deref())
            .collect();
        ids.len()
    }
}

#[test]
fn the_order_of_each_key_holds_while_consumers_and_a_shard_come_and_go() {
    let Some(mut site) = Site::start("the order of each key holds while consumers and a shard come and go") else {
        return;
    };
    let load = site.load();
    load.iter().for_each(|load| load.wait_for_more(100));
    for _ in 0..rounds(3) {
        site.consumers.crash(&site.broker);
        (1..=3).for_each(|queue| site.consumers.join(&site.broker, queue));
        load.iter().for_each(|load| load.wait_for_more(50));
    }

    // A shard is lost, and comes back.
    let [lost, others @ ..] = &site.shards;
    let mut faults = <[Faults; 3]>::default();
    let began = SystemTime::now();
    lost.kill_postmaster();
    for (shard, load) in others.iter().zip(&load[1..]) {
        let committed = load.committed();
        load.wait_for_more(100);
        let published = "select count(*) from outbox_history where not discarded";
        wait_true(
            shard,
            "the other shards to deliver",
            &format!("select ({published}) > {committed}"),
        );
    }
    lost.start_again();
    wait_connected(lost);
    faults[0].since(began, 1);
    load[0].wait_for_more(50);
    let sent = load.map(Load::stop);
    let keys = site.judge(&sent, &faults);
    let count: usize = keys.values().map(BTreeSet::len).sum();
    assert_eq!(
        count,
        keys.values().flatten().collect::<BTreeSet<_>>().len(),
        "a key is in one queue"
    );
    assert!(keys.values().all(|keys| !keys.is_empty()), "{keys:?}");
}

#[test]
fn a_queue_is_added_under_load_and_the_order_of_each_key_holds() {
    let Some(mut site) = Site::start("a queue is added under load and the order of each key holds") else {
        return;
    };
    // Consumers that are away leave messages in the three queues, which the fourth could overtake.
    site.consumers.crash(&site.broker);
    let load = site.load();
    load.iter().for_each(|load| load.wait_for_more(100));
    let pausing = site.page.block("sql", 1);
    let (pause, state) = pausing.split_once('\n').expect("two statements");
    let is_paused = state.replace("select state", "select state = 'paused'");
    site.shards.iter().for_each(|shard| shard.exec(DB, pause));
    site.shards
        .iter()
        .for_each(|shard| wait_true(shard, "delivery to pause", is_paused.trim_end_matches(';')));
    (1..=3).for_each(|queue| site.consumers.join(&site.broker, queue));
    site.wait_consumed();
    site.page.write("fourth.json", 1);
    run(&site.broker, &site.page.block("sh", 2));
    site.consumers.join(&site.broker, 4);
    load.iter().for_each(|load| load.wait_for_more(50));
    site.shards
        .iter()
        .for_each(|shard| shard.exec(DB, &site.page.block("sql", 2)));
    load.iter().for_each(|load| load.wait_for_more(100));
    let sent = load.map(Load::stop);
    let keys = site.judge(&sent, &<[Faults; 3]>::default());
    let moved: Vec<&String> = (1..=3).flat_map(|queue| keys[&queue].intersection(&keys[&4])).collect();
    assert!(!moved.is_empty(), "no key has moved: {keys:?}");
    println!(
        "{} of {} keys have moved",
        moved.len(),
        keys.values().flatten().collect::<BTreeSet<_>>().len()
    );
}
