//! The worker's side of the publisher: hand over batches, learn outcomes, stop in time.
//!
//! ======== Everything in this file runs on the worker's main thread. The other side is publisher_thread.rs. ========
//!
//! | crossing | direction | bound | when full |
//! |---|---|---|---|
//! | batches | main → thread | [`QUEUED_BATCHES_MAX`] | `try_publish` gives the batch back |
//! | outcomes | thread → main | 8 windows of unsettled messages | `try_publish` gives the batch back |
//! | states | thread → main | [`QUEUED_STATES_MAX`] | the oldest is dropped |
//! | stop | main → thread | one value | overwritten |

use crate::config::TransportConfig;
use crate::publisher_thread;
use crate::{Outcome, Publication};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc as std_mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

const QUEUED_BATCHES_MAX: usize = 4;
const QUEUED_STATES_MAX: usize = 32;
/// In windows. Bounds what piles up if the caller publishes but never drains.
const UNSETTLED_WINDOWS_MAX: usize = 8;
/// For our own thread and, by RUST_MIN_STACK, those that lapin starts. `guard` bounds what they recurse over to a tenth
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

/// What the publisher thread has to say.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    State(ConnectionState),
    /// One for each publication taken by `try_publish`, in the order of becoming certain.
    Outcomes(Vec<Answered>),
    /// The thread has ended by itself (a panic, or a connection that could not be got rid of). No more outcomes will
    /// come: treat what is unanswered as `Lost`, and start a new publisher or, better, a new process.
    Died(String),
}

/// What became of one publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    pub handle: u64,
    pub outcome: Outcome,
    /// When the answer was here: it may have been noticed later. Without an answer, when that was certain.
    pub at: Instant,
}

impl Answered {
    pub(crate) fn now(handle: u64, outcome: Outcome) -> Self {
        let at = Instant::now();
        Self { handle, outcome, at }
    }
}

/// After a failure the state stays `Down`, with the newest reason, until `Connected`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    Connecting,
    Connected,
    /// Connected, and these messages are without a confirm for longer than usual: said again as time goes by, until
    /// `Connected`.
    Unconfirmed {
        messages: usize,
        seconds: u64,
        /// The broker answers to other questions.
        is_alive: bool,
    },
    /// The broker is short of memory or disk: nothing more is published, and no confirm times out, until `Connected`.
    Blocked {
        reason: String,
    },
    Down {
        reason: DownReason,
        detail: String,
    },
}

/// Why the connection is down. `Display` names the cause in words for a health view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DownReason {
    Unreachable,
    AuthRefused,
    VhostRefused,
    ExchangeMissing,
    ExchangeMismatch,
    Timeout,
    TlsFailed,
    Protocol,
    Closed,
    /// HTTP: an address that is not public and not on the list.
    AddressRefused,
    /// HTTP: moved, missing, or not for messages.
    EndpointRefused,
    /// HTTP: fewer requests, please.
    Throttled,
    /// HTTP: not now.
    Unavailable,
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unreachable => "the destination cannot be reached",
            Self::AuthRefused => "the destination refuses the user, the password or the permission",
            Self::VhostRefused => "the virtual host is missing or closed to this user",
            Self::ExchangeMissing => "the exchange does not exist",
            Self::ExchangeMismatch => "the exchange exists with other properties",
            Self::Timeout => "the destination did not answer in time",
            Self::TlsFailed => "TLS failed",
            Self::Protocol => "the peer broke the protocol, or does not speak it",
            Self::Closed => "the connection was closed",
            Self::AddressRefused => "the address is not public, and not on the list of those that may be reached",
            Self::EndpointRefused => "the URL takes no messages",
            Self::Throttled => "the destination asks for fewer requests",
            Self::Unavailable => "the destination says that it is not available",
        })
    }
}

/// Rung by every publisher of a worker when it has something to say that its worker listens for; the worker waits for it
/// together with its latch.
#[derive(Clone, Debug)]
pub struct Bell(Arc<OwnedFd>);

impl Bell {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is open and nobody else's.
        Ok(Self(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Readable while it rings. Do not read or close it.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Stops it. Before the publishers are drained: what is said in between rings again.
    pub fn silence(&self) {
        let mut count = [0u8; 8];
        // SAFETY: reads at most 8 bytes into a live buffer. It fails with EAGAIN if nothing rang.
        unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: writes 8 bytes from a live buffer. It fails only if the counter is full, and then it is readable anyway.
        unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
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
    unsettled_max: usize,
    /// A worker that lets more confirms than this wait could keep the window from being filled.
    waiting_confirms_max: usize,
}

/// A batch on its way to the thread.
pub(crate) struct Handed {
    pub(crate) batch: Vec<Publication>,
    /// How many failures the worker had heard of when it handed the batch over.
    pub(crate) heard: u64,
}

/// Both sides hold it.
pub(crate) struct Shared {
    bell: Bell,
    /// Written by the thread, emptied by main. Held for a push or a take only.
    inbox: Mutex<Inbox>,
    /// Messages taken whose outcome main has not drained. Raised and lowered by main only.
    unsettled: AtomicUsize,
}

struct Inbox {
    events: Vec<Event>,
    /// How many failures have been told of; only HTTP counts them.
    failures: u64,
    /// How many of the events' outcomes are confirms.
    confirms: usize,
    /// Something else is among the events.
    is_urgent: bool,
    /// Main wants to be woken when so many confirms wait.
    listens_for: usize,
    /// Main has been told to take the events.
    has_rung: bool,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            events: Vec::new(),
            failures: 0,
            confirms: 0,
            is_urgent: false,
            listens_for: 1,
            has_rung: false,
        }
    }
}

impl Inbox {
    fn put(&mut self, event: Event) {
        let (confirms, others) = match &event {
            Event::Outcomes(outcomes) => {
                let confirms = outcomes
                    .iter()
                    .filter(|answered| answered.outcome == Outcome::Confirmed);
                let confirms = confirms.count();
                (confirms, outcomes.len() - confirms)
            }
            Event::State(_) | Event::Died(_) => (0, 1),
        };
        self.confirms += confirms;
        self.is_urgent |= others > 0;
        match (self.events.last_mut(), event) {
            (Some(Event::Outcomes(last)), Event::Outcomes(more)) => last.extend(more),
            (_, event) => {
                drop_oldest_state(&mut self.events, &event);
                self.events.push(event);
            }
        }
    }

    /// Whether main must be told now. Once: it takes all there is then, and silences the bell before it does.
    fn rings(&mut self) -> bool {
        let rings = !self.has_rung && (self.is_urgent || self.confirms >= self.listens_for);
        self.has_rung |= rings;
        rings
    }

    fn take(&mut self) -> Vec<Event> {
        (self.confirms, self.is_urgent, self.has_rung) = (0, false, false);
        std::mem::take(&mut self.events)
    }
}

impl Publisher {
    /// Starts the thread, which connects at once and keeps reconnecting. To change the configuration, stop and start:
    /// a new connection is needed anyway, and outcomes never mix.
    pub fn start(config: impl Into<TransportConfig>, bell: Bell) -> io::Result<Self> {
        let config = config.into();
        config.validate()?;
        let unsettled_max = config.window().saturating_mul(UNSETTLED_WINDOWS_MAX);
        let waiting_confirms_max = (config.window() / 4).max(1);
        let shared = Arc::new(Shared::new(bell));
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
                    publisher_thread::main(config, &shared, batches_rx, stop_rx);
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
            unsettled_max,
            waiting_confirms_max,
        })
    }

    /// Rings while events wait that are listened for.
    pub fn bell(&self) -> &Bell {
        &self.shared.bell
    }

    /// Hands over one batch, to be published in its order, behind the batches before it. Gives it back when the queue is
    /// full, too many outcomes wait for `drain`, or the thread is gone.
    pub fn try_publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        let count = batch.len();
        if count == 0 {
            return Ok(());
        }
        let unsettled = self.shared.unsettled.load(Ordering::Relaxed);
        // A batch larger than the limit goes alone, else it would never go.
        if unsettled > 0 && unsettled + count > self.unsettled_max {
            return Err(batch);
        }
        let heard = self.heard;
        self.batches.try_send(Handed { batch, heard }).map_err(|e| match e {
            mpsc::error::TrySendError::Full(handed) | mpsc::error::TrySendError::Closed(handed) => handed.batch,
        })?;
        self.shared.unsettled.fetch_add(count, Ordering::Relaxed);
        Ok(())
    }

    /// Takes all events. The bell is silenced before. Also after `stop`: it brings the last outcomes.
    pub fn drain(&mut self) -> Vec<Event> {
        let (events, heard) = self.shared.take();
        self.heard = heard;
        let settled = events
            .iter()
            .map(|e| if let Event::Outcomes(o) = e { o.len() } else { 0 })
            .sum();
        self.shared.unsettled.fetch_sub(settled, Ordering::Relaxed);
        events
    }

    /// From now on the bell rings when so many confirms wait, at most; at first it rings for each. A state, and any other
    /// outcome, always rings. To be said before each wait: what came since `drain` counts.
    pub fn listen(&self, confirms: usize) {
        self.shared.listen(confirms.clamp(1, self.waiting_confirms_max));
    }

    /// Lets the thread begin with what `stop` waits for: so that several need no longer than one.
    pub fn ask_to_stop(&self, limit: Duration) {
        let _ = self.stop.send(Some(Instant::now() + limit));
    }

    /// Publishes nothing more, waits briefly for outstanding confirms, closes. Returns within `limit` whatever the broker
    /// does; false: the thread still runs and must be left behind, the process being about to exit.
    pub fn stop(&mut self, limit: Duration) -> bool {
        self.ask_to_stop(limit);
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

impl Shared {
    fn new(bell: Bell) -> Self {
        Self {
            bell,
            inbox: Mutex::default(),
            unsettled: AtomicUsize::new(0),
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Called on the publisher thread.
    pub(crate) fn push(&self, event: Event) {
        self.push_counted(event, None);
    }

    /// `failures`: how many there have been, those of this event included. Both in one go: who takes the event has heard.
    pub(crate) fn push_counted(&self, event: Event, failures: Option<u64>) {
        let mut inbox = self.inbox();
        inbox.failures = failures.unwrap_or(inbox.failures);
        inbox.put(event);
        self.tell(inbox);
    }

    fn tell(&self, mut inbox: MutexGuard<'_, Inbox>) {
        let rings = inbox.rings();
        drop(inbox);
        if rings {
            self.bell.ring();
        }
    }

    fn listen(&self, confirms: usize) {
        let mut inbox = self.inbox();
        inbox.listens_for = confirms;
        self.tell(inbox);
    }

    /// Called on the publisher thread.
    pub(crate) fn is_main_patient(&self) -> bool {
        self.inbox().listens_for > 1
    }

    fn take(&self) -> (Vec<Event>, u64) {
        let mut inbox = self.inbox();
        (inbox.take(), inbox.failures)
    }
}

fn drop_oldest_state(inbox: &mut Vec<Event>, incoming: &Event) {
    let is_state = |e: &Event| matches!(e, Event::State(_));
    if is_state(incoming)
        && inbox.iter().filter(|e| is_state(e)).count() >= QUEUED_STATES_MAX
        && let Some(at) = inbox.iter().position(is_state)
    {
        inbox.remove(at);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn state(n: usize) -> Event {
        Event::State(ConnectionState::Blocked { reason: n.to_string() })
    }

    fn rings(shared: &Shared) -> bool {
        let mut poll = libc::pollfd {
            fd: shared.bell.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live pollfd.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }

    fn answered(handle: u64, outcome: Outcome) -> Event {
        Event::Outcomes(vec![Answered::now(handle, outcome)])
    }

    /// Handles of each event that brings outcomes.
    fn handles(events: &[Event]) -> Vec<Vec<u64>> {
        let outcomes = events.iter().filter_map(|event| match event {
            Event::Outcomes(outcomes) => Some(outcomes),
            _ => None,
        });
        outcomes
            .map(|some| some.iter().map(|answered| answered.handle).collect())
            .collect()
    }

    #[test]
    fn outcomes_are_merged_and_the_bell_rings_until_it_is_silenced() {
        let shared = Shared::new(Bell::new().unwrap());
        assert!(!rings(&shared));
        shared.push(answered(1, Outcome::Confirmed));
        shared.push(answered(2, Outcome::Nacked));
        assert!(rings(&shared));
        shared.bell.silence();
        assert_eq!(handles(&shared.take().0), [[1, 2]]);
        assert!(!rings(&shared));
    }

    #[test]
    fn confirms_wait_until_there_are_as_many_as_main_listens_for_and_nothing_else_waits() {
        let shared = Shared::new(Bell::new().unwrap());
        let take = || {
            shared.bell.silence();
            handles(&shared.take().0)
        };
        shared.listen(3);
        shared.push(answered(1, Outcome::Confirmed));
        shared.push(answered(2, Outcome::Confirmed));
        assert!(!rings(&shared));
        shared.push(answered(3, Outcome::Confirmed));
        assert!(rings(&shared));
        assert_eq!(take(), [[1, 2, 3]]);
        // What was taken counts no more, and no ring is lost to one that was heard.
        shared.push(answered(4, Outcome::Confirmed));
        assert!(!rings(&shared));
        for urgent in [answered(5, Outcome::Nacked), state(0), Event::Died(String::new())] {
            shared.push(urgent);
            assert!(rings(&shared));
            take();
            shared.push(answered(6, Outcome::Confirmed));
            assert!(!rings(&shared));
        }
    }

    #[test]
    fn who_begins_to_listen_for_less_hears_of_what_has_come_already() {
        let shared = Shared::new(Bell::new().unwrap());
        shared.listen(3);
        shared.push(answered(1, Outcome::Confirmed));
        shared.listen(2);
        assert!(!rings(&shared));
        shared.listen(1);
        assert!(rings(&shared));
        shared.bell.silence();
        shared.take();
        shared.listen(1);
        assert!(!rings(&shared), "nothing has come");
    }

    #[test]
    fn states_are_bounded_by_dropping_the_oldest_and_outcomes_are_never_dropped() {
        let shared = Shared::new(Bell::new().unwrap());
        shared.push(answered(1, Outcome::Confirmed));
        (0..QUEUED_STATES_MAX + 5).for_each(|n| shared.push(state(n)));
        let (events, _) = shared.take();
        assert_eq!(events.len(), QUEUED_STATES_MAX + 1);
        assert_eq!(handles(&events), [[1]]);
        assert_eq!(events[1], state(5));
    }
}
