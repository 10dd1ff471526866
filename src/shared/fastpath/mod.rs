//! The fast path: a small message goes from the session to the worker of its lane through shared memory. The worker
//! sends it before it claims the row. The table stays authoritative: a message that does not take the fast path, or is
//! withdrawn, is announced by *rewind*, like any other commit.
//!
//! | step | file | run by |
//! |---|---|---|
//! | the statement decides whether the message may take the fast path | `eligibility` | the session, in its statement |
//! | message and event become bytes | `handoff`, crates/core/src/handoff.rs | the session, in its statement |
//! | the bytes are copied into a slot before COMMIT, and ready after it | `commit` | the session, in its callbacks |
//! | a slot holds them until then | `slot` | both |
//! | the worker takes them: they are fast-path in flight | `slot`, crates/core/src/engine/receive.rs | the worker |
//!
//! # Order
//!
//! The steps of each side, in their order. crates/core/tests/model_fast_path.rs tries every interleaving, and shows for
//! each rule what breaks without it.
//!
//! A session
//! 1. announces the key before it draws a seq (`transactions`);
//! 2. copies the message into a slot before its row is visible, so a worker that claims the row finds the slot;
//! 3. marks the slot ready once the transaction is committed. Then it checks again which worker reads the lane: a new
//!    worker may have begun before the message was in the slot. If so, the session withdraws the message;
//! 4. lowers *rewind* for each message that did not take the fast path, then frees its entry of open transactions, then
//!    wakes the workers.
//!
//! A worker
//! 1. takes what is ready, then reads the open transactions, then reads what is ready by then, and reads *rewind* last;
//! 2. takes nothing of a lane that it has not read to its end;
//! 3. withdraws the slots of the rows that it has claimed, before it hands their messages over;
//! 4. withdraws all slots of a lane that it takes over. Their rows may be removed without a claim, and then no other
//!    process would withdraw them.
//!
//! A process that withdraws a ready message
//! 1. lowers *rewind* first, or for a moment nothing would announce the row;
//! 2. cannot end between withdrawing the message and freeing the slot.

pub mod commit;
pub mod eligibility;
pub mod handoff;
pub mod slot;

/// The most bytes that a slot holds. A larger message, with its event, goes through the table alone.
pub const BYTES: usize = 4032;
