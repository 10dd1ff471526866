//! The publisher thread from start to end: it runs one carrier, and reports its own death.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========
//!
//! Started by `publisher`. The carrier runs on a current-thread runtime.

use crate::carrier::Carrier;
use crate::crossing::{Handed, Shared};
use crate::event::Event;
use crate::intake::Intake;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};

/// The body of the thread.
pub(crate) fn main(
    carrier: impl Carrier,
    shared: &Shared,
    batches: mpsc::Receiver<Handed>,
    stop: watch::Receiver<Option<Instant>>,
) {
    let death = death_of(|| {
        let runtime = OurRuntime::new().map_err(|e| format!("no runtime: {e}"))?;
        let mut intake = Intake::new(batches, stop, shared);
        runtime.get().block_on(carrier.carry(&mut intake))
    });
    if let Some(text) = death {
        shared.push(Event::Died(text));
    }
}

/// Why `run` ended, or None if it ended as requested. The worker would not see a panic that left the thread.
fn death_of(run: impl FnOnce() -> Result<(), String>) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(ended) => ended.err(),
        Err(panic) => Some(format!("the publisher thread panicked: {}", panic_text(&*panic))),
    }
}

/// A runtime whose drop never waits. Tokio's drop waits for its thread pool, where a name lookup can hang for half a
/// minute.
struct OurRuntime(Option<Runtime>);

impl OurRuntime {
    fn new() -> std::io::Result<Self> {
        // The pool only resolves names: one thread, and a second one if the first hangs.
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(2)
            .build()?;
        Ok(Self(Some(runtime)))
    }

    fn get(&self) -> &Runtime {
        self.0.as_ref().expect("taken by drop only")
    }
}

impl Drop for OurRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_reported_with_its_text() {
        assert_eq!(death_of(|| Ok(())), None);
        assert_eq!(death_of(|| Err("stuck".to_owned())), Some("stuck".to_owned()));
        assert!(death_of(|| panic!("a literal")).is_some_and(|t| t.ends_with("panicked: a literal")));
        let number = 7;
        assert!(death_of(|| panic!("number {number}")).is_some_and(|t| t.ends_with("panicked: number 7")));
    }
}
