//! What every kind needs that sends over a connection and gets an answer for each message: a window, a deadline, a grace at
//! a stop, patience with answers, losses, endpoints in turn, and connections that are replaced. A kind provides
//! [`link`], or a `Protocol` of `stream`.
//!
//! Runs on the publisher thread. `life` is the life of a destination's connections, `publish_loop` the time while one
//! is open.

mod attempts;
mod dial;
mod endpoints;
mod life;
mod link;
mod publish_loop;
#[cfg_attr(not(feature = "toy"), allow(dead_code, unused_imports))] // only the toy is made of it yet
mod stream;
mod unconfirmed;

pub(crate) use attempts::{Attempts, Numbered};
pub(crate) use dial::dial;
pub(crate) use life::keep_connected;
pub use link::Terms;
pub(crate) use link::{
    BACKOFF_MAX, BACKOFF_MIN, Broken, CAUSE_LIMIT, ChannelEvent, Connection, Connector, Limit, PATIENCE,
    PublishChannel, Taken, Wait, Wire, WriteProgress,
};
#[cfg_attr(not(feature = "toy"), allow(dead_code, unused_imports))] // only the toy is made of it yet
pub(crate) use stream::{Protocol, Received, Streamed};
