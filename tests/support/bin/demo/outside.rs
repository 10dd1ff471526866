//! The demo's cluster as seen from outside the server: the program `outboxctl`, which is beside the demo, its page, and
//! its receiver by HTTP.

use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use support::{Cluster, process};

pub struct Outside {
    program: PathBuf,
    port: u16,
}

impl Outside {
    pub fn of(cluster: &Cluster) -> Self {
        let demo = std::env::current_exe().expect("the path of the demo");
        Self {
            program: demo.with_file_name("outboxctl"),
            port: cluster.port(),
        }
    }

    /// The path of outboxctl, as a person types it in the directory where the demo was started.
    pub fn program(&self) -> String {
        let here = std::env::current_dir().unwrap_or_default();
        let near = self.program.strip_prefix(here).unwrap_or(&self.program);
        near.display().to_string()
    }

    fn connection_variables(&self) -> [(&'static str, String); 4] {
        [
            ("PGHOST", "127.0.0.1".into()),
            ("PGPORT", self.port.to_string()),
            ("PGUSER", "postgres".into()),
            ("PGDATABASE", "postgres".into()),
        ]
    }

    /// The shell command that lets psql and outboxctl find the server.
    pub fn variables(&self) -> String {
        let set: Vec<String> = self
            .connection_variables()
            .map(|(name, value)| format!("{name}={value}"))
            .into();
        format!("export {}", set.join(" "))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
            command.env_remove(name);
        }
        command
            .args(arguments)
            .envs(self.connection_variables())
            .stdin(Stdio::null());
        command
    }

    /// Runs a command, and prints it with its output.
    pub fn run(&self, arguments: &[&str]) {
        for line in self.output(arguments).lines() {
            println!("        {line}");
        }
    }

    /// Runs `show` of a message that is not delivered, and prints why. Returns the first command that helps, without
    /// the name of the program.
    pub fn show(&self, arguments: &[&str]) -> String {
        let shown = self.output(arguments);
        let (message, rest) = shown.split_once('\n').expect("lines");
        let (_, why) = rest.split_once("why it waits").expect("a reason");
        let (why, rest) = why.split_once("Fix: ").expect("a remedy");
        let remedy = rest.lines().next().unwrap_or_default();
        println!("        {message} …");
        for line in format!("  why it waits{why}Fix: {remedy}").lines() {
            println!("        {line}");
        }
        let first = remedy.split(", or ").next().unwrap_or_default();
        first.strip_prefix("outboxctl ").expect("a command").to_owned()
    }

    /// Prints a command and runs it.
    fn output(&self, arguments: &[&str]) -> String {
        println!("      $ outboxctl {}", arguments.join(" "));
        let ran = self.command(arguments).output().expect("run outboxctl");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8_lossy(&ran.stdout).into_owned()
    }

    /// Prints the command of a receiver at this port and starts it; 0 takes a free port.
    pub fn listen(&self, port: &str, further: &[&str]) -> Listening {
        let arguments = [&["listen", "--port", port], further].concat();
        println!("      $ outboxctl {}", arguments.join(" "));
        let mut command = self.command(&arguments);
        command.stdout(Stdio::piped());
        let mut child = process::spawn_bound(command, libc::SIGTERM).expect("start outboxctl listen");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut listening = Listening {
            child,
            lines,
            first_line: String::new(),
        };
        listening.first_line = listening.line();
        listening.line(); // a statement for a destination of another name
        listening
    }

    /// Starts the page on a free port of loopback.
    pub fn serve(&self) -> Page {
        let mut command = self.command(&["serve", "--listen", "127.0.0.1:0", "--allow-actions", "--json"]);
        command.stdout(Stdio::piped());
        let mut child = process::spawn_bound(command, libc::SIGTERM).expect("start outboxctl serve");
        let mut line = String::new();
        let output = child.stdout.take().expect("piped");
        BufReader::new(output).read_line(&mut line).expect("its first line");
        let printed: serde_json::Value = serde_json::from_str(&line).expect("the address that it listens on");
        let url = printed["url"].as_str().expect("a URL").to_owned();
        Page { url, child }
    }
}

/// The page. Dropping it ends it.
pub struct Page {
    pub url: String,
    child: Child,
}

impl Drop for Page {
    fn drop(&mut self) {
        process::kill(&mut self.child);
    }
}

/// A receiver by HTTP. Dropping it ends it.
pub struct Listening {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// The line that it begins with.
    pub first_line: String,
}

impl Listening {
    pub fn url(&self) -> &str {
        let address = self
            .first_line
            .strip_prefix("Listening at ")
            .and_then(|rest| rest.split_once(". "));
        address.expect("the address that it listens at").0
    }

    pub fn port(&self) -> String {
        self.url()
            .rsplit(':')
            .next()
            .unwrap_or_default()
            .trim_end_matches('/')
            .to_owned()
    }

    fn line(&mut self) -> String {
        self.lines.next().expect("a line").expect("UTF-8")
    }

    /// The line that it prints for an event. At a terminal, a person may send others meanwhile.
    pub fn event(&mut self, seq: i64) -> String {
        let begin = format!("#{seq} ");
        std::iter::repeat_with(|| self.line())
            .find(|line| line.starts_with(&begin))
            .expect("endless")
    }

    /// Ends it, and returns the lines that were not read.
    pub fn end(&mut self) -> Vec<String> {
        process::kill(&mut self.child);
        self.lines.by_ref().map(|line| line.expect("UTF-8")).collect()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        process::kill(&mut self.child);
    }
}
