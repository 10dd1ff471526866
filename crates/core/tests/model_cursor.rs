//! Model check of the cursor: a worker that reads a partition only past a cursor loses no message and keeps the order
//! of a key.
//!
//! Reading every waiting row in each pass would cost more the longer the backlog is. So the owner of a partition keeps
//! a cursor in its memory and claims `cursor < seq`. A seq is drawn long before its row becomes visible. So the cursor
//! may pass a row that is not visible yet (loss), or a later row of the key may be sent before it (disorder). Shared
//! memory prevents both, and no producer ever waits for a worker:
//!
//! | in the model | in the server |
//! |---|---|
//! | `rewind` | of the partition, the lowest seq that became visible since the owner last took it |
//! | `registry` | `src/shared/transactions.rs`: the keys of each open transaction, and a low bound of its seqs |
//! | `slot` | room for the same of a prepared transaction, under its xid |
//! | `Producer` | a backend with one transaction, step by step; a row is visible from COMMIT or COMMIT PREPARED on |
//! | `Worker` | the owner of the partition, its passes cut into their accesses to shared memory and its one snapshot |
//! | `other_frees` | a worker of another partition, or a session about to prepare: they free slots, too |
//! | `earlier_owner` | a worker that lost the partition and does not know it yet |
//! | `Adoption` | after a crash a worker, this one or another, adopts the prepared transactions |
//!
//! A pass takes `rewind` and lowers its cursor by it. It claims in a snapshot, and frees the slot if its transaction is
//! over. Then it reads the entries of the sessions, then the slot, then `rewind` again. engine/claim.rs explains why
//! that is enough.
//!
//! The rules for writers of shared memory, besides the order of their steps:
//! - The low bound is 0 from before a seq is drawn until all drawn seqs are recorded, also if one is known already.
//! - A slot is freed only while it belongs to the transaction that was seen to be over.
//! - A worker owns `rewind` from before its lease is visible to others, so that it never becomes the owner late.
//! - The worker that adopts lowers `rewind` to the start afterwards, for transactions that ended before it read the
//!   list.
//! - A claim that found as many rows as its limit has not read to the end, however many of them it got.
//!
//! Each action is one atomic access; the checker tries every interleaving. Claimed rows are sent at the end of a pass,
//! and sent means settled: the rest of a message's path is in `model_lease.rs`. A wake is only a hint, so it is not
//! modelled: passes happen at any time. So do sweeps, but a row that only a sweep finds counts as lost.
//!
//! Each `Mistake` removes one rule of the protocol, and the checker must find the failure. So no rule is idle, and the
//! checker is not blind. `cargo test -p outbox-core --test models model_cursor -- --nocapture` shows how each breaks.

use crate::checking::{assert_breaks, assert_holds};
use crate::cursor::{Draws, IN_ORDER, Key, LowCursor, May, Mistake, NOTHING_LOST, Script};

const fn script(key: Key, messages: usize, may: May) -> Script {
    let draws = Draws::ByUs;
    Script {
        key,
        messages,
        may,
        draws,
    }
}

const fn drawing(draws: Draws, messages: usize) -> Script {
    Script {
        draws,
        ..script(Key::A, messages, May::End)
    }
}

/// Uses up the limit of a claim, and is not held by other keys.
const BYSTANDER: Script = script(Key::B, 1, May::EndAtOnce);
/// In place of a producer that is not needed.
const UNUSED: Script = script(Key::B, 0, May::EndAtOnce);

const OVERLAPPING: LowCursor = LowCursor {
    scripts: [script(Key::A, 1, May::End), script(Key::A, 1, May::End), BYSTANDER],
    limit: 1,
    takeovers: 0,
    database_crashes: 0,
    discards: false,
    mistake: None,
};

/// The smallest configuration with a prepared transaction and one beside it.
const TWO_PRODUCERS: LowCursor = LowCursor {
    scripts: [script(Key::A, 1, May::Prepare), script(Key::A, 1, May::End), UNUSED],
    ..OVERLAPPING
};

/// Two transactions use the slot one after the other.
const REUSING: LowCursor = LowCursor {
    scripts: [script(Key::A, 1, May::Prepare), script(Key::A, 1, May::Prepare), UNUSED],
    ..OVERLAPPING
};

const NESTED: LowCursor = LowCursor {
    scripts: [drawing(Draws::Nested, 2), script(Key::A, 1, May::End), UNUSED],
    ..OVERLAPPING
};

const STRAY_FIRST: LowCursor = LowCursor {
    scripts: [drawing(Draws::StrayFirst, 2), script(Key::A, 1, May::End), UNUSED],
    ..OVERLAPPING
};

const MISSING_ROWS: LowCursor = LowCursor {
    discards: true,
    ..OVERLAPPING
};

#[test]
fn overlapping_transactions_lose_nothing_and_keep_order() {
    assert_holds(OVERLAPPING);
}

#[test]
fn claims_of_two_rows_keep_the_promises() {
    assert_holds(LowCursor {
        limit: 2,
        ..OVERLAPPING
    });
}

#[test]
fn transactions_of_two_messages_keep_the_promises() {
    assert_holds(LowCursor {
        scripts: [script(Key::A, 2, May::End), script(Key::A, 1, May::End), BYSTANDER],
        ..OVERLAPPING
    });
}

#[test]
fn a_publish_within_a_publish_keeps_the_promises() {
    assert_holds(NESTED);
}

#[test]
fn workers_that_take_over_keep_the_promises() {
    assert_holds(LowCursor {
        takeovers: 1,
        ..OVERLAPPING
    });
}

#[test]
fn prepared_transactions_keep_the_promises() {
    assert_holds(LowCursor {
        scripts: [script(Key::A, 1, May::Prepare), script(Key::A, 1, May::End), BYSTANDER],
        limit: 2,
        ..OVERLAPPING
    });
}

#[test]
fn prepared_transactions_that_reuse_a_slot_keep_the_promises() {
    assert_holds(REUSING);
}

#[test]
fn prepared_transactions_keep_the_promises_through_a_crash_of_the_database() {
    assert_holds(LowCursor {
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
fn a_takeover_after_a_crash_keeps_the_promises() {
    assert_holds(LowCursor {
        database_crashes: 1,
        takeovers: 1,
        ..REUSING
    });
}

#[test]
fn claims_that_miss_a_row_keep_the_promises() {
    assert_holds(MISSING_ROWS);
}

#[test]
fn seqs_drawn_by_an_application_keep_the_promises_if_transactions_of_a_key_are_serialised() {
    let drawn = drawing(Draws::ByApplicationInTurn, 1);
    assert_holds(LowCursor {
        scripts: [drawn, drawn, BYSTANDER],
        ..OVERLAPPING
    });
}

#[test]
fn a_foreign_seq_does_not_break_the_order_of_other_transactions() {
    let stray = Script {
        draws: Draws::StrayFirst,
        ..BYSTANDER
    };
    let scripts = [script(Key::A, 1, May::End), script(Key::A, 1, May::End), stray];
    assert_holds(LowCursor { scripts, ..OVERLAPPING });
}

#[test]
fn a_foreign_seq_does_not_break_the_order_within_its_transaction() {
    assert_holds(STRAY_FIRST);
}

/// Why no order is promised there: both have their seqs before they register, and the later one may be first.
#[test]
fn seqs_that_an_application_draws_for_transactions_that_overlap_are_out_of_order() {
    let drawn = drawing(Draws::ByApplication, 1);
    assert_breaks(
        IN_ORDER,
        LowCursor {
            scripts: [drawn, drawn, BYSTANDER],
            ..OVERLAPPING
        },
    );
}

#[test]
fn taking_rewind_after_the_snapshot_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::RewindTakenAfterSnapshot));
}

#[test]
fn reading_the_registry_before_the_snapshot_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::RegistryReadBeforeSnapshot));
}

#[test]
fn peeking_before_the_registry_is_read_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::PeekedBeforeRegistryRead));
}

#[test]
fn not_peeking_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::NotPeeked));
}

#[test]
fn registering_after_drawing_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::RegisteredAfterDrawing));
}

#[test]
fn keeping_the_low_bound_while_drawing_again_breaks_order() {
    assert_breaks(IN_ORDER, STRAY_FIRST.with(Mistake::LowKeptWhileDrawing));
}

#[test]
fn raising_the_low_bound_before_all_seqs_are_recorded_breaks_order() {
    assert_breaks(IN_ORDER, NESTED.with(Mistake::LowRaisedWhileDrawing));
}

#[test]
fn leaving_before_rewind_is_lowered_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::LeftBeforeRewindLowered));
}

#[test]
fn releasing_rows_that_the_cursor_has_not_passed_again_breaks_order() {
    assert_breaks(IN_ORDER, OVERLAPPING.with(Mistake::ParkedReleasedAboveCursor));
}

#[test]
fn reading_the_slots_before_the_sessions_breaks_order() {
    assert_breaks(IN_ORDER, TWO_PRODUCERS.with(Mistake::SlotsReadBeforeSessions));
}

#[test]
fn preparing_without_a_slot_loses() {
    assert_breaks(NOTHING_LOST, TWO_PRODUCERS.with(Mistake::PreparedWithoutSlot));
}

#[test]
fn freeing_a_slot_before_rewind_is_lowered_breaks_order() {
    assert_breaks(IN_ORDER, TWO_PRODUCERS.with(Mistake::SlotFreedBeforeRewindLowered));
}

#[test]
fn freeing_a_slot_that_another_transaction_has_by_then_loses() {
    assert_breaks(NOTHING_LOST, REUSING.with(Mistake::SlotFreedWhosever));
}

#[test]
fn counting_the_rows_that_a_claim_got_loses() {
    assert_breaks(NOTHING_LOST, MISSING_ROWS.with(Mistake::RowsGotCounted));
}

#[test]
fn an_earlier_owner_that_takes_rewind_breaks_order_and_loses() {
    for mistake in [Mistake::RewindTakenByAnyone, Mistake::OwnedAfterLease] {
        let taken_over = LowCursor {
            takeovers: 1,
            ..OVERLAPPING
        };
        assert_breaks(IN_ORDER, taken_over.with(mistake));
        assert_breaks(NOTHING_LOST, taken_over.with(mistake));
    }
}

#[test]
fn adopting_without_reading_again_loses() {
    let crashing = LowCursor {
        database_crashes: 1,
        ..TWO_PRODUCERS
    };
    assert_breaks(NOTHING_LOST, crashing.with(Mistake::AdoptedWithoutRewind));
}
