//! The worker of the outbox: the passes of the workers in the server and of `outboxctl work`.
//!
//! In each pass a [`Worker`] takes outcomes, renews and takes leases, claims messages, hands them to the publishers and
//! settles. crates/core makes its decisions. It acts through a [`Runtime`], the process that it runs in, which provides
//! the tables (by SPI or by a session), shared memory, clocks, connections, settings, log and statistics. A simulation
//! is a runtime, too. This crate has no client of Postgres and no terminal: `protocol` names the SQL functions of the
//! extension, and its host runs them.
//!
//! The runtime runs the loop around [`Worker::pass`] and the wait between two passes. It also ends the process, and
//! opens a new session when one is lost. An error is a result: nothing unwinds through the worker. All of it runs on
//! the thread that calls it; only the publishers have threads.
//!
//! Sessions in the server use `settings` and [`rewinds`] as well: they check the destination of the settings, and
//! record rewinds for the lanes that workers read.
//!
//! | module | question it answers |
//! |---|---|
//! | `worker` | in which order does a pass run, and what happens if a step fails? |
//! | `lease_plan` | which partitions does this worker own? |
//! | `destination` | what happens to a destination's messages between claim and settle? |
//! | `connection` | is there a connection, and how many messages may it have in flight? |
//! | `status` | in which words is the state of a connection shown? |
//! | `admission` | how many messages of a destination may a pass take, and how many may be sent now? |
//! | `status_report` | which state of a connection is reported, and when? |
//! | `rewinds` | which destinations must read a lane again that was written for one of them? |
//! | `protocol` | which SQL functions does a worker call, and what do their rows mean? |
//! | `runtime` | what must the process around the worker provide? |
//! | `settings` | which settings does a worker use? |
//! | `report` | what did a pass do? |
//! | `repeats` | was this text logged in the last minute? |

mod admission;
mod connection;
mod destination;
mod lease_plan;
pub mod protocol;
mod repeats;
mod report;
pub mod rewinds;
mod runtime;
mod settings;
mod status;
mod status_report;
mod worker;

pub use destination::Condition;
pub use repeats::Repeats;
pub use report::{PassCounts, PassEnd};
pub use runtime::{Changes, DestinationPublisher, LeaseChanges, Orders, Refresh, Runtime, Tended};
pub use settings::{
    DEFAULT_DESTINATION, Described, KnownSettings, Mapping, WorkerSettings, awaited_standbys, default_target,
    empty_mapping,
};
pub use status::{ConnectionStatus, State, StatusReason};
pub use worker::{FinishTimeouts, Pass, Worker};
