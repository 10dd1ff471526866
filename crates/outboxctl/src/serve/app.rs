//! The state that all requests, event streams and the poller share.

use super::access::Access;
use super::base::BasePath;
use super::pages::layout::Live;
use super::pages::live::live;
use super::session::Pool;
use super::snapshot::{Lost, Snapshot};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Instant, SystemTime};
use tokio::sync::{Notify, Semaphore, watch};

/// The shared state.
pub struct App {
    pub access: Arc<Access>,
    pub pool: Pool,
    pub database: String,
    pub base: BasePath,
    /// Only the poller writes it.
    pub views: watch::Receiver<Arc<View>>,
    pub started: Instant,
    /// Open event streams.
    pub viewers: AtomicUsize,
    /// The time of the last request, in ms since `started`.
    pub asked_at_ms: AtomicU64,
    /// Wakes the poller from its long wait.
    pub asked: Notify,
    pub downloads: Arc<Semaphore>,
}

impl App {
    pub fn view(&self) -> Arc<View> {
        self.views.borrow().clone()
    }

    /// Whether a page is open, or was just requested.
    pub fn is_watched(&self) -> bool {
        let now_ms = self.started.elapsed().as_millis() as u64;
        self.viewers.load(Ordering::Relaxed) > 0 || now_ms < self.asked_at_ms.load(Ordering::Relaxed) + 30_000
    }

    pub fn record_request(&self) {
        let was_watched = self.is_watched();
        self.asked_at_ms
            .store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
        if !was_watched {
            self.asked.notify_one();
        }
    }
}

/// The last known state. The poller makes it, all requests show it.
pub struct View {
    pub snapshot: Option<Snapshot>,
    pub lost: Option<Lost>,
    pub read_at: SystemTime,
    pub live: Arc<Live>,
}

impl View {
    pub fn new(snapshot: Option<Snapshot>, lost: Option<Lost>, read_at: SystemTime) -> Self {
        Self {
            live: Arc::new(live(snapshot.as_ref(), lost.as_ref())),
            snapshot,
            lost,
            read_at,
        }
    }
}
