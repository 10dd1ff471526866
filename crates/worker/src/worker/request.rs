//! The request of a session: from its order to its answer. A part of [`Worker`].

use super::Worker;
use crate::destination::Destination;
use crate::report::PassCounts;
use crate::runtime::{Orders, Runtime};
use outbox_core::engine::Request;
use std::time::Instant;

/// The request of a session, with its progress.
pub(super) struct Task {
    pub request_id: u32,
    pub request: Request,
    pub began: Instant,
    pub purged: bool,
    pub report: PassCounts,
}

impl<R: Runtime> Worker<R> {
    /// Begins a new request, and drops one that no session waits for any more.
    pub(super) fn take_up(&mut self, orders: &Orders, now: Instant) {
        let request_id = orders.request.map_or(0, |(request_id, _)| request_id);
        if self.task.as_ref().is_some_and(|task| task.request_id != request_id) {
            self.drop_task();
        }
        let Some((request_id, request)) = orders
            .request
            .filter(|(request_id, _)| *request_id != self.last_request_id)
        else {
            return;
        };
        self.last_request_id = request_id;
        self.task = Some(Task {
            request_id,
            request,
            began: now,
            purged: false,
            report: PassCounts::default(),
        });
        for destination in &mut self.destinations {
            destination.begin_request(request);
        }
        if !request.goes_on() {
            self.due.begin_request();
            self.leases_due = now;
            self.refreshes_at_once = true; // the request must see changes made just before it
        }
    }

    fn drop_task(&mut self) {
        self.task = None;
        self.destinations.iter_mut().for_each(Destination::end_request);
    }

    /// Removes dead workers: every `PURGE_EVERY`, and once for each request. Only the first worker does.
    pub(super) fn purge(&mut self, now: Instant) -> Result<(), R::Error> {
        let is_requested = self.task.as_ref().is_some_and(|task| !task.purged);
        let is_due = self.purge_due.is_some_and(|due| now >= due);
        if !self.is_first || !(is_requested || is_due) {
            return Ok(());
        }
        self.purge_due = R::PURGE_EVERY.map(|every| now + every);
        if let Some(task) = &mut self.task {
            task.purged = true;
        }
        let purged = self.common.runtime.purge()?;
        self.report.purged_stale += purged;
        if let Some(task) = &mut self.task {
            task.report.purged_stale += purged;
        }
        Ok(())
    }

    /// Reports the progress of the request at the end of a pass. With `share_by` the request is not done until this
    /// worker has its share of the partitions, or until that time.
    pub(super) fn answer(&mut self, share_by: Option<Instant>) {
        let now = self.common.runtime.now();
        let has_share = share_by.is_none_or(|by| self.has_its_share(by, now));
        let (common, destinations) = (&self.common, &self.destinations);
        let Some(task) = &mut self.task else { return };
        let tallies = || destinations.iter().map(Destination::tally);
        let report = &mut task.report;
        report.claimed = tallies().map(|tally| tally.claimed).sum();
        report.published = tallies().map(|tally| tally.published).sum();
        report.failed = tallies().map(|tally| tally.failed).sum();
        report.duration_us = now.saturating_duration_since(task.began).as_micros() as u64;
        report.backoff_ms = match report.claimed {
            0 => common.settings.idle_backoff_ms,
            _ => 0,
        };
        report.active_workers = common.workers as usize;
        (report.desired, report.owned) = (self.leases.desired, self.leases.held.len());
        let mut each = destinations.iter();
        let done = has_share && each.all(|destination| destination.has_done_request(common));
        common.runtime.answer(task.request_id, report, done);
        if done {
            self.drop_task();
        }
    }
}
