//! Code that runs in processes that the server starts: the launcher, and workers and the upkeep of each database. They hear of
//! sessions through `shared`, and never name `session`.

mod host;
pub mod launcher;
pub mod maintenance;
mod port;
pub mod process;
mod store;
mod transaction;
