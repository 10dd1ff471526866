//! Posts messages to a URL. Decides which message goes when, what an answer means for the other messages, and when the
//! destination pauses.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========
//!
//! Requests block, so a few request threads make them, each started when it is first needed. This thread hands messages
//! to them and never blocks. There is no connection to open beforehand: `Connected` means that messages are sent, and
//! the first message shows whether they arrive. That message goes alone, at the start and after each pause, until it is
//! answered.

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

/// The stack size of a request thread: ureq, rustls and the code that they call. A debug build uses a quarter of it.
const STACK_BYTES: usize = 2 << 20;
/// The time limit for outstanding answers after a stop request. Each answer spares a duplicate at the next start.
const STOP_GRACE_MAX: Duration = Duration::from_secs(5);
/// The time limit for request threads to notice that their connection is cut.
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
            poster.report(intake);
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

/// A request thread, as the publisher thread knows it.
struct Sender {
    jobs: std_mpsc::Sender<Publication>,
    line: Arc<Line>,
    /// The message that the thread is posting.
    posting: Option<Posting>,
}

/// A message that is being posted.
struct Posting {
    handle: u64,
    key: Option<Rc<str>>,
    /// The value of `Poster::downs` when it was sent. A result from before the last failure says nothing new about the
    /// destination.
    downs: u64,
}

struct Poster {
    shared: Arc<Shared>,
    lookup: Arc<Lookup>,
    senders: Vec<Sender>,
    /// Indexes of idle senders, as a stack: the sender that was used last is used first, because its connection is the
    /// most likely to be open.
    idle: Vec<usize>,
    ended_tx: mpsc::UnboundedSender<Ended>,
    ended: mpsc::UnboundedReceiver<Ended>,
    order: Order,
    outcomes: Vec<Answered>,
    backoff: Backoff,
    downs: u64,
    /// The end of the pause; no message is sent before it. None = no pause.
    rests_until: Option<Instant>,
    /// The reason for the pause.
    why: String,
    /// Whether messages go one at a time, because none was answered since the start or the last pause.
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

    // ---- messages in, outcomes out ----------------------------------------------------------------------------------

    /// During a pause each batch is answered at once, so that the worker can release it.
    fn wants_batch(&self) -> bool {
        self.rests_until.is_some() || self.order.waiting() < self.shared.config.window
    }

    fn take(&mut self, Handed { batch, failures_seen }: Handed) {
        let lost = self.order.take(batch, failures_seen);
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

    fn report(&mut self, intake: &Intake<'_>) {
        let outcomes = std::mem::take(&mut self.outcomes);
        intake.send_outcomes_counted(outcomes, self.order.failures());
    }

    // ---- requests ---------------------------------------------------------------------------------------------------

    /// Gives messages to idle request threads.
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
            // The thread ends only when its channel closes, and it catches its panics, so the send cannot fail.
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
                // Without any sender no message can go; with some, delivery continues with fewer.
                Err(error) if self.senders.is_empty() => {
                    let text = format!("no thread can be started: {error}");
                    self.go_down(Fault::new(DownReason::Closed, text), None, intake);
                }
                Err(_) => {}
            }
        }
        self.idle.pop()
    }

    /// Starts a request thread. It inherits the blocked signals of this thread.
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

    /// Handles the result of a request.
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
            Verdict::Destination {
                fault,
                retry_after,
                is_answer,
            } => {
                let reason = fault.to_string();
                match (is_recent, self.rests_until) {
                    (true, _) => self.go_down(fault, retry_after, intake),
                    // This message was sent before the failure that began the pause; its answer may ask for a longer
                    // one.
                    (false, Some(until)) => {
                        let after = retry_after.map(|after| Instant::now() + after);
                        self.rests_until = Some(after.map_or(until, |after| after.max(until)));
                    }
                    (false, None) => {}
                }
                match is_answer {
                    true => Outcome::Unanswered { reason, alone: true },
                    false => Outcome::Lost { reason },
                }
            }
        };
        self.outcomes.push(Answered { handle, outcome, at });
        let behind = self.order.failed(key);
        self.lose(behind, KEY_FAILED);
    }

    // ---- the destination --------------------------------------------------------------------------------------------

    /// Begins a pause. Waiting messages are given back; messages on their way may still arrive.
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

    // ---- stop -------------------------------------------------------------------------------------------------------

    /// Waits briefly for answers, then cuts the connections. A thread that still runs after that is left behind: it
    /// holds no resource that another thread waits for.
    async fn stop(mut self, StopBy(deadline): StopBy, intake: &mut Intake<'_>) {
        let left = || deadline.saturating_duration_since(std::time::Instant::now());
        self.why = STOPPED.to_owned();
        self.lose_waiting();
        self.report(intake);
        let grace_ends = Instant::now() + STOP_GRACE_MAX.min(left() / 3);
        self.finish_until(grace_ends, intake).await;
        self.senders.iter().for_each(|sender| sender.line.cut());
        self.finish_until(Instant::now() + CUT_LIMIT.min(left() / 3), intake)
            .await;
        for sender in &mut self.senders {
            let lost = sender.posting.take().map(|posting| posting.handle);
            let (reason, alone) = (STOPPED.to_owned(), false);
            self.outcomes
                .extend(lost.map(|handle| Answered::now(handle, Outcome::Unanswered { reason, alone })));
        }
        self.report(intake);
        let Self {
            senders,
            ended_tx,
            mut ended,
            ..
        } = self;
        // Each thread ends when its channel closes. When the last thread has ended, `ended` closes too.
        drop((senders, ended_tx));
        let _ = timeout(CUT_LIMIT.min(left() / 3), async {
            while ended.recv().await.is_some() {}
        })
        .await;
    }

    /// Handles results until `until`. Returns at once when no message is on its way.
    async fn finish_until(&mut self, until: Instant, intake: &Intake<'_>) {
        while self.senders.iter().any(|sender| sender.posting.is_some()) {
            let Ok(Some(mut ended)) = timeout_at(until, self.ended.recv()).await else {
                return;
            };
            if matches!(ended.verdict, Verdict::Destination { .. }) && self.senders[ended.index].line.is_cut() {
                ended.verdict = Verdict::trouble(DownReason::Closed, STOPPED);
            }
            self.on_outcome(ended, intake);
            self.report(intake);
        }
    }
}
