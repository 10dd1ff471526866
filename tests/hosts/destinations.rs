//! Destinations that hang, have invalid options, are tried with one message, or are created while a worker runs.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use support::{Broker, Cluster, Receiver, Reply, process, wait_until};

use super::{Host, Patient, Stage, of_key};
use support::courier::{run, work};
use support::wait::Pauses;
use support::{
    DB, Event, LONG, all_of, exchange_and_queue, health, labels, wait_drained, wait_for_problem, wait_healthy,
    wait_published, wait_true,
};

/// Records every state of a destination that a worker reports from now on.
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

/// The number of read system calls of all workers. A worker makes a few of them in each pass.
fn reads(stage: &Stage) -> u64 {
    let read_by = |pid: u32| -> u64 {
        let mut cat = Command::new("cat");
        cat.arg(format!("/proc/{pid}/io"));
        if stage.host == Host::Server {
            // In a container even root may see only what processes of the same user read.
            process::run_as(&mut cat, process::postgres_account());
        }
        let io = cat.output().expect("run cat");
        let io = String::from_utf8(io.stdout).expect("text");
        let count = io.lines().find_map(|line| line.strip_prefix("syscr: "));
        count.expect("a count of reads").parse().expect("a number")
    };
    stage.workers().iter().map(|worker| read_by(worker.pid)).sum()
}

/// Asserts that an idle worker makes few passes between two refreshes of its leases, which are one second apart.
fn assert_does_not_spin(stage: &Stage) {
    const REFRESHES: usize = 3;
    stage.wait_for_heartbeats(1);
    let before = reads(stage);
    stage.wait_for_heartbeats(REFRESHES);
    let made = reads(stage) - before;
    println!("{made} reads in {REFRESHES} refreshes of the leases");
    assert!(
        made < 200 * REFRESHES as u64,
        "{made} reads in {REFRESHES} refreshes of the leases"
    );
}

/// After each pause one message may be tried. That alone must not show as a connection.
pub fn a_receiver_that_hangs_is_down_until_it_answers_a_message(host: Host) {
    let fixed = Arc::new(AtomicBool::new(false));
    let is_fixed = Arc::clone(&fixed);
    let receiver = Receiver::start(move |_| match is_fixed.load(Ordering::Acquire) {
        true => Reply::status(200),
        false => Reply::Hang,
    });
    let stage = Stage::of_nothing(host, &["outbox.lease_renew = '1s'"]);
    let options = format!("url '{}', timeout '200ms'", receiver.url("/"));
    stage.destination("hook", "http", &options);
    stage.wait_for_state("hook", "connected");
    keep_states(&stage.cluster);
    stage.cluster.publish_run("hook", "k", 3);
    let problem = wait_for_problem(&stage.cluster, "broker");
    assert!(problem.starts_with("hook: the receiver does not answer"), "{problem}");
    let from = stage.log().len();
    let tries = receiver.requests().len() + 4;
    wait_until("further attempts", LONG, || {
        assert!(
            !health(&stage.cluster, "broker").0,
            "the broker check is ok between two attempts"
        );
        receiver.requests().len() >= tries
    });
    let states = "select string_agg(state, ' ' order by position) from states where destination = 'hook'";
    let states: String = stage.cluster.query_one(DB, states);
    assert!(states.split(' ').all(|state| state == "down"), "{states}");
    assert!(
        !stage.log()[from..].contains("hook: receiver connected"),
        "{}",
        stage.log()
    );
    assert!(
        stage
            .cluster
            .query_one::<bool>(DB, "select max(attempts) = 0 from outbox_messages")
    );

    fixed.store(true, Ordering::Release);
    wait_published(&stage.cluster, 3);
    wait_healthy(&stage.cluster, "broker");
    stage.wait_for_state("hook", "connected");
    stage.wait_logged("destination hook: receiver connected");
}

pub fn a_destination_with_invalid_options_is_named_and_delays_no_other(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let stage = Stage::of_nothing(host, &[]);
    let url = broker.url();
    let of_exchange = format!("exchange '{exchange}', routing_key '{{destination}}'");
    // Both names sort before the name of the destination that works.
    stage.destination(
        "garbled",
        "amqp",
        &format!("url '{url}', {of_exchange}, max_attempts '3'"),
    );
    stage.destination("missing", "amqp", &of_exchange); // outbox.url is empty as well
    stage.destination("well", "amqp", &format!("url '{url}', {of_exchange}"));
    stage.wait_for_state("garbled", "connected");
    // Simulates an option that another version accepted: options that are written now are checked.
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
        stage.cluster.publish_run(name, name, 3);
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

/// A crash would be charged to all claimed messages, so no other message may be claimed meanwhile.
pub fn while_a_message_is_tried_alone_nothing_is_claimed_and_no_pass_spins(host: Host) {
    const BACKLOG: usize = 2_000;
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let receiver = Patient::start(&["poison 1"]);
    // Small claims: when the poison candidate is tried, further messages wait for the other destination.
    let conf = [
        "outbox.batch_size = 10",
        "outbox.enabled = off",
        "outbox.lease_renew = '1s'",
    ];
    let stage = Stage::of_broker(host, &exchange, &conf);
    stage.destination("late", "http", &format!("url '{}'", receiver.url()));
    stage.wait_for_state("late", "paused");
    stage.cluster.publish_run("late", "poison", 2);
    stage.cluster.publish_run("default", "k", BACKLOG);
    stage
        .cluster
        .exec(DB, "update outbox set crashes = 3 where destination = 'late'");
    stage.cluster.set_conf("outbox.enabled", "on");
    receiver.wait_for("poison 1");
    wait_true(
        &stage.cluster,
        "the claimed messages to be settled",
        "select not exists (select from outbox where destination = 'default' and claim_token is not null)",
    );
    let published = || -> i64 { stage.cluster.query_one(DB, "select count(*) from outbox_history") };
    let so_far = published();
    assert!(so_far < BACKLOG as i64, "the whole backlog is published");
    assert_does_not_spin(&stage);
    assert_eq!(published(), so_far, "another message was published meanwhile");
    assert_eq!(receiver.labels(), ["poison 1"], "another message was sent meanwhile");
    receiver.answer("poison 1");
    wait_published(&stage.cluster, BACKLOG + 2);
    assert_eq!(receiver.labels(), ["poison 1", "poison 2"]);
    let arrived = labels(&all_of(broker, &queue));
    let wanted: Vec<String> = (1..=BACKLOG).map(|n| format!("k {n}")).collect();
    assert_eq!(arrived, wanted);
}

pub fn a_destination_that_is_down_tries_one_message_and_others_continue(host: Host) {
    const BACKLOG: usize = 300;
    const TIMEOUT: Duration = Duration::from_millis(300);
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let (fixed, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let (is_fixed, answers) = (Arc::clone(&fixed), Arc::clone(&answered));
    let receiver = Receiver::start(move |request| match is_fixed.load(Ordering::Acquire) {
        true => {
            answers.lock().expect("no panic").push(request.label());
            Reply::status(200)
        }
        false => Reply::Hang,
    });
    let stage = Stage::of_broker(host, &exchange, &["outbox.lease_renew = '1s'"]);
    let options = format!("url '{}', timeout '{} ms'", receiver.url("/"), TIMEOUT.as_millis());
    stage.destination("hook", "http", &options);
    stage.wait_for_state("hook", "connected");
    stage.cluster.publish_run("hook", "h", BACKLOG);
    let why = stage.wait_for_state("hook", "down");
    assert!(why.starts_with("timeout"), "{why}");
    let claimed = "select count(*) from outbox where destination = 'hook' and claim_token is not null";
    // The one that is tried, and one whose try is over while its release is not written yet.
    let tries_one = || stage.cluster.query_one::<i64>(DB, claimed) <= 2;
    wait_true(
        &stage.cluster,
        "the messages of the destination to be released",
        &format!("select ({claimed}) <= 1"),
    );
    stage.cluster.publish_run("default", "k", BACKLOG);
    wait_until("the other destination to continue", LONG, || {
        assert!(tries_one(), "more than one message is tried");
        stage
            .cluster
            .query_one::<i64>(DB, "select count(*) from outbox_history")
            == BACKLOG as i64
    });
    assert_does_not_spin(&stage);
    assert!(tries_one(), "more than one message is tried");
    let wanted = |key: &str| -> Vec<String> { (1..=BACKLOG).map(|n| format!("{key} {n}")).collect() };
    assert_eq!(labels(&all_of(broker, &queue)), wanted("k"));

    let pauses = Pauses::watch();
    fixed.store(true, Ordering::Release);
    wait_published(&stage.cluster, 2 * BACKLOG);
    let mut delivered = of_key(&answered.lock().expect("no panic"), "h");
    if pauses.end() > TIMEOUT {
        // A message whose answer came too late was sent again before the others of its key.
        delivered.dedup();
    }
    assert_eq!(delivered, wanted("h"));
    let charged = "select count(*) from outbox_history where attempts <> 1";
    assert_eq!(stage.cluster.query_one::<i64>(DB, charged), 0);
}

/// Requests one pass of the workers, in another thread. For workers outside the server, a process makes one pass.
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
                "the session to wait for the outcome",
                "select exists (select from pg_stat_activity where pid <> pg_backend_pid() and state = 'active'
                    and query = 'select outbox_run_pass(''5 min'')::text' and wait_event_type = 'Extension')",
            );
            thread
        }
        Host::Outside => {
            let command = work(cluster, &["--once", "--json"]);
            std::thread::spawn(move || {
                let output = run(command);
                let errors = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(0), "{errors}");
                serde_json::from_slice(&output.stdout).expect("a line of JSON")
            })
        }
    }
}

pub fn a_destination_that_is_created_during_a_request_is_served_by_it(host: Host) {
    let (slow, fresh) = (Patient::start(&["slow 1", "slow 2"]), Patient::start(&[]));
    // A worker that makes one pass fails if a destination is unreachable, so the default destination is reachable.
    let (exchange, _) = exchange_and_queue(Broker::shared());
    let stage = Stage::of_broker(host, &exchange, &[]);
    stage.destination("slow", "http", &format!("url '{}'", slow.url()));
    stage.wait_for_state("slow", "connected");
    // While a worker runs.
    stage.cluster.publish_run("slow", "slow", 1);
    slow.wait_for("slow 1");
    stage.destination("fresh", "http", &format!("url '{}'", fresh.url()));
    stage.cluster.publish(Event::new("fresh 1").key("k").to("fresh"));
    fresh.wait_for("fresh 1");
    slow.answer("slow 1");
    wait_drained(&stage.cluster);

    // During a request that waits for an answer of the other destination.
    if host == Host::Outside {
        stage.stop(); // the request starts a separate worker
    }
    stage.cluster.publish(Event::new("slow 2").key("slow").to("slow"));
    if host == Host::Server {
        slow.wait_for("slow 2");
    }
    let requested = request(host, &stage.cluster);
    slow.wait_for("slow 2");
    let newest = Patient::start(&[]);
    stage.destination("newest", "http", &format!("url '{}'", newest.url()));
    stage.cluster.publish(Event::new("newest 1").key("k").to("newest"));
    newest.wait_for("newest 1");
    assert!(!requested.is_finished(), "the request must wait for an answer");
    slow.answer("slow 2");
    let done = requested.join().expect("no panic");
    // The request counts only the messages that were claimed for it. A running worker had claimed the slow message
    // before.
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

pub fn a_destination_at_a_loopback_address_gets_nothing_until_the_setting_names_it(host: Host) {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let receiver = Receiver::start(|_| Reply::status(200));
    let stage = Stage::of_nothing(host, &["outbox.http_allow = 'hooks.internal'"]);
    let cluster = &stage.cluster;
    cluster.exec(
        DB,
        &format!(
            "create server broker foreign data wrapper outbox_amqp options (url '{}', exchange '{exchange}');
             create server hook foreign data wrapper outbox_http options (url '{}');
             select outbox_publish('T', '{{}}', 'o', '1', destination => d) from unnest('{{broker,hook}}'::text[]) d",
            broker.url(),
            receiver.url("/")
        ),
    );
    for destination in ["broker", "hook"] {
        let refused = format!(
            "select exists (select from outbox_destination_status where destination = '{destination}'
                            and reason = 'address_refused' and detail like '127.0.0.1 is a loopback address%')"
        );
        wait_true(
            cluster,
            &format!("the address of {destination} to be refused"),
            &refused,
        );
        let remedy = format!(
            "select remedy like '%outbox.http_allow%' from outbox_health where \"check\" = 'broker' and destination = '{destination}'"
        );
        assert!(cluster.query_one::<bool>(DB, &remedy), "{destination}");
    }
    assert!(receiver.requests().is_empty());
    cluster.set_conf("outbox.http_allow", "127.0.0.1");
    wait_published(cluster, 2);
    assert_eq!(all_of(broker, &queue).len(), 1);
}
