//! Leases: a worker that is suspended or waits for a lock beyond the end of its leases, and settings that change
//! leases.

use support::{Broker, process, wait_until};

use super::{Host, Patient, Stage, of_key};
use support::{DB, Event, LONG, Session, exchange_and_queue, labels, suspend_worker, wait_published, wait_true};

/// Keys in lanes that a worker owns, each in a different lane.
fn keys_of(stage: &Stage, worker: &str, count: usize) -> Vec<String> {
    let sql = format!(
        "select array_agg(key) from (
           select distinct on (p.partition_key) 'k' || n as key
           from generate_series(1, 500) n
           join outbox_partition_status p on p.partition_key = outbox_partition_of('item:k' || n)
           where p.lease_owner = '{worker}' order by p.partition_key, n limit {count}) k"
    );
    stage.cluster.query_one(DB, &sql)
}

/// When the receiver answers, so that the next message of the key may be sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answered {
    AtItsWaking,
    UnderNewLeases,
    /// While its main thread waits for a lock, so that only the publisher's deadline keeps the next message back.
    DuringItsWait,
}

pub fn queued_messages_are_not_sent_when_a_worker_resumes_after_its_lease(host: Host) {
    outlast_the_lease(host, Answered::AtItsWaking);
}

pub fn messages_queued_under_an_old_lease_are_not_sent_under_a_new_one(host: Host) {
    outlast_the_lease(host, Answered::UnderNewLeases);
}

pub fn queued_messages_are_not_sent_by_a_worker_that_waits_for_a_lock_past_its_lease(host: Host) {
    outlast_the_lease(host, Answered::DuringItsWait);
}

fn outlast_the_lease(host: Host, answered: Answered) {
    let conf = [
        "outbox.lease_ttl = '6s'",
        "outbox.lease_renew = '1s'",
        "outbox.heartbeat_ttl = '6s'",
    ];
    let stage = Stage::idle(host, "", "nowhere", &conf);
    let receiver = Patient::start(&[]);
    stage.destination("hook", "http", &format!("url '{}', timeout '300s'", receiver.url()));
    stage.work(2);
    let drowsy = stage.workers().swap_remove(0);
    let keys = keys_of(&stage, &drowsy.id, 2);
    assert_eq!(keys.len(), 2, "{keys:?}");
    // A worker sends one message at a time until its first request is answered.
    stage.cluster.publish(Event::new("first").key(&keys[0]).to("hook"));
    wait_published(&stage.cluster, 1);
    // The receiver has the first message of each key, and the others are queued behind it.
    for key in &keys {
        receiver.hold(&format!("{key} 1"));
        stage.cluster.publish_run("hook", key, 3);
        receiver.wait_for(&format!("{key} 1"));
    }
    wait_true(
        &stage.cluster,
        "all messages to be claimed",
        "select count(*) = 6 from outbox where claim_token is not null",
    );
    assert_eq!(receiver.labels().len(), 3, "the others wait for an answer");
    assert!(!stage.log().contains("the leases have run out"), "{}", stage.log());
    let mut locker = stage.cluster.connect(DB);
    match (answered, host) {
        (Answered::DuringItsWait, _) => locker
            .batch_execute(&format!(
                "begin; select from outbox_workers where worker_id = '{}' for update",
                drowsy.id
            ))
            .expect("the row that its heartbeat writes"),
        (_, Host::Server) => suspend_worker(&stage.cluster, drowsy.pid),
        (_, Host::Outside) => process::suspend(drowsy.pid),
    }
    wait_true(
        &stage.cluster,
        "the other worker to own all partitions",
        &format!(
            "select coalesce(bool_or(alive and partitions = 16 and worker_id <> '{}'), false) from outbox_worker_status",
            drowsy.id
        ),
    );
    wait_published(&stage.cluster, 7);
    let answer = || keys.iter().for_each(|key| receiver.answer(&format!("{key} 1")));
    if answered != Answered::UnderNewLeases {
        answer();
    }
    match answered {
        Answered::DuringItsWait => {
            stage.cluster.publish(Event::new("meanwhile").key("other").to("hook"));
            receiver.wait_for("meanwhile");
            locker.batch_execute("commit").expect("commit");
        }
        _ => process::signal(drowsy.pid, libc::SIGCONT),
    }
    stage.wait_logged("the leases have run out");
    stage.wait_shared(2);
    answer();
    stage.wait_for_heartbeats(2);
    for key in &keys {
        stage
            .cluster
            .publish(Event::new(format!("{key} 4")).key(key).to("hook"));
    }
    for key in &keys {
        receiver.wait_for(&format!("{key} 4"));
        let wanted = [1, 1, 2, 3, 4].map(|n| format!("{key} {n}"));
        assert_eq!(
            of_key(&receiver.labels(), key),
            wanted,
            "messages queued under the old lease"
        );
    }
    let again: Vec<String> = stage.workers().into_iter().map(|worker| worker.id).collect();
    assert!(
        again.contains(&drowsy.id),
        "the worker continues with new leases: {again:?}"
    );
}

pub fn a_worker_alone_that_stalls_past_its_lease_settles_what_was_confirmed(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = [
        "outbox.lease_ttl = '4s'",
        "outbox.lease_renew = '1s'",
        "outbox.heartbeat_ttl = '4s'",
    ];
    let stage = Stage::of_broker(host, &exchange, &conf);
    let epochs = "select array_agg(lease_epoch order by partition) from outbox_partitions";
    let before: Vec<i64> = stage.cluster.query_one(DB, epochs);
    // No settle succeeds, and then no heartbeat.
    let mut locker = stage.cluster.connect(DB);
    locker.run("begin; lock table outbox_history in exclusive mode");
    (1..=50).for_each(|n| _ = stage.cluster.publish(Event::new(n).key(n.to_string())));
    wait_until("the broker to have all", LONG, || broker.queue_len(&queue) == 50);
    locker.run("select from outbox_workers for update");
    wait_true(
        &stage.cluster,
        "the leases to run out",
        "select not bool_or(outbox_internal.lease_is_live(lease_owner, lease_until)) from outbox_partitions",
    );
    locker.run("commit");
    wait_published(&stage.cluster, 50);
    stage.cluster.publish(Event::new("fence").key("1"));
    wait_published(&stage.cluster, 51);
    assert_eq!(broker.queue_len(&queue), 51, "nothing was sent again");
    assert_eq!(stage.cluster.query_one::<Vec<i64>>(DB, epochs), before);
}

/// The claims last for a second, and the receiver takes longer.
pub fn with_leasing_off_no_other_worker_takes_what_a_slow_receiver_delays(host: Host) {
    let conf = [
        "outbox.leasing = off",
        "outbox.claim_ttl = '1s'",
        "outbox.lease_ttl = '6s'",
        "outbox.lease_renew = '1s'",
    ];
    let stage = Stage::idle(host, "", "nowhere", &conf);
    let receiver = Patient::start(&["held"]);
    stage.destination("hook", "http", &format!("url '{}', timeout '300s'", receiver.url()));
    stage.work(2);
    let publish = |label: &str| stage.cluster.publish(Event::new(label).key(label).to("hook"));
    publish("held");
    receiver.wait_for("held");
    wait_true(
        &stage.cluster,
        "its claim to run out",
        "select bool_and(claim_until < clock_timestamp()) from outbox",
    );
    stage.wait_for_heartbeats(2);
    // The other worker claims again. The first one may take some of these as well.
    let mut published = 0;
    wait_until("the other worker to deliver", LONG, || {
        published += 1;
        publish(&format!("m{published}"));
        stage
            .cluster
            .query_one(DB, "select exists (select from outbox_history)")
    });
    let crashes = "select sum(crashes) from outbox";
    assert_eq!(stage.cluster.query_one::<i64>(DB, crashes), 0, "its claim still holds");
    receiver.answer("held");
    wait_published(&stage.cluster, published + 1);
    let mut labels = receiver.labels();
    labels.sort();
    labels.dedup();
    assert_eq!(
        labels.len(),
        receiver.labels().len(),
        "sent once: {:?}",
        receiver.labels()
    );
}

pub fn a_changed_setting_takes_effect_at_once_and_the_leases_are_refreshed(host: Host) {
    let broker = Broker::shared();
    let (before, old_queue) = exchange_and_queue(broker);
    let (after, new_queue) = exchange_and_queue(broker);
    // With these settings, no worker refreshes its leases for half an hour by its timer.
    let conf = [
        "outbox.lease_ttl = '1h'",
        "outbox.lease_renew = '30min'",
        "outbox.heartbeat_ttl = '1h'",
    ];
    let stage = Stage::of_broker(host, &before, &conf);
    let process = "select string_agg(format('%s %s %s', worker_id, pid, started_at), ',') from outbox_workers";
    let process: String = stage.cluster.query_one(DB, process);
    let still = format!(
        "select string_agg(format('%s %s %s', worker_id, pid, started_at), ',') = '{process}' from outbox_workers"
    );
    stage.cluster.publish(Event::new("before").key("k"));
    wait_published(&stage.cluster, 1);
    let short = "select bool_and(lease_until < clock_timestamp() + interval '10 min') from outbox_partitions";
    assert!(!stage.cluster.query_one::<bool>(DB, short));
    stage.cluster.exec(DB, "alter system set outbox.lease_ttl = '5min'");
    stage.cluster.reload();
    wait_true(&stage.cluster, "leases of the new length", short);
    stage
        .cluster
        .exec(DB, &format!("alter system set outbox.exchange = '{after}'"));
    stage.cluster.reload();
    wait_until("a message through the other exchange", LONG, || {
        stage.cluster.publish(Event::new("after").key("k"));
        broker.queue_len(&new_queue) > 0
    });
    assert_eq!(labels(&support::all_of(broker, &old_queue))[0], "before");
    assert!(
        stage.cluster.query_one::<bool>(DB, &still),
        "another worker owns the partitions"
    );
}
