//! Runs in a user's backend, on its main thread, inside of his transaction. What it has for the workers goes through
//! `shared`; it never names `worker`.

pub mod api;
mod asking;
pub mod capture;
mod checks;
pub mod declarations;
pub mod effects;
pub mod external;
mod publishing;
pub mod room;
pub mod source;
pub mod store;
pub mod utility;
