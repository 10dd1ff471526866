//! The fast path: a small message goes from the session to the worker of its lane through shared memory, and leaves before it is
//! claimed. The table stays the authority: what does not go this way, or is taken back, is told of by *reopen* like any other
//! commit.
//!
//! | step | file | run by |
//! |---|---|---|
//! | the rows are written; may their message go? | `eligibility` | the session, in its statement |
//! | message and event become bytes | `parcel`; the encoding is crates/core/src/parcel.rs | the session, in its statement |
//! | before COMMIT the bytes are laid down, after it they are ready | `commit` | the session, in its callbacks |
//! | a place holds them meanwhile | `slot` | both |
//! | the worker takes them in hand | `slot`, crates/core/src/engine/in_hand.rs | the worker |
//!
//! # Order
//!
//! What each side must do, and in which order. crates/core/tests/model_express.rs tries every interleaving, and shows for each rule
//! what breaks without it.
//!
//! A session:
//! 1. announces the key before it draws a seq (`transactions`);
//! 2. lays the message down before its row can be seen, so who claims a row finds the place of it;
//! 3. when it is committed, says that the place is ready; then looks again who reads the lane, for a new reader may have begun
//!    before it lay there, and takes it back if that is another one;
//! 4. lowers *reopen* for what did not go this way; then leaves the open transactions; then wakes the worker.
//!
//! A worker:
//! 1. takes what is ready, then reads the open transactions, then looks at what is ready by then, and at *reopen* after that;
//! 2. takes nothing of a lane that it has not read to its end;
//! 3. when it has claimed, takes away the places of what it claimed, before it hands it over.
//!
//! Whoever takes away what is ready:
//! 1. lowers *reopen* first, or for a moment neither would tell of the row;
//! 2. does not end between taking it away and freeing the place.
//!
//! Whoever takes a lane over withdraws what lies there: its row may go without a claim, and then nobody else would.

pub mod commit;
pub mod eligibility;
pub mod parcel;
pub mod slot;

/// The size of a place: a message with its event, as bytes, is no larger.
pub const BYTES: usize = 4032;
