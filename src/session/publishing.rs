//! outbox_publish writes outbox_events and enqueues the event itself. It records that here for the triggers of
//! outbox_attach that fire meanwhile. Runs in a user's backend.

use crate::pg::{trigger, xact};
use std::cell::RefCell;

/// A publish between the check of its event and its enqueue.
struct Publishing {
    savepoint: u32,
    depth: i32,
    destination: String,
}

thread_local! {
    static PUBLISHING: RefCell<Vec<Publishing>> = const { RefCell::new(Vec::new()) };
}

/// The next statement at this depth of triggers stores events whose messages to this destination are enqueued without a
/// trigger.
pub fn begins(destination: &str) {
    let publishing = Publishing {
        savepoint: xact::current_savepoint(),
        depth: trigger::depth(),
        destination: destination.to_owned(),
    };
    PUBLISHING.with_borrow_mut(|all| all.push(publishing));
}

pub fn ends() {
    PUBLISHING.with_borrow_mut(Vec::pop);
}

/// Whether the rows that this trigger fires for are enqueued for this destination in any case. A statement of another
/// trigger of the same table runs one level deeper and does not count.
pub fn is_to(destination: &str) -> bool {
    let depth = trigger::depth() - 1;
    PUBLISHING.with_borrow(|all| {
        let last = all.last().filter(|last| last.depth == depth);
        last.is_some_and(|last| last.destination == destination)
    })
}

/// An error ended what had begun in this savepoint.
pub fn savepoint_aborted(savepoint: u32) {
    PUBLISHING.with_borrow_mut(|all| all.retain(|publishing| publishing.savepoint != savepoint));
}

/// After COMMIT nothing may allocate or raise an error: the list only shrinks.
pub fn transaction_over() {
    PUBLISHING.with_borrow_mut(Vec::clear);
}
