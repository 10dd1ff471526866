//! The demo's cluster as seen from outside the server: the program `outboxctl`, which is beside the demo, and its page.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

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

    /// Runs a command, prints it with its output, and returns the output.
    pub fn run(&self, arguments: &[&str]) -> String {
        let typed: Vec<String> = arguments
            .iter()
            .map(|argument| match argument.contains(' ') {
                true => format!("'{argument}'"),
                false => (*argument).to_owned(),
            })
            .collect();
        println!("      $ outboxctl {}", typed.join(" "));
        let ran = self.command(arguments).output().expect("run outboxctl");
        let printed = String::from_utf8_lossy(&ran.stdout).into_owned();
        for line in printed.lines() {
            println!("        {line}");
        }
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        printed
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
    url: String,
    child: Child,
}

impl Page {
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The first alert of the overview, as "title: text".
    pub fn banner(&self) -> Option<String> {
        let page = self.fetch()?;
        let (_, banner) = page.split_once("class=\"alerts")?;
        let (_, title) = banner.split_once("<strong>")?;
        let (title, rest) = title.split_once("</strong>")?;
        let text = rest.split("<p>").nth(1)?.split("</p>").next()?;
        Some(format!("{title}: {text}"))
    }

    fn fetch(&self) -> Option<String> {
        let host = self.url.strip_prefix("http://")?.trim_end_matches('/');
        let mut stream = TcpStream::connect(host).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        write!(stream, "GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.1 200 ").then_some(answer)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        process::kill(&mut self.child);
    }
}
