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
pub mod cluster;
pub mod consumer;
pub mod install;
pub mod markdown;
pub mod network;
pub mod port;
pub mod private_broker;
pub mod process;
pub mod program;
pub mod proxy;
pub mod pty;
pub mod receiver;
mod template;
pub mod wait;
pub mod workdir;

pub use broker::{Broker, Return, fresh_names};
pub use certificate::{Authority, Certificate};
pub use cluster::{Cluster, StopMode};
pub use consumer::{Consumer, Delivery};
pub use install::Installation;
pub use network::{Host, Network};
pub use private_broker::{PrivateBroker, Size};
pub use proxy::{Mode, Proxy};
pub use pty::Pty;
pub use receiver::{Receiver, Reply, Request};
pub use wait::{wait_for, wait_until};
