//! The SQL of a session: events and messages are stored in its transaction, as the owner of the tables. In a user's backend.

mod direct;
pub mod enqueue;
pub mod request;
pub mod source;
pub mod statements;
pub mod written;
