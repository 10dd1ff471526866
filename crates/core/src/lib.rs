//! The decisions of outbox: what is delivered, when, in which order and form, and what becomes of it. Called in the
//! server by sessions, workers, maintenance and the launcher, outside of it by `outboxctl`, and by the crates of the
//! worker and the transports.
//!
//! There is no clock, I/O or randomness here: state, `now` and seed are arguments, a decision is the result, and the
//! caller executes it. No thread is started. No input may make a function panic, because a panic in a worker is an
//! error in the server.
//!
//! Most modules are functions over plain data. Some have state:
//!
//! - In the memory of a worker, changed by its main thread alone: [`engine`] with [`key_order`], [`memory_budget`],
//!   [`rate_limit`], [`slow_start`], [`standbys`]. The engine calls tables and shared memory through traits that its
//!   host implements.
//! - In the memory of a session: [`change_log`], [`nested`].
//! - In the server's shared memory, changed by all processes without a lock: [`floor`], `ring` and [`throughput`],
//!   which are made of atomics.
//!
//! What a session does:
//!
//! - [`event`]: an event, and the list of its columns.
//! - [`trigger`]: the arguments of the triggers of `outbox_attach` and `outbox_capture`.
//! - [`change`]: the event that a written row makes, by its [`change::CaptureRules`].
//! - [`change_log`]: the rows that a transaction has written, until their events are stored.
//! - [`event_filter`]: which subscriptions an event meets, as far as their lists and headers say it.
//! - [`partition`]: the partition of a key, and its label.
//! - [`nested`]: what a transaction has recorded, until its savepoints are over.
//! - [`handoff`]: a message as bytes, on its way through shared memory.
//! - [`truncated_name`]: the length of a name that the server has truncated.
//!
//! What a worker does with a message:
//!
//! - [`message`]: the data types of a message's path: pointer and event in, publication out, outcome back.
//! - [`lease`]: which worker acquires, renews and releases which partition.
//! - [`pass`]: whether a pass claims, and how long the worker waits after it.
//! - [`budget`]: how many messages a pass takes, and the fair split of a claim's rows among partitions.
//! - [`memory_budget`]: how much memory the messages of a worker take, and which destinations may use it.
//! - [`engine`]: the path of a message through a worker, from its claim to its settle.
//! - [`open_transactions`]: open transactions, which hold later messages of their keys.
//! - [`key_order`]: the order of a key, also if one of its messages fails.
//! - [`standbys`]: which standbys must have a commit before its message is sent.
//! - [`rate_limit`]: how fast messages are sent to a destination.
//! - [`slow_start`]: how many messages a destination gets after it has failed.
//! - [`settle`]: the disposition of a message, given the broker's answer.
//! - [`backoff`]: how long a failed message waits.
//! - [`session_settings`]: the settings of a worker's session; the code of users runs with some of them.
//! - [`slot_schedule`]: which databases have workers, if there are fewer worker slots than databases. The launcher asks.
//!
//! What a message looks like:
//!
//! - [`route`]: where the messages of a destination go, and their form; `format` has the names of formats.
//! - [`form`]: what messages look like at a kind of destination, and the names of headers that are reserved.
//! - [`template`]: routing keys and other texts of a message from a template.
//! - [`envelope`]: makes one message of one event: its body, its properties. `refusal` says why it cannot be sent,
//!   `json` reads and writes for it.
//! - [`headers`]: the headers of a message, and their limits.
//! - [`cloudevents`]: an event as a CloudEvent; `trace` checks the W3C trace context.
//! - [`text`]: text that many messages share.
//!
//! What views and screens show:
//!
//! - [`finding`]: what is wrong, as data and in words; [`findings`] has the words of the checks.
//! - [`error_group`]: the errors that form one group.
//! - [`floor`]: from where views look for the first waiting message.
//! - [`latency`]: delivery times, counted in buckets.
//! - [`throughput`]: deliveries of the last minutes and hours; `ring` has the time slots.
//! - [`words`](mod@words): closed lists of words in rows and commands, each written once.

pub mod backoff;
pub mod budget;
pub mod change;
pub mod change_log;
pub mod cloudevents;
pub mod engine;
pub mod envelope;
pub mod error_group;
pub mod event;
pub mod event_filter;
pub mod finding;
pub mod findings;
#[cfg(test)]
mod fixtures;
pub mod floor;
pub mod form;
mod format;
pub mod handoff;
pub mod headers;
mod json;
pub mod key_order;
pub mod latency;
pub mod lease;
pub mod memory_budget;
pub mod message;
pub mod nested;
pub mod open_transactions;
pub mod partition;
pub mod pass;
pub mod rate_limit;
mod refusal;
pub mod ring;
pub mod route;
pub mod session_settings;
pub mod settle;
pub mod slot_schedule;
pub mod slow_start;
pub mod standbys;
pub mod template;
pub mod text;
pub mod throughput;
mod trace;
pub mod trigger;
pub mod truncated_name;
pub mod words;
