//! Implements the port of crates/worker for one destination: its tables and the shared memory of its lanes, both
//! through the session. Runs on the worker's thread.

use super::report::Log;
use super::session::{Rewinds, RowId, Seen, Session, SharedState, Trouble, TroubleKind};
use super::totals::Totals;
use outbox_core::engine::{Batch, Held, Lane, Settlement};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::message::Pointer;
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::{Blocks, Disposition, EXPIRED};
use outbox_core::words::Word;
use outbox_transport::target::{Limits, Target};
use outbox_worker::{Brought, DEFAULT_DESTINATION, Patience, Reason, Status};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

/// What the destinations of one worker share, with the last state of shared memory that the session returned.
pub struct Here {
    pub session: Session,
    pub log: Log,
    /// The result of the last wait.
    pub seen: RefCell<Seen>,
    /// The partitions that this worker leases.
    pub partitions: RefCell<Vec<Partition>>,
    pub totals: Rc<RefCell<Totals>>,
    /// Rewinds that `refresh` took from shared memory and that `take_rewind` has not returned yet. The value is the seq
    /// from which the partition must be read again; the flag is true for the default destination, false for the others.
    lows: RefCell<HashMap<(Partition, bool), i64>>,
    /// Shared memory as read right after a claim, until `open_transactions` takes it.
    shared_state: RefCell<Option<Result<SharedState, Trouble>>>,
    /// The commits below the cursors, as of the last read of shared memory.
    rewinds: RefCell<Vec<Rewinds>>,
}

impl Here {
    pub fn new(session: Session, log: Log, totals: Rc<RefCell<Totals>>) -> Self {
        Self {
            session,
            log,
            seen: RefCell::default(),
            partitions: RefCell::default(),
            totals,
            lows: RefCell::default(),
            shared_state: RefCell::default(),
            rewinds: RefCell::default(),
        }
    }

    fn lower(&self, partition: Partition, is_default: bool, seq: i64) {
        let mut lows = self.lows.borrow_mut();
        let low = lows.entry((partition, is_default)).or_insert(seq);
        *low = seq.min(*low);
    }
}

pub struct Port {
    here: Rc<Here>,
    destination: String,
    is_default: bool,
    /// When messages that are not settled yet were confirmed: seq to µs since 1970.
    confirmed_us: RefCell<HashMap<i64, i64>>,
    /// The number in flight that was last reported to the server.
    reported_in_flight: Cell<usize>,
}

impl Port {
    pub fn new(here: Rc<Here>, destination: &str) -> Self {
        Self {
            here,
            destination: destination.to_owned(),
            is_default: destination == DEFAULT_DESTINATION,
            confirmed_us: RefCell::default(),
            reported_in_flight: Cell::new(0),
        }
    }

    /// The times from enqueue to confirm of the published messages, in µs.
    fn took_us(&self, batch: &[Settlement<RowId>]) -> Vec<i64> {
        let confirmed_us = self.confirmed_us.borrow();
        let took = |ended: &Settlement<RowId>| {
            let at_us = confirmed_us.get(&ended.pointer.seq)?;
            Some((at_us - ended.pointer.enqueued_at_us).max(0))
        };
        let published = batch.iter().filter(|ended| ended.disposition == Disposition::Publish);
        published.filter_map(took).collect()
    }
}

impl outbox_worker::Port for Port {
    type RowId = RowId;
    type Error = Trouble;

    fn describe(&self, _target: Result<&Target, &str>, _limits: &Limits) {}

    // ---- tables -----------------------------------------------------------------------------------------------------

    fn settle(&self, batch: &[Settlement<RowId>], dead_blocks: Blocks, _patience: Patience) -> Result<usize, Trouble> {
        let took_us = self.took_us(batch);
        self.here
            .session
            .settle(&self.destination, batch, dead_blocks, &took_us)
    }

    /// Claims messages. A patient claim also reads shared memory after the claim, in the same round trip.
    fn claim(&self, lanes: &[Lane], is_patient: bool) -> Result<Batch<RowId>, Trouble> {
        let (session, destination) = (&self.here.session, &self.destination);
        // Shared memory that was read earlier is older than this claim.
        self.here.shared_state.replace(None);
        if !is_patient {
            return session.claim_at_once(destination, lanes);
        }
        let both = session.claim_and_read_shared(destination, lanes, &self.here.partitions.borrow())?;
        let batch = both.claimed?;
        self.here.shared_state.replace(Some(both.shared_state));
        Ok(batch)
    }

    fn claim_unleased(&self, limit: u32) -> Result<Batch<RowId>, Trouble> {
        self.here.session.claim_unleased(&self.destination, limit)
    }

    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<RowId>, bool), Trouble> {
        self.here.session.claim_waiting(key, epoch, read_limit, limit)
    }

    fn bring_due(&self, leases: Option<&[Held]>) -> Result<Brought, Trouble> {
        let session = &self.here.session;
        match session.next_due_ms()? {
            Some(0) => Ok((session.bring_due(leases)?, session.next_due_ms()?)),
            next_ms => Ok((Vec::new(), next_ms)),
        }
    }

    fn blocked_keys(&self, partitions: &[Partition]) -> Result<Vec<Found>, Trouble> {
        self.here.session.blocked_keys(partitions)
    }

    fn is_locked(trouble: &Trouble) -> bool {
        trouble.kind == TroubleKind::Locked
    }

    // ---- shared memory ----------------------------------------------------------------------------------------------

    /// Takes the rewinds of all partitions and destinations in one statement.
    fn refresh(&self) -> Result<(), Trouble> {
        let partitions = self.here.partitions.borrow();
        match self.here.session.rewinds(&partitions) {
            Ok(lows) => {
                for low in lows {
                    for (seq, is_default) in [(low.default, true), (low.others, false)] {
                        if let Some(seq) = seq {
                            self.here.lower(low.partition, is_default, seq);
                        }
                    }
                }
                Ok(())
            }
            Err(trouble) => {
                // The rewinds may have been taken and then lost on the way, so all partitions are read from the start.
                for partition in partitions.iter() {
                    self.here.lower(*partition, true, 1);
                    self.here.lower(*partition, false, 1);
                }
                Err(trouble)
            }
        }
    }

    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Trouble> {
        let seen = self.here.shared_state.take();
        let seen = seen.unwrap_or_else(|| self.here.session.shared_state(&self.here.partitions.borrow()));
        let (open, rewinds) = match seen {
            Ok(shared_state) => (Ok(shared_state.open), shared_state.rewinds),
            Err(trouble) => (Err(trouble), Vec::new()),
        };
        self.here.rewinds.replace(rewinds);
        open
    }

    fn take_rewind(&self, partition: Partition) -> Option<i64> {
        self.here.lows.borrow_mut().remove(&(partition, self.is_default))
    }

    fn peek_rewind(&self, partition: Partition) -> Option<i64> {
        let rewinds = self.here.rewinds.borrow();
        let low = rewinds.iter().find(|low| low.partition == partition)?;
        match self.is_default {
            true => low.default,
            false => low.others,
        }
    }

    fn shares_rewind_with(&self, destination: &str) -> bool {
        (destination == DEFAULT_DESTINATION) == self.is_default
    }

    fn schedules(&self) -> u32 {
        self.here.seen.borrow().schedules
    }

    fn unblocks(&self) -> u32 {
        self.here.seen.borrow().unblocks
    }

    // ---- statistics -------------------------------------------------------------------------------------------------

    fn confirmed(&self, pointer: &Pointer, at_us: i64) {
        self.confirmed_us.borrow_mut().insert(pointer.seq, at_us);
    }

    fn settled(&self, batch: &[Settlement<RowId>]) {
        let mut confirmed_us = self.confirmed_us.borrow_mut();
        let mut totals = self.here.totals.borrow_mut();
        for settlement in batch {
            let seq = settlement.pointer.seq;
            confirmed_us.remove(&seq);
            totals.count(&self.destination, &settlement.disposition);
            let failed = |error: &str, is_dead| self.here.log.failed(&self.destination, seq, error, is_dead);
            match &settlement.disposition {
                Disposition::Retry { error, .. } => failed(error, false),
                Disposition::Dead { reason } => failed(reason, true),
                Disposition::Expire => failed(EXPIRED, true),
                Disposition::Publish | Disposition::Release { .. } | Disposition::Defer { .. } | Disposition::Wait => {}
            }
        }
    }

    fn report_in_flight(&self, count: usize) -> Result<(), Trouble> {
        if (count == 0) != (self.reported_in_flight.get() == 0) {
            self.here.session.report_in_flight(&self.destination, count)?;
            self.reported_in_flight.set(count);
        }
        Ok(())
    }

    fn report(&self, status: Option<&Status>, _requested_at_us: Option<i64>) -> Result<(), Trouble> {
        let state = status.map(|status| status.state.name());
        let reason = status.and_then(|status| status.reason).map(Reason::name);
        let detail = status.and_then(|status| status.detail.as_deref());
        self.here.session.report(&self.destination, state, reason, detail)
    }
}
