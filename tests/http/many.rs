//! Many destinations: what do they take of the worker's process, and what do those that hang take from the others?

use std::path::PathBuf;
use std::process::Command;

use support::process::{postgres_account, run, run_as};
use support::{create_destinations, publish_to_each, wait_drained, wait_for};

use super::*;

/// The worker's process.
struct Process(PathBuf);

impl Process {
    fn of_worker(cluster: &Cluster) -> Self {
        let pid = "select max(pid) from pg_stat_activity where backend_type = 'outbox worker'";
        let pid: i32 = wait_for("the worker to start", LONG, || cluster.query_one(DB, pid));
        Self(format!("/proc/{pid}").into())
    }

    fn count(&self, what: &str) -> usize {
        let entries = std::fs::read_dir(self.0.join(what)).expect("the worker lives");
        entries.count()
    }

    fn threads(&self) -> usize {
        self.count("task")
    }

    fn descriptors(&self) -> usize {
        self.count("fd")
    }

    /// Sets the soft limit of a resource, by an option of prlimit.
    fn limit(&self, option: &str, soft: &str) {
        let pid = self.0.file_name().expect("a number").to_string_lossy();
        let mut prlimit = Command::new("prlimit");
        prlimit.args(["--pid", &pid, &format!("--{option}={soft}:")]);
        // Only the user of a process may, not even root in some containers.
        run_as(&mut prlimit, postgres_account());
        run(&mut prlimit);
    }
}

fn destinations(cluster: &Cluster, prefix: &str, count: usize, url: &str, options: &str) {
    create_destinations(cluster, prefix, count, "outbox_http", &format!("url '{url}#'{options}"));
}

#[test]
fn a_thousand_destinations_take_few_threads_and_descriptors() {
    const MANY: usize = 1_000;
    let receiver = willing();
    let cluster = http_cluster(&[]);
    destinations(&cluster, "d", MANY, &receiver.url("/"), "");
    publish_to_each(&cluster, "d", MANY, 1, "'{}'");
    let worker = Process::of_worker(&cluster);
    let (mut threads, mut descriptors) = (0, 0);
    wait_until("a request for each destination", LONG, || {
        threads = threads.max(worker.threads());
        descriptors = descriptors.max(worker.descriptors());
        receiver.requests().len() >= MANY
    });
    // 64 threads where requests are answered within 200 ms; on a busy machine some are not.
    assert!(
        threads <= 300 && descriptors <= 500,
        "{threads} threads and {descriptors} descriptors"
    );
    wait_drained(&cluster);
    wait_until("the end of idle threads and connections", LONG, || {
        worker.threads() <= 4 && worker.descriptors() <= 200
    });
    publish_to_each(&cluster, "d", 1, 1, "'{}'");
    wait_drained(&cluster);
}

#[test]
fn destinations_that_hang_take_no_thread_from_those_that_work() {
    const HANG: usize = 300;
    let (hanging, works) = (Receiver::start(|_| Reply::Hang), willing());
    let cluster = http_cluster(&["outbox.confirm_timeout = '1h'"]);
    destinations(&cluster, "h", HANG, &hanging.url("/"), "");
    destinations(&cluster, "w", 50, &works.url("/"), "");
    publish_to_each(&cluster, "h", HANG, 1, "'{}'");
    publish_to_each(&cluster, "w", 50, 1, "'{}'");
    wait_for_requests(&works, 50);
    // Those that hang have all been tried: none waits for the end of another.
    wait_for_requests(&hanging, HANG);
    publish_to_each(&cluster, "w", 50, 1, "'{}'");
    wait_for_requests(&works, 100);
    assert_eq!(hanging.requests().len(), HANG);
}

#[test]
fn a_limit_of_the_workers_process_is_named_and_charged_to_no_message() {
    let receiver = willing();
    let cluster = http_cluster(&[]);
    destinations(&cluster, "d", 2, &receiver.url("/"), "");
    // With a trigger each settle is a statement: what the worker needs to settle a message that failed is open then,
    // too.
    let trigger = "create function nothing() returns trigger language plpgsql as 'begin return null; end';
                   create trigger t after insert on outbox_history execute function nothing()";
    cluster.exec(DB, trigger);
    publish_to_each(&cluster, "d", 1, 1, "'{}'");
    wait_drained(&cluster);
    let worker = Process::of_worker(&cluster);
    for (resource, limit, words) in [
        ("nofile", "3", "no file descriptor left"),
        ("nproc", "1", "may start no more threads"),
    ] {
        if resource == "nproc" {
            wait_until("the end of idle threads", LONG, || worker.threads() <= 2);
        }
        worker.limit(resource, limit);
        publish_to_each(&cluster, "d", 2, 1, "'{}'");
        let detail = wait_for_reason(&cluster, "d2", "process_limit");
        assert!(detail.contains(words), "{detail}");
        let shown = r#"from outbox_health where "check" = 'broker' and destination = 'd2'"#;
        let shown: String = cluster.query_one(DB, &format!("select problem || ' ' || remedy {shown}"));
        assert!(
            shown.contains("a limit on this side") && shown.contains("ulimit"),
            "{shown}"
        );
        worker.limit(resource, "1000");
        wait_drained(&cluster);
    }
    let charged: i64 = cluster.query_one(DB, "select count(*) from outbox_messages where attempts > 1");
    assert_eq!(charged, 0);
}

#[test]
fn a_worker_that_may_start_no_thread_says_so_of_its_first_destination() {
    let receiver = willing();
    let cluster = http_cluster(&[]);
    let worker = Process::of_worker(&cluster);
    assert_eq!(worker.threads(), 1);
    worker.limit("nproc", "1");
    destinations(&cluster, "d", 1, &receiver.url("/"), "");
    publish_to_each(&cluster, "d", 1, 1, "'{}'");
    let detail = wait_for_reason(&cluster, "d1", "process_limit");
    assert!(detail.contains("may start no more threads"), "{detail}");
    worker.limit("nproc", "1000");
    wait_drained(&cluster);
}

/// The calls of a function of the worker protocol so far.
fn calls(cluster: &Cluster, function: &str) -> i64 {
    let sql = "select coalesce(sum(calls), 0)::bigint from pg_stat_user_functions where funcname = $1";
    cluster.query_one(DB, &sql.replace("$1", &format!("'{function}'")))
}

#[test]
fn hanging_destinations_that_are_changed_and_dropped_delay_no_other_and_those_without_work_cost_no_statement() {
    const HANG: usize = 100;
    const IDLE: usize = 300;
    let (hanging, works) = (Receiver::start(|_| Reply::Hang), willing());
    let cluster = http_cluster(&[
        "outbox.confirm_timeout = '1h'",
        "track_functions = all",
        "outbox.fast_path = off",
    ]);
    destinations(&cluster, "h", HANG, &hanging.url("/"), "");
    destinations(&cluster, "idle", IDLE, &works.url("/"), "");
    destinations(&cluster, "w", 1, &works.url("/"), "");
    publish_to_each(&cluster, "h", HANG, 1, "'{}'");
    wait_for_requests(&hanging, HANG);
    publish_to_each(&cluster, "w", 1, 1, "'{}'");
    wait_for_requests(&works, 1);
    let claims = calls(&cluster, "blocked_keys");
    let epochs = "select sum(lease_epoch)::bigint from outbox_partitions";
    let before: i64 = cluster.query_one(DB, epochs);

    // A change of rules, of connections, and the end of those that hang.
    cluster.set_conf("outbox.max_attempts", "7");
    publish_to_each(&cluster, "w", 1, 1, "'{}'");
    wait_for_requests(&works, 2);
    assert_eq!(hanging.requests().len(), HANG, "nothing was sent again");
    cluster.set_conf("outbox.confirm_timeout", "50min");
    wait_for_requests(&hanging, 2 * HANG); // each was released and sent again
    publish_to_each(&cluster, "w", 1, 1, "'{}'");
    wait_for_requests(&works, 3);
    let drop_all = format!(
        "do $$ begin for n in 1..{HANG} loop execute format('drop server %I cascade', 'h' || n); end loop; end $$"
    );
    cluster.exec(DB, &drop_all);
    publish_to_each(&cluster, "w", 1, 1, "'{}'");
    wait_for_requests(&works, 4);
    wait_true(
        &cluster,
        "the end of their states",
        "select not exists (select from outbox_connections where destination like 'h%')",
    );

    let kept: i64 = cluster.query_one(DB, epochs);
    assert_eq!(kept, before, "no lease ran out");
    let claims = calls(&cluster, "blocked_keys") - claims;
    assert!(claims < (HANG + IDLE) as i64, "{claims} reads of blocked keys");
}

#[test]
fn health_says_that_a_server_has_room_for_the_statistics_of_4096_destinations() {
    const ROOM: usize = 4096;
    let cluster = http_cluster(&[]);
    let room = "select problem from outbox_health where \"check\" = 'room'";
    // With the default one. The event trigger of the extension takes longer the more there are.
    cluster.exec(DB, "alter event trigger outbox_servers disable");
    destinations(&cluster, "d", ROOM - 2, "http://127.0.0.1:1/", "");
    cluster.exec(DB, "alter event trigger outbox_servers enable always");
    destinations(&cluster, "last", 1, "http://127.0.0.1:1/", "");
    let counted = format!("select count(stats_reset) = {ROOM} from outbox_destination_status");
    wait_true(&cluster, "all of them to be counted", &counted);
    assert_eq!(cluster.query_one::<Option<String>>(DB, room), None);
    let receiver = willing();
    destinations(&cluster, "more", 1, &receiver.url("/"), ", max_pending '1'");
    let problem = wait_for("health to name it", LONG, || {
        cluster.query_one::<Option<String>>(DB, room)
    });
    assert_eq!(
        problem,
        "1 destination(s) have neither statistics nor max_pending, for example more1: the server has room for those of 4096"
    );
    // It is delivered to as the others are, and max_pending does not hold.
    publish_to_each(&cluster, "more", 1, 3, "'{}'");
    wait_for_requests(&receiver, 3);
    // What the remedy says.
    cluster.exec(DB, "drop server d1 cascade");
    let is_gone = "select not exists (select from outbox_health where \"check\" = 'room' and not ok)";
    wait_true(&cluster, "room for the last", is_gone);
}
