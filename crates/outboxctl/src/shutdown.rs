//! Ends `work` and `top` on a signal, on a key, or when the terminal closes.

use crate::failure::{Code, Failure};
use crate::screen::terminal;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;

/// The longest time for an orderly end.
const ORDERLY_END_MAX: Duration = Duration::from_secs(15);

/// The request that the program ends. A second request ends the process immediately, without its orderly end.
#[derive(Clone)]
pub struct Shutdown {
    is_requested: watch::Sender<bool>,
    requests: UnboundedSender<()>,
}

impl Shutdown {
    pub fn on_signals() -> Result<Self, Failure> {
        let (requests, mut inbox) = unbounded_channel();
        let stop = Self {
            is_requested: watch::Sender::default(),
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
        *self.is_requested.borrow()
    }

    pub async fn requested(&self) {
        _ = self
            .is_requested
            .subscribe()
            .wait_for(|is_requested| *is_requested)
            .await;
    }

    /// Requests an orderly end; the second request ends the process immediately.
    pub fn request(&self) {
        self.is_requested.send_replace(true);
        _ = self.requests.send(());
    }

    /// Requests an orderly end. Further calls have no effect.
    pub fn begin(&self) {
        if !self.is_requested.send_replace(true) {
            _ = self.requests.send(());
        }
    }
}
