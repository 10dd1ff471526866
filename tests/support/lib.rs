//! Private servers for the tests and the demo: a Postgres, a RabbitMQ, a consumer, a proxy between them, a receiver of
//! webhooks. Every call blocks. A call that fails panics and names what it waited for, so a test reads as a list of
//! sentences.
//!
//! Invariants:
//! - Everything listens on loopback, or on a host of a network that the test made (see [`network`]).
//! - No file is left outside the work directory (see [`workdir`]).
//! - No server outlives the process that started it, however that process ends (see [`process`]).
//! - Only [`wait`] sleeps.

mod amqp;
pub mod broker;
pub mod certificate;
pub mod chaos;
pub mod clock;
pub mod cluster;
pub mod consumer;
pub mod courier;
pub mod decoding;
pub mod extremes;
pub mod faults;
pub mod http;
pub mod install;
pub mod load;
pub mod markdown;
pub mod network;
pub mod obstacles;
pub mod oracle;
pub mod port;
pub mod private_broker;
pub mod process;
pub mod program;
pub mod proxy;
pub mod pty;
pub mod receiver;
pub mod screen;
pub mod session;
pub mod skip;
pub mod stage;
pub mod stops;
mod template;
pub mod wait;
pub mod workdir;

pub use broker::{Broker, Return, fresh_names};
pub use certificate::{Authority, Certificate};
pub use cluster::{Cluster, ClusterBuilder, StopMode};
pub use consumer::{Consumer, Delivery, labels};
pub use install::Installation;
pub use network::{Host, Network};
pub use oracle::arrived;
pub use port::dead_port;
pub use private_broker::{Node, PrivateBroker, Size};
pub use proxy::{Mode, Proxy};
pub use pty::Pty;
pub use receiver::{Receiver, Reply, Request};
pub use session::{Event, Session, publish_many, type_sql};
pub use skip::{skip, skip_without};
pub use stage::*;
pub use wait::{LONG, wait_for, wait_until, wait_within, within};
