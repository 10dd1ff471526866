//! Requests of sessions to the workers of their database, in shared memory: one pass (outbox_run_pass), or delivery up
//! to a seq (outbox_relay). A session never delivers by itself: it writes a request, wakes the workers, and waits for
//! their answers. Only one session of a database makes a request at a time, and the request holds only while that
//! session waits. A `RequestSlot` is part of the database's entry (`databases`), a `WorkerAnswer` is part of the
//! worker's entry (`workers`).

use crate::pg::latch;
use outbox_core::engine::Request;
use outbox_worker::PassCounts;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU32,
    Ordering::{Relaxed, SeqCst},
};

/// The current request of one database.
#[repr(C)]
pub struct RequestSlot {
    /// Process number + 1 of the session that makes the request, negative while it still writes; 0 = there is no
    /// request. Written by that session; read by workers.
    requester: AtomicI32,
    /// The request id. Grows with each request. Written by the session that makes the request; read by workers.
    request_id: AtomicU32,
    /// Deliver up to this seq; 0 = run one pass. Written by the session that makes the request; read by workers.
    read_limit: AtomicI64,
    /// Go on with what another request began. Written and read by the same.
    goes_on: AtomicBool,
}

/// The answer of one worker. Written by that worker; read by the session that made the request.
#[repr(C)]
pub struct WorkerAnswer {
    /// The id of the last request that the worker has seen.
    seen: AtomicU32,
    /// The id of the last request that the worker has completed.
    done: AtomicU32,
    counts: [AtomicI64; COUNTS],
}

/// The number of values in a report.
pub const COUNTS: usize = 12;

/// The values of a report, in the order that outbox_run_pass() and outbox_passes expect.
pub fn counts(report: &PassCounts) -> [i64; COUNTS] {
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
    /// The current request with its id, if there is one.
    pub fn now(&self) -> Option<(u32, Request)> {
        let requester = self.requester.load(SeqCst);
        let request_id = self.request_id.load(SeqCst);
        let request = match (self.read_limit.load(SeqCst), self.goes_on.load(SeqCst)) {
            (0, _) => Request::Pass,
            (seq, false) => Request::UpTo(seq),
            (seq, true) => Request::OnTo(seq),
        };
        // Another session may have begun a request since. The worker sees it in the next pass, for which that
        // session wakes it.
        (requester > 0 && self.requester.load(SeqCst) == requester && self.request_id.load(SeqCst) == request_id)
            .then_some((request_id, request))
    }
}

impl WorkerAnswer {
    /// Stores the result of the request so far. With `done`, wakes the session that made it.
    pub fn report(&self, request: &RequestSlot, request_id: u32, report: &PassCounts, done: bool) {
        for (count, value) in self.counts.iter().zip(counts(report)) {
            count.store(value, Relaxed);
        }
        self.seen.store(request_id, SeqCst);
        if done {
            self.done.store(request_id, SeqCst);
            latch::set(request.requester.load(SeqCst) - 1);
        }
    }

    /// [0 = has not seen the request, 1 = is working on it, 2 = done; then the values of `counts`].
    pub fn read(&self, request_id: u32) -> Vec<i64> {
        let state = match request_id {
            request_id if self.done.load(SeqCst) == request_id => 2,
            request_id if self.seen.load(SeqCst) == request_id => 1,
            _ => 0,
        };
        let counts = self.counts.iter().map(|count| count.load(Relaxed));
        std::iter::once(state).chain(counts).collect()
    }
}

// ---- a session ------------------------------------------------------------------------------------------------------

impl RequestSlot {
    /// Returns the request id; None = another session has a request.
    pub fn begin(&self, request: Request) -> Option<u32> {
        let me = latch::my_proc_number() + 1;
        let free = self.requester.compare_exchange(0, -me, SeqCst, SeqCst);
        if free.is_err_and(|requester| requester != me && requester != -me) {
            return None;
        }
        self.requester.store(-me, SeqCst);
        let read_limit = match request {
            Request::Pass => 0,
            Request::UpTo(seq) | Request::OnTo(seq) => seq,
        };
        self.read_limit.store(read_limit, SeqCst);
        self.goes_on.store(request.goes_on(), SeqCst);
        let request_id = self.request_id.fetch_add(1, SeqCst).wrapping_add(1);
        self.requester.store(me, SeqCst);
        Some(request_id)
    }

    /// Ends the request of the session with this process number. Neither allocates nor raises an error.
    pub(super) fn end(&self, proc_number: i32) {
        let requester = proc_number + 1;
        for its in [requester, -requester] {
            _ = self.requester.compare_exchange(its, 0, SeqCst, SeqCst);
        }
    }
}
