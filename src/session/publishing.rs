//! outbox_publish writes outbox_events and enqueues by itself. Here it says so to the triggers of outbox_attach that fire
//! meanwhile. Run by a user's backend.

use crate::pg::{trigger, xact};
use std::cell::RefCell;

/// Between the check of an event and its enqueue.
struct Publishing {
    savepoint: u32,
    depth: i32,
    destination: String,
}

thread_local! {
    static PUBLISHING: RefCell<Vec<Publishing>> = const { RefCell::new(Vec::new()) };
}

/// The next statement at this depth of triggers stores events that go to this destination without help.
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

/// Whether the rows that this trigger fires for are enqueued for this destination in any case. A statement that another
/// trigger of the same table runs is one deeper, and no part of it.
pub fn is_to(destination: &str) -> bool {
    let depth = trigger::depth() - 1;
    PUBLISHING.with_borrow(|all| {
        let last = all.last().filter(|last| last.depth == depth);
        last.is_some_and(|last| last.destination == destination)
    })
}

/// An error left what was begun.
pub fn savepoint_aborted(savepoint: u32) {
    PUBLISHING.with_borrow_mut(|all| all.retain(|publishing| publishing.savepoint != savepoint));
}

/// After COMMIT nothing may allocate or raise: the list only shrinks.
pub fn transaction_over() {
    PUBLISHING.with_borrow_mut(Vec::clear);
}
