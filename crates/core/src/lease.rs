//! Decides which worker holds which partition: a plan from the workers and leases that one transaction saw. Each worker
//! makes its plan on its main thread; the host of the worker executes it with fenced updates.
//!
//! The rule is a stable modulo: partition `i` belongs to the worker at `i % n` of the live workers sorted by name. The
//! workers never talk to each other. If two workers saw different lists, both may plan the same partition. The
//! condition of the update (the row is free, or has this owner and epoch) lets only one of them have it. The next pass
//! corrects the rest.

use crate::partition::{Partition, PartitionCount};

/// A row of `outbox_partitions` as read.
///
/// Written by the worker that acquires, renews or releases it; read by every worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    pub partition: Partition,
    /// Name of the worker; None if the lease was released or never held.
    pub owner: Option<String>,
    /// Whether the lease had not run out when it was read, by the clock of the database.
    pub live: bool,
    /// Grows with each acquisition.
    pub epoch: i64,
}

/// What one worker does with the leases. Each list has the order of the leases given. The epochs fence the updates: a
/// row with a later epoch belongs to another worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeasePlan {
    /// Free partitions that belong to this worker by the rule.
    pub acquire: Vec<Partition>,
    /// Partitions that this worker holds and keeps, also if the lease ran out. If another worker held such a partition
    /// since, its epoch fences the update.
    pub renew: Vec<(Partition, i64)>,
    /// Partitions that this worker holds and another is to take over, whether or not the lease ran out. The host
    /// releases a partition only after all its messages in flight are settled, and renews the lease until then.
    pub release: Vec<(Partition, i64)>,
}

impl LeasePlan {
    /// Whether the plan does nothing.
    pub fn is_empty(&self) -> bool {
        self.acquire.is_empty() && self.renew.is_empty() && self.release.is_empty()
    }
}

/// The partitions of the worker `me` by the rule, ascending. `workers_sorted` is sorted and without repeats. A worker
/// that is not in it has no partitions.
pub fn target(workers_sorted: &[String], me: &str, count: PartitionCount) -> Vec<Partition> {
    count
        .partitions()
        .filter(|partition| owner_by_rule(workers_sorted, *partition) == Some(me))
        .collect()
}

/// The plan of the worker `me`: its partitions by the rule, compared with the leases. `workers` are the live workers in
/// any order. `me` counts as one of them even if it is not listed, because its heartbeat may be younger than the list.
/// A live lease of another worker is left alone: that worker releases it when it sees `me`.
pub fn plan(me: &str, workers: &[String], leases: &[Lease]) -> LeasePlan {
    let mut workers_sorted: Vec<&str> = workers.iter().map(String::as_str).chain([me]).collect();
    workers_sorted.sort_unstable();
    workers_sorted.dedup();

    let mut plan = LeasePlan::default();
    for lease in leases {
        let mine_by_rule = owner_by_rule(&workers_sorted, lease.partition) == Some(me);
        let held_by_me = lease.owner.as_deref() == Some(me);
        let free = lease.owner.is_none() || !lease.live;
        match (mine_by_rule, held_by_me) {
            (true, true) => plan.renew.push((lease.partition, lease.epoch)),
            (true, false) if free => plan.acquire.push(lease.partition),
            (false, true) => plan.release.push((lease.partition, lease.epoch)),
            _ => {}
        }
    }
    plan
}

fn owner_by_rule<S: AsRef<str>>(workers_sorted: &[S], partition: Partition) -> Option<&str> {
    let at = usize::from(partition.index()).checked_rem(workers_sorted.len())?;
    workers_sorted.get(at).map(AsRef::as_ref)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    fn p(index: i64) -> Partition {
        Partition::new(index).unwrap()
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn lease(index: i64, owner: Option<&str>, live: bool, epoch: i64) -> Lease {
        Lease {
            partition: p(index),
            owner: owner.map(str::to_owned),
            live,
            epoch,
        }
    }

    #[test]
    fn two_workers_share_alternately() {
        let workers = names(&["a", "b"]);
        let count = PartitionCount::new(5).unwrap();
        assert_eq!(target(&workers, "a", count), [p(0), p(2), p(4)]);
        assert_eq!(target(&workers, "b", count), [p(1), p(3)]);
        assert_eq!(target(&workers, "c", count), []);
        assert_eq!(target(&[], "a", count), []);
    }

    #[test]
    fn a_single_worker_takes_every_free_partition_even_if_the_list_does_not_name_it() {
        let leases = [lease(0, None, false, 0), lease(1, Some("gone"), false, 4)];
        assert_eq!(
            plan("me", &[], &leases),
            LeasePlan {
                acquire: vec![p(0), p(1)],
                ..LeasePlan::default()
            }
        );
    }

    #[test]
    fn a_live_lease_of_another_worker_is_left_alone() {
        assert!(plan("me", &[], &[lease(0, Some("other"), true, 4)]).is_empty());
    }

    #[test]
    fn a_lease_of_this_worker_is_renewed_under_its_epoch_also_if_it_ran_out() {
        let plan = plan(
            "me",
            &[],
            &[lease(0, Some("me"), true, 4), lease(1, Some("me"), false, 5)],
        );
        assert_eq!(
            plan,
            LeasePlan {
                renew: vec![(p(0), 4), (p(1), 5)],
                ..LeasePlan::default()
            }
        );
    }

    #[test]
    fn a_new_worker_is_given_its_share() {
        let leases = [lease(0, Some("b"), true, 1), lease(1, Some("b"), true, 2)];
        let plan = plan("b", &names(&["b", "a"]), &leases);
        assert_eq!(
            plan,
            LeasePlan {
                renew: vec![(p(1), 2)],
                release: vec![(p(0), 1)],
                ..LeasePlan::default()
            }
        );
    }

    #[test]
    fn a_partition_of_another_is_not_taken_even_when_free() {
        assert!(plan("a", &names(&["b"]), &[lease(1, None, false, 0)]).is_empty());
    }

    fn some_workers() -> impl Strategy<Value = Vec<String>> {
        btree_set("[a-z]{1,3}", 1..8).prop_map(|names| names.into_iter().collect())
    }

    fn some_leases() -> impl Strategy<Value = Vec<Lease>> {
        vec((proptest::option::of("[a-z]{1,3}"), any::<bool>(), 0_i64..1_000), 1..70).prop_map(|rows| {
            let rows = rows.into_iter().zip(0..);
            rows.map(|((owner, live, epoch), index)| Lease {
                partition: p(index),
                owner,
                live,
                epoch,
            })
            .collect()
        })
    }

    /// Does what the fenced updates do. Panics where the condition of an update would have refused it.
    fn execute(me: &str, plan: &LeasePlan, leases: &mut [Lease]) {
        for partition in &plan.acquire {
            let lease = &mut leases[usize::from(partition.index())];
            assert!(lease.owner.is_none() || !lease.live);
            *lease = Lease {
                partition: *partition,
                owner: Some(me.to_owned()),
                live: true,
                epoch: lease.epoch + 1,
            };
        }
        for (partition, epoch) in &plan.renew {
            let lease = &mut leases[usize::from(partition.index())];
            assert!(lease.owner.as_deref() == Some(me) && lease.epoch == *epoch);
            lease.live = true;
        }
        for (partition, epoch) in &plan.release {
            let lease = &mut leases[usize::from(partition.index())];
            assert!(lease.owner.as_deref() == Some(me) && lease.epoch == *epoch);
            lease.owner = None;
        }
    }

    proptest! {
        #[test]
        fn the_targets_of_all_workers_are_all_partitions_once(workers in some_workers(), n in 1_i64..=1024) {
            let count = PartitionCount::new(n).unwrap();
            let mut all: Vec<Partition> = workers.iter().flat_map(|me| target(&workers, me, count)).collect();
            all.sort_unstable();
            prop_assert_eq!(all, count.partitions().collect::<Vec<_>>());
        }

        #[test]
        fn a_plan_depends_on_the_live_workers_and_not_on_the_order_of_their_list(
            workers in some_workers(),
            leases in some_leases(),
        ) {
            let me = workers[0].clone();
            let mut shuffled = workers.clone();
            shuffled.reverse();
            shuffled.push(workers[workers.len() / 2].clone());
            let without_me: Vec<String> = workers.iter().filter(|name| **name != me).cloned().collect();
            let found = plan(&me, &workers, &leases);
            prop_assert_eq!(&plan(&me, &shuffled, &leases), &found);
            prop_assert_eq!(&plan(&me, &without_me, &leases), &found);
        }

        #[test]
        fn a_plan_names_a_partition_once_and_only_if_it_is_free_or_held_by_the_worker(
            workers in some_workers(),
            leases in some_leases(),
        ) {
            let me = &workers[0];
            let found = plan(me, &workers, &leases);
            let held = found.renew.iter().chain(&found.release).map(|(partition, _)| *partition);
            let mut named: Vec<Partition> = found.acquire.iter().copied().chain(held).collect();
            for partition in &named {
                let lease = &leases[usize::from(partition.index())];
                prop_assert!(lease.owner.as_ref() == Some(me) || lease.owner.is_none() || !lease.live);
            }
            let total = named.len();
            named.sort_unstable();
            named.dedup();
            prop_assert_eq!(named.len(), total);
        }

        #[test]
        fn when_all_workers_plan_twice_every_partition_is_with_its_worker(
            workers in some_workers(),
            leases in some_leases(),
        ) {
            let mut leases = leases;
            for lease in &mut leases {
                // Leases of dead workers run out in time. This test does not wait for that.
                lease.live &= lease.owner.as_ref().is_some_and(|owner| workers.contains(owner));
            }
            for _ in 0..2 {
                for me in &workers {
                    let found = plan(me, &workers, &leases);
                    execute(me, &found, &mut leases);
                }
            }
            let count = PartitionCount::new(leases.len() as i64).unwrap();
            for me in &workers {
                let held = leases.iter().filter(|lease| lease.owner.as_ref() == Some(me));
                let mine: Vec<Partition> = held.map(|lease| lease.partition).collect();
                prop_assert_eq!(mine, target(&workers, me, count));
                let found = plan(me, &workers, &leases);
                prop_assert!(found.acquire.is_empty() && found.release.is_empty(), "still moving: {:?}", found);
            }
        }
    }
}
