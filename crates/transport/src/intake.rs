//! The interface between a transport and the worker's main thread: messages come in, outcomes and states go out.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========

use crate::Publication;
use crate::crossing::{Crossing, Handed};
use crate::down::Fault;
use crate::event::{Answered, ConnectionState, PublisherEvent};
use std::future::Future;
use std::pin::pin;
use std::time::Instant;
use tokio::sync::{mpsc, watch};

/// The publisher thread's end of the channels in `crossing`.
pub struct Intake<'a> {
    batches: mpsc::Receiver<Handed>,
    stop: watch::Receiver<Option<Instant>>,
    shared: &'a Crossing,
    /// The number of times that messages were lost together: with a connection, or because there was none.
    losses: u64,
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
            losses: 0,
        }
    }

    /// The next batch that may be sent, if there is one.
    pub(crate) fn try_next(&mut self) -> Option<Vec<Publication>> {
        loop {
            let handed = self.batches.try_recv().ok()?;
            if let Some(batch) = self.accept(handed) {
                return Some(batch);
            }
        }
    }

    /// The batch, unless the worker handed it over before it had drained all losses. Such a batch is lost as well: it
    /// may hold a later message of a key of which an earlier one was lost.
    pub(crate) fn accept(&mut self, Handed { batch, failures_seen }: Handed) -> Option<Vec<Publication>> {
        if failures_seen >= self.losses {
            return Some(batch);
        }
        self.lose(batch, "messages before it were lost");
        None
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
        self.report_state(ConnectionState::Down {
            reason: fault.reason,
            detail: fault.detail.clone(),
        });
    }

    /// Takes the outcomes and leaves their memory.
    pub(crate) fn send_outcomes(&self, outcomes: &mut Vec<Answered>) {
        if !outcomes.is_empty() {
            self.shared.push_outcomes(outcomes, None);
        }
    }

    /// For a transport that counts failures itself: `failures` is their number so far.
    pub(crate) fn send_outcomes_counted(&self, outcomes: &mut Vec<Answered>, failures: u64) {
        if !outcomes.is_empty() {
            self.shared.push_outcomes(outcomes, Some(failures));
        }
    }

    /// Sends the outcomes of the messages of a connection that has ended, and counts one loss.
    pub(crate) fn send_last_outcomes(&mut self, outcomes: &mut Vec<Answered>) {
        if !outcomes.is_empty() {
            self.losses += 1;
            self.send_outcomes_counted(outcomes, self.losses);
        }
    }

    /// Gives each message the outcome `Lost`.
    pub(crate) fn lose(&mut self, batch: Vec<Publication>, reason: &str) {
        let outcomes = batch.into_iter().map(|message| Answered::lost(message.handle, reason));
        self.send_last_outcomes(&mut outcomes.collect());
    }

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
