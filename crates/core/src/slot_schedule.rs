//! Decides which databases have workers when there are fewer worker slots than databases: they are served in turn.
//! Called by the launcher after each change; `src/worker/launcher.rs` executes the plan and calls again.
//!
//! While there are enough slots, every worker keeps its slot. Otherwise a database that has messages and no worker
//! waits for a slot. A database gives up its slot once it has had a worker for a time slice, or has nothing to do. The
//! database that has waited longest comes next, so each database is served again after all others. A database that has
//! no worker and is known to have no messages does not wait. It still gets a worker from time to time, which finds what
//! no commit announced.

use std::cmp::Reverse;

/// The shortest time, in ms, that an idle worker keeps its slot. Otherwise each message would start a process and a
/// connection where messages come one by one to more databases than there are slots.
const SHORTEST_STAY_MS: u64 = 1_000;

/// The state of a database as the launcher knows it now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatabaseDemand {
    /// Number of workers that the database should have; 0 = none at present.
    pub wanted: u32,
    /// Number of wanted workers that could be started now. The others run, or wait after a failure.
    pub startable: u32,
    /// Number of workers that take a slot.
    pub running: u32,
    /// Number of running workers that were asked to exit.
    pub leaving: u32,
    /// When its present time slice began, in ms. Without a worker: when the last time slice ended; 0 = there was none
    /// yet.
    pub since_ms: u64,
    /// The time, in ms, before which a worker is known to have nothing to do. 0 = there are messages, or it is unknown.
    pub idle_until_ms: u64,
    /// The database seems to lack the extension. A worker would only check that again, in a slot that no other database
    /// wants.
    pub spare: bool,
    /// The entry stands for the maintenance of a database, a process that ends soon. It comes after databases that have
    /// messages, and before further workers of a database. It does not count for `missing`, because no slot has to be
    /// reserved for it.
    pub maintenance: bool,
}

impl DatabaseDemand {
    /// Number of running workers that were not asked to exit.
    fn staying(&self) -> u32 {
        self.running.saturating_sub(self.leaving)
    }

    /// Whether a worker is known to have nothing to do now.
    fn is_idle(&self, now_ms: u64) -> bool {
        now_ms < self.idle_until_ms
    }
}

/// What the launcher does. `start` and `leave` contain the index of a database in the list, once for each worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotPlan {
    /// Databases that get a worker, in this order. A start may find no slot, because other extensions use slots as
    /// well.
    pub start: Vec<usize>,
    /// Databases of which one worker exits: the one with the highest number that was not asked yet.
    pub leave: Vec<usize>,
    /// Number of databases without a worker and without a slot for one, that have messages or may have some.
    pub waiting: u32,
    /// Number of workers that could be started but find no slot.
    pub kept_out: u32,
    /// Number of slots to add so that each database has all its workers.
    pub missing: u32,
    /// Whether databases are served in turn, because there are more of them than slots.
    pub in_turn: bool,
    /// The time until the launcher plans again if nothing changes before, in ms; None = only after a change.
    pub rescan_in_ms: Option<u64>,
}

/// Plans the starts and exits of workers. `slots`: the worker slots that our workers take now or could take.
/// `slice_ms`: how long a database with messages keeps a worker at least while others wait.
pub fn plan(databases: &[DatabaseDemand], slots: u32, now_ms: u64, slice_ms: u64) -> SlotPlan {
    let mut plan = SlotPlan::default();
    let all = || databases.iter().enumerate();
    let mut free = slots.saturating_sub(databases.iter().map(|database| database.running).sum());
    let demand = || {
        databases
            .iter()
            .filter(|database| !database.spare && !database.maintenance && database.wanted > 0)
    };
    plan.missing = (demand().map(|database| database.wanted).sum::<u32>()).saturating_sub(slots);
    plan.in_turn = slots > 0 && demand().count() > slots as usize;

    // No worker starts while one of the same database exits, because the new one would get the same number.
    let may_start = |database: &DatabaseDemand| database.startable > 0 && database.leaving == 0;
    let mut first_workers: Vec<usize> = all()
        .filter(|(_, database)| database.running == 0 && may_start(database))
        .map(|(index, _)| index)
        .collect();
    first_workers.sort_by_key(|index| {
        let database = &databases[*index];
        (database.is_idle(now_ms), database.since_ms)
    });
    let (spares, first_workers): (Vec<usize>, Vec<usize>) =
        first_workers.into_iter().partition(|index| databases[*index].spare);
    let served = first_workers.len().min(free as usize);
    let mut coming = vec![0; databases.len()];
    for index in &first_workers[..served] {
        coming[*index] = 1;
    }
    // The second worker of a database comes before the third of another.
    let mut others: Vec<(u32, usize)> = Vec::new();
    for (index, database) in all()
        .filter(|(index, database)| may_start(database) && !database.spare && database.running + coming[*index] > 0)
    {
        let (has, more) = (database.running + coming[index], database.startable - coming[index]);
        others.extend((0..more).map(|nth| (has + nth, index)));
    }
    others.sort_unstable();
    let queue = (first_workers[..served].iter().copied())
        .chain(others.into_iter().map(|(_, index)| index))
        .chain(spares);
    for index in queue {
        if free == 0 {
            plan.kept_out += u32::from(!databases[index].spare);
            continue;
        }
        free -= 1;
        plan.start.push(index);
    }
    for index in &first_workers[served..] {
        let database = &databases[*index];
        plan.kept_out += 1;
        match database.is_idle(now_ms) {
            true => plan.rescan_within(database.idle_until_ms - now_ms),
            false => plan.waiting += 1,
        }
    }
    plan.make_room(databases, now_ms, slice_ms);
    plan
}

impl SlotPlan {
    /// Asks one worker to exit for each waiting database, minus the workers that exit already.
    fn make_room(&mut self, databases: &[DatabaseDemand], now_ms: u64, slice_ms: u64) {
        let leaving: u32 = databases.iter().map(|database| database.leaving).sum();
        let needed = self.waiting.saturating_sub(leaving) as usize;
        if needed == 0 {
            return;
        }
        // Idle workers exit first. Then come workers whose database keeps another worker. Last come those that had
        // their time slice. Of these, the one whose time slice began first exits first.
        let (mut ready, mut later) = (Vec::new(), Vec::new());
        for (index, database) in databases.iter().enumerate() {
            for nth in 0..database.staying() {
                let (rank, stay_ms) = match (database.is_idle(now_ms), nth) {
                    (true, _) => (0, SHORTEST_STAY_MS.min(slice_ms)),
                    (false, 1..) => (1, 0),
                    (false, 0) => (2, slice_ms),
                };
                match (database.since_ms.saturating_add(stay_ms)).saturating_sub(now_ms) {
                    0 => ready.push((rank, Reverse(nth), database.since_ms, index)),
                    left_ms => later.push(left_ms),
                }
            }
        }
        ready.sort_unstable();
        self.leave = ready.into_iter().take(needed).map(|(.., index)| index).collect();
        if self.leave.len() < needed
            && let Some(left_ms) = later.into_iter().min()
        {
            self.rescan_within(left_ms);
        }
    }

    fn rescan_within(&mut self, ms: u64) {
        self.rescan_in_ms = Some(self.rescan_in_ms.map_or(ms, |known| known.min(ms)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const SLICE_MS: u64 = 10_000;

    /// A database that has messages, and no worker since `since_ms`.
    fn waits(since_ms: u64) -> DatabaseDemand {
        DatabaseDemand {
            wanted: 1,
            startable: 1,
            since_ms,
            ..DatabaseDemand::default()
        }
    }

    /// A database that has messages, and a worker since `since_ms`.
    fn served(since_ms: u64) -> DatabaseDemand {
        DatabaseDemand {
            wanted: 1,
            running: 1,
            since_ms,
            ..DatabaseDemand::default()
        }
    }

    fn idle(database: DatabaseDemand) -> DatabaseDemand {
        DatabaseDemand {
            idle_until_ms: u64::MAX,
            ..database
        }
    }

    fn at(databases: &[DatabaseDemand], slots: u32, now_ms: u64) -> (Vec<usize>, Vec<usize>) {
        let plan = plan(databases, slots, now_ms, SLICE_MS);
        (plan.start, plan.leave)
    }

    #[test]
    fn with_enough_slots_all_workers_start_and_none_exits() {
        let all = [waits(0), idle(waits(7)), served(1), idle(served(2))];
        let plan = plan(&all, 4, 100_000, SLICE_MS);
        assert_eq!((plan.start, plan.leave), (vec![0, 1], vec![]));
        assert_eq!((plan.missing, plan.in_turn, plan.rescan_in_ms), (0, false, None));
    }

    #[test]
    fn the_database_that_waited_longest_comes_next_and_the_one_served_longest_makes_room() {
        let all = [waits(900), waits(800), served(2_000), served(1_000)];
        assert_eq!(at(&all, 2, 30_000), (vec![], vec![3, 2]));
        assert_eq!(at(&all[..3], 2, 30_000), (vec![1], vec![2]));
        let plan = plan(&all, 2, 30_000, SLICE_MS);
        assert_eq!((plan.waiting, plan.missing, plan.in_turn), (2, 2, true));
    }

    #[test]
    fn a_busy_database_keeps_its_worker_for_a_time_slice() {
        let all = [waits(900), served(2_000)];
        let early = plan(&all, 1, 11_999, SLICE_MS);
        assert_eq!((early.leave, early.rescan_in_ms), (vec![], Some(1)));
        assert_eq!(at(&all, 1, 12_000), (vec![], vec![1]));
    }

    #[test]
    fn an_idle_database_makes_room_soon_and_only_for_one_that_has_messages() {
        let all = [waits(900), served(0), idle(served(2_000))];
        let early = plan(&all, 2, 2_999, SLICE_MS);
        assert_eq!((early.leave, early.rescan_in_ms), (vec![], Some(1)));
        assert_eq!(at(&all, 2, 3_000), (vec![], vec![2]));
        let all = [idle(waits(900)), served(0), idle(served(2_000))];
        assert_eq!(at(&all, 2, 100_000), (vec![], vec![]));
    }

    #[test]
    fn a_database_that_no_worker_checked_for_long_waits_like_one_with_messages() {
        let due = DatabaseDemand {
            idle_until_ms: 60_000,
            ..waits(900)
        };
        let all = [due, served(0), idle(served(2_000))];
        let early = plan(&all, 2, 59_000, SLICE_MS);
        assert_eq!((early.leave, early.rescan_in_ms), (vec![], Some(1_000)));
        assert_eq!(at(&all, 2, 60_000), (vec![], vec![2]));
    }

    #[test]
    fn no_worker_exits_while_another_frees_its_slot() {
        let leaves = DatabaseDemand {
            leaving: 1,
            ..served(0)
        };
        assert_eq!(at(&[waits(900), leaves, served(1)], 2, 100_000), (vec![], vec![]));
    }

    #[test]
    fn the_second_worker_of_a_database_exits_before_the_only_one_of_another_and_displaces_none() {
        let two = DatabaseDemand {
            wanted: 2,
            running: 2,
            ..served(99_000)
        };
        assert_eq!(at(&[waits(900), served(0), two], 3, 100_000), (vec![], vec![2]));
        let wants_two = DatabaseDemand {
            wanted: 2,
            startable: 1,
            ..served(0)
        };
        let plan = plan(&[idle(served(0)), wants_two], 2, 100_000, SLICE_MS);
        assert_eq!((plan.start, plan.leave), (vec![], vec![]));
        assert_eq!((plan.missing, plan.in_turn), (1, false));
    }

    #[test]
    fn first_workers_start_before_second_ones_and_both_before_a_check_for_the_extension() {
        let wants_two = DatabaseDemand {
            wanted: 2,
            startable: 2,
            ..waits(0)
        };
        let spare = DatabaseDemand {
            spare: true,
            ..waits(0)
        };
        let all = [spare, wants_two, waits(50)];
        assert_eq!(at(&all, 9, 100), (vec![1, 2, 1, 0], vec![]));
        assert_eq!(at(&all, 2, 100), (vec![1, 2], vec![]));
        assert_eq!(at(&[all[0].clone(), idle(served(0))], 1, 100_000), (vec![], vec![]));
    }

    /// A database whose maintenance is due since `since_ms`, and overdue a minute later.
    fn due(since_ms: u64) -> DatabaseDemand {
        DatabaseDemand {
            maintenance: true,
            idle_until_ms: since_ms + 60_000,
            ..waits(since_ms)
        }
    }

    #[test]
    fn maintenance_comes_after_waiting_databases_and_before_second_workers_and_needs_no_slot_added() {
        let two = DatabaseDemand {
            wanted: 2,
            startable: 1,
            ..served(0)
        };
        let all = [due(50), two, waits(90)];
        assert_eq!(at(&all, 4, 100), (vec![2, 0, 1], vec![]));
        assert_eq!(at(&all, 3, 100), (vec![2, 0], vec![]));
        assert_eq!(at(&all, 2, 100), (vec![2], vec![]));
        let plan = plan(&[served(0), due(50)], 1, 100, SLICE_MS);
        assert_eq!((plan.missing, plan.in_turn, plan.waiting), (0, false, 0));
        assert_eq!((plan.kept_out, plan.rescan_in_ms), (1, Some(59_950)));
    }

    #[test]
    fn overdue_maintenance_gets_a_slot_and_running_maintenance_makes_room_soon() {
        let all = [due(50), idle(served(0)), served(10)];
        assert_eq!(at(&all, 2, 60_049), (vec![], vec![]));
        assert_eq!(at(&all, 2, 60_050), (vec![], vec![1]));
        let runs = DatabaseDemand {
            maintenance: true,
            ..idle(served(2_000))
        };
        assert_eq!(at(&[waits(900), runs.clone()], 1, 2_999), (vec![], vec![]));
        assert_eq!(at(&[waits(900), runs.clone()], 1, 3_000), (vec![], vec![1]));
        assert_eq!(at(&[idle(waits(900)), runs], 1, 30_000), (vec![], vec![]));
    }

    #[test]
    fn without_any_slot_all_slots_are_missing_and_no_database_is_served_in_turn() {
        let plan = plan(&[waits(0), waits(0)], 0, 100, SLICE_MS);
        assert_eq!((plan.missing, plan.in_turn, plan.kept_out), (2, false, 2));
    }

    // ---- simulated --------------------------------------------------------------------------------------------------

    const STEP_MS: u64 = 100;
    const RESCAN_MS: u64 = 20_000;
    /// The most steps that a worker takes to exit.
    const EXIT_STEPS: u64 = 5;

    /// A simulated database.
    #[derive(Clone, Debug)]
    struct Player {
        wanted: u32,
        /// The average number of steps for each commit; 0 = a commit in each step.
        commits_every: u64,
        messages: u64,
        known_idle: bool,
        /// Its workers: the step at which each one has exited, or None if it was not asked to exit.
        workers: Vec<Option<u64>>,
        since_ms: u64,
        idle_until_ms: u64,
        /// Since when it has had messages and no worker.
        starved_since_ms: Option<u64>,
    }

    impl Player {
        fn as_seen(&self) -> DatabaseDemand {
            let running = self.workers.len() as u32;
            DatabaseDemand {
                wanted: self.wanted,
                startable: self.wanted.saturating_sub(running),
                running,
                leaving: self.workers.iter().flatten().count() as u32,
                since_ms: self.since_ms,
                idle_until_ms: if self.known_idle { self.idle_until_ms } else { 0 },
                spare: false,
                maintenance: false,
            }
        }

        fn live(&mut self, step: u64, chance: u64) {
            let now_ms = step * STEP_MS;
            if self.commits_every == 0 || chance.is_multiple_of(self.commits_every) {
                (self.messages, self.known_idle) = (self.messages + 3, false);
            }
            let before = self.workers.len();
            self.workers.retain(|gone| gone.is_none_or(|gone| step < gone));
            if before > 0 && self.workers.is_empty() {
                self.since_ms = now_ms;
            }
            if self.workers.iter().any(Option::is_none) {
                self.messages = self.messages.saturating_sub(2);
                (self.known_idle, self.idle_until_ms) = (self.messages == 0, now_ms + RESCAN_MS);
            }
            let is_starved = self.messages > 0 && self.workers.is_empty();
            self.starved_since_ms = is_starved.then(|| self.starved_since_ms.unwrap_or(now_ms));
        }
    }

    fn players() -> impl Strategy<Value = Vec<Player>> {
        let player = (1_u32..=3, prop_oneof![Just(0), 1_u64..200]).prop_map(|(wanted, commits_every)| Player {
            wanted,
            commits_every,
            messages: 0,
            known_idle: false,
            workers: Vec::new(),
            since_ms: 0,
            idle_until_ms: 0,
            starved_since_ms: None,
        });
        vec(player, 1..9)
    }

    /// Simulates 200 s. Returns how many workers were asked to exit, and how many of them were the last of their
    /// database.
    fn simulate(players: &mut [Player], slots: u32, seed: u64) -> Result<(u32, u32), TestCaseError> {
        let (count, wanted_max) = (players.len() as u64, 3);
        // All other databases come first, `slots` at a time, each for a time slice and the time to exit. Twice, because
        // a database may just have come to the end of the queue.
        let patience_ms = 2 * (count.div_ceil(u64::from(slots)) + 1) * (SLICE_MS + (EXIT_STEPS + wanted_max) * STEP_MS);
        let (mut asked, mut emptied, mut random) = (0, 0, seed | 1);
        for step in 1..2_000_u64 {
            let now_ms = step * STEP_MS;
            for player in players.iter_mut() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                player.live(step, random >> 33);
                let starved_ms = player.starved_since_ms.map_or(0, |since| now_ms - since);
                prop_assert!(starved_ms <= patience_ms, "starves for {starved_ms} ms: {player:?}");
            }
            let seen: Vec<DatabaseDemand> = players.iter().map(Player::as_seen).collect();
            let plan = plan(&seen, slots, now_ms, SLICE_MS);
            for index in plan.start {
                let player = &mut players[index];
                if player.workers.is_empty() {
                    player.since_ms = now_ms;
                }
                player.workers.push(None);
                prop_assert!(player.workers.len() as u32 <= player.wanted);
            }
            for index in plan.leave {
                let player = &mut players[index];
                let stays = player.workers.iter().filter(|gone| gone.is_none()).count();
                let had_its_slice = now_ms >= player.since_ms + SLICE_MS;
                prop_assert!(plan.waiting > 0, "no database waits");
                let is_done = seen[index].is_idle(now_ms) && now_ms >= player.since_ms + SHORTEST_STAY_MS;
                prop_assert!(stays > 1 || had_its_slice || is_done, "asked to exit too soon");
                let last = player.workers.iter_mut().rev().find(|gone| gone.is_none());
                *last.expect("a worker that stays") = Some(step + 1 + random % EXIT_STEPS);
                (asked, emptied) = (asked + 1, emptied + u32::from(stays == 1));
            }
            let running: usize = players.iter().map(|player| player.workers.len()).sum();
            prop_assert!(running as u32 <= slots);
        }
        Ok((asked, emptied))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn no_database_starves_and_no_worker_exits_before_its_time_slice_is_over(
            players in players(), slots in 1_u32..8, seed: u64,
        ) {
            let mut players = players;
            simulate(&mut players, slots, seed)?;
        }

        #[test]
        fn with_a_slot_for_each_database_none_is_left_without_a_worker(players in players(), more in 0_u32..9, seed: u64) {
            let mut players = players;
            let slots = players.len() as u32 + more;
            let wanted: u32 = players.iter().map(|player| player.wanted).sum();
            let (asked, emptied) = simulate(&mut players, slots, seed)?;
            prop_assert_eq!((asked, emptied), (0, 0), "{} slots for {} workers", slots, wanted);
        }
    }
}
