//! A worker outside the server: `outboxctl work` as a child process of a test.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use crate::{Broker, Cluster, Host, process, program};
use crate::{DB, LONG, unconnected_cluster, wait_true};

/// The command `outboxctl work` for a role that is only a member of outbox_relay.
pub fn work(cluster: &Cluster, args: &[&str]) -> Command {
    work_as(cluster.port(), "courier", DB, args)
}

pub fn work_as(port: u16, user: &str, database: &str, args: &[&str]) -> Command {
    work_at("127.0.0.1", port, user, database, args)
}

fn work_at(server: &str, port: u16, user: &str, database: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program::outboxctl());
    command.env_remove("OUTBOX_URL").stdin(Stdio::null());
    command.args([
        "work",
        "-h",
        server,
        "-p",
        &port.to_string(),
        "-U",
        user,
        "-d",
        database,
    ]);
    command.args(args);
    command
}

/// Runs a command that ends by itself. Its output must fit into the buffer of a pipe.
pub fn run(mut command: Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
    if process::reap(&mut child, LONG).is_none() {
        process::kill(&mut child);
        panic!("{:?}", child.wait_with_output().expect("its output"));
    }
    child.wait_with_output().expect("its output")
}

/// Creates the role that the workers of these tests log in as.
pub fn make_courier(cluster: &Cluster) {
    cluster.exec(DB, "create role courier login in role outbox_relay");
}

/// A server without background workers: only workers outside the server deliver its messages.
pub fn without_workers(broker: &Broker, exchange: &str, conf: &[&str]) -> Cluster {
    let mut lines = vec!["outbox.workers = 0"];
    lines.extend(conf);
    let cluster = unconnected_cluster(&broker.url(), exchange, &lines);
    make_courier(&cluster);
    cluster
}

/// A running worker. It ends with the test, however the test ends.
pub struct Outside {
    pub child: Option<Child>,
}

impl Outside {
    /// Starts a worker, and waits until it is connected and owns partitions.
    pub fn start(cluster: &Cluster, name: &str) -> Self {
        Self::start_with(cluster, name, &[])
    }

    pub fn start_with(cluster: &Cluster, name: &str, args: &[&str]) -> Self {
        let mut command = work(cluster, &["--name", name]);
        command.args(args).stdout(Stdio::null());
        Self::begin(cluster, name, command)
    }

    /// Starts a worker that writes its log to the file `path`, as JSON, and waits until it is connected.
    pub fn start_with_log(cluster: &Cluster, name: &str, path: &Path) -> Self {
        let outside = Self::spawn_with_log(cluster, name, None, path);
        outside.wait_connected(cluster, name);
        outside
    }

    /// Starts a worker that writes its log to the file `path`, as JSON. Does not wait: its destinations may be
    /// unreachable.
    pub fn spawn_with_log(cluster: &Cluster, name: &str, password_file: Option<&Path>, path: &Path) -> Self {
        let mut command = work(cluster, &["--name", name, "--json"]);
        if let Some(file) = password_file {
            command.arg("--password-file").arg(file);
        }
        Self::spawn_logged(command, path)
    }

    /// Starts a worker like [`Self::spawn_with_log`] for the server on a host of the test's network. The worker is on
    /// the host of the calling thread.
    pub fn spawn_to(server: &Host, name: &str, path: &Path) -> Self {
        let address = server.address().to_string();
        let command = work_at(&address, 5432, "courier", DB, &["--name", name, "--json"]);
        Self::spawn_logged(command, path)
    }

    fn spawn_logged(mut command: Command, path: &Path) -> Self {
        command
            .stdout(Stdio::null())
            .stderr(File::create(path).expect("a file"));
        Self::spawn(command)
    }

    fn begin(cluster: &Cluster, name: &str, command: Command) -> Self {
        let outside = Self::spawn(command);
        outside.wait_connected(cluster, name);
        outside
    }

    fn spawn(command: Command) -> Self {
        let child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
        Self { child: Some(child) }
    }

    fn wait_connected(&self, cluster: &Cluster, name: &str) {
        wait_true(
            cluster,
            &format!("worker {name} to be connected"),
            &format!(
                "select exists (select from outbox_worker_status where alive and state = 'connected'
                   and worker_id like 'work-{name}-%' and (partitions > 0 or not (select leasing from outbox_settings)))"
            ),
        );
    }

    /// Stops the worker with SIGTERM and returns its exit code.
    pub fn stop(mut self) -> Option<i32> {
        let mut child = self.child.take().expect("it runs");
        process::signal(child.id(), libc::SIGTERM);
        let status = process::reap(&mut child, LONG).expect("outboxctl ends after SIGTERM");
        status.code()
    }

    /// Kills the worker, as if its machine were switched off.
    pub fn kill(mut self) {
        process::kill(&mut self.child.take().expect("it runs"));
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            process::kill(child);
        }
    }
}
