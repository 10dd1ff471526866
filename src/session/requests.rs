//! A request of this session to the workers of its database: the session posts it, wakes them, and reads their answers.
//! Runs in a user's backend.

use crate::shared::{databases, workers};

/// Requests delivery up to a seq; 0 = a pass. Returns the id of the request. 0 = no worker can answer; None = another
/// session has a request.
pub fn begin(read_limit: i64) -> Option<u32> {
    let Some(database) = databases::my_database() else {
        return Some(0);
    };
    let request_id = database.request.begin(read_limit)?;
    databases::wake_workers();
    Some(request_id)
}

/// For each worker of this database its number and its answer, one after the other; and whether all of them are done.
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

/// Ends the request of this session. Also called at the end of a transaction: no allocation, no error.
pub fn stop() {
    if let Some(database) = databases::my_database() {
        database.request.end();
        databases::wake_workers();
    }
}
