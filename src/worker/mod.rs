//! Code of the processes that the server starts: the launcher, and the workers and maintenance of each database.
//! Sessions notify them through `shared`; this code never names `session`.

mod host;
pub mod launcher;
pub mod maintenance;
mod port;
pub mod process;
mod store;
mod transaction;
