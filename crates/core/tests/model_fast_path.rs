//! Model check of the fast path: a message that a transaction copied into a slot of shared memory is sent before it is
//! claimed. Yet no message is lost, none is sent twice, and none overtakes another of its key.
//!
//! The table remains the authority. A message is in both, so there are two dangers. It may be taken from its slot and
//! claimed from the table. Or it is in neither for a moment, and a later one of its key does not see that it must wait.
//!
//! | in the model | in the server |
//! |---|---|
//! | `Slot` | a slot of `src/shared/fast_path.rs`; each message has a separate one, and lack of room is a choice |
//! | `Session` | a backend with one transaction, step by step: `src/session/effects.rs` |
//! | `registry` | `src/shared/transactions.rs`: a low bound of the seqs of each open transaction; see `model_cursor` |
//! | `Lane` | `rewind` and owner of a lane in shared memory; the lease of its partition in the table |
//! | `Worker` | two workers, each pass cut into accesses: take, registry, check; then claim, revoke, registry, check |
//! | `tokens` | the epoch in the row under which it is claimed |
//! | `is_late` | the lease expired under the worker: its publisher hands over no more messages |
//! | `Relay` | a relay, or `outbox_discard`: sees a row, checks whether it is in flight, and takes it or does not |
//! | `Expires` | a row that is removed without a check of its slot |
//! | `Way::Pointer` | a message whose event is in a source: the slot has only the message, and the worker reads the event |
//!
//! A pass takes the ready messages for this worker, slot by slot, and reads the open transactions. It reads the ready
//! messages and then `rewind`, takes the messages that it may take, and gives up the rest. Then it takes `rewind` and
//! claims in a snapshot the rows past the cursor. It recognises those in flight, revokes the slots of the rest, reads
//! the open transactions and checks again. Then it frees the slots that it needs no more. Sent messages are settled at
//! some time between two passes. A pass may end before its claim: the worker also takes ready messages just before it
//! settles. crates/core/src/engine/receive.rs explains why that is enough.
//!
//! The rules for writers of shared memory, besides the order of their steps:
//! - A process that revokes a ready message publishes a rewind first: otherwise for a moment nothing shows the message.
//! - For the same reason (d) reads the ready messages first, and then the rewind.
//! - A session that made its message ready checks the reader of the lane again: a new reader may have begun before the
//!   slot was filled.
//! - A worker that takes a lane over withdraws its slots: their rows may be removed without a claim, and then no other
//!   process would.
//! - No process ends between revoking a slot and freeing it. There is no check for interrupts in between.
//!
//! Each action is one atomic access; the checker tries every interleaving. Failures at the broker are in
//! `model_lease.rs`. Wakes are not modelled: passes happen at any time. Nor are sweeps, so a row that only a sweep
//! finds is lost.
//!
//! Each `Mistake` removes one rule of the protocol, and the checker must find the failure. `cargo test -p outbox-core
//! --test models model_fast_path -- --nocapture` shows how each breaks.

use crate::checking::{assert_breaks, assert_holds};
use crate::fast_path::{AS_COMMITTED, FastPath, IN_ORDER, Key, Mistake, NO_LEAK, NOTHING_LOST, ONCE, Script, Way};

const fn script(key: Key, ways: &'static [Way]) -> Script {
    Script {
        key,
        ways,
        at_once: false,
        edits: false,
    }
}

const fn at_once(script: Script) -> Script {
    let at_once = true;
    Script { at_once, ..script }
}

/// In place of a session that is not needed.
const UNUSED: Script = script(Key::B, &[]);
const BY_FAST_PATH: Script = script(Key::A, &[Way::FastPath]);
const BY_POINTER: Script = script(Key::A, &[Way::Pointer]);
const BY_TABLE: Script = script(Key::A, &[Way::Table]);
const EITHER_WAY: Script = script(Key::A, &[Way::Either]);

const TWO_BY_FAST_PATH: FastPath = FastPath {
    scripts: [BY_FAST_PATH, BY_FAST_PATH, UNUSED],
    limit: 4,
    moves: 0,
    expiries: 0,
    deaths: 0,
    late_claims: 0,
    relays: 0,
    expires: 0,
    mistake: None,
};

/// The smallest configuration with a message by the fast path and one of its key by the table.
const MIXED: FastPath = FastPath {
    scripts: [BY_FAST_PATH, BY_TABLE, UNUSED],
    ..TWO_BY_FAST_PATH
};

/// The smallest configuration with an order to keep while workers come and go.
const ONE_AND_A_BYSTANDER: FastPath = FastPath {
    scripts: [BY_FAST_PATH, at_once(BY_FAST_PATH), UNUSED],
    ..TWO_BY_FAST_PATH
};

const ONE: FastPath = FastPath {
    scripts: [BY_FAST_PATH, UNUSED, UNUSED],
    ..TWO_BY_FAST_PATH
};

#[test]
fn overlapping_transactions_lose_and_double_no_message_and_keep_order() {
    assert_holds(TWO_BY_FAST_PATH);
}

#[test]
fn a_message_only_in_the_table_keeps_the_promises() {
    assert_holds(MIXED);
}

#[test]
fn three_messages_of_two_keys_keep_the_promises() {
    assert_holds(FastPath {
        scripts: [BY_FAST_PATH, BY_TABLE, at_once(script(Key::B, &[Way::FastPath]))],
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn events_that_the_worker_reads_are_sent_as_committed() {
    let edited = Script {
        edits: true,
        ..BY_POINTER
    };
    assert_holds(FastPath {
        scripts: [edited, BY_POINTER, UNUSED],
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn a_message_with_its_event_and_one_without_keep_the_promises() {
    assert_holds(FastPath {
        scripts: [BY_POINTER, at_once(BY_FAST_PATH), UNUSED],
        moves: 1,
        late_claims: 1,
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn lack_of_room_and_claims_of_one_row_keep_the_promises() {
    assert_holds(FastPath {
        scripts: [EITHER_WAY, EITHER_WAY, UNUSED],
        limit: 1,
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn transactions_of_two_messages_keep_the_promises() {
    assert_holds(FastPath {
        scripts: [script(Key::A, &[Way::FastPath, Way::FastPath]), BY_FAST_PATH, UNUSED],
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn transactions_with_one_message_by_the_table_keep_the_promises() {
    assert_holds(FastPath {
        scripts: [script(Key::A, &[Way::FastPath, Way::Table]), BY_FAST_PATH, UNUSED],
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn a_claim_of_a_message_that_takes_long_keeps_the_promises() {
    assert_holds(FastPath {
        late_claims: 1,
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn lanes_that_move_in_order_keep_the_promises() {
    assert_holds(FastPath {
        moves: 1,
        ..ONE_AND_A_BYSTANDER
    });
}

#[test]
fn lanes_that_move_there_and_back_keep_the_promises() {
    assert_holds(FastPath {
        moves: 2,
        late_claims: 1,
        ..ONE
    });
}

#[test]
fn lanes_taken_from_an_unaware_worker_keep_the_promises() {
    assert_holds(FastPath {
        scripts: [BY_FAST_PATH, at_once(BY_TABLE), UNUSED],
        expiries: 1,
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn workers_that_die_keep_the_promises() {
    assert_holds(FastPath {
        deaths: 1,
        ..ONE_AND_A_BYSTANDER
    });
}

#[test]
fn one_message_through_all_of_this_keeps_the_promises() {
    assert_holds(FastPath {
        moves: 1,
        expiries: 1,
        late_claims: 1,
        ..ONE
    });
}

#[test]
fn relays_and_discards_keep_the_promises() {
    assert_holds(FastPath {
        relays: 1,
        late_claims: 1,
        ..ONE_AND_A_BYSTANDER
    });
}

#[test]
fn relays_while_a_lane_moves_keep_the_promises() {
    assert_holds(FastPath {
        relays: 2,
        moves: 1,
        deaths: 1,
        ..ONE
    });
}

#[test]
fn rows_removed_without_a_check_of_their_slot_keep_the_promises() {
    assert_holds(FastPath {
        expires: 1,
        ..TWO_BY_FAST_PATH
    });
}

// ---- mistakes are found ---------------------------------------------------------------------------------------------

#[test]
fn filling_a_slot_after_commit_doubles() {
    assert_breaks(ONCE, TWO_BY_FAST_PATH.with(Mistake::CopiedAfterCommit));
}

#[test]
fn not_checking_the_reader_of_the_lane_again_loses() {
    let fast_path = FastPath { moves: 1, ..ONE };
    assert_breaks(NOTHING_LOST, fast_path.with(Mistake::ReaderNotRechecked));
}

#[test]
fn leaving_before_the_message_is_ready_breaks_order() {
    assert_breaks(IN_ORDER, TWO_BY_FAST_PATH.with(Mistake::LeftBeforeReady));
}

#[test]
fn reading_the_registry_before_taking_breaks_order() {
    assert_breaks(IN_ORDER, TWO_BY_FAST_PATH.with(Mistake::RegistryReadBeforeTaking));
}

#[test]
fn not_reading_the_ready_messages_breaks_order() {
    assert_breaks(IN_ORDER, TWO_BY_FAST_PATH.with(Mistake::ReadyNotPeeked));
}

#[test]
fn taking_from_a_lane_that_is_not_read_to_its_end_breaks_order() {
    assert_breaks(IN_ORDER, MIXED.with(Mistake::TakenAboveCursor));
}

#[test]
fn leaving_a_claimed_message_in_its_slot_doubles() {
    assert_breaks(ONCE, TWO_BY_FAST_PATH.with(Mistake::ClaimedNotRevoked));
}

#[test]
fn claiming_a_message_in_flight_as_new_doubles() {
    let fast_path = FastPath { late_claims: 1, ..ONE };
    assert_breaks(ONCE, fast_path.with(Mistake::ClaimedNotRecognised));
}

#[test]
fn publishing_the_rewind_after_revoking_a_ready_message_breaks_order() {
    let fast_path = FastPath {
        relays: 1,
        ..TWO_BY_FAST_PATH
    };
    assert_breaks(IN_ORDER, fast_path.with(Mistake::RecordedAfterWithdrawn));
}

#[test]
fn reading_the_ready_messages_after_the_rewind_breaks_order() {
    let fast_path = FastPath {
        relays: 1,
        ..TWO_BY_FAST_PATH
    };
    assert_breaks(IN_ORDER, fast_path.with(Mistake::ReadyPeekedLast));
}

#[test]
fn a_relay_that_checks_before_its_snapshot_doubles() {
    let fast_path = FastPath { relays: 1, ..ONE };
    assert_breaks(ONCE, fast_path.with(Mistake::RelayAsksFirst));
}

#[test]
fn a_new_reader_that_withdraws_nothing_leaks() {
    let fast_path = FastPath {
        moves: 1,
        expires: 1,
        ..ONE
    };
    assert_breaks(NO_LEAK, fast_path.with(Mistake::LaneBegunWithoutWithdrawing));
}

#[test]
fn a_worker_that_ends_and_withdraws_nothing_leaks() {
    let fast_path = FastPath { deaths: 1, ..ONE };
    assert_breaks(NO_LEAK, fast_path.with(Mistake::EndedWithoutWithdrawing));
}

#[test]
fn handing_over_an_event_that_may_still_change_sends_what_was_not_committed() {
    let edited = Script {
        edits: true,
        ..BY_POINTER
    };
    let fast_path = FastPath {
        scripts: [edited, UNUSED, UNUSED],
        ..ONE
    };
    assert_breaks(AS_COMMITTED, fast_path.with(Mistake::EventHandedOver));
}

#[test]
fn forgetting_a_message_whose_event_could_not_be_read_loses() {
    let fast_path = FastPath {
        scripts: [BY_POINTER, UNUSED, UNUSED],
        ..ONE
    };
    assert_breaks(NOTHING_LOST, fast_path.with(Mistake::UnreadForgotten));
}
