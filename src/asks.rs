//! What a session asks the workers of its database for, in shared memory: one pass (outbox_tick), or delivery up to a seq
//! (outbox_relay). A session never delivers by itself: it asks, wakes the workers, and waits for their answers. One session
//! of a database asks at a time; what it asks for holds only as long as it waits. Nothing here is an authority, as in
//! `shmem`.

use crate::pg::latch;
use crate::shmem;
use outbox_core::engine::Errand;
use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// Of one database.
#[repr(C)]
pub struct Ask {
    /// Process number + 1 of the session that asks, negative while it still writes; 0 = nobody. Written by it.
    asker: AtomicI32,
    /// Grows with each ask. Written by who asks.
    ticket: AtomicU32,
    /// Up to which seq it wants delivery; 0 = it wants a tick. Written by who asks.
    reach: AtomicI64,
}

/// Of one worker. Written by it.
#[repr(C)]
pub struct Answer {
    /// The ask that it heard last, and the one that it is done with.
    heard: AtomicU32,
    done: AtomicU32,
    figures: [AtomicI64; Report::FIGURES],
}

/// What a worker says of its pass.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
    pub duration_us: u64,
    pub backoff_ms: u32,
    pub renewed_heartbeat: bool,
    pub purged_stale: i64,
    pub active_workers: usize,
    pub desired: usize,
    pub owned: usize,
    pub leased: usize,
    pub released: usize,
}

impl Report {
    pub const FIGURES: usize = 12;

    /// In the order that outbox_internal.ask_workers() and outbox_ticks read them in.
    pub fn figures(&self) -> [i64; Self::FIGURES] {
        [
            self.claimed as i64,
            self.published as i64,
            self.failed as i64,
            self.duration_us as i64,
            i64::from(self.backoff_ms),
            i64::from(self.renewed_heartbeat),
            self.purged_stale,
            self.active_workers as i64,
            self.desired as i64,
            self.owned as i64,
            self.leased as i64,
            self.released as i64,
        ]
    }

    /// Whether there is more to tell than that the worker lives.
    pub fn says_something(&self) -> bool {
        self.claimed + self.published + self.failed > 0 || self.purged_stale > 0 || self.leased + self.released > 0
    }
}

// ---- a worker -------------------------------------------------------------------------------------------------------

impl Ask {
    /// What is asked for at this moment, with its ticket.
    pub fn now(&self) -> Option<(u32, Errand)> {
        let asker = self.asker.load(SeqCst);
        let ticket = self.ticket.load(SeqCst);
        let errand = match self.reach.load(SeqCst) {
            0 => Errand::Tick,
            seq => Errand::UpTo(seq),
        };
        // Another one may have begun to ask in between: what it writes is seen in the next pass, which it wakes.
        (asker > 0 && self.asker.load(SeqCst) == asker && self.ticket.load(SeqCst) == ticket)
            .then_some((ticket, errand))
    }
}

impl Answer {
    /// A worker takes this place.
    pub fn forget(&self) {
        self.heard.store(0, SeqCst);
        self.done.store(0, SeqCst);
    }

    /// What became of the ask so far; with the last word its session is woken.
    pub fn tell(&self, ask: &Ask, ticket: u32, report: &Report, done: bool) {
        for (figure, value) in self.figures.iter().zip(report.figures()) {
            figure.store(value, Relaxed);
        }
        self.heard.store(ticket, SeqCst);
        if done {
            self.done.store(ticket, SeqCst);
            latch::set(ask.asker.load(SeqCst) - 1);
        }
    }

    /// [0 = has not heard of it, 1 = is at it, 2 = done; figures].
    fn read(&self, ticket: u32) -> Vec<i64> {
        let state = match ticket {
            ticket if self.done.load(SeqCst) == ticket => 2,
            ticket if self.heard.load(SeqCst) == ticket => 1,
            _ => 0,
        };
        let figures = self.figures.iter().map(|figure| figure.load(Relaxed));
        std::iter::once(state).chain(figures).collect()
    }
}

// ---- a session ------------------------------------------------------------------------------------------------------

/// Asks for delivery up to a seq; 0 = for a tick. Returns the ticket; 0 = there is nobody to ask; None = another session
/// asks.
pub fn ask(reach: i64) -> Option<u32> {
    let Some(database) = shmem::my_database() else {
        return Some(0);
    };
    let (ask, me) = (database.ask(), latch::my_proc_number() + 1);
    let free = ask.asker.compare_exchange(0, -me, SeqCst, SeqCst);
    if free.is_err_and(|asker| asker != me && asker != -me) {
        return None;
    }
    ask.asker.store(-me, SeqCst);
    ask.reach.store(reach, SeqCst);
    let ticket = ask.ticket.fetch_add(1, SeqCst).wrapping_add(1);
    ask.asker.store(me, SeqCst);
    shmem::wake_workers();
    Some(ticket)
}

/// Of each worker of this database, one after the other: its number, and what it answers. `done`: all that there are are
/// done.
pub fn answers(ticket: u32) -> (Vec<i64>, bool) {
    let (mut flat, mut done) = (Vec::new(), true);
    for (number, answer) in shmem::answers_here() {
        let read = answer.read(ticket);
        done &= read[0] == 2;
        flat.push(i64::from(number));
        flat.extend(read);
    }
    (flat, done)
}

/// This session asks for nothing any more. Called at the end of a transaction as well: no allocation, no error.
pub fn stop() {
    if let Some(database) = shmem::my_database() {
        let me = latch::my_proc_number() + 1;
        for mine in [me, -me] {
            _ = database.ask().asker.compare_exchange(mine, 0, SeqCst, SeqCst);
        }
        shmem::wake_workers();
    }
}
