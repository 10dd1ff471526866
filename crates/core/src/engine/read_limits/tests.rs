//! Tests of a partition as one order, on a table of one lane. The simulation in crates/worker/tests tests the same with
//! every fault.

use super::*;
use crate::engine::tests::{settle, with_tables};
use crate::engine::{
    Batch, Bounds, ClaimLimits, Claimed, DueMessages, DueSchedule, Engine, HeldLease, Lane, Memory, Portion, RowId,
    Settlement, Sharing, StatementTimeout, Tables,
};
use crate::key_order::{MessageHandle, OrderedKey};
use crate::memory_budget::MemoryBudget;
use crate::message::{Event, Outcome, Pointer, Properties, Publication};
use crate::open_transactions::{FILTER_WORDS, OpenTransaction, filter_bit, lane_crc};
use crate::settle::{Ordering, RetryPolicy};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;

const RULES: Rules = Rules {
    one_by_one: false,
    retry: RetryPolicy {
        max_attempts: 3,
        base_ms: 100,
        max_ms: 1_000,
        discards_unroutable: false,
    },
    dead_blocks: true,
    ordering: Ordering::Partition,
};

fn partition() -> Partition {
    Partition::new(3).unwrap()
}

/// The keys alternate: none, a, b.
fn key(seq: i64) -> Option<String> {
    [None, Some("a"), Some("b")][seq as usize % 3].map(str::to_owned)
}

#[derive(Default)]
struct Table {
    /// The rows of `outbox` by seq, and whether each is claimed.
    ready: BTreeMap<i64, bool>,
    /// Rows of `outbox_waiting` that wait for their retry.
    waiting: BTreeSet<i64>,
    dead: BTreeSet<i64>,
    /// Rows of `outbox_waiting` behind another of their key.
    behind: BTreeSet<i64>,
    published: Vec<i64>,
    open: Vec<OpenTransaction>,
    /// If it is not 0, all retries are due.
    now_ms: u64,
}

impl Table {
    fn with(seqs: impl IntoIterator<Item = i64>) -> Self {
        Self {
            ready: seqs.into_iter().map(|seq| (seq, false)).collect(),
            ..Self::default()
        }
    }
}

fn row(seq: i64) -> Claimed {
    Claimed {
        row_id: RowId::default(),
        pointer: Pointer {
            seq,
            destination: "d".into(),
            partition: partition(),
            key: key(seq),
            attempts: 0,
            crashes: 0,
            lease_epoch: 1,
            replayed: false,
            enqueued_at_us: 0,
            expires_at_us: None,
        },
        event: Ok(Event::default()),
    }
}

impl Tables for RefCell<Table> {
    type Error = Infallible;

    fn settle(&self, _: &str, batch: &[Settlement], _: Blocks, _: StatementTimeout) -> Result<usize, Infallible> {
        let table = &mut *self.borrow_mut();
        for Settlement {
            pointer, disposition, ..
        } in batch
        {
            let seq = pointer.seq;
            table.ready.remove(&seq).expect("claimed");
            match disposition {
                Disposition::Publish => table.published.push(seq),
                Disposition::Retry { .. } | Disposition::Defer { .. } => _ = table.waiting.insert(seq),
                Disposition::Dead { .. } => _ = table.dead.insert(seq),
                Disposition::Release { .. } => _ = table.ready.insert(seq, false),
                other => panic!("{seq} has the disposition {other:?}"),
            }
        }
        Ok(batch.len())
    }

    fn claim(&self, _: &str, lanes: &[Lane], _: ClaimLimits, _: StatementTimeout) -> Result<Batch, Infallible> {
        let [lane] = lanes else { panic!("one lane is leased") };
        let table = &mut *self.borrow_mut();
        let lane_rows = table.ready.range_mut(lane.cursor + 1..=lane.read_limit);
        let free = lane_rows.filter(|(_, claimed)| !**claimed);
        let rows = free.take(lane.limit as usize).map(|(seq, claimed)| {
            *claimed = true;
            row(*seq)
        });
        Ok(Batch {
            rows: rows.collect(),
            ..Batch::default()
        })
    }

    fn claim_unleased(&self, _: &str, _: ClaimLimits) -> Result<Batch, Infallible> {
        unreachable!("partitions are leased")
    }

    fn claim_waiting(&self, of: &OrderedKey, _: i64, _: i64, limits: ClaimLimits) -> Result<(Batch, bool), Infallible> {
        let table = &mut *self.borrow_mut();
        let of_key = |seq: &i64| key(*seq) == of.key;
        let behind = table.behind.iter().copied().filter(of_key);
        let seqs: Vec<i64> = behind.take(limits.rows as usize).collect();
        table.behind.retain(|seq| !seqs.contains(seq));
        table.ready.extend(seqs.iter().map(|seq| (*seq, true)));
        let batch = Batch {
            rows: seqs.into_iter().map(row).collect(),
            ..Batch::default()
        };
        Ok((batch, table.behind.iter().any(of_key)))
    }

    fn bring_due(&self, _: Option<&[HeldLease]>) -> Result<DueMessages, Infallible> {
        let table = &mut *self.borrow_mut();
        let due = match table.now_ms {
            0 => BTreeSet::new(),
            _ => std::mem::take(&mut table.waiting),
        };
        table.ready.extend(due.iter().map(|seq| (*seq, false)));
        Ok(DueMessages {
            moved: due.into_iter().map(|seq| ("d".to_owned(), partition(), seq)).collect(),
            next_ms: None,
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
        let blockers = table.waiting.iter().chain(&table.dead).map(|seq| (*seq, Some(*seq)));
        let found = blockers.chain(table.behind.iter().map(|seq| (*seq, None)));
        Ok(found
            .map(|(seq, blocker)| BlockedKey {
                key: OrderedKey {
                    partition: partition(),
                    destination: "d".into(),
                    key: key(seq),
                },
                blocker,
                followers: blocker.is_none(),
            })
            .collect())
    }

    fn is_locked(_: &Infallible) -> bool {
        false
    }
}

struct Sessions(Vec<OpenTransaction>);

impl Memory for Sessions {
    type Error = Infallible;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Infallible> {
        Ok(self.0.clone())
    }

    fn peek_rewinds(&self, _: &str, _: &[HeldLease]) -> Vec<(Partition, i64)> {
        Vec::new()
    }
}

fn engine() -> Engine {
    let mut engine = Engine::new(
        "d",
        Sharing::Leases,
        Bounds::USUAL,
        &MemoryBudget::new(Bounds::USUAL.memory),
    );
    engine.set_leases(vec![(partition(), 1)], HashSet::new());
    engine
}

/// Settles, claims and hands over. Returns the handle and the seq of each message that is sent, and the key by which a
/// transport orders it.
fn pass(engine: &mut Engine, table: &mut Table) -> Vec<(MessageHandle, i64, Option<String>)> {
    settle(engine, table, 0, Portion::Full);
    let (sessions, now_ms) = (Sessions(table.open.clone()), table.now_ms);
    let make = |handle, pointer: &Pointer, _: Event| {
        Ok(Publication {
            handle,
            address: pointer.seq.to_string().into(),
            key: pointer.key.clone(),
            properties: Properties::default(),
            body: Vec::new(),
        })
    };
    with_tables(table, |tables| {
        let rewind = |_: &str, partition, seq| engine.rewind(partition, seq);
        let mut due = DueSchedule::default();
        let Ok(()) = due.bring_due(tables, None, 0, now_ms, false, rewind);
        let Ok(_) = engine.claim(tables, &sessions, now_ms, 100, &RULES, make);
    });
    let mut sent = Vec::new();
    engine.hand_over(0, |publications| {
        sent.extend((publications.into_iter()).map(|p| (p.handle, p.address.parse().unwrap(), p.key)));
        Vec::new()
    });
    sent
}

fn seqs(sent: &[(MessageHandle, i64, Option<String>)]) -> Vec<i64> {
    sent.iter().map(|(_, seq, _)| *seq).collect()
}

fn answer(engine: &mut Engine, sent: &[(MessageHandle, i64, Option<String>)], outcome: impl Fn(i64) -> Outcome) {
    for (handle, seq, _) in sent {
        engine.on_outcome(*handle, &outcome(*seq), &RULES, 0, 0);
    }
}

fn nacked(failing: i64) -> impl Fn(i64) -> Outcome {
    move |seq| match seq == failing {
        true => Outcome::Nacked,
        false => Outcome::Confirmed,
    }
}

#[test]
fn a_failed_message_blocks_its_partition_for_all_keys_and_is_sent_alone() {
    let (mut engine, mut table) = (engine(), Table::with(1..=6));
    let sent = pass(&mut engine, &mut table);
    assert_eq!(seqs(&sent), [1, 2, 3, 4, 5, 6]);
    assert!(sent.iter().all(|(_, _, key)| key.as_deref() == Some("p03")), "{sent:?}");
    answer(&mut engine, &sent, nacked(3));
    assert!(pass(&mut engine, &mut table).is_empty());
    assert_eq!(table.published, [1, 2]);
    assert_eq!(table.ready.len(), 3, "the messages behind it stay in outbox");
    assert!(pass(&mut engine, &mut table).is_empty());
    assert!(!engine.wants_more() && engine.is_idle(), "and cause no further claims");
    table.now_ms = 5_000;
    let alone = pass(&mut engine, &mut table);
    assert_eq!(seqs(&alone), [3]);
    answer(&mut engine, &alone, nacked(0));
    let rest = pass(&mut engine, &mut table);
    assert_eq!(seqs(&rest), [4, 5, 6]);
    answer(&mut engine, &rest, nacked(0));
    pass(&mut engine, &mut table);
    assert_eq!(table.published, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_lane_with_dead_letters_is_read_up_to_the_first_of_them() {
    let (mut engine, mut table) = (engine(), Table::with([2, 4, 6, 8]));
    table.dead.extend([3, 7]); // of two partitions that became one, or from the time when the order was by key
    let sent = pass(&mut engine, &mut table);
    assert_eq!(seqs(&sent), [2]);
    answer(&mut engine, &sent, nacked(0));
    assert!(pass(&mut engine, &mut table).is_empty());
    table.dead.remove(&3); // discarded
    engine.reread_all();
    let sent = pass(&mut engine, &mut table);
    assert_eq!(seqs(&sent), [4, 6]);
    table.dead.remove(&7);
    table.ready.insert(7, false); // retried; later messages must not overtake it
    engine.reread_all();
    assert_eq!(seqs(&pass(&mut engine, &mut table)), [7, 8]);
}

#[test]
fn messages_that_waited_by_key_before_the_option_changed_go_back_to_their_lane() {
    let (mut engine, mut table) = (engine(), Table::with([4, 6, 9]));
    table.behind.extend([2, 5, 7, 8]); // a and b
    let mut sent = Vec::new();
    for _ in 0..9 {
        sent.extend(pass(&mut engine, &mut table));
    }
    assert_eq!(seqs(&sent), [2, 4, 5, 6, 7, 8, 9]);
}

#[test]
fn an_open_transaction_holds_back_all_later_messages_of_its_partition() {
    let (mut engine, mut table) = (engine(), Table::with([3, 5, 6]));
    let mut filter = Box::new([0; FILTER_WORDS]);
    let (word, mask) = filter_bit(lane_crc(partition()));
    filter[word] |= mask;
    table.open.push(OpenTransaction { low: 4, filter });
    assert_eq!(seqs(&pass(&mut engine, &mut table)), [3]);
    // The transaction draws a seq, and does not know its partition yet.
    let filter = Box::new([0; FILTER_WORDS]);
    table.open = vec![OpenTransaction {
        low: 0,
        filter: filter.clone(),
    }];
    assert!(pass(&mut engine, &mut table).is_empty());
    // The transaction has enqueued for another partition.
    table.open = vec![OpenTransaction { low: 4, filter }];
    assert_eq!(seqs(&pass(&mut engine, &mut table)), [5, 6]);
}
