//! What a worker in the server works on: its database, its entry in shared memory, and the destinations that it serves.
//! Used on the main thread of a worker.

use crate::config::Settings;
use crate::shared::statistics::DestinationStats;
use crate::shared::{databases, workers};
use crate::worker::store::Store;
use outbox_core::throughput::DeliveryTimes;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

pub struct WorkerContext {
    pub id: String,
    pub store: Store,
    pub database: Option<&'static databases::DatabaseEntry>,
    pub slot: &'static workers::WorkerEntry,
    pub settings: RefCell<Settings>,
    /// The token of this process's claims when leasing is off; negative.
    pub row_token: i64,
    /// The number of changes by hand as of this worker's last refresh.
    pub changes_seen: Cell<u32>,
    /// WAL must be on disk up to this position before the claimed messages are sent.
    pub wal_position: Cell<u64>,
    pub destinations: RefCell<HashMap<String, ServedDestination>>,
}

/// A destination of this worker.
pub struct ServedDestination {
    pub stats: DestinationStats,
    /// Delivery times of confirmed messages that are not settled yet.
    pub delivery_times: DeliveryTimes,
}

impl WorkerContext {
    /// The number of times that an operator changed something in this database.
    pub fn changes_by_hand(&self) -> u32 {
        self.database.map_or(0, |database| database.changes_by_hand.read())
    }

    /// Whether there was one that this worker has not read.
    pub fn is_stale(&self) -> bool {
        self.changes_by_hand() != self.changes_seen.get()
    }

    pub fn with_destination<T>(&self, name: &str, body: impl FnOnce(&mut ServedDestination) -> T) -> T {
        let mut destinations = self.destinations.borrow_mut();
        if let Some(served) = destinations.get_mut(name) {
            return body(served);
        }
        body(
            destinations
                .entry(name.to_owned())
                .or_insert_with(|| ServedDestination {
                    stats: DestinationStats::of(name),
                    delivery_times: DeliveryTimes::default(),
                }),
        )
    }
}
