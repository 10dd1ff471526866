//! What comes from the worker's main thread, and goes back to it: all that a carrier has to do with the worker.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========

use crate::crossing::{Handed, Shared};
use crate::down::Fault;
use crate::event::{Answered, ConnectionState, Event};
use crate::{Outcome, Publication};
use std::future::Future;
use std::pin::pin;
use std::time::Instant;
use tokio::sync::{mpsc, watch};

/// The thread's end of what crosses.
pub struct Intake<'a> {
    batches: mpsc::Receiver<Handed>,
    stop: watch::Receiver<Option<Instant>>,
    shared: &'a Shared,
    /// How often messages were lost together, with a connection or for want of one.
    losses: u64,
}

/// Told to stop, and to be done by then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopBy(pub(crate) Instant);

impl<'a> Intake<'a> {
    pub(crate) fn new(
        batches: mpsc::Receiver<Handed>,
        stop: watch::Receiver<Option<Instant>>,
        shared: &'a Shared,
    ) -> Self {
        Self {
            batches,
            stop,
            shared,
            losses: 0,
        }
    }

    /// The next batch that may go, if one is there.
    pub(crate) fn try_next(&mut self) -> Option<Vec<Publication>> {
        loop {
            let handed = self.batches.try_recv().ok()?;
            if let Some(batch) = self.accept(handed) {
                return Some(batch);
            }
        }
    }

    /// The batch, unless the worker handed it over before it heard of a loss: it may hold a later message of a key of which
    /// an earlier one was lost, so it is lost as well.
    pub(crate) fn accept(&mut self, Handed { batch, heard }: Handed) -> Option<Vec<Publication>> {
        if heard >= self.losses {
            return Some(batch);
        }
        self.lose(batch, "messages before it were lost");
        None
    }

    /// The next batch, or the order to stop, which goes first.
    pub(crate) async fn next_or_stop(&mut self, want_batch: bool) -> Result<Handed, StopBy> {
        let Self { batches, stop, .. } = self;
        tokio::select! {
            biased;
            stop = stop_order(stop) => Err(stop),
            Some(handed) = batches.recv(), if want_batch => Ok(handed),
        }
    }

    /// Whether main lets confirms wait.
    pub(crate) fn is_main_patient(&self) -> bool {
        self.shared.is_main_patient()
    }

    pub(crate) fn report_state(&self, state: ConnectionState) {
        self.shared.push(Event::State(state));
    }

    /// Before the outcomes of what is lost with it: the worker hands over less from then on.
    pub(crate) fn report_down(&self, fault: &Fault) {
        self.report_state(ConnectionState::Down {
            reason: fault.reason,
            detail: fault.detail.clone(),
        });
    }

    pub(crate) fn send_outcomes(&self, outcomes: Vec<Answered>) {
        if !outcomes.is_empty() {
            self.shared.push(Event::Outcomes(outcomes));
        }
    }

    /// Of a transport that counts failures.
    pub(crate) fn send_outcomes_counted(&self, outcomes: Vec<Answered>, failures: u64) {
        if !outcomes.is_empty() {
            self.shared.push_counted(Event::Outcomes(outcomes), Some(failures));
        }
    }

    /// What became of the messages of a connection that is over.
    pub(crate) fn send_last_outcomes(&mut self, outcomes: Vec<Answered>) {
        if !outcomes.is_empty() {
            self.losses += 1;
            self.send_outcomes_counted(outcomes, self.losses);
        }
    }

    fn lose(&mut self, batch: Vec<Publication>, reason: &str) {
        let lost = || Outcome::Lost {
            reason: reason.to_owned(),
        };
        let outcomes = batch.into_iter().map(|p| Answered::now(p.handle, lost()));
        self.send_last_outcomes(outcomes.collect());
    }

    /// Does `work` while there is no connection: every batch is answered at once, so that the caller can release it.
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

    /// Does `work`; batches wait meanwhile.
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

/// Ready once `stop` was called, or the publisher was dropped.
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
