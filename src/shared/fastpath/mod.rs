//! The fast path: small messages go from a session to a worker through shared memory.

pub mod parcel;
pub mod slot;
