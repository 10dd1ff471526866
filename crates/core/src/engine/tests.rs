//! Tests of what the engine promises besides the order of keys. The simulation in crates/worker/tests once found each
//! of these promises broken.

use super::claim::SWEPT_KEYS;
use super::cursors::{END, START};
use super::due::DUE_EVERY_MS;
use super::*;
use crate::key_order::{BlockedKey, OrderedKey};
use crate::message::{Event, Outcome, Properties, Publication};
use crate::open_transactions::OpenTransaction;
use crate::settle::{Blocks, Disposition, FailureKind, MessageFailure, Ordering, RetryPolicy, Rules};
use std::cell::{Cell, RefCell};
use std::convert::Infallible;

/// A store whose claims return the rows that the test sets.
#[derive(Default)]
pub(super) struct Script {
    /// The seqs that each claim returns.
    pub(super) claims: Vec<Vec<i64>>,
    /// The event with this seq cannot be read.
    unreadable: i64,
    /// Whether the next claim misses a row.
    missed: bool,
    is_paused: bool,
    /// What the first claim returns instead of its seqs.
    pub(super) poison: Option<Batch>,
    due: Vec<i64>,
    pub(super) blocker: Option<i64>,
    pub(super) blocked_keys_read: usize,
    /// The number of blocked keys of each partition, besides.
    keys: i64,
    /// The partitions whose blocked keys were read.
    read: Vec<Vec<Partition>>,
    /// The cursor and the read limit of each lane of the last claim.
    pub(super) lanes: Vec<(i64, i64)>,
}

#[derive(Default)]
pub(super) struct Shared {
    schedules: Cell<u32>,
    unblocked: Cell<bool>,
    due: RefCell<DueSchedule>,
}

pub(super) fn partition() -> Partition {
    Partition::new(3).unwrap()
}

pub(super) fn batch(seqs: &[i64]) -> Batch {
    let rows = seqs.iter().map(|seq| Claimed {
        row_id: RowId::default(),
        pointer: Pointer {
            seq: *seq,
            destination: "default".into(),
            partition: partition(),
            key: Some("k".into()),
            attempts: 0,
            crashes: 0,
            lease_epoch: 1,
            replayed: false,
            enqueued_at_us: 0,
            expires_at_us: None,
        },
        event: Ok(Event::default()),
    });
    let rows = rows.collect();
    Batch {
        rows,
        ..Batch::default()
    }
}

impl Script {
    pub(super) fn returning(claims: Vec<Vec<i64>>) -> Self {
        Self {
            claims,
            ..Self::default()
        }
    }
}

impl Tables for RefCell<Script> {
    type Error = Infallible;

    fn settle(&self, _: &str, batch: &[Settlement], _: Blocks, _: StatementTimeout) -> Result<usize, Infallible> {
        Ok(batch.len())
    }

    fn claim(&self, _: &str, lanes: &[Lane], _: ClaimLimits, _: StatementTimeout) -> Result<Batch, Infallible> {
        Ok(self.borrow_mut().claim(lanes))
    }

    fn claim_unleased(&self, _: &str, _: ClaimLimits) -> Result<Batch, Infallible> {
        Ok(batch(&self.borrow_mut().claims.pop().unwrap_or_default()))
    }

    fn claim_waiting(&self, _: &OrderedKey, _: i64, _: i64, _: ClaimLimits) -> Result<(Batch, bool), Infallible> {
        Ok((batch(&[]), false))
    }

    fn bring_due(&self, _: Option<&[HeldLease]>) -> Result<DueMessages, Infallible> {
        let moved = std::mem::take(&mut self.borrow_mut().due).into_iter();
        Ok(DueMessages {
            moved: moved.map(|seq| ("default".to_owned(), partition(), seq)).collect(),
            next_ms: None,
        })
    }

    fn destinations_with_messages(&self) -> Result<Vec<String>, Infallible> {
        Ok(Vec::new())
    }

    fn lanes_with_messages(&self, _: &[(&str, Partition, i64)]) -> Result<Vec<usize>, Infallible> {
        unreachable!("a worker asks, not an engine")
    }

    fn blocked_keys(&self, _: &str, partitions: &[Partition]) -> Result<Vec<BlockedKey>, Infallible> {
        let mut script = self.borrow_mut();
        script.blocked_keys_read += 1;
        script.read.push(partitions.to_vec());
        if script.keys > 0 {
            let of_partition = |partition: &Partition| {
                let of_key = |seq: i64| BlockedKey {
                    key: OrderedKey {
                        partition: *partition,
                        destination: "default".into(),
                        key: Some(seq.to_string()),
                    },
                    blocker: Some(seq),
                    followers: false,
                };
                (1..=script.keys).map(of_key).collect::<Vec<_>>()
            };
            return Ok(partitions.iter().flat_map(of_partition).collect());
        }
        let found = script.blocker.map(|blocker| BlockedKey {
            key: OrderedKey::of(&batch(&[blocker]).rows[0].pointer, Ordering::Key).unwrap(),
            blocker: Some(blocker),
            followers: true,
        });
        Ok(found.into_iter().collect())
    }

    fn is_locked(_: &Infallible) -> bool {
        false
    }
}

impl Script {
    fn claim(&mut self, lanes: &[Lane]) -> Batch {
        self.lanes = lanes.iter().map(|lane| (lane.cursor, lane.read_limit)).collect();
        if self.is_paused {
            let paused = Batch {
                is_paused: true,
                ..Batch::default()
            };
            return paused;
        }
        let has_rows = !lanes.is_empty() && !self.claims.is_empty();
        if let Some(poison) = self.poison.take() {
            self.claims.remove(0);
            return poison;
        }
        let mut batch = batch(&if has_rows { self.claims.remove(0) } else { Vec::new() });
        batch.missed = std::mem::take(&mut self.missed);
        for row in (batch.rows.iter_mut()).filter(|row| row.pointer.seq == self.unreadable) {
            let reason = "division by zero".into();
            row.event = Err(Outcome::Failed { reason });
        }
        batch
    }
}

impl Memory for Shared {
    type Error = Infallible;

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Infallible> {
        Ok(Vec::new())
    }

    fn peek_rewinds(&self, _: &str, _: &[HeldLease]) -> Vec<(Partition, i64)> {
        Vec::new()
    }
}

pub(super) const RULES: Rules = Rules {
    one_by_one: false,
    retry: RetryPolicy {
        max_attempts: 3,
        base_ms: 100,
        max_ms: 1_000,
        discards_unroutable: false,
    },
    dead_blocks: true,
    ordering: Ordering::Key,
};

pub(super) fn engine() -> Engine {
    let mut engine = Engine::new(
        "default",
        Sharing::Leases,
        Bounds::USUAL,
        &MemoryBudget::new(Bounds::USUAL.memory),
    );
    engine.set_leases(vec![(partition(), 1)], HashSet::new());
    engine
}

/// Makes a claim. The message with the seq `broken` cannot be sent.
pub(super) fn claim(engine: &mut Engine, script: &mut Script, shared: &Shared, now_ms: u64, broken: i64) {
    let make = |handle, pointer: &Pointer, _: Event| match pointer.seq == broken {
        true => Err("cannot be sent".to_owned()),
        false => Ok(publication(handle, pointer)),
    };
    let schedules = shared.schedules.get();
    let has_read_limit = engine.progress.read_limit < END;
    with_tables(script, |tables| {
        let rewind = |_: &str, partition, seq| engine.rewind(partition, seq);
        let mut due = shared.due.borrow_mut();
        let Ok(()) = due.bring_due(tables, None, schedules, now_ms, has_read_limit, rewind);
        if shared.unblocked.take() {
            engine.unblock(partition(), 1);
        }
        let Ok(_) = engine.claim(tables, shared, now_ms, 100, &RULES, make);
    });
}

pub(super) fn with_tables<T: Default, R>(tables: &mut T, body: impl FnOnce(&RefCell<T>) -> R) -> R {
    let cell = RefCell::new(std::mem::take(tables));
    let result = body(&cell);
    *tables = cell.into_inner();
    result
}

/// Settles one portion; returns what it settled, and whether more is left.
pub(super) fn settle<T: Default>(
    engine: &mut Engine,
    tables: &mut T,
    now_ms: u64,
    portion: Portion,
) -> (Vec<Settlement>, bool)
where
    RefCell<T>: Tables<Error = Infallible>,
{
    let mut settled = Vec::new();
    let note = |batch: &[Settlement], _: usize| settled.extend_from_slice(batch);
    let Ok(more) = with_tables(tables, |tables| {
        engine.settle_batch(tables, &RULES, now_ms, portion, StatementTimeout::Usual, note)
    });
    (settled, more)
}

pub(super) fn publication(handle: MessageHandle, pointer: &Pointer) -> Publication {
    Publication {
        handle,
        address: pointer.seq.to_string().into(),
        key: None,
        properties: Properties::default(),
        body: Vec::new(),
    }
}

pub(super) fn claimed(seqs: &[i64], broken: i64) -> Engine {
    let mut engine = engine();
    let claims = vec![seqs.to_vec()];
    let mut script = Script {
        claims,
        ..Script::default()
    };
    claim(&mut engine, &mut script, &Shared::default(), 0, broken);
    engine
}

/// Hands over up to `room` messages; returns the handle and the seq of each.
pub(super) fn hand_over(engine: &mut Engine, room: usize) -> Vec<(MessageHandle, i64)> {
    let mut sent = Vec::new();
    engine.hand_over(0, |mut publications| {
        let refused = publications.split_off(room.min(publications.len()));
        sent.extend((publications.iter()).map(|p| (p.handle, p.address.parse().unwrap())));
        refused
    });
    sent
}

pub(super) fn seqs(sent: &[(MessageHandle, i64)]) -> Vec<i64> {
    sent.iter().map(|(_, seq)| *seq).collect()
}

#[test]
fn a_leaving_partition_whose_lease_is_lost_does_not_count() {
    let mut engine = engine();
    engine.set_leases(Vec::new(), HashSet::from([partition()]));
    assert_eq!(engine.claimable(), 0);
}

#[test]
fn no_message_is_sent_behind_one_that_cannot_be_sent() {
    let mut engine = claimed(&[1, 2, 3, 4], 2);
    let sent = hand_over(&mut engine, 9);
    assert_eq!(seqs(&sent), [1]);
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    assert!(hand_over(&mut engine, 9).is_empty());
    assert_eq!(engine.unsettled.len(), 4);
    assert!(matches!(engine.unsettled[1].disposition, Disposition::Dead { .. }));
    assert_eq!(engine.unsettled[3].disposition, Disposition::Wait);
    assert_eq!(engine.messages.len(), 0);
}

#[test]
fn no_message_is_claimed_beside_one_that_workers_crashed_with() {
    let mut engine = engine();
    let mut poison = batch(&[1]);
    poison.rows[0].pointer.crashes = 1;
    let mut script = Script {
        poison: Some(poison),
        claims: vec![vec![1], vec![2]],
        ..Script::default()
    };
    claim(&mut engine, &mut script, &Shared::default(), 0, 0);
    assert_eq!(engine.outstanding(), 1);
    claim(&mut engine, &mut script, &Shared::default(), 1, 0);
    assert_eq!(engine.outstanding(), 1, "not handed over yet");
    let sent = hand_over(&mut engine, 9);
    claim(&mut engine, &mut script, &Shared::default(), 2, 0);
    assert_eq!(engine.outstanding(), 1, "not answered yet");
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 3, 0);
    assert!(engine.must_settle(), "otherwise the next crash would be charged to it");
    settle(&mut engine, &mut script, 0, Portion::Full);
    engine.reread_all();
    claim(&mut engine, &mut script, &Shared::default(), 4, 0);
    assert_eq!(engine.outstanding(), 1);
    assert_eq!(seqs(&hand_over(&mut engine, 9)), [2]);
}

#[test]
fn an_event_that_cannot_be_read_is_retried_and_no_message_is_sent_behind_it() {
    let mut engine = engine();
    let mut script = Script {
        claims: vec![vec![1, 2, 3]],
        unreadable: 2,
        ..Script::default()
    };
    claim(&mut engine, &mut script, &Shared::default(), 0, 0);
    let sent = hand_over(&mut engine, 9);
    assert_eq!(seqs(&sent), [1]);
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    assert!(hand_over(&mut engine, 9).is_empty());
    let dispositions: Vec<&Disposition> = engine.unsettled.iter().map(|ended| &ended.disposition).collect();
    let [
        Disposition::Publish,
        Disposition::Retry { failure, .. },
        Disposition::Wait,
    ] = dispositions[..]
    else {
        panic!("{dispositions:?}");
    };
    assert_eq!(failure, &MessageFailure::new(FailureKind::Failed, "division by zero"));
}

#[test]
fn without_ordering_a_failed_message_delays_no_other() {
    let unordered = Rules {
        ordering: Ordering::None,
        ..RULES
    };
    let mut engine = engine();
    let mut script = Script {
        claims: vec![vec![1, 2, 3]],
        ..Script::default()
    };
    let make = |handle, pointer: &Pointer, _: Event| match pointer.seq {
        2 => Err("cannot be sent".to_owned()),
        seq => Ok(Publication {
            handle,
            address: seq.to_string().into(),
            key: pointer.key.clone(),
            properties: Properties::default(),
            body: Vec::new(),
        }),
    };
    let Ok(_) = with_tables(&mut script, |tables| {
        engine.claim(tables, &Shared::default(), 0, 100, &unordered, make)
    });
    let mut sent = Vec::new();
    engine.hand_over(0, |publications| {
        sent.extend(publications);
        Vec::new()
    });
    // A transport may send messages without a key at the same time.
    assert!(sent.iter().all(|publication| publication.key.is_none()));
    engine.on_outcome(sent[0].handle, &Outcome::Nacked, &unordered, 0, 0);
    engine.on_outcome(sent[1].handle, &Outcome::Confirmed, &unordered, 0, 0);
    let dispositions: Vec<&Disposition> = engine.unsettled.iter().map(|settled| &settled.disposition).collect();
    assert!(matches!(dispositions[0], Disposition::Dead { .. }), "{dispositions:?}");
    assert!(matches!(dispositions[1], Disposition::Defer { .. }), "{dispositions:?}");
    assert_eq!(dispositions[2], &Disposition::Publish);
}

#[test]
fn a_message_that_the_publisher_refused_is_not_sent_behind_a_failed_one() {
    let mut engine = claimed(&[1, 2, 3], 0);
    let sent = hand_over(&mut engine, 2);
    assert_eq!(seqs(&sent), [1, 2]);
    engine.on_outcome(sent[0].0, &Outcome::Nacked, &RULES, 0, 0);
    assert!(hand_over(&mut engine, 9).is_empty());
    engine.on_outcome(sent[1].0, &Outcome::Confirmed, &RULES, 0, 0);
    assert_eq!(engine.unsettled.len(), 3);
    assert_eq!(engine.messages.len(), 0);
}

#[test]
fn answered_messages_of_a_lost_lease_are_dropped() {
    let mut engine = claimed(&[1, 2, 3], 0);
    let sent = hand_over(&mut engine, 9);
    engine.on_outcome(sent[1].0, &Outcome::Confirmed, &RULES, 0, 0);
    engine.set_leases(vec![(partition(), 2)], HashSet::new());
    assert_eq!(
        (engine.outstanding(), engine.with_publisher),
        (0, WithPublisher::default())
    );
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    engine.on_outcome(sent[2].0, &Outcome::Confirmed, &RULES, 0, 0);
    settle(&mut engine, &mut Script::default(), 0, Portion::Full);
    assert!(engine.is_idle() && engine.in_use().is_empty());
}

#[test]
fn a_leaving_partition_that_stays_after_all_is_read_again() {
    let (mut engine, mut script, shared) = (engine(), Script::default(), Shared::default());
    claim(&mut engine, &mut script, &shared, 0, 0);
    assert_eq!(script.blocked_keys_read, 1);
    engine.set_leases(vec![(partition(), 1)], HashSet::from([partition()]));
    shared.unblocked.set(true);
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(script.blocked_keys_read, 1);
    engine.set_leases(vec![(partition(), 1)], HashSet::new());
    claim(&mut engine, &mut script, &shared, 20, 0);
    assert_eq!(script.blocked_keys_read, 2);
}

#[test]
fn a_scheduled_message_is_read_when_it_is_due_and_no_lane_is_read_again() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script::default();
    claim(&mut engine, &mut script, &shared, 0, 0);
    assert_eq!((script.blocked_keys_read, script.lanes.len()), (1, 1));
    script.lanes.clear();
    shared.schedules.set(1);
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!((script.blocked_keys_read, script.lanes.len()), (1, 0));
}

#[test]
fn blocked_keys_are_read_again_only_where_one_may_be_unblocked() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script {
        blocker: Some(7),
        ..Script::default()
    };
    assert!(!engine.unblock(partition(), 1), "none is blocked");
    claim(&mut engine, &mut script, &shared, 0, 0);
    assert!(!engine.unblock(partition(), 8), "a later message");
    assert!(!engine.unblock(Partition::new(4).unwrap(), 1));
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(script.blocked_keys_read, 1);
    assert!(engine.unblock(partition(), 7));
    claim(&mut engine, &mut script, &shared, 20, 0);
    claim(&mut engine, &mut script, &shared, 30, 0);
    assert_eq!(script.blocked_keys_read, 2);
}

#[test]
fn a_destination_without_messages_needs_no_statement_unless_it_knows_of_some() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script::default();
    engine.rewind(partition(), 5);
    assert!(engine.found_none());
    assert!(engine.has_read_all(0));
    claim(&mut engine, &mut script, &shared, 0, 0);
    assert_eq!((script.blocked_keys_read, script.lanes.len()), (0, 0));
    engine.rewind(partition(), 7);
    script.claims = vec![vec![7]];
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(engine.outstanding(), 1);
    assert!(!engine.found_none(), "7 is in flight");
}

#[test]
fn a_due_message_is_claimed_even_if_its_lane_was_read_to_the_end() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script::default();
    claim(&mut engine, &mut script, &shared, 0, 0);
    script.due = vec![7];
    script.claims = vec![vec![7]];
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(engine.outstanding(), 0, "no change was recorded");
    claim(&mut engine, &mut script, &shared, DUE_EVERY_MS, 0);
    assert_eq!(engine.outstanding(), 1);
}

#[test]
fn a_blocker_that_may_be_gone_is_searched_for_again_soon() {
    let (mut engine, shared) = (engine(), Shared::default());
    let blocker = Some(7);
    let mut script = Script {
        blocker,
        ..Script::default()
    };
    script.claims = vec![(-93..=6).collect()]; // as many as its limit, so the lane is not read to its end
    claim(&mut engine, &mut script, &shared, 0, 0);
    assert_eq!(engine.ordered_keys(), 1);
    script.blocker = None;
    shared.unblocked.set(true);
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(engine.ordered_keys(), 1, "the lane was not read up to 7");
    claim(&mut engine, &mut script, &shared, 20, 0);
    claim(&mut engine, &mut script, &shared, 10 + DUE_EVERY_MS, 0);
    assert_eq!(engine.ordered_keys(), 0);
}

#[test]
fn a_sweep_reads_many_blocked_keys_in_parts_and_what_is_unblocked_at_once() {
    let (mut engine, shared) = (engine(), Shared::default());
    let partitions: Vec<Partition> = (0..8).map(|index| Partition::new(index).unwrap()).collect();
    engine.set_leases(
        partitions.iter().map(|partition| (*partition, 1)).collect(),
        HashSet::new(),
    );
    let mut script = Script {
        keys: SWEPT_KEYS as i64 / 2,
        ..Script::default()
    };
    claim(&mut engine, &mut script, &shared, 0, 0);
    assert_eq!(script.read.len(), 1, "all new leases at once");
    script.read.clear();
    engine.sweep();
    let last = partitions[7];
    assert!(engine.unblock(last, 1));
    for now_ms in 1..10 {
        claim(&mut engine, &mut script, &shared, now_ms, 0);
        assert_eq!(engine.has_read_all(now_ms), now_ms >= 4, "{:?}", script.read);
    }
    let counts: Vec<usize> = script.read.iter().map(Vec::len).collect();
    assert_eq!(counts, [3, 2, 2, 1], "{:?}", script.read);
    assert!(script.read[0].contains(&last));
    let read: HashSet<Partition> = script.read.concat().into_iter().collect();
    assert_eq!(read.len(), 8);
}

#[test]
fn no_message_is_sent_behind_a_row_that_changed_during_its_claim() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script {
        claims: vec![vec![2], vec![1]],
        missed: true,
        ..Script::default()
    };
    claim(&mut engine, &mut script, &shared, 0, 0);
    assert!(hand_over(&mut engine, 10).is_empty(), "1 was missed");
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(seqs(&hand_over(&mut engine, 10)), [1, 2]);
}

#[test]
fn lanes_do_not_count_as_read_if_the_destination_is_paused() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script {
        missed: true,
        ..Script::returning(vec![vec![2], vec![1]])
    };
    claim(&mut engine, &mut script, &shared, 0, 0);
    script.is_paused = true;
    claim(&mut engine, &mut script, &shared, 5, 0);
    assert!(hand_over(&mut engine, 10).is_empty(), "1 is there and was not seen");
    script.is_paused = false;
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(seqs(&hand_over(&mut engine, 10)), [1, 2]);
}

#[test]
fn messages_of_a_lost_lease_do_not_end_out_of_order() {
    let (mut engine, mut script) = (claimed(&[1, 2], 0), Script::default());
    let sent = hand_over(&mut engine, 10);
    engine.set_leases(Vec::new(), HashSet::new());
    engine.on_outcome(sent[1].0, &Outcome::Confirmed, &RULES, 0, 0);
    let (settled, _) = settle(&mut engine, &mut script, 0, Portion::Full);
    assert!(settled.is_empty(), "the outcome of 1 is unknown: {settled:?}");
    assert_eq!(
        (engine.outstanding(), engine.with_publisher),
        (0, WithPublisher::default())
    );
}

#[test]
fn without_leases_a_heartbeat_drops_no_message_in_flight() {
    let (mut engine, mut script) = (
        Engine::new(
            "default",
            Sharing::RowClaims,
            Bounds::USUAL,
            &MemoryBudget::new(Bounds::USUAL.memory),
        ),
        Script::default(),
    );
    script.claims = vec![vec![1, 2]];
    claim(&mut engine, &mut script, &Shared::default(), 0, 0);
    let sent = hand_over(&mut engine, 10);
    engine.set_leases(Vec::new(), HashSet::new());
    engine.on_outcome(sent[0].0, &Outcome::Confirmed, &RULES, 0, 0);
    assert_eq!((engine.unsettled.len(), engine.outstanding()), (1, 2));
}

#[test]
fn while_other_destinations_wait_many_failures_are_settled_in_parts() {
    let seqs: Vec<i64> = (1..=60).collect();
    let bounds = Bounds {
        settle_failures: 25,
        ..Bounds::USUAL
    };
    let mut engine = Engine::new(
        "default",
        Sharing::RowClaims,
        bounds,
        &MemoryBudget::new(Bounds::USUAL.memory),
    );
    let mut script = Script::returning(vec![seqs]);
    claim(&mut engine, &mut script, &Shared::default(), 0, 0);
    let handles = hand_over(&mut engine, 60);
    for (handle, seq) in handles {
        let reason = "500".to_owned();
        let outcome = if seq <= 5 {
            Outcome::Confirmed
        } else {
            Outcome::Failed { reason }
        };
        engine.on_outcome(handle, &outcome, &RULES, 0, 0);
    }
    let mut parts = Vec::new();
    let mut part = || -> bool {
        let (settled, more) = settle(&mut engine, &mut script, 0, Portion::BesideOthers);
        parts.extend((!settled.is_empty()).then_some(settled.len()));
        more
    };
    assert_eq!([part(), part(), part(), part()], [true, true, false, false]);
    assert_eq!(parts, [30, 25, 5]);
}

// ---- requests of a session ------------------------------------------------------------------------------------------

fn tally(engine: &Engine) -> [u64; 3] {
    let Tally {
        claimed,
        published,
        failed,
    } = engine.tally();
    [claimed, published, failed]
}

#[test]
fn a_pass_request_counts_only_the_messages_of_its_claim() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script {
        claims: vec![(1..=100).collect(), (101..=200).collect(), vec![201]],
        ..Script::default()
    };
    claim(&mut engine, &mut script, &shared, 0, 0);
    let earlier = hand_over(&mut engine, 100);
    engine.begin_request(Request::Pass);
    claim(&mut engine, &mut script, &shared, 10, 0);
    engine.after_claim();
    assert!(engine.has_claimed());
    let own = hand_over(&mut engine, 100);
    claim(&mut engine, &mut script, &shared, 20, 0);
    engine.after_claim();
    assert_eq!(tally(&engine), [100, 0, 0]);
    for (handle, _) in &earlier {
        engine.on_outcome(*handle, &Outcome::Confirmed, &RULES, 30, 0);
    }
    assert_eq!(tally(&engine), [100, 0, 0]);
    for (handle, _) in &own[..99] {
        engine.on_outcome(*handle, &Outcome::Confirmed, &RULES, 40, 0);
    }
    assert!(engine.is_under_way());
    engine.on_outcome(own[99].0, &Outcome::Nacked, &RULES, 50, 0);
    assert_eq!(tally(&engine), [100, 99, 1]);
    assert!(
        !engine.is_under_way(),
        "messages claimed later do not belong to the request"
    );
}

#[test]
fn after_a_read_limit_the_lane_is_read_on_from_there() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script {
        claims: vec![vec![3, 4], vec![6]],
        ..Script::default()
    };
    engine.begin_request(Request::UpTo(5));
    engine.set_read_limit(Some(5));
    claim(&mut engine, &mut script, &shared, 0, 0);
    engine.after_claim();
    assert_eq!(script.lanes, [(START, 5)]);
    assert!(engine.has_claimed() && !engine.wants_more());
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert_eq!(engine.outstanding(), 2, "there is nothing more to read up to 5");
    engine.end_request();
    claim(&mut engine, &mut script, &shared, 20, 0);
    assert_eq!((script.lanes, engine.outstanding()), (vec![(5, END)], 3));
}

#[test]
fn a_message_that_becomes_due_under_a_read_limit_is_left_alone() {
    let (mut engine, shared) = (engine(), Shared::default());
    let mut script = Script {
        due: vec![2],
        ..Script::default()
    };
    claim(&mut engine, &mut script, &shared, 0, 0); // brings it back, and reads again in a second
    script.due = vec![3];
    shared.due.borrow_mut().begin_request();
    engine.begin_request(Request::UpTo(5));
    engine.set_read_limit(Some(5));
    claim(&mut engine, &mut script, &shared, 10, 0);
    assert!(script.due.is_empty(), "it was due when the request began");
    script.due = vec![4];
    shared.schedules.set(1);
    claim(&mut engine, &mut script, &shared, 2 * DUE_EVERY_MS, 0);
    assert_eq!(script.due, [4]);
    engine.end_request();
    claim(&mut engine, &mut script, &shared, 2 * DUE_EVERY_MS, 0);
    assert!(script.due.is_empty());
}
