//! Shared by the test files: a publisher whose events are collected, and facts about the threads of this process.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod peer;
pub mod receiver;
#[path = "../../../../tests/support/wait.rs"]
pub mod wait;

use outbox_transport::{
    AmqpConfig, Answered, ConnectionState, Outcome, Properties, Publication, Publisher, PublisherEvent, Publishers,
    Resolver, Secret, Transport, Waker,
};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The longest wait of any test. Only a test that fails waits this long.
pub const DEADLINE: Duration = Duration::from_secs(300);
/// The limit of a stop. Each of its waits takes at most a third of it.
const STOP_LIMIT: Duration = Duration::from_secs(6);

/// A publisher and all its events so far.
pub struct Desk {
    pub publisher: Publisher,
    pub outcomes: HashMap<u64, Outcome>,
    pub answered_at: HashMap<u64, Instant>,
    /// The last state before each outcome.
    pub answered_in: HashMap<u64, ConnectionState>,
    pub states: Vec<ConnectionState>,
    pub died: Option<String>,
}

impl Desk {
    pub fn start(config: impl Transport) -> Self {
        Self::of(Publisher::start(config, Waker::new().expect("an eventfd")).expect("publisher starts"))
    }

    /// Starts a publisher that gets the addresses of names from `resolver`.
    pub fn resolving(config: impl Transport, resolver: Resolver) -> Self {
        let publishers = Publishers::with_resolver(Waker::new().expect("an eventfd"), resolver);
        Self::of(publishers.start(config).expect("publisher starts"))
    }

    pub fn of(publisher: Publisher) -> Self {
        Self {
            publisher,
            outcomes: HashMap::new(),
            answered_at: HashMap::new(),
            answered_in: HashMap::new(),
            states: Vec::new(),
            died: None,
        }
    }

    /// Takes all events, without waiting, and clears the waker.
    pub fn collect(&mut self) {
        self.publisher.waker().clear();
        self.take();
    }

    /// Takes all events and leaves the waker as it is.
    pub fn take(&mut self) {
        for event in self.publisher.drain() {
            match event {
                PublisherEvent::State(state) => self.states.push(state),
                PublisherEvent::Ended(died) => self.died = died,
                PublisherEvent::Outcomes(outcomes) => {
                    for Answered { handle, outcome, at } in outcomes {
                        let before = self.outcomes.insert(handle, outcome);
                        assert_eq!(before, None, "two outcomes for {handle}");
                        self.answered_at.insert(handle, at);
                        self.answered_in
                            .extend(self.states.last().map(|state| (handle, state.clone())));
                    }
                }
            }
        }
    }

    /// Waits on the eventfd, like the worker does.
    pub fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            self.collect();
            if done(self) {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "{what}: {:?}, {} outcomes, died {:?}",
                self.states,
                self.outcomes.len(),
                self.died
            );
            let mut poll = libc::pollfd {
                fd: self.publisher.waker().fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one live pollfd.
            unsafe { libc::poll(&mut poll, 1, left.as_millis() as i32) };
        }
    }

    /// Polls until this number of messages has outcomes, like a worker that does not wait for the waker.
    pub fn poll_until_answered(&mut self, count: usize) {
        let deadline = Instant::now() + DEADLINE;
        while self.outcomes.len() < count {
            assert!(Instant::now() < deadline, "{} outcomes", self.outcomes.len());
            self.take();
            std::thread::yield_now();
        }
    }

    pub fn is_woken(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.publisher.waker().fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live pollfd.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }

    pub fn until_connected(&mut self) {
        self.until("connected", |d| d.states.last() == Some(&ConnectionState::Connected));
    }

    pub fn until_answered(&mut self, count: usize) {
        self.until("answered", |d| d.outcomes.len() >= count);
    }

    /// Waits until the first `Down` and gives its reason and detail.
    pub fn until_down(&mut self) -> (outbox_transport::DownReason, String) {
        let down = |s: &ConnectionState| match s {
            ConnectionState::Down(fault) => Some((fault.reason, fault.finding.detail.clone())),
            _ => None,
        };
        self.until("down", |d| d.states.iter().any(|s| down(s).is_some()));
        self.states.iter().find_map(down).unwrap()
    }

    /// Hands over a batch; collects events while the queue is full.
    pub fn publish(&mut self, mut batch: Vec<Publication>) {
        let deadline = Instant::now() + DEADLINE;
        while let Err(back) = self.publisher.try_publish(batch) {
            assert!(Instant::now() < deadline, "the queue stays full");
            batch = back;
            let mut poll = libc::pollfd {
                fd: self.publisher.waker().fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one live pollfd.
            unsafe { libc::poll(&mut poll, 1, 10) };
            self.collect();
        }
    }

    /// Stops the publisher. Asserts that its thread ends in time, apart from what the machine loses.
    pub fn stop(&mut self) {
        wait::within("the stop", STOP_LIMIT, || {
            assert!(
                self.publisher.stop(STOP_LIMIT) || self.publisher.stop(DEADLINE),
                "the thread did not end"
            );
        });
        self.collect();
        assert_eq!(self.died, None);
    }
}

/// Finds these ports of this machine for a name, whatever the port in the URL.
pub fn resolver(ports: impl Fn(&str) -> Vec<u16> + Send + Sync + 'static) -> Resolver {
    Arc::new(move |endpoint| {
        let ports = ports(&endpoint.host).into_iter();
        Ok(ports.map(|port| ([127, 0, 0, 1], port).into()).collect())
    })
}

/// Longer than any test.
pub const NEVER: Duration = Duration::from_secs(3600);

/// A port where nothing listens.
pub fn refusing() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A port that accepts connections and does this with them.
pub fn accepting(mut play: impl FnMut(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().flatten().for_each(&mut play));
    port
}

/// Ports that accept connections and are of no use, and what they do.
pub fn useless() -> [(&'static str, u16); 3] {
    let mut open = Vec::new();
    [
        ("says nothing", accepting(move |stream| open.push(stream))),
        ("closes the connection", accepting(drop)),
        (
            "speaks another protocol",
            accepting(|mut stream| drop(stream.write_all(b"220 mail.example ESMTP\r\n"))),
        ),
    ]
}

/// A connection whose peer reads at most 64 kB in 40 ms, and whose socket holds little more.
pub struct SlowReader {
    stream: TcpStream,
    left: usize,
}

impl SlowReader {
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        socket2::SockRef::from(&stream).set_recv_buffer_size(32 << 10)?;
        Ok(Self { stream, left: 0 })
    }
}

impl Read for SlowReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            // No value is ever sent on it: the timeout is the pause.
            let (_pause, paused) = mpsc::channel::<()>();
            let _ = paused.recv_timeout(Duration::from_millis(40));
            self.left = 64 << 10;
        }
        let most = buf.len().min(self.left);
        let bytes = self.stream.read(&mut buf[..most])?;
        self.left -= bytes;
        Ok(bytes)
    }
}

impl Write for SlowReader {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.stream.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// On a busy machine a broker can be silent for seconds. Only tests about patience have less of it.
pub fn config(port: u16) -> AmqpConfig {
    let address = outbox_transport::parse_url(&format!("amqp://guest@127.0.0.1:{port}")).unwrap();
    AmqpConfig {
        connect_timeout: DEADLINE,
        patience: DEADLINE,
        backoff_min: Duration::from_millis(20),
        ..AmqpConfig::new(address, Secret::new("guest"))
    }
}

pub fn publication(handle: u64, address: &str, body: Vec<u8>) -> Publication {
    Publication {
        handle,
        address: address.to_owned().into(),
        key: None,
        properties: Properties {
            message_id: format!("id-{handle}"),
            content_type: "application/json".into(),
            app_id: "outbox".into(),
            ..Properties::default()
        },
        body,
    }
}

/// This process' threads: name and blocked signals.
pub fn threads() -> Vec<(String, u64)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let status = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("status")).ok());
    let field = |status: &str, name: &str| {
        let line = status.lines().find(|l| l.starts_with(name)).unwrap_or_default();
        line.split_once(':')
            .map(|(_, v)| v.trim().to_owned())
            .unwrap_or_default()
    };
    status
        .map(|s| {
            (
                field(&s, "Name"),
                u64::from_str_radix(&field(&s, "SigBlk"), 16).unwrap(),
            )
        })
        .collect()
}

pub fn threads_named(name: &str) -> usize {
    threads().iter().filter(|(n, _)| n == name).count()
}
