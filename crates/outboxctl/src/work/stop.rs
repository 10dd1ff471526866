//! Ends a worker on a signal, on a key, or when its terminal closes.

use crate::failure::{Code, Failure};
use crate::screen::terminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// The longest time for an orderly end.
const ORDERLY_END_MAX: Duration = Duration::from_secs(15);

/// The request that the worker ends. A second request ends the process at once, without its orderly end.
#[derive(Clone)]
pub struct Stop {
    is_requested: Arc<AtomicBool>,
    requests: UnboundedSender<()>,
}

impl Stop {
    pub fn on_signals() -> Result<Self, Failure> {
        let (requests, mut inbox) = unbounded_channel();
        let stop = Self {
            is_requested: Arc::default(),
            requests,
        };
        tokio::spawn(async move {
            inbox.recv().await;
            // The process also exits if the server does not answer in time. The leases then expire.
            _ = tokio::time::timeout(ORDERLY_END_MAX, inbox.recv()).await;
            terminal::restore();
            std::process::exit(Code::CannotConnect as i32);
        });
        stop.on(SignalKind::terminate(), Self::request)?;
        stop.on(SignalKind::interrupt(), Self::request)?;
        Ok(stop)
    }

    pub fn on(&self, kind: SignalKind, then: fn(&Self)) -> Result<(), Failure> {
        let mut signals =
            signal(kind).map_err(|error| Failure::new(Code::Refused, format!("cannot wait for signals: {error}")))?;
        let stop = self.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                then(&stop);
            }
        });
        Ok(())
    }

    pub fn is_requested(&self) -> bool {
        self.is_requested.load(SeqCst)
    }

    /// Requests an orderly end; the second request ends the process at once.
    pub fn request(&self) {
        self.is_requested.store(true, SeqCst);
        _ = self.requests.send(());
    }

    /// Requests an orderly end. Further calls have no effect.
    pub fn begin(&self) {
        if !self.is_requested.swap(true, SeqCst) {
            _ = self.requests.send(());
        }
    }
}
