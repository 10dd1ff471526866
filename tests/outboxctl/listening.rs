//! Tests `outboxctl listen`: a real destination delivers to it.

use super::Ctl;
use serde_json::Value;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout};
use std::time::Duration;
use support::workdir::ServerDir;
use support::*;
use support::{Cluster, process};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A program that listens, and what it prints.
struct Listening {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Listening {
    fn start(ctl: Ctl) -> Self {
        let mut child = ctl.start();
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().expect("a line").expect("UTF-8")
    }

    fn json(&mut self) -> Value {
        let line = self.line();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// Ctrl-C.
    fn end(mut self) {
        process::signal(self.child.id(), libc::SIGINT);
        assert!(process::reap(&mut self.child, LONG).expect("it ends").success());
    }
}

fn http_cluster() -> Cluster {
    unconnected_cluster("", "x", &["outbox.retry_backoff = '10ms'"])
}

#[test]
fn listen_prints_each_event_that_a_destination_delivers_and_says_how_to_make_one() {
    let mut listening = Listening::start(Ctl::bare(&["listen", "--port", "0"]));
    let url = listening.line();
    let url = url
        .strip_prefix("Listening at ")
        .and_then(|rest| rest.split_once(". A destination that delivers here:"));
    let (url, _) = url.expect("its address");
    let create = listening.line();
    let cluster = http_cluster();
    cluster.exec(DB, &create);
    assert!(create.contains(url), "{create}");
    cluster.exec(
        DB,
        r#"select outbox_publish('OrderPlaced', '{"total":  99.90}', 'order', '42')"#,
    );
    assert_eq!(listening.line(), r#"#1 OrderPlaced order:42 {"total": 99.90}"#);
    wait_published(&cluster, 1);
    listening.end();
}

#[test]
fn listen_answers_as_it_is_told_and_shows_each_attempt() {
    let args = ["listen", "--port", "0", "--answer", "500", "--json"];
    let mut listening = Listening::start(Ctl::bare(&args));
    let url = listening.json()["url"].as_str().expect("its address").to_owned();
    let cluster = http_cluster();
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}', max_attempts '2')"),
    );
    cluster.exec(
        DB,
        r#"select outbox_publish('Ä', '[1.50]', 'k', '%', destination => 'hook')"#,
    );
    for attempt in 1..=2 {
        let line = listening.line();
        assert!(line.contains(r#""payload":[1.50]"#), "with all its digits: {line}");
        let received: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(received["attempt"], attempt);
        assert_eq!(
            (&received["seq"], &received["type"], &received["key"]),
            (&1.into(), &"Ä".into(), &"k:%".into())
        );
        assert_eq!(
            (&received["answer"], &received["signature"]),
            (&500.into(), &Value::Null)
        );
        assert_eq!(received["headers"]["webhook-id"], received["id"]);
    }
    wait_true(&cluster, "the dead letter", "select exists (select from outbox_dead)");
    listening.end();
}

#[test]
fn listen_verifies_signatures() {
    let dir = ServerDir::create("secrets");
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("write a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("chmod");
        path.display().to_string()
    };
    let good = file("good", &format!("{SECRET}\n"));
    let mut listening = Listening::start(Ctl::bare(&["listen", "--port", "0", "--json", "--secret-file", &good]));
    let url = listening.json()["url"].as_str().expect("its address").to_owned();
    let cluster = http_cluster();
    cluster.exec(
        DB,
        &format!("create server hook foreign data wrapper outbox_http options (url '{url}')"),
    );
    cluster.exec(DB, "select outbox_publish('T', '{}', destination => 'hook')");
    let refused = listening.json();
    assert_eq!(
        (&refused["answer"], &refused["signature"]),
        (&401.into(), &"not signed".into())
    );
    let mapping = format!("create user mapping for outbox_worker server hook options (signing_secret '{SECRET}')");
    cluster.exec(DB, &mapping);
    let received = std::iter::repeat_with(|| listening.json()).find(|received| received["answer"] == 200);
    assert_eq!(received.expect("a valid message")["signature"], "valid");
    wait_published(&cluster, 1);
    listening.end();

    let bad = file("bad", "hunter2\n");
    let refused = Ctl::bare(&["listen", "--port", "0", "--secret-file", &bad])
        .run()
        .failed(2);
    assert!(refused.contains("whsec_") && !refused.contains("hunter2"), "{refused}");
}

#[test]
fn a_signal_ends_listen_while_a_request_is_half_sent() {
    let mut listening = Listening::start(Ctl::bare(&["listen", "--port", "0", "--json"]));
    let url = listening.json()["url"].as_str().expect("its address").to_owned();
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut sender = TcpStream::connect(address).expect("a connection");
    let whole = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}";
    sender.write_all(whole).expect("a request");
    listening.line();
    sender.write_all(&whole[..whole.len() - 1]).expect("half a request");
    within("the end", Duration::from_secs(5), || listening.end());
}

#[test]
fn listen_refuses_a_port_that_is_taken() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let refused = Ctl::bare(&["listen", "--port", &port]).run().failed(5);
    assert!(refused.contains("--port"), "{refused}");
}
