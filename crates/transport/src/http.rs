//! Posts messages to a URL: which one goes when, what an answer means for the others, and when the destination rests.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========
//!
//! Requests block, so each is made by one of a few request threads, started when they are first needed; this one hands
//! messages to them and never blocks. There is nothing to connect to beforehand: `Connected` says that messages are sent, and
//! the first one shows whether they arrive. Until it does, and after each pause, it goes alone.

mod answer;
mod config;
mod line;
mod order;
mod request;
mod request_thread;

pub use config::{HttpAuth, HttpConfig};
pub(crate) use request::check_credentials;

use crate::backoff::Backoff;
use crate::carrier::Carrier;
use crate::crossing::Handed;
use crate::down::{DownReason, Fault};
use crate::event::{Answered, ConnectionState};
use crate::intake::{Intake, StopBy};
use crate::{Outcome, Publication};
use answer::Verdict;
use line::{Line, Lookup};
use order::Order;
use request::Endpoint;
use request_thread::{Ended, Shared};
use std::io;
use std::rc::Rc;
use std::sync::{Arc, mpsc as std_mpsc};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

/// ureq, rustls and what they call. A debug build gets along with a quarter of it.
const STACK_BYTES: usize = 2 << 20;
/// For the answers that are on their way when told to stop: each one spares a duplicate at the next start.
const STOP_GRACE_MAX: Duration = Duration::from_secs(5);
/// For request threads to notice that their line is cut.
const CUT_LIMIT: Duration = Duration::from_secs(2);

const STOPPED: &str = "the publisher was stopped";
const KEY_FAILED: &str = "an earlier message of its key failed";

impl Carrier for HttpConfig {
    fn check(&self) -> io::Result<()> {
        self.validate()?;
        let endpoint = Endpoint::new(self).map(drop);
        endpoint.map_err(|text| io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    fn window(&self) -> usize {
        self.window
    }

    async fn carry(self, intake: &mut Intake<'_>) -> Result<(), String> {
        let mut poster = Poster::new(self)?;
        intake.report_state(ConnectionState::Connecting);
        intake.report_state(ConnectionState::Connected);
        let order = loop {
            poster.send(intake);
            poster.tell(intake);
            let (rests_until, wants_batch) = (poster.rests_until, poster.wants_batch());
            tokio::select! {
                biased;
                next = intake.next_or_stop(wants_batch) => match next {
                    Ok(handed) => poster.take(handed),
                    Err(order) => break order,
                },
                Some(ended) = poster.ended.recv() => {
                    poster.on_outcome(ended, intake);
                    while let Ok(ended) = poster.ended.try_recv() {
                        poster.on_outcome(ended, intake);
                    }
                }
                () = sleep_until(rests_until.unwrap_or_else(Instant::now)), if rests_until.is_some() => poster.resume(intake),
            }
        };
        poster.stop(order, intake).await;
        intake.lose_queue(STOPPED);
        Ok(())
    }
}

/// A request thread, seen from here.
struct Sender {
    jobs: std_mpsc::Sender<Publication>,
    line: Arc<Line>,
    /// What it has to do.
    posting: Option<Posting>,
}

/// A message on its way.
struct Posting {
    handle: u64,
    key: Option<Rc<str>>,
    /// It was sent after so many failures of the destination: an older one says nothing new of it.
    downs: u64,
}

struct Poster {
    shared: Arc<Shared>,
    lookup: Arc<Lookup>,
    senders: Vec<Sender>,
    /// Used last, used first: its connection is the warmest.
    idle: Vec<usize>,
    ended_tx: mpsc::UnboundedSender<Ended>,
    ended: mpsc::UnboundedReceiver<Ended>,
    order: Order,
    outcomes: Vec<Answered>,
    backoff: Backoff,
    downs: u64,
    /// Nothing is sent before.
    rests_until: Option<Instant>,
    /// Why it rests.
    why: String,
    /// Nobody has answered since the start or the last pause: one at a time.
    is_probing: bool,
}

impl Poster {
    fn new(config: HttpConfig) -> Result<Self, String> {
        let (ended_tx, ended) = mpsc::unbounded_channel();
        Ok(Self {
            lookup: Arc::new(Lookup::new(&config.address.host, config.address.port)),
            backoff: Backoff::new(config.backoff_min, config.backoff_max),
            shared: Arc::new(Shared {
                endpoint: Endpoint::new(&config)?,
                config,
            }),
            senders: Vec::new(),
            idle: Vec::new(),
            ended_tx,
            ended,
            order: Order::default(),
            outcomes: Vec::new(),
            downs: 0,
            rests_until: None,
            why: String::new(),
            is_probing: true,
        })
    }

    // ---- messages in, outcomes out -----------------------------------------------------------------------------------

    /// While it rests each batch is answered at once, so that the worker can release it.
    fn wants_batch(&self) -> bool {
        self.rests_until.is_some() || self.order.waiting() < self.shared.config.window
    }

    fn take(&mut self, Handed { batch, heard }: Handed) {
        let lost = self.order.take(batch, heard);
        self.lose(lost, KEY_FAILED);
        if self.rests_until.is_some() {
            self.lose_waiting();
        }
    }

    fn lose(&mut self, handles: Vec<u64>, reason: &str) {
        let lost = |handle| {
            let reason = reason.to_owned();
            Answered::now(handle, Outcome::Lost { reason })
        };
        self.outcomes.extend(handles.into_iter().map(lost));
    }

    fn lose_waiting(&mut self) {
        let lost = self.order.lose_waiting();
        let why = self.why.clone();
        self.lose(lost, &why);
    }

    fn tell(&mut self, intake: &Intake<'_>) {
        let outcomes = std::mem::take(&mut self.outcomes);
        intake.send_outcomes_counted(outcomes, self.order.failures());
    }

    // ---- requests ----------------------------------------------------------------------------------------------------

    /// Gives messages to free threads.
    fn send(&mut self, intake: &Intake<'_>) {
        while self.rests_until.is_none() && self.order.waiting() > 0 && self.may_send() {
            let Some(index) = self.free_sender(intake) else { return };
            let Some((publication, key)) = self.order.next() else {
                return self.idle.push(index);
            };
            let sender = &mut self.senders[index];
            sender.posting = Some(Posting {
                handle: publication.handle,
                key,
                downs: self.downs,
            });
            // Its thread ends with the channel only, and catches its panics.
            let _ = sender.jobs.send(publication);
        }
    }

    fn may_send(&self) -> bool {
        let mut posting = self.senders.iter().filter_map(|sender| sender.posting.as_ref());
        !self.is_probing || posting.all(|posting| posting.downs != self.downs)
    }

    fn free_sender(&mut self, intake: &Intake<'_>) -> Option<usize> {
        let config = &self.shared.config;
        if self.idle.is_empty() && self.senders.len() < config.concurrency.min(config.window) {
            match self.start_sender() {
                Ok(sender) => {
                    self.idle.push(self.senders.len());
                    self.senders.push(sender);
                }
                // With fewer, then.
                Err(error) if self.senders.is_empty() => {
                    let text = format!("no thread can be started: {error}");
                    self.go_down(Fault::new(DownReason::Closed, text), None, intake);
                }
                Err(_) => {}
            }
        }
        self.idle.pop()
    }

    /// The thread inherits this one's blocked signals.
    fn start_sender(&self) -> std::io::Result<Sender> {
        let (jobs, jobs_rx) = std_mpsc::channel();
        let line = Arc::new(Line::new(Arc::clone(&self.lookup)));
        let (shared, ended, index) = (Arc::clone(&self.shared), self.ended_tx.clone(), self.senders.len());
        let thread = std::thread::Builder::new()
            .name("outbox-http".to_owned())
            .stack_size(STACK_BYTES);
        let threads_line = Arc::clone(&line);
        thread.spawn(move || request_thread::main(index, &shared, &threads_line, jobs_rx, ended))?;
        let posting = None;
        Ok(Sender { jobs, line, posting })
    }

    /// A request has ended.
    fn on_outcome(&mut self, Ended { index, verdict, at }: Ended, intake: &Intake<'_>) {
        let Some(Posting { handle, key, downs }) = self.senders[index].posting.take() else {
            return;
        };
        self.idle.push(index);
        let is_recent = downs == self.downs;
        let outcome = match verdict {
            Verdict::Confirmed => {
                let outcome = Outcome::Confirmed;
                self.outcomes.push(Answered { handle, outcome, at });
                self.order.confirmed(key);
                if is_recent {
                    self.is_probing = false;
                    self.backoff.restart();
                }
                return;
            }
            Verdict::Message(outcome) => {
                self.is_probing &= !is_recent;
                outcome
            }
            Verdict::Unsendable(reason) => Outcome::Unsendable { reason },
            Verdict::Destination { fault, retry_after } => {
                let reason = fault.to_string();
                match (is_recent, self.rests_until) {
                    (true, _) => self.go_down(fault, retry_after, intake),
                    // It was sent before the others failed; it may know better how long to wait.
                    (false, Some(until)) => {
                        let after = retry_after.map(|after| Instant::now() + after);
                        self.rests_until = Some(after.map_or(until, |after| after.max(until)));
                    }
                    (false, None) => {}
                }
                Outcome::Lost { reason }
            }
        };
        self.outcomes.push(Answered { handle, outcome, at });
        let behind = self.order.failed(key);
        self.lose(behind, KEY_FAILED);
    }

    // ---- the destination ---------------------------------------------------------------------------------------------

    /// Rests. What waits is given back; what is on its way may yet arrive.
    fn go_down(&mut self, fault: Fault, retry_after: Option<Duration>, intake: &Intake<'_>) {
        let pause = self.backoff.next().max(retry_after.unwrap_or_default());
        self.rests_until = Some(Instant::now() + pause);
        self.downs += 1;
        self.why = fault.to_string();
        self.lose_waiting();
        intake.report_down(&fault);
    }

    fn resume(&mut self, intake: &Intake<'_>) {
        self.rests_until = None;
        self.is_probing = true;
        intake.report_state(ConnectionState::Connected);
    }

    // ---- stop --------------------------------------------------------------------------------------------------------

    /// Waits a little for answers, then cuts the lines. A thread that is still there after that is left behind: it holds
    /// nothing that anybody waits for.
    async fn stop(mut self, StopBy(deadline): StopBy, intake: &mut Intake<'_>) {
        let left = || deadline.saturating_duration_since(std::time::Instant::now());
        self.why = STOPPED.to_owned();
        self.lose_waiting();
        self.tell(intake);
        let grace_ends = Instant::now() + STOP_GRACE_MAX.min(left() / 3);
        self.finish_until(grace_ends, intake).await;
        self.senders.iter().for_each(|sender| sender.line.cut());
        self.finish_until(Instant::now() + CUT_LIMIT.min(left() / 3), intake)
            .await;
        for sender in &mut self.senders {
            let lost = sender.posting.take().map(|posting| posting.handle);
            let reason = STOPPED.to_owned();
            self.outcomes
                .extend(lost.map(|handle| Answered::now(handle, Outcome::Lost { reason })));
        }
        self.tell(intake);
        let Self {
            senders,
            ended_tx,
            mut ended,
            ..
        } = self;
        // Without its channel each thread ends; with the last one ends theirs to us.
        drop((senders, ended_tx));
        let _ = timeout(CUT_LIMIT.min(left() / 3), async {
            while ended.recv().await.is_some() {}
        })
        .await;
    }

    /// Concludes what ends by then, and returns at once when nothing is on its way.
    async fn finish_until(&mut self, until: Instant, intake: &Intake<'_>) {
        while self.senders.iter().any(|sender| sender.posting.is_some()) {
            let Ok(Some(mut ended)) = timeout_at(until, self.ended.recv()).await else {
                return;
            };
            if matches!(ended.verdict, Verdict::Destination { .. }) && self.senders[ended.index].line.is_cut() {
                ended.verdict = Verdict::trouble(DownReason::Closed, STOPPED);
            }
            self.on_outcome(ended, intake);
            self.tell(intake);
        }
    }
}
