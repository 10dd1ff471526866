//! What a transport does for a publisher: AMQP and HTTP each implement it on their configuration.

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
