//! Transports of the outbox: what carries a `Publication` to a broker and brings back its `Outcome`.
//!
//! Runs inside a Postgres background worker, so three things are absent on purpose: no Postgres (no pgrx in this crate:
//! a pg call off the main thread aborts the whole server), no logging (states and outcomes are events, the worker says
//! them), and no signal on any thread started here (Postgres' handlers must only run on the main thread).
//!
//! | module | question it answers | thread |
//! |---|---|---|
//! | [`url`] | what does `outbox.url` say? | any, pure |
//! | `config` | where to connect, as whom, with which limits? | any, plain data |
//! | `publisher` | how does the worker hand over batches and learn outcomes? | the worker's main thread |
//! | `publisher_thread` | how is one connection kept, used and given up? | `outbox-publish` |
//! | `session` | one connection's window: publish, confirm, return, time out | `outbox-publish` |
//! | `returns` | which of the confirmed messages were unroutable? | `outbox-publish`, pure |
//! | `amqp` | how to connect, what to check, what does an error mean? | `outbox-publish` |
//! | `sendable` | can this message be put on the wire at all? | `outbox-publish`, pure |
//! | `tls` | whom does a connection trust, and what does an error of TLS mean? | any, pure |
//! | `guard` | which bytes may a peer make lapin parse? | `lapin-io-loop` |

mod amqp;
mod config;
mod guard;
mod publisher;
mod publisher_thread;
mod returns;
mod sendable;
mod session;
pub mod target;
mod tls;
pub mod url;

pub use config::{AmqpConfig, Deadline, ExchangeType, Secret};
pub use outbox_core::message::{HeaderValue, Outcome, Properties, Publication, Text};
pub use publisher::{Bell, ConnectionState, DownReason, Event, Publisher, prepare_process};
pub use tls::{ClientCertificate, Tls, TlsError, TlsPart};
pub use url::{AmqpAddress, UrlError, parse_url};
