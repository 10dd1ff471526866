//! The worker's side of the publisher: hand over batches, learn outcomes, stop in time.
//!
//! ======== Everything in this file runs on the worker's main thread. The other side is publisher_thread.rs. ========

use crate::Publication;
use crate::carrier::Carrier;
use crate::crossing::{Handed, Shared, Waker};
use crate::event::Event;
use crate::publisher_thread;
use std::cell::Cell;
use std::io;
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

const QUEUED_BATCHES_MAX: usize = 4;
/// In windows. Bounds what piles up if the caller publishes but never drains.
const UNSETTLED_WINDOWS_MAX: usize = 8;
/// For our own thread and, by RUST_MIN_STACK, those that lapin starts. `amqp::guard` bounds what they recurse over to a tenth
/// of this in a debug build. No larger than needed: under vm.overcommit_memory = 2 a stack counts in full.
const STACK_BYTES: usize = 8 << 20;
/// Free memory that the process keeps.
#[cfg(target_env = "gnu")]
const KEPT_BYTES: libc::c_int = 8 << 20;

/// Sets the stack size of the threads that lapin and tokio start through `std::thread`, and keeps freed memory of a few
/// batches instead of giving it back to the kernel after each.
///
/// lapin takes no stack size; std reads RUST_MIN_STACK once, at the first spawn without an explicit size, and remembers
/// it. So this belongs into the start of the worker, before the first [`Publisher::start`].
///
/// # Safety
///
/// The process must have one thread only: `setenv` moves the environment while another thread may read it (glibc's
/// getaddrinfo does). A background worker is single threaded until it starts a publisher.
pub unsafe fn prepare_process() {
    // SAFETY: the caller promises that no other thread exists.
    unsafe {
        std::env::set_var("RUST_MIN_STACK", STACK_BYTES.to_string());
        std::env::set_var("RUST_BACKTRACE", "0"); // a panic of a thread says where it was, and no more
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: sets two thresholds of the allocator.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        libc::mallopt(libc::M_MMAP_THRESHOLD, KEPT_BYTES);
    }
}

/// One destination, on a thread of its own: a connection to a broker, or a few that post to a URL.
pub struct Publisher {
    shared: Arc<Shared>,
    batches: mpsc::Sender<Handed>,
    /// How many failures `drain` has brought.
    heard: u64,
    stop: watch::Sender<Option<Instant>>,
    /// Never sent on: it ends when the thread does.
    ended: std_mpsc::Receiver<()>,
    thread: Option<JoinHandle<()>>,
    /// Messages taken whose outcome `drain` has not brought.
    unsettled: Cell<usize>,
    unsettled_max: usize,
    /// A worker that lets more confirms than this wait could keep the window from being filled.
    waiting_confirms_max: usize,
}

impl Publisher {
    /// Starts the thread, which connects at once and keeps reconnecting. To change the configuration, stop and start:
    /// a new connection is needed anyway, and outcomes never mix.
    pub fn start(carrier: impl Carrier, waker: Waker) -> io::Result<Self> {
        carrier.check()?;
        let unsettled_max = carrier.window().saturating_mul(UNSETTLED_WINDOWS_MAX);
        let waiting_confirms_max = (carrier.window() / 4).max(1);
        let shared = Arc::new(Shared::new(waker));
        let (batches, batches_rx) = mpsc::channel(QUEUED_BATCHES_MAX);
        let (stop, stop_rx) = watch::channel(None);
        let (ended_tx, ended) = std_mpsc::channel();
        let thread = {
            let shared = shared.clone();
            let _masked = AllSignalsBlocked::new()?;
            std::thread::Builder::new()
                .name("outbox-publish".to_owned())
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    publisher_thread::main(carrier, &shared, batches_rx, stop_rx);
                    drop(ended_tx);
                })?
        };
        Ok(Self {
            shared,
            batches,
            heard: 0,
            stop,
            ended,
            thread: Some(thread),
            unsettled: Cell::new(0),
            unsettled_max,
            waiting_confirms_max,
        })
    }

    /// Rings while events wait that are listened for.
    pub fn waker(&self) -> &Waker {
        &self.shared.waker
    }

    /// Hands over one batch, to be published in its order, behind the batches before it. Gives it back when the queue is
    /// full, too many outcomes wait for `drain`, or the thread is gone.
    pub fn try_publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        let count = batch.len();
        if count == 0 {
            return Ok(());
        }
        let unsettled = self.unsettled.get();
        // A batch larger than the limit goes alone, else it would never go.
        if unsettled > 0 && unsettled + count > self.unsettled_max {
            return Err(batch);
        }
        let heard = self.heard;
        self.batches.try_send(Handed { batch, heard }).map_err(|e| match e {
            mpsc::error::TrySendError::Full(handed) | mpsc::error::TrySendError::Closed(handed) => handed.batch,
        })?;
        self.unsettled.set(unsettled + count);
        Ok(())
    }

    /// Takes all events. The bell is silenced before. Also after `stop`: it brings the last outcomes.
    pub fn drain(&mut self) -> Vec<Event> {
        let (events, heard) = self.shared.take();
        self.heard = heard;
        let settled: usize = events
            .iter()
            .map(|e| if let Event::Outcomes(o) = e { o.len() } else { 0 })
            .sum();
        self.unsettled.set(self.unsettled.get().saturating_sub(settled));
        events
    }

    /// From now on the bell rings when so many confirms wait, at most; at first it rings for each. A state, and any other
    /// outcome, always rings. To be said before each wait: what came since `drain` counts.
    pub fn wake_after(&self, confirms: usize) {
        self.shared.wake_after(confirms.clamp(1, self.waiting_confirms_max));
    }

    /// Lets the thread begin with what `stop` waits for: so that several need no longer than one.
    pub fn request_stop(&self, limit: Duration) {
        let _ = self.stop.send(Some(Instant::now() + limit));
    }

    /// Publishes nothing more, waits briefly for outstanding confirms, closes. Returns within `limit` whatever the broker
    /// does; false: the thread still runs and must be left behind, the process being about to exit.
    pub fn stop(&mut self, limit: Duration) -> bool {
        self.request_stop(limit);
        let Some(thread) = self.thread.take() else { return true };
        // Nothing is ever sent: the only end but the timeout is the sender's drop, the thread's last act.
        match self.ended.recv_timeout(limit) {
            Err(std_mpsc::RecvTimeoutError::Timeout) => {
                self.thread = Some(thread);
                false
            }
            _ => thread.join().is_ok(),
        }
    }
}

/// Blocks every signal in the calling thread while it lives; a thread spawned meanwhile inherits that and keeps it, and
/// so do the threads that one starts.
///
/// On Linux a Postgres latch is SIGURG through a signalfd and the other handlers longjmp or touch shared state: one that
/// ran on a foreign thread would corrupt the server.
struct AllSignalsBlocked {
    before: libc::sigset_t,
}

impl AllSignalsBlocked {
    fn new() -> io::Result<Self> {
        // SAFETY: sigset_t is plain data; both sets are initialised (sigfillset, pthread_sigmask) before they are read.
        let (code, before) = unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            (libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before), before)
        };
        if code == 0 {
            Ok(Self { before })
        } else {
            Err(io::Error::from_raw_os_error(code))
        }
    }
}

impl Drop for AllSignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: `before` was filled by pthread_sigmask; a null third argument is allowed.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}
