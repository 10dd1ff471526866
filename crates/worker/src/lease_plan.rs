//! Which partitions this worker owns: the plan for the leases, given the live workers. Pure. `worker` calls it within
//! the transaction of `Runtime::tend`, on the worker's thread.

use crate::runtime::LeaseChanges;
use outbox_core::engine::HeldLease;
use outbox_core::lease::{self, Lease};
use outbox_core::partition::{Partition, PartitionCount};
use std::collections::HashSet;

/// The leases of this worker.
#[derive(Default)]
pub struct Leases {
    /// The leases that it holds, as of the last check.
    pub held: Vec<HeldLease>,
    /// Those that another worker is to take over.
    pub leaving: HashSet<Partition>,
    /// The publishers' deadline, in ns of `Runtime::boottime_ns`; None = without end.
    pub until_ns: Option<u64>,
    /// The number of partitions that this worker should own.
    pub desired: usize,
}

/// What a check of the leases decided.
#[derive(Default)]
pub struct Decided {
    /// Partitions that another worker should own, and that still have messages in flight here.
    pub leaving: HashSet<Partition>,
    /// The released leases.
    pub freed: Vec<HeldLease>,
    /// The number of partitions that this worker should own.
    pub desired: usize,
}

impl Leases {
    /// Plans which leases to renew, release and take. `in_use`: the partitions with messages in flight here. A
    /// partition that another worker should own is released when it has none.
    pub fn plan(
        &self,
        me: &str,
        workers: &[String],
        leases: &[Lease],
        in_use: &HashSet<Partition>,
    ) -> (LeaseChanges, Decided) {
        let plan = lease::plan(me, workers, leases);
        // A lease in our name that this process does not hold belonged to an earlier process of the same name. It is
        // taken again, with a new epoch, so that the claims of that process no longer count.
        let (ours, inherited): (Vec<HeldLease>, Vec<HeldLease>) =
            (plan.renew.iter().copied()).partition(|lease| self.held.contains(lease));
        let (busy, free): (Vec<HeldLease>, Vec<HeldLease>) =
            (plan.release.iter().copied()).partition(|(p, _)| in_use.contains(p));
        let inherited = inherited.into_iter().map(|(partition, _)| partition);
        let decided = Decided {
            leaving: busy.iter().map(|(partition, _)| *partition).collect(),
            freed: free.clone(),
            desired: PartitionCount::new(leases.len() as i64).map_or(0, |count| {
                let mut sorted = workers.to_vec();
                sorted.sort_unstable(); // the database sorts by its own collation
                lease::target(&sorted, me, count).len()
            }),
        };
        let plan = LeaseChanges {
            renew: ours.into_iter().chain(busy).collect(),
            release: free,
            take: plan.acquire.iter().copied().chain(inherited).collect(),
        };
        (plan, decided)
    }

    /// The partitions whose leases this worker lost without releasing them. Once the publishers' deadline is over: all
    /// that it did not release.
    pub fn run_out(&self, held: &[HeldLease], freed: &[HeldLease], boottime_ns: u64) -> HashSet<Partition> {
        let is_over = self.are_over(boottime_ns);
        let kept = |lease: &&HeldLease| freed.contains(lease) || (!is_over && held.contains(lease));
        let run_out = self.held.iter().filter(|lease| !kept(lease));
        run_out.map(|(partition, _)| *partition).collect()
    }

    /// Whether the publishers' deadline is over.
    pub fn are_over(&self, boottime_ns: u64) -> bool {
        self.until_ns.is_some_and(|until_ns| boottime_ns >= until_ns)
    }
}
