//! The memory that processes share, one file for each subject. Sessions, workers, maintenance and the launcher all run
//! this code. Each field names the processes that write and read it. The tables are authoritative: a value that is lost
//! here costs a poll, a wrong number in a view, a second delivery, or the order of messages of prepared transactions.
//!
//! | area | has an entry for each | that entry | written by | read by |
//! |---|---|---|---|---|
//! | `launcher` | server | how to wake the launcher, and its numbers | launcher, sessions | all |
//! | `databases` | database | its counters, why its workers are woken, and what follows | all | all |
//! | – `rewinds` | | the seq from which each lane is read again, and the worker that reads it | sessions, workers | workers |
//! | – `requests` | | what a session requests of the workers | sessions | workers |
//! | – `maintenance_state` | | what one maintenance run leaves to the next | maintenance, sessions | launcher, maintenance |
//! | `workers` | worker or maintenance process | where it runs, under which number, its answer to a request | workers | all |
//! | – `passes` | | its last passes | workers | sessions |
//! | `sessions` | process | the database for which it waits, or that it needs for itself | sessions | all |
//! | `transactions` | open transaction | the keys that it has enqueued | sessions | workers |
//! | `fast_path` | message on its way from a session to a worker | the message | sessions, workers | workers |
//! | `statistics` | destination | what it did, and what waits for it | workers, sessions, maintenance | sessions |
//! | `error_groups` | cause of recent failures | their number and times | workers, sessions, maintenance | sessions |
//! | `floors` | lane in which a message waited | where views begin to search it | sessions | sessions |
//!
//! `fields` has the kinds of fields. `lifecycle` lists the areas, and says whose end frees an entry; no other file here
//! names it.

pub mod databases;
pub mod error_groups;
pub mod fast_path;
pub mod fields;
pub mod floors;
pub mod launcher;
pub mod lifecycle;
pub mod maintenance_state;
pub mod passes;
pub mod requests;
pub mod rewinds;
pub mod sessions;
pub mod statistics;
pub mod transactions;
pub mod workers;

use crate::pg::shmem::SpinLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Databases that can have an entry.
pub const MAX_DATABASES: usize = 128;
/// Workers that can have an entry, of all databases together.
pub const MAX_WORKERS: usize = 128;

/// Frees the entries of databases that no longer exist. `databases`: the OID of the database in each entry.
fn free_but<'a>(lock: &SpinLock, databases: impl Iterator<Item = &'a AtomicU32>, alive: &[u32]) {
    lock.with(|| {
        let gone = databases.filter(|database| !alive.contains(&database.load(SeqCst)));
        gone.for_each(|database| database.store(0, SeqCst));
    });
}
