//! Tests of what the monitor says about messages that wait: the reason of each in the list, and the partitions that are
//! blocked.

use serde_json::Value;

use super::monitor::Monitor;
use support::{Broker, Cluster, fresh_names, wait_until};
use support::{DB, LONG, Session, Stage, outbox_cluster_with, wait_true};

/// The cells "Waits because" of the pending messages to a destination, each after the seq.
fn reasons(monitor: &Monitor, destination: &str) -> Vec<(i64, String)> {
    reasons_in(monitor, "ready", destination)
}

/// The cells "Waits because" of a tab, for the messages to a destination, each after the seq.
fn reasons_in(monitor: &Monitor, tab: &str, destination: &str) -> Vec<(i64, String)> {
    let page = monitor.page(&format!("/messages?tab={tab}&q=destination%3A{destination}"));
    let rows = page
        .split("<tr")
        .filter(|row| row.contains("data-label=\"Waits because\">"));
    let part = |row: &str, from: &str, to: &str| {
        let rest = row.split(from).nth(1).unwrap_or_else(|| panic!("no {from} in {row}"));
        rest.split(to).next().unwrap_or_default().to_owned()
    };
    rows.map(|row| {
        let seq = part(row, "<a href=\"message/", "?").parse().expect("a seq");
        (seq, part(row, "data-label=\"Waits because\">", "<"))
    })
    .collect()
}

fn server(cluster: &Cluster, broker: &Broker, exchange: &str, name: &str, options: &str) {
    let url = broker.url();
    cluster.exec(
        DB,
        &format!(
            "create server {name} foreign data wrapper outbox_amqp options (url '{url}', exchange '{exchange}', {options})"
        ),
    );
    wait_true(
        cluster,
        "a connection",
        &format!(
            "select exists (select from outbox_destination_status where destination = '{name}' and state = 'connected')"
        ),
    );
}

const NEXT: &str = "Nothing blocks it: it is the next message of its partition.";
const EARLIER: &str = "Nothing blocks it: earlier messages of p";

/// Locked rows stay pending while their destination is connected: a claim skips them, and the fast path is off.
#[test]
fn each_pending_message_has_the_reason_why_it_waits() {
    const KEYS: &str = "select outbox_publish('T', '{}', 'order', 'a', destination => 'slow')";
    let stage = Stage::new(&["outbox.workers = 1", "outbox.fast_path = off"]);
    server(&stage, stage.broker, &stage.exchange, "slow", "max_rate '7'");
    let monitor = Monitor::start(&stage, &[]);
    let state = |state: &str| {
        let sql = format!("select state = '{state}' from outbox_destination_status where destination = 'slow'");
        wait_true(&stage, state, &sql);
    };
    stage.exec(DB, "select outbox_pause('slow', 'a move')");
    state("paused");
    stage.exec(DB, &format!("{KEYS} from generate_series(1, 5)"));
    let last: i64 = stage.query_one(DB, "select max(seq) from outbox");
    let mut open = stage.connect(DB);
    open.run("begin; select outbox_publish('T', '{}', 'order', 'b')");
    let pid: i32 = open.value("select pg_backend_pid()");
    stage.exec(DB, &format!("{KEYS} from generate_series(1, 2)"));
    let shown = |what: &str, as_wanted: &dyn Fn(usize, i64, &str) -> bool| {
        wait_until(what, LONG, || {
            let found = reasons(&monitor, "slow");
            let mut rows = found.iter().enumerate();
            found.len() == 7 && rows.all(|(index, (seq, why))| as_wanted(index, *seq, why))
        });
    };
    shown("each message to be paused", &|_, _, why| {
        why.starts_with("Destination slow is paused by ") && why.ends_with(": a move.")
    });
    let mut locks = stage.connect(DB);
    locks.run("begin; select from outbox where destination = 'slow' for update");
    stage.exec(DB, "select outbox_resume('slow')");
    state("connected");
    shown(
        "the first to be next, and those after the transaction to wait for it",
        &|index, seq, why| {
            let open = [
                "A transaction that has enqueued has been open for ",
                &format!(" (pid {pid}); if it has enqueued with the key of this message"),
            ];
            match index {
                0 => why == NEXT,
                _ if seq > last => why.starts_with(open[0]) && why.contains(open[1]),
                _ => why.starts_with(EARLIER) && why.ends_with(" on, at most 7 a second to slow."),
            }
        },
    );
    let page = monitor.page(&format!("/message/{}", last + 2));
    assert!(
        page.contains("A transaction that has enqueued has been open for "),
        "{page}"
    );
    open.run("rollback");
    stage.exec(DB, "alter server slow options (drop max_rate)");
    shown(
        "one to be next, and the others to come after it",
        &|index, _, why| match index {
            0 => why == NEXT,
            _ => why.starts_with(EARLIER) && why.ends_with(" on."),
        },
    );
    stage.exec(DB, "drop server slow");
    shown("no message to have a destination", &|_, _, why| {
        why == "messages wait for this destination, which does not exist."
    });
}

#[test]
fn a_message_that_waits_for_a_standby_names_it_in_flight_and_pending() {
    let conf = [
        "outbox.workers = 1",
        "outbox.fast_path = off",
        "outbox.publish_after = standby",
        "outbox.standby_names = 's1'",
    ];
    let cluster = Stage::new(&conf).cluster;
    let monitor = Monitor::start(&cluster, &[]);
    let publish = || cluster.exec(DB, "select outbox_publish('T', '{}', 'order', 'a')");
    let shown = |tab: &str, reason: &str| {
        wait_until(&format!("{reason:?} in the tab {tab}"), LONG, || {
            let found = reasons_in(&monitor, tab, "default");
            found.len() == 1 && found[0].1 == reason
        });
        reasons_in(&monitor, tab, "default")[0].0
    };
    publish();
    let held = shown("in-flight", "Destination default waits for standby s1.");
    publish(); // nothing is claimed while a claimed message waits
    shown("ready", "Destination default waits for standby s1.");
    wait_until("the reason on the page of the message", LONG, || {
        let page = monitor.page(&format!("/message/{held}"));
        page.contains("Destination default waits for standby s1.")
            && page.contains("Fix: start them, or correct outbox.standby_names")
    });
    let _standby = cluster.copy(true, &["cluster_name = 's1'"]);
    wait_true(&cluster, "both to be sent", "select count(*) = 2 from outbox_history");
}

/// The cell of a partition on the page Partitions.
fn cell(page: &str, label: &str) -> String {
    let name = format!("<b>{label}</b>");
    let is_wanted = |cell: &&str| cell.contains(&name) && cell.contains("class=\"cell");
    page.split("<li>").find(is_wanted).expect("a cell").to_owned()
}

#[test]
fn one_blocked_key_leaves_its_partition_as_it_is_and_a_blocked_partition_is_red() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, Value::Null);
    broker.bind(&queue, &exchange, "placed");
    let cluster = outbox_cluster_with(broker, &exchange, &["outbox.workers = 1", "outbox.max_attempts = 1"]);
    let monitor = Monitor::start(&cluster, &[]);
    let lose = |destination: &str, key: &str| {
        cluster.exec(
            DB,
            &format!("select outbox_publish('T', '{{}}', 'order', '{key}', 'lost', destination => '{destination}')"),
        );
        let dead = format!(
            "select exists (select from outbox_dead where destination = '{destination}' and key = 'order:{key}' and blocks)"
        );
        wait_true(&cluster, "a dead letter that blocks", &dead);
        cluster.query_one::<String>(DB, &format!("select outbox_partition_of('order:{key}')"))
    };
    let is_red = |cell: &str| {
        cell.split("href=")
            .next()
            .is_some_and(|class| class.contains(" blocked\""))
    };
    let of_key = lose("default", "a");
    wait_until("the cell of a partition with a blocked key", LONG, || {
        let cell = cell(&monitor.page("/partitions"), &of_key);
        cell.contains("blocked key</span>") && !is_red(&cell)
    });
    server(&cluster, broker, &exchange, "strict", "ordering 'partition'");
    let other = "select n::text from generate_series(1, 99) n where outbox_partition_of('order:' || n) <> $1 limit 1"
        .replace("$1", &format!("'{of_key}'"));
    let whole = lose("strict", &cluster.query_one::<String>(DB, &other));
    wait_until("the cell of a blocked partition", LONG, || {
        let page = monitor.page("/partitions");
        is_red(&cell(&page, &whole)) && !is_red(&cell(&page, &of_key))
    });
    // A later message of the partition waits, whatever its key.
    let seq: i64 = cluster.query_one(DB, "select seq from outbox_dead where destination = 'strict'");
    cluster.exec(
        DB,
        &format!(
            "select outbox_publish('T', '{{}}', 'order', n::text, 'placed', destination => 'strict')
             from generate_series(100, 999) n where outbox_partition_of('order:' || n) = '{whole}' limit 1"
        ),
    );
    wait_until("the reason of a message of a blocked partition", LONG, || {
        reasons(&monitor, "strict").iter().any(|(_, why)| {
            why.starts_with(&format!(
                "It waits behind message {seq} of its partition, which is dead: "
            ))
        })
    });
}
