//! Tests that a kind of destination is one folder and one line: a server with the toy kind of
//! crates/transport/tests/toy/, which nothing else names, delivers to it, checks its options, says what is wrong with it, and
//! shows it on each screen. `make test-kind` builds the server.

#[path = "serve/monitor.rs"]
#[allow(dead_code)] // the other tests of the page use the rest
mod monitor;

use monitor::Monitor;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use support::{
    Cluster, DB, LONG, Remedy, dead_port, filled, refused, type_sql, unconnected_cluster, wait_healthy, wait_published,
    wait_stats,
};

/// A listener: it confirms each message and passes its channel and its body on.
struct Listener {
    port: u16,
    heard: Receiver<(String, String)>,
}

impl Listener {
    fn start() -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = socket.local_addr().expect("its address").port();
        let (sender, heard) = channel();
        std::thread::spawn(move || {
            for stream in socket.incoming().flatten() {
                let sender = sender.clone();
                std::thread::spawn(move || listen(stream, &sender));
            }
        });
        Self { port, heard }
    }

    fn url(&self) -> String {
        format!("toy://127.0.0.1:{}", self.port)
    }

    /// The channel and the body of the next message.
    fn next(&self) -> (String, String) {
        self.heard.recv_timeout(LONG).expect("a message")
    }
}

fn listen(mut stream: TcpStream, heard: &Sender<(String, String)>) -> Option<()> {
    let mut input = BufReader::new(stream.try_clone().ok()?);
    loop {
        let mut line = String::new();
        input.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [number, to, bytes] = words[..] else {
            stream.write_all(b"!\n").ok()?;
            continue;
        };
        let mut body = vec![0; bytes.parse().ok()?];
        input.read_exact(&mut body).ok()?;
        heard
            .send((to.to_owned(), String::from_utf8_lossy(&body).into_owned()))
            .ok()?;
        stream.write_all(format!("ok {number}\n").as_bytes()).ok()?;
    }
}

fn outboxctl(cluster: &Cluster, arguments: &[&str]) -> String {
    let mut command = support::program::outboxctl_at(cluster, arguments);
    let output = command.env("COLUMNS", "120").output().expect("run outboxctl");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_kind_that_is_one_folder_and_one_line_delivers_and_is_checked_explained_and_shown() {
    let listener = Listener::start();
    let cluster = unconnected_cluster("", "events", &[]);
    let create = |options: &str| format!("create server bells foreign data wrapper outbox_toy options ({options})");

    // Its options are checked by the statement.
    for (options, says) in [
        ("url 'http://127.0.0.1/'", "the URL must start with toy://"),
        ("url 'toy://127.0.0.1', channel '{nothing}'", "channel"),
        ("url 'toy://127.0.0.1', exchange 'x'", "there is no option \"exchange\""),
    ] {
        let error = refused(&cluster, &create(options));
        assert!(error.message().contains(says) && error.hint().is_some(), "{error:?}");
    }

    // It delivers, in order, to the address of its template.
    cluster.exec(DB, &create(&format!("url '{}', channel 'of-{{type}}'", listener.url())));
    wait_stats(&cluster, "bells", "state = 'connected' and described_by = 'outbox_toy'");
    for n in 1..=3 {
        cluster.exec(
            DB,
            &format!("select outbox_publish('Rung', '{{\"n\": {n}}}', 'bell', 'b', destination => 'bells')"),
        );
    }
    for n in 1..=3 {
        let (to, body) = listener.next();
        assert_eq!(to, "of-Rung");
        assert!(body.contains(&format!("\"n\": {n}")), "{body}");
    }
    wait_published(&cluster, 3);
    let failed = "select string_agg(step, ', ') from outbox_check('bells') where ok is not true";
    assert_eq!(cluster.query_one::<Option<String>>(DB, failed), None);
    wait_healthy(&cluster, "broker");

    // What is wrong with it is said in its words, and the remedy ends it.
    let dead = format!("alter server bells options (set url 'toy://127.0.0.1:{}')", dead_port());
    cluster.exec(DB, &dead);
    let down = Remedy::wait(
        &cluster,
        "destination = 'bells' and problem like 'the listener cannot be reached: %'",
    );
    cluster.exec(
        DB,
        "select outbox_publish('Waits', '{}', 'bell', 'b', destination => 'bells')",
    );
    let why = "select w.why from outbox o, outbox_why(o.seq) w limit 1";
    let why: String = cluster.query_one(DB, why);
    assert!(why.contains("the listener cannot be reached"), "{why}");
    let (status, top) = (
        outboxctl(&cluster, &["status"]),
        outboxctl(&cluster, &["top", "--once"]),
    );
    for shown in [&status, &top] {
        assert!(
            shown.contains("bells") && shown.contains("the listener cannot be reached"),
            "{shown}"
        );
    }
    let page = Monitor::start(&cluster, &[]);
    let overview = page.page("/");
    assert!(overview.contains("The listener cannot be reached"), "{overview}");
    assert!(page.page("/destinations").contains("bells"));
    type_sql(&cluster, &filled(down.command(), &listener.url()));
    assert_eq!(listener.next().0, "of-Waits");
    wait_healthy(&cluster, "broker");
    assert!(
        listener.heard.recv_timeout(Duration::from_millis(100)).is_err(),
        "each message once"
    );
}
