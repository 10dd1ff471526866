//! Destinations that hang, cannot be understood, are tried with one message, or come while a worker runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use support::{Broker, Cluster, Receiver, Reply, wait_until};

use crate::common::{
    DB, LONG, all_of, exchange_and_queue, health, wait_drained, wait_for_problem, wait_healthy, wait_published,
    wait_true,
};
use crate::courier::{run, work};
use crate::{Host, Patient, Stage, labels, of_key};

/// From now on each state that a worker reports of a destination is kept.
fn keep_states(cluster: &Cluster) {
    cluster.exec(
        DB,
        "create table public.states (position bigint generated always as identity, destination text, state text);
         create function public.keep_state() returns trigger language plpgsql security definer as $$
           begin
             insert into public.states (destination, state) values (new.destination, new.state);
             return new;
           end $$;
         create trigger keep_state after insert or update on outbox_connections
           for each row execute function public.keep_state()",
    );
}

/// How many times a process has read something: a worker does so a few times in each pass.
fn reads_of(pid: u32) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).expect("what a process has read");
    let count = io.lines().find_map(|line| line.strip_prefix("syscr: "));
    count.and_then(|count| count.parse().ok()).expect("a count of reads")
}

/// A worker that waits makes few passes between two looks at its leases, which are a second apart.
fn assert_does_not_spin(stage: &Stage) {
    const LOOKS: usize = 3;
    let reads = || -> u64 { stage.workers().iter().map(|worker| reads_of(worker.pid)).sum() };
    stage.wait_for_looks(1);
    let before = reads();
    stage.wait_for_looks(LOOKS);
    let made = reads() - before;
    println!("{made} reads in {LOOKS} looks at the leases");
    assert!(made < 100 * LOOKS as u64, "{made} reads in {LOOKS} looks at the leases");
}

/// Each pause is over after a while, and then a message may be tried: that is not yet a connection.
pub fn a_receiver_that_hangs_is_down_until_it_answers_a_message(host: Host) {
    let mended = Arc::new(AtomicBool::new(false));
    let is_mended = Arc::clone(&mended);
    let receiver = Receiver::start(move |_| match is_mended.load(Ordering::Acquire) {
        true => Reply::status(200),
        false => Reply::Hang,
    });
    let stage = Stage::of_nothing(host, &["outbox.lease_renew = '1s'"]);
    let options = format!("url '{}', timeout '200ms'", receiver.url("/"));
    stage.destination("hook", "http", &options);
    stage.wait_for_state("hook", "connected");
    keep_states(&stage.cluster);
    stage.publish_run("hook", "k", 3);
    let problem = wait_for_problem(&stage.cluster, "broker");
    assert!(problem.starts_with("hook: the receiver does not answer"), "{problem}");
    let from = stage.said().len();
    let tries = receiver.requests().len() + 4;
    wait_until("more tries", LONG, || {
        assert!(
            !health(&stage.cluster, "broker").0,
            "it is called healthy between two tries"
        );
        receiver.requests().len() >= tries
    });
    let states = "select string_agg(state, ' ' order by position) from states where destination = 'hook'";
    let states: String = stage.cluster.query_one(DB, states);
    assert!(states.split(' ').all(|state| state == "down"), "{states}");
    assert!(
        !stage.said()[from..].contains("hook: receiver connected"),
        "{}",
        stage.said()
    );
    assert!(
        stage
            .cluster
            .query_one::<bool>(DB, "select max(attempts) = 0 from outbox_messages")
    );

    mended.store(true, Ordering::Release);
    wait_published(&stage.cluster, 3);
    wait_healthy(&stage.cluster, "broker");
    stage.wait_for_state("hook", "connected");
    stage.wait_said("destination hook: receiver connected");
}

pub fn a_destination_that_cannot_be_understood_is_named_and_holds_up_no_other(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::of_nothing(host, &[]);
    let url = broker.url();
    let of_exchange = format!("exchange '{exchange}', routing_key '{{destination}}'");
    // Both names come before that of the destination that can be used.
    stage.destination(
        "garbled",
        "amqp",
        &format!("url '{url}', {of_exchange}, max_attempts '3'"),
    );
    stage.destination("missing", "amqp", &of_exchange); // outbox.url is empty, too
    stage.destination("well", "amqp", &format!("url '{url}', {of_exchange}"));
    stage.wait_for_state("garbled", "connected");
    // As a version that knew another option might have left it: what is written now is checked.
    stage.cluster.exec(
        DB,
        "update pg_foreign_server set srvoptions = array_replace(srvoptions, 'max_attempts=3', 'max_attempts=many')
         where srvname = 'garbled'",
    );
    let why = stage.wait_for_state("garbled", "unconfigured");
    assert!(why.contains("max_attempts"), "{why}");
    let why = stage.wait_for_state("missing", "unconfigured");
    assert!(why.contains("url"), "{why}");
    for name in ["garbled", "missing", "well"] {
        stage.publish_run(name, name, 3);
    }
    wait_published(&stage.cluster, 3);
    assert_eq!(labels(&all_of(broker, &queue)), ["well 1", "well 2", "well 3"]);
    let problem = wait_for_problem(&stage.cluster, "destination");
    assert!(
        problem.starts_with("garbled: ") && problem.contains("max_attempts"),
        "{problem}"
    );
    let untouched = "select count(*) = 6 and bool_and(claim_token is null and attempts = 0) from outbox";
    assert!(stage.cluster.query_one::<bool>(DB, untouched));

    stage
        .cluster
        .exec(DB, "alter server garbled options (set max_attempts '3')");
    wait_published(&stage.cluster, 6);
    let problem = wait_for_problem(&stage.cluster, "destination");
    assert!(problem.starts_with("missing: "), "{problem}");
    stage
        .cluster
        .exec(DB, &format!("alter server missing options (add url '{url}')"));
    wait_published(&stage.cluster, 9);
    wait_healthy(&stage.cluster, "destination");
    let arrived = labels(&all_of(broker, &queue));
    assert_eq!(
        arrived,
        [
            "garbled 1",
            "garbled 2",
            "garbled 3",
            "missing 1",
            "missing 2",
            "missing 3"
        ]
    );
}

/// A crash would be charged to what is claimed beside it.
pub fn beside_a_message_that_is_tried_alone_nothing_is_claimed_and_no_pass_spins(host: Host) {
    const BACKLOG: usize = 2_000;
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let receiver = Patient::start(&["suspect 1"]);
    // Small claims: when the suspect comes more is known to wait for the other destination.
    let conf = [
        "outbox.batch_size = 10",
        "outbox.enabled = off",
        "outbox.lease_renew = '1s'",
    ];
    let stage = Stage::of_broker(host, &exchange, &conf);
    stage.destination("late", "http", &format!("url '{}'", receiver.url()));
    stage.wait_for_state("late", "paused");
    stage.publish_run("late", "suspect", 2);
    stage.publish_run("default", "k", BACKLOG);
    stage
        .cluster
        .exec(DB, "update outbox set crashes = 3 where destination = 'late'");
    stage.cluster.set_conf("outbox.enabled", "on");
    receiver.wait_for("suspect 1");
    wait_true(
        &stage.cluster,
        "what was claimed before to be settled",
        "select not exists (select from outbox where destination = 'default' and claim_token is not null)",
    );
    let published = || -> i64 { stage.cluster.query_one(DB, "select count(*) from outbox_history") };
    let so_far = published();
    assert!(so_far < BACKLOG as i64, "all of it had gone");
    assert_does_not_spin(&stage);
    assert_eq!(published(), so_far, "something went beside it");
    assert_eq!(receiver.labels(), ["suspect 1"], "alone");
    receiver.answer("suspect 1");
    wait_published(&stage.cluster, BACKLOG + 2);
    assert_eq!(receiver.labels(), ["suspect 1", "suspect 2"]);
    let arrived = labels(&all_of(broker, &queue));
    let wanted: Vec<String> = (1..=BACKLOG).map(|n| format!("k {n}")).collect();
    assert_eq!(arrived, wanted);
}

pub fn a_destination_that_is_down_tries_one_message_and_the_others_go_on(host: Host) {
    const BACKLOG: usize = 300;
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let mended = Arc::new(AtomicBool::new(false));
    let is_mended = Arc::clone(&mended);
    let receiver = Receiver::start(move |_| match is_mended.load(Ordering::Acquire) {
        true => Reply::status(200),
        false => Reply::Hang,
    });
    let stage = Stage::of_broker(host, &exchange, &["outbox.lease_renew = '1s'"]);
    let options = format!("url '{}', timeout '300ms'", receiver.url("/"));
    stage.destination("hook", "http", &options);
    stage.wait_for_state("hook", "connected");
    stage.publish_run("hook", "h", BACKLOG);
    let why = stage.wait_for_state("hook", "down");
    assert!(why.starts_with("timeout"), "{why}");
    let claimed = "select count(*) from outbox where destination = 'hook' and claim_token is not null";
    wait_true(
        &stage.cluster,
        "what it had to be given back",
        &format!("select ({claimed}) <= 1"),
    );
    stage.publish_run("default", "k", BACKLOG);
    wait_until("the others to go on", LONG, || {
        assert!(
            stage.cluster.query_one::<i64>(DB, claimed) <= 1,
            "more than one is tried"
        );
        stage
            .cluster
            .query_one::<i64>(DB, "select count(*) from outbox_history")
            == BACKLOG as i64
    });
    assert_does_not_spin(&stage);
    assert!(
        stage.cluster.query_one::<i64>(DB, claimed) <= 1,
        "more than one is tried"
    );
    let wanted = |key: &str| -> Vec<String> { (1..=BACKLOG).map(|n| format!("{key} {n}")).collect() };
    assert_eq!(labels(&all_of(broker, &queue)), wanted("k"));

    mended.store(true, Ordering::Release);
    let from = receiver.requests().len();
    wait_published(&stage.cluster, 2 * BACKLOG);
    let requests = receiver.requests();
    let came: Vec<String> = requests[from..]
        .iter()
        .map(|request| crate::label_of(&request.json()))
        .collect();
    // The first of them may have been under way when it was mended.
    let came = of_key(&came, "h");
    let missing = wanted("h").len() - came.len();
    assert!(missing <= 1 && came == wanted("h")[missing..], "{came:?}");
    let charged = "select count(*) from outbox_history where attempts <> 1";
    assert_eq!(stage.cluster.query_one::<i64>(DB, charged), 0);
}

/// Asks for one pass of the workers, in another thread. With a worker outside that is a process that makes one.
fn request(host: Host, cluster: &Cluster) -> std::thread::JoinHandle<Value> {
    match host {
        Host::Server => {
            let mut session = cluster.connect(DB);
            let thread = std::thread::spawn(move || {
                let row = session.query_one("select outbox_run_pass('5 min')::text", &[]);
                let text: String = row.expect("outbox_run_pass").get(0);
                serde_json::from_str(&text).expect("JSON")
            });
            wait_true(
                cluster,
                "the session to wait for its answer",
                "select exists (select from pg_stat_activity where pid <> pg_backend_pid() and state = 'active'
                    and query = 'select outbox_run_pass(''5 min'')::text' and wait_event_type = 'Extension')",
            );
            thread
        }
        Host::Outside => {
            let command = work(cluster, &["--once", "--json"]);
            std::thread::spawn(move || {
                let output = run(command);
                let said = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(0), "{said}");
                serde_json::from_slice(&output.stdout).expect("a line of JSON")
            })
        }
    }
}

pub fn a_destination_that_is_made_during_a_request_is_served_by_it(host: Host) {
    let (slow, fresh) = (Patient::start(&["slow 1", "slow 2"]), Patient::start(&[]));
    // A worker that makes one pass fails where a destination is out of reach: the default one is not.
    let (exchange, _) = exchange_and_queue(Broker::shared());
    let stage = Stage::of_broker(host, &exchange, &[]);
    stage.destination("slow", "http", &format!("url '{}'", slow.url()));
    stage.wait_for_state("slow", "connected");
    // By a worker that runs.
    stage.publish_run("slow", "slow", 1);
    slow.wait_for("slow 1");
    stage.destination("fresh", "http", &format!("url '{}'", fresh.url()));
    stage.publish("fresh", "k", "fresh 1");
    fresh.wait_for("fresh 1");
    slow.answer("slow 1");
    wait_drained(&stage.cluster);

    // During a request, which waits for an answer of the other destination.
    if host == Host::Outside {
        stage.stop(); // the request is a worker of its own
    }
    stage.publish("slow", "slow", "slow 2");
    if host == Host::Server {
        slow.wait_for("slow 2");
    }
    let asked = request(host, &stage.cluster);
    slow.wait_for("slow 2");
    let newest = Patient::start(&[]);
    stage.destination("newest", "http", &format!("url '{}'", newest.url()));
    stage.publish("newest", "k", "newest 1");
    newest.wait_for("newest 1");
    assert!(!asked.is_finished(), "it waits for an answer");
    slow.answer("slow 2");
    let done = asked.join().expect("no panic");
    // It counts what was claimed for it. By a worker that ran, the slow one had been claimed before.
    let counts = match host {
        Host::Server => 1,
        Host::Outside => 2,
    };
    assert_eq!(
        (&done["claimed"], &done["published"]),
        (&counts.into(), &counts.into()),
        "{done}"
    );
    wait_drained(&stage.cluster);
    assert_eq!(
        (slow.labels().len(), fresh.labels().len(), newest.labels().len()),
        (2, 1, 1)
    );
}
