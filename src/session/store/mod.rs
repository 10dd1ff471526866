//! The SQL of a session: it stores events and messages in its transaction, as the owner of the tables. Runs in a user's
//! backend.

pub mod current_source;
pub mod enqueue;
mod insert;
pub mod new_event;
pub mod partition;
pub mod publish;
pub mod statements;
pub mod subscription_conditions;
pub mod subscriptions;
pub mod written_rows;
