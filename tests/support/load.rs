//! Producers that write events until a test stops them. They record what they tried to commit and what the server
//! answered. They survive a restart of the server, as an application does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::wait::{pass_time_until, try_wait_for};
use crate::{Cluster, wait_until};
use postgres::error::SqlState;
use postgres::{Client, NoTls, Statement};
use serde_json::json;

use super::oracle::{Fate, Sent};
use super::{DB, LONG};

/// The work of the producers.
#[derive(Clone, Debug)]
pub struct Plan {
    pub writers: usize,
    /// The number of keys of all writers together. No two writers share a key, so the order of a writer's commits is
    /// the order of the key.
    pub keys: usize,
    /// Transactions per second of each writer. None: as fast as possible.
    pub transactions_per_s: Option<u32>,
    /// Each writer ends by itself after this number of events.
    pub events_per_writer: usize,
    /// Whether to roll back some transactions and savepoints, and to write several events in some transactions.
    pub mixed: bool,
    pub synchronous_commit: bool,
    pub database: &'static str,
    /// The beginning of all labels, so that two loads with the same keys differ.
    pub era: String,
    /// Whether each session lasts one transaction. Then a statement that needs the database without sessions can run at
    /// times.
    pub reconnects: bool,
    /// Further destinations of each event.
    pub also_to: &'static [&'static str],
    /// The statement that stores an event (payload $1, aggregate $2), enqueues it and returns its seq.
    pub statement: &'static str,
}

impl Default for Plan {
    /// 200 transactions a second with one event each, until the test stops them.
    fn default() -> Self {
        Self {
            writers: 2,
            keys: 20,
            transactions_per_s: Some(100),
            events_per_writer: usize::MAX,
            mixed: false,
            synchronous_commit: true,
            database: DB,
            era: String::new(),
            reconnects: false,
            also_to: &[],
            statement: "select outbox_publish('Loaded', $1::jsonb, 'load', $2::text, 'written')",
        }
    }
}

/// Running producers.
pub struct Load {
    stop: Arc<AtomicBool>,
    paused: Arc<AtomicBool>,
    committed: Arc<AtomicUsize>,
    writers: Vec<JoinHandle<Vec<Sent>>>,
}

impl Load {
    pub fn start(cluster: &Cluster, plan: &Plan) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let paused = Arc::new(AtomicBool::new(false));
        let committed = Arc::new(AtomicUsize::new(0));
        let writers = (0..plan.writers).map(|number| {
            let writer = Writer {
                number,
                plan: plan.clone(),
                conn_string: cluster.conn_string(plan.database),
                stop: Arc::clone(&stop),
                paused: Arc::clone(&paused),
                committed: Arc::clone(&committed),
                session: None,
                events: 0,
                random: 0x9e37_79b9_7f4a_7c15 ^ (number as u64 + 1),
                sent: Vec::new(),
            };
            std::thread::spawn(move || writer.run())
        });
        let writers = writers.collect();
        Self {
            stop,
            paused,
            committed,
            writers,
        }
    }

    /// The number of events committed so far.
    pub fn committed(&self) -> usize {
        self.committed.load(Ordering::Acquire)
    }

    /// Waits until `events` further events are committed.
    pub fn wait_for_more(&self, events: usize) {
        let goal = self.committed() + events;
        wait_until(&format!("{events} more commits"), LONG, || self.committed() >= goal);
    }

    /// With true, no new transaction begins; with false, transactions begin again.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Release);
    }

    /// Lets each writer finish its transaction, and returns the record of all writers.
    pub fn stop(self) -> Vec<Sent> {
        self.stop.store(true, Ordering::Release);
        self.finish()
    }

    /// Waits until each writer has written all that the plan says, and returns the record of all writers.
    pub fn finish(mut self) -> Vec<Sent> {
        let writers = std::mem::take(&mut self.writers);
        writers
            .into_iter()
            .flat_map(|writer| writer.join().expect("the writer does not panic"))
            .collect()
    }
}

impl Drop for Load {
    /// A failed test leaves no writer behind that waits for its server.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        for writer in self.writers.drain(..) {
            let _ = writer.join();
        }
    }
}

/// A connection with the publish statement prepared: to parse the statement each time would halve the rate of the
/// producers.
struct Session {
    client: Client,
    publish: Statement,
}

struct Writer {
    number: usize,
    plan: Plan,
    conn_string: String,
    stop: Arc<AtomicBool>,
    paused: Arc<AtomicBool>,
    committed: Arc<AtomicUsize>,
    session: Option<Session>,
    events: usize,
    random: u64,
    sent: Vec<Sent>,
}

impl Writer {
    fn run(mut self) -> Vec<Sent> {
        let mut due = Instant::now();
        while self.events < self.plan.events_per_writer && !self.stop.load(Ordering::Acquire) {
            if let Some(rate) = self.plan.transactions_per_s {
                due = Instant::now().max(due + Duration::from_secs(1) / rate);
                pass_time_until(due);
            }
            match self.paused.load(Ordering::Acquire) {
                true => _ = try_wait_for(LONG, || self.may_go_on().then_some(())),
                false => self.transaction(),
            }
        }
        self.sent
    }

    fn may_go_on(&self) -> bool {
        self.stop.load(Ordering::Acquire) || !self.paused.load(Ordering::Acquire)
    }

    fn transaction(&mut self) {
        let Some(mut session) = self.session.take().or_else(|| self.connect()) else {
            return;
        };
        let first = self.sent.len();
        let rolls_back = self.plan.mixed && self.chance(10);
        let written = self.write(&mut session);
        let ended = written.and_then(|()| {
            let fate = if rolls_back { Fate::RolledBack } else { Fate::Unknown };
            self.judge(first, fate);
            session
                .client
                .batch_execute(if rolls_back { "rollback" } else { "commit" })
        });
        match ended {
            Ok(()) if !rolls_back => {
                let committed = self.judge(first, Fate::Committed);
                self.committed.fetch_add(committed, Ordering::AcqRel);
                self.session = Some(session).filter(|_| !self.plan.reconnects);
            }
            Ok(()) => self.session = Some(session).filter(|_| !self.plan.reconnects),
            // The server is stopping or gone. Events written before COMMIT was sent are recorded as rolled back
            // already.
            Err(error) => assert!(is_end_of_session(&error), "writer {}: {error:?}", self.number),
        }
    }

    /// Sets the fate of the events since `first`, except those of a rolled back savepoint. Returns their number.
    fn judge(&mut self, first: usize, fate: Fate) -> usize {
        let open = self.sent[first..]
            .iter_mut()
            .filter(|sent| !(sent.fate == Fate::RolledBack && sent.payload["savepoint"] == "rolled back"));
        open.map(|sent| sent.fate = fate).count()
    }

    /// The statements of one transaction, without its end.
    fn write(&mut self, session: &mut Session) -> Result<(), postgres::Error> {
        session.client.batch_execute("begin")?;
        let key = self.next_random() as usize % (self.plan.keys / self.plan.writers).max(1);
        let events = if self.plan.mixed && self.chance(30) { 3 } else { 1 };
        for _ in 0..events {
            self.event(session, key, None)?;
        }
        if self.plan.mixed && self.chance(20) {
            session.client.batch_execute("savepoint s")?;
            self.event(session, key, Some("rolled back"))?;
            session.client.batch_execute("rollback to s")?;
            self.event(session, key, None)?;
            session.client.batch_execute("release s")?;
        }
        Ok(())
    }

    fn event(&mut self, session: &mut Session, key: usize, savepoint: Option<&str>) -> Result<(), postgres::Error> {
        self.events += 1;
        let label = format!("{}w{}-e{}", self.plan.era, self.number, self.events);
        let payload =
            json!({"label": label, "savepoint": savepoint, "noise": self.next_random(), "text": "Ünï \u{1}\""});
        // Words separated by dots, for tests that route by them.
        let aggregate = format!("w{}.k{key}", self.number);
        // The event is recorded before the server receives it.
        self.sent.push(Sent {
            label,
            payload: payload.clone(),
            fate: Fate::RolledBack,
        });
        let Session { client, publish } = session;
        let row = client.query_one(&*publish, &[&payload, &aggregate])?;
        for destination in self.plan.also_to {
            client.execute(
                "select outbox_enqueue($1, destination => $2::text)",
                &[&row.get::<_, i64>(0), destination],
            )?;
        }
        Ok(())
    }

    /// Opens a session. None if the test has ended.
    fn connect(&self) -> Option<Session> {
        // No writer waits for a standby: a test may configure a standby that is absent.
        let waits_for = if self.plan.synchronous_commit { "local" } else { "off" };
        let found = try_wait_for(LONG, || {
            if self.stop.load(Ordering::Acquire) {
                return Some(None);
            }
            let mut client = Client::connect(&self.conn_string, NoTls).ok()?;
            let set = client.batch_execute(&format!("set synchronous_commit = {waits_for}"));
            set.ok()?;
            let publish = client.prepare(self.plan.statement);
            Some(Some(Session {
                publish: publish.ok()?,
                client,
            }))
        });
        found.unwrap_or_else(|| panic!("writer {}: no connection", self.number))
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.next_random() % 100 < percent
    }

    /// xorshift64: the same numbers in each run, so that a plan that fails once fails again.
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 11 // fits into a double, so any JSON reader keeps it exact
    }
}

fn is_end_of_session(error: &postgres::Error) -> bool {
    let ends = [
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
    ];
    error.is_closed() || error.code().is_none_or(|code| ends.contains(code))
}
