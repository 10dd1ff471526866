//! Code that runs in a user's backend: on its main thread, in the user's transaction. A session notifies workers
//! through `shared`, and never names `worker`.

pub mod api;
pub mod capture;
pub mod changes;
mod checks;
pub mod declarations;
pub mod effects;
pub mod external;
mod fast_path;
pub mod source_checks;
pub mod store;
pub mod subscribe;
pub mod utility;
