//! The publisher thread from start to end: it runs the transports of all destinations of a worker, and reports the
//! death of each.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========
//!
//! Started by `publisher`. The transports run on a current-thread runtime, so they share what they need without a lock.
//! Nothing here blocks: requests are made on other threads, and lapin's threads make its socket calls.

use crate::crossing::{Crossing, Handed};
use crate::event::PublisherEvent;
use crate::intake::Intake;
use crate::lookup::Lookups;
use crate::transport::{SharedPools, Transport};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, mpsc as std_mpsc};
use std::time::Instant;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, LocalSet};

/// Begins to carry for one destination. Called on the publisher thread.
pub(crate) type Begin = Box<dyn FnOnce(Rc<SharedPools>) -> LocalBoxFuture<'static, ()> + Send>;

/// The body of the thread. Ends when no publisher can be started any more, and all have ended.
pub(crate) fn main(runtime: Runtime, begins: mpsc::UnboundedReceiver<Begin>, lookups: Lookups) {
    // A panic that is no transport's ends them all, and each reports its end.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        LocalSet::new().block_on(&runtime, serve(begins, lookups));
    }));
}

async fn serve(mut begins: mpsc::UnboundedReceiver<Begin>, lookups: Lookups) {
    let pools = Rc::new(SharedPools {
        pool: Rc::default(),
        open: Rc::default(),
        lookups,
    });
    let mut transports = JoinSet::new();
    let mut is_open = true;
    while is_open || !transports.is_empty() {
        tokio::select! {
            begin = begins.recv(), if is_open => match begin {
                Some(begin) => drop(transports.spawn_local(begin(Rc::clone(&pools)))),
                None => is_open = false,
            },
            Some(_) = transports.join_next() => {}
            () = pools.pool.tend() => {}
        }
    }
}

/// A transport from start to end. `ended` is dropped as the last act.
pub(crate) fn begin(
    transport: impl Transport,
    shared: Arc<Crossing>,
    batches: mpsc::Receiver<Handed>,
    stop: watch::Receiver<Option<Instant>>,
    ended: std_mpsc::Sender<()>,
) -> Begin {
    let life = EndReport {
        shared,
        death: Some("the thread of all publishers ended".to_owned()),
        _ended: ended,
    };
    Box::new(move |pools| {
        let live = async move {
            let mut life = life;
            let shared = Arc::clone(&life.shared);
            let mut intake = Intake::new(batches, stop, &shared);
            life.death = death_of(transport.run(&mut intake, &pools)).await;
        };
        live.boxed_local()
    })
}

/// Reports the end of a transport, however it ends.
struct EndReport {
    shared: Arc<Crossing>,
    /// Why it ended, unless that was requested.
    death: Option<String>,
    _ended: std_mpsc::Sender<()>,
}

impl Drop for EndReport {
    fn drop(&mut self) {
        self.shared.push(PublisherEvent::Ended(self.death.take()));
    }
}

/// Why `run` ended, or None if it ended as requested. The worker would not see a panic that left the transport.
async fn death_of(run: impl Future<Output = Result<(), String>>) -> Option<String> {
    match AssertUnwindSafe(run).catch_unwind().await {
        Ok(ended) => ended.err(),
        Err(panic) => Some(format!("the publisher panicked: {}", panic_text(&*panic))),
    }
}

/// The runtime of the thread.
pub(crate) fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_io().enable_time().build()
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
        let death = |run: fn() -> Result<(), String>| death_of(async move { run() }).now_or_never().expect("an end");
        assert_eq!(death(|| Ok(())), None);
        assert_eq!(death(|| Err("stuck".to_owned())), Some("stuck".to_owned()));
        assert!(death(|| panic!("a literal")).is_some_and(|t| t.ends_with("panicked: a literal")));
        assert!(death(|| panic!("number {}", 7)).is_some_and(|t| t.ends_with("panicked: number 7")));
    }
}
