//! A private Postgres that a test may stop, crash and configure. Called by tests and the demo.
//!
//! The server starts as a child of the test process, not through pg_ctl. The server of pg_ctl is an orphan: a test can
//! neither reap it nor bind it to its own death. Otherwise this module does what pg_ctl does: the same signals, the
//! same status line in postmaster.pid.

use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use postgres::types::FromSqlOwned;
use postgres::{Client, NoTls};

use crate::install::Installation;
use crate::network::Host;
use crate::port::free_port;
use crate::session::Session as _;
use crate::wait::{LONG, wait_for, wait_until};
use crate::workdir::{ServerDir, last_lines};
use crate::{process, template};

/// How to stop the server; the names are those of `pg_ctl stop -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// Waits for the clients to disconnect.
    Smart,
    /// Ends the sessions and writes a checkpoint.
    Fast,
    /// Ends all processes without a checkpoint; the next start recovers from the WAL.
    Immediate,
}

impl StopMode {
    fn signal(self) -> i32 {
        match self {
            Self::Smart => libc::SIGTERM,
            Self::Fast => libc::SIGINT,
            Self::Immediate => libc::SIGQUIT,
        }
    }
}

const READ_BY_CREATE_EXTENSION: [&str; 3] = ["outbox.partition_count", "outbox.leasing", "outbox.worker_role"];

/// The configuration of a cluster before its first start.
pub struct ClusterBuilder {
    installation: Installation,
    settings: Vec<String>,
    preload: bool,
    extension: bool,
    variables: Vec<(String, PathBuf)>,
    host: Option<Host>,
}

impl ClusterBuilder {
    /// Adds a line to postgresql.conf. The last line of a setting wins, also over a line that the builder itself
    /// writes.
    pub fn conf(mut self, line: &str) -> Self {
        self.settings.push(line.to_owned());
        self
    }

    /// Whether the extension is in shared_preload_libraries (default: yes).
    pub fn preload(mut self, preload: bool) -> Self {
        self.preload = preload;
        self
    }

    /// Another Postgres than that of the environment.
    pub fn installation(mut self, installation: Installation) -> Self {
        self.installation = installation;
        self
    }

    /// Adds a variable to the environment of the server.
    pub fn variable(mut self, name: &str, value: &Path) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the server on a host of the test's network. It takes connections of the other hosts.
    pub fn on(mut self, host: &Host) -> Self {
        self.host = Some(host.clone());
        self
    }

    /// With the extension in the database postgres.
    pub fn extension(mut self) -> Self {
        self.extension = true;
        self
    }

    pub fn start(self) -> Cluster {
        // The template with the extension was made with the default settings.
        let reads = |line: &String| READ_BY_CREATE_EXTENSION.iter().any(|name| line.starts_with(name));
        let creates = self.extension && self.settings.iter().any(reads);
        let template = template::template(&self.installation, self.extension && !creates);
        let cluster = self.start_from(&template);
        if creates {
            cluster.exec("postgres", "create extension outbox");
        }
        cluster
    }

    pub(crate) fn start_from(self, template: &Path) -> Cluster {
        let cluster = Cluster::new(
            self.installation.clone(),
            "cluster",
            self.host.clone(),
            self.variables.clone(),
        );
        template::copy(template, &cluster.data_dir());
        append(&cluster.config_file(), &cluster.listen());
        append(&cluster.config_file(), &self.config());
        if cluster.host.is_some() {
            // The template accepts connections of loopback only.
            let network = "host all all 10.77.0.0/24 trust\nhost replication all 10.77.0.0/24 trust\n";
            append(&cluster.data_dir().join("pg_hba.conf"), network);
        }
        cluster.start_again();
        cluster
    }

    fn config(&self) -> String {
        let mut config = String::new();
        let mut line = |text: &str| writeln!(config, "{text}").expect("write to a string");
        // The path of a socket is limited to 107 bytes, and a work directory may be deeper.
        line("unix_socket_directories = ''");
        // The default puts segments in /dev/shm, where a killed server leaves them.
        line("dynamic_shared_memory_type = mmap");
        line("max_worker_processes = 16");
        line("log_line_prefix = '%m [%p] %b '");
        // initdb derives it from the size of a segment.
        line("max_wal_size = 1GB");
        // A standby may connect when two checkpoints, each of a copy of the server, have come after its segment of 1
        // MB.
        line("wal_keep_size = 64MB");
        // No test cuts the power; what a killed process has written stays.
        line("fsync = off");
        if self.preload {
            line("shared_preload_libraries = 'outbox'");
        }
        self.settings.iter().for_each(|setting| line(setting));
        config
    }
}

/// A private Postgres. Dropping it stops the server and removes its files.
pub struct Cluster {
    installation: Installation,
    dir: ServerDir,
    host: Option<Host>,
    port: u16,
    variables: Vec<(String, PathBuf)>,
    server: Mutex<Option<Child>>,
}

impl Cluster {
    pub fn builder() -> ClusterBuilder {
        ClusterBuilder {
            installation: Installation::from_env(),
            settings: Vec::new(),
            preload: true,
            extension: false,
            variables: Vec::new(),
            host: None,
        }
    }

    fn new(installation: Installation, kind: &str, host: Option<Host>, variables: Vec<(String, PathBuf)>) -> Self {
        Self {
            installation,
            dir: ServerDir::create(kind),
            port: if host.is_some() { 5432 } else { free_port() },
            host,
            variables,
            server: Mutex::new(None),
        }
    }

    /// Lines of postgresql.conf: where the server takes connections.
    fn listen(&self) -> String {
        let address = self.host.as_ref().map(|host| format!(",{}", host.address()));
        format!(
            "listen_addresses = '127.0.0.1{}'\nport = {}\n",
            address.unwrap_or_default(),
            self.port
        )
    }

    /// Makes and starts a physical copy of this running server, with further lines of postgresql.conf. The copy is a
    /// standby that follows this server, or an independent server.
    pub fn copy(&self, standby: bool, conf: &[&str]) -> Self {
        self.copy_to(None, standby, conf)
    }

    /// Makes and starts a copy like [`Cluster::copy`], on a host of the test's network.
    pub fn copy_on(&self, host: &Host, standby: bool, conf: &[&str]) -> Self {
        self.copy_to(Some(host.clone()), standby, conf)
    }

    fn copy_to(&self, host: Option<Host>, standby: bool, conf: &[&str]) -> Self {
        let copy = Self::new(self.installation.clone(), "copy", host, self.variables.clone());
        copy.on_host(|| {
            template::copy_server(
                &copy.installation,
                &copy.data_dir(),
                &self.conn_string("postgres"),
                standby,
            );
        });
        append(&copy.config_file(), &copy.listen());
        for line in conf {
            append(&copy.config_file(), &format!("{line}\n"));
        }
        copy.start_again();
        copy
    }

    pub fn installation(&self) -> &Installation {
        &self.installation
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn config_file(&self) -> PathBuf {
        self.data_dir().join("postgresql.conf")
    }

    fn on_host<T>(&self, action: impl FnOnce() -> T) -> T {
        match &self.host {
            Some(host) => host.enter(action),
            None => action(),
        }
    }

    // ------------------------------------------------------------------------------------------------------------ SQL

    /// A connection string for the superuser, in the key=value form that libpq and the Rust clients share.
    pub fn conn_string(&self, db: &str) -> String {
        let address = self.host.as_ref().map_or(Ipv4Addr::LOCALHOST, Host::address);
        format!("host={address} port={} user=postgres dbname={db}", self.port)
    }

    /// A connection as the superuser. It begins on the host of the server, so it works if other hosts cannot reach
    /// that.
    pub fn connect(&self, db: &str) -> Client {
        self.try_connect(db)
            .unwrap_or_else(|error| panic!("connect to database {db}: {error:#?}"))
    }

    pub fn try_connect(&self, db: &str) -> Result<Client, postgres::Error> {
        self.on_host(|| Client::connect(&self.conn_string(db), NoTls))
    }

    /// Runs statements on a new connection and closes it, since an open connection blocks DROP DATABASE.
    pub fn exec(&self, db: &str, sql: &str) {
        self.connect(db).run(sql);
    }

    /// The single value of the single row that `sql` returns. Runs on a new connection.
    pub fn query_one<T: FromSqlOwned>(&self, db: &str, sql: &str) -> T {
        self.connect(db).value(sql)
    }

    /// Draws the seqs up to this one: they may be enqueued without an event.
    pub fn draw_seqs(&self, highest: i64) {
        let sql = "select setval(pg_get_serial_sequence('outbox_events', 'seq'), $1)";
        self.connect(crate::DB).query(sql, &[&highest]).expect(sql);
    }

    // ------------------------------------------------------------------------------------------------- start and stop

    /// Starts the stopped server on the same port and data, and waits until it takes connections.
    pub fn start_again(&self) {
        let mut server = self.server();
        assert!(server.is_none(), "the server runs already");
        let log = self.dir.open_log();
        let mut postgres = Command::new(self.installation.bin("postgres"));
        postgres
            .arg("-D")
            .arg(self.data_dir())
            .current_dir(self.data_dir())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("share the log"))
            .stderr(log);
        // pgrx puts a backtrace into the DETAIL of errors when it finds these; the extension must not let it.
        postgres.env("RUST_BACKTRACE", "full").env("RUST_LIB_BACKTRACE", "full");
        // Variables such as PGPORT would override the configuration.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
            postgres.env_remove(name);
        }
        postgres.envs(self.variables.iter().map(|(name, value)| (name, value)));
        process::run_as(&mut postgres, process::postgres_account());
        // The server must end with the test process, even if a worker does not react to the other stop modes.
        let child = self.on_host(|| process::spawn_bound(postgres, StopMode::Immediate.signal()));
        let child = server.insert(child.unwrap_or_else(|error| panic!("start postgres: {error}")));
        let pid = child.id().to_string();
        let started = wait_for("Postgres to take connections", LONG, || {
            if let Some(status) = child.try_wait().expect("wait for a child process") {
                return Some(Err(status));
            }
            // Line 1 is the pid, line 8 the status; a file left by a crash has another pid. See pg_ctl.c.
            let text = fs::read_to_string(self.data_dir().join("postmaster.pid")).ok()?;
            let lines: Vec<&str> = text.lines().map(str::trim).collect();
            (lines.first() == Some(&pid.as_str()) && lines.get(7) == Some(&"ready")).then_some(Ok(()))
        });
        if let Err(status) = started {
            *server = None;
            panic!("Postgres did not start: {status}\n{}", last_lines(&self.log(), 20));
        }
    }

    /// Stops the server. Panics if it does not end.
    pub fn stop(&self, mode: StopMode) {
        let mut server = self.server();
        let child = server.as_mut().expect("the server runs");
        process::signal(child.id(), mode.signal());
        if process::reap(child, LONG).is_none() {
            panic!("{mode:?} stop of Postgres\n{}", last_lines(&self.log(), 20));
        }
        *server = None;
    }

    /// Stops the server with mode "fast" and starts it again.
    pub fn restart(&self) {
        self.stop(StopMode::Fast);
        self.start_again();
    }

    /// Kills only the postmaster, and waits until its children have noticed and ended by themselves.
    pub fn kill_postmaster(&self) {
        let mut server = self.server();
        let mut child = server.take().expect("the server runs");
        // Otherwise the postmaster could start a child after the list is read. This function would not wait for that
        // child, and the child would keep the next postmaster from starting.
        process::suspend(child.id());
        let children = process::children_of(child.id());
        process::kill(&mut child);
        process::wait_until_ended("the children of a killed postmaster to end", &children, LONG);
    }

    /// The postmaster's process id.
    pub fn pid(&self) -> u32 {
        self.server().as_ref().expect("the server runs").id()
    }

    fn server(&self) -> MutexGuard<'_, Option<Child>> {
        self.server.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    // ------------------------------------------------------------------------------------------------------- settings

    /// Makes the server read its configuration, and waits until the postmaster has read it. Other running processes
    /// read it at their next check.
    pub fn reload(&self) {
        const LOADED_AT: &str = "select extract(epoch from pg_conf_load_time())::float8";
        let before: f64 = self.query_one("postgres", LOADED_AT);
        process::signal(self.pid(), libc::SIGHUP);
        // Every connection is a new process, which inherits the postmaster's time of loading.
        wait_until("the postmaster to reload", LONG, || {
            self.query_one::<f64>("postgres", LOADED_AT) != before
        });
    }

    /// Writes a setting to postgresql.conf, which the server reads at a reload.
    pub fn write_conf(&self, key: &str, value: &str) {
        append(
            &self.config_file(),
            &format!("{key} = '{}'\n", value.replace('\'', "''")),
        );
    }

    /// Writes a setting to postgresql.conf, and reloads if the server runs.
    pub fn set_conf(&self, key: &str, value: &str) {
        self.write_conf(key, value);
        let runs = self.server().is_some();
        if runs {
            self.reload();
        }
    }

    // ------------------------------------------------------------------------------------------------------------ log

    /// The log of the server so far.
    pub fn log(&self) -> String {
        self.dir.log()
    }

    /// The length of the log now, in bytes. Read it before an action, and search from there for the lines of the
    /// action.
    pub fn log_offset(&self) -> usize {
        fs::read(self.dir.log_file()).unwrap_or_default().len()
    }

    /// Waits for a line that contains `text` after `from_offset`, and returns that line.
    pub fn wait_for_log(&self, text: &str, from_offset: usize) -> String {
        wait_for(&format!("{text:?} in the log of Postgres"), LONG, || {
            let log = fs::read(self.dir.log_file()).unwrap_or_default();
            let recent = String::from_utf8_lossy(log.get(from_offset..)?);
            recent.lines().find(|line| line.contains(text)).map(str::to_owned)
        })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(mut child) = self.server().take() {
            let children = process::children_of(child.id());
            process::signal(child.id(), StopMode::Immediate.signal());
            // The postmaster itself kills children that do not react within 5 s.
            if process::reap(&mut child, Duration::from_secs(20)).is_none() {
                process::kill(&mut child);
                children.into_iter().for_each(|pid| process::signal(pid, libc::SIGKILL));
            }
        }
        remove_shared_memory(&self.data_dir());
        self.dir.finish();
    }
}

/// Removes the System V segment that a killed postmaster leaves behind. The next start on the data directory would
/// reuse it, but a dropped cluster has no next start. Line 7 of postmaster.pid holds the key and id of the segment;
/// only a crash leaves that file.
fn remove_shared_memory(data_dir: &Path) {
    let Ok(text) = fs::read_to_string(data_dir.join("postmaster.pid")) else {
        return;
    };
    let id = text
        .lines()
        .nth(6)
        .and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    if let Some(id) = id {
        // SAFETY: IPC_RMID takes no buffer, and a wrong id is an error that leaves nothing to do.
        unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
    }
}

fn append(file: &Path, text: &str) {
    use std::io::Write as _;
    let opened = fs::File::options().append(true).open(file);
    opened
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .unwrap_or_else(|error| panic!("{file:?}: {error}"));
}
