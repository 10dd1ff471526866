//! Model check of messages in hand: what a transaction lays down in shared memory goes out before it is claimed, and yet
//! nothing is lost, nothing goes twice, and nothing of a key overtakes.
//!
//! The table stays the authority. A message lies in both, so two dangers: it is taken from here and claimed from there;
//! or it lies in neither for a moment, and a later one of its key does not see that it must wait.
//!
//! | in the model | in the server |
//! |---|---|
//! | `Place` | a place of `src/shared/fastpath/slot.rs`; each message has one of its own, and lack of room is a choice |
//! | `Session` | a backend with one transaction, step by step: `src/session/effects.rs` |
//! | `registry` | `src/shared/transactions.rs`: of each backend a low bound of the seqs of its open transaction; see `model_cursor.rs` |
//! | `Lane` | `reopen` and owner of a lane in shared memory; the lease of its partition in the table |
//! | `Worker` | two workers, their passes cut into accesses: take, registry, look; then claim, revoke, registry, look |
//! | `tokens` | the epoch in the row under which it is claimed |
//! | `is_late` | the lease ran out under the worker: its publisher hands over nothing any more |
//! | `Relay` | a relay, or `outbox_discard`: sees a row, asks whether it is in hand, and takes it or does not |
//! | `Expires` | a row that goes without a look at its place |
//!
//! A pass: takes what is ready for this worker, place by place; reads the registry; looks at what is ready and then at
//! `reopen`; takes in hand what it may and gives up the rest; takes `reopen`, claims in a snapshot what is past the mark,
//! recognises what it has in hand, takes away the places of the rest, reads the registry and looks again. Then it lets go
//! of the places it needs no more. What it has sent is settled at some time between two passes. A pass may end before its
//! claim: so it does where the worker takes in hand what is ready just before it settles. Why that is enough:
//! crates/core/src/engine/receive.rs.
//!
//! What the protocol asks of those who write shared memory, besides the order of their steps:
//! - Who takes a ready message away tells of it first: else there is a moment at which nothing tells of it.
//! - For the same reason (d) looks at what is ready first, and at what was told then.
//! - A session that made its message ready looks again who reads the lane: a new reader may have begun before it lay there.
//! - Who takes a lane over withdraws what lies there: its row may go without a claim, and then nobody else would.
//! - Nobody ends between taking something away and freeing its place. There is no look for interrupts in between.
//!
//! Each action is one atomic access; the checker tries every interleaving. What fails at the broker is in
//! `model_lease.rs`. Wakes are not modelled: passes happen at any time. Nor do sweeps, so what only a sweep finds is lost.
//!
//! Each `Mistake` takes away one rule of the protocol, and the checker must find what it breaks.
//! `cargo test -p outbox-core --test model_fast_path -- --nocapture` shows how each breaks.

mod checking;
mod fast_path;

use checking::{assert_breaks, assert_holds};
use fast_path::{FastPath, IN_ORDER, Key, Mistake, NO_LEAK, NOTHING_LOST, ONCE, Script, Way};

const fn script(key: Key, ways: &'static [Way]) -> Script {
    let at_once = false;
    Script { key, ways, at_once }
}

const fn at_once(script: Script) -> Script {
    let at_once = true;
    Script { at_once, ..script }
}

/// In the place of a session that is not needed.
const NOBODY: Script = script(Key::B, &[]);
const BY_FAST_PATH: Script = script(Key::A, &[Way::FastPath]);
const BY_TABLE: Script = script(Key::A, &[Way::Table]);
const EITHER_WAY: Script = script(Key::A, &[Way::Either]);

const TWO_BY_FAST_PATH: FastPath = FastPath {
    scripts: [BY_FAST_PATH, BY_FAST_PATH, NOBODY],
    limit: 4,
    moves: 0,
    expiries: 0,
    deaths: 0,
    late_claims: 0,
    relays: 0,
    expires: 0,
    mistake: None,
};

/// The least that has a message by express and one of its key by the table.
const MIXED: FastPath = FastPath {
    scripts: [BY_FAST_PATH, BY_TABLE, NOBODY],
    ..TWO_BY_FAST_PATH
};

/// The least that has an order to keep while workers come and go.
const ONE_AND_A_BYSTANDER: FastPath = FastPath {
    scripts: [BY_FAST_PATH, at_once(BY_FAST_PATH), NOBODY],
    ..TWO_BY_FAST_PATH
};

const ONE: FastPath = FastPath {
    scripts: [BY_FAST_PATH, NOBODY, NOBODY],
    ..TWO_BY_FAST_PATH
};

#[test]
fn overlapping_transactions_lose_nothing_double_nothing_and_keep_order() {
    assert_holds(TWO_BY_FAST_PATH);
}

#[test]
fn so_do_messages_of_a_key_of_which_one_lies_in_the_table_only() {
    assert_holds(MIXED);
}

#[test]
fn so_do_three_of_which_one_is_of_another_key() {
    assert_holds(FastPath {
        scripts: [BY_FAST_PATH, BY_TABLE, at_once(script(Key::B, &[Way::FastPath]))],
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn so_do_messages_for_which_there_is_no_room_and_claims_of_one_row() {
    assert_holds(FastPath {
        scripts: [EITHER_WAY, EITHER_WAY, NOBODY],
        limit: 1,
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn so_do_transactions_of_two_messages() {
    assert_holds(FastPath {
        scripts: [script(Key::A, &[Way::FastPath, Way::FastPath]), BY_FAST_PATH, NOBODY],
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn so_do_those_of_which_one_message_goes_by_the_table() {
    assert_holds(FastPath {
        scripts: [script(Key::A, &[Way::FastPath, Way::Table]), BY_FAST_PATH, NOBODY],
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn so_does_what_is_claimed_because_it_lasts() {
    assert_holds(FastPath {
        late_claims: 1,
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn so_do_lanes_that_move_in_order() {
    assert_holds(FastPath {
        moves: 1,
        ..ONE_AND_A_BYSTANDER
    });
}

#[test]
fn so_do_lanes_that_move_there_and_back() {
    assert_holds(FastPath {
        moves: 2,
        late_claims: 1,
        ..ONE
    });
}

#[test]
fn so_do_lanes_that_are_taken_from_a_worker_that_does_not_know() {
    assert_holds(FastPath {
        scripts: [BY_FAST_PATH, at_once(BY_TABLE), NOBODY],
        expiries: 1,
        ..TWO_BY_FAST_PATH
    });
}

#[test]
fn so_do_workers_that_die() {
    assert_holds(FastPath {
        deaths: 1,
        ..ONE_AND_A_BYSTANDER
    });
}

#[test]
fn so_does_one_message_through_all_that() {
    assert_holds(FastPath {
        moves: 1,
        expiries: 1,
        late_claims: 1,
        ..ONE
    });
}

#[test]
fn so_do_relays_and_those_who_discard() {
    assert_holds(FastPath {
        relays: 1,
        late_claims: 1,
        ..ONE_AND_A_BYSTANDER
    });
}

#[test]
fn so_do_relays_while_a_lane_moves() {
    assert_holds(FastPath {
        relays: 2,
        moves: 1,
        deaths: 1,
        ..ONE
    });
}

#[test]
fn so_do_rows_that_go_without_a_look_at_their_place() {
    assert_holds(FastPath {
        expires: 1,
        ..TWO_BY_FAST_PATH
    });
}

// ---- mistakes are found ---------------------------------------------------------------------------------------------

#[test]
fn laying_down_what_is_committed_already_doubles() {
    assert_breaks(ONCE, TWO_BY_FAST_PATH.with(Mistake::CopiedAfterCommit));
}

#[test]
fn not_looking_again_who_reads_the_lane_loses() {
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
fn not_looking_at_what_is_ready_breaks_order() {
    assert_breaks(IN_ORDER, TWO_BY_FAST_PATH.with(Mistake::ReadyNotPeeked));
}

#[test]
fn taking_from_a_lane_that_is_not_read_to_its_end_breaks_order() {
    assert_breaks(IN_ORDER, MIXED.with(Mistake::TakenAboveCursor));
}

#[test]
fn leaving_what_is_claimed_in_its_place_doubles() {
    assert_breaks(ONCE, TWO_BY_FAST_PATH.with(Mistake::ClaimedNotRevoked));
}

#[test]
fn claiming_what_is_in_hand_as_if_it_were_new_doubles() {
    let fast_path = FastPath { late_claims: 1, ..ONE };
    assert_breaks(ONCE, fast_path.with(Mistake::ClaimedNotRecognised));
}

#[test]
fn telling_of_what_was_ready_after_it_is_taken_away_breaks_order() {
    let fast_path = FastPath {
        relays: 1,
        ..TWO_BY_FAST_PATH
    };
    assert_breaks(IN_ORDER, fast_path.with(Mistake::RecordedAfterWithdrawn));
}

#[test]
fn looking_at_what_is_ready_after_what_was_told_breaks_order() {
    let fast_path = FastPath {
        relays: 1,
        ..TWO_BY_FAST_PATH
    };
    assert_breaks(IN_ORDER, fast_path.with(Mistake::ReadyPeekedLast));
}

#[test]
fn a_relay_that_asks_before_its_snapshot_doubles() {
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
