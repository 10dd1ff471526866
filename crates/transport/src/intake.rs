//! The interface between a transport and the worker's main thread: messages come in, outcomes and states go out.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========

use crate::Publication;
use crate::crossing::{Crossing, Handed};
use crate::down::Fault;
use crate::event::{Answered, ConnectionState, PublisherEvent};
use crate::failures::{Failures, MessageKey};
use std::future::Future;
use std::pin::pin;
use std::time::Instant;
use tokio::sync::{mpsc, watch};

/// The publisher thread's end of the channels in `crossing`.
pub struct Intake<'a> {
    batches: mpsc::Receiver<Handed>,
    stop: watch::Receiver<Option<Instant>>,
    shared: &'a Crossing,
    /// Outcomes that are not sent yet.
    outcomes: Vec<Answered>,
    failures: Failures,
}

/// Why messages are lost at a stop.
pub(crate) const STOPPED: &str = "the publisher was stopped";

/// A request to stop, and the time by which the transport must have stopped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopBy(pub(crate) Instant);

impl<'a> Intake<'a> {
    pub(crate) fn new(
        batches: mpsc::Receiver<Handed>,
        stop: watch::Receiver<Option<Instant>>,
        shared: &'a Crossing,
    ) -> Self {
        Self {
            batches,
            stop,
            shared,
            outcomes: Vec::new(),
            failures: Failures::default(),
        }
    }

    // ---- messages in ------------------------------------------------------------------------------------------------

    /// The next messages that may be sent, if there are any.
    pub(crate) fn try_next(&mut self) -> Option<Vec<Publication>> {
        loop {
            let handed = self.batches.try_recv().ok()?;
            let batch = self.accept(handed);
            if !batch.is_empty() {
                return Some(batch);
            }
        }
    }

    /// The messages of a batch that may be sent. The others are lost: the worker handed them over before it had drained a
    /// failure, and they may be later messages of a key of which an earlier one failed.
    pub(crate) fn accept(&mut self, handed: Handed) -> Vec<Publication> {
        let (batch, lost) = self.failures.accept(handed);
        let lost = lost.into_iter().map(|(handle, why)| Answered::lost(handle, why));
        self.outcomes.extend(lost);
        batch
    }

    /// The next batch, or the request to stop, which takes precedence.
    pub(crate) async fn next_or_stop(&mut self, want_batch: bool) -> Result<Handed, StopBy> {
        let Self { batches, stop, .. } = self;
        tokio::select! {
            biased;
            stop = stop_order(stop) => Err(stop),
            Some(handed) = batches.recv(), if want_batch => Ok(handed),
        }
    }

    /// Whether the main thread lets confirms wait before it is woken.
    pub(crate) fn main_lets_confirms_wait(&self) -> bool {
        self.shared.main_lets_confirms_wait()
    }

    pub(crate) fn report_state(&self, state: ConnectionState) {
        self.shared.push(PublisherEvent::State(state));
    }

    /// Call this before the outcomes of messages that are lost with the connection: the worker hands over less from
    /// then on.
    pub(crate) fn report_down(&self, fault: &Fault) {
        self.report_state(ConnectionState::Down(fault.clone()));
    }

    // ---- outcomes out -----------------------------------------------------------------------------------------------

    /// Records an outcome that lets other messages go on.
    pub(crate) fn answer(&mut self, answered: Answered) {
        self.outcomes.push(answered);
    }

    /// Records the failure of a message of this key: later ones of the key must not go out before the worker knows of it.
    pub(crate) fn fail_of_key(&mut self, key: Option<MessageKey>, answered: Answered) {
        if let Some(key) = key {
            self.failures.key_failed(key);
        }
        self.outcomes.push(answered);
    }

    /// Records the failure of a message that is lost with its connection: no other one must go out before the worker knows
    /// of it.
    pub(crate) fn fail(&mut self, answered: Answered) {
        self.failures.all_failed();
        self.outcomes.push(answered);
    }

    /// Gives each message the outcome `Lost`.
    pub(crate) fn lose(&mut self, batch: impl IntoIterator<Item = Publication>, reason: &str) {
        let lost = batch.into_iter();
        lost.for_each(|message| self.fail(Answered::lost(message.handle, reason)));
        self.send_outcomes();
    }

    /// Sends the outcomes that are recorded.
    pub(crate) fn send_outcomes(&mut self) {
        if !self.outcomes.is_empty() {
            self.shared.push_outcomes(&mut self.outcomes, self.failures.count);
        }
    }

    // ---- waiting ----------------------------------------------------------------------------------------------------

    /// Runs `work` while there is no connection. Every batch is answered immediately, so that the worker can release
    /// it.
    pub(crate) async fn losing_batches<T>(&mut self, reason: &str, work: impl Future<Output = T>) -> Result<T, StopBy> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                next = self.next_or_stop(true) => self.lose(next?.batch, reason),
                done = &mut work => return Ok(done),
            }
        }
    }

    /// Runs `work`. Batches wait in the queue until then.
    pub(crate) async fn unless_stopped<T>(&mut self, work: impl Future<Output = T>) -> Result<T, StopBy> {
        tokio::select! {
            biased;
            stop = stop_order(&mut self.stop) => Err(stop),
            done = work => Ok(done),
        }
    }

    pub(crate) fn lose_queue(&mut self, reason: &str) {
        self.batches.close();
        while let Ok(handed) = self.batches.try_recv() {
            self.lose(handed.batch, reason);
        }
    }
}

/// Completes once `Publisher::stop` was called or the publisher was dropped.
async fn stop_order(stop: &mut watch::Receiver<Option<Instant>>) -> StopBy {
    loop {
        if let Some(deadline) = *stop.borrow_and_update() {
            return StopBy(deadline);
        }
        if stop.changed().await.is_err() {
            return StopBy(Instant::now());
        }
    }
}
