//! The transports of the outbox: they deliver a `Publication` to a broker or a URL and return its `Outcome`. Here is
//! also all that differs between kinds of destinations: options, findings, the form of messages.
//!
//! A worker runs this code, in a background worker of Postgres or in `outboxctl work`. Sessions in the server and
//! `outboxctl serve` call the pure parts: they check options, and show what is wrong. So three things are absent on
//! purpose. No Postgres: there is no pgrx in this crate, because a Postgres call off the main thread aborts the whole
//! server. No logging: states and outcomes are events, and the worker logs them. No signal on any thread started here:
//! Postgres' handlers must run on the main thread only.
//!
//! Each worker has one thread `outbox-publish` for all its destinations. Beside it there are a pool of `outbox-http`,
//! an `outbox-resolve` for each lookup that runs, and lapin's `lapin-io-loop` for each AMQP connection.
//!
//! | module | question it answers | thread |
//! |---|---|---|
//! | `kinds` | which kinds of destinations are there? | any, pure |
//! | [`findings`] | what are the words for what is wrong with a destination? | sessions, pure |
//! | `kind` | what is special about a kind, and what does a worker know of a destination? | any, pure |
//! | `options`, `described` | what do options say, and which destination do they describe? | any, pure |
//! | `url` | what is the same in all URLs? | any, pure |
//! | `secret`, `deadline` | which text must never be shown; until when may messages be sent? | any |
//! | `secret_file` | is a file with a secret private? | any |
//! | `start`, `started` | how is a publisher made from a description? | the worker's main thread |
//! | `publisher` | how does the worker start publishers, hand over batches and learn outcomes? | the worker's main thread |
//! | `crossing` | what do the worker and the thread share? | both |
//! | `event`, `down` | what does the thread report? | both, plain data |
//! | `publisher_thread` | how do the thread and its transports begin and end? | `outbox-publish` |
//! | `transport` | what must every transport do? | `outbox-publish` |
//! | `failures` | which messages must not go out behind one that failed? | `outbox-publish`, pure |
//! | `intake` | how does a transport get messages and report outcomes? | `outbox-publish` |
//! | `pool` | which request gets a thread, and when do idle threads and connections end? | `outbox-publish`, `outbox-http` |
//! | `connected::life`, `connected::endpoints` | which connection is opened, used, replaced and closed when? | `outbox-publish` |
//! | `connected::publish_loop` | what is sent over a connection, which answers come back, and when is it given up? | `outbox-publish` |
//! | `connected::link` | what does a kind provide for that? | `outbox-publish` |
//! | `connected::unconfirmed` | for how long may a peer leave messages without an answer? | `outbox-publish`, pure |
//! | `connected::dial` | how is a TCP connection made? | `outbox-publish` |
//! | `connected::stream` | what does a kind with a protocol of its own code need? | `outbox-publish` |
//! | `connected::attempts` | which publishes were woken? | `outbox-publish` |
//! | `idle` | which idle connections are closed? | `outbox-publish` |
//! | [`addresses`] | which address of a host is tried next, and for how long? | any, pure |
//! | `lookup` | which addresses does a host have? | `outbox-publish`, `outbox-http`, `outbox-resolve` |
//! | `transfer` | how long may a peer take for the bytes of a message, and for its answer? | `outbox-publish`, `outbox-http`, pure |
//! | `backoff` | how long is the wait before the next attempt? | `outbox-publish`, pure |
//! | `amqp::kind`, `amqp::url` | what do the options of an exchange say? | any, pure |
//! | `amqp::findings`, `http::findings` | what is wrong with such a peer, in words, and what ends it? | the worker's main thread, sessions, pure |
//! | `amqp::config` | where to connect, as which user, with which limits? | any, plain data |
//! | `amqp::connect` | how to connect, what to check, what does an error mean? | `outbox-publish` |
//! | `amqp::channel` | how do lapin's publishes, confirms and events become ours? | `outbox-publish` |
//! | `amqp::returns` | which of the confirmed messages were unroutable? | `outbox-publish`, pure |
//! | `amqp::sendable` | can this message be encoded at all? | `outbox-publish`, pure |
//! | `amqp::guard` | which bytes from a peer may reach lapin's parser? | `lapin-io-loop` |
//! | `amqp::nesting` | which frames nest too deeply for lapin? | `lapin-io-loop`, pure |
//! | `http` | which message is posted when, and when does the destination pause? | `outbox-publish` |
//! | `http::kind`, `http::url` | what do the options of a URL say? | any, pure |
//! | `http::form` | what may the headers of a request be? | any, pure |
//! | `http::config` | where to post, with which credentials and limits? | any, plain data |
//! | `http::order` | which message may be sent next? | `outbox-publish`, pure |
//! | `http::request_thread` | how is one message posted? | `outbox-http` |
//! | `http::request` | what does its request look like? | `outbox-http`, pure |
//! | `http::answer` | what does an answer mean? | `outbox-http`, pure |
//! | `http::line` | over which connection does a request go, and how is it cut? | `outbox-http`, cut from `outbox-publish` |
//! | `tls` | which peers does a connection trust, and what does a TLS error mean? | any, pure |
//! | `scheduler` | what does the worker request from the kernel? | the worker's main thread, before it starts others |
//! | `http::signature` | how is a message signed? | `outbox-http`, pure |
//! | `ssrf` | may a request go to this address? | `outbox-http`, pure |
//! | [`network`] | which addresses are in a network? | any, pure |

/// The allocator of all Rust code of a process that delivers. Postgres' own memory is not touched. Messages are made on
/// one thread and freed on others: docs/decisions/workers.md has the figures.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

pub mod addresses;
mod amqp;
mod backoff;
mod connected;
mod crossing;
mod deadline;
pub mod described;
mod down;
mod event;
mod failures;
pub mod findings;
mod http;
mod idle;
mod intake;
pub mod kind;
pub mod kinds;
mod lookup;
pub mod network;
pub mod options;
mod pool;
mod publisher;
mod publisher_thread;
mod scheduler;
mod secret;
mod secret_file;
mod ssrf;
mod start;
mod started;
mod tls;
#[cfg(feature = "toy")]
#[path = "../tests/toy/mod.rs"]
mod toy;
mod transfer;
mod transport;
mod url;

pub use amqp::{AmqpAddress, AmqpConfig, ExchangeType, parse_url};
pub use connected::Terms;
pub use crossing::Waker;
pub use deadline::Deadline;
pub use down::{DownReason, Fault};
pub use event::{Answered, ConnectionState, PublisherEvent};
pub use http::{HttpAddress, HttpAuth, HttpConfig, Signer, parse_http_url};
pub use lookup::Resolver;
pub use outbox_core::message::{HeaderValue, Outcome, Properties, Publication, Text};
pub use publisher::{Publisher, Publishers, prepare_process};
pub use scheduler::give_way;
pub use secret::Secret;
pub use secret_file::{SecretFileError, read_secret_file};
pub use ssrf::AllowList;
pub use started::{NotStarted, Started, Starter};
pub use tls::{ClientCertificate, Tls, TlsError, TlsPart};
#[cfg(feature = "toy")]
pub use toy::ToyConfig;
pub use transfer::MIN_SEND_RATE;
pub use transport::Transport;
pub use url::{Endpoint, UrlError};
