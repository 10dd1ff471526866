//! The policy of outbox: pure functions, called by sessions and workers in the server, and by `outboxctl`.
//!
//! There is no clock, I/O or randomness here: state, `now` and seed are arguments, a decision is the result, and other
//! crates execute it. No input makes a function panic, because a panic in a worker is an error in the server.
//!
//! In the order in which a message meets them:
//!
//! - [`message`]: the data types of a message's path: pointer and event in, publication out, outcome back.
//! - [`event`]: an event, and the list of its columns.
//! - [`change`]: the event that a written row makes, and its form, [`change::Rules`].
//! - [`change_log`]: the rows that a transaction has written, until their events are stored.
//! - [`trigger`]: the arguments of the triggers of `outbox_attach` and `outbox_capture`.
//! - [`partition`]: the partition of a key, and its label.
//! - [`lease`]: which worker acquires, renews and releases which partition.
//! - [`slot_schedule`]: which databases have workers, if there are fewer worker slots than databases.
//! - [`slow_start`]: how many messages a destination gets after it has failed.
//! - [`pass`]: whether a pass claims, and how long the worker waits after it.
//! - [`budget`]: the fair split of a claim's rows among partitions.
//! - [`memory_budget`]: how much memory the messages of a worker take, and which destinations may use it.
//! - [`rate_limit`]: how fast messages are sent to a destination.
//! - [`engine`]: the path of a message through a worker, with tables and broker behind traits.
//! - [`open_transactions`]: open transactions, which hold later messages of their keys.
//! - [`standbys`]: which standbys must have a commit before its message is sent.
//! - [`key_order`]: the order of a key, also if one of its messages fails.
//! - [`route`]: where the messages of a destination go, and their form; `format` has the names of formats.
//! - [`template`]: routing keys and other texts of a message from a template.
//! - [`event_filter`]: which subscriptions an event meets, as far as their lists and headers say it.
//! - [`envelope`]: makes one message of one event: its body, its properties. `refusal` says why it cannot be sent,
//!   `json` reads and writes for it.
//! - [`form`]: what messages look like at a kind of destination, and the names of headers that are reserved.
//! - [`headers`]: the headers of a message, and their limits.
//! - [`cloudevents`]: an event as a CloudEvent; `trace` checks the W3C trace context.
//! - [`handoff`]: a message as bytes, on its way through shared memory.
//! - [`text`]: text that many messages share.
//! - [`settle`]: the disposition of a message, given the broker's answer.
//! - [`error_group`]: the errors that form one group.
//! - [`finding`]: what is wrong, as data and in words; [`findings`] has the words of the checks.
//! - [`backoff`]: how long a failed message waits.
//! - [`session_settings`]: the settings of a worker's session.
//! - [`latency`]: delivery times, counted in buckets.
//! - [`floor`]: from where views look for the first waiting message.
//! - [`throughput`]: deliveries of the last minutes and hours; `ring` has the time slots.
//! - [`nested`]: what a transaction has recorded, until its savepoints are over.
//! - [`truncated_name`]: the length of a name that the server has truncated.
//! - [`words`]: closed lists of words in rows and commands, each written once.

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
