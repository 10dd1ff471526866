//! The SQL of a session: it stores events and messages in its transaction, as the owner of the tables. Runs in a user's
//! backend.

mod direct;
pub mod enqueue;
pub mod new_event;
pub mod request;
pub mod source;
pub mod statements;
pub mod written;
