//! Tests of a worker outside the server that the server or the network fails: it goes on by itself once that is over,
//! and a signal ends it at once. Only wrong rights end it.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use super::{Outside, wait_for_file, without_workers, work_as};
use support::proxy::{Mode, Proxy};
use support::{
    Broker, Cluster, DB, LONG, Session, exchange_and_queue, process, wait_for, wait_published, wait_true, within,
};

/// The pid of the session of the only worker, while it waits in the server.
const WAITING: &str = "select pid from pg_stat_activity
    where application_name = 'outboxctl work' and state = 'active' and query like '%work_wait%'";

struct Troubled {
    outside: Outside,
    log: PathBuf,
}

impl Troubled {
    /// Starts a worker that connects to this port.
    fn start(cluster: &Cluster, port: u16) -> Self {
        let log = cluster.data_dir().join("worker.log");
        let mut command = work_as(port, "courier", DB, &["--name", "troubled", "--json"]);
        command
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).expect("a file"));
        let child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
        let outside = Outside { child: Some(child) };
        Self { outside, log }
    }

    fn logs(&self, text: &str) -> String {
        wait_for_file(&self.log, text, |log| log.contains(text))
    }

    fn exit_code(mut self) -> Option<i32> {
        let mut child = self.outside.child.take().expect("it ran");
        process::reap(&mut child, LONG).expect("it ends").code()
    }
}

fn server() -> Cluster {
    let broker = Broker::shared();
    let (exchange, _) = exchange_and_queue(broker);
    without_workers(broker, &exchange, &["max_connections = 100"])
}

/// Publishes a message, and waits until the worker has sent it.
fn deliver(cluster: &Cluster) {
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    wait_published(
        cluster,
        cluster.query_one::<i64>(DB, "select count(*) from outbox_events") as usize,
    );
}

fn terminate(cluster: &Cluster) {
    let sql = "select count(pg_terminate_backend(pid, 60000)) from pg_stat_activity where application_name = 'outboxctl work'";
    assert_eq!(cluster.query_one::<i64>(DB, sql), 1);
}

#[test]
fn a_worker_outside_whose_server_is_silent_reconnects_once_it_answers() {
    let cluster = server();
    let proxy = Proxy::start(cluster.port());
    let worker = Troubled::start(&cluster, proxy.port());
    deliver(&cluster);
    proxy.mode(Mode::Blackhole);
    proxy.reset_all();
    worker.logs("no session within 10 s; tries again");
    proxy.mode(Mode::Pass);
    deliver(&cluster);
    assert_eq!(worker.outside.stop(), Some(0));
}

#[test]
fn a_signal_ends_a_worker_outside_at_once_while_it_connects() {
    let cluster = server();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let worker = Troubled::start(&cluster, silent.local_addr().expect("an address").port());
    let _connection = silent.accept().expect("its connection");
    let code = within("the end", Duration::from_secs(3), || worker.outside.stop());
    assert_eq!(code, Some(0));
}

#[test]
fn a_signal_ends_a_worker_outside_in_order_whose_server_does_not_answer() {
    let cluster = server();
    let worker = Troubled::start(&cluster, cluster.port());
    deliver(&cluster);
    let session = wait_for("it to wait", LONG, || {
        cluster.connect(DB).query_opt(WAITING, &[]).expect("sessions")
    });
    let session = session.get::<_, i32>(0) as u32;
    process::suspend(session);
    let code = worker.outside.stop();
    process::signal(session, libc::SIGCONT);
    assert_eq!(code, Some(0));
}

#[test]
fn a_canceled_wait_does_not_end_a_worker_outside_nor_its_session() {
    let cluster = server();
    let worker = Troubled::start(&cluster, cluster.port());
    deliver(&cluster);
    let name = "select string_agg(worker_id, ' ') from outbox_workers";
    let before: String = cluster.query_one(DB, name);
    let cancel = format!("select count(pg_cancel_backend(pid)) from ({WAITING}) s");
    for _ in 0..3 {
        wait_for("a wait to cancel", LONG, || {
            (cluster.query_one::<i64>(DB, &cancel) == 1).then_some(())
        });
        worker.logs("canceling statement due to user request; tries again");
        deliver(&cluster);
    }
    assert_eq!(cluster.query_one::<String>(DB, name), before);
    let log = std::fs::read_to_string(&worker.log).expect("its log");
    assert_eq!(log.matches("canceling").count(), 1, "once a minute: {log}");
    assert_eq!(worker.outside.stop(), Some(0));
}

#[test]
fn a_lock_that_a_worker_outside_meets_at_its_begin_is_waited_for() {
    let cluster = server();
    let mut holder = cluster.connect(DB);
    let lock = "begin; lock table outbox_workers";
    holder.run(lock);
    let worker = Troubled::start(&cluster, cluster.port());
    worker.logs("lock timeout; tries again");
    holder.run("rollback");
    deliver(&cluster);
    // The same when it begins again.
    holder.run(lock);
    terminate(&cluster);
    wait_for("it to wait for the lock", LONG, || {
        let sql =
            "select 1 from pg_stat_activity where application_name = 'outboxctl work' and wait_event_type = 'Lock'
                     and query like '%work_begin%'";
        cluster.connect("postgres").query_opt(sql, &[]).expect("sessions")
    });
    wait_true(
        &cluster,
        "its session to end at the lock timeout",
        "select not exists (select from pg_stat_activity where application_name = 'outboxctl work')",
    );
    holder.run("rollback");
    deliver(&cluster);
    assert_eq!(worker.outside.stop(), Some(0));
}

#[test]
fn a_worker_outside_waits_for_an_entry_of_its_own_in_shared_memory() {
    let cluster = server();
    let worker = Troubled::start(&cluster, cluster.port());
    deliver(&cluster);
    let begin = "select outbox_internal.work_begin('other')";
    let mut others = Vec::new();
    let mut take_entry = || {
        let mut other = cluster.connect(DB);
        other.batch_execute(begin).is_ok().then(|| others.push(other))
    };
    while take_entry().is_some() {}
    terminate(&cluster);
    wait_for("its entry", LONG, take_entry);
    worker.logs("there are too many workers outside the server; tries again");
    others.pop();
    deliver(&cluster);
    assert_eq!(worker.outside.stop(), Some(0));
}

#[test]
fn a_worker_outside_that_loses_its_rights_ends_and_names_them() {
    let cluster = server();
    let worker = Troubled::start(&cluster, cluster.port());
    deliver(&cluster);
    cluster.exec(DB, "revoke outbox_relay from courier");
    let log = worker.log.clone();
    assert_eq!(worker.exit_code(), Some(5));
    let log = std::fs::read_to_string(log).expect("its log");
    assert!(log.contains("GRANT outbox_relay"), "{log}");
}
