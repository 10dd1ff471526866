//! What the worker's main thread and the publisher thread share: the events, and the waker that announces them. Made by
//! `publisher`, filled by `intake`.
//!
//! | crossing | direction | bound | when full |
//! |---|---|---|---|
//! | batches | main → thread | `QUEUED_BATCHES_MAX` | `try_publish` gives the batch back |
//! | outcomes | thread → main | 8 windows of undrained messages | `try_publish` gives the batch back |
//! | states | thread → main | `QUEUED_STATES_MAX` | the oldest is dropped |
//! | stop | main → thread | one value | overwritten |

use crate::event::{Answered, PublisherEvent};
use crate::{Outcome, Publication};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

/// The most states among the events. Outcomes are never dropped.
const QUEUED_STATES_MAX: usize = 32;

/// Wakes a worker when a publisher has events that match the worker's wake policy. All publishers of a worker share it.
/// The worker waits for it together with its latch.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is open and owned by no other value.
        Ok(Self(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// The event file descriptor: readable while events wait. Do not read or close it.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Resets the waker. Call this before the publishers are drained: events that arrive in between wake the worker
    /// again.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: reads at most 8 bytes into a live buffer. It fails with EAGAIN if the waker was not set.
        unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: writes 8 bytes from a live buffer. It fails only if the counter is full: the fd is readable then.
        unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }
}

/// A batch of messages on its way to the publisher thread.
pub(crate) struct Handed {
    pub(crate) batch: Vec<Publication>,
    /// The number of failures that the worker had drained when it handed the batch over.
    pub(crate) failures_seen: u64,
}

/// The state that both threads share; each has a reference to it.
pub(crate) struct Crossing {
    pub(crate) waker: Waker,
    /// Written by the publisher thread, emptied by the main thread. Locked only for a push or a take.
    inbox: Mutex<Inbox>,
    /// Whether there is any event. Written under the lock, and read without it.
    has_events: AtomicBool,
}

#[derive(Default)]
struct Inbox {
    events: Vec<PublisherEvent>,
    /// The number of failures reported so far.
    failures: u64,
    /// The number of confirms among the outcomes.
    confirms: usize,
    /// Whether there is any event other than confirms.
    is_urgent: bool,
    /// The main thread wants to be woken when this number of confirms waits; 0 = 1.
    wake_after: usize,
    /// Whether the main thread has been woken to take the events.
    is_woken: bool,
}

impl Inbox {
    /// Adds an event other than outcomes.
    fn put(&mut self, event: PublisherEvent) {
        self.is_urgent = true;
        drop_oldest_state(&mut self.events, &event);
        self.events.push(event);
    }

    fn put_outcomes(&mut self, outcomes: &mut Vec<Answered>) {
        let confirms = outcomes.iter().filter(|one| one.outcome == Outcome::Confirmed).count();
        self.confirms += confirms;
        self.is_urgent |= confirms < outcomes.len();
        if !matches!(self.events.last(), Some(PublisherEvent::Outcomes(_))) {
            let usual = self.wake_after.max(outcomes.len());
            self.events.push(PublisherEvent::Outcomes(Vec::with_capacity(usual)));
        }
        if let Some(PublisherEvent::Outcomes(last)) = self.events.last_mut() {
            last.append(outcomes);
        }
    }

    /// Whether the main thread must be woken now. It is woken once: it clears the waker and then takes all events.
    fn wakes(&mut self) -> bool {
        let wakes = !self.is_woken && (self.is_urgent || self.confirms >= self.wake_after.max(1));
        self.is_woken |= wakes;
        wakes
    }

    fn take(&mut self) -> Vec<PublisherEvent> {
        (self.confirms, self.is_urgent, self.is_woken) = (0, false, false);
        std::mem::take(&mut self.events)
    }
}

impl Crossing {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            waker,
            inbox: Mutex::default(),
            has_events: AtomicBool::new(false),
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds an event other than outcomes. Called on the publisher thread.
    pub(crate) fn push(&self, event: PublisherEvent) {
        let mut inbox = self.inbox();
        inbox.put(event);
        self.wake_if_due(inbox);
    }

    /// Takes the outcomes, of which there is at least one. `failures` is the total so far, including theirs. Both are
    /// stored together: a worker that takes the outcomes has also seen the failures. Called on the publisher thread.
    pub(crate) fn push_outcomes(&self, outcomes: &mut Vec<Answered>, failures: u64) {
        let mut inbox = self.inbox();
        inbox.failures = failures;
        inbox.put_outcomes(outcomes);
        self.wake_if_due(inbox);
    }

    fn wake_if_due(&self, mut inbox: MutexGuard<'_, Inbox>) {
        let wakes = inbox.wakes();
        self.has_events.store(!inbox.events.is_empty(), SeqCst);
        drop(inbox);
        if wakes {
            self.waker.wake();
        }
    }

    pub(crate) fn wake_after(&self, confirms: usize) {
        let mut inbox = self.inbox();
        inbox.wake_after = confirms;
        self.wake_if_due(inbox);
    }

    /// Called on the publisher thread.
    pub(crate) fn main_lets_confirms_wait(&self) -> bool {
        self.inbox().wake_after > 1
    }

    pub(crate) fn has_events(&self) -> bool {
        self.has_events.load(SeqCst)
    }

    pub(crate) fn take(&self) -> (Vec<PublisherEvent>, u64) {
        let mut inbox = self.inbox();
        self.has_events.store(false, SeqCst);
        (inbox.take(), inbox.failures)
    }
}

fn drop_oldest_state(inbox: &mut Vec<PublisherEvent>, incoming: &PublisherEvent) {
    let is_state = |e: &PublisherEvent| matches!(e, PublisherEvent::State(_));
    if is_state(incoming)
        && inbox.iter().filter(|e| is_state(e)).count() >= QUEUED_STATES_MAX
        && let Some(at) = inbox.iter().position(is_state)
    {
        inbox.remove(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::ConnectionState;

    fn state(n: usize) -> PublisherEvent {
        PublisherEvent::State(ConnectionState::Blocked { reason: n.to_string() })
    }

    fn wakes(shared: &Crossing) -> bool {
        let mut poll = libc::pollfd {
            fd: shared.waker.fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live pollfd.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }

    fn answer(shared: &Crossing, handle: u64, outcome: Outcome) {
        shared.push_outcomes(&mut vec![Answered::now(handle, outcome)], 0);
    }

    /// The handles of the outcomes in each event.
    fn handles(events: &[PublisherEvent]) -> Vec<Vec<u64>> {
        let outcomes = events.iter().filter_map(|event| match event {
            PublisherEvent::Outcomes(outcomes) => Some(outcomes),
            _ => None,
        });
        outcomes
            .map(|some| some.iter().map(|answered| answered.handle).collect())
            .collect()
    }

    #[test]
    fn outcomes_are_merged_and_the_waker_stays_set_until_it_is_cleared() {
        let shared = Crossing::new(Waker::new().unwrap());
        assert!(!wakes(&shared));
        answer(&shared, 1, Outcome::Confirmed);
        answer(&shared, 2, Outcome::Nacked);
        assert!(wakes(&shared));
        shared.waker.clear();
        assert_eq!(handles(&shared.take().0), [[1, 2]]);
        assert!(!wakes(&shared));
    }

    #[test]
    fn confirms_wait_until_main_wants_that_many_and_other_events_wake_at_once() {
        let shared = Crossing::new(Waker::new().unwrap());
        let take = || {
            shared.waker.clear();
            handles(&shared.take().0)
        };
        shared.wake_after(3);
        answer(&shared, 1, Outcome::Confirmed);
        answer(&shared, 2, Outcome::Confirmed);
        assert!(!wakes(&shared));
        answer(&shared, 3, Outcome::Confirmed);
        assert!(wakes(&shared));
        assert_eq!(take(), [[1, 2, 3]]);
        // Events that were taken no longer count, and no wake-up is lost to an earlier one.
        answer(&shared, 4, Outcome::Confirmed);
        assert!(!wakes(&shared));
        let urgent: [&dyn Fn(); 3] = [
            &|| answer(&shared, 5, Outcome::Nacked),
            &|| shared.push(state(0)),
            &|| shared.push(PublisherEvent::Ended(None)),
        ];
        for push in urgent {
            push();
            assert!(wakes(&shared));
            take();
            answer(&shared, 6, Outcome::Confirmed);
            assert!(!wakes(&shared));
        }
    }

    #[test]
    fn a_lower_wake_threshold_counts_the_confirms_that_already_wait() {
        let shared = Crossing::new(Waker::new().unwrap());
        shared.wake_after(3);
        answer(&shared, 1, Outcome::Confirmed);
        shared.wake_after(2);
        assert!(!wakes(&shared));
        shared.wake_after(1);
        assert!(wakes(&shared));
        shared.waker.clear();
        shared.take();
        shared.wake_after(1);
        assert!(!wakes(&shared), "no events wait");
    }

    #[test]
    fn states_are_bounded_by_dropping_the_oldest_and_outcomes_are_never_dropped() {
        let shared = Crossing::new(Waker::new().unwrap());
        answer(&shared, 1, Outcome::Confirmed);
        (0..QUEUED_STATES_MAX + 5).for_each(|n| shared.push(state(n)));
        let (events, _) = shared.take();
        assert_eq!(events.len(), QUEUED_STATES_MAX + 1);
        assert_eq!(handles(&events), [[1]]);
        assert_eq!(events[1], state(5));
    }
}
