//! What a transport does for a publisher: AMQP and HTTP each implement it on their configuration.
//!
//! The worker relies on this, whatever the transport; tests/conformance.rs asks each for all of it:
//!
//! - Each message taken from the intake gets exactly one outcome, also at a stop, a lost connection, or the end of the lease.
//! - Messages of a key go out in the order of the intake. When one is lost, none behind it goes before the worker has heard.
//! - No message begins to go after the order to stop, after the deadline, or while the peer says that it takes none. No more
//!   than the window are on their way at once.
//! - A state is told before the outcomes that follow from it.
//! - The order to stop is obeyed in time, whatever the peer does.

use crate::intake::Intake;
use std::future::Future;
use std::io;

/// A way to one destination.
pub trait Carrier: Send + 'static {
    /// Refuses what could never work, before a thread exists.
    fn check(&self) -> io::Result<()>;

    /// How many messages may be outstanding, at least 1.
    fn window(&self) -> usize;

    /// Carries messages until told to stop. Called once, on the publisher thread. `Err` when only a new process helps.
    fn carry(self, intake: &mut Intake<'_>) -> impl Future<Output = Result<(), String>>;
}
