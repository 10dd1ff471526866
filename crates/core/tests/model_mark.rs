//! Model check of the low mark: a worker that reads a partition only above a mark loses nothing and keeps order per key.
//!
//! Reading every waiting row in each pass would cost the more the longer the backlog. So the owner of a partition keeps
//! a mark in its memory and claims `mark < seq <= ceiling`. A seq is drawn long before its row becomes visible, hence
//! two dangers: the mark passes a row that is not visible yet (loss), and a later row of the key is sent before it
//! (disorder). What lies in shared memory keeps both away, and no producer ever waits for a worker:
//!
//! | in the model | in the server |
//! |---|---|
//! | `highest` | the highest seq drawn or enqueued in the database, raised with fetch_max |
//! | `reopen` | of the partition, the lowest seq that became visible since the owner last looked |
//! | `registry` | of each backend, the key and a low bound of the seqs of its open transaction |
//! | `slots` | the same of each prepared transaction, under its xid |
//! | `Producer` | a backend with one transaction, step by step; a row is visible from COMMIT or COMMIT PREPARED on |
//! | `Worker` | the owner of the partition, its passes cut into their accesses to shared memory and its one snapshot |
//! | `other_worker` | an owner of another partition: it too frees the slot of a prepared transaction that ended |
//!
//! Two things the protocol rests on: every seq comes from one sequence that gives them out one by one, so `highest` never
//! exceeds its last value; and a worker raises `highest` at its start, and if by the table, also whenever a transaction
//! that was prepared before ends.
//!
//! Each action is one atomic access; the checker tries every interleaving. What is claimed is sent at the end of a pass,
//! and sent is settled: what becomes of a message after that is in `model_lease.rs`. A wake is only a hint, so it is
//! not modelled: passes happen at any time.
//!
//! Each `Mistake` takes away one rule of the protocol, and the checker must find what it breaks. So no rule is idle,
//! and the checker is not blind. `cargo test -p outbox-core --test model_mark -- --nocapture` shows how each breaks.

mod mark;

use mark::{Draws, HighestAtStart, IN_ORDER, Key, LowMark, May, Mistake, NOTHING_LOST, Script};
use stateright::{Checker, HasDiscoveries, Model};

const fn script(key: Key, messages: usize, may: May) -> Script {
    let draws = Draws::ByUs;
    Script {
        key,
        messages,
        may,
        draws,
    }
}

const fn by_application(draws: Draws) -> Script {
    Script {
        draws,
        ..script(Key::A, 1, May::End)
    }
}

/// Takes up the limit of a claim, and is not held up by others' keys.
const BYSTANDER: Script = script(Key::B, 1, May::EndAtOnce);
/// In the place of a producer that is not needed.
const NOBODY: Script = script(Key::B, 0, May::EndAtOnce);

const OVERLAPPING: LowMark = LowMark {
    scripts: [script(Key::A, 1, May::End), script(Key::A, 1, May::End), BYSTANDER],
    limit: 1,
    worker_restarts: 0,
    database_crashes: 0,
    highest_at_start: HighestAtStart::Sequence,
    mistake: None,
};

const PREPARED: LowMark = LowMark {
    scripts: [script(Key::A, 1, May::Prepare), script(Key::A, 1, May::End), BYSTANDER],
    ..OVERLAPPING
};

/// The least that has a prepared transaction and one beside it.
const TWO_PRODUCERS: LowMark = LowMark {
    scripts: [script(Key::A, 1, May::Prepare), script(Key::A, 1, May::End), NOBODY],
    ..OVERLAPPING
};

#[track_caller]
fn assert_holds(model: LowMark) {
    let checker = model.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_properties();
}

/// The checker finds that `property` does not hold.
#[track_caller]
fn assert_breaks(property: &'static str, model: LowMark) {
    let found = HasDiscoveries::AllOf([property].into());
    let checker = model.checker().threads(2).finish_when(found).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_any_discovery(property);
    let steps = checker.discovery(property).map(|path| path.into_actions());
    println!("{property}: broken by {steps:?}");
}

#[test]
fn overlapping_transactions_lose_nothing_and_keep_order() {
    assert_holds(OVERLAPPING);
}

#[test]
fn so_do_claims_of_two_rows() {
    assert_holds(LowMark {
        limit: 2,
        ..OVERLAPPING
    });
}

#[test]
fn so_do_transactions_of_two_messages() {
    assert_holds(LowMark {
        scripts: [script(Key::A, 2, May::End), script(Key::A, 1, May::End), BYSTANDER],
        ..OVERLAPPING
    });
}

#[test]
fn so_do_workers_that_take_over() {
    assert_holds(LowMark {
        worker_restarts: 1,
        ..OVERLAPPING
    });
}

#[test]
fn so_do_prepared_transactions() {
    assert_holds(LowMark { limit: 2, ..PREPARED });
}

#[test]
fn so_do_prepared_transactions_through_a_crash_of_the_database() {
    assert_holds(LowMark {
        scripts: [
            script(Key::A, 1, May::Prepare),
            script(Key::A, 1, May::EndAtOnce),
            BYSTANDER,
        ],
        database_crashes: 1,
        ..OVERLAPPING
    });
}

#[test]
fn so_do_crashes_after_which_the_table_is_asked_for_the_highest_seq() {
    assert_holds(LowMark {
        database_crashes: 1,
        worker_restarts: 1,
        highest_at_start: HighestAtStart::Table,
        ..TWO_PRODUCERS
    });
}

#[test]
fn so_do_seqs_that_an_application_draws_if_the_transactions_of_a_key_follow_one_another() {
    let drawn = by_application(Draws::ByApplication);
    assert_holds(LowMark {
        scripts: [drawn, drawn, BYSTANDER],
        ..OVERLAPPING
    });
}

/// Why no order is promised there: both have seqs below the ceiling of a pass and register after it read the registry.
#[test]
fn seqs_drawn_before_the_transaction_ahead_ended_are_out_of_order() {
    let drawn = by_application(Draws::Ahead);
    assert_breaks(
        IN_ORDER,
        LowMark {
            scripts: [drawn, drawn, BYSTANDER],
            ..OVERLAPPING
        },
    );
}

/// `highest` must not exceed what the sequence gave out, or it bounds nothing: neither the claim, nor from below the seq
/// that one who registers is about to draw. So a seq that was never drawn must be refused.
#[test]
fn a_seq_that_was_never_drawn_takes_the_order_away_from_others() {
    let stray = Script {
        draws: Draws::Stray,
        ..BYSTANDER
    };
    let scripts = [script(Key::A, 1, May::End), script(Key::A, 1, May::End), stray];
    assert_breaks(IN_ORDER, LowMark { scripts, ..OVERLAPPING });
}

#[test]
fn swapping_reopen_before_the_registry_is_read_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::ReopenSwappedBeforeRegistryRead));
}

#[test]
fn a_claim_without_a_ceiling_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::ClaimNotBoundedByCeiling));
}

#[test]
fn registering_after_drawing_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::RegisteredAfterDrawing));
}

#[test]
fn a_snapshot_before_the_registry_is_read_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::SnapshotBeforeRegistryRead));
}

#[test]
fn leaving_before_reopen_is_lowered_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::LeftBeforeReopenLowered));
}

#[test]
fn releasing_what_the_mark_has_not_passed_again_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::ParkedReleasedAboveMark));
}

#[test]
fn reading_the_slots_before_the_registry_breaks_order() {
    assert_breaks(IN_ORDER, TWO_PRODUCERS.with(Mistake::SlotsReadBeforeRegistry));
}

#[test]
fn preparing_without_a_slot_loses() {
    assert_breaks(NOTHING_LOST, TWO_PRODUCERS.with(Mistake::PreparedWithoutSlot));
}

#[test]
fn freeing_a_slot_before_reopen_is_lowered_breaks_order() {
    assert_breaks(IN_ORDER, TWO_PRODUCERS.with(Mistake::SlotFreedBeforeReopenLowered));
}

#[test]
fn listing_prepared_transactions_too_late_or_sweeping_below_the_old_ceiling_loses() {
    let crashing = LowMark {
        database_crashes: 1,
        highest_at_start: HighestAtStart::Table,
        ..TWO_PRODUCERS
    };
    assert_breaks(NOTHING_LOST, crashing.with(Mistake::PreparedListedAfterHighest));
    assert_breaks(NOTHING_LOST, crashing.with(Mistake::HighestLeftAtSweep));
}
