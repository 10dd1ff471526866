//! What processes share: a file for each area of shared memory. All processes run these lines, and sessions and workers meet
//! nowhere else. Each field says which process writes it and which reads it. The tables are the authority: a value that is
//! lost here costs a poll, a wrong digit, or the order of what was prepared.
//!
//! | file | is about | written by | read by |
//! |---|---|---|---|
//! | `launcher` | where to wake the launcher, and what it tells of all databases | launcher, sessions | all |
//! | `databases` | one database: its counters, and what its workers are called for | all | all |
//! | `lanes` | from which seq a lane is read again, and which worker reads it | sessions, workers | workers |
//! | `workers` | places: which worker runs where, under which number | workers | all |
//! | `vacancies` | databases that a statement needs to itself | sessions | launcher, workers |
//! | `waiters` | sessions that wait for the end of a message | sessions | workers, sessions |
//! | `transactions` | open transactions that have enqueued, and their keys | sessions | workers |
//! | `fastpath` | messages on their way from a session to a worker | sessions, workers | workers |
//! | `requests` | what a session asks the workers for, and their answers | sessions, workers | workers, sessions |
//! | `maintenance` | what one run of the upkeep leaves to the next | upkeep, sessions | launcher, upkeep |
//! | `statistics` | what each destination did and holds | workers, sessions, upkeep | sessions |
//! | `error_groups` | what failed lately, by cause | workers, sessions, upkeep | sessions |
//! | `throughput` | what ended in each minute, and how long it took | workers, sessions | sessions |
//! | `passes` | the last passes of each worker | workers | sessions |
//! | `floors` | from where views look for the first message that waits | sessions | sessions |
//! | `lifecycle` | the beginning and the end of all of these. No other file names it | | |

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
