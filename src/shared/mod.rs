//! What processes share: one file for each area of shared memory. Sessions, workers and the launcher all run these lines;
//! each field says who writes it. Nothing here is an authority: the tables are; a lost value costs a poll or a wrong digit.

pub mod databases;
pub mod error_groups;
pub mod fastpath;
pub mod floors;
pub mod maintenance;
pub mod passes;
pub mod requests;
pub mod statistics;
pub mod transactions;
pub mod workers;
