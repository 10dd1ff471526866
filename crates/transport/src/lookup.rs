//! Which addresses does the host of a destination have, and which of them is tried next?
//!
//! A lookup runs on a thread `outbox-resolve`, because getaddrinfo cannot be interrupted, and can hang for half a minute.
//! It leaves one thread behind then, not one for each attempt. `connected` waits for it on the publisher thread, `http`
//! on its request threads.

use crate::addresses::{AddressOrder, AddressRound};
use crate::down::{DownReason, Fault, lookup_fault};
use crate::ssrf::AllowList;
use crate::url::Endpoint;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

/// How long a connection to a host with a name lives. The next one finds where the name leads by then.
pub(crate) const CONNECTION_LIFE: Duration = Duration::from_secs(600);
/// The stack size for getaddrinfo and the modules that it loads.
const LOOKUP_STACK_BYTES: usize = 2 << 20;
/// The longest time for which the result of a slow lookup is used again.
const REUSED_MAX: Duration = Duration::from_secs(60);

/// Resolves a host, and may block.
pub type Resolver = Arc<dyn Fn(&Endpoint) -> io::Result<Vec<SocketAddr>> + Send + Sync>;

/// getaddrinfo.
pub(crate) fn system_resolver() -> Resolver {
    Arc::new(|endpoint| Ok((endpoint.host.as_str(), endpoint.port).to_socket_addrs()?.collect()))
}

/// The lookups of all destinations of a worker. Used on the publisher thread.
pub struct Lookups {
    resolver: Resolver,
    hosts: RefCell<HashMap<Endpoint, Weak<HostLookup>>>,
}

impl Lookups {
    pub(crate) fn new(resolver: Resolver) -> Self {
        let hosts = RefCell::default();
        Self { resolver, hosts }
    }

    /// The host of a destination. Destinations with the same one share its lookups.
    pub(crate) fn host(&self, endpoint: &Endpoint, allow: &AllowList) -> Host {
        let mut hosts = self.hosts.borrow_mut();
        let known = hosts.get(endpoint).and_then(Weak::upgrade);
        let lookup = known.unwrap_or_else(|| {
            hosts.retain(|_, lookup| lookup.strong_count() > 0);
            let lookup = Arc::new(HostLookup::new(endpoint.clone(), Arc::clone(&self.resolver)));
            hosts.insert(endpoint.clone(), Arc::downgrade(&lookup));
            lookup
        });
        Host {
            lookup,
            allow: allow.clone(),
            order: Mutex::default(),
        }
    }
}

// ---- lookup ---------------------------------------------------------------------------------------------------------

type Found = Result<Vec<SocketAddr>, Fault>;

/// Resolves one host, with one lookup at a time for all that wait.
struct HostLookup {
    endpoint: Endpoint,
    /// The address, if the host is no name.
    literal: Option<SocketAddr>,
    resolver: Resolver,
    state: Mutex<LookupState>,
    changed: Condvar,
}

struct LookupState {
    is_running: bool,
    ended: u64,
    found: Found,
    /// Until when `found` is used again. A lookup that takes longer than a connect may would never be of use otherwise.
    reused_until: Option<Instant>,
    wakers: Vec<Waker>,
}

impl HostLookup {
    fn new(endpoint: Endpoint, resolver: Resolver) -> Self {
        let literal = endpoint.host.parse::<IpAddr>().ok();
        Self {
            literal: literal.map(|address| SocketAddr::new(address, endpoint.port)),
            endpoint,
            resolver,
            state: Mutex::new(LookupState {
                is_running: false,
                ended: 0,
                found: Ok(Vec::new()),
                reused_until: None,
                wakers: Vec::new(),
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, LookupState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the result, if there is one that may be used. `before` is the number of lookups that had ended when the
    /// caller asked first; then a lookup is started.
    fn poll(self: &Arc<Self>, state: &mut LookupState, before: &mut Option<u64>) -> Option<Found> {
        if let Some(literal) = self.literal {
            return Some(Ok(vec![literal]));
        }
        match *before {
            Some(before) => (state.ended > before).then(|| state.found.clone()),
            None if state.reused_until.is_some_and(|until| Instant::now() < until) => Some(state.found.clone()),
            None => {
                if !state.is_running {
                    if let Err(error) = self.start() {
                        return Some(Err(lookup_fault(&error)));
                    }
                    state.is_running = true;
                }
                *before = Some(state.ended);
                None
            }
        }
    }

    /// Starts a lookup. The thread inherits the blocked signals.
    fn start(self: &Arc<Self>) -> io::Result<()> {
        let lookup = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("outbox-resolve".to_owned())
            .stack_size(LOOKUP_STACK_BYTES);
        thread.spawn(move || {
            let started = Instant::now();
            let found = (lookup.resolver)(&lookup.endpoint).map_err(|error| lookup_fault(&error));
            let elapsed = started.elapsed().min(REUSED_MAX);
            let wakers = {
                let mut state = lookup.state();
                state.reused_until = found.is_ok().then(|| Instant::now() + elapsed);
                state.found = found;
                state.is_running = false;
                state.ended += 1;
                std::mem::take(&mut state.wakers)
            };
            wakers.into_iter().for_each(Waker::wake);
            lookup.changed.notify_all();
        })?;
        Ok(())
    }

    /// The addresses.
    async fn found(self: &Arc<Self>) -> Found {
        let mut before = None;
        poll_fn(|context| {
            let mut state = self.state();
            if let Some(found) = self.poll(&mut state, &mut before) {
                return Poll::Ready(found);
            }
            if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                state.wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// The addresses; blocks. None = `until` has passed, or `is_cut`.
    fn wait(self: &Arc<Self>, until: Instant, is_cut: impl Fn() -> bool) -> Option<Found> {
        let mut before = None;
        let mut state = self.state();
        loop {
            let found = self.poll(&mut state, &mut before);
            let left = until.saturating_duration_since(Instant::now());
            if found.is_some() || left.is_zero() || is_cut() {
                return found;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
    }

    fn wake(&self) {
        // Locked for a moment: a thread that has just checked whether its connection is cut now waits for the
        // condition.
        drop(self.state());
        self.changed.notify_all();
    }
}

// ---- the host of a destination --------------------------------------------------------------------------------------

/// The host of a destination: its lookup, and what its addresses have done so far.
pub(crate) struct Host {
    lookup: Arc<HostLookup>,
    allow: AllowList,
    order: Mutex<AddressOrder>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.lookup.endpoint)
    }
}

impl Host {
    /// How long a connection lives: for an address for ever, for a name up to `longest`. Those that began together end
    /// one after the other.
    pub(crate) fn life(&self, longest: Duration) -> Option<Duration> {
        let dice = RandomState::new().hash_one(()) as u8;
        let part = longest / 4 * u32::from(dice) / 256;
        self.lookup.literal.is_none().then(|| longest - part)
    }

    /// The addresses that may be reached.
    pub(crate) async fn addresses(&self, limit: Duration) -> Found {
        let found = tokio::time::timeout(limit, self.lookup.found()).await;
        self.permitted(found.ok())
    }

    /// Waits for the addresses until `until`, or until `is_cut`, which is asked again after `wake`.
    pub(crate) fn addresses_blocking(&self, until: Instant, is_cut: impl Fn() -> bool) -> Found {
        self.permitted(self.lookup.wait(until, is_cut))
    }

    fn permitted(&self, found: Option<Found>) -> Found {
        let too_slow = || Fault::new(DownReason::UNREACHABLE, "resolving the host takes too long");
        self.allow
            .permitted(&self.lookup.endpoint.host, found.ok_or_else(too_slow)??)
    }

    /// Begins a connect that may last until `until`.
    pub(crate) fn connect(&self, addresses: Vec<SocketAddr>, until: Instant) -> Connect<'_> {
        Connect {
            host: self,
            round: self.order().round(addresses, until),
            fault: Fault::new(DownReason::UNREACHABLE, ""),
        }
    }

    /// Wakes those that wait in `addresses_blocking`.
    pub(crate) fn wake(&self) {
        self.lookup.wake();
    }

    /// Records that a connection to this address was of no use: the next connect begins with another one.
    pub(crate) fn failed(&self, address: SocketAddr) {
        self.order().failed(address);
    }

    pub(crate) fn answered(&self, address: SocketAddr) {
        self.order().answered(address);
    }

    /// The same host, for a connect that begins with another address.
    pub(crate) fn apart_from(&self, address: SocketAddr) -> Self {
        let mut order = self.order().clone();
        order.failed(address);
        Self {
            lookup: Arc::clone(&self.lookup),
            allow: self.allow.clone(),
            order: Mutex::new(order),
        }
    }

    fn order(&self) -> MutexGuard<'_, AddressOrder> {
        self.order.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// One connect to a host: its addresses one after the other, until one answers.
pub(crate) struct Connect<'a> {
    host: &'a Host,
    round: AddressRound,
    /// The failure that says most, of all addresses so far.
    fault: Fault,
}

impl Connect<'_> {
    /// The next address, and the time limit for all steps of connecting to it.
    pub(crate) fn next(&mut self) -> Option<(SocketAddr, Duration)> {
        // With no descriptor or port left, another address fails as well.
        let is_ours = self.fault.reason == DownReason::PROCESS_LIMIT;
        if is_ours { None } else { self.round.next(Instant::now()) }
    }

    pub(crate) fn failed(&mut self, address: SocketAddr, fault: Fault) {
        if fault.reason != DownReason::PROCESS_LIMIT {
            self.host.failed(address);
        }
        // What a peer answers says more than that another one does not.
        let says_little = |reason| {
            matches!(
                reason,
                DownReason::UNREACHABLE | DownReason::TIMEOUT | DownReason::CLOSED
            )
        };
        self.round.failed(address, fault.finding.detail.clone());
        if says_little(self.fault.reason) || !says_little(fault.reason) {
            self.fault = fault;
        }
    }

    /// Why no address could be used.
    pub(crate) fn fault(&self) -> Fault {
        self.fault.clone().detailed(|_| self.round.reasons())
    }
}
