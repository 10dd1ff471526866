//! What processes share: a file for each area of shared memory. Sessions, workers and the launcher all run these lines, and they
//! meet nowhere else. Each field says who writes it and who reads it. Nothing here is an authority: the tables are; a lost value
//! costs a poll or a wrong digit.
//!
//! | file | is about |
//! |---|---|
//! | `launcher` | where to wake it, and what it tells of all databases |
//! | `databases` | one database: counters, what its workers are called for |
//! | `lanes` | from which seq a lane is to be read again, and who reads it |
//! | `workers` | places: who runs where, under which number |
//! | `vacancies` | databases that a statement needs for itself |
//! | `waiters` | sessions that wait for the end of a message |
//! | `transactions` | open transactions that have enqueued, and their keys |
//! | `fastpath` | messages on their way from a session to a worker |
//! | `requests` | what a session asks the workers for |
//! | `maintenance` | what one run of the upkeep leaves to the next |
//! | `statistics` | what each destination did and holds |
//! | `error_groups` | what failed lately, by cause |
//! | `throughput` | what ended, and how long it took, by minute |
//! | `passes` | the last passes of each worker |
//! | `floors` | from where views look for what waits first |
//! | `lifecycle` | the beginning and the end of all of these; it names the others, and none names it |

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

/// Databases that have a place.
pub const MAX_DATABASES: usize = 128;
/// Places of workers, of all databases together.
pub const MAX_WORKERS: usize = 128;
