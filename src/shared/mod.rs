//! The memory that processes share, one file for each area. Sessions, workers, maintenance and the launcher all run
//! this code. Sessions and workers share no other code. Each field names the processes that write and read it. The
//! tables are authoritative: a value that is lost here costs a poll, a wrong number in a view, or the order of messages
//! of prepared transactions.
//!
//! | file | is about | written by | read by |
//! |---|---|---|---|
//! | `launcher` | how to wake the launcher, and its numbers for all databases | launcher, sessions | all |
//! | `databases` | one database: its counters, and why its workers are woken | all | all |
//! | `lanes` | the seq from which a lane is read again, and the worker that reads it | sessions, workers | workers |
//! | `workers` | entries of workers: which worker runs where, under which number | workers | all |
//! | `vacancies` | databases that a statement needs for itself | sessions | launcher, workers |
//! | `waiters` | sessions that wait for a message to end | sessions | workers, sessions |
//! | `transactions` | open transactions that have enqueued, and their keys | sessions | workers |
//! | `fastpath` | messages on their way from a session to a worker | sessions, workers | workers |
//! | `requests` | what a session requests of the workers, and their answers | sessions, workers | workers, sessions |
//! | `maintenance` | what one maintenance run leaves to the next | maintenance, sessions | launcher, maintenance |
//! | `statistics` | what each destination did, and what waits for it | workers, sessions, maintenance | sessions |
//! | `error_groups` | recent failures, by cause | workers, sessions, maintenance | sessions |
//! | `throughput` | what ended in each minute, and how long it took | workers, sessions | sessions |
//! | `passes` | the last passes of each worker | workers | sessions |
//! | `floors` | where views begin to search for the first waiting message | sessions | sessions |
//! | `lifecycle` | creation and cleanup of all these areas; no other file names it | | |

pub mod databases;
pub mod error_groups;
pub mod fastpath;
pub mod floors;
pub mod lanes;
pub mod launcher;
pub mod lifecycle;
pub mod maintenance;
pub mod passes;
pub mod requests;
pub mod statistics;
pub mod throughput;
pub mod transactions;
pub mod vacancies;
pub mod waiters;
pub mod workers;

/// Databases that can have an entry.
pub const MAX_DATABASES: usize = 128;
/// Workers that can have an entry, of all databases together.
pub const MAX_WORKERS: usize = 128;
