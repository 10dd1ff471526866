//! What does a person meet who runs outboxctl? The program itself, as `make test` has built it, against real servers. One room a
//! question: how it connects, what TLS it insists on, what it shows, what it does, how it behaves on a terminal.

mod common;

#[path = "outboxctl/acting.rs"]
mod acting;
#[path = "outboxctl/connection.rs"]
mod connection;
#[path = "outboxctl/mending.rs"]
mod mending;
#[path = "common/obstacles.rs"]
mod obstacles;
#[path = "outboxctl/reading.rs"]
mod reading;
#[path = "outboxctl/terminal.rs"]
mod terminal;
#[path = "outboxctl/tls.rs"]
mod tls;

use common::{DB, unconnected_cluster};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use support::Cluster;
use support::workdir::ServerDir;

/// The program lies beside the directory of the tests.
fn program() -> PathBuf {
    let tests = std::env::current_exe().expect("the path of this test");
    let built = tests
        .parent()
        .and_then(|deps| deps.parent())
        .expect("target/PROFILE/deps");
    let program = built.join("outboxctl");
    assert!(program.is_file(), "no {}: cargo build -p outboxctl", program.display());
    program
}

/// A program that is about to run: with none of our variables of Postgres, and a home of its own.
pub struct Ctl {
    command: Command,
    home: ServerDir,
}

/// What it said, and how it ended.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ctl {
    /// Nothing says where the database is.
    pub fn bare(args: &[&str]) -> Self {
        Self::of(program(), args)
    }

    /// Another program in the same surroundings.
    pub fn of(program: PathBuf, args: &[&str]) -> Self {
        let home = ServerDir::create("home");
        let mut command = Command::new(program);
        command.args(args).env("HOME", home.path()).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("PG") || ["NO_COLOR", "COLUMNS", "TERM", "SSL_CERT_FILE"].contains(&&*text) {
                command.env_remove(name);
            }
        }
        Self { command, home }
    }

    /// As the superuser of a cluster, in its first database.
    pub fn new(cluster: &Cluster, args: &[&str]) -> Self {
        let mut ctl = Self::bare(args);
        ctl.command.arg("-d").arg(cluster.conn_string(DB));
        ctl
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Puts a file into its home.
    pub fn home_file(self, name: &str, text: &str, mode: u32) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let path = self.home.path().join(name);
        std::fs::create_dir_all(path.parent().expect("below the home")).expect("create a directory");
        std::fs::write(&path, text).expect("write a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("chmod");
        self
    }

    pub fn run(mut self) -> Ran {
        let output = self.command.output().expect("run outboxctl");
        self.home.finish();
        Ran::of(output)
    }

    /// It runs, and nobody waits for it yet.
    pub fn start(mut self) -> Child {
        let child = self
            .command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start outboxctl");
        self.home.finish();
        child
    }
}

impl Ran {
    pub fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Self {
            code: output.status.code().unwrap_or(-1),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}

impl Ran {
    /// What it printed, once it has ended with 0.
    pub fn well(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self.out
    }

    /// What it complained of, once it has ended with this code.
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(!self.err.is_empty(), "it must say why");
        self.err
    }

    pub fn json(self) -> Value {
        let out = self.well();
        assert_eq!(out.lines().count(), 1, "one document: {out}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    pub fn json_lines(self) -> Vec<Value> {
        let out = self.well();
        out.lines()
            .map(|line| serde_json::from_str(line).expect("a JSON document a line"))
            .collect()
    }
}

/// A server with the extension and no worker.
pub fn quiet_cluster() -> Cluster {
    unconnected_cluster("", "x", &["outbox.workers = 0"])
}
