//! The request threads and idle connections of all HTTP destinations of a worker: which request gets a thread, and when
//! threads and connections end.
//!
//! Used on the publisher thread alone, by each transport and by `publisher_thread`.
//!
//! A request holds a thread until it is answered, so destinations that hang can hold many of them for a whole timeout.
//! Those that work must get a thread nevertheless, and a thousand of them few threads. Four rules decide:
//!
//! - **Young requests are few.** A request counts as young for its first `YOUNG`. Most are answered by then, so
//!   `YOUNG_MAX` threads serve any number of destinations that answer. One that is not answered by then waits for its
//!   peer and not for this machine. It counts no more, and the pool grows by a thread.
//! - **Who has had a share leaves the rest.** The upper half of the pool is only for the first request of a
//!   destination that is not known to be slow. So neither a destination with many requests at a time nor those that
//!   hang again and again can take the last thread.
//! - **First come, first served** among those that wait by these rules.
//! - **A full pool cuts its oldest first request** after `PATIENCE`, while another one waits. Its destination is slow
//!   then. So destinations that hang before anybody knows delay others by `PATIENCE` for each `THREADS_MAX` of them.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::rc::Rc;
use std::sync::mpsc as std_mpsc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// The most request threads. With a socket each, they fit into the 1,024 descriptors that many systems allow a process.
const THREADS_MAX: usize = 384;
/// The most young requests. Not below the highest `concurrency` of a destination.
const YOUNG_MAX: usize = 64;
/// Most receivers answer within this time. Shorter, a busy machine would start threads for requests that only wait for
/// the processor.
const YOUNG: Duration = Duration::from_millis(200);
/// A destination whose last request failed after a longer time is slow.
const SLOW: Duration = Duration::from_secs(1);
/// How long the first request of a destination keeps its thread while another destination needs it.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long an idle connection or thread is kept. Servers close idle connections, some after 5 s. The thread notices
/// that, except for a connection that is closed just now.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(15);
/// The most idle connections. Another one takes the place of the one that is idle for longest.
const KEPT_MAX: usize = 64;
/// How long no thread is started after the system has refused one.
const REFUSED: Duration = Duration::from_millis(100);
/// The stack size of a request thread: ureq, rustls and the code that they call. A debug build uses a quarter of it.
const STACK_BYTES: usize = 2 << 20;

/// Whether a request that failed after this time shows that its destination is slow.
pub(crate) fn is_slow(elapsed: Duration) -> bool {
    elapsed >= SLOW
}

/// Whether a request gets a thread now. `busy`: the threads that have a request; `young`: those of them with a young
/// one. `has_share`: another request of the destination is on its way, or the destination is slow.
fn admits(busy: usize, young: usize, has_share: bool) -> bool {
    let limit = match has_share {
        true => THREADS_MAX / 2,
        false => THREADS_MAX,
    };
    young < YOUNG_MAX && busy < limit
}

/// A request. It must not panic.
pub(crate) type Job = Box<dyn FnOnce() + Send>;
/// Ends the wait of a request.
pub(crate) type Cut = Box<dyn Fn()>;
/// An idle connection of a destination: what `http` makes of it.
type KeptConnection = Box<dyn Any>;

struct Kept {
    owner: u64,
    since: Instant,
    connection: KeptConnection,
}

type Jobs = std_mpsc::Sender<Job>;

#[derive(Default)]
pub struct RequestPool {
    state: RefCell<PoolState>,
    /// Tells `tend` that there is something to tend.
    changed: Notify,
    /// Whether `tend` waits for a time.
    is_tended: Cell<bool>,
}

#[derive(Default)]
struct PoolState {
    last_id: u64,
    /// The requests that have a thread, in the order in which they got it.
    busy: BTreeMap<u64, Busy>,
    /// The destinations that wait for a thread, and whether each has had a share.
    waiting: VecDeque<(bool, Rc<Turn>)>,
    /// Idle threads as a stack. The thread that was used last is used first, so the others end.
    idle: Vec<(Instant, Jobs)>,
    /// The newest last.
    kept: VecDeque<Kept>,
    /// No thread is started before this time.
    refused_until: Option<Instant>,
}

struct Busy {
    since: Instant,
    has_share: bool,
    is_cut: bool,
    cut: Option<Cut>,
}

impl PoolState {
    /// The number of young requests. None: no thread is left, and the system refuses to start one.
    fn young(&self, now: Instant) -> Option<usize> {
        let young = (self.busy.values().rev()).take_while(|busy| now < busy.since + YOUNG);
        let may_start = !self.idle.is_empty() || self.refused_until.is_none_or(|until| now >= until);
        may_start.then(|| young.count())
    }

    fn begin(&mut self, has_share: bool, now: Instant) -> u64 {
        self.last_id += 1;
        let busy = Busy {
            since: now,
            has_share,
            is_cut: false,
            cut: None,
        };
        self.busy.insert(self.last_id, busy);
        self.last_id
    }

    /// How many first requests wait because the pool is full, while no other one was cut for them.
    fn short_of(&self) -> usize {
        if self.busy.len() < THREADS_MAX {
            return 0;
        }
        let waiting = self.waiting.iter().filter(|(has_share, _)| !has_share).count();
        let cut = self.busy.values().filter(|busy| busy.is_cut).count();
        waiting.saturating_sub(cut)
    }

    /// The first requests that may be cut, the oldest first.
    fn first_requests(&mut self) -> impl Iterator<Item = &mut Busy> {
        (self.busy.values_mut()).filter(|busy| !busy.has_share && !busy.is_cut && busy.cut.is_some())
    }

    fn cut_oldest(&mut self, now: Instant) {
        let short_of = self.short_of();
        let is_old = |busy: &&mut Busy| now >= busy.since + PATIENCE;
        for busy in self.first_requests().take_while(is_old).take(short_of) {
            busy.is_cut = true;
            if let Some(cut) = busy.cut.take() {
                cut();
            }
        }
    }
}

/// A destination's place among those that wait for a thread.
#[derive(Default)]
pub(crate) struct Turn {
    is_waiting: Cell<bool>,
    slot: Cell<Option<ThreadSlot>>,
    came: Notify,
}

impl Turn {
    /// Completes once the destination should ask again.
    pub(crate) async fn comes(&self) {
        self.came.notified().await;
    }
}

/// A turn that ends with its owner.
struct TurnGuard(Rc<RequestPool>, Rc<Turn>);

impl Drop for TurnGuard {
    fn drop(&mut self) {
        self.0.leave(&self.1);
    }
}

/// The right to use one thread. Dropping it gives the thread up: it ends with its request.
pub(crate) struct ThreadSlot {
    pool: Rc<RequestPool>,
    id: u64,
    began: Instant,
    thread: Option<Jobs>,
}

impl ThreadSlot {
    /// How long the request takes so far.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Takes an idle thread or starts one. Err: there is neither. Others may end and make room, if `has_others`.
    pub(crate) fn prepare(&mut self) -> Result<(), (io::Error, bool)> {
        let idle = self.pool.state.borrow_mut().idle.pop();
        match idle.map_or_else(start_thread, |(_, jobs)| Ok(jobs)) {
            Ok(thread) => {
                self.thread = Some(thread);
                Ok(())
            }
            Err(error) => {
                let mut state = self.pool.state.borrow_mut();
                state.refused_until = Some(Instant::now() + REFUSED);
                Err((error, state.busy.len() > 1))
            }
        }
    }

    /// Starts the request on the thread. `cut` is called if another destination needs the thread.
    pub(crate) fn begin(&mut self, job: Job, cut: Cut) {
        self.began = Instant::now();
        if let Some(busy) = self.pool.state.borrow_mut().busy.get_mut(&self.id) {
            busy.cut = Some(cut);
        }
        if let Some(thread) = &self.thread {
            // The thread ends only when its channel closes, so the send cannot fail.
            let _ = thread.send(job);
        }
    }

    /// Ends the request, or goes without one: the thread is idle.
    pub(crate) fn end(mut self) {
        if let Some(thread) = self.thread.take() {
            self.pool.state.borrow_mut().idle.push((Instant::now(), thread));
            self.pool.is_to_be_tended();
        }
    }
}

impl Drop for ThreadSlot {
    fn drop(&mut self) {
        self.pool.state.borrow_mut().busy.remove(&self.id);
        self.pool.give_turns(Instant::now());
    }
}

/// Starts a request thread. It inherits the blocked signals of this thread.
fn start_thread() -> io::Result<Jobs> {
    let (jobs, jobs_rx) = std_mpsc::channel();
    let thread = std::thread::Builder::new()
        .name("outbox-http".to_owned())
        .stack_size(STACK_BYTES);
    thread.spawn(move || jobs_rx.into_iter().for_each(|job: Job| job()))?;
    Ok(jobs)
}

impl RequestPool {
    /// A number for a destination.
    pub(crate) fn new_owner(&self) -> u64 {
        let mut state = self.state.borrow_mut();
        state.last_id += 1;
        state.last_id
    }

    /// Returns the right to use a thread. None: `turn` waits for it, and then `Turn::comes` completes.
    pub(crate) fn ask(self: &Rc<Self>, turn: &Rc<Turn>, has_share: bool) -> Option<ThreadSlot> {
        let granted = turn.slot.take();
        if granted.is_some() || turn.is_waiting.get() {
            return granted;
        }
        let now = Instant::now();
        self.give_turns(now);
        let mut state = self.state.borrow_mut();
        if state
            .young(now)
            .is_some_and(|young| admits(state.busy.len(), young, has_share))
        {
            let id = state.begin(has_share, now);
            drop(state);
            return Some(self.slot(id, now));
        }
        turn.is_waiting.set(true);
        state.waiting.push_back((has_share, Rc::clone(turn)));
        self.changed.notify_one();
        None
    }

    /// Waits for the right to connect to a broker. lapin has a thread for it, so it counts as a request.
    pub(crate) async fn wait_for_slot(self: &Rc<Self>, is_slow: bool) -> ThreadSlot {
        let guard = TurnGuard(Rc::clone(self), Rc::default());
        loop {
            if let Some(slot) = self.ask(&guard.1, is_slow) {
                return slot;
            }
            guard.1.comes().await;
        }
    }

    /// Ends the wait of a destination that wants no thread now.
    pub(crate) fn leave(&self, turn: &Rc<Turn>) {
        if turn.is_waiting.take() {
            let mut state = self.state.borrow_mut();
            state.waiting.retain(|(_, waiting)| !Rc::ptr_eq(waiting, turn));
        }
        drop(turn.slot.take());
    }

    fn slot(self: &Rc<Self>, id: u64, began: Instant) -> ThreadSlot {
        let (pool, thread) = (Rc::clone(self), None);
        ThreadSlot {
            pool,
            id,
            began,
            thread,
        }
    }

    /// Gives threads to the destinations that wait.
    fn give_turns(self: &Rc<Self>, now: Instant) {
        let mut state = self.state.borrow_mut();
        if state.waiting.is_empty() {
            return;
        }
        let Some(mut young) = state.young(now) else { return };
        let mut at = 0;
        while young < YOUNG_MAX
            && let Some(&(has_share, _)) = state.waiting.get(at)
        {
            if !admits(state.busy.len(), young, has_share) {
                at += 1;
                continue;
            }
            young += 1;
            let id = state.begin(has_share, now);
            if let Some((_, turn)) = state.waiting.remove(at) {
                turn.is_waiting.set(false);
                turn.slot.set(Some(self.slot(id, now)));
                turn.came.notify_one();
            }
        }
        state.cut_oldest(now);
    }

    // ---- connections ------------------------------------------------------------------------------------------------

    /// Takes the connection that `owner` used last.
    pub(crate) fn take_connection(&self, owner: u64) -> Option<KeptConnection> {
        let mut state = self.state.borrow_mut();
        let at = state.kept.iter().rposition(|kept| kept.owner == owner)?;
        state.kept.remove(at).map(|kept| kept.connection)
    }

    pub(crate) fn keep_connection(&self, owner: u64, connection: KeptConnection) {
        let mut state = self.state.borrow_mut();
        if state.kept.len() >= KEPT_MAX {
            state.kept.pop_front();
        }
        let since = Instant::now();
        state.kept.push_back(Kept {
            owner,
            since,
            connection,
        });
        drop(state);
        self.is_to_be_tended();
    }

    /// Closes the idle connections of all destinations: this process has no descriptor left.
    pub(crate) fn close_connections(&self) {
        self.state.borrow_mut().kept.clear();
    }

    /// Closes the idle connections of a destination.
    pub(crate) fn forget(&self, owner: u64) {
        self.state.borrow_mut().kept.retain(|kept| kept.owner != owner);
    }

    // ---- time -------------------------------------------------------------------------------------------------------

    fn is_to_be_tended(&self) {
        if !self.is_tended.get() {
            self.changed.notify_one();
        }
    }

    /// Ends what is idle for long, and gives the turns that come with time. Never completes.
    pub(crate) async fn tend(self: &Rc<Self>) {
        loop {
            let now = Instant::now();
            self.give_turns(now);
            let due = self.tidy(now);
            self.is_tended.set(due.is_some());
            tokio::select! {
                () = sleep_until(due.unwrap_or(now)), if due.is_some() => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// Ends what is idle for long. Returns when the next thing is due.
    fn tidy(&self, now: Instant) -> Option<Instant> {
        let state = &mut *self.state.borrow_mut();
        state.idle.retain(|(since, _)| now < *since + IDLE_MAX);
        state.kept.retain(|kept| now < kept.since + IDLE_MAX);
        let first_idle = state.idle.iter().map(|(since, _)| *since).min();
        let idle = first_idle.into_iter().chain(state.kept.front().map(|kept| kept.since));
        let ages = (state.busy.values())
            .map(|busy| busy.since + YOUNG)
            .find(|ages| *ages > now);
        let is_short = state.short_of() > 0;
        let cut = (state.first_requests().next())
            .map(|oldest| oldest.since + PATIENCE)
            .filter(|_| is_short);
        let turn = (ages.into_iter().chain(cut).chain(state.refused_until)).filter(|due| *due > now);
        let turn = turn.filter(|_| !state.waiting.is_empty());
        idle.map(|since| since + IDLE_MAX).chain(turn).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: bool = false;
    const ANOTHER: bool = true;

    #[test]
    fn the_upper_half_is_for_first_requests_of_destinations_that_are_not_slow() {
        for busy in 0..=THREADS_MAX {
            let is_free = busy < THREADS_MAX;
            assert_eq!(admits(busy, 0, FIRST), is_free, "{busy}");
            assert_eq!(admits(busy, 0, ANOTHER), busy < THREADS_MAX / 2, "{busy}");
            assert!(!admits(busy, YOUNG_MAX, FIRST));
        }
    }

    fn turns(count: usize) -> Vec<Rc<Turn>> {
        (0..count).map(|_| Rc::default()).collect()
    }

    fn later(pool: &Rc<RequestPool>) -> Instant {
        let state = pool.state.borrow();
        let since = state.busy.values().map(|busy| busy.since);
        since.max().expect("a request") + YOUNG
    }

    #[test]
    fn a_request_that_is_no_longer_young_makes_room_for_another() {
        let pool = Rc::new(RequestPool::default());
        let turns = turns(YOUNG_MAX + 2);
        let mut slots: Vec<ThreadSlot> = turns.iter().filter_map(|turn| pool.ask(turn, FIRST)).collect();
        if slots.len() > YOUNG_MAX {
            return; // the machine stood still for longer than a request is young
        }
        let (last, next) = (&turns[YOUNG_MAX + 1], &turns[YOUNG_MAX]);
        assert!(next.is_waiting.get() && last.is_waiting.get());
        drop(slots.pop());
        assert!(pool.ask(last, FIRST).is_none(), "the other one came first");
        slots.push(pool.ask(next, FIRST).expect("a turn"));
        pool.give_turns(later(&pool));
        assert!(pool.ask(last, FIRST).is_some());
    }

    #[test]
    fn a_destination_that_works_passes_those_that_are_slow_and_wait() {
        let pool = Rc::new(RequestPool::default());
        let (slow, works) = (turns(THREADS_MAX), turns(1));
        let mut slots = Vec::new();
        for turn in &slow {
            slots.extend(pool.ask(turn, ANOTHER));
        }
        while pool.state.borrow().busy.len() < THREADS_MAX / 2 {
            pool.give_turns(later(&pool));
            slots.extend(slow.iter().filter_map(|turn| turn.slot.take()));
        }
        pool.give_turns(later(&pool));
        assert_eq!(
            pool.state.borrow().busy.len(),
            THREADS_MAX / 2,
            "as many as may be slow"
        );
        assert!(pool.state.borrow().waiting.len() == THREADS_MAX / 2);
        let asked = pool.ask(&works[0], FIRST);
        pool.give_turns(later(&pool));
        assert!(asked.is_some() || works[0].slot.take().is_some());
        slow.iter().for_each(|turn| pool.leave(turn));
        assert!(pool.state.borrow().waiting.is_empty());
    }

    #[test]
    fn a_full_pool_cuts_the_oldest_request_of_a_destination_that_is_not_slow() {
        let pool = Rc::new(RequestPool::default());
        let (hanging, others) = (turns(THREADS_MAX), turns(2));
        let cut = Rc::new(RefCell::new(Vec::new()));
        let mut slots = Vec::new();
        for (number, turn) in hanging.iter().enumerate() {
            let mut slot = pool.ask(turn, number < 10).unwrap_or_else(|| {
                pool.give_turns(later(&pool));
                turn.slot.take().expect("a turn")
            });
            let cut = Rc::clone(&cut);
            slot.begin(Box::new(|| {}), Box::new(move || cut.borrow_mut().push(number)));
            slots.push(slot);
        }
        assert!(pool.ask(&others[0], FIRST).is_none());
        let oldest = pool
            .state
            .borrow_mut()
            .first_requests()
            .next()
            .expect("a request")
            .since;
        pool.give_turns(oldest + PATIENCE - YOUNG);
        assert!(cut.borrow().is_empty(), "each has its time");
        (0..2).for_each(|_| pool.give_turns(oldest + PATIENCE));
        assert_eq!(*cut.borrow(), [10], "one for each that waits");
        assert!(pool.ask(&others[1], ANOTHER).is_none());
        pool.give_turns(oldest + PATIENCE);
        assert_eq!(*cut.borrow(), [10], "none for one that has a share");
        drop(slots.remove(10));
        pool.give_turns(later(&pool));
        assert!(pool.ask(&others[0], FIRST).is_some());
    }

    #[test]
    fn idle_connections_are_bounded_and_closed_in_time() {
        let pool = RequestPool::default();
        let socket = Rc::new(());
        let connection = || Box::new(Rc::clone(&socket));
        let open = || Rc::strong_count(&socket) - 1;
        (0..2 * KEPT_MAX as u64).for_each(|owner| pool.keep_connection(owner, connection()));
        assert_eq!(open(), KEPT_MAX);
        assert!(pool.take_connection(0).is_none(), "the oldest is closed");
        assert!(pool.take_connection(2 * KEPT_MAX as u64 - 1).is_some());
        let due = pool.tidy(Instant::now()).expect("a time");
        pool.tidy(due + IDLE_MAX);
        assert_eq!(open(), 0);
    }
}
