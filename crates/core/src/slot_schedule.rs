//! Which databases have workers when there are fewer worker slots than databases: they are served in turn. The launcher
//! calls it after each event; `src/worker/launcher.rs` executes the plan, and calls again.
//!
//! While there are enough slots every worker stays. Otherwise a database that has messages and no worker waits. A
//! database whose worker has served for at least a time slice, or has nothing to do, makes room. The database that has
//! waited longest comes next, so each is served again after all others. A database without a worker and known to have
//! no messages does not wait; it is still visited from time to time, for messages without a notification.

use std::cmp::Reverse;

/// A worker without work stays at least this long. Otherwise, if messages arrive one by one for more databases than
/// there are slots, each would start a process and a connection.
const SHORTEST_STAY_MS: u64 = 1_000;

/// A database as the launcher sees it now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Database {
    /// The workers that it shall have; 0 = none at present.
    pub wanted: u32,
    /// Those that could be started now. The others run, or wait after a failure.
    pub startable: u32,
    /// Workers that occupy a slot,
    pub running: u32,
    /// and those of them that were asked to leave.
    pub leaving: u32,
    /// When its present time slice began; without a worker, when the last one ended. 0 = there was none yet.
    pub since_ms: u64,
    /// Until then no work for a worker is known. 0 = there are messages, or it is not known.
    pub idle_until_ms: u64,
    /// It seems to lack the extension: a worker only checks again, in a slot that no other needs.
    pub spare: bool,
    /// Not a database, but the maintenance of one: a process that is soon done. It comes after databases that have
    /// messages, and before further workers of a database. No slot has to be added for it, so none is missing.
    pub maintenance: bool,
}

impl Database {
    fn staying(&self) -> u32 {
        self.running.saturating_sub(self.leaving)
    }

    fn is_idle(&self, now_ms: u64) -> bool {
        now_ms < self.idle_until_ms
    }
}

/// What the launcher does. A database is named by its index in the list, once for each worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In this order: a start may find no slot, because others use them as well.
    pub start: Vec<usize>,
    /// The worker with the highest number that stays shall leave.
    pub leave: Vec<usize>,
    /// Databases that have messages, or may have some, and neither a worker nor a slot.
    pub waiting: u32,
    /// Workers that could be started and find no slot.
    pub kept_out: u32,
    /// The slots to add so that each database has all its workers.
    pub missing: u32,
    /// There are more databases than slots.
    pub in_turn: bool,
    /// Plan again then, if nothing happens before.
    pub rescan_in_ms: Option<u64>,
}

/// `slots`: those that our workers occupy or could occupy. `turn_ms`: how long a busy database is served at least.
pub fn plan(databases: &[Database], slots: u32, now_ms: u64, slice_ms: u64) -> Plan {
    let mut plan = Plan::default();
    let all = || databases.iter().enumerate();
    let mut free = slots.saturating_sub(databases.iter().map(|database| database.running).sum());
    let demand = || {
        databases
            .iter()
            .filter(|database| !database.spare && !database.maintenance && database.wanted > 0)
    };
    plan.missing = (demand().map(|database| database.wanted).sum::<u32>()).saturating_sub(slots);
    plan.in_turn = slots > 0 && demand().count() > slots as usize;

    // No worker starts while one of the same database leaves: they have the same numbers.
    let may_start = |database: &Database| database.startable > 0 && database.leaving == 0;
    let mut firsts: Vec<usize> = all()
        .filter(|(_, database)| database.running == 0 && may_start(database))
        .map(|(index, _)| index)
        .collect();
    firsts.sort_by_key(|index| {
        let database = &databases[*index];
        (database.is_idle(now_ms), database.since_ms)
    });
    let (spares, firsts): (Vec<usize>, Vec<usize>) = firsts.into_iter().partition(|index| databases[*index].spare);
    let served = firsts.len().min(free as usize);
    let mut coming = vec![0; databases.len()];
    for index in &firsts[..served] {
        coming[*index] = 1;
    }
    // A database's second worker comes before another's third.
    let mut others: Vec<(u32, usize)> = Vec::new();
    for (index, database) in all()
        .filter(|(index, database)| may_start(database) && !database.spare && database.running + coming[*index] > 0)
    {
        let (has, more) = (database.running + coming[index], database.startable - coming[index]);
        others.extend((0..more).map(|nth| (has + nth, index)));
    }
    others.sort_unstable();
    let queue = (firsts[..served].iter().copied())
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
    for index in &firsts[served..] {
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

impl Plan {
    /// Asks as many to leave as databases wait, without those that leave already.
    fn make_room(&mut self, databases: &[Database], now_ms: u64, slice_ms: u64) {
        let leaving: u32 = databases.iter().map(|database| database.leaving).sum();
        let needed = self.waiting.saturating_sub(leaving) as usize;
        if needed == 0 {
            return;
        }
        // Workers without work leave first; then those whose database keeps another worker; then those whose time slice
        // is over, the longest first.
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

    /// Has messages, and no worker since then.
    fn waits(since_ms: u64) -> Database {
        Database {
            wanted: 1,
            startable: 1,
            since_ms,
            ..Database::default()
        }
    }

    /// Has messages, and a worker since then.
    fn served(since_ms: u64) -> Database {
        Database {
            wanted: 1,
            running: 1,
            since_ms,
            ..Database::default()
        }
    }

    fn idle(database: Database) -> Database {
        Database {
            idle_until_ms: u64::MAX,
            ..database
        }
    }

    fn at(databases: &[Database], slots: u32, now_ms: u64) -> (Vec<usize>, Vec<usize>) {
        let plan = plan(databases, slots, now_ms, SLICE_MS);
        (plan.start, plan.leave)
    }

    #[test]
    fn with_enough_slots_all_start_and_none_leaves() {
        let all = [waits(0), idle(waits(7)), served(1), idle(served(2))];
        let plan = plan(&all, 4, 100_000, SLICE_MS);
        assert_eq!((plan.start, plan.leave), (vec![0, 1], vec![]));
        assert_eq!((plan.missing, plan.in_turn, plan.rescan_in_ms), (0, false, None));
    }

    #[test]
    fn the_database_that_waited_longest_comes_next_and_the_longest_served_leaves() {
        let all = [waits(900), waits(800), served(2_000), served(1_000)];
        assert_eq!(at(&all, 2, 30_000), (vec![], vec![3, 2]));
        assert_eq!(at(&all[..3], 2, 30_000), (vec![1], vec![2]));
        let plan = plan(&all, 2, 30_000, SLICE_MS);
        assert_eq!((plan.waiting, plan.missing, plan.in_turn), (2, 2, true));
    }

    #[test]
    fn a_busy_database_keeps_its_worker_for_a_turn() {
        let all = [waits(900), served(2_000)];
        let early = plan(&all, 1, 11_999, SLICE_MS);
        assert_eq!((early.leave, early.rescan_in_ms), (vec![], Some(1)));
        assert_eq!(at(&all, 1, 12_000), (vec![], vec![1]));
    }

    #[test]
    fn an_idle_database_makes_room_soon_and_only_for_one_with_messages() {
        let all = [waits(900), served(0), idle(served(2_000))];
        let early = plan(&all, 2, 2_999, SLICE_MS);
        assert_eq!((early.leave, early.rescan_in_ms), (vec![], Some(1)));
        assert_eq!(at(&all, 2, 3_000), (vec![], vec![2]));
        let all = [idle(waits(900)), served(0), idle(served(2_000))];
        assert_eq!(at(&all, 2, 100_000), (vec![], vec![]));
    }

    #[test]
    fn a_database_that_was_not_visited_for_long_waits_like_one_with_messages() {
        let due = Database {
            idle_until_ms: 60_000,
            ..waits(900)
        };
        let all = [due, served(0), idle(served(2_000))];
        let early = plan(&all, 2, 59_000, SLICE_MS);
        assert_eq!((early.leave, early.rescan_in_ms), (vec![], Some(1_000)));
        assert_eq!(at(&all, 2, 60_000), (vec![], vec![2]));
    }

    #[test]
    fn no_worker_leaves_for_a_slot_that_is_being_given_back() {
        let leaves = Database {
            leaving: 1,
            ..served(0)
        };
        assert_eq!(at(&[waits(900), leaves, served(1)], 2, 100_000), (vec![], vec![]));
    }

    #[test]
    fn the_second_worker_of_a_database_leaves_before_the_only_one_of_another_and_displaces_none() {
        let two = Database {
            wanted: 2,
            running: 2,
            ..served(99_000)
        };
        assert_eq!(at(&[waits(900), served(0), two], 3, 100_000), (vec![], vec![2]));
        let wants_two = Database {
            wanted: 2,
            startable: 1,
            ..served(0)
        };
        let plan = plan(&[idle(served(0)), wants_two], 2, 100_000, SLICE_MS);
        assert_eq!((plan.start, plan.leave), (vec![], vec![]));
        assert_eq!((plan.missing, plan.in_turn), (1, false));
    }

    #[test]
    fn first_workers_come_before_second_ones_and_both_before_a_check_for_the_extension() {
        let wants_two = Database {
            wanted: 2,
            startable: 2,
            ..waits(0)
        };
        let spare = Database {
            spare: true,
            ..waits(0)
        };
        let all = [spare, wants_two, waits(50)];
        assert_eq!(at(&all, 9, 100), (vec![1, 2, 1, 0], vec![]));
        assert_eq!(at(&all, 2, 100), (vec![1, 2], vec![]));
        assert_eq!(at(&[all[0].clone(), idle(served(0))], 1, 100_000), (vec![], vec![]));
    }

    /// A database whose maintenance is due since then, and overdue a minute later.
    fn due(since_ms: u64) -> Database {
        Database {
            maintenance: true,
            idle_until_ms: since_ms + 60_000,
            ..waits(since_ms)
        }
    }

    #[test]
    fn maintenance_comes_after_waiting_databases_and_before_second_workers() {
        let two = Database {
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
    fn overdue_maintenance_has_its_turn_and_makes_room_soon() {
        let all = [due(50), idle(served(0)), served(10)];
        assert_eq!(at(&all, 2, 60_049), (vec![], vec![]));
        assert_eq!(at(&all, 2, 60_050), (vec![], vec![1]));
        let runs = Database {
            maintenance: true,
            ..idle(served(2_000))
        };
        assert_eq!(at(&[waits(900), runs.clone()], 1, 2_999), (vec![], vec![]));
        assert_eq!(at(&[waits(900), runs.clone()], 1, 3_000), (vec![], vec![1]));
        assert_eq!(at(&[idle(waits(900)), runs], 1, 30_000), (vec![], vec![]));
    }

    #[test]
    fn without_slots_all_are_missing_and_none_is_served() {
        let plan = plan(&[waits(0), waits(0)], 0, 100, SLICE_MS);
        assert_eq!((plan.missing, plan.in_turn, plan.kept_out), (2, false, 2));
    }

    // ---- played ---------------------------------------------------------------------------------------------------------

    const STEP_MS: u64 = 100;
    const RESCAN_MS: u64 = 20_000;
    /// The longest time that a worker takes to leave.
    const EXIT_STEPS: u64 = 5;

    /// A database with an invented load.
    #[derive(Clone, Debug)]
    struct Player {
        wanted: u32,
        /// One commit in this many steps; 0 = always messages.
        commits_every: u64,
        messages: u64,
        known_idle: bool,
        /// When each of its workers that were asked to leave will have left.
        workers: Vec<Option<u64>>,
        since_ms: u64,
        idle_until_ms: u64,
        /// Since when it has messages and no worker.
        starved_since_ms: Option<u64>,
    }

    impl Player {
        fn as_seen(&self) -> Database {
            let running = self.workers.len() as u32;
            Database {
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

    /// Simulates 200 s. Returns how many workers were asked to leave, and how many of them were the last of their
    /// database.
    fn play(players: &mut [Player], slots: u32, seed: u64) -> Result<(u32, u32), TestCaseError> {
        let (count, wanted_max) = (players.len() as u64, 3);
        // All others first, as many at a time as there are slots, each for a time slice and the time to leave; twice,
        // because a database may just have joined the end of the queue.
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
            let seen: Vec<Database> = players.iter().map(Player::as_seen).collect();
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
                let had_its_turn = now_ms >= player.since_ms + SLICE_MS;
                prop_assert!(plan.waiting > 0, "nobody waits");
                let is_done = seen[index].is_idle(now_ms) && now_ms >= player.since_ms + SHORTEST_STAY_MS;
                prop_assert!(stays > 1 || had_its_turn || is_done, "sent away too soon");
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
        fn no_database_starves_and_none_leaves_before_its_time_slice_is_over(
            players in players(), slots in 1_u32..8, seed: u64,
        ) {
            let mut players = players;
            play(&mut players, slots, seed)?;
        }

        #[test]
        fn with_a_slot_for_each_database_none_is_left_without_a_worker(players in players(), more in 0_u32..9, seed: u64) {
            let mut players = players;
            let slots = players.len() as u32 + more;
            let wanted: u32 = players.iter().map(|player| player.wanted).sum();
            let (asked, emptied) = play(&mut players, slots, seed)?;
            prop_assert_eq!((asked, emptied), (0, 0), "{} slots for {} workers", slots, wanted);
        }
    }
}
