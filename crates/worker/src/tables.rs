//! The tables and shared memory as the engine sees them, for one destination. `destination` passes them to the engine,
//! on the worker's thread.

use crate::host::{Patience, Port};
use crate::notices::Notices;
use outbox_core::engine::{self, Batch, Claimed, Due, FastPath, Held, Lane, Memory, Settlement, SlotId, Store};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::Blocks;
use std::cell::RefCell;

/// The tables for one call of the engine.
pub struct Tables<'a, P: Port> {
    port: &'a P,
    notices: &'a Notices,
    destination: &'a str,
    /// What a dead letter blocks.
    dead_blocks: Blocks,
    patience: Patience,
    /// Whether each lane is claimed alone and a locked one left out, because rows of a lane were locked.
    pub lane_by_lane: bool,
    /// The number of messages that were not settled because they no longer belong to this worker.
    pub missed: usize,
    /// A failure after some lanes were claimed. Their messages are delivered all the same.
    pub failed: Option<P::Error>,
}

impl<'a, P: Port> Tables<'a, P> {
    pub fn new(
        port: &'a P,
        notices: &'a Notices,
        destination: &'a str,
        dead_blocks: Blocks,
        patience: Patience,
    ) -> Self {
        Self {
            port,
            notices,
            destination,
            dead_blocks,
            patience,
            lane_by_lane: false,
            missed: 0,
            failed: None,
        }
    }
}

impl<P: Port> Store for Tables<'_, P> {
    type RowId = P::RowId;
    type Error = P::Error;

    fn settle(&mut self, batch: &[Settlement<P::RowId>]) -> Result<(), P::Error> {
        let changed = self.port.settle(batch, self.dead_blocks, self.patience)?;
        self.missed += batch.len().saturating_sub(changed);
        Ok(())
    }

    fn claim(&mut self, lanes: &[Lane]) -> Result<Batch<P::RowId>, P::Error> {
        if !self.lane_by_lane && engine::share_read_limit(lanes) {
            match self.port.claim(lanes, true) {
                Err(error) if P::is_locked(&error) => self.lane_by_lane = true,
                claimed => return Ok(claimed?.of(lanes)),
            }
        }
        // A session or a worker that hangs has locked a row of these lanes: the other lanes go on. Or the lanes have
        // different read limits, because messages of some have failed.
        let mut all = Batch::default();
        for lane in lanes {
            if all.is_large() {
                all.cut = true; // the next claim reads the other lanes
                break;
            }
            let lane_alone = std::slice::from_ref(lane);
            match self.port.claim(lane_alone, !self.lane_by_lane) {
                Ok(batch) => all.add(batch.of(lane_alone)),
                Err(error) if P::is_locked(&error) => {
                    self.lane_by_lane = true;
                    all.locked.push(lane.partition);
                }
                // The lanes before it are claimed and committed, so they go on in spite of this error.
                Err(error) if !all.rows.is_empty() => {
                    all.locked.push(lane.partition);
                    self.failed = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        all.rows.sort_by_key(|claimed| claimed.pointer.seq);
        Ok(all)
    }

    fn claim_unleased(&mut self, limit: u32) -> Result<Batch<P::RowId>, P::Error> {
        self.port.claim_unleased(limit)
    }

    fn claim_waiting(
        &mut self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<P::RowId>, bool), P::Error> {
        self.port.claim_waiting(key, epoch, read_limit, limit)
    }

    /// Brings back due messages of all destinations, once in each pass. The first destination that calls it does so,
    /// and notifies the others which lanes to read again.
    fn bring_due(&mut self, leases: Option<&[Held]>) -> Result<Due, P::Error> {
        if let Some(next_ms) = self.notices.brought() {
            return Ok((Vec::new(), next_ms));
        }
        let (moved, next_ms) = self.port.bring_due(leases)?;
        let mut own = Vec::new();
        for (destination, partition, seq) in moved {
            match destination == self.destination {
                true => own.push((partition, seq)),
                false => self.notices.add(|name| name == destination, partition, seq),
            }
        }
        self.notices.has_brought(next_ms);
        Ok((own, next_ms))
    }

    fn blocked_keys(&mut self, partitions: &[Partition]) -> Result<Vec<Found>, P::Error> {
        let mut found = self.port.blocked_keys(partitions)?;
        found.retain(|found| found.key.destination == self.destination);
        Ok(found)
    }
}

/// Shared memory as the engine sees it. If it cannot be read, the engine gets the answer that holds back the most, and
/// `failed` has the error.
pub struct Lanes<'a, P: Port> {
    port: &'a P,
    notices: &'a Notices,
    destination: &'a str,
    pub failed: RefCell<Option<P::Error>>,
}

impl<'a, P: Port> Lanes<'a, P> {
    pub fn new(port: &'a P, notices: &'a Notices, destination: &'a str) -> Self {
        Self {
            port,
            notices,
            destination,
            failed: RefCell::new(None),
        }
    }

    /// Gives up all ready messages of the fast path, so that they are read from the table.
    pub fn leave_in_table(&self) {
        for (slot, claimed) in self.take() {
            self.give_up(slot, claimed.pointer.partition, claimed.pointer.seq);
        }
    }
}

impl<P: Port> Memory for Lanes<'_, P> {
    fn notice_prepared(&self) {
        if let Err(error) = self.port.refresh() {
            self.failed.replace(Some(error));
        }
    }

    fn open_transactions(&self) -> Vec<OpenTransaction> {
        self.port.open_transactions().unwrap_or_else(|error| {
            self.failed.replace(Some(error));
            vec![OpenTransaction::holds_everything()]
        })
    }

    fn take_rewind(&self, partition: Partition) -> Option<i64> {
        if let Some(low) = self.port.take_rewind(partition) {
            let shares = |name: &str| self.port.shares_rewind_with(name);
            self.notices.add(shares, partition, low);
        }
        self.notices.take(self.destination, partition)
    }

    fn peek_rewind(&self, partition: Partition) -> Option<i64> {
        // In this order: a process that withdraws a ready message sets the rewind first.
        let ready = self.port.lowest_ready(partition);
        let noticed = self.notices.peek(self.destination, partition);
        let new = self.port.peek_rewind(partition);
        noticed.into_iter().chain(new).chain(ready).min()
    }

    fn revoke(&self, claimed: &[(Partition, i64)]) {
        self.port.revoke(claimed);
    }

    fn schedules(&self) -> u32 {
        self.port.schedules()
    }

    fn unblocks(&self) -> u32 {
        self.port.unblocks()
    }
}

impl<P: Port> FastPath<P::RowId> for Lanes<'_, P> {
    fn take(&self) -> Vec<(SlotId, Claimed<P::RowId>)> {
        self.port.take_ready()
    }

    fn let_go(&self, slot: SlotId) {
        self.port.let_go(slot);
    }

    fn give_up(&self, slot: SlotId, partition: Partition, seq: i64) {
        self.port.give_up(slot, partition, seq);
    }
}
