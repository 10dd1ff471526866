//! What a session asks the workers of its database for, in shared memory: one pass (outbox_tick), or delivery up to a seq
//! (outbox_relay). A session never delivers by itself: it asks, wakes the workers, and waits for their answers. One session
//! of a database asks at a time; what it asks for holds only as long as it waits. An `Ask`
//! lies in the words of its database (`databases`), an `Answer` in the place of its worker (`workers`).

use crate::pg::latch;
use outbox_core::engine::Errand;
use outbox_worker::Report;
use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// Of one database.
#[repr(C)]
pub struct Ask {
    /// Process number + 1 of the session that asks, negative while it still writes; 0 = nobody. Written by it; read
    /// by workers.
    asker: AtomicI32,
    /// Grows with each ask. Written by the session that asks; read by workers.
    ticket: AtomicU32,
    /// Up to which seq it wants delivery; 0 = it wants a tick. Written by the session that asks; read by workers.
    reach: AtomicI64,
}

/// Of one worker. Written by it; read by the session that asks.
#[repr(C)]
pub struct Answer {
    /// The ask that it heard last, and the one that it is done with.
    heard: AtomicU32,
    done: AtomicU32,
    figures: [AtomicI64; FIGURES],
}

/// Numbers of a report.
pub const FIGURES: usize = 12;

/// A report, in the order that outbox_internal.ask_workers() and outbox_ticks read it in.
pub fn figures(report: &Report) -> [i64; FIGURES] {
    [
        report.claimed as i64,
        report.published as i64,
        report.failed as i64,
        report.duration_us as i64,
        i64::from(report.backoff_ms),
        i64::from(report.renewed_heartbeat),
        report.purged_stale,
        report.active_workers as i64,
        report.desired as i64,
        report.owned as i64,
        report.leased as i64,
        report.released as i64,
    ]
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
        for (figure, value) in self.figures.iter().zip(figures(report)) {
            figure.store(value, Relaxed);
        }
        self.heard.store(ticket, SeqCst);
        if done {
            self.done.store(ticket, SeqCst);
            latch::set(ask.asker.load(SeqCst) - 1);
        }
    }

    /// [0 = has not heard of it, 1 = is at it, 2 = done; figures].
    pub fn read(&self, ticket: u32) -> Vec<i64> {
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

impl Ask {
    /// Asks for delivery up to a seq; 0 = for a tick. Returns the ticket; None = another session asks.
    pub fn begin(&self, reach: i64) -> Option<u32> {
        let me = latch::my_proc_number() + 1;
        let free = self.asker.compare_exchange(0, -me, SeqCst, SeqCst);
        if free.is_err_and(|asker| asker != me && asker != -me) {
            return None;
        }
        self.asker.store(-me, SeqCst);
        self.reach.store(reach, SeqCst);
        let ticket = self.ticket.fetch_add(1, SeqCst).wrapping_add(1);
        self.asker.store(me, SeqCst);
        Some(ticket)
    }

    /// This session asks for nothing any more. No allocation, no error.
    pub fn end(&self) {
        let me = latch::my_proc_number() + 1;
        for mine in [me, -me] {
            _ = self.asker.compare_exchange(mine, 0, SeqCst, SeqCst);
        }
    }
}
