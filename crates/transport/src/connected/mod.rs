//! What every kind needs that sends over a connection and gets an answer for each message: a window, a deadline, a grace at
//! a stop, patience with answers, losses, endpoints in turn, and connections that are replaced. A kind provides [`link`].
//!
//! Runs on the publisher thread. `life` is the life of a destination's connections, `session` the time while one is open.

mod attempts;
mod endpoints;
mod idle;
mod life;
mod link;
mod session;
mod unconfirmed;

pub(crate) use attempts::{Attempts, Numbered};
pub(crate) use idle::OpenConnections;
pub(crate) use life::keep_connected;
pub(crate) use link::{
    Broken, CAUSE_LIMIT, Connection, Connector, Lane, LaneEvent, Limit, Progress, Taken, Terms, Wait, Wire,
};
