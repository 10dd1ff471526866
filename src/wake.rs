//! From enqueue to the worker: remembers in this backend what the transaction has enqueued, and at commit counts it and
//! wakes the workers, once. Called by the enqueue functions and by the end of each transaction; main thread.
//!
//! COMMIT PREPARED wakes nobody: the transaction was forgotten at PREPARE, and may be committed by another session. The
//! safety poll of the workers finds its messages within a second.

use crate::pg::xact::{self, End};
use crate::shmem;
use std::cell::{Cell, RefCell};

thread_local! {
    /// (savepoint, messages enqueued in it)
    static ENQUEUED: RefCell<Vec<(u32, i64)>> = const { RefCell::new(Vec::new()) };
    static WAKE: Cell<bool> = const { Cell::new(false) };
    static INSTALLED: Cell<bool> = const { Cell::new(false) };
    static DATABASES: Cell<bool> = const { Cell::new(false) };
}

/// From `_PG_init`.
pub fn init() {
    xact::on_end(ended);
}

/// This transaction enqueued `count` messages: wake the workers when it commits.
pub fn enqueued(count: i64) {
    WAKE.set(true);
    let savepoint = xact::current_savepoint();
    ENQUEUED.with_borrow_mut(|entries| match entries.last_mut() {
        Some((last, sum)) if *last == savepoint => *sum += count,
        _ => entries.push((savepoint, count)),
    });
}

/// This transaction installed the extension: tell the launcher when it commits.
pub fn installed() {
    INSTALLED.set(true);
}

/// This transaction may change which databases there are, and may have sent workers away: when it ends, however it ends,
/// let them back and tell the launcher.
pub fn databases_change() {
    DATABASES.set(true);
}

/// After Committed nothing here may allocate, log or raise: the vector only shrinks.
fn ended(end: End) {
    match end {
        End::Committed => {
            if WAKE.get() {
                let sum = ENQUEUED.with_borrow(|entries| entries.iter().map(|(_, count)| count).sum());
                if let Some(database) = shmem::my_database() {
                    database.enqueued(sum);
                }
                shmem::wake_workers();
            }
            if INSTALLED.get() {
                shmem::extension_came();
            }
            forget();
        }
        End::Aborted | End::Prepared => forget(),
        End::SavepointReleased { id, into } => ENQUEUED.with_borrow_mut(|entries| {
            entries
                .iter_mut()
                .filter(|(savepoint, _)| *savepoint == id)
                .for_each(|entry| entry.0 = into);
        }),
        End::SavepointAborted { id } => {
            ENQUEUED.with_borrow_mut(|entries| entries.retain(|(savepoint, _)| *savepoint != id));
            if DATABASES.get() {
                shmem::let_back(); // the statement may have failed; if not, core's lock still keeps the workers out
            }
        }
    }
}

fn forget() {
    WAKE.set(false);
    INSTALLED.set(false);
    if DATABASES.take() {
        shmem::let_back();
    }
    ENQUEUED.with_borrow_mut(Vec::clear);
}
