//! How a worker is told to end: by signals, by a key, by a terminal that goes.

use crate::failure::{Code, Failure};
use crate::screen::terminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// How long an orderly end may take.
const LAST: Duration = Duration::from_secs(15);

/// The wish that the worker ends. Whoever asks twice does not wait for its orderly end.
#[derive(Clone)]
pub struct Stop {
    is_requested: Arc<AtomicBool>,
    asks: UnboundedSender<()>,
}

impl Stop {
    pub fn on_signals() -> Result<Self, Failure> {
        let (asks, mut asked) = unbounded_channel();
        let stop = Self {
            is_requested: Arc::default(),
            asks,
        };
        tokio::spawn(async move {
            asked.recv().await;
            // A server that does not answer must not hold it up, nor whoever asks twice. Its leases run out.
            _ = tokio::time::timeout(LAST, asked.recv()).await;
            terminal::restore();
            std::process::exit(Code::CannotConnect as i32);
        });
        stop.on(SignalKind::terminate(), Self::ask)?;
        stop.on(SignalKind::interrupt(), Self::ask)?;
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

    /// To end in order; the second time to end at once.
    pub fn ask(&self) {
        self.is_requested.store(true, SeqCst);
        _ = self.asks.send(());
    }

    /// To end in order, however often.
    pub fn begin(&self) {
        if !self.is_requested.swap(true, SeqCst) {
            _ = self.asks.send(());
        }
    }
}
