//! A request of this session to the workers of its database: it asks, wakes them, and reads their answers. Run by a user's backend.

use crate::shared::{databases, workers};

/// Asks for delivery up to a seq; 0 = for a tick. Returns the ticket; 0 = there is nobody to ask; None = another session
/// asks.
pub fn begin(read_limit: i64) -> Option<u32> {
    let Some(database) = databases::my_database() else {
        return Some(0);
    };
    let request_id = database.request_slot().begin(read_limit)?;
    databases::wake_workers();
    Some(request_id)
}

/// Of each worker of this database, one after the other: its number and its answer. And whether all of them are done.
pub fn answers(request_id: u32) -> (Vec<i64>, bool) {
    let (mut flat, mut done) = (Vec::new(), true);
    for (number, answer) in workers::answers_here() {
        let read = answer.read(request_id);
        done &= read[0] == 2;
        flat.push(i64::from(number));
        flat.extend(read);
    }
    (flat, done)
}

/// This session asks for nothing any more. Called at the end of a transaction as well: no allocation, no error.
pub fn stop() {
    if let Some(database) = databases::my_database() {
        database.request_slot().end();
        databases::wake_workers();
    }
}
