//! Which message is tried next at a destination that answers each try with a failure, except for some messages.

use crate::engine::tests::{batch, partition, publication, settle, with_tables};
use crate::engine::*;
use crate::key_order::{BlockedKey, OrderedKey};
use crate::memory_budget::MemoryBudget;
use crate::message::{Event, Outcome, Pointer};
use crate::open_transactions::OpenTransaction;
use crate::settle::{Blocks, Disposition, Ordering, RetryPolicy, Rules};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

/// The rest of the destination after each failure, in ms: far longer than the delay of any message.
const REST_MS: u64 = 10_000;

/// One lane. Messages have the key of their seq modulo 1,000.
#[derive(Default)]
struct Table {
    /// Rows of `outbox`, and whether they are claimed.
    ready: BTreeMap<i64, bool>,
    /// When those of `outbox_waiting` that failed are due.
    backs_off: BTreeMap<i64, u64>,
    /// Those that wait behind another one of their key.
    behind: BTreeSet<i64>,
    now_ms: u64,
}

fn key(seq: i64) -> Option<String> {
    Some((seq % 1000).to_string())
}

fn rows(seqs: &[i64]) -> Batch {
    let mut batch = batch(seqs);
    batch
        .rows
        .iter_mut()
        .for_each(|row| row.pointer.key = key(row.pointer.seq));
    batch
}

impl Tables for RefCell<Table> {
    type Error = Infallible;

    fn settle(&self, _: &str, batch: &[Settlement], _: Blocks, _: StatementTimeout) -> Result<usize, Infallible> {
        let table = &mut *self.borrow_mut();
        for Settlement {
            pointer, disposition, ..
        } in batch
        {
            table.ready.remove(&pointer.seq);
            match disposition {
                Disposition::Publish => {}
                Disposition::Wait => _ = table.behind.insert(pointer.seq),
                Disposition::Release { .. } => _ = table.ready.insert(pointer.seq, false),
                Disposition::Retry { delay_ms, .. } | Disposition::Defer { delay_ms, .. } => {
                    table.backs_off.insert(pointer.seq, table.now_ms + delay_ms);
                }
                other => panic!("{} is {other:?}", pointer.seq),
            }
        }
        Ok(batch.len())
    }

    fn claim(&self, _: &str, lanes: &[Lane], _: ClaimLimits, _: StatementTimeout) -> Result<Batch, Infallible> {
        let [lane] = lanes else { panic!("one lane is leased") };
        Ok(self.borrow_mut().take(lane.cursor + 1, lane.limit))
    }

    fn claim_unleased(&self, _: &str, limits: ClaimLimits) -> Result<Batch, Infallible> {
        Ok(self.borrow_mut().take(0, limits.rows))
    }

    fn claim_waiting(&self, of: &OrderedKey, _: i64, _: i64, _: ClaimLimits) -> Result<(Batch, bool), Infallible> {
        let table = &mut *self.borrow_mut();
        let seqs: Vec<i64> = table.behind.iter().copied().filter(|seq| key(*seq) == of.key).collect();
        table.behind.retain(|seq| !seqs.contains(seq));
        table.ready.extend(seqs.iter().map(|seq| (*seq, true)));
        Ok((rows(&seqs), false))
    }

    fn bring_due(&self, _: Option<&[HeldLease]>) -> Result<DueMessages, Infallible> {
        let table = &mut *self.borrow_mut();
        let now_ms = table.now_ms;
        let due = table.backs_off.extract_if(.., |_, due_ms| *due_ms <= now_ms);
        let due: Vec<i64> = due.map(|(seq, _)| seq).collect();
        table.ready.extend(due.iter().map(|seq| (*seq, false)));
        let moved = due.into_iter().map(|seq| ("default".to_owned(), partition(), seq));
        Ok(DueMessages {
            moved: moved.collect(),
            next_ms: table.backs_off.values().min().map(|due_ms| due_ms - now_ms),
        })
    }

    fn destinations_with_messages(&self) -> Result<Vec<String>, Infallible> {
        Ok(Vec::new())
    }

    fn lanes_with_messages(&self, _: &[(&str, Partition, i64)]) -> Result<Vec<usize>, Infallible> {
        unreachable!("a worker asks, not an engine")
    }

    fn blocked_keys(&self, _: &str, _: &[Partition]) -> Result<Vec<BlockedKey>, Infallible> {
        let table = self.borrow();
        let all = table.backs_off.keys().chain(&table.behind);
        let found = |seq: &i64| BlockedKey {
            key: OrderedKey::of(&rows(&[*seq]).rows[0].pointer, Ordering::Key).expect("a key"),
            blocker: table.backs_off.keys().copied().find(|failed| key(*failed) == key(*seq)),
            followers: table.behind.iter().any(|behind| key(*behind) == key(*seq)),
        };
        Ok(all.map(found).collect())
    }

    fn is_locked(_: &Infallible) -> bool {
        false
    }
}

impl Table {
    fn take(&mut self, from: i64, limit: u32) -> Batch {
        let free = self.ready.range_mut(from..).filter(|(_, is_claimed)| !**is_claimed);
        let seqs = free.take(limit as usize).map(|(seq, is_claimed)| {
            *is_claimed = true;
            *seq
        });
        rows(&seqs.collect::<Vec<_>>())
    }
}

#[derive(Default)]
struct Commits(Cell<Option<i64>>);

impl Memory for Commits {
    type Error = Infallible;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Infallible> {
        Ok(Vec::new())
    }

    fn peek_rewinds(&self, _: &str, _: &[HeldLease]) -> Vec<(Partition, i64)> {
        self.0.get().map(|seq| (partition(), seq)).into_iter().collect()
    }
}

struct World {
    engine: Engine,
    due: DueSchedule,
    table: Table,
    commits: Commits,
    rules: Rules,
    /// The seqs that the destination got, in order.
    tries: Vec<i64>,
}

fn refused() -> Outcome {
    Outcome::Nacked
}

fn unavailable() -> Outcome {
    Outcome::Unanswered {
        reason: "HTTP 503".into(),
        alone: true,
    }
}

impl World {
    fn new(ordering: Ordering, sharing: Sharing, bounds: Bounds) -> Self {
        let mut engine = Engine::new("default", sharing, bounds, &MemoryBudget::new(Bounds::USUAL.memory));
        engine.set_leases(vec![(partition(), 1)], HashSet::new());
        let retry = RetryPolicy {
            max_attempts: 100,
            base_ms: 5,
            max_ms: 20,
            discards_unroutable: false,
        };
        Self {
            engine,
            due: DueSchedule::default(),
            table: Table::default(),
            commits: Commits::default(),
            rules: Rules {
                one_by_one: false,
                retry,
                dead_blocks: true,
                ordering,
            },
            tries: Vec::new(),
        }
    }

    fn commit(&mut self, seq: i64) {
        self.table.ready.insert(seq, false);
        let low = self.commits.0.get().map_or(seq, |low| low.min(seq));
        self.commits.0.set(Some(low));
    }

    /// Passes of a worker with a window of one message, until the destination has got `tries` more.
    fn run(&mut self, tries: usize, answer: impl Fn(i64) -> Outcome) -> &[i64] {
        let (before, mut passes) = (self.tries.len(), 0);
        while self.tries.len() < before + tries {
            passes += 1;
            assert!(passes < 10_000, "it tries no more: {:?}", &self.tries[before..]);
            let now_ms = self.table.now_ms;
            settle(&mut self.engine, &mut self.table, now_ms, Portion::Full);
            self.due.note(self.engine.take_retry_at_ms());
            let limit = 1_u32.saturating_sub(self.engine.outstanding_there() as u32);
            let make = |handle, pointer: &Pointer, _: Event| Ok(publication(handle, pointer));
            if let Some(low) = self.commits.0.take() {
                self.engine.rewind(partition(), low);
            }
            with_tables(&mut self.table, |tables| {
                let rewind = |_: &str, partition, seq| self.engine.rewind(partition, seq);
                let Ok(()) = (self.due).bring_due(tables, None, 0, now_ms, false, rewind);
                let Ok(_) = (self.engine).claim(tables, &self.commits, now_ms, limit, &self.rules, make);
            });
            let mut sent = Vec::new();
            self.engine.hand_over(0, |publications| {
                sent.extend(
                    publications
                        .iter()
                        .map(|p| (p.handle, p.address.parse().expect("a seq"))),
                );
                Vec::new()
            });
            match sent.is_empty() {
                true => self.table.now_ms += 1,
                false => passes = 0,
            }
            for (handle, seq) in sent {
                self.tries.push(seq);
                let outcome = answer(seq);
                self.engine
                    .on_outcome(handle, &outcome, &self.rules, self.table.now_ms, 0);
                if outcome != Outcome::Confirmed {
                    self.table.now_ms += REST_MS;
                    self.engine.give_back_yielding(&self.rules);
                    assert_eq!(self.engine.yielding.len(), 0);
                }
            }
        }
        &self.tries[before..]
    }
}

#[test]
fn a_message_that_was_not_tried_goes_before_all_that_failed_alone_however_many_these_are() {
    let few = Bounds {
        parked: 3,
        ..Bounds::USUAL
    };
    for failure in [refused, unavailable] {
        for (ordering, sharing, bounds, count) in [
            (Ordering::Key, Sharing::Leases, Bounds::USUAL, 2),
            (Ordering::Key, Sharing::Leases, Bounds::USUAL, 200),
            (Ordering::Key, Sharing::Leases, few, 50),
            (Ordering::None, Sharing::Leases, Bounds::USUAL, 50),
            (Ordering::Key, Sharing::RowClaims, Bounds::USUAL, 50),
        ] {
            let case = format!("{ordering:?} {sharing:?} {count} {:?}", failure());
            let mut world = World::new(ordering, sharing, bounds);
            (1..=count).for_each(|seq| world.commit(seq));
            let answer = |seq| if seq <= count { failure() } else { Outcome::Confirmed };
            world.run(3 * count as usize, answer);
            for seq in [501, 502] {
                world.commit(seq);
                // Once a message has arrived, one that failed goes first, and then again none.
                let tried = world.run(2, answer);
                assert!(tried.contains(&seq), "{case}: {tried:?}");
            }
        }
    }
}

#[test]
fn messages_that_fail_alone_are_tried_in_turn_while_there_is_no_other() {
    let mut world = World::new(Ordering::Key, Sharing::Leases, Bounds::USUAL);
    (1..=5).for_each(|seq| world.commit(seq));
    world.run(5, |_| refused());
    for round in 0..4 {
        let mut tried = world.run(5, |_| refused()).to_vec();
        tried.sort_unstable();
        assert_eq!(tried, [1, 2, 3, 4, 5], "round {round}");
    }
}

#[test]
fn no_later_message_of_its_key_overtakes_one_that_failed_alone() {
    for failure in [refused, unavailable] {
        let mut world = World::new(Ordering::Key, Sharing::Leases, Bounds::USUAL);
        (1..=5).chain(1001..=1005).for_each(|seq| world.commit(seq));
        let tried = world.run(15, |_| failure());
        assert!(tried.iter().all(|seq| *seq <= 5), "{tried:?}");
        (2001..=2005).for_each(|seq| world.commit(seq));
        world.commit(7);
        let tried = world.run(12, |seq| if seq == 7 { Outcome::Confirmed } else { failure() });
        assert_eq!(tried[0], 7);
        assert!(tried[1..].iter().all(|seq| *seq <= 5), "{tried:?}");
        let arrived = world.run(15, |_| Outcome::Confirmed);
        for key in 1..=5 {
            let of_key: Vec<i64> = arrived.iter().copied().filter(|seq| seq % 1000 == key).collect();
            assert_eq!(of_key, [key, 1000 + key, 2000 + key], "{arrived:?}");
        }
    }
}

#[test]
fn once_one_arrives_the_messages_that_yielded_go_as_any_other() {
    let mut world = World::new(Ordering::Key, Sharing::Leases, Bounds::USUAL);
    (1..=5).for_each(|seq| world.commit(seq));
    world.run(10, |_| refused());
    world.commit(7);
    let mut arrived = world.run(6, |_| Outcome::Confirmed).to_vec();
    assert_eq!(arrived.remove(0), 7);
    arrived.sort_unstable();
    assert_eq!(arrived, [1, 2, 3, 4, 5]);
    assert!(world.engine.messages.is_empty());
}

#[test]
fn a_request_and_a_partition_that_leaves_wait_for_no_message_that_yields() {
    for leaves in [false, true] {
        let mut world = World::new(Ordering::Key, Sharing::Leases, Bounds::USUAL);
        (1..=3).for_each(|seq| world.commit(seq));
        world.run(6, |_| refused());
        let make = |handle, pointer: &Pointer, _: Event| Ok(publication(handle, pointer));
        let now_ms = world.table.now_ms;
        settle(&mut world.engine, &mut world.table, now_ms, Portion::Full);
        world.due.note(world.engine.take_retry_at_ms());
        with_tables(&mut world.table, |tables| {
            let rewind = |_: &str, partition, seq| world.engine.rewind(partition, seq);
            let Ok(()) = (world.due).bring_due(tables, None, 0, now_ms, false, rewind);
            let Ok(_) = (world.engine).claim(tables, &world.commits, now_ms, 1, &world.rules, make);
        });
        assert_eq!(world.engine.yielding.len(), 1);
        match leaves {
            true => (world.engine).set_leases(vec![(partition(), 1)], HashSet::from([partition()])),
            false => world.engine.begin_request(Request::Pass),
        }
        let mut sent = 0;
        world.engine.hand_over(0, |publications| {
            sent += publications.len();
            Vec::new()
        });
        assert_eq!(sent, 1);
    }
}
