//! Row http: an HTTP destination emptying a backlog ÷ a bare client of ureq that sends the same requests. The receiver
//! runs in this process and takes its time for each answer, so that requests in flight decide, and not the receiver.

use std::collections::HashSet;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use outbox_core::message::{HeaderValue, Publication};
use support::{LONG, Receiver, Reply, Request, wait_for};
use ureq::Agent;
use ureq::http;

use crate::backlog::{self, KEYS};
use crate::cpu;
use crate::events::{self, EventMaker};
use crate::options::{Options, Placement};
use crate::report::{BenchReport, Sample, Side};
use crate::servers::Servers;

/// Requests in flight, the most that a destination may have.
const AT_A_TIME: usize = 64;
const ANSWERED_AFTER: Duration = Duration::from_millis(5);

/// What both sides send to.
struct Target {
    receiver: Receiver,
    /// The header that the outbox sends, of which the bare client has no other source.
    user_agent: String,
}

pub fn http(options: &Options, report: &mut BenchReport) {
    let mut servers = Servers::start(Placement::Unpinned, options.first_queue(), &[], report);
    servers.destination = "hook";
    let receiver = Receiver::start(|_| {
        thread::sleep(ANSWERED_AFTER);
        Reply::status(200)
    });
    servers.sql_execute(&format!(
        "create server hook foreign data wrapper outbox_http options (url '{}', concurrency '{AT_A_TIME}')",
        receiver.url("/hook")
    ));
    let maker = EventMaker::http();
    let target = check_that_both_send_the_same(&mut servers, receiver, &maker);
    servers.pause();
    let mut run = |side, count| match side {
        Side::Ours => outbox(&mut servers, &target, &maker, count),
        Side::Other => bare(&target, &maker, count),
    };
    let count = options.backlog / 5;
    // Warm-ups.
    run(Side::Other, count.div_ceil(10));
    run(Side::Ours, count.div_ceil(10));
    report.compare("http", ["outbox", "bare ureq"], |side| run(side, count));
    report.goal("", "a ratio of at least 0.9", |ratio, _| ratio >= 0.9);
}

fn outbox(servers: &mut Servers, target: &Target, maker: &EventMaker, count: u32) -> Sample {
    backlog::replace(servers, &maker.note, count, KEYS);
    let drained = backlog::drain(servers, count);
    target.check_that_all_arrived(count);
    Sample::default()
        .result("", "/s", drained.rate)
        .detail("CPU of the worker, a message", "µs", drained.cpu.workers)
        .detail("CPU of other Postgres, a message", "µs", drained.cpu.postgres)
        .detail("CPU of the receiver, a message", "µs", drained.cpu.bench)
}

fn bare(target: &Target, maker: &EventMaker, count: u32) -> Sample {
    let messages = (0..count).map(|n| {
        let (seq, id) = (i64::from(n) + 100_000, events::id(n.into()));
        maker.message(seq, &events::order(n % KEYS), &id)
    });
    let requests: Vec<_> = messages.map(|message| target.request(message)).collect();
    let before = cpu::of_process(std::process::id());
    let started = Instant::now();
    let client = send_all(requests);
    let took = started.elapsed();
    // The threads of the client have ended, and so only the receiver is left.
    let receiver_us = cpu::of_process(std::process::id()) - before;
    let client_us: f64 = client.iter().map(|(_, us)| us).sum();
    target.check_that_all_arrived(count);
    let each = |us: f64| us / f64::from(count);
    Sample::default()
        .result("", "/s", f64::from(count) / took.as_secs_f64())
        .detail("CPU of the client, a message", "µs", each(client_us))
        .detail("CPU of the receiver, a message", "µs", each(receiver_us))
}

/// Sends all requests, each thread one after the other on its own connection. Returns the connections, which are still
/// open, and the processor time of their threads.
fn send_all(requests: Vec<http::Request<Vec<u8>>>) -> Vec<(Agent, f64)> {
    let rest = Mutex::new(requests.into_iter());
    let next = || rest.lock().expect("no panic").next();
    thread::scope(|threads| {
        let clients: Vec<_> = (0..AT_A_TIME)
            .map(|_| {
                threads.spawn(|| {
                    let agent: Agent = Agent::config_builder()
                        .user_agent("")
                        .accept("")
                        .accept_encoding("identity")
                        .build()
                        .into();
                    while let Some(request) = next() {
                        let mut answer = agent.run(request).expect("an answer");
                        answer.body_mut().read_to_vec().expect("a body"); // or the connection is not used again
                    }
                    (agent, cpu::of_this_thread())
                })
            })
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("no panic"))
            .collect()
    })
}

impl Target {
    /// The request that the outbox makes of a message.
    fn request(&self, message: Publication) -> http::Request<Vec<u8>> {
        let properties = message.properties;
        let request = http::Request::post(self.receiver.url("/hook"))
            .header("user-agent", &self.user_agent)
            .header("idempotency-key", &properties.message_id)
            .header("webhook-id", &properties.message_id)
            .header("content-type", properties.content_type.as_str());
        let request = properties.headers.iter().fold(request, |request, (name, value)| {
            let value = match value {
                HeaderValue::Text(text) => text.to_string(),
                HeaderValue::Int(int) => int.to_string(),
                HeaderValue::Float(float) => float.to_string(),
                HeaderValue::Bool(bool) => bool.to_string(),
            };
            request.header(name.as_str(), value)
        });
        request.body(message.body).expect("a request")
    }

    fn check_that_all_arrived(&self, count: u32) {
        let requests = self.receiver.take_requests();
        let ids: HashSet<&str> = requests.iter().map(|request| request.header("webhook-id")).collect();
        assert_eq!(
            (requests.len(), ids.len()),
            (count as usize, count as usize),
            "each once"
        );
    }
}

/// Compares one request of each side.
fn check_that_both_send_the_same(servers: &mut Servers, receiver: Receiver, maker: &EventMaker) -> Target {
    backlog::load(servers, &maker.note, 1, KEYS);
    let first = |receiver: &Receiver| wait_for("a request", LONG, || receiver.take_requests().pop());
    let ours = first(&receiver);
    let target = Target {
        user_agent: ours.header("user-agent").to_owned(),
        receiver,
    };
    let seq = ours.header("outbox-seq").parse().expect("a number");
    send_all(vec![target.request(maker.message(
        seq,
        &events::order(0),
        &events::id(0),
    ))]);
    assert_eq!(
        shape(&ours),
        shape(&first(&target.receiver)),
        "the outbox and the bare client send the same"
    );
    target
}

/// The path, the length of the body, and the lengths of the headers by name. That of the epoch is random.
fn shape(request: &Request) -> (&str, usize, Vec<(&str, usize)>) {
    let headers = request.headers.iter().map(|(name, value)| {
        let is_random = name == "outbox-lease-epoch";
        (name.as_str(), if is_random { 0 } else { value.len() })
    });
    (&request.path, request.body.len(), headers.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_sent_once_with_the_headers_of_its_message() {
        let target = Target {
            receiver: Receiver::start(|_| Reply::status(200)),
            user_agent: "outbox/0 (bench)".into(),
        };
        let maker = EventMaker::http();
        let message = |n: u32| maker.message(100_000, &events::order(n), &events::id(n.into()));
        let requests: Vec<_> = (0..200).map(|n| target.request(message(n))).collect();
        assert_eq!(send_all(requests).len(), AT_A_TIME);
        target.check_that_all_arrived(200);
        send_all(vec![target.request(message(7))]);
        let sent = target.receiver.take_requests().pop().expect("a request");
        assert_eq!(sent.body, message(7).body);
        let header = ["webhook-id", "outbox-aggregate-id", "user-agent"].map(|name| sent.header(name));
        assert_eq!(header, [&*events::id(7), "000007", "outbox/0 (bench)"]);
    }
}
