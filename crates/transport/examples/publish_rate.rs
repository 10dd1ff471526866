//! How fast is the publisher, next to bare lapin? Run by hand: OUTBOX_BROKER_PORT=… cargo run --release --example
//! publish_rate [rounds] [messages]. Both publish 300-byte bodies to one classic durable queue, in turn, in one
//! process, with the properties and headers of the extension.
//!
//! The bare loop is the fastest plain form: poll each publish once in order, await them, await the confirms, window
//! 1,000.

use lapin::options::*;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use outbox_transport::*;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

const QUEUE: &str = "transport-rate";
const WINDOW: usize = 1000;

fn main() {
    let port: u16 = std::env::var("OUTBOX_BROKER_PORT")
        .expect("OUTBOX_BROKER_PORT")
        .parse()
        .unwrap();
    let arguments: Vec<usize> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let rounds = arguments.first().copied().unwrap_or(7);
    let count = arguments.get(1).copied().unwrap_or(30_000);

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (_connection, channel) = runtime.block_on(bare_channel(port));
    let mut publisher = connected(port);
    let (mut rates, mut bare_rates) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        // Which one goes first alternates: the broker's speed drifts.
        for turn in 0..2 {
            runtime.block_on(purge(&channel));
            let (rate, cpu_us) = measure(count, || {
                if (round + turn) % 2 == 0 {
                    runtime.block_on(bare_run(&channel, count));
                } else {
                    run(&mut publisher, count);
                }
            });
            let bare = (round + turn) % 2 == 0;
            println!(
                "{:9} {rate:8.0}/s  {cpu_us:5.1} µs CPU a message",
                if bare { "bare" } else { "publisher" }
            );
            if bare { bare_rates.push(rate) } else { rates.push(rate) }
        }
    }
    let (rate, bare_rate) = (median(&mut rates), median(&mut bare_rates));
    println!(
        "median: publisher {rate:.0}/s, bare {bare_rate:.0}/s, ratio {:.2}",
        rate / bare_rate
    );

    let mut latencies: Vec<f64> = (0..500).map(|n| one_message(&mut publisher, n)).collect();
    let mut bare: Vec<f64> = (0..500).map(|_| runtime.block_on(bare_message(&channel))).collect();
    println!(
        "one message on an idle connection, hand-over to outcome: median {:.3} ms, bare lapin {:.3} ms",
        median(&mut latencies),
        median(&mut bare)
    );
    runtime.block_on(purge(&channel));
    assert!(publisher.stop(Duration::from_secs(5)));
}

/// Messages a second, and CPU time of this process a message.
fn measure(count: usize, work: impl FnOnce()) -> (f64, f64) {
    let cpu_s = || {
        // SAFETY: rusage is plain data, filled by the call.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            libc::getrusage(libc::RUSAGE_SELF, &mut usage);
            usage
        };
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
        seconds(usage.ru_utime) + seconds(usage.ru_stime)
    };
    let (started, cpu_before) = (Instant::now(), cpu_s());
    work();
    (
        count as f64 / started.elapsed().as_secs_f64(),
        (cpu_s() - cpu_before) / count as f64 * 1e6,
    )
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn connected(port: u16) -> Publisher {
    let address = parse_url(&format!("amqp://guest@127.0.0.1:{port}")).unwrap();
    let config = AmqpConfig {
        window: WINDOW,
        ..AmqpConfig::new(address, Secret::new("guest"))
    };
    let mut publisher = Publisher::start(config, outbox_transport::Waker::new().unwrap()).unwrap();
    while !wait(&mut publisher).contains(&PublisherEvent::State(ConnectionState::Connected)) {}
    publisher
}

fn wait(publisher: &mut Publisher) -> Vec<PublisherEvent> {
    let mut poll = libc::pollfd {
        fd: publisher.waker().fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&mut poll, 1, 10_000) };
    publisher.waker().clear();
    publisher.drain()
}

fn text(value: String) -> HeaderValue {
    HeaderValue::Text(value.into())
}

fn message(handle: u64) -> Publication {
    Publication {
        handle,
        address: QUEUE.into(),
        key: None,
        properties: Properties {
            message_id: format!("0190a0c2-0000-7000-8000-{handle:012}"),
            kind: Some("OrderPlaced".to_owned()),
            content_type: "application/json".into(),
            timestamp_s: Some(1_700_000_000),
            app_id: "outbox".into(),
            headers: vec![
                ("id".into(), text(format!("0190a0c2-0000-7000-8000-{handle:012}"))),
                ("aggregate_type".into(), text("order".to_owned())),
                ("aggregate_id".into(), text(handle.to_string())),
                ("partition_key".into(), HeaderValue::Int(7)),
                ("seq".into(), HeaderValue::Int(handle as i64)),
                ("lease_epoch".into(), HeaderValue::Int(1)),
                ("attempt".into(), HeaderValue::Int(1)),
            ],
            ..Properties::default()
        },
        body: vec![b'x'; 300],
    }
}

fn confirmed(events: Vec<PublisherEvent>) -> usize {
    let mut count = 0;
    for event in events {
        if let PublisherEvent::Outcomes(outcomes) = event {
            assert!(outcomes.iter().all(|o| o.outcome == Outcome::Confirmed));
            count += outcomes.len();
        }
    }
    count
}

fn run(publisher: &mut Publisher, count: usize) {
    let mut batches = (0..count as u64)
        .step_by(500)
        .map(|first| (first..first + 500).map(message).collect());
    let (mut next, mut done) = (batches.next(), 0);
    while done < count {
        while let Some(batch) = next.take() {
            match publisher.try_publish(batch) {
                Ok(()) => next = batches.next(),
                Err(batch) => {
                    next = Some(batch);
                    break;
                }
            }
        }
        publisher.wake_after(64.min(count - done)); // as a worker that drains a backlog
        done += confirmed(wait(publisher));
    }
    publisher.wake_after(1);
}

fn one_message(publisher: &mut Publisher, handle: u64) -> f64 {
    let started = Instant::now();
    publisher.try_publish(vec![message(handle)]).unwrap();
    while confirmed(wait(publisher)) == 0 {}
    started.elapsed().as_secs_f64() * 1e3
}

async fn bare_channel(port: u16) -> (Connection, Channel) {
    let uri = format!("amqp://127.0.0.1:{port}/%2f?frame_max=73728");
    let connection = Connection::connect(&uri, ConnectionProperties::default())
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    let options = QueueDeclareOptions {
        durable: true,
        ..Default::default()
    };
    channel
        .queue_declare(QUEUE.into(), options, FieldTable::default())
        .await
        .unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    (connection, channel)
}

async fn purge(channel: &Channel) {
    channel
        .queue_purge(QUEUE.into(), QueuePurgeOptions::default())
        .await
        .unwrap();
}

async fn bare_publish(channel: &Channel, message: Publication) -> lapin::PublisherConfirm {
    let given = message.properties;
    let mut headers = FieldTable::default();
    for (name, value) in given.headers {
        let value = match value {
            HeaderValue::Text(text) => AMQPValue::LongString(text.into_string().into()),
            HeaderValue::Int(int) => AMQPValue::LongLongInt(int),
            HeaderValue::Float(_) | HeaderValue::Bool(_) => unreachable!("`message` makes none"),
        };
        headers.insert(name.into_string().into(), value);
    }
    let properties = BasicProperties::default()
        .with_delivery_mode(2)
        .with_message_id(given.message_id.into())
        .with_type(given.kind.unwrap().into())
        .with_content_type(given.content_type.into_string().into())
        .with_timestamp(given.timestamp_s.unwrap())
        .with_app_id(given.app_id.into_string().into())
        .with_headers(headers);
    let options = BasicPublishOptions {
        mandatory: true,
        ..Default::default()
    };
    let (exchange, key) = ("".into(), message.address.into_string().into());
    channel
        .basic_publish(exchange, key, options, &message.body, properties)
        .await
        .unwrap()
}

async fn bare_run(channel: &Channel, count: usize) {
    for first in (0..count).step_by(WINDOW) {
        let mut confirms = Vec::with_capacity(WINDOW);
        let mut waiting = Vec::new();
        for n in first..first + WINDOW {
            let mut publish: Pin<Box<dyn Future<Output = _>>> = Box::pin(bare_publish(channel, message(n as u64)));
            match publish.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(confirm) => confirms.push(confirm),
                Poll::Pending => waiting.push(publish),
            }
        }
        for publish in waiting {
            confirms.push(publish.await);
        }
        for confirm in confirms {
            assert_eq!(confirm.await.unwrap(), Confirmation::Ack(None));
        }
    }
}

async fn bare_message(channel: &Channel) -> f64 {
    let started = Instant::now();
    bare_publish(channel, message(0)).await.await.unwrap();
    started.elapsed().as_secs_f64() * 1e3
}
