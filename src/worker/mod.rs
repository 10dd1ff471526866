//! Code that runs in processes that the server starts: the launcher, and workers and the upkeep of each database. They hear of
//! sessions through `shared`, and never name `session`.

pub mod broker;
pub mod launcher;
pub mod maintenance;
pub mod store;
