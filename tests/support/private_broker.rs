//! A private RabbitMQ: start, stop, crash, suspend, alarm. Called by tests that disturb a broker, by run-tests, and
//! by [`Broker::shared`].
//!
//! The broker is a plain process of the user that runs the tests. This module calls its launcher without the
//! distribution's wrapper, which would switch the user. It sets the launcher to the systemd mode, in which the launcher
//! becomes the Erlang VM instead of its parent: the child process is then the broker itself. The port mapper of Erlang
//! (epmd) would start as a daemon that outlives the broker, so this module starts it as a child too.
//!
//! Brokers on hosts of a network have the usual ports, and can form a cluster.

use std::ffi::{OsStr, OsString};
use std::fs::Permissions;
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::broker::Broker;
use crate::certificate::Certificate;
use crate::network::Host;
use crate::port::free_port;
use crate::wait::{LONG, wait_for, wait_until};
use crate::workdir::{ServerDir, last_lines};
use crate::{amqp, process};

/// The default of RabbitMQ 4, in bytes. Older versions take 128 MiB.
const MAX_MESSAGE_SIZE: u32 = 16 << 20;

/// The share of the machine that a broker may use.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Threads that run Erlang code. None leaves the number to Erlang: one for each core.
    pub schedulers: Option<u16>,
    /// Above this memory limit the broker blocks publishers. In RabbitMQ's notation, such as "2GB".
    pub memory_limit: &'static str,
}

impl Size {
    /// The size of a broker that many tests share. Their queues and large messages together may not raise its memory
    /// alarm: a blocked broker confirms nothing, so a worker that ends meanwhile sends its messages again.
    pub const SHARED: Self = Self {
        schedulers: Some(1),
        memory_limit: "4GB",
    };
}

impl Default for Size {
    fn default() -> Self {
        Self {
            // The tests measure Postgres on the same machine.
            schedulers: Some(1),
            // Above the memory of a broker without load (about 130 MB), and low enough to run several brokers.
            memory_limit: "512MB",
        }
    }
}

/// The TLS configuration of a broker.
#[derive(Clone, Copy)]
pub(crate) struct TlsListener<'a> {
    pub certificate: &'a Certificate,
    pub clients_of: Option<&'a str>,
}

#[derive(Clone, Copy)]
struct Ports {
    amqp: u16,
    tls: u16,
    epmd: u16,
    distribution: u16,
}

impl Ports {
    /// The usual ports. Erlang looks for the epmd of other hosts at the port of the local one.
    const OF_A_HOST: Self = Self {
        amqp: 5672,
        tls: 5671,
        epmd: 4369,
        distribution: 25672,
    };

    fn of_loopback() -> Self {
        Self {
            amqp: free_port(),
            tls: free_port(),
            epmd: free_port(),
            distribution: free_port(),
        }
    }
}

/// A RabbitMQ that its owner may stop and disturb. Dropping it ends the broker and removes its files, or leaves a
/// broker that is as it was at its start to the next test: to start one takes seconds.
pub struct PrivateBroker {
    node: Option<Node>,
}

/// Brokers that tests have left in their first state, apart from queues and exchanges, which have names of their own.
static LEFT: Mutex<Vec<Node>> = Mutex::new(Vec::new());

impl Deref for PrivateBroker {
    type Target = Node;

    fn deref(&self) -> &Node {
        self.node.as_ref().expect("it is taken only by drop")
    }
}

impl Drop for PrivateBroker {
    fn drop(&mut self) {
        let node = self.node.take().expect("dropped once");
        match node.can_be_left() {
            true => lock(&LEFT).push(node),
            false => drop(node),
        }
    }
}

/// A running or stopped broker with its files. Dropping it ends the broker and removes its files.
pub struct Node {
    broker: Broker,
    host: Option<Host>,
    size: Size,
    dir: ServerDir,
    ports: Ports,
    epmd: Mutex<Child>,
    server: Mutex<Option<Child>>,
    /// Whether it has accepted commands of rabbitmqctl since its start.
    takes_commands: AtomicBool,
    /// Whether it differs from a broker that has just started.
    is_changed: AtomicBool,
}

/// Everything that a test can do with a shared broker, it can do with a private one.
impl Deref for Node {
    type Target = Broker;

    fn deref(&self) -> &Broker {
        &self.broker
    }
}

impl PrivateBroker {
    /// Starts a broker of the default size on loopback, or takes one that another test has left.
    pub(crate) fn start() -> Self {
        let left = lock(&LEFT).pop();
        let node = left.unwrap_or_else(|| Node::start_at(None, Size::default(), None, &[]));
        Self { node: Some(node) }
    }

    /// Starts a broker on loopback.
    pub(crate) fn start_with(size: Size, tls: Option<TlsListener<'_>>) -> Self {
        let node = Node::start_at(None, size, tls, &[]);
        node.is_changed.store(true, Ordering::Release);
        Self { node: Some(node) }
    }

    /// Starts a broker on a host, with further lines of rabbitmq.conf.
    pub(crate) fn start_on(host: &Host, conf: &[&str]) -> Self {
        // The broker accepts the default user from loopback only.
        let conf = [&["loopback_users = none"], conf].concat();
        let node = Node::start_at(Some(host.clone()), Size::default(), None, &conf);
        Self { node: Some(node) }
    }

    /// The broker behind [`Broker::shared`]. Rust does not drop statics, so an exit handler of libc ends the brokers.
    pub(crate) fn of_this_process() -> &'static Broker {
        static BROKER: OnceLock<PrivateBroker> = OnceLock::new();
        extern "C" fn end() {
            if let Some(broker) = BROKER.get() {
                broker.end();
            }
        }
        BROKER.get_or_init(|| {
            let broker = Self::start_with(Size::SHARED, None);
            // SAFETY: the handler is a plain function that stays valid, takes nothing and does not unwind.
            unsafe { libc::atexit(end) };
            broker
        })
    }
}

impl Node {
    fn can_be_left(&self) -> bool {
        let is_plain = !std::thread::panicking() && self.host.is_none() && !self.is_changed.load(Ordering::Acquire);
        if is_plain && let Some(child) = &*self.server() {
            process::signal(child.id(), libc::SIGCONT); // a test may have suspended it
            return true;
        }
        false
    }

    fn start_at(host: Option<Host>, size: Size, tls: Option<TlsListener<'_>>, conf: &[&str]) -> Self {
        let memory_limit = size.memory_limit;
        let dir = ServerDir::create("broker");
        let (address, ports) = match &host {
            Some(host) => (host.address(), Ports::OF_A_HOST),
            None => (Ipv4Addr::LOCALHOST, Ports::of_loopback()),
        };
        let mut config = format!(
            "listeners.tcp.1 = {address}:{}\n\
             log.console = false\n\
             vm_memory_high_watermark.absolute = {memory_limit}\n\
             max_message_size = {MAX_MESSAGE_SIZE}\n\
             disk_free_limit.absolute = 50MB\n",
            ports.amqp
        );
        conf.iter().for_each(|line| config += &format!("{line}\n"));
        let mut plugins = "[].\n";
        if let Some(tls) = tls {
            write_certificate(&dir, tls.certificate);
            config += &tls_config(&dir, ports.tls, tls.clients_of);
            plugins = "[rabbitmq_auth_mechanism_ssl].\n";
        }
        std::fs::write(dir.path().join("rabbitmq.conf"), config).expect("write the broker's configuration");
        std::fs::write(dir.path().join("enabled_plugins"), plugins).expect("write the broker's plugins");
        if host.is_some() {
            write_cookie(&dir);
        }
        let mut epmd = Command::new(erlang_program("epmd"));
        epmd.args(["-address", &address.to_string(), "-port", &ports.epmd.to_string()]);
        epmd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let epmd = enter(host.as_ref(), || process::spawn_bound(epmd, libc::SIGKILL))
            .unwrap_or_else(|error| panic!("start epmd of Erlang: {error}; is RabbitMQ installed?"));
        let broker = Self {
            broker: Broker::at(address, ports.amqp),
            host,
            size,
            dir,
            ports,
            epmd: Mutex::new(epmd),
            server: Mutex::new(None),
            takes_commands: AtomicBool::new(false),
            is_changed: AtomicBool::new(false),
        };
        broker.start_again();
        broker
    }

    /// Starts the stopped broker on the same port and data, and waits until clients can log in.
    pub fn start_again(&self) {
        enter(self.host.as_ref(), || self.start_here());
    }

    fn start_here(&self) {
        let mut server = self.server();
        assert!(server.is_none(), "the broker runs already");
        self.takes_commands.store(false, Ordering::Release);
        let log = self.dir.open_log();
        let mut launcher = self.program("rabbitmq-server");
        launcher
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("share the log"))
            .stderr(log);
        let child = process::spawn_bound(launcher, libc::SIGKILL);
        let child = server.insert(child.unwrap_or_else(|error| panic!("start RabbitMQ: {error}")));
        let started = wait_for("RabbitMQ to take connections", LONG, || {
            if let Some(status) = child.try_wait().expect("wait for a child process") {
                return Some(Err(status));
            }
            let login = async {
                let login = tokio::time::timeout(Duration::from_secs(5), amqp::connect(self.broker.address())).await;
                login.ok()?.ok()?.close().await.ok()
            };
            amqp::runtime().block_on(login).map(Ok)
        });
        if let Err(status) = started {
            *server = None;
            panic!("RabbitMQ did not start: {status}\n{}", last_lines(&self.dir.log(), 20));
        }
    }

    /// The AMQPS URL of a broker that was started with TLS. Without user and password, as [`Broker::url`].
    pub fn tls_url(&self) -> String {
        format!("amqps://127.0.0.1:{}", self.ports.tls)
    }

    pub fn tls_port(&self) -> u16 {
        self.ports.tls
    }

    /// Sets the certificate that the broker presents from its next start on.
    pub fn set_certificate(&self, certificate: &Certificate) {
        write_certificate(&self.dir, certificate);
    }

    /// Stops the broker cleanly, as an operator does.
    pub fn stop(&self) {
        self.end_by(libc::SIGTERM);
    }

    /// Kills the broker: a crash.
    pub fn kill(&self) {
        self.end_by(libc::SIGKILL);
    }

    fn end_by(&self, signal: i32) {
        let mut server = self.server();
        let child = server.as_mut().expect("the broker runs");
        process::signal(child.id(), signal);
        assert!(process::reap(child, LONG).is_some(), "RabbitMQ does not end");
        *server = None;
    }

    /// Suspends the broker: it answers nothing, while the kernel still accepts connections and bytes for it.
    pub fn suspend(&self) {
        process::signal(self.pid(), libc::SIGSTOP);
    }

    pub fn resume(&self) {
        process::signal(self.pid(), libc::SIGCONT);
    }

    /// The process id of the Erlang machine.
    pub fn pid(&self) -> u32 {
        self.server().as_ref().expect("the broker runs").id()
    }

    /// Waits until the broker accepts commands of rabbitmqctl, which is a moment after it accepts logins.
    fn await_commands(&self) {
        if self.takes_commands.load(Ordering::Acquire) {
            return;
        }
        wait_until("the broker to accept commands", LONG, || {
            let mut ask = self.program("rabbitmqctl");
            let asked = enter(self.host.as_ref(), || ask.args(["--quiet", "await_startup"]).output());
            asked.is_ok_and(|asked| asked.status.success())
        });
        self.takes_commands.store(true, Ordering::Release);
    }

    /// Adds a user with all rights in the default virtual host.
    pub fn add_user(&self, name: &str, password: &str) {
        self.ctl(&["add_user", name, password]);
        self.ctl(&["set_permissions", name, ".*", ".*", ".*"]);
    }

    /// Switches the memory alarm. While it is on, the broker blocks every connection that publishes.
    pub fn set_memory_alarm(&self, on: bool) {
        let was_changed = self.is_changed.load(Ordering::Acquire);
        match on {
            // RabbitMQ documents that 0 blocks all publishing.
            true => self.ctl(&["set_vm_memory_high_watermark", "0"]),
            false => self.ctl(&["set_vm_memory_high_watermark", "absolute", self.size.memory_limit]),
        };
        self.is_changed.store(on || was_changed, Ordering::Release);
    }

    /// Sets the limit of the body of a message, for connections from now on.
    pub fn set_max_message_size(&self, bytes: u32) {
        // RabbitMQ 4 reads it from a persistent term, older versions from the environment of the application.
        self.ctl(&[
            "eval",
            &format!(
                "application:set_env(rabbit, max_message_size, {bytes}), persistent_term:put(max_message_size, {bytes})."
            ),
        ]);
    }

    /// Suspends a classic queue: it takes messages and confirms none, like a quorum queue that lost its quorum. The
    /// broker and its other queues work on.
    pub fn stop_confirming(&self, queue: &str) {
        self.sys_call(queue, "suspend");
    }

    pub fn confirm_again(&self, queue: &str) {
        self.sys_call(queue, "resume");
    }

    fn sys_call(&self, queue: &str, what: &str) {
        self.ctl(&[
            "eval",
            &format!(
                "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>)),
                 ok = sys:{what}(amqqueue:get_pid(Q))."
            ),
        ]);
    }

    /// Runs rabbitmqctl (about 0.3 s) and returns what it printed.
    pub fn ctl(&self, args: &[&str]) -> String {
        self.run("rabbitmqctl", args)
    }

    /// Runs a program of RabbitMQ, such as rabbitmq-plugins, and returns what it printed.
    pub fn run(&self, program: &str, args: &[&str]) -> String {
        self.is_changed.store(true, Ordering::Release);
        self.await_commands();
        let mut command = self.program(program);
        let output = enter(self.host.as_ref(), || command.arg("--quiet").args(args).output());
        let output = output.unwrap_or_else(|error| panic!("run {program}: {error}"));
        let output_text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        // Without the arguments: one may be a password.
        assert!(
            output.status.success(),
            "{program} {}: {}\n{output_text}",
            args[0],
            output.status
        );
        output_text
    }

    /// Writes a script that works like rabbitmqctl on this broker, for use in another process. Returns its path.
    pub fn ctl_script(&self) -> PathBuf {
        self.script("ctl", "rabbitmqctl --quiet")
    }

    /// Types a command at a shell on the host of the broker, and returns what it printed.
    pub fn shell(&self, command: &str) -> String {
        let typed = command.replace("rabbitmqctl", &self.ctl_script().to_string_lossy());
        let output = Command::new("sh").args(["-c", &typed]).output().expect("sh");
        assert!(output.status.success(), "{command}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// A script like rabbitmq-plugins. When it enables the management plugin, that listens on the returned port.
    pub fn plugins_script(&self) -> (PathBuf, u16) {
        let port = free_port();
        self.ctl(&[
            "eval",
            &format!(
                "application:load(rabbitmq_management),
                 application:set_env(rabbitmq_management, tcp_config, [{{port, {port}}}, {{ip, \"127.0.0.1\"}}])."
            ),
        ]);
        (self.script("plugins", "rabbitmq-plugins"), port)
    }

    fn script(&self, name: &str, command_line: &str) -> PathBuf {
        self.is_changed.store(true, Ordering::Release);
        self.await_commands();
        let (program, arguments) = command_line.split_once(' ').unwrap_or((command_line, ""));
        let command = self.program(program);
        let quoted = |text: &OsStr| format!("'{}'", text.to_string_lossy().replace('\'', r"'\''"));
        let settings: Vec<String> = command
            .get_envs()
            .filter_map(|(name, value)| Some(format!("{}={}", name.to_string_lossy(), quoted(value?))))
            .collect();
        let text = format!(
            "#!/bin/sh\nexec env {} {} {arguments} \"$@\"\n",
            settings.join(" "),
            quoted(command.get_program())
        );
        let script = self.dir.path().join(name);
        std::fs::write(&script, text).expect("write the script");
        std::fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("make it executable");
        script
    }

    /// A program of RabbitMQ in the environment of this broker: it neither reads nor writes a file of the system's
    /// broker.
    fn program(&self, name: &str) -> Command {
        let dir = self.dir.path();
        let (node, address) = match &self.host {
            Some(host) => (format!("rabbit@{}", host.address()), host.address()),
            None => (format!("outbox-{}@localhost", self.port()), Ipv4Addr::LOCALHOST),
        };
        let interface = format!(
            "-kernel inet_dist_use_interface {{{}}}",
            address.octets().map(|octet| octet.to_string()).join(",")
        );
        let schedulers = self.size.schedulers.map_or(String::new(), |n| format!("+S {n}:{n} "));
        let mut command = Command::new(rabbitmq_bindir().join(name));
        command
            .current_dir(dir)
            .env("PATH", erlang_path())
            // Erlang creates its cookie in the home directory.
            .env("HOME", dir)
            .env("LC_ALL", "C.UTF-8")
            .env("ERL_EPMD_ADDRESS", address.to_string())
            .env("ERL_EPMD_PORT", self.ports.epmd.to_string())
            .env("RABBITMQ_NODENAME", node)
            // An address is a long name of a host.
            .env("RABBITMQ_USE_LONGNAME", self.host.is_some().to_string())
            .env("RABBITMQ_DIST_PORT", self.ports.distribution.to_string())
            .env("RABBITMQ_CONF_ENV_FILE", "/dev/null")
            .env("RABBITMQ_CONFIG_FILE", dir.join("rabbitmq"))
            .env("RABBITMQ_ADVANCED_CONFIG_FILE", dir.join("advanced"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", dir.join("enabled_plugins"))
            .env("RABBITMQ_GENERATED_CONFIG_DIR", dir.join("generated"))
            .env("RABBITMQ_SCHEMA_DIR", dir.join("schema"))
            .env("RABBITMQ_MNESIA_BASE", dir.join("mnesia"))
            .env("RABBITMQ_LOG_BASE", dir)
            .env("RABBITMQ_LOGS", self.dir.log_file())
            .env("RABBITMQ_PID_FILE", dir.join("pid"))
            .env("RABBITMQ_CTL_ERL_ARGS", &interface)
            .env(
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
                // Schedulers do not busy-wait, as with RabbitMQ's defaults.
                format!(
                    "{interface} -start_epmd false \
                     {schedulers}+sbwt none +sbwtdcpu none +sbwtdio none"
                ),
            )
            // Makes the launcher become the Erlang VM. NOTIFY_SOCKET would make it send notices to systemd.
            .env("RUNNING_UNDER_SYSTEMD", "true")
            .env_remove("NOTIFY_SOCKET");
        command
    }

    fn server(&self) -> MutexGuard<'_, Option<Child>> {
        lock(&self.server)
    }

    fn end(&self) {
        if let Some(mut child) = self.server().take() {
            process::kill(&mut child);
        }
        process::kill(&mut lock(&self.epmd));
        self.dir.finish();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.end();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn enter<T>(host: Option<&Host>, action: impl FnOnce() -> T) -> T {
    match host {
        Some(host) => host.enter(action),
        None => action(),
    }
}

/// The secret that the nodes of a cluster share.
fn write_cookie(dir: &ServerDir) {
    let cookie = dir.path().join(".erlang.cookie");
    std::fs::write(&cookie, "COOKIE").expect("write Erlang's cookie");
    std::fs::set_permissions(&cookie, Permissions::from_mode(0o400)).expect("hide Erlang's cookie");
}

fn write_certificate(dir: &ServerDir, certificate: &Certificate) {
    for (name, text) in [("cert.pem", &certificate.cert_pem), ("key.pem", &certificate.key_pem)] {
        std::fs::write(dir.path().join(name), text).expect("write the broker's certificate");
    }
}

fn tls_config(dir: &ServerDir, port: u16, clients_of: Option<&str>) -> String {
    let file = |name: &str| dir.path().join(name).display().to_string();
    let mut config = format!(
        "listeners.ssl.1 = 127.0.0.1:{port}\n\
         ssl_options.certfile = {}\n\
         ssl_options.keyfile = {}\n",
        file("cert.pem"),
        file("key.pem"),
    );
    match clients_of {
        None => config += "ssl_options.verify = verify_none\n",
        Some(authority) => {
            std::fs::write(dir.path().join("clients.pem"), authority).expect("write the clients' authority");
            config += &format!(
                "ssl_options.cacertfile = {}\n\
                 ssl_options.verify = verify_peer\n\
                 ssl_options.fail_if_no_peer_cert = true\n\
                 ssl_cert_login_from = common_name\n\
                 auth_mechanisms.1 = PLAIN\n\
                 auth_mechanisms.2 = EXTERNAL\n",
                file("clients.pem")
            );
        }
    }
    config
}

/// The directory of the launcher: OUTBOX_RABBITMQ_BINDIR, or the usual directory of a distribution. PATH is not
/// searched, since its `rabbitmq-server` may be a wrapper that switches the user.
fn rabbitmq_bindir() -> PathBuf {
    if let Some(bindir) = std::env::var_os("OUTBOX_RABBITMQ_BINDIR") {
        return PathBuf::from(bindir);
    }
    let usual = ["/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin"];
    let found = usual
        .iter()
        .map(Path::new)
        .find(|bindir| bindir.join("rabbitmq-server").is_file());
    let found = found.expect("RabbitMQ in a usual place; or else set OUTBOX_RABBITMQ_BINDIR");
    found.to_path_buf()
}

/// A script of a page that calls rabbitmqadmin: the one that comes with the launcher, with the port of the management plugin.
pub fn for_rabbitmqadmin(script: &str, management_port: u16) -> String {
    let bindir = rabbitmq_bindir().canonicalize().expect("the launcher's directory");
    let beside = bindir.ancestors().map(|above| above.join("bin/rabbitmqadmin"));
    let program = beside.skip(1).find(|program| program.is_file());
    let program = program.expect("rabbitmqadmin in a bin directory above that of the launcher");
    let here = format!("{} --host=127.0.0.1 --port={management_port} ", program.display());
    script.replace("rabbitmqadmin ", &here)
}

/// The directory of the Erlang programs that belong to the launcher, if it is beside the launcher's.
fn erlang_bindir() -> Option<PathBuf> {
    let bindir = rabbitmq_bindir().canonicalize().ok()?;
    Some(bindir.parent()?.parent()?.join("erlang/bin")).filter(|erlang| erlang.is_dir())
}

fn erlang_program(name: &str) -> PathBuf {
    erlang_bindir().map_or(PathBuf::from(name), |bindir| bindir.join(name))
}

/// PATH with the launcher's Erlang first: the machine may have another version.
fn erlang_path() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = erlang_bindir().into_iter().chain(std::env::split_paths(&path));
    std::env::join_paths(directories).expect("no directory of PATH contains a colon")
}
