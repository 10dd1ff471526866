//! Code of the processes that the server starts: the launcher, and the workers and maintenance of each database.
//! Sessions notify them through `shared`; this code never names `session`.

mod context;
pub mod launcher;
pub mod maintenance;
pub mod process;
mod runtime;
mod store;
mod tables;
mod transaction;
