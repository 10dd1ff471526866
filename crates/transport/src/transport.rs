//! What a transport does for a publisher. Each kind implements it on its configuration.
//!
//! The worker relies on these rules for every transport; tests/conformance tests each transport for all of them:
//!
//! - Each message taken from the intake gets exactly one outcome. This includes a stop, a lost connection, and the end
//!   of the lease.
//! - Messages of a key go out in the order of the intake. When one is lost, no later one goes out until the worker has
//!   drained its outcome.
//! - No message goes out after a stop request, after the deadline, or while the peer refuses messages. At most a window
//!   of messages is outstanding at once.
//! - A state is reported before the outcomes that follow from it.
//! - A stop request is obeyed in time, whatever the peer does.

use crate::idle::OpenConnections;
use crate::intake::Intake;
use crate::lookup::Lookups;
use crate::pool::RequestPool;
use std::future::Future;
use std::io;
use std::rc::Rc;

/// What the transports of a publisher thread share.
pub struct SharedPools {
    pub(crate) pool: Rc<RequestPool>,
    pub(crate) open: Rc<OpenConnections>,
    pub(crate) lookups: Lookups,
}

/// A way to one destination.
pub trait Transport: Send + 'static {
    /// Refuses a configuration that could never work, before a thread exists.
    fn check(&self) -> io::Result<()>;

    /// The most messages that may be outstanding, at least 1.
    fn window(&self) -> usize;

    /// Carries messages until it gets a stop request. Called once, on the publisher thread. Returns `Err` if only a new
    /// process can continue.
    fn run(self, intake: &mut Intake<'_>, pools: &SharedPools) -> impl Future<Output = Result<(), String>>;
}
