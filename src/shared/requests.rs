//! What a session asks the workers of its database for, in shared memory: one pass (outbox_run_pass), or delivery up to a seq
//! (outbox_relay). A session never delivers by itself: it asks, wakes the workers, and waits for their answers. One session
//! of a database asks at a time; what it asks for holds only as long as it waits. An `Ask`
//! lies in the words of its database (`databases`), an `Answer` in the place of its worker (`workers`).

use crate::pg::latch;
use outbox_core::engine::Request;
use outbox_worker::Report;
use std::sync::atomic::{
    AtomicI32, AtomicI64, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// Of one database.
#[repr(C)]
pub struct RequestSlot {
    /// Process number + 1 of the session that asks, negative while it still writes; 0 = nobody. Written by it; read
    /// by workers.
    requester: AtomicI32,
    /// Grows with each ask. Written by the session that asks; read by workers.
    request_id: AtomicU32,
    /// Up to which seq it wants delivery; 0 = it wants a tick. Written by the session that asks; read by workers.
    read_limit: AtomicI64,
}

/// Of one worker. Written by it; read by the session that asks.
#[repr(C)]
pub struct Answer {
    /// The ask that it heard last, and the one that it is done with.
    heard: AtomicU32,
    done: AtomicU32,
    counts: [AtomicI64; COUNTS],
}

/// Numbers of a report.
pub const COUNTS: usize = 12;

/// A report, in the order that outbox_internal.request_workers() and outbox_passes read it in.
pub fn counts(report: &Report) -> [i64; COUNTS] {
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

impl RequestSlot {
    /// What is asked for at this moment, with its ticket.
    pub fn now(&self) -> Option<(u32, Request)> {
        let requester = self.requester.load(SeqCst);
        let request_id = self.request_id.load(SeqCst);
        let request = match self.read_limit.load(SeqCst) {
            0 => Request::Pass,
            seq => Request::UpTo(seq),
        };
        // Another one may have begun to ask in between: what it writes is seen in the next pass, which it wakes.
        (requester > 0 && self.requester.load(SeqCst) == requester && self.request_id.load(SeqCst) == request_id)
            .then_some((request_id, request))
    }
}

impl Answer {
    /// A worker takes this place.
    pub fn forget(&self) {
        self.heard.store(0, SeqCst);
        self.done.store(0, SeqCst);
    }

    /// What became of the ask so far; with the last word its session is woken.
    pub fn report(&self, request: &RequestSlot, request_id: u32, report: &Report, done: bool) {
        for (count, value) in self.counts.iter().zip(counts(report)) {
            count.store(value, Relaxed);
        }
        self.heard.store(request_id, SeqCst);
        if done {
            self.done.store(request_id, SeqCst);
            latch::set(request.requester.load(SeqCst) - 1);
        }
    }

    /// [0 = has not heard of it, 1 = is at it, 2 = done; figures].
    pub fn read(&self, request_id: u32) -> Vec<i64> {
        let state = match request_id {
            request_id if self.done.load(SeqCst) == request_id => 2,
            request_id if self.heard.load(SeqCst) == request_id => 1,
            _ => 0,
        };
        let counts = self.counts.iter().map(|count| count.load(Relaxed));
        std::iter::once(state).chain(counts).collect()
    }
}

// ---- a session ------------------------------------------------------------------------------------------------------

impl RequestSlot {
    /// Asks for delivery up to a seq; 0 = for a tick. Returns the ticket; None = another session asks.
    pub fn begin(&self, read_limit: i64) -> Option<u32> {
        let me = latch::my_proc_number() + 1;
        let free = self.requester.compare_exchange(0, -me, SeqCst, SeqCst);
        if free.is_err_and(|requester| requester != me && requester != -me) {
            return None;
        }
        self.requester.store(-me, SeqCst);
        self.read_limit.store(read_limit, SeqCst);
        let request_id = self.request_id.fetch_add(1, SeqCst).wrapping_add(1);
        self.requester.store(me, SeqCst);
        Some(request_id)
    }

    /// This session asks for nothing any more. No allocation, no error.
    pub fn end(&self) {
        let me = latch::my_proc_number() + 1;
        for mine in [me, -me] {
            _ = self.requester.compare_exchange(mine, 0, SeqCst, SeqCst);
        }
    }
}
