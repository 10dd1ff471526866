//! Policy of the outbox: pure functions, called by the worker's main thread in the server and by `outboxctl work`.
//!
//! There is no clock, I/O or randomness here: state, `now` and seed are arguments, a decision is the result, and actors
//! elsewhere execute it. No input makes a function panic, for a panic in a worker is an error in the server.
//!
//! In the order in which a message meets them:
//!
//! - [`message`]: the words of the message path as plain data, pointer and event in, publication out, outcome back.
//! - [`event`]: an event, and the list of its columns.
//! - [`change`]: the event that a written row makes, and [`change::Rules`] how it looks.
//! - [`trigger`]: what the triggers of `outbox_attach` and `outbox_capture` carry.
//! - [`partition`]: which partition a key belongs to, and its label.
//! - [`lease`]: which worker acquires, renews and releases which partition.
//! - [`turns`]: which databases have workers, where worker slots are fewer than databases.
//! - [`trust`]: how many messages a destination gets that has failed.
//! - [`tick`]: whether a pass claims, and how long the worker sleeps after it.
//! - [`budget`]: the fair split of a claim's rows among partitions.
//! - [`pace`]: how fast a destination is sent to.
//! - [`engine`]: the path of a message through a worker, tables and broker behind traits.
//! - [`hold`]: open transactions, which hold back later messages of their keys.
//! - [`gate`]: the order of a key, also when one of its messages fails.
//! - [`route`]: where a destination's messages go, and what they look like there; `format` has the words for it.
//! - [`template`]: routing keys and other texts of a message from a template.
//! - [`envelope`]: one event becomes one message: its body, its properties. `refusal` says why one cannot, `json` reads and
//!   writes for it.
//! - [`headers`]: the headers of a message, for AMQP and HTTP, and their limits; `header_names` knows which name is whose.
//! - [`cloudevents`]: an event as a CloudEvent; `trace` knows the trace context of W3C.
//! - [`parcel`]: a message as bytes, on its way through shared memory.
//! - [`text`]: text that many messages share.
//! - [`settle`]: what becomes of a message, given what the broker said.
//! - [`fault`]: what kind of failure an error text tells of, and which make one group.
//! - [`backoff`]: how long a failed message waits.
//! - [`session`]: what the session of a worker sets for itself.
//! - [`latency`]: how long messages took, counted in buckets.
//! - [`floor`]: from where views look for what waits first.
//! - [`minutes`]: what was delivered in each of the last minutes.
//! - [`nested`]: what a transaction has noted, until its savepoints are over.
//! - [`written`]: the name of a server as a statement has it.
//! - [`words`]: closed lists of words that stand in rows and commands, each written once.

pub mod backoff;
pub mod budget;
pub mod change;
pub mod cloudevents;
pub mod engine;
pub mod envelope;
pub mod error_group;
pub mod event;
pub mod floor;
mod format;
pub mod handoff;
mod header_names;
pub mod headers;
mod json;
pub mod key_order;
pub mod latency;
pub mod lease;
pub mod message;
pub mod nested;
pub mod open_transactions;
pub mod partition;
pub mod pass;
pub mod rate_limit;
mod refusal;
pub mod ring;
pub mod route;
#[cfg(test)]
mod samples;
pub mod session;
pub mod settle;
pub mod slot_schedule;
pub mod template;
pub mod text;
pub mod throughput;
mod trace;
pub mod trigger;
pub mod trust;
pub mod words;
pub mod written;
