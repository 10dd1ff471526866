//! Tests of outboxctl as users run it: the program that `make test` built, against real servers. Each module covers one
//! subject: how the program connects, its TLS, what it shows, what it changes, how it behaves on a terminal.

mod acting;
mod connection;
mod fixes;
mod listening;
mod reading;
mod terminal;
mod tls;

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use support::Cluster;
use support::program::outboxctl;
use support::workdir::ServerDir;
use support::{DB, idle_cluster};

/// A program that is about to run: without the Postgres variables of the environment, and with its own home directory.
pub struct Ctl {
    command: Command,
    home: ServerDir,
}

/// The output and the exit code of the program.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ctl {
    /// Without connection arguments.
    pub fn bare(args: &[&str]) -> Self {
        Self::of(outboxctl(), args)
    }

    /// Another program in the same environment.
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

    /// Writes a file into the home directory.
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

    /// Starts the program without waiting for it.
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
    /// The standard output; asserts that the exit code is 0.
    pub fn well(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self.out
    }

    /// The error output; asserts that the exit code is `code`.
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, code, "{}{}", self.out, self.err);
        assert!(!self.err.is_empty(), "the error output is empty");
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
    idle_cluster(&[])
}
