//! Tests the extension behind a pooler that gives each transaction another session. A real pgbouncer runs in
//! transaction mode, with fewer sessions than clients.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;

use postgres::{Client, NoTls, SimpleQueryMessage};
use support::program::outboxctl;
use support::{Cluster, port, process, wait_for, workdir};
use support::{DB, LONG, Stage, idle_cluster, wait_drained, wait_published, wait_true};

/// A pgbouncer in front of a cluster, with two sessions for all clients. Killed when it is dropped.
struct Pooler {
    child: Child,
    port: u16,
    dir: workdir::ServerDir,
}

impl Pooler {
    fn start(cluster: &Cluster) -> Self {
        Self::with(cluster, "")
    }

    /// With more lines of its configuration.
    fn with(cluster: &Cluster, more: &str) -> Self {
        let (dir, port) = (workdir::ServerDir::create("pgbouncer"), port::free_port());
        let ini = dir.path().join("pgbouncer.ini");
        let lines = format!(
            "[databases]\n{DB} = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 100\n{more}\n",
            cluster.port()
        );
        fs::write(&ini, lines).expect("write pgbouncer.ini");
        let log = || {
            fs::File::options()
                .create(true)
                .append(true)
                .open(dir.log_file())
                .expect("the log")
        };
        let mut command = Command::new("/usr/sbin/pgbouncer");
        command.arg(&ini).stdin(Stdio::null()).stdout(log()).stderr(log());
        process::run_as(&mut command, process::postgres_account()); // pgbouncer refuses to run as root
        let child = process::spawn_bound(command, libc::SIGKILL).expect("start pgbouncer: Debian has it as pgbouncer");
        let pooler = Self { child, port, dir };
        drop(wait_for("pgbouncer to take connections", LONG, || {
            pooler.try_connect().ok()
        }));
        pooler
    }

    fn try_connect(&self) -> Result<Client, postgres::Error> {
        Client::connect(
            &format!("host=127.0.0.1 port={} user=app dbname={DB}", self.port),
            NoTls,
        )
    }

    fn connect(&self) -> Client {
        self.try_connect().expect("connect to pgbouncer")
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        process::kill(&mut self.child);
        self.dir.finish();
    }
}

/// Runs a statement, and returns its first value. In the simple protocol: pgbouncer 1.18 does not support prepared
/// statements.
fn ask(client: &mut Client, sql: &str) -> Option<String> {
    let answer = client
        .simple_query(sql)
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    })
}

#[test]
fn many_clients_on_two_sessions_publish_only_what_they_commit() {
    const CLIENTS: usize = 12;
    const EACH: usize = 20;
    let stage = Stage::new(&[]);
    let pooler = Pooler::start(&stage);
    // Each client runs one transaction before any runs its second: no client keeps a session.
    let round = Barrier::new(CLIENTS);
    thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (mut client, round) = (pooler.connect(), &round);
            scope.spawn(move || {
                for n in 0..EACH {
                    let end = if n % 4 == 3 { "rollback" } else { "commit" };
                    // One statement at a time, so that other clients run between the transactions.
                    ask(&mut client, "begin");
                    let publish = format!("select outbox_publish('T', '\"{end}\"', 'client', '{number}')");
                    assert!(ask(&mut client, &publish).is_some());
                    ask(&mut client, end);
                    if n == 0 {
                        round.wait();
                    }
                }
            });
        }
    });
    wait_drained(&stage);
    wait_published(&stage, CLIENTS * EACH * 3 / 4);
    let arrived = stage.all();
    assert!(arrived.iter().all(|delivery| delivery.json()["payload"] == "commit"));
    // Sessions that the test has just closed may still end. A third session of the pooler would stay.
    wait_true(
        &stage,
        "two sessions, and the one of this query",
        "select count(distinct pid) <= 3 from pg_stat_activity where backend_type = 'client backend'",
    );
}

#[test]
fn a_setting_of_a_transaction_ends_with_it() {
    let cluster = idle_cluster(&[]);
    let pooler = Pooler::start(&cluster);
    let mut client = pooler.connect();
    ask(&mut client, "begin");
    ask(&mut client, "set local outbox.replaying = on");
    assert_eq!(ask(&mut client, "select outbox_publish('T', '{}')"), None);
    ask(&mut client, "commit");
    for seq in 1..=5 {
        let published = ask(&mut pooler.connect(), "select outbox_publish('T', '{}')");
        assert_eq!(published, Some(seq.to_string()));
    }
    ask(&mut client, "begin");
    assert_eq!(
        ask(&mut client, "select outbox_inbox_receive('c', 'm')").as_deref(),
        Some("t")
    );
    ask(&mut client, "rollback");
    assert_eq!(
        ask(&mut pooler.connect(), "select outbox_inbox_receive('c', 'm')").as_deref(),
        Some("t")
    );
    assert_eq!(
        ask(&mut client, "select outbox_inbox_receive('c', 'm')").as_deref(),
        Some("f")
    );
}

#[test]
fn outboxctl_refuses_a_pooler_and_leaves_the_sessions_of_the_application_as_they_were() {
    let cluster = idle_cluster(&["jit = on"]); // the default before Postgres 19
    for more in ["", "ignore_startup_parameters = options, extra_float_digits"] {
        let pooler = Pooler::with(&cluster, more);
        let mut command = Command::new(outboxctl());
        command.args([
            "status",
            "-h",
            "127.0.0.1",
            "-U",
            "app",
            "-d",
            DB,
            "-p",
            &pooler.port.to_string(),
        ]);
        let output = command.output().expect("run outboxctl");
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && printed.contains("not to a pooler"),
            "{more}: {printed}"
        );
        let mut client = pooler.connect();
        for (setting, value) in [("search_path", "\"$user\", public"), ("jit", "on"), ("role", "none")] {
            assert_eq!(
                ask(&mut client, &format!("show {setting}")).as_deref(),
                Some(value),
                "{more}"
            );
        }
    }
}
