//! The worker of the outbox: one loop for the workers in the server and for `outboxctl work`.
//!
//! A [`Worker`] makes passes: it takes what the brokers answered, tends its leases, claims, hands over and settles. It
//! decides with crates/core and acts through a [`Host`], which is the process that it runs in: the tables by SPI or by a
//! session, shared memory, clocks, connections, settings, log and statistics. So a simulation can be a host, too. Neither
//! Postgres nor a terminal is known here.
//!
//! The host owns the loop around [`Worker::pass`], the wait between two passes, the end of the process, and a new session
//! where one is lost. Nothing unwinds through the worker, and all of it stays on the thread that calls it.
//!
//! | module | question it answers |
//! |---|---|
//! | `worker` | what happens in which order, and what if it fails? |
//! | `leases` | which partitions are this worker's? |
//! | `destination` | a destination: its messages between claim and settle, and its connection |
//! | `connection` | is there a connection, and how much is it trusted with? |
//! | `status` | what is known of it, in words? |
//! | `tables` | how do a destination's claims and settles reach the tables? |
//! | `notices` | what do the destinations of a worker tell each other? |
//! | `host` | what must the process around the worker bring? |
//! | `settings` | what does it go by? |
//! | `report` | what did a pass do? |
//! | `repeats` | what was a log told lately? |

mod connection;
mod destination;
mod host;
mod leases;
mod notices;
mod repeats;
mod report;
mod settings;
mod status;
mod tables;
mod worker;

pub use destination::Condition;
pub use host::{Brought, Changes, Host, Orders, Patience, Plan, Port, Publisher, Refresh, Tended};
pub use repeats::Repeats;
pub use report::{PassEnd, Report};
pub use settings::{DEFAULT_DESTINATION, Described, Settings};
pub use status::{Reason, State, Status};
pub use worker::{Budget, Pass, Worker};
