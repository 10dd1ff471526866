//! Policy of the outbox: pure functions, called by the worker's main thread in the server and by `outboxctl work`.
//!
//! There is no clock, I/O or randomness here: state, `now` and seed are arguments, a decision is the result, and actors
//! elsewhere execute it. No input makes a function panic, for a panic in a worker is an error in the server.
//!
//! In the order in which a message meets them:
//!
//! - [`message`]: the words of the message path as plain data, pointer and event in, publication out, outcome back.
//! - [`partition`]: which partition a key belongs to, and its label.
//! - [`lease`]: which worker acquires, renews and releases which partition.
//! - [`tick`]: whether a pass claims, and how long the worker sleeps after it.
//! - [`budget`]: the fair split of a claim's rows among partitions.
//! - [`engine`]: the path of a message through a worker, tables and broker behind traits.
//! - [`hold`]: open transactions, which hold back later messages of their keys.
//! - [`gate`]: the order of a key, also when one of its messages fails.
//! - [`route`]: the routing key from a template.
//! - [`envelope`]: body, properties and headers of a message, and the limits that AMQP sets them.
//! - [`settle`]: what becomes of a message, given what the broker said.
//! - [`backoff`]: how long a failed message waits.

pub mod backoff;
pub mod budget;
pub mod engine;
pub mod envelope;
pub mod gate;
pub mod hold;
pub mod lease;
pub mod message;
pub mod partition;
pub mod route;
pub mod settle;
pub mod tick;
