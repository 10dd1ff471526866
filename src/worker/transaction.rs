//! A transaction of a worker or the upkeep: one that holds the extension, and ends the process where it is gone. Main thread.

use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::spi::SpiResult;
use crate::pg::txn::{self, Durability, Failure};
use crate::pg::{catalog, signals};
use crate::shared::databases;
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How long a transaction that others wait for, at the end, may take.
pub const LAST_TRANSACTION_MS: i32 = 300;

/// The extension that the worker started with, and one of its tables; 0 = not known yet.
static KNOWN: AtomicU32 = AtomicU32::new(0);
static KNOWN_TABLE: AtomicU32 = AtomicU32::new(0);

/// From now on a look at this table of the extension tells whether it is still there.
pub fn remember_table(oid: u32) {
    KNOWN_TABLE.store(oid, Relaxed);
}

fn is_the_same(extension: u32) -> bool {
    let known = KNOWN.load(Relaxed);
    if known == 0 {
        KNOWN.store(extension, Relaxed);
    }
    known == 0 || known == extension
}

/// A transaction that holds the extension; the worker ends if there is none any more.
pub fn held_transaction<T>(
    what: &CStr,
    timeout_ms: i32,
    durability: Durability,
    body: impl FnOnce() -> SpiResult<T>,
) -> Result<T, Failure> {
    let result = txn::run(what, timeout_ms, durability, || {
        let found = match (KNOWN.load(Relaxed), KNOWN_TABLE.load(Relaxed)) {
            (extension, table) if table != 0 && catalog::hold_known_extension(extension, table) => Some(extension),
            _ => catalog::hold_extension(c"outbox"),
        };
        match found {
            Some(extension) if is_the_same(extension) => body()
                .map(Some)
                .map_err(|error| format!("a statement of its own failed: {error}")),
            Some(_) => signals::exit(0), // dropped and made anew meanwhile: the launcher starts a worker that knows it
            None => Ok(None),
        }
    })?;
    result.map_or_else(
        || {
            if let Some(database) = databases::my_database() {
                database.set_extension(false);
            }
            signals::exit(0)
        },
        Ok,
    )
}

/// The same with the usual patience.
pub fn in_transaction<T>(
    what: &CStr,
    durability: Durability,
    body: impl FnOnce() -> SpiResult<T>,
) -> Result<T, Failure> {
    held_transaction(what, STATEMENT_TIMEOUT_MS, durability, body)
}
