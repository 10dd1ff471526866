//! Transactions of workers and maintenance: each one holds a lock on the extension, and ends the process if the
//! extension is gone. Runs on the main thread of these processes.

use crate::limits::STATEMENT_TIMEOUT_MS;
use crate::pg::spi::SpiResult;
use crate::pg::txn::{self, Durability, TransactionFailure};
use crate::pg::{catalog, signals};
use crate::shared::databases;
use crate::shared::error_groups::{self, FailureGroup};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How long a transaction at the end of a worker may take, in ms, because others wait for it.
pub const LAST_TRANSACTION_MS: i32 = 300;

/// The OIDs of the extension that this process started with, and of one of its tables; 0 = not known yet.
static KNOWN: AtomicU32 = AtomicU32::new(0);
static KNOWN_TABLE: AtomicU32 = AtomicU32::new(0);

/// Stores a table of the extension. Later transactions check by it that the extension still exists.
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

/// Runs a transaction that locks the extension. Ends the process if the extension no longer exists.
pub fn in_transaction_within<T>(
    what: &CStr,
    timeout_ms: i32,
    durability: Durability,
    body: impl FnOnce() -> SpiResult<T>,
) -> Result<T, TransactionFailure> {
    let result = txn::run(what, timeout_ms, durability, || {
        let found = match (KNOWN.load(Relaxed), KNOWN_TABLE.load(Relaxed)) {
            (extension, table) if table != 0 && catalog::lock_known_extension(extension, table) => Some(extension),
            _ => catalog::lock_extension(c"outbox"),
        };
        match found {
            Some(extension) if is_the_same(extension) => body()
                .map(Some)
                .map_err(|error| format!("a statement of the extension failed: {error}")),
            Some(_) => signals::exit(0), // dropped and created again: the launcher starts another process
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

/// Makes outbox_health show the failure of a statement of the extension.
pub fn show(failure: &TransactionFailure) {
    error_groups::record(&FailureGroup::of_statement(&failure.message, false));
}

/// Runs a `in_transaction_within` with the usual statement timeout.
pub fn in_transaction<T>(
    what: &CStr,
    durability: Durability,
    body: impl FnOnce() -> SpiResult<T>,
) -> Result<T, TransactionFailure> {
    in_transaction_within(what, STATEMENT_TIMEOUT_MS, durability, body)
}
