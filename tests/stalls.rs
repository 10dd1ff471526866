//! Tests that ready messages are sent while a settle of the same worker waits. In production a settle waits for the
//! disk; here it waits for a trigger, as long as a test needs. On a real Postgres, with receivers that answer when a
//! test lets them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use postgres::Client;
use support::{Cluster, Receiver, Reply, Request, wait_until};
use support::{DB, LONG, Session, unconnected_cluster, wait_drained, wait_true};

/// A settle waits while another session holds the advisory lock of a message that the settle writes. pg_stat_activity
/// shows the seq of that message.
const SETTLES_WAIT: &str = "create function wait_for_test() returns trigger language plpgsql set lock_timeout = 0 as $$
    begin
      perform set_config('application_name', 'settles ' || new.seq, true);
      perform pg_advisory_xact_lock_shared(new.seq);
      return new;
    end $$;
    create trigger wait_for_test before insert on outbox_history for each row execute function wait_for_test();
    create trigger wait_for_test before insert on outbox_attempts_log for each row execute function wait_for_test()";

/// A server with destinations a, b, c and z, of which it serves a first and z last, and one receiver for all of them.
struct Stage {
    cluster: Cluster,
    receiver: Receiver,
    /// The session that holds the locks.
    lock_holder: RefCell<Client>,
    /// The labels of the messages without an answer so far.
    unanswered: Arc<Mutex<BTreeSet<String>>>,
}

fn label(request: &Request) -> String {
    let body = request.json();
    body["payload"]["label"].as_str().unwrap_or_default().to_owned()
}

impl Stage {
    /// Messages with these labels wait for their answer. The first answer for a label that begins with "bad" is 500.
    fn new(unanswered: &[&str]) -> Self {
        let labels = unanswered.iter().map(|label| (*label).to_owned());
        let unanswered: Arc<Mutex<BTreeSet<String>>> = Arc::new(Mutex::new(labels.collect()));
        let held = unanswered.clone();
        let failed: Mutex<BTreeSet<String>> = Mutex::default();
        let receiver = Receiver::start(move |request| {
            let label = label(request);
            wait_until("the test to allow the answer", LONG, || {
                !held.lock().expect("no panic").contains(&label)
            });
            let fails = label.starts_with("bad") && failed.lock().expect("no panic").insert(label);
            Reply::status(if fails { 500 } else { 200 })
        });
        // No other work of the worker interferes.
        let conf = [
            "outbox.http_allow = '127.0.0.1'",
            "outbox.lease_ttl = '120s'",
            "outbox.lease_renew = '60s'",
            "outbox.retry_backoff = '50ms'",
        ];
        let cluster = unconnected_cluster("", "nowhere", &conf);
        let stage = Self {
            lock_holder: RefCell::new(cluster.connect(DB)),
            cluster,
            receiver,
            unanswered,
        };
        for name in ["a", "b", "c", "z"] {
            let url = stage.receiver.url(&format!("/{name}"));
            let server = format!("create server {name} foreign data wrapper outbox_http options (url '{url}')");
            stage.cluster.exec(DB, &server);
            // Once the message has arrived, the worker has read the lanes of the destination to their end.
            stage.publish(name, "first", "first");
        }
        wait_drained(&stage.cluster);
        stage.cluster.exec(DB, SETTLES_WAIT);
        stage
    }

    /// The statement that publishes a message; `payload` is an SQL expression.
    fn publishes(destination: &str, label: &str, payload: &str) -> String {
        let payload = format!("jsonb_build_object('label', '{label}') || {payload}");
        format!("select outbox_publish('T', {payload}, 'a', '{label}', 'x', destination => '{destination}')")
    }

    fn publish(&self, destination: &str, label: &str, payload: &str) -> i64 {
        let payload = format!("jsonb_build_object('more', '{payload}')");
        self.cluster
            .query_one(DB, &Self::publishes(destination, label, &payload))
    }

    fn has_arrived(&self, wanted: &str) -> bool {
        self.receiver.requests().iter().any(|request| label(request) == wanted)
    }

    fn wait_for(&self, wanted: &str) {
        wait_until(&format!("the message {wanted:?}"), LONG, || self.has_arrived(wanted));
    }

    /// Publishes a message that gets no answer until `answer`, and whose settle waits until `settle`. Returns once it
    /// is claimed.
    fn publish_held(&self, destination: &str, label: &str) -> i64 {
        let seq = self.publish(destination, label, "");
        self.with_locks(&format!("pg_advisory_lock({seq})"));
        self.wait_for(label);
        let claimed = format!("select exists (select from outbox where seq = {seq} and claim_token is not null)");
        wait_true(&self.cluster, "the message to be claimed", &claimed);
        seq
    }

    fn answer(&self, label: &str) {
        self.unanswered.lock().expect("no panic").remove(label);
    }

    fn settle(&self, seq: i64) {
        self.with_locks(&format!("pg_advisory_unlock({seq})"));
    }

    fn with_locks(&self, call: &str) {
        let mut lock_holder = self.lock_holder.borrow_mut();
        lock_holder.run(&format!("select {call}"));
    }

    /// Waits until a settle waits for the lock of one of these messages; returns its seq.
    fn wait_for_settle(&self, seqs: &[i64]) -> i64 {
        let named = |seq: &i64| format!("'settles {seq}'");
        let names: Vec<String> = seqs.iter().map(named).collect();
        let waits = format!(
            "from pg_stat_activity where application_name in ({}) and wait_event = 'advisory'",
            names.join(", ")
        );
        wait_true(
            &self.cluster,
            "a settle that waits",
            &format!("select exists (select {waits})"),
        );
        let name: String = self.cluster.query_one(DB, &format!("select application_name {waits}"));
        name["settles ".len()..].parse().expect("a seq")
    }

    /// Asserts that no settle has failed, so the settle that waits is the first one.
    fn assert_still_waits(&self) {
        let log = self.cluster.log();
        let failed: Vec<&str> = log.lines().filter(|line| line.contains("; tries again")).collect();
        assert!(failed.is_empty(), "the settle was over by then: {failed:?}");
    }
}

#[test]
fn messages_ready_at_the_start_of_a_settle_are_sent_while_it_waits() {
    let stage = Stage::new(&["slow", "bad a", "bad b"]);
    let (slow, bad_a, bad_b) = (
        stage.publish_held("c", "slow"),
        stage.publish_held("a", "bad a"),
        stage.publish_held("b", "bad b"),
    );
    stage.answer("slow");
    stage.wait_for_settle(&[slow]);
    // While the worker waits, two destinations get an outcome that must be settled before they may claim. Another has
    // messages to send: one through shared memory, and one through the table because it is too large.
    stage.answer("bad a");
    stage.answer("bad b");
    stage.publish("z", "small", "");
    let large = Stage::publishes("z", "large", "jsonb_build_object('more', repeat('x', 100000))");
    stage.cluster.exec(DB, &large);
    stage.settle(slow);
    stage.wait_for("small");
    stage.wait_for("large");
    stage.assert_still_waits();
    let first = stage.wait_for_settle(&[bad_a, bad_b]);
    // This message is ready after the pass has claimed, and before its second settle begins.
    stage.publish("z", "late", "");
    assert!(!stage.has_arrived("late"));
    stage.settle(first);
    stage.wait_for_settle(&[bad_a + bad_b - first]);
    stage.wait_for("late");
    stage.assert_still_waits();
    stage.settle(bad_a + bad_b - first);
    wait_drained(&stage.cluster);
    let mut arrived: Vec<String> = stage.receiver.requests().iter().map(label).collect();
    arrived.retain(|label| label != "first");
    arrived.sort();
    assert_eq!(
        arrived,
        ["bad a", "bad a", "bad b", "bad b", "large", "late", "slow", "small"]
    );
}

#[test]
fn ready_messages_are_sent_between_the_parts_of_a_large_settle_of_failures() {
    let failing: Vec<String> = (1..=60).map(|number| format!("bad {number}")).collect();
    let labels: Vec<&str> = failing.iter().map(String::as_str).chain(["slow"]).collect();
    let stage = Stage::new(&labels);
    let slow = stage.publish_held("c", "slow");
    // While c is silent, a destination has a full window once it has answered.
    let answered = stage.publish("a", "answered", "");
    let is_over = format!("select not exists (select from outbox where seq = {answered})");
    wait_true(&stage.cluster, "an answer of a", &is_over);
    let mut failed: Vec<i64> = (failing.iter())
        .map(|label| {
            let seq = stage.publish("a", label, "");
            stage.with_locks(&format!("pg_advisory_lock({seq})"));
            seq
        })
        .collect();
    stage.answer("slow");
    stage.wait_for_settle(&[slow]);
    // The receiver answers them while the worker waits.
    failing.iter().for_each(|label| stage.answer(label));
    failing.iter().for_each(|label| stage.wait_for(label));
    let settled = || -> i64 { stage.cluster.query_one(DB, "select count(*) from outbox_attempts_log") };
    let before = settled();
    stage.settle(slow);
    stage.wait_for_settle(&failed);
    stage.publish("z", "late", "");
    while settled() == before {
        let seq = stage.wait_for_settle(&failed);
        assert!(!stage.has_arrived("late"));
        failed.retain(|other| *other != seq);
        stage.settle(seq);
        if !failed.is_empty() {
            stage.wait_for_settle(&failed);
        }
    }
    assert!(failed.len() > failing.len() / 2, "only {} are left", failed.len());
    stage.wait_for("late");
    stage.assert_still_waits();
    failed.iter().for_each(|seq| stage.settle(*seq));
    wait_drained(&stage.cluster);
}
