//! What clients cost, whatever they do: sessions, statements, connections, readings of the database.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::monitor::Monitor;
use super::quiet_cluster;
use postgres::Client;
use support::{Cluster, DB, LONG, process, wait_until};

const COUNT: &str = "/act/bulk?verb=retry";

/// A server on which a count, or a page of the audit, lasts as long as the client that comes with it.
fn slow_cluster() -> (Cluster, Client) {
    let cluster = quiet_cluster();
    cluster.exec(
        DB,
        "create function public.lasts() returns boolean language plpgsql set lock_timeout = 0
           as 'begin perform pg_advisory_xact_lock(1); return true; end';
         do $$ begin
           execute replace(pg_get_functiondef('outbox_retry_where'::regproc), 'if coalesce(dry_run',
                           'perform public.lasts(); if coalesce(dry_run');
         end $$;
         select outbox_pause('default', 'for a line in the audit');
         alter table outbox_audit enable row level security;
         create policy slow on outbox_audit using (public.lasts())",
    );
    let mut client = cluster.connect(DB);
    client.batch_execute("select pg_advisory_lock(1)").expect("a lock");
    (cluster, client)
}

/// Sends a request of a page of the monitor, and reads nothing.
fn send(monitor: &Monitor, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect to the monitor");
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("send a request");
    stream
}

/// The begin of the answer, in lower case.
fn head(mut stream: &TcpStream) -> io::Result<String> {
    let mut part = [0; 1024];
    let n = stream.read(&mut part)?;
    Ok(String::from_utf8_lossy(&part[..n]).to_lowercase())
}

/// The sessions of the monitor that run a slow statement, or all.
fn sessions(condition: &str) -> String {
    format!("select count(*) from pg_stat_activity where application_name like 'outboxctl serve%' and {condition}")
}

const SLOW: &str = "wait_event = 'advisory'";

#[test]
fn requests_share_a_few_sessions_and_the_rest_are_told_to_come_again() {
    let (cluster, _lock) = slow_cluster();
    let monitor = Monitor::start(&cluster, &["--allow-actions"]);
    monitor.page("/messages"); // leaves an idle session
    let counts: Vec<TcpStream> = (0..12).map(|_| send(&monitor, COUNT)).collect();
    wait_until("slow counts", LONG, || {
        cluster.query_one::<i64>(DB, &sessions(SLOW)) >= 4
    });
    for path in [COUNT, "/messages"] {
        let answer = monitor.follow(path);
        assert_eq!(
            (answer.status, answer.header("retry-after")),
            (503, Some("5")),
            "{path}"
        );
        assert!(answer.body.contains("Try again in a few seconds"), "{}", answer.body);
    }
    assert_eq!(cluster.query_one::<i64>(DB, &sessions(SLOW)), 4);
    assert_eq!(
        cluster.query_one::<i64>(DB, &sessions("true")),
        5,
        "and the one that reads for all"
    );
    for path in ["/", "/metrics"] {
        assert_eq!(monitor.get(path).status, 200, "{path}");
    }
    drop(counts);
    wait_until("a free session", LONG, || monitor.get("/messages").status == 200);
}

#[test]
fn the_statement_of_a_client_that_leaves_is_cancelled() {
    let (cluster, _lock) = slow_cluster();
    let monitor = Monitor::start(&cluster, &["--allow-actions"]);
    for path in [COUNT, "/audit"] {
        let from = cluster.log_offset();
        let left: Vec<TcpStream> = (0..4).map(|_| send(&monitor, path)).collect();
        wait_until("slow statements", LONG, || {
            cluster.query_one::<i64>(DB, &sessions(SLOW)) == 4
        });
        drop(left);
        wait_until("their end", LONG, || cluster.query_one::<i64>(DB, &sessions(SLOW)) == 0);
        let log = cluster.log();
        let cancelled = log[from..].matches("canceling statement due to user request").count();
        assert_eq!(cancelled, 4, "{path}: {}", &log[from..]);
    }
}

/// As behind a network that was cut.
#[test]
fn a_session_that_does_not_answer_is_given_up() {
    let cluster = quiet_cluster();
    let monitor = Monitor::start(&cluster, &[]);
    let before = monitor.descriptors();
    monitor.page("/messages");
    let idle = "select pid::bigint from pg_stat_activity where application_name like 'outboxctl serve%'
                order by backend_start desc limit 1";
    let pid = u32::try_from(cluster.query_one::<i64>(DB, idle)).expect("a process");
    process::suspend(pid);
    let answer = monitor.get("/messages");
    assert_eq!(answer.status, 200);
    assert!(answer.body.contains("It took too long"), "{}", answer.body);
    wait_until("the end of the connection", LONG, || monitor.descriptors() <= before);
    monitor.page("/messages");
    process::signal(pid, libc::SIGCONT);
}

/// A server with message 1, whose payload is larger than the buffers of a connection.
fn large_message() -> Cluster {
    let cluster = quiet_cluster();
    let large = "select outbox_publish('Large', jsonb_build_object('text', repeat('x', 14000000)), 'order', '1')";
    cluster.exec(DB, large);
    cluster
}

#[test]
fn clients_that_send_nothing_or_read_nothing_are_disconnected() {
    let cluster = large_message();
    let monitor = Monitor::start(&cluster, &[]);
    let before = monitor.descriptors() + 1; // an idle session
    let connect = |text: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect to the monitor");
        stream.write_all(text.as_bytes()).expect("send");
        stream
    };
    let host = format!("Host: 127.0.0.1:{}\r\n", monitor.port);
    // The second request of a connection has no more time than the first.
    let mut begun_again = send(&monitor, "/style.css");
    head(&begun_again).expect("an answer");
    begun_again.write_all(b"GET / HTTP/1.1\r\nHost: local").expect("send");
    let clients = [
        connect(""),
        connect("GET / HTTP/1.1\r\nHost: local"),
        begun_again,
        connect(&format!(
            "POST /login HTTP/1.1\r\n{host}Origin: {}\r\nContent-Length: 100\r\n\r\nsecret=",
            monitor.url()
        )),
        connect(&format!("GET /message/1/payload HTTP/1.1\r\n{host}\r\n")),
    ];
    wait_until("five connections", LONG, || monitor.descriptors() >= before + 5);
    wait_until("their end", LONG, || monitor.descriptors() <= before);
    drop(clients);
}

/// A proxy that reuses a connection just when it is closed answers 502.
#[test]
fn an_idle_connection_outlives_a_client_that_sends_nothing() {
    let cluster = quiet_cluster();
    let monitor = Monitor::start(&cluster, &[]);
    let is_answered = |mut client: &TcpStream| {
        let request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
        client.write_all(request.as_bytes()).is_ok() && head(client).is_ok_and(|head| head.starts_with("http/1.1 200"))
    };
    let idle = TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect to the monitor");
    assert!(is_answered(&idle));
    let silent = TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect to the monitor");
    silent.set_read_timeout(Some(LONG)).expect("a timeout");
    assert_eq!(head(&silent).unwrap_or_default(), "", "the silent one is closed");
    assert!(is_answered(&idle), "the idle one was closed, too");
}

/// Idle connections live for 75 s.
#[test]
fn idle_connections_make_room_for_others() {
    let cluster = quiet_cluster();
    let monitor = Monitor::start(&cluster, &[]);
    let began = Instant::now();
    let idle: Vec<TcpStream> = (0..128).map(|_| send(&monitor, "/healthz")).collect();
    for client in &idle {
        head(client).expect("an answer");
    }
    wait_until("an answer", LONG, || {
        let answer = head(&send(&monitor, "/healthz"));
        answer.is_ok_and(|head| head.starts_with("http/1.1 200")) // a connection too many is reset
    });
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    drop(idle);
}

#[test]
fn a_few_payloads_at_a_time_are_on_their_way_to_clients() {
    let cluster = large_message();
    let monitor = Monitor::start(&cluster, &[]);
    let mut clients = Vec::new();
    let refusal = loop {
        let client = send(&monitor, "/message/1/payload");
        let head = head(&client).expect("an answer");
        if !head.starts_with("http/1.1 200") {
            break head;
        }
        clients.push(client);
        assert!(clients.len() < 50, "{} payloads", clients.len());
    };
    assert!(
        refusal.starts_with("http/1.1 503") && refusal.contains("retry-after: 5"),
        "{refusal}"
    );
    drop(clients);
    wait_until("a payload", LONG, || monitor.get("/message/1/payload").status == 200);
}

#[test]
fn a_thousand_connections_take_few_descriptors_and_others_are_soon_answered() {
    let cluster = quiet_cluster();
    let monitor = Monitor::start(&cluster, &[]);
    let before = monitor.descriptors();
    let connect = |_| TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect to the monitor");
    let idle: Vec<TcpStream> = (0..1000).map(connect).collect();
    let mut most = 0;
    let is_answered = || {
        most = most.max(monitor.descriptors());
        let answer = head(&send(&monitor, "/style.css"));
        answer.is_ok_and(|head| head.starts_with("http/1.1 200")) // a connection too many is reset
    };
    wait_until("an answer", LONG, is_answered);
    assert!(
        (before + 100..before + 140).contains(&most),
        "{most} descriptors, {before} before"
    );
    drop(idle);
}

#[test]
fn pages_that_are_opened_again_and_again_do_not_make_the_monitor_read_more_often() {
    let cluster = quiet_cluster();
    cluster.set_conf("log_statement", "all");
    let from = cluster.log_offset();
    let monitor = Monitor::start(&cluster, &[]);
    let readings = || {
        cluster.log()[from..]
            .matches("z where z.destination = s.destination")
            .count()
    };
    wait_until("a monitor without viewers", LONG, || {
        let metrics = monitor.page("/metrics");
        let age = metrics
            .lines()
            .find_map(|line| line.strip_prefix("outbox_snapshot_age_seconds "));
        age.is_some_and(|age| age.parse::<f64>().expect("an age") > 3.0)
    });
    let began = Instant::now();
    for _ in 0..6 {
        let before = readings();
        let stream = send(&monitor, "/events?page=overview");
        assert!(head(&stream).expect("the stream").starts_with("http/1.1 200"));
        drop(stream);
        wait_until("a reading", LONG, || readings() > before);
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(4), "six readings in {took:?}");
}
