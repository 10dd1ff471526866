//! Posts messages to a URL. Decides which message goes when, what an answer means for the other messages, and when the
//! destination pauses.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========
//!
//! Requests block, so the request threads of `pool` make them, which all destinations share. This thread hands messages
//! to them and never blocks. There is no connection to open beforehand: `Connected` means that messages are sent, and
//! the first message shows whether they arrive. That message goes alone, at the start and after each pause, until it is
//! answered.

mod answer;
mod config;
mod findings;
mod form;
mod kind;
mod line;
mod order;
mod request;
mod request_thread;
mod signature;
mod url;

pub use config::{HttpAuth, HttpConfig};
pub(crate) use kind::KIND;
pub use signature::Signer;
pub use url::{HttpAddress, parse_http_url};

use crate::Outcome;
use crate::backoff::Backoff;
use crate::crossing::Handed;
use crate::down::{DownReason, Fault, NO_ANSWER};
use crate::event::{Answered, ConnectionState};
use crate::failures::KEY_FAILED;
use crate::intake::{Intake, STOPPED, StopBy};
use crate::lookup::Host;
use crate::pool::{self, RequestPool, ThreadSlot, Turn};
use crate::transport::{SharedPools, Transport};
use crate::url::Endpoint;
use answer::{Trouble, Verdict};
use findings::THROTTLED;
use line::Line;
use order::SendOrder;
use request::RequestBuilder;
use request_thread::{HttpConnection, PostContext, PostResult};
use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

/// The time limit for outstanding answers after a stop request. Each answer spares a duplicate at the next start.
const STOP_GRACE_MAX: Duration = Duration::from_secs(5);
/// The time limit for request threads to notice that their connection is cut.
const CUT_LIMIT: Duration = Duration::from_secs(2);

const THREAD_NEEDED: &str = "its thread was needed for other destinations";

impl Transport for HttpConfig {
    fn check(&self) -> io::Result<()> {
        self.validate()?;
        RequestBuilder::new(self).map(drop).map_err(config::invalid)
    }

    fn window(&self) -> usize {
        self.window
    }

    async fn run(self, intake: &mut Intake<'_>, pools: &SharedPools) -> Result<(), String> {
        let mut poster = Poster::new(self, pools)?;
        intake.report_state(ConnectionState::Connecting);
        intake.report_state(ConnectionState::Connected);
        let order = loop {
            poster.send(intake);
            intake.send_outcomes();
            let (rests_until, wants_batch, turn) = (poster.rests_until, poster.wants_batch(), Rc::clone(&poster.turn));
            tokio::select! {
                biased;
                next = intake.next_or_stop(wants_batch) => match next {
                    Ok(handed) => poster.take(handed, intake),
                    Err(order) => break order,
                },
                Some(ended) = poster.ended.recv() => {
                    poster.on_outcome(ended, intake);
                    while let Ok(ended) = poster.ended.try_recv() {
                        poster.on_outcome(ended, intake);
                    }
                }
                () = turn.comes() => {}
                () = sleep_until(rests_until.unwrap_or_else(Instant::now)), if rests_until.is_some() => poster.resume(intake),
            }
        };
        poster.stop(order, intake).await;
        intake.lose_queue(STOPPED);
        Ok(())
    }
}

/// A message that is being posted.
struct Posting {
    slot: ThreadSlot,
    line: Arc<Line>,
    key: Option<Rc<str>>,
    /// The value of `Poster::downs` when it was sent. A result from before the last failure says nothing new about the
    /// destination.
    downs: u64,
}

struct Poster {
    shared: Arc<PostContext>,
    host: Arc<Host>,
    pool: Rc<RequestPool>,
    /// The number of this destination in the pool.
    owner: u64,
    turn: Rc<Turn>,
    /// The messages that are being posted, by handle.
    posting: HashMap<u64, Posting>,
    /// Whether the last request failed after a long time. Then `pool` reserves threads for other destinations.
    is_slow: bool,
    ended_tx: mpsc::UnboundedSender<PostResult>,
    ended: mpsc::UnboundedReceiver<PostResult>,
    order: SendOrder,
    backoff: Backoff,
    downs: u64,
    /// The end of the pause; no message is sent before it. None = no pause.
    rests_until: Option<Instant>,
    /// The reason for the pause.
    why: String,
    /// Whether the last answer asked for a pause. If the next message is asked, too, the destination gets it.
    has_asked: bool,
    /// Whether messages go one at a time, because none was answered since the start or the last pause.
    is_probing: bool,
    /// Whether the publisher is being stopped, so that requests are cut for that.
    stops: bool,
}

impl Poster {
    fn new(config: HttpConfig, SharedPools { pool, lookups, .. }: &SharedPools) -> Result<Self, String> {
        let endpoint = Endpoint {
            host: config.address.host.clone(),
            port: config.address.port,
        };
        let (ended_tx, ended) = mpsc::unbounded_channel();
        Ok(Self {
            host: Arc::new(lookups.host(&endpoint, &config.allow)),
            backoff: Backoff::new(config.backoff_min, config.backoff_max),
            shared: Arc::new(PostContext {
                endpoint: RequestBuilder::new(&config)?,
                config,
            }),
            pool: Rc::clone(pool),
            owner: pool.new_owner(),
            turn: Rc::default(),
            posting: HashMap::new(),
            is_slow: false,
            ended_tx,
            ended,
            order: SendOrder::default(),
            downs: 0,
            rests_until: None,
            why: String::new(),
            has_asked: false,
            is_probing: true,
            stops: false,
        })
    }

    // ---- messages in, outcomes out ----------------------------------------------------------------------------------

    /// During a pause each batch is answered immediately, so that the worker can release it.
    fn wants_batch(&self) -> bool {
        self.rests_until.is_some() || self.order.waiting() < self.shared.config.window
    }

    fn take(&mut self, handed: Handed, intake: &mut Intake<'_>) {
        self.order.take(intake.accept(handed));
        if self.rests_until.is_some() {
            self.lose_waiting(intake);
        }
    }

    fn lose_waiting(&mut self, intake: &mut Intake<'_>) {
        for (handle, key) in self.order.lose_waiting() {
            intake.fail_of_key(key, Answered::lost(handle, &self.why));
        }
    }

    // ---- requests ---------------------------------------------------------------------------------------------------

    /// Gives messages to request threads.
    fn send(&mut self, intake: &mut Intake<'_>) {
        let concurrency = self.shared.config.concurrency.min(self.shared.config.window);
        while self.rests_until.is_none() && self.may_send() && self.posting.len() < concurrency && self.order.has_next()
        {
            let has_share = self.is_slow || !self.posting.is_empty();
            let Some(mut slot) = self.pool.ask(&self.turn, has_share) else {
                return;
            };
            match slot.prepare() {
                Ok(()) => {}
                Err((_, true)) => continue, // it waits for a thread of the others
                Err((error, false)) => {
                    let fault = Fault::of_call(DownReason::PROCESS_LIMIT, &error, "no thread can be started");
                    drop(slot);
                    self.go_down(&fault, None, intake);
                    break;
                }
            }
            let Some((message, key)) = self.order.next() else {
                slot.end();
                break;
            };
            let (handle, connection) = (message.handle, self.connection());
            let line = Arc::clone(&connection.line);
            let of_request = Arc::clone(&line);
            let (shared, ended) = (Arc::clone(&self.shared), self.ended_tx.clone());
            let job = Box::new(move || {
                let result = PostResult::of(&message, &shared, connection);
                drop((message, shared));
                let _ = ended.send(result); // nothing takes it once the publisher has ended
            });
            slot.begin(job, Box::new(move || of_request.cut()));
            let downs = self.downs;
            let posting = Posting { slot, line, key, downs };
            self.posting.insert(handle, posting);
        }
        self.pool.leave(&self.turn);
    }

    fn may_send(&self) -> bool {
        !self.is_probing || self.posting.values().all(|posting| posting.downs != self.downs)
    }

    /// An idle connection, or one that is yet to be made.
    fn connection(&self) -> HttpConnection {
        let kept = self.pool.take_connection(self.owner);
        let kept = kept.and_then(|kept| kept.downcast().ok()).map(|kept| *kept);
        kept.unwrap_or_else(|| HttpConnection {
            agent: None,
            line: Arc::new(Line::new(Arc::clone(&self.host))),
        })
    }

    /// Handles the result of a request.
    fn on_outcome(&mut self, ended: PostResult, intake: &mut Intake<'_>) {
        let PostResult {
            handle,
            verdict,
            at,
            connection,
        } = ended;
        let Some(Posting { slot, key, downs, .. }) = self.posting.remove(&handle) else {
            return;
        };
        let is_cut = connection.line.is_cut();
        if connection.agent.is_some() && !is_cut {
            self.pool.keep_connection(self.owner, Box::new(connection));
        }
        let elapsed = slot.elapsed();
        slot.end();
        let is_recent = downs == self.downs;
        let outcome = match verdict {
            Verdict::Confirmed => {
                let outcome = Outcome::Confirmed;
                intake.answer(Answered { handle, outcome, at });
                self.order.confirmed(key);
                self.has_asked = false;
                if is_recent {
                    (self.is_probing, self.is_slow) = (false, false);
                    self.backoff.restart();
                }
                return;
            }
            Verdict::Message(outcome) => {
                self.has_asked = false;
                self.is_probing &= !is_recent;
                self.is_slow &= !is_recent;
                outcome
            }
            Verdict::Unsendable(reason) => Outcome::Unsendable { reason },
            Verdict::Destination(trouble) => {
                if is_recent {
                    self.is_slow = pool::is_slow(elapsed);
                }
                let trouble = if is_cut { self.cause_of_cut(elapsed) } else { trouble };
                self.on_trouble(trouble, is_recent, intake)
            }
        };
        intake.fail_of_key(key.clone(), Answered { handle, outcome, at });
        for behind in self.order.failed(key.as_ref()) {
            intake.fail_of_key(key.clone(), Answered::lost(behind, KEY_FAILED));
        }
    }

    /// Why this publisher, or another destination that needed its thread, cut a request that took so long.
    fn cause_of_cut(&self, elapsed: Duration) -> Trouble {
        if self.stops {
            return Trouble::unsent(Fault::new(DownReason::CLOSED, STOPPED));
        }
        let text = format!("no answer within {} ms, and {THREAD_NEEDED}", elapsed.as_millis());
        Trouble::unsent(Fault::coded(DownReason::TIMEOUT, NO_ANSWER, text))
    }

    /// Handles a failure of the destination. Returns the outcome of the message. `is_recent`: it was sent after the last
    /// failure.
    fn on_trouble(&mut self, trouble: Trouble, is_recent: bool, intake: &mut Intake<'_>) -> Outcome {
        let Trouble {
            mut fault,
            retry_after,
            is_answer,
        } = trouble;
        let reason = fault.to_string();
        match fault.reason {
            DownReason::PROCESS_LIMIT => self.pool.close_connections(),
            // What broke this connection may have broken the idle ones.
            DownReason::TIMEOUT | DownReason::CLOSED | DownReason::PROTOCOL => self.pool.forget(self.owner),
            _ => {}
        }
        let is_limit = fault.reason == THROTTLED;
        let asked = retry_after.map(|after| after.min(self.shared.config.retry_after_max));
        // This message alone waits as long as the answer asks, unless that is the answer to others, too.
        let rest = asked.filter(|_| self.has_asked);
        self.has_asked |= asked.is_some();
        if let Some(after) = asked.filter(|after| *after > self.shared.config.backoff_max) {
            let until = httpdate::fmt_http_date(SystemTime::now() + after);
            let what = if rest.is_some() {
                "it rests"
            } else {
                "the message waits"
            };
            fault = fault.detailed(|detail| format!("{detail}; {what} until {until}"));
        }
        match (is_recent, self.rests_until, rest) {
            (true, ..) => self.go_down(&fault, rest, intake),
            // It was sent before the failure that began the pause.
            (false, Some(until), Some(rest)) if Instant::now() + rest > until => {
                self.rests_until = Some(Instant::now() + rest);
                intake.report_down(&fault);
            }
            (false, ..) => {}
        }
        match is_answer {
            _ if asked.is_some() || is_limit => Outcome::Postponed {
                reason,
                after_ms: asked.map_or(0, |after| after.as_millis() as u64),
                is_limit,
            },
            true => Outcome::Unanswered { reason, alone: true },
            false => Outcome::Lost { reason },
        }
    }

    // ---- the destination --------------------------------------------------------------------------------------------

    /// Begins a pause. Waiting messages are given back; messages on their way may still arrive.
    fn go_down(&mut self, fault: &Fault, asked: Option<Duration>, intake: &mut Intake<'_>) {
        let pause = self.backoff.next().max(asked.unwrap_or_default());
        self.rests_until = Some(Instant::now() + pause);
        self.downs += 1;
        self.why = fault.to_string();
        intake.report_down(fault);
        self.lose_waiting(intake);
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
        (self.stops, self.why) = (true, STOPPED.to_owned());
        self.lose_waiting(intake);
        intake.send_outcomes();
        let grace_ends = Instant::now() + STOP_GRACE_MAX.min(left() / 3);
        self.finish_until(grace_ends, intake).await;
        self.posting.values().for_each(|posting| posting.line.cut());
        self.finish_until(Instant::now() + CUT_LIMIT.min(left() / 3), intake)
            .await;
        for (handle, _) in std::mem::take(&mut self.posting) {
            intake.fail(Answered::none(handle, STOPPED, false));
        }
        intake.send_outcomes();
        // Each request that is still on its way has a sender. When the last one has ended, `ended` closes.
        let (ended_tx, _) = mpsc::unbounded_channel();
        drop(std::mem::replace(&mut self.ended_tx, ended_tx));
        let _ = timeout(CUT_LIMIT.min(left() / 3), async {
            while self.ended.recv().await.is_some() {}
        })
        .await;
    }

    /// Handles results until `until`. Returns immediately when no message is on its way.
    async fn finish_until(&mut self, until: Instant, intake: &mut Intake<'_>) {
        while !self.posting.is_empty() {
            let Ok(Some(ended)) = timeout_at(until, self.ended.recv()).await else {
                return;
            };
            self.on_outcome(ended, intake);
            intake.send_outcomes();
        }
    }
}

impl Drop for Poster {
    fn drop(&mut self) {
        self.pool.leave(&self.turn);
        self.pool.forget(self.owner);
    }
}
