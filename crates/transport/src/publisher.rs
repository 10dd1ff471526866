//! The worker's side of its publishers: it starts them on one thread, hands over batches, drains outcomes, and stops
//! each in time.
//!
//! ======== Everything in this file runs on the worker's main thread. The other side is publisher_thread.rs. ========

use crate::Publication;
use crate::crossing::{Crossing, Handed, Waker};
use crate::event::PublisherEvent;
use crate::lookup::{Lookups, Resolver, system_resolver};
use crate::publisher_thread::{self, Begin};
use crate::transport::Transport;
use std::cell::{Cell, RefCell};
use std::io;
use std::sync::{Arc, mpsc as std_mpsc};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

const QUEUED_BATCHES_MAX: usize = 4;
/// The most undrained messages, in windows. Bounds them for a caller that publishes but never drains.
const UNDRAINED_WINDOWS_MAX: usize = 8;
/// The stack size of the publisher thread and, through RUST_MIN_STACK, of the threads that lapin starts. `amqp::guard`
/// bounds lapin's recursion to a tenth of it in a debug build. No larger than needed: with vm.overcommit_memory = 2 a
/// stack counts in full.
const STACK_BYTES: usize = 8 << 20;

/// Sets the stack size of the threads that lapin and tokio start through `std::thread`, and keeps the process out of
/// transparent huge pages. A thread uses a few KiB of its stack and of its heap, for which mimalloc asks for such pages,
/// and each takes 2 MiB: 240 of the 307 MB of a worker with 102 threads. Huge pages of shared memory (`huge_pages` of
/// the server) are others.
///
/// lapin accepts no stack size. std reads RUST_MIN_STACK once, at the first spawn without an explicit size, and
/// remembers it. So call this at the start of the worker, before the first [`Publishers::start`].
///
/// # Safety
///
/// The process must have one thread only: `setenv` moves the environment while another thread may read it (glibc's
/// getaddrinfo does). A background worker is single threaded until it starts a publisher.
pub unsafe fn prepare_process() {
    // SAFETY: the caller promises that no other thread exists.
    unsafe {
        std::env::set_var("RUST_MIN_STACK", STACK_BYTES.to_string());
        std::env::set_var("RUST_BACKTRACE", "0"); // the message of a panic already has its location
        let [yes, unused]: [libc::c_ulong; 2] = [1, 0];
        libc::prctl(libc::PR_SET_THP_DISABLE, yes, unused, unused, unused); // an old kernel refuses: no harm
    }
}

/// Starts the publishers of a worker, on one thread: it starts with the first of them, and ends when this and all
/// publishers are gone.
pub struct Publishers {
    waker: Waker,
    resolver: Resolver,
    thread: RefCell<Option<Thread>>,
}

/// The publisher thread, which lives for as long as this channel.
type Thread = mpsc::UnboundedSender<Begin>;

impl Publishers {
    /// `waker` is set while a publisher has events.
    pub fn new(waker: Waker) -> Self {
        Self::with_resolver(waker, system_resolver())
    }

    /// Resolves the names of hosts by other means than the system's.
    pub fn with_resolver(waker: Waker, resolver: Resolver) -> Self {
        let thread = RefCell::new(None);
        Self {
            waker,
            resolver,
            thread,
        }
    }

    pub fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Starts a publisher, which connects immediately and keeps reconnecting. To change the configuration, stop it and
    /// start another: a new connection is needed anyway, and outcomes never mix.
    pub fn start(&self, transport: impl Transport) -> io::Result<Publisher> {
        transport.check()?;
        let undrained_max = transport.window().saturating_mul(UNDRAINED_WINDOWS_MAX);
        let waiting_confirms_max = (transport.window() / 4).max(1);
        let shared = Arc::new(Crossing::new(self.waker.clone()));
        let (batches, batches_rx) = mpsc::channel(QUEUED_BATCHES_MAX);
        let (stop, stop_rx) = watch::channel(None);
        let (ended_tx, ended) = std_mpsc::channel();
        let thread = self.begin(publisher_thread::begin(
            transport,
            shared.clone(),
            batches_rx,
            stop_rx,
            ended_tx,
        ))?;
        Ok(Publisher {
            shared,
            batches,
            failures_seen: 0,
            stop,
            ended,
            thread: Some(thread),
            undrained: Cell::new(0),
            undrained_max,
            waiting_confirms_max,
        })
    }

    /// Runs a transport on the thread. Starts the thread if there is none, or if it has died.
    fn begin(&self, begin: Begin) -> io::Result<Thread> {
        let mut thread = self.thread.borrow_mut();
        let refused = match &*thread {
            Some(running) => running.send(begin).err().map(|refused| refused.0),
            None => Some(begin),
        };
        if let Some(begin) = refused {
            let started = start_thread(Lookups::new(Arc::clone(&self.resolver)))?;
            let _ = started.send(begin); // if the thread dies now, the transport reports it
            *thread = Some(started);
        }
        Ok(thread.clone().expect("started above"))
    }
}

fn start_thread(lookups: Lookups) -> io::Result<Thread> {
    let runtime = publisher_thread::runtime()?;
    let (begins, begins_rx) = mpsc::unbounded_channel();
    let _masked = AllSignalsBlocked::new()?;
    std::thread::Builder::new()
        .name("outbox-publish".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || publisher_thread::main(runtime, begins_rx, lookups))?;
    Ok(begins)
}

/// One destination: a connection to a broker, or requests to a URL.
pub struct Publisher {
    shared: Arc<Crossing>,
    batches: mpsc::Sender<Handed>,
    /// The number of failures that `drain` has returned.
    failures_seen: u64,
    stop: watch::Sender<Option<Instant>>,
    /// No value is ever sent on this channel: it closes when the transport ends.
    ended: std_mpsc::Receiver<()>,
    /// Keeps the thread alive. None = the transport has ended.
    thread: Option<Thread>,
    /// Messages that were handed over and whose outcome `drain` has not returned yet.
    undrained: Cell<usize>,
    undrained_max: usize,
    /// The most confirms that may wait. With a higher number, waiting confirms could keep the window from being filled.
    waiting_confirms_max: usize,
}

impl Publisher {
    /// Starts a publisher on a thread of its own; see [`Publishers::start`].
    pub fn start(transport: impl Transport, waker: Waker) -> io::Result<Self> {
        Publishers::new(waker).start(transport)
    }

    /// The waker, which is set while events wait that match `wake_after`.
    pub fn waker(&self) -> &Waker {
        &self.shared.waker
    }

    /// Hands over one batch, to be published in its order and after earlier batches. Gives the batch back if the queue
    /// is full, too many outcomes wait for `drain`, or the thread has ended.
    pub fn try_publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        let count = batch.len();
        if count == 0 {
            return Ok(());
        }
        let undrained = self.undrained.get();
        // A batch larger than the limit goes alone; otherwise it would never go.
        if undrained > 0 && undrained + count > self.undrained_max {
            return Err(batch);
        }
        let failures_seen = self.failures_seen;
        self.batches
            .try_send(Handed { batch, failures_seen })
            .map_err(|e| match e {
                mpsc::error::TrySendError::Full(handed) | mpsc::error::TrySendError::Closed(handed) => handed.batch,
            })?;
        self.undrained.set(undrained + count);
        Ok(())
    }

    /// Whether `drain` would return any event. Costs nothing.
    pub fn has_events(&self) -> bool {
        self.shared.has_events()
    }

    /// Takes all events. Clear the waker before. Call it also after `stop`: it returns the last outcomes.
    pub fn drain(&mut self) -> Vec<PublisherEvent> {
        let (events, failures_seen) = self.shared.take();
        self.failures_seen = failures_seen;
        let settled: usize = events
            .iter()
            .map(|e| {
                if let PublisherEvent::Outcomes(o) = e {
                    o.len()
                } else {
                    0
                }
            })
            .sum();
        self.undrained.set(self.undrained.get().saturating_sub(settled));
        events
    }

    /// Sets the number of waiting confirms that wakes the worker; at first it is 1. The number is capped at a quarter
    /// of the window. A state, and any outcome other than a confirm, always wakes. Call this before each wait: events
    /// since `drain` count.
    pub fn wake_after(&self, confirms: usize) {
        self.shared.wake_after(confirms.clamp(1, self.waiting_confirms_max));
    }

    /// Requests a stop without waiting for it. With several publishers, call this on all first: they then stop in
    /// parallel.
    pub fn request_stop(&self, limit: Duration) {
        let _ = self.stop.send(Some(Instant::now() + limit));
    }

    /// Publishes nothing more, waits briefly for outstanding confirms, and closes the connection. Returns within
    /// `limit`, whatever the broker does. Returns false if the transport has not ended: it must be left behind, and the
    /// process must exit.
    pub fn stop(&mut self, limit: Duration) -> bool {
        self.request_stop(limit);
        // No value is ever sent. The receive ends at the timeout, or when the transport drops the sender as its last
        // act.
        let has_ended = self.ended.recv_timeout(limit) != Err(std_mpsc::RecvTimeoutError::Timeout);
        if has_ended {
            self.thread = None;
        }
        has_ended
    }
}

/// Blocks every signal in the calling thread until it is dropped. A thread spawned until then inherits the blocked
/// signals, and so do the threads that it starts.
///
/// On Linux a Postgres latch is SIGURG through a signalfd. The other handlers call longjmp or touch shared state: a
/// handler that ran on a foreign thread would corrupt the server.
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
