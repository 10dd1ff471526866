//! The only module that says `unsafe` and `pg_sys` (with the entry points in lib.rs): thin, safe words for what the
//! rest of the extension needs of the server. Main thread only; nothing here decides anything.
//!
//! Invariant: no policy, no SQL, no setting is named here.

pub mod args;
pub mod array;
pub mod backtrace;
pub mod bgworker;
pub mod catalog;
pub mod clock;
mod ending;
pub mod foreign;
pub mod guc;
pub mod json;
pub mod lanes;
pub mod latch;
mod names;
pub mod record;
pub mod security;
pub mod seen;
pub mod shmem;
pub mod signals;
pub mod spi;
pub mod stat;
pub mod table;
pub mod text;
pub mod tid;
pub mod trigger;
pub mod txn;
pub mod utility;
pub mod xact;
