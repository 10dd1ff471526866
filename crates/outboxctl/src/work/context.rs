//! What a worker outside the server works on: its session, and the last state of shared memory that the session
//! returned. Used on the worker's thread.

use super::error::WorkError;
use super::report::Log;
use super::totals::Totals;
use super::worker_session::{SharedState, WaitResult, WorkerSession};
use outbox_core::partition::Partition;
use outbox_worker::rewinds::Rewound;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

pub struct WorkContext {
    pub session: WorkerSession,
    pub log: Rc<Log>,
    /// The result of the last wait.
    pub seen: RefCell<WaitResult>,
    /// The partitions that this worker leases.
    pub partitions: RefCell<Vec<Partition>>,
    pub totals: Rc<RefCell<Totals>>,
    /// By destination: the times from enqueue to confirm, in µs, of the messages that were confirmed since its last
    /// settle.
    pub delivery_us: RefCell<HashMap<String, Vec<i64>>>,
    /// Shared memory as read right after a claim, until `open_transactions` takes it.
    pub shared_state: RefCell<Option<Result<SharedState, WorkError>>>,
    /// The commits below the cursors, as of the last read of shared memory.
    pub rewinds: RefCell<Vec<Rewound>>,
    /// The destinations of which messages are in flight, as last reported to the server.
    pub reported_in_flight: RefCell<HashSet<String>>,
}

impl WorkContext {
    pub fn new(session: WorkerSession, log: Rc<Log>, totals: Rc<RefCell<Totals>>) -> Self {
        Self {
            session,
            log,
            seen: RefCell::default(),
            partitions: RefCell::default(),
            totals,
            delivery_us: RefCell::default(),
            shared_state: RefCell::default(),
            rewinds: RefCell::default(),
            reported_in_flight: RefCell::default(),
        }
    }
}
