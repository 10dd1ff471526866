//! Which partitions are this worker's: what is to become of the leases, given who lives. Pure; called within the host's
//! transaction.

use crate::host::Plan;
use outbox_core::engine::Held;
use outbox_core::lease::{self, Lease};
use outbox_core::partition::{Partition, PartitionCount};
use std::collections::HashSet;

/// What is known of the leases.
#[derive(Default)]
pub struct Leases {
    /// Held as of the last look.
    pub held: Vec<Held>,
    /// Until when, as far as the publishers go by it, in ns of the clock of their deadline; None = without end.
    pub until_ns: Option<u64>,
    /// How many partitions this worker should have.
    pub desired: usize,
}

/// What a look at the leases decided.
#[derive(Default)]
pub struct Decided {
    /// Partitions that another worker should have, and of which something is in flight here.
    pub leaving: HashSet<Partition>,
    /// Those that are given back.
    pub freed: Vec<Held>,
    /// How many partitions this worker should have.
    pub desired: usize,
}

impl Leases {
    /// `in_use`: partitions of which something is in flight here. One that another worker should have is given back
    /// once there is nothing.
    pub fn plan(&self, me: &str, workers: &[String], leases: &[Lease], in_use: &HashSet<Partition>) -> (Plan, Decided) {
        let plan = lease::plan(me, workers, leases);
        // A lease in our name that this process does not hold was an earlier process' of the same name: it is taken
        // anew, so that what that one had claimed counts as unclaimed.
        let (ours, inherited): (Vec<Held>, Vec<Held>) =
            (plan.renew.iter().copied()).partition(|lease| self.held.contains(lease));
        let (busy, free): (Vec<Held>, Vec<Held>) =
            (plan.release.iter().copied()).partition(|(p, _)| in_use.contains(p));
        let inherited = inherited.into_iter().map(|(partition, _)| partition);
        let decided = Decided {
            leaving: busy.iter().map(|(partition, _)| *partition).collect(),
            freed: free.clone(),
            desired: PartitionCount::new(leases.len() as i64).map_or(0, |count| {
                let mut sorted = workers.to_vec();
                sorted.sort_unstable(); // the database has a collation of its own
                lease::target(&sorted, me, count).len()
            }),
        };
        let plan = Plan {
            renew: ours.into_iter().chain(busy).collect(),
            release: free,
            take: plan.acquire.iter().copied().chain(inherited).collect(),
        };
        (plan, decided)
    }

    /// Partitions that are this worker's no more though it did not give them back; all of them once the publishers may
    /// not publish under them any more.
    pub fn run_out(&self, held: &[Held], freed: &[Held], boottime_ns: u64) -> HashSet<Partition> {
        let is_over = self.are_over(boottime_ns);
        let kept = |lease: &&Held| freed.contains(lease) || (!is_over && held.contains(lease));
        let run_out = self.held.iter().filter(|lease| !kept(lease));
        run_out.map(|(partition, _)| *partition).collect()
    }

    /// Whether the publishers may not publish any more.
    pub fn are_over(&self, boottime_ns: u64) -> bool {
        self.until_ns.is_some_and(|until_ns| boottime_ns >= until_ns)
    }
}
