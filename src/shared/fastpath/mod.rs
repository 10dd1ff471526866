//! The fast path: a small message goes from the session to the worker of its lane through shared memory. The worker sends it
//! before it claims the row. The table stays the authority: a message that does not go this way, or is withdrawn, is told of by
//! *reopen*, like any other commit.
//!
//! | step | file | run by |
//! |---|---|---|
//! | the statement decides whether the message may go | `eligibility` | the session, in its statement |
//! | message and event become bytes | `parcel`; the encoding is crates/core/src/handoff.rs | the session, in its statement |
//! | the bytes are laid down before COMMIT, and are ready after it | `commit` | the session, in its callbacks |
//! | a place holds them meanwhile | `slot` | both |
//! | the worker takes them in hand | `slot`, crates/core/src/engine/receive.rs | the worker |
//!
//! # Order
//!
//! The steps of each side, in their order. crates/core/tests/model_fast_path.rs tries every interleaving, and shows for each rule
//! what breaks without it.
//!
//! A session
//! 1. announces the key before it draws a seq (`transactions`);
//! 2. lays the message down before its row is visible, so a worker that claims the row finds the place;
//! 3. marks the place ready once the transaction is committed. Then it looks again which worker reads the lane: a new one may
//!    have begun before the message lay there. If so, the session withdraws the message;
//! 4. lowers *reopen* for each message that did not go this way, then leaves the open transactions, then wakes the workers.
//!
//! A worker
//! 1. takes what is ready, then reads the open transactions, then looks at what is ready by then, and at *reopen* last;
//! 2. takes nothing of a lane that it has not read to its end;
//! 3. withdraws the places of the rows that it has claimed, before it hands them over;
//! 4. withdraws all places of a lane that it takes over: their rows may go without a claim.
//!
//! A process that withdraws what is ready
//! 1. lowers *reopen* first, or for a moment nothing would tell of the row;
//! 2. cannot end between withdrawing it and freeing the place.

pub mod commit;
pub mod eligibility;
pub mod handoff;
pub mod slot;

/// The size of a place in bytes. A larger message, with its event, goes by the table alone.
pub const BYTES: usize = 4032;
