//! The publisher against a real RabbitMQ. Runs only if OUTBOX_BROKER_PORT names the port of a private broker on
//! 127.0.0.1 (user guest); `make test` starts one. Without it each test reports that it was skipped. The tests that
//! change the broker's settings also need OUTBOX_BROKER_CTL, a command that works like `rabbitmqctl` on that broker.

mod support;

use lapin::options::*;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use outbox_transport::{
    AmqpConfig, ConnectionState, DownReason, ExchangeType, HeaderValue, Outcome, Properties, Secret,
};
use std::collections::HashMap;
use std::io::Write;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use support::{Desk, config, publication};

/// Tests share the broker; a test that changes its settings has it alone.
static BROKER: RwLock<()> = RwLock::new(());

fn broker_port() -> Option<(u16, RwLockReadGuard<'static, ()>)> {
    let port = std::env::var("OUTBOX_BROKER_PORT").ok().and_then(|p| p.parse().ok());
    if port.is_none() {
        report_skipped("a test against a real broker: OUTBOX_BROKER_PORT is not set");
    }
    Some((port?, BROKER.read().unwrap_or_else(|e| e.into_inner())))
}

/// Does not use eprintln: the test harness swallows its output when a test passes.
fn report_skipped(what: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED {what}\n").as_bytes());
}

/// Runs commands of the broker's operator, and `undo` at the end.
struct Operator {
    command: String,
    undo: &'static str,
    _alone: RwLockWriteGuard<'static, ()>,
}

impl Operator {
    fn new(undo: &'static str) -> Option<(u16, Self)> {
        let port = std::env::var("OUTBOX_BROKER_PORT").ok().and_then(|p| p.parse().ok());
        let command = std::env::var("OUTBOX_BROKER_CTL").ok().filter(|_| port.is_some());
        if command.is_none() {
            report_skipped("a test that needs the broker's operator: OUTBOX_BROKER_CTL is not set");
        }
        let alone = BROKER.write().unwrap_or_else(|e| e.into_inner());
        Some((
            port?,
            Self {
                command: command?,
                undo,
                _alone: alone,
            },
        ))
    }

    fn run(&self, arguments: &str) {
        let shell = format!("{} {arguments}", self.command);
        let done = std::process::Command::new("sh").args(["-c", &shell]).output().unwrap();
        assert!(done.status.success(), "{shell}: {done:?}");
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        self.run(self.undo);
    }
}

/// A client that creates and reads queues and exchanges.
struct Admin {
    runtime: tokio::runtime::Runtime,
    _connection: Connection,
    channel: Channel,
}

impl Admin {
    fn new(port: u16) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let uri = format!("amqp://127.0.0.1:{port}/%2f?frame_max=131072");
        let (connection, channel) = runtime.block_on(async {
            let connection = Connection::connect(&uri, ConnectionProperties::default())
                .await
                .unwrap();
            let channel = connection.create_channel().await.unwrap();
            (connection, channel)
        });
        Self {
            runtime,
            _connection: connection,
            channel,
        }
    }

    /// A durable queue, empty, that expires when unused.
    fn queue(&self, name: &str) {
        let mut arguments = FieldTable::default();
        arguments.insert("x-expires".into(), 120_000i32.into());
        let options = QueueDeclareOptions {
            durable: true,
            ..Default::default()
        };
        self.runtime.block_on(async {
            self.channel
                .queue_declare(name.into(), options, arguments)
                .await
                .unwrap();
            self.channel
                .queue_purge(name.into(), QueuePurgeOptions::default())
                .await
                .unwrap();
        });
    }

    fn exchange(&self, name: &str, kind: ExchangeKind) {
        let options = ExchangeDeclareOptions {
            durable: true,
            ..Default::default()
        };
        let declare = self
            .channel
            .exchange_declare(name.into(), kind, options, FieldTable::default());
        self.runtime.block_on(declare).unwrap();
    }

    fn bind(&self, queue: &str, exchange: &str, key: &str) {
        let options = QueueBindOptions::default();
        let bind = self.channel.queue_bind(
            queue.into(),
            exchange.into(),
            key.into(),
            options,
            FieldTable::default(),
        );
        self.runtime.block_on(bind).unwrap();
    }

    fn delete_exchange(&self, name: &str) {
        let delete = self
            .channel
            .exchange_delete(name.into(), ExchangeDeleteOptions::default());
        self.runtime.block_on(delete).unwrap();
    }

    fn count(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions {
            passive: true,
            ..Default::default()
        };
        let declare = self.channel.queue_declare(queue.into(), options, FieldTable::default());
        self.runtime.block_on(declare).unwrap().message_count()
    }

    fn take(&self, queue: &str) -> Option<lapin::message::Delivery> {
        let get = self.channel.basic_get(queue.into(), BasicGetOptions { no_ack: true });
        self.runtime.block_on(get).unwrap().map(|m| m.delivery)
    }
}

#[test]
fn returns_among_many_messages_are_never_misattributed() {
    let Some((port, _shared)) = broker_port() else { return };
    const ROUNDS: u64 = 5;
    const ROUND: u64 = 12_000;
    let admin = Admin::new(port);
    admin.queue("transport-sevenths");
    let mut desk = Desk::start(AmqpConfig {
        window: 1000,
        ..config(port)
    });
    desk.until_connected();
    let unroutable = |handle: u64| handle.is_multiple_of(7);
    let key = |handle| {
        if unroutable(handle) {
            "transport-nowhere"
        } else {
            "transport-sevenths"
        }
    };
    for first in (0..ROUNDS * ROUND).step_by(500) {
        desk.publish(
            (first..first + 500)
                .map(|h| publication(h, key(h), vec![b'x'; 300]))
                .collect(),
        );
        if first.is_multiple_of(ROUND) {
            desk.until_answered(first as usize); // now and then the window runs empty
        }
    }
    desk.until_answered((ROUNDS * ROUND) as usize);
    let wrong = desk.outcomes.iter().filter(|(handle, outcome)| match outcome {
        Outcome::Confirmed => unroutable(**handle),
        Outcome::Returned { code: 312, .. } => !unroutable(**handle),
        _ => true,
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(
        wrong.is_empty(),
        "{} misattributed: {:?}",
        wrong.len(),
        &wrong[..wrong.len().min(5)]
    );
    let arrived = admin.count("transport-sevenths");
    assert_eq!(
        arrived as usize,
        (0..ROUNDS * ROUND).filter(|h| !unroutable(*h)).count()
    );
    desk.stop();
}

#[test]
fn returns_among_few_messages_are_never_misattributed_while_confirms_wait() {
    let Some((port, _shared)) = broker_port() else { return };
    let admin = Admin::new(port);
    admin.queue("transport-few");
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    desk.publisher.wake_after(64);
    let unroutable = |handle: u64| handle % 7 < 2;
    let key = |handle| match unroutable(handle) {
        true => "transport-nowhere",
        false => "transport-few",
    };
    let mut count = 0;
    for round in 0..400 {
        let next = count + 1 + round % 20;
        desk.publish(
            (count..next)
                .map(|handle| publication(handle, key(handle), vec![b'x'; 300]))
                .collect(),
        );
        if round % 3 == 0 {
            desk.poll_until_answered(next as usize); // else others are under way when the next ones go
        }
        count = next;
    }
    desk.poll_until_answered(count as usize);
    for handle in 0..count {
        let is_right = match &desk.outcomes[&handle] {
            Outcome::Confirmed => !unroutable(handle),
            Outcome::Returned { code: 312, .. } => unroutable(handle),
            _ => false,
        };
        assert!(is_right, "{handle}: {:?}", desk.outcomes[&handle]);
    }
    assert_eq!(
        u64::from(admin.count("transport-few")),
        (0..count).filter(|handle| !unroutable(*handle)).count() as u64
    );
    desk.stop();
}

#[test]
fn a_returned_message_keeps_the_connection_whatever_its_headers_hold() {
    let Some((port, _shared)) = broker_port() else { return };
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    let mut message = publication(1, "transport-nowhere", b"body".to_vec());
    // Each value contains an 'A' and two NULs, as an array would.
    let headers = (0..70).map(|n| (format!("h{n}").into(), HeaderValue::Int(0x0041_0000)));
    message.properties.headers = headers.collect();
    desk.publish(vec![message]);
    desk.until_answered(1);
    assert!(
        matches!(desk.outcomes[&1], Outcome::Returned { code: 312, .. }),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(desk.states.last(), Some(&ConnectionState::Connected));
    desk.stop();
}

#[test]
fn a_message_arrives_unchanged() {
    let Some((port, _shared)) = broker_port() else { return };
    let admin = Admin::new(port);
    admin.queue("transport-as-given");
    let mut desk = Desk::start(AmqpConfig {
        expiration_ms: Some(600_000),
        priority: Some(7),
        ..config(port)
    });
    desk.until_connected();
    let mut message = publication(1, "transport-as-given", b"\0\xff{}".to_vec());
    message.properties = Properties {
        message_id: "the id".into(),
        kind: Some("order.created".into()),
        content_type: "application/json".into(),
        timestamp_s: Some(1_700_000_000),
        app_id: "outbox".into(),
        correlation_id: Some("c".into()),
        headers: vec![
            ("text".into(), HeaderValue::Text("v\0é".into())),
            ("int".into(), HeaderValue::Int(i64::MIN)),
            ("float".into(), HeaderValue::Float(0.1)),
            ("bool".into(), HeaderValue::Bool(true)),
        ],
    };
    let empty = publication(2, "transport-as-given", Vec::new());
    let large = publication(3, "transport-as-given", vec![7; 1_000_000]);
    desk.publish(vec![message, empty, large]);
    desk.until_answered(3);
    assert!(
        desk.outcomes.values().all(|o| *o == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    let got = admin.take("transport-as-given").unwrap();
    assert_eq!(got.data, b"\0\xff{}");
    let p = &got.properties;
    assert_eq!(p.message_id().as_ref().unwrap().as_str(), "the id");
    assert_eq!(p.kind().as_ref().unwrap().as_str(), "order.created");
    assert_eq!(p.content_type().as_ref().unwrap().as_str(), "application/json");
    assert_eq!(p.correlation_id().as_ref().unwrap().as_str(), "c");
    assert_eq!(p.app_id().as_ref().unwrap().as_str(), "outbox");
    assert_eq!((p.timestamp(), p.delivery_mode()), (&Some(1_700_000_000), &Some(2)));
    assert_eq!(p.expiration().as_ref().unwrap().as_str(), "600000");
    assert_eq!(p.priority(), &Some(7));
    let headers: HashMap<_, _> = p
        .headers()
        .as_ref()
        .unwrap()
        .inner()
        .iter()
        .map(|(k, v)| (k.as_str(), format!("{v:?}")))
        .collect();
    assert!(
        headers["int"].contains(&i64::MIN.to_string()) && headers["float"].contains("0.1"),
        "{headers:?}"
    );
    assert!(
        headers["bool"].contains("true") && headers.contains_key("text"),
        "{headers:?}"
    );
    assert_eq!(admin.take("transport-as-given").unwrap().data, b"");
    assert_eq!(admin.take("transport-as-given").unwrap().data, vec![7; 1_000_000]);
    desk.stop();
}

#[test]
fn a_wrong_password_is_named_and_not_shown() {
    let Some((port, _shared)) = broker_port() else { return };
    let mut desk = Desk::start(AmqpConfig {
        password: Secret::new("hunter2"),
        ..config(port)
    });
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::AUTH_REFUSED, "{detail}");
    assert!(!detail.contains("hunter2"));
    desk.stop();
}

#[test]
fn a_missing_vhost_is_named() {
    let Some((port, _shared)) = broker_port() else { return };
    let mut desk = Desk::start(AmqpConfig {
        vhost: "transport-missing".into(),
        ..config(port)
    });
    let (reason, detail) = desk.until_down();
    assert_eq!(reason.name(), "vhost_refused", "{detail}");
    desk.stop();
}

#[test]
fn a_missing_exchange_is_named_and_used_once_it_exists() {
    let Some((port, _shared)) = broker_port() else { return };
    let admin = Admin::new(port);
    admin.delete_exchange("transport-late");
    let mut desk = Desk::start(AmqpConfig {
        exchange: "transport-late".into(),
        ..config(port)
    });
    let (reason, detail) = desk.until_down();
    assert_eq!(reason.name(), "exchange_missing", "{detail}");
    assert!(detail.contains("transport-late"), "{detail}");
    desk.publish(vec![publication(1, "k", Vec::new())]);
    desk.until_answered(1);
    assert!(matches!(
        desk.outcomes[&1],
        Outcome::Lost { .. } | Outcome::Unanswered { .. }
    ));
    admin.exchange("transport-late", ExchangeKind::Fanout);
    desk.until_connected();
    desk.stop();
    admin.delete_exchange("transport-late");
}

#[test]
fn an_exchange_of_another_type_is_named() {
    let Some((port, _shared)) = broker_port() else { return };
    let admin = Admin::new(port);
    admin.exchange("transport-other", ExchangeKind::Fanout);
    let named = |exchange_type| AmqpConfig {
        exchange: "transport-other".into(),
        exchange_type,
        ..config(port)
    };
    let mut desk = Desk::start(named(ExchangeType::parse("topic").unwrap()));
    let (reason, detail) = desk.until_down();
    assert_eq!(reason.name(), "exchange_mismatch", "{detail}");
    desk.stop();
    let mut desk = Desk::start(named(ExchangeType::parse("fanout").unwrap()));
    desk.until_connected();
    desk.stop();
    admin.delete_exchange("transport-other");
}

#[test]
fn an_exchange_type_that_the_broker_does_not_know_is_named() {
    let Some((port, _shared)) = broker_port() else { return };
    let mut desk = Desk::start(AmqpConfig {
        exchange: "transport-typed".into(),
        exchange_type: ExchangeType::parse("x-unheard-of").unwrap(),
        ..config(port)
    });
    let (reason, detail) = desk.until_down();
    assert_eq!(reason.name(), "exchange_type_unknown", "{detail}");
    assert!(detail.contains("unknown exchange type 'x-unheard-of'"), "{detail}");
    desk.stop();
}

#[test]
fn a_configured_exchange_is_declared_durable_and_used() {
    let Some((port, _shared)) = broker_port() else { return };
    let admin = Admin::new(port);
    admin.delete_exchange("transport-wished");
    admin.queue("transport-wished");
    let wished = AmqpConfig {
        exchange: "transport-wished".into(),
        exchange_type: ExchangeType::parse("topic").unwrap(),
        ..config(port)
    };
    let mut desk = Desk::start(wished);
    desk.until_connected();
    admin.exchange("transport-wished", ExchangeKind::Topic); // would fail if declared otherwise
    admin.bind("transport-wished", "transport-wished", "a.#");
    desk.publish(vec![
        publication(1, "a.b", Vec::new()),
        publication(2, "b.a", Vec::new()),
    ]);
    desk.until_answered(2);
    assert_eq!(desk.outcomes[&1], Outcome::Confirmed);
    assert!(matches!(desk.outcomes[&2], Outcome::Returned { code: 312, .. }));
    desk.stop();
    admin.delete_exchange("transport-wished");
}

#[test]
fn predefined_exchanges_are_checked_and_not_declared() {
    let Some((port, _shared)) = broker_port() else { return };
    let named = |exchange: &str| AmqpConfig {
        exchange: exchange.into(),
        exchange_type: ExchangeType::parse("direct").unwrap(),
        ..config(port)
    };
    let mut desk = Desk::start(named("amq.topic"));
    desk.until_connected();
    desk.stop();
    let mut desk = Desk::start(named("amq.transport-missing"));
    assert_eq!(desk.until_down().0.name(), "exchange_missing");
    desk.stop();
}

#[test]
fn an_exchange_that_is_deleted_loses_only_outstanding_messages() {
    let Some((port, _shared)) = broker_port() else { return };
    let admin = Admin::new(port);
    let set_up = || {
        admin.exchange("transport-brief", ExchangeKind::Fanout);
        admin.queue("transport-brief");
        admin.bind("transport-brief", "transport-brief", "");
    };
    set_up();
    let mut desk = Desk::start(AmqpConfig {
        exchange: "transport-brief".into(),
        ..config(port)
    });
    desk.until_connected();
    let batch = |handles: std::ops::Range<u64>| handles.map(|h| publication(h, "", vec![1])).collect();
    desk.publish(batch(0..100));
    desk.until_answered(100);
    assert!(desk.outcomes.values().all(|o| *o == Outcome::Confirmed));
    admin.delete_exchange("transport-brief");
    desk.publish(batch(100..200));
    desk.until_answered(200);
    assert!(
        (100..200).all(|h| matches!(&desk.outcomes[&h], Outcome::Lost { .. } | Outcome::Unanswered { .. })),
        "{:?}",
        desk.outcomes[&100]
    );
    let (reason, detail) = desk.until_down();
    assert_eq!(reason.name(), "exchange_missing", "{detail}");
    set_up();
    desk.until_connected();
    desk.publish(batch(200..300));
    desk.until_answered(300);
    assert!((200..300).all(|h| desk.outcomes[&h] == Outcome::Confirmed));
    desk.stop();
    admin.delete_exchange("transport-brief");
}

#[test]
fn a_broker_alarm_shows_as_blocked_and_costs_no_message() {
    const LIMIT: std::time::Duration = std::time::Duration::from_secs(5);
    let Some((port, operator)) = Operator::new("set_vm_memory_high_watermark absolute 4GB") else {
        return;
    };
    let admin = Admin::new(port);
    admin.queue("transport-alarm");
    let mut desk = Desk::start(AmqpConfig {
        confirm_timeout: LIMIT,
        ..config(port)
    });
    desk.until_connected();
    let batch = |first: u64| {
        (first..first + 10)
            .map(|h| publication(h, "transport-alarm", vec![1]))
            .collect()
    };
    desk.publish(batch(0));
    desk.until_answered(10);
    operator.run("set_vm_memory_high_watermark absolute 1MB");
    let alarm = "lists:any(fun(_) -> rabbit_alarm:get_alarms() =/= [] orelse receive after 10 -> false end end, lists:seq(1, 3000))";
    operator.run(&format!("eval 'true = {alarm}.'"));
    // The broker blocks a connection at its first publish after the alarm, not before.
    desk.publish(batch(10));
    desk.until("blocked", |d| {
        matches!(d.states.last(), Some(ConnectionState::Blocked { .. }))
    });
    desk.publish(batch(20));
    support::peer::until_one_times_out(LIMIT);
    desk.collect();
    assert_eq!((desk.outcomes.len(), desk.states.len()), (10, 3), "{:?}", desk.states);
    drop(operator);
    desk.until_answered(30);
    assert!(
        desk.outcomes.values().all(|o| *o == Outcome::Confirmed),
        "{:?}",
        desk.outcomes
    );
    assert_eq!(desk.states.last(), Some(&ConnectionState::Connected));
    assert_eq!(admin.count("transport-alarm"), 30);
    desk.stop();
}

#[test]
fn a_message_over_the_brokers_limit_fails_alone() {
    // RabbitMQ 4 reads the limit from a persistent term, older versions from the environment of the application.
    let undo = "eval 'application:set_env(rabbit, max_message_size, 16777216), persistent_term:put(max_message_size, 16777216).'";
    let Some((port, operator)) = Operator::new(undo) else {
        return;
    };
    operator.run(&undo.replace("16777216", "100000"));
    let admin = Admin::new(port);
    admin.queue("transport-limit");
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    let bytes = [100, 100_000, 100_001, 100];
    desk.publish(
        (1..)
            .zip(bytes)
            .map(|(h, n)| publication(h, "transport-limit", vec![1; n]))
            .collect(),
    );
    desk.until_answered(4);
    let expected = "the body has 100001 bytes; max_message_size of the broker is 100000";
    assert!(
        matches!(&desk.outcomes[&3], Outcome::Refused { reason } if reason == expected),
        "{:?}",
        desk.outcomes
    );
    for handle in [1, 2, 4] {
        assert!(
            matches!(
                &desk.outcomes[&handle],
                Outcome::Unanswered { .. } | Outcome::Lost { .. } | Outcome::Confirmed
            ),
            "{:?}",
            desk.outcomes
        );
    }
    desk.stop();
}

/// RabbitMQ 4.1 and later accept no smaller frames.
#[test]
fn the_smallest_frames_of_the_broker_carry_large_bodies_and_bound_the_headers() {
    let undo = "eval 'application:set_env(rabbit, frame_max, 131072).'";
    let Some((port, operator)) = Operator::new(undo) else {
        return;
    };
    operator.run(&undo.replace("131072", "8192"));
    let admin = Admin::new(port);
    admin.queue("transport-frames");
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    let with_header = |handle, bytes| {
        let mut message = publication(handle, "transport-frames", vec![7; 1_000_000]);
        message.properties.headers = vec![("h".into(), HeaderValue::Text("v".repeat(bytes).into()))];
        message
    };
    desk.publish(vec![with_header(1, 8_000), with_header(2, 8_192), with_header(3, 1)]);
    desk.until_answered(3);
    assert_eq!(desk.outcomes[&1], Outcome::Confirmed);
    assert!(
        matches!(&desk.outcomes[&2], Outcome::Refused { reason } if reason.contains("the broker's limit is 8192")),
        "{:?}",
        desk.outcomes[&2]
    );
    assert_eq!(desk.outcomes[&3], Outcome::Confirmed);
    assert_eq!(admin.take("transport-frames").unwrap().data, vec![7; 1_000_000]);
    desk.stop();
}

#[test]
fn a_connection_closed_by_the_operator_is_replaced() {
    let Some((port, operator)) = Operator::new("status") else {
        return;
    };
    let mut desk = Desk::start(config(port));
    desk.until_connected();
    operator.run("close_all_connections maintenance");
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::CLOSED, "{detail}");
    assert!(detail.contains("maintenance"), "{detail}");
    desk.until("connected again", |d| {
        d.states.iter().filter(|s| **s == ConnectionState::Connected).count() >= 2
    });
    desk.stop();
}
