//! Tests that outboxctl connects wherever psql connects, and nowhere else. Each case runs with psql as well, and both
//! must reach the same server, database and user.

use super::{Ctl, Ran, quiet_cluster};
use serde_json::Value;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use support::program::outboxctl;
use support::*;
use support::{Cluster, process};

/// A way to connect: arguments, variables, and files in the home directory with their modes.
#[derive(Default, Clone)]
pub struct Way<'a> {
    pub args: Vec<String>,
    pub variables: Vec<(&'a str, String)>,
    pub files: Vec<(&'a str, String, u32)>,
}

impl<'a> Way<'a> {
    pub fn to(dbname: impl Into<String>) -> Self {
        Self::args(&["-d", &dbname.into()])
    }

    pub fn args(args: &[&str]) -> Self {
        Self {
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            ..Self::default()
        }
    }

    pub fn variable(mut self, name: &'a str, value: impl ToString) -> Self {
        self.variables.push((name, value.to_string()));
        self
    }

    pub fn file(mut self, name: &'a str, text: impl Into<String>, mode: u32) -> Self {
        self.files.push((name, text.into(), mode));
        self
    }

    fn around(&self, ctl: Ctl) -> Ctl {
        let ctl = self
            .variables
            .iter()
            .fold(ctl, |ctl, (name, value)| ctl.env(name, value));
        self.files
            .iter()
            .fold(ctl, |ctl, (name, text, mode)| ctl.home_file(name, text, *mode))
    }

    pub fn ctl(&self) -> Ran {
        let mut args = vec!["version", "--json", "-w"];
        args.extend(self.args.iter().map(String::as_str));
        self.around(Ctl::bare(&args)).run()
    }

    fn psql(&self, cluster: &Cluster) -> Ran {
        let question = "select json_build_object('database', current_database(), 'user', session_user,
                          'server_addr', inet_server_addr(), 'server_port', inet_server_port(),
                          'tls', (select ssl from pg_stat_ssl where pid = pg_backend_pid()))";
        let mut args = vec!["-X", "-A", "-t", "-w", "-c", question];
        args.extend(self.args.iter().map(String::as_str));
        self.around(Ctl::of(cluster.installation().bin("psql"), &args)).run()
    }

    /// Where outboxctl and psql connect to; `None` if both are refused.
    pub fn as_psql(&self, cluster: &Cluster) -> Option<Value> {
        let (ours, theirs) = (self.ctl(), self.psql(cluster));
        let both_ways = format!("{:?} {:?}\n{ours:?}\n{theirs:?}", self.args, self.variables);
        if theirs.code != 0 {
            assert!([2, 3].contains(&ours.code), "psql is refused: {both_ways}");
            return None;
        }
        assert_eq!(ours.code, 0, "psql connects: {both_ways}");
        let mut ours = ours.json();
        let theirs: Value = serde_json::from_str(&theirs.out).expect("JSON of psql");
        for (name, value) in theirs.as_object().expect("an object") {
            assert_eq!(&ours[name], value, "{name}: {both_ways}");
        }
        Some(ours.take())
    }
}

/// A directory for sockets, with a path short enough for them, that the server's user may write to.
struct SocketDirectory(PathBuf);

impl SocketDirectory {
    fn create(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("outboxctl-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for sockets");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        if let Some(account) = process::postgres_account() {
            std::os::unix::fs::chown(&path, Some(account.uid), Some(account.gid)).expect("chown");
        }
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Puts lines before the others of pg_hba.conf.
pub fn who_may(cluster: &Cluster, lines: &str) {
    let path = cluster.data_dir().join("pg_hba.conf");
    let old = std::fs::read_to_string(&path).expect("pg_hba.conf");
    std::fs::write(&path, format!("{lines}\n{old}")).expect("write pg_hba.conf");
    cluster.reload();
}

#[test]
fn options_strings_uris_variables_and_services_connect_as_psql_does() {
    let sockets = SocketDirectory::create("ways");
    let directory = format!("unix_socket_directories = '{}'", sockets.path());
    let cluster = idle_cluster(&[&directory]);
    let port = cluster.port();
    for sql in ["create role ann login", "create database shop", "create database ann"] {
        cluster.exec(DB, sql);
    }
    let port_text = port.to_string();
    let service = format!("[shop]\nhost=127.0.0.1\nport={port}\nuser=ann\ndbname=shop\n");
    let uri_host = sockets.path().replace('/', "%2F");
    let at_home = |way: Way<'static>| way.variable("PGHOST", "127.0.0.1").variable("PGPORT", port);
    let cases = [
        (
            Way::args(&["-h", "127.0.0.1", "-p", &port_text, "-U", "ann", "-d", "shop"]),
            "shop",
            "ann",
        ),
        (
            Way::args(&["-h", "127.0.0.1", "-p", &port_text, "-U", "ann"]),
            "ann",
            "ann",
        ),
        (
            Way::args(&["-h", sockets.path(), "-p", &port_text, "-U", "ann", "-d", "shop"]),
            "shop",
            "ann",
        ),
        (
            Way::to(format!("host=127.0.0.1 port={port} user=ann dbname=shop")),
            "shop",
            "ann",
        ),
        (
            Way::to(format!("host = '127.0.0.1' port={port} user='ann' dbname=sh\\op")),
            "shop",
            "ann",
        ),
        (
            Way::to(format!("postgresql://ann@127.0.0.1:{port}/shop?connect_timeout=5")),
            "shop",
            "ann",
        ),
        (Way::to(format!("postgres://ann@{uri_host}:{port}/shop")), "shop", "ann"),
        (
            Way::to(format!("postgres://ann@/shop?host={}&port={port}", sockets.path())),
            "shop",
            "ann",
        ),
        (
            Way::to(format!("host=127.0.0.2,127.0.0.1 port=1,{port} user=ann dbname=shop")),
            "shop",
            "ann",
        ),
        (
            Way::to(format!(
                "host=nowhere.invalid hostaddr=127.0.0.1 port={port} user=ann dbname=shop"
            )),
            "shop",
            "ann",
        ),
        // The connection string takes precedence over an option, as psql's manual states.
        (
            Way::args(&[
                "-h",
                "127.0.0.1",
                "-p",
                "1",
                "-d",
                &format!("port={port} user=ann dbname=shop"),
            ]),
            "shop",
            "ann",
        ),
        (
            at_home(Way::args(&["-U", "ann"])).variable("PGDATABASE", "shop"),
            "shop",
            "ann",
        ),
        (at_home(Way::default()).variable("PGUSER", "ann"), "ann", "ann"),
        (
            at_home(Way::args(&["-d", "shop"]))
                .variable("PGDATABASE", "ann")
                .variable("PGUSER", "ann"),
            "shop",
            "ann",
        ),
        (
            Way::default()
                .variable("PGSERVICE", "shop")
                .file(".pg_service.conf", &service, 0o644),
            "shop",
            "ann",
        ),
        // A service takes precedence over a variable, but not over an explicit argument.
        (
            Way::to("service=shop user=postgres")
                .variable("PGPORT", 1)
                .variable("PGUSER", "outsider")
                .file(".pg_service.conf", &service, 0o644),
            "shop",
            "postgres",
        ),
        (
            Way::to(format!(
                "host=127.0.0.1,127.0.0.1 port={port} user=ann dbname=shop target_session_attrs=read-write"
            )),
            "shop",
            "ann",
        ),
    ];
    for (way, database, user) in &cases {
        let found = way
            .as_psql(&cluster)
            .unwrap_or_else(|| panic!("{:?} leads nowhere", way.args));
        assert_eq!(
            (&found["database"], &found["user"]),
            (&Value::from(*database), &Value::from(*user)),
            "{:?}",
            way.args
        );
    }
    for way in [
        Way::args(&["-h", "127.0.0.1", "-p", "1"]),
        Way::args(&["-h", "127.0.0.1", "-p", &port_text, "-U", "outsider"]),
        Way::args(&["-h", sockets.path(), "-p", "1"]),
        Way::to("service=none"),
        Way::to("nonsense=1"),
        Way::to("postgres://%zz"),
        Way::to(format!(
            "host=127.0.0.1 port={port} user=ann target_session_attrs=standby"
        )),
        Way::default()
            .variable("PGSERVICE", "shop")
            .variable("PGSERVICEFILE", "/nowhere"),
    ] {
        assert_eq!(way.as_psql(&cluster), None, "{:?}", way.args);
    }
}

#[test]
fn passwords_come_from_where_psql_takes_them_and_are_never_shown() {
    let cluster = quiet_cluster();
    let port = cluster.port();
    cluster.exec(
        DB,
        "create role ann login password 'c4n-ary:x'; create role bob login password 'md5-c4n-ary'",
    );
    who_may(
        &cluster,
        "host all ann 127.0.0.1/32 scram-sha-256\nhost all bob 127.0.0.1/32 password",
    );
    let ann = format!("host=127.0.0.1 port={port} user=ann dbname={DB}");
    let line = format!("127.0.0.1:{port}:*:ann:c4n-ary\\:x\n");
    let elsewhere = server_file(&cluster, "passwords", &line, 0o600);
    let elsewhere = elsewhere.display().to_string();
    for way in [
        Way::to(&ann).variable("PGPASSFILE", &elsewhere),
        Way::to(format!("{ann} passfile={elsewhere}")).variable("PGPASSFILE", "/nowhere"),
        Way::to(&ann).variable("PGPASSWORD", "c4n-ary:x"),
        Way::to(format!("{ann} password=c4n-ary:x")),
        Way::to(format!("postgres://ann:c4n-ary%3Ax@127.0.0.1:{port}/{DB}")),
        Way::to(&ann).file(".pgpass", &line, 0o600),
        Way::to(&ann).file(".pgpass", "# all\n*:*:*:*:c4n-ary\\:x", 0o400),
        Way::to(format!("host=127.0.0.1 port={port} user=bob dbname={DB}")).variable("PGPASSWORD", "md5-c4n-ary"),
    ] {
        assert!(way.as_psql(&cluster).is_some(), "{:?}", way.args);
    }
    for way in [
        Way::to(&ann),
        Way::to(&ann).variable("PGPASSWORD", "wrong-c4n-ary"),
        Way::to(&ann)
            .variable("PGPASSFILE", "/nowhere")
            .file(".pgpass", &line, 0o600),
        Way::to(format!("postgres://ann:wrong-c4n-ary@127.0.0.1:{port}/{DB}")),
        Way::to(format!("{ann} password=c4n-ary nonsense")),
        Way::to(&ann).file(".pgpass", &line, 0o640),
        Way::to(&ann).file(".pgpass", format!("localhost:{port}:*:ann:c4n-ary\n"), 0o600),
        Way::to(&ann).file("elsewhere", &line, 0o600),
    ] {
        assert_eq!(way.as_psql(&cluster), None, "{:?}", way.args);
        let ran = way.ctl();
        assert!(!format!("{ran:?}").contains("c4n-ary"), "{ran:?}");
    }
    // outboxctl skips a server that it cannot reach, but not one that has refused the login.
    let trusting = quiet_cluster();
    trusting.exec(DB, "create role ann login");
    let second = trusting.port();
    let hosts = |first: u16| format!("host=127.0.0.1,127.0.0.1 port={first},{second} user=ann dbname={DB}");
    let wrong = Way::to(hosts(port)).variable("PGPASSWORD", "wrong-c4n-ary");
    assert_eq!(wrong.as_psql(&cluster), None);
    let unreachable = Way::to(hosts(1)).variable("PGPASSWORD", "wrong-c4n-ary");
    assert!(unreachable.as_psql(&cluster).is_some());
    let open = Way::to(&ann).file(".pgpass", &line, 0o644).ctl();
    assert!(open.err.contains("can be read by other users"), "{}", open.err);
    let missing = Way::to(&ann).ctl().failed(3);
    assert!(
        missing.contains("asks for a password") && missing.contains("pgpass"),
        "{missing}"
    );
}

#[test]
fn every_failure_to_connect_is_exit_code_3_and_names_the_server() {
    let refused = Ctl::bare(&["status", "-h", "127.0.0.1", "-p", "1"]).run().failed(3);
    assert!(refused.contains("127.0.0.1, port 1"), "{refused}");
    let as_json = Ctl::bare(&["status", "--json", "-h", "127.0.0.1", "-p", "1"])
        .run()
        .failed(3);
    let document: Value = serde_json::from_str(&as_json).expect("JSON on standard error");
    assert_eq!(document["exit_code"], 3);
    let cluster = quiet_cluster();
    let unknown = Ctl::bare(&["status", "-d", &cluster.conn_string("nowhere")])
        .run()
        .failed(3);
    assert!(unknown.contains("nowhere"), "{unknown}");
}

#[test]
fn connect_timeout_ends_an_attempt_with_a_silent_server_and_the_next_host_is_tried() {
    let cluster = quiet_cluster();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (silent, port) = (silent.local_addr().expect("an address").port(), cluster.port());
    for mode in ["disable", "prefer"] {
        let at = |hosts: &str, ports: String| {
            Way::to(format!(
                "host={hosts} port={ports} user=postgres dbname={DB} connect_timeout=2 sslmode={mode}"
            ))
        };
        let silent_first = at("127.0.0.1,127.0.0.1", format!("{silent},{port}"));
        assert!(silent_first.as_psql(&cluster).is_some(), "{mode}");
        let failure = at("127.0.0.1", silent.to_string()).ctl().failed(3);
        assert!(
            failure.contains("no session within 2 s") && failure.contains("connect_timeout"),
            "{failure}"
        );
    }
}

#[test]
fn connect_timeout_is_per_address_of_a_host() {
    if !process::we_are_root() {
        return skip("a host with two addresses", "only root may mount another /etc/hosts");
    }
    let cluster = quiet_cluster();
    let port = cluster.port();
    // Both addresses with one port: the first is silent.
    let _silent = TcpListener::bind(("127.0.0.2", port)).expect("the address beside the server's");
    let hosts = server_file(&cluster, "hosts", "127.0.0.2 twice\n127.0.0.1 twice\n", 0o644);
    let script = format!("mount --bind {} /etc/hosts && exec \"$@\"", hosts.display());
    let to = format!("host=twice port={port} user=postgres dbname={DB} connect_timeout=2");
    let program = outboxctl().display().to_string();
    let args = [
        "--mount", "sh", "-c", &script, "sh", &program, "version", "--json", "-d", &to,
    ];
    let version = Ctl::of("unshare".into(), &args).run().json();
    assert_eq!(version["server_addr"], "127.0.0.1");
}

#[test]
fn invalid_arguments_are_exit_code_2() {
    let cluster = quiet_cluster();
    for args in [
        &["nonsense"][..],
        &["show"],
        &["show", "seven"],
        &["list", "--limit", "0"],
        &["list", "--status", "lost"],
        &["list", "--partition", "p2000"],
        &["list", "--since", "the day before yesterday"],
        &["retry", "7", "--key", "k"],
        &["relay", "--limit", "0"],
        &["status", "-w", "-W"],
    ] {
        let failure = Ctl::new(&cluster, args).run().failed(2);
        assert!(
            failure.contains("error") || failure.contains("outboxctl: "),
            "{args:?}: {failure}"
        );
    }
    Ctl::bare(&["status", "-d", "sslmode=maybe"]).run().failed(2);
}

#[test]
fn a_missing_extension_or_one_of_another_version_is_exit_code_4() {
    let cluster = quiet_cluster();
    cluster.exec(DB, "create database bare");
    let bare = Ctl::bare(&["status", "-d", &cluster.conn_string("bare")])
        .run()
        .failed(4);
    assert!(bare.contains("CREATE EXTENSION"), "{bare}");
    // Only `version` has something to report there.
    let version = Ctl::bare(&["version", "--json", "-d", &cluster.conn_string("bare")])
        .run()
        .json();
    assert_eq!(version["extension"], Value::Null);
    cluster.exec(
        DB,
        "update pg_extension set extversion = '99.0' where extname = 'outbox'",
    );
    let other = Ctl::new(&cluster, &["list"]).run().failed(4);
    assert!(other.contains("99.0"), "{other}");
}

#[test]
fn the_extension_is_found_in_whatever_schema_it_was_created() {
    let cluster = Cluster::builder().conf("outbox.workers = 0").start();
    cluster.exec(
        DB,
        r#"create schema "Strange Schema"; create extension outbox schema "Strange Schema";
           create schema front; create function front.outbox_retry(bigint, text, text) returns boolean language sql as 'select true';
           alter role postgres set search_path = front;
           create function "Strange Schema".outbox_retry(text, text, text) returns boolean language sql as 'select 1 / 0 = 1';
           create function "Strange Schema".outbox_discard(text, text, text) returns boolean language sql as 'select 1 / 0 = 1';
           create function "Strange Schema".outbox_partition_label(smallint) returns text language sql as $$ select 'p' || 1 / 0 $$"#,
    );
    cluster.exec(DB, r#"select "Strange Schema".outbox_publish('T', '{}', 'order', '1')"#);
    let version = Ctl::new(&cluster, &["version", "--json"]).run().json();
    assert_eq!(version["schema"], "Strange Schema");
    assert_eq!(Ctl::new(&cluster, &["list", "--json"]).run().json_lines().len(), 1);
    Ctl::new(&cluster, &["show", "1"]).run().well();
    Ctl::new(&cluster, &["status"]).run().well();
    Ctl::new(&cluster, &["retry", "1", "--yes"]).run().well();
    Ctl::new(&cluster, &["discard", "1", "--yes"]).run().well();
    let discarded = r#"select count(*) from "Strange Schema".outbox_history where discarded"#;
    assert_eq!(cluster.query_one::<i64>(DB, discarded), 1);
}

#[test]
fn a_session_sets_its_application_name() {
    let cluster = quiet_cluster();
    cluster.exec(DB, "select outbox_publish('T', '{}')");
    Ctl::new(&cluster, &["discard", "1", "--yes"]).run().well();
    Ctl::new(&cluster, &["discard", "1", "--yes"]).run().failed(1);
    let name = "select application_name from outbox_audit";
    assert_eq!(cluster.query_one::<String>(DB, name), "outboxctl");
}

/// A command that waits for a lock of another session, and that session.
fn waiting(cluster: &Cluster) -> (postgres::Client, std::process::Child) {
    let mut holder = cluster.connect(DB);
    holder.run("begin; lock table outbox_dead");
    let child = Ctl::new(cluster, &["list", "--status", "dead"]).start();
    wait_true(
        cluster,
        "outboxctl to wait for the lock",
        "select exists (select from pg_stat_activity where application_name = 'outboxctl' and wait_event_type = 'Lock')",
    );
    (holder, child)
}

#[test]
fn ctrl_c_cancels_the_statement_in_the_server() {
    let cluster = quiet_cluster();
    let (_holder, child) = waiting(&cluster);
    process::signal(child.id(), libc::SIGINT);
    let failure = Ran::of(child.wait_with_output().expect("its end")).failed(5);
    assert!(
        failure.contains("canceling statement due to user request") && !failure.contains("HINT"),
        "{failure}"
    );
    let sessions = "select not exists (select from pg_stat_activity where application_name = 'outboxctl')";
    wait_true(&cluster, "the session to be gone while the lock is held", sessions);
}

#[test]
fn a_timeout_that_the_user_sets_applies_and_its_error_names_the_fix() {
    let cluster = quiet_cluster();
    let mut holder = cluster.connect(DB);
    holder.run("begin; lock table outbox_dead");
    let limited = Ctl::new(&cluster, &["list", "--status", "dead"]).env("PGOPTIONS", "-c statement_timeout=300ms");
    let failure = limited.run().failed(5);
    assert!(
        failure.contains("statement timeout") && failure.contains("HINT: A query is canceled after"),
        "{failure}"
    );
}

#[test]
fn a_connection_that_is_lost_is_exit_code_3() {
    let cluster = quiet_cluster();
    let (_holder, child) = waiting(&cluster);
    cluster.exec(
        DB,
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'outboxctl'",
    );
    let failure = Ran::of(child.wait_with_output().expect("its end")).failed(3);
    assert!(failure.contains("terminating connection"), "{failure}");
}

#[test]
fn a_lock_of_another_session_is_waited_for_a_limited_time() {
    let cluster = quiet_cluster();
    let (_holder, child) = waiting(&cluster);
    let failure = Ran::of(child.wait_with_output().expect("its end")).failed(5);
    assert!(
        failure.contains("lock timeout") && failure.contains("HINT: Another session"),
        "{failure}"
    );
}

#[test]
fn a_command_ends_its_session_and_leaves_no_line_in_the_log_of_the_server() {
    let cluster = quiet_cluster();
    let from = cluster.log_offset();
    for _ in 0..20 {
        Ctl::new(&cluster, &["version"]).run().well();
    }
    let log = cluster.log()[from..].to_owned();
    for lost in [
        "connection to client lost",
        "could not send data",
        "could not receive data",
    ] {
        assert!(!log.contains(lost), "{log}");
    }
}
