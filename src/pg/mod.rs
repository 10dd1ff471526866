//! Thin, safe wrappers of the server's functions. The rest of the extension calls them, on the main thread only. This
//! module and the entry points in lib.rs are the only ones that contain `unsafe` or name `pg_sys`.
//!
//! Invariant: it contains no policy and no SQL, and names no setting of the extension.

pub mod args;
pub mod array;
pub mod backtrace;
pub mod bgworker;
pub mod catalog;
pub mod clock;
mod ending;
pub mod guc;
pub mod json;
pub mod key_scan;
pub mod lane_scan;
pub mod latch;
pub mod lookup;
mod major;
pub mod record;
pub mod report;
pub mod scan;
pub mod security;
pub mod seen;
pub mod shmem;
pub mod signals;
pub mod spi;
pub mod stat;
pub mod table;
pub mod text;
pub mod trigger;
pub mod txn;
pub mod user_code;
pub mod utility;
pub mod versions;
pub mod when;
pub mod xact;
