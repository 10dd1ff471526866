//! A worker outside the server, `outboxctl work`: does it deliver as one in the server does, alone and beside others, and
//! is it held to what is its own? On a real Postgres and a real RabbitMQ, with the program as it is built.

#[path = "work/command.rs"]
mod command;
mod common;
#[path = "work/encodings.rs"]
mod encodings;
#[path = "work/fences.rs"]
mod fences;
#[path = "work/live.rs"]
mod live;
#[path = "work/outside.rs"]
mod outside;
#[path = "common/screen.rs"]
mod screen;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use common::{DB, LONG, wait_true};
use support::{Broker, Cluster, process, program, wait_until};

/// `outboxctl work` for a role that may be a worker and nothing else.
fn work(cluster: &Cluster, args: &[&str]) -> Command {
    work_as(cluster.port(), "courier", DB, args)
}

fn work_as(port: u16, user: &str, database: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program::outboxctl());
    command.env_remove("OUTBOX_URL").stdin(Stdio::null());
    command.args([
        "work",
        "-h",
        "127.0.0.1",
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

/// Runs a command that ends by itself, and says little enough for a pipe to hold.
fn run(mut command: Command) -> Output {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
    if process::reap(&mut child, LONG).is_none() {
        process::kill(&mut child);
        panic!("{:?}", child.wait_with_output().expect("what it said"));
    }
    child.wait_with_output().expect("what it said")
}

/// The role that the workers of these tests log in as.
fn make_courier(cluster: &Cluster) {
    cluster.exec(DB, "create role courier login in role outbox_relay");
}

/// A server whose messages nobody delivers but workers outside.
fn without_workers(broker: &Broker, exchange: &str, conf: &[&str]) -> Cluster {
    let mut lines = vec!["outbox.workers = 0"];
    lines.extend(conf);
    let cluster = common::unconnected_cluster(&broker.url(), exchange, &lines);
    make_courier(&cluster);
    cluster
}

/// A running worker. It ends with the test, however that ends.
struct Outside {
    child: Option<Child>,
}

impl Outside {
    /// Starts one, and waits until it is connected and has its share.
    fn start(cluster: &Cluster, name: &str) -> Self {
        Self::start_with(cluster, name, &[])
    }

    fn start_with(cluster: &Cluster, name: &str, args: &[&str]) -> Self {
        let mut command = work(cluster, &["--name", name]);
        command.args(args).stdout(Stdio::null());
        Self::begin(cluster, name, command)
    }

    /// What it says beside its ticks goes into a file.
    fn start_saying(cluster: &Cluster, name: &str, path: &Path) -> Self {
        let mut command = work(cluster, &["--name", name, "--json"]);
        command
            .stdout(Stdio::null())
            .stderr(File::create(path).expect("a file"));
        Self::begin(cluster, name, command)
    }

    fn begin(cluster: &Cluster, name: &str, command: Command) -> Self {
        let child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
        let outside = Self { child: Some(child) };
        wait_true(
            cluster,
            &format!("worker {name} to be connected"),
            &format!(
                "select exists (select from outbox_worker_status where alive and state = 'connected'
                   and worker_id like 'work-{name}-%' and (partitions > 0 or not (select leasing from outbox_settings)))"
            ),
        );
        outside
    }

    /// Ends it in order, and returns its exit code.
    fn stop(mut self) -> Option<i32> {
        let mut child = self.child.take().expect("it runs");
        process::signal(child.id(), libc::SIGTERM);
        let status = process::reap(&mut child, LONG).expect("it ends when asked to");
        status.code()
    }

    /// As a machine that is switched off.
    fn kill(mut self) {
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

/// Waits until `count` workers share all partitions evenly.
fn wait_for_shares(cluster: &Cluster, count: usize) {
    wait_true(
        cluster,
        &format!("{count} workers to share 16 partitions"),
        &format!(
            "select count(*) = {count} and sum(partitions) = 16 and min(partitions) >= 16 / {count}
             from outbox_worker_status where alive and state = 'connected'"
        ),
    );
}

/// Waits until a worker outside has told of all that it has ended: it settles a moment after the broker has confirmed.
fn wait_for_total(cluster: &Cluster, published: i64) {
    wait_true(
        cluster,
        &format!("{published} messages to be counted"),
        &format!("select published_total = {published} from outbox_status"),
    );
}

/// Waits until a command that runs has printed so much.
fn wait_for_file(path: &Path, what: &str, mut is_enough: impl FnMut(&str) -> bool) -> String {
    let mut text = String::new();
    wait_until(what, LONG, || {
        text = std::fs::read_to_string(path).unwrap_or_default();
        is_enough(&text)
    });
    text
}
