//! An `outboxctl serve` for one test: started on a free port, killed when it is dropped.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use support::LONG;
use support::http::{Answer, ask};
use support::program::outboxctl;
use support::{Cluster, process};

fn command(cluster: &Cluster, arguments: &[&str]) -> Command {
    let mut command = Command::new(outboxctl());
    command.arg("serve").args(arguments).stdin(Stdio::null());
    let port = cluster.port().to_string();
    for (name, value) in [
        ("--host", "127.0.0.1"),
        ("--port", &port),
        ("--dbname", "postgres"),
        ("--username", "postgres"),
        ("--listen", "127.0.0.1:0"),
    ] {
        if !arguments.contains(&name) {
            command.args([name, value]);
        }
    }
    command
}

/// Runs the program with arguments that it must refuse.
pub fn refused(cluster: &Cluster, arguments: &[&str]) -> Output {
    command(cluster, arguments).output().expect("run outboxctl")
}

pub struct Monitor {
    child: Child,
    pub port: u16,
}

impl Monitor {
    /// Starts as the superuser, unless the arguments name another user.
    pub fn start(cluster: &Cluster, arguments: &[&str]) -> Self {
        let mut command = command(cluster, arguments);
        command.stdout(Stdio::piped());
        let mut child = process::spawn_bound(command, libc::SIGKILL).expect("start outboxctl");
        let mut line = String::new();
        let output = child.stdout.take().expect("piped");
        BufReader::new(output).read_line(&mut line).expect("its first line");
        let port = line.split("http://").nth(1).and_then(|rest| {
            let address = rest.split('/').next()?;
            address.rsplit(':').next()?.parse().ok()
        });
        Self {
            port: port.unwrap_or_else(|| panic!("no address in {line:?}")),
            child,
        }
    }

    /// Sends SIGTERM, as an init system does; returns the exit code.
    pub fn terminate(&mut self) -> Option<i32> {
        process::signal(self.child.id(), libc::SIGTERM);
        process::reap(&mut self.child, LONG).and_then(|status| status.code())
    }

    pub fn descriptors(&self) -> usize {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        fds.expect("the descriptors of the program").count()
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.get_with(path, &[])
    }

    pub fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        ask(self.port, "GET", path, headers, "")
    }

    /// A page, which must exist.
    pub fn page(&self, path: &str) -> String {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer.body
    }

    /// A request as by a link or form on a page of the monitor.
    pub fn follow(&self, path: &str) -> Answer {
        self.get_with(path, &[("Sec-Fetch-Site", "same-origin")])
    }

    /// Sends a form as the monitor's own page does.
    pub fn post(&self, path: &str, headers: &[(&str, &str)], form: &[(&str, &str)]) -> Answer {
        let origin = self.url();
        let mut all = vec![
            ("Content-Type", "application/x-www-form-urlencoded"),
            ("Origin", &origin),
        ];
        all.retain(|(name, _)| !headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name)));
        all.extend_from_slice(headers);
        let form: Vec<String> = form
            .iter()
            .map(|(name, value)| format!("{name}={}", encoded(value)))
            .collect();
        ask(self.port, "POST", path, &all, &form.join("&"))
    }

    /// The token in the forms of this page.
    pub fn form_token(page: &str) -> String {
        let rest = page.split("name=\"form_token\" value=\"").nth(1).expect("a form");
        rest.split('"').next().expect("a value").to_owned()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        process::kill(&mut self.child);
    }
}

pub fn encoded(text: &str) -> String {
    let one = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(one).collect()
}
