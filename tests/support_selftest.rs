//! Tests that the private servers of the tests work as the tests assume. No test here needs the extension.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use amqprs::{BasicProperties, FieldTable, FieldValue};
use serde_json::{Value, json};
use support::faults::{Faults, Message};
use support::oracle::Verdict;
use support::stops::IN_FLIGHT_MAX;
use support::{
    Broker, Cluster, Consumer, Host, LONG, Mode, Network, Proxy, Size, StopMode, fresh_names, process, wait_for,
    wait_until,
};

fn cluster() -> Cluster {
    Cluster::builder()
        .preload(false)
        .conf("log_min_messages = info")
        .start()
}

#[test]
fn a_cluster_keeps_its_data_over_every_kind_of_stop() {
    let cluster = cluster();
    cluster.exec("postgres", "create table t (n int)");
    for (n, mode) in [StopMode::Smart, StopMode::Fast, StopMode::Immediate]
        .into_iter()
        .enumerate()
    {
        cluster.exec("postgres", &format!("insert into t values ({n})"));
        cluster.stop(mode);
        assert!(
            cluster.try_connect("postgres").is_err(),
            "a stopped server takes no connections"
        );
        cluster.start_again();
    }
    cluster.kill_postmaster();
    cluster.start_again();
    assert_eq!(cluster.query_one::<i64>("postgres", "select count(*) from t"), 3);
    let before = cluster.pid();
    cluster.restart();
    assert_ne!(cluster.pid(), before);
}

#[test]
fn a_cluster_takes_settings_before_and_after_its_start() {
    let cluster = Cluster::builder().preload(false).conf("work_mem = '5MB'").start();
    let show = |name: &str| cluster.query_one::<String>("postgres", &format!("show {name}"));
    assert_eq!((show("work_mem"), show("fsync")), ("5MB".into(), "off".into()));
    cluster.set_conf("application_name", "it's set");
    // The connection string of the client sets no application name, so the new default shows at once.
    assert_eq!(show("application_name"), "it's set");
    cluster.stop(StopMode::Fast);
    cluster.set_conf("work_mem", "6MB");
    cluster.start_again();
    assert_eq!(show("work_mem"), "6MB");
}

#[test]
fn the_log_is_searched_from_an_offset() {
    let cluster = cluster();
    cluster.exec("postgres", "do $$ begin raise log 'one mark'; end $$");
    cluster.wait_for_log("one mark", 0);
    let offset = cluster.log_offset();
    cluster.exec("postgres", "do $$ begin raise log 'another mark'; end $$");
    let line = cluster.wait_for_log("mark", offset);
    assert!(
        line.contains("another mark") && line.contains("client backend"),
        "{line}"
    );
}

#[test]
fn a_crashed_cluster_leaves_no_process_behind() {
    let cluster = cluster();
    let files = cluster.data_dir();
    cluster.kill_postmaster();
    drop(cluster);
    assert!(!files.exists());
}

#[test]
fn a_message_comes_back_with_all_its_properties() {
    let broker = Broker::shared();
    let (exchange, queue) = fresh_names();
    broker.declare_exchange(&exchange, "topic", true);
    broker.declare_queue(&queue, json!({"x-max-length": 100, "x-overflow": "reject-publish"}));
    broker.bind(&queue, &exchange, "orders.*");

    let mut headers = FieldTable::new();
    let mut put = |name: &str, value: FieldValue| headers.insert(name.try_into().expect("a short name"), value);
    put("text", "ü".into());
    put("yes", true.into());
    put("small", FieldValue::b(-1));
    put("big", FieldValue::l(i64::MAX));
    put("double", FieldValue::d(0.5));
    put("null", FieldValue::V);
    let mut nested = FieldTable::new();
    nested.insert("n".try_into().expect("a short name"), FieldValue::I(-7));
    put("nested", nested.into());
    let properties = BasicProperties::default()
        .with_content_type("application/json")
        .with_message_id("id 1")
        .with_message_type("OrderPlaced")
        .with_app_id("shop")
        .with_correlation_id("c 1")
        .with_timestamp(1_700_000_000)
        .with_persistence(true)
        .with_headers(headers)
        .finish();
    broker.publish_with(&exchange, "orders.placed", properties, br#"{"order": 1}"#);
    broker.publish(&exchange, "elsewhere", b"not routed");
    assert_eq!(broker.queue_len(&queue), 1);

    let consumer = Consumer::new(broker, &queue);
    let got = consumer.recv(LONG).expect("the message");
    assert_eq!(got.json(), json!({"order": 1}));
    assert_eq!(
        (got.exchange.as_str(), got.routing_key.as_str()),
        (exchange.as_str(), "orders.placed")
    );
    assert_eq!(
        (got.message_id.as_deref(), got.kind.as_deref()),
        (Some("id 1"), Some("OrderPlaced"))
    );
    assert_eq!(
        (got.app_id.as_deref(), got.correlation_id.as_deref()),
        (Some("shop"), Some("c 1"))
    );
    assert_eq!(got.content_type.as_deref(), Some("application/json"));
    assert_eq!(
        (got.delivery_mode, got.timestamp, got.redelivered),
        (Some(2), Some(1_700_000_000), false)
    );
    let expected = json!({"text": "ü", "yes": true, "small": -1, "big": i64::MAX, "double": 0.5, "null": null,
        "nested": {"n": -7}});
    assert_eq!(Value::Object(got.headers.into_iter().collect()), expected);

    (0..500).for_each(|n: u32| broker.publish("", &queue, n.to_string().as_bytes()));
    let bodies = consumer.recv_n(500, LONG).into_iter().map(|delivery| delivery.body);
    assert!(
        bodies.eq((0..500).map(|n: u32| n.to_string().into_bytes())),
        "in order and complete"
    );
    assert!(consumer.finish().is_empty());
    assert_eq!(broker.queue_len(&queue), 0, "what was handed over is acknowledged");
    broker.delete_queue(&queue);
    broker.delete_exchange(&exchange);
}

/// A consumer that has ended must report it: an empty result would be a false one.
fn assert_reports_its_end(consumer: &Consumer) {
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| consumer.recv(LONG)));
    let message = outcome.expect_err("a panic").downcast::<String>().expect("a message");
    assert!(message.contains("is gone"), "{message}");
}

#[test]
fn a_consumer_reports_that_its_queue_was_deleted() {
    let broker = Broker::shared();
    let (_, queue) = fresh_names();
    broker.declare_queue(&queue, Value::Null);
    let consumer = Consumer::new(broker, &queue);
    broker.delete_queue(&queue);
    assert_reports_its_end(&consumer);
}

#[test]
fn a_private_broker_stops_crashes_hangs_and_comes_back() {
    let broker = Broker::start_sized(Size::default());
    let (_, queue) = fresh_names();
    broker.declare_queue(&queue, Value::Null);
    broker.publish("", &queue, b"kept");
    broker.stop();
    broker.start_again();
    assert_eq!(broker.queue_len(&queue), 1);
    broker.kill();
    broker.start_again();
    let consumer = Consumer::new(&broker, &queue);
    assert_eq!(consumer.recv(LONG).expect("a persistent message").body, b"kept");

    broker.suspend();
    let mut hello = TcpStream::connect(("127.0.0.1", broker.port())).expect("the kernel accepts");
    hello
        .write_all(b"AMQP\0\0\x09\x01")
        .expect("the kernel takes the bytes");
    hello
        .set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a timeout");
    assert_eq!(
        hello.read(&mut [0]).expect_err("no answer").kind(),
        ErrorKind::WouldBlock
    );
    broker.resume();
    hello.set_read_timeout(Some(LONG)).expect("a timeout");
    hello.read_exact(&mut [0]).expect("the answer");

    broker.set_memory_alarm(true);
    wait_until("the alarm", LONG, || {
        broker.ctl(&["eval", "rabbit_alarm:get_alarms()."]).contains("memory")
    });
    broker.set_memory_alarm(false);
    wait_until("no alarm", LONG, || {
        broker.ctl(&["eval", "rabbit_alarm:get_alarms()."]).trim() == "[]"
    });
    broker.add_user("someone", "secret");
    assert!(broker.ctl(&["list_users"]).contains("someone"));

    broker.kill();
    assert_reports_its_end(&consumer);
    broker.start_again();
    let pid = broker.pid();
    drop(broker);
    process::wait_until_ended("the broker to be gone", &[pid], Duration::ZERO);
}

#[test]
fn a_proxy_forwards_delays_drops_refuses_and_resets() {
    let broker = Broker::shared();
    let proxy = Proxy::start(broker.port());
    let connect = || {
        let stream = TcpStream::connect(("127.0.0.1", proxy.port())).expect("connect to the proxy");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        stream
    };
    // A broker answers the protocol header with a method frame, whose first byte is 1.
    let greet = |stream: &mut TcpStream| {
        stream.write_all(b"AMQP\0\0\x09\x01")?;
        let mut answer = [0];
        stream.read_exact(&mut answer).map(|()| answer[0])
    };
    let kind = |outcome: std::io::Result<u8>| outcome.expect_err("no answer").kind();

    let mut passed = connect();
    assert_eq!(greet(&mut passed).expect("an answer"), 1);

    proxy.mode(Mode::Delay(50));
    let started = Instant::now();
    assert_eq!(greet(&mut connect()).expect("an answer"), 1);
    assert!(started.elapsed() >= Duration::from_millis(100), "50 ms each way");

    for swallowing in [Mode::Blackhole, Mode::DropReplies] {
        proxy.mode(swallowing);
        let mut stream = connect();
        stream
            .set_read_timeout(Some(Duration::from_millis(300)))
            .expect("a timeout");
        assert_eq!(kind(greet(&mut stream)), ErrorKind::WouldBlock, "{swallowing:?}");
    }

    proxy.mode(Mode::Refuse);
    assert_eq!(kind(greet(&mut connect())), ErrorKind::ConnectionReset);
    assert_eq!(proxy.accepted(), 5);

    proxy.mode(Mode::Pass);
    proxy.reset_all();
    let reset = wait_for("the end of a connection", LONG, || match passed.read(&mut [0; 4096]) {
        Ok(read) if read > 0 => None,
        ended => Some(ended),
    });
    assert_eq!(reset.expect_err("a reset").kind(), ErrorKind::ConnectionReset);
    assert_eq!(greet(&mut connect()).expect("an answer"), 1);
}

/// A connection from one host to a listener on another, and both its ends.
fn connected(from: &Host, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let there = listener.local_addr().expect("an address");
    let client = from
        .enter(|| TcpStream::connect_timeout(&there, LONG))
        .expect("connect");
    let (server, _) = listener.accept().expect("accept");
    server
        .set_read_timeout(Some(Duration::from_millis(300)))
        .expect("a timeout");
    (client, server)
}

#[test]
fn hosts_reach_each_other_until_they_are_cut_or_unplugged() {
    let Some(network) = Network::start("hosts reach each other until they are cut or unplugged") else {
        return;
    };
    let (a, b, c) = (network.host(), network.host(), network.host());
    assert_eq!(c.address().to_string(), "10.77.0.4");
    let listener = b
        .enter(|| TcpListener::bind((b.address(), 4000)))
        .expect("listen on a host");
    let port = listener.local_addr().expect("an address");
    let (mut from_a, mut to_b) = connected(&a, &listener);
    let reaches = |from: &Host| {
        let found = from.enter(|| TcpStream::connect_timeout(&port, Duration::from_millis(300)));
        found.map(drop).map_err(|error| error.kind())
    };

    let mut got = [0; 3];
    network.cut(&a, &b);
    from_a.write_all(b"one").expect("the connection takes bytes");
    assert_eq!(
        to_b.read(&mut got).expect_err("nothing arrives").kind(),
        ErrorKind::WouldBlock
    );
    // Not refused: the packets are dropped in silence.
    assert_eq!(reaches(&a), Err(ErrorKind::TimedOut));
    assert_eq!(reaches(&c), Ok(()), "other hosts are not cut");
    TcpStream::connect_timeout(&port, LONG).expect("the test is not cut");
    network.heal(&a, &b);
    wait_until("the bytes from before the cut", LONG, || {
        to_b.read_exact(&mut got).is_ok()
    });
    assert_eq!(&got, b"one");
    assert_eq!(reaches(&a), Ok(()));

    network.unplug(&b);
    from_a.write_all(b"two").expect("the connection takes bytes");
    assert_eq!(
        to_b.read(&mut got).expect_err("nothing arrives").kind(),
        ErrorKind::WouldBlock
    );
    assert_eq!(reaches(&c), Err(ErrorKind::TimedOut));
    assert_eq!(reaches(&b), Ok(()), "a host without a cable reaches itself");
    network.plug(&b);
    wait_until("the bytes from before the cable was out", LONG, || {
        to_b.read_exact(&mut got).is_ok()
    });
    assert_eq!(&got, b"two");
}

#[test]
fn servers_on_hosts_have_the_addresses_of_their_hosts() {
    let Some(network) = Network::start("servers on hosts have the addresses of their hosts") else {
        return;
    };
    let (a, b) = (network.host(), network.host());
    // To stop, a server waits this long for a standby that it does not reach.
    let builder = Cluster::builder().preload(false).conf("wal_sender_timeout = '2s'");
    let cluster = builder.on(&a).start();
    let standby = cluster.copy_on(&b, true, &[]);
    cluster.exec("postgres", "create table t ()");
    let exists = "select exists (select from pg_class where relname = 't')";
    wait_until("the standby to follow", LONG, || standby.query_one("postgres", exists));
    let sender: String = cluster.query_one("postgres", "select host(client_addr) from pg_stat_replication");
    assert_eq!(sender, b.address().to_string());
    network.unplug(&a);
    cluster.restart();
    assert_eq!(
        cluster.query_one::<i32>("postgres", "select 1"),
        1,
        "the test reaches a server without a cable"
    );
    assert!(cluster.conn_string("postgres").contains("host=10.77.0.2 port=5432 "));

    let broker = Broker::start_on(&b, &[]);
    assert_eq!(broker.url(), "amqp://10.77.0.3:5672");
    broker.declare_queue("q", Value::Null);
    assert_eq!(broker.queue_len("q"), 0);
    assert!(broker.ctl(&["status"]).contains("rabbit@10.77.0.3"));
}

#[test]
fn a_network_ends_with_its_process() {
    // An interface that a network left in the namespace of this machine would be here.
    let links = || std::fs::read_to_string("/proc/thread-self/net/dev").expect("the interfaces of this machine");
    let before = links();
    const CHILD: &str = "OUTBOX_TEST_NETWORK";
    if std::env::var_os(CHILD).is_some() {
        let Some(network) = Network::start("") else { return };
        let host = network.host();
        println!("made {}", host.address());
        std::io::stdin()
            .read_line(&mut String::new())
            .expect("read until the end");
        return;
    }
    let Some(network) = Network::start("a network ends with its process") else {
        return;
    };
    drop(network);
    assert_eq!(
        links().lines().count(),
        before.lines().count(),
        "the thread is back where it was"
    );
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child
        .args([
            "--exact",
            "support_selftest::a_network_ends_with_its_process",
            "--nocapture",
        ])
        .env(CHILD, "1");
    child
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped());
    let mut child = child.spawn().expect("start a test");
    let mut printed = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("made 10.77.0.2") {
        line.clear();
        let read = std::io::BufRead::read_line(&mut printed, &mut line).expect("read");
        assert!(read > 0, "the child ended");
    }
    process::kill(&mut child);
    assert_eq!(links().lines().count(), before.lines().count());
}

// ---- repeats that faults explain ------------------------------------------------------------------------------------

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

/// Message `seq` of the lane "k", labelled by its seq, that was in flight between these seconds.
fn message(seq: i64, [enqueued_s, settled_s]: [u64; 2], refusals: usize) -> Message {
    Message {
        label: seq.to_string(),
        lane: "k".into(),
        seq,
        enqueued_at: at(enqueued_s),
        settled_at: at(settled_s),
        refusals,
    }
}

fn doubled(labels: impl IntoIterator<Item = i64>) -> Verdict {
    Verdict {
        doubled: labels.into_iter().map(|label| label.to_string()).collect(),
        ..Verdict::default()
    }
}

/// Whether faults explain the repeats of these messages.
fn explain(faults: &Faults, verdict: &Verdict, messages: &[Message]) -> bool {
    std::panic::catch_unwind(|| faults.assert_explain(verdict, messages)).is_ok()
}

/// One fault of a worker from second 10 to second 20.
fn fault() -> Faults {
    let mut faults = Faults::default();
    faults.add(at(10)..at(20), 1, 0);
    faults
}

#[test]
fn a_fault_explains_repeats_of_messages_in_flight_and_no_others() {
    let explained = |lasted| explain(&fault(), &doubled([1]), &[message(1, lasted, 0)]);
    assert!(explained([1, 11]) && explained([12, 13]) && explained([19, 30]) && explained([1, 30]));
    assert!(!explained([1, 9]), "settled before the fault");
    assert!(!explained([21, 30]), "enqueued after the fault");
    assert!(!explain(&fault(), &doubled([2]), &[message(1, [1, 11], 0)]), "unknown");
    assert!(!explain(&Faults::default(), &doubled([1]), &[message(1, [1, 30], 0)]));
    assert!(explain(&Faults::default(), &doubled([]), &[]));
}

#[test]
fn a_fault_explains_at_most_the_messages_that_its_workers_may_have_in_flight() {
    let most = IN_FLIGHT_MAX as i64;
    let messages: Vec<Message> = (0..=most).map(|seq| message(seq, [1, 11], 0)).collect();
    assert!(explain(&fault(), &doubled(0..most), &messages));
    assert!(!explain(&fault(), &doubled(0..=most), &messages));
    let mut two = fault();
    two.add(at(30)..at(40), 1, 0);
    assert!(
        !explain(&two, &doubled(0..=most), &messages),
        "none was in flight at the second fault"
    );
    let longer: Vec<Message> = (0..=most)
        .map(|seq| message(seq, [1, 31 - (seq as u64 % 2) * 20], 0))
        .collect();
    assert!(explain(&two, &doubled(0..=most), &longer));
    let mut none_affected = Faults::default();
    none_affected.add(at(10)..at(20), 0, 0);
    assert!(!explain(&none_affected, &doubled([0]), &messages));
}

#[test]
fn a_refusal_explains_one_repeat_of_each_message_behind_it() {
    let explained =
        |labels: &[i64], messages: &[Message]| explain(&Faults::default(), &doubled(labels.to_vec()), messages);
    let messages = [message(1, [1, 5], 1), message(2, [2, 6], 0), message(3, [7, 8], 0)];
    assert!(explained(&[2], &messages));
    assert!(!explained(&[2, 2], &messages), "one refusal");
    assert!(!explained(&[1], &messages), "the refused message itself");
    assert!(!explained(&[3], &messages), "enqueued when the refused one was settled");
    let elsewhere = Message {
        lane: "l".into(),
        ..message(2, [2, 6], 0)
    };
    assert!(!explained(&[2], &[message(1, [1, 5], 1), elsewhere]), "another key");
}

#[test]
fn only_a_worker_that_hung_explains_messages_out_of_order() {
    let late = |count: i64| Verdict {
        reordered: (0..count).map(|label| label.to_string()).collect(),
        ..Verdict::default()
    };
    let messages: Vec<Message> = (0..65).map(|seq| message(seq, [1, 11], 0)).collect();
    let mut hung = Faults::default();
    hung.add(at(10)..at(20), 1, 1);
    assert!(explain(&hung, &late(64), &messages));
    assert!(!explain(&hung, &late(65), &messages));
    assert!(!explain(&fault(), &late(1), &messages));
}

#[test]
fn faults_explain_no_loss() {
    let lost = Verdict {
        lost: vec!["1".into()],
        ..Verdict::default()
    };
    assert!(!explain(&fault(), &lost, &[message(1, [1, 30], 0)]));
}
