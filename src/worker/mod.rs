//! Runs in processes that the server starts: the launcher, and for each database workers and maintenance. What sessions have
//! for them comes through `shared`; it never names `session`.

pub mod broker;
pub mod launcher;
pub mod maintenance;
pub mod store;
