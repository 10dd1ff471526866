//! Heartbeat, leases and the clock of the server. A part of [`Worker`]; `crate::lease_plan` plans.

use super::{SOON, Worker};
use crate::destination::{Destination, STOP_LIMIT};
use crate::lease_plan::Decided;
use crate::runtime::Runtime;
use outbox_core::engine::{HeldLease, Sharing};
use outbox_core::partition::Partition;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// The clock of the server was set if it drifts from elapsed time by more than this between two passes, in µs.
const CLOCK_WAS_SET_US: i64 = 1_000_000;

impl<R: Runtime> Worker<R> {
    /// Makes the pass check the leases immediately if the server's clock jumped. Leases follow that clock, and the
    /// publishers' deadline follows one that goes on while the machine is suspended. The timers of this process follow
    /// neither. So after a jump the leases may have run out long before the next regular check.
    pub(super) fn check_clock(&mut self, now: Instant) {
        let began_us = self.common.runtime.now_us() - self.common.since_began().as_micros() as i64;
        if (began_us - self.clock_began_us).abs() > CLOCK_WAS_SET_US {
            let runtime = &self.common.runtime;
            runtime.log(None, format_args!("the clock was set; checking the leases"));
            self.leases_due = now;
        }
        self.clock_began_us = began_us;
    }

    /// Writes the heartbeat and renews, takes and releases leases by the plan, if that is due or workers changed.
    pub(super) fn tend_leases(&mut self, now: Instant) -> Result<(), R::Error> {
        let runtime = &self.common.runtime;
        let changes = runtime.worker_changes();
        if now < self.leases_due && self.worker_changes == Some(changes) {
            return Ok(());
        }
        let requested_at_ns = runtime.boottime_ns();
        let in_use: HashSet<Partition> = self.destinations.iter().flat_map(Destination::in_use).collect();
        let (leases, mut decided) = (&self.leases, Decided::default());
        let tended = runtime.tend(self.is_idle, &mut |workers, found| {
            let plan = leases.plan(runtime.id(), workers, found, &in_use);
            decided = plan.1;
            plan.0
        })?;
        let is_new = self.worker_changes.is_none();
        self.is_first = tended.workers.first().is_some_and(|first| first == runtime.id());
        self.set_workers(tended.workers.len() as u32);
        let mut taken = 0;
        if let Some((held, lasts)) = tended.leased {
            self.give_up_what_has_run_out(&held, &decided.freed);
            taken = held.iter().filter(|lease| !self.leases.held.contains(lease)).count();
            // Counted from before the lease was written, and shortened by a tenth.
            let lasts = lasts * 9 / 10;
            self.common.runtime.set_deadline(Some((requested_at_ns, lasts)));
            self.leases.until_ns = Some(requested_at_ns + lasts.as_nanos() as u64);
            self.set_leases(held, &decided);
        } else {
            self.common.runtime.set_deadline(None);
        }
        for report in (self.task.iter_mut().map(|task| &mut task.report)).chain([&mut self.report]) {
            report.renewed_heartbeat = true;
            (report.leased, report.released) = (report.leased + taken, report.released + decided.freed.len());
        }
        if is_new || !decided.freed.is_empty() {
            self.common.runtime.call_others(); // this worker is new, or partitions are free
        }
        self.worker_changes = Some(changes);
        let soon = !decided.leaving.is_empty() || (self.leases.held.is_empty() && self.sharing == Sharing::Leases);
        let next = self.common.settings.lease_renew;
        self.leases_due = now + if soon { next.min(SOON) } else { next };
        Ok(())
    }

    fn set_workers(&mut self, workers: u32) {
        if workers != self.common.workers {
            self.common.workers = workers;
            for destination in &mut self.destinations {
                destination.take_limits(&self.common);
            }
        }
    }

    /// Stops the publishers that hold messages of leases which are lost or have run out. Those messages must not be
    /// sent, so this comes before the deadline is extended.
    fn give_up_what_has_run_out(&mut self, held: &[HeldLease], freed: &[HeldLease]) {
        let runtime = &self.common.runtime;
        let run_out = self.leases.run_out(held, freed, runtime.boottime_ns());
        if run_out.is_empty() {
            return;
        }
        runtime.log(None, format_args!("the leases have run out"));
        let is_hit = |index: &usize| !self.destinations[*index].in_use().is_disjoint(&run_out);
        let hit: Vec<usize> = (0..self.destinations.len()).filter(is_hit).collect();
        let limit = if runtime.is_ending() {
            Duration::ZERO
        } else {
            STOP_LIMIT
        };
        for index in &hit {
            self.destinations[*index].request_stop(limit);
        }
        let deadline = runtime.now() + limit;
        for index in hit {
            let left = deadline.saturating_duration_since(self.common.runtime.now());
            self.destinations[index].stop(&self.common, left, "the leases have run out");
            self.destinations[index].ensure(&self.common);
        }
    }

    fn set_leases(&mut self, held: Vec<HeldLease>, decided: &Decided) {
        if held.len() != self.leases.held.len() {
            let runtime = &self.common.runtime;
            runtime.log(None, format_args!("owns {} partitions", held.len()));
        }
        if (&held, &decided.leaving) != (&self.leases.held, &self.leases.leaving) {
            for destination in &mut self.destinations {
                destination.set_leases(&held, &decided.leaving);
            }
            self.needs_survey = true;
            self.leases.leaving.clone_from(&decided.leaving);
        }
        (self.leases.held, self.leases.desired) = (held, decided.desired);
    }
}
