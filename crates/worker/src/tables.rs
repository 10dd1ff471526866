//! The tables and shared memory as the engine sees them, for one destination.

use crate::host::{Patience, Port};
use crate::notices::Notices;
use outbox_core::engine::{self, Batch, Claimed, Due, FastPath, Held, Lane, Memory, Settlement, SlotId, Store};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::Blocks;
use std::cell::RefCell;

/// One use of the tables by the engine.
pub struct Tables<'a, P: Port> {
    port: &'a P,
    notices: &'a Notices,
    destination: &'a str,
    /// What waits behind a dead letter.
    dead_blocks: Blocks,
    patience: Patience,
    /// Rows of some lane were locked lately: each lane is claimed alone, and a locked one left out.
    pub lane_by_lane: bool,
    /// Messages that were no longer ours to settle.
    pub missed: usize,
    /// What failed after something had been claimed, which goes on.
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
        // Somebody holds a row of these lanes: a session by hand, or a worker that hangs. The other lanes go on. Or
        // some are read only as far as one that failed.
        let mut all = Batch::default();
        for lane in lanes {
            if all.is_large() {
                all.cut = true; // the other lanes have their turn with the next claim
                break;
            }
            let lane_alone = std::slice::from_ref(lane);
            match self.port.claim(lane_alone, !self.lane_by_lane) {
                Ok(batch) => all.add(batch.of(lane_alone)),
                Err(error) if P::is_locked(&error) => {
                    self.lane_by_lane = true;
                    all.locked.push(lane.partition);
                }
                // Those before it are claimed and committed: whatever happened, they go on.
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

    /// For all destinations at once, by the first that asks in a pass; the others are told where theirs are.
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

/// Shared memory. Where it could not be read the engine gets the answer that keeps most back, and `failed` tells.
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

    /// Nothing is taken in hand now.
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
        // In this order: who takes away what is ready tells of it before.
        let ready = self.port.lowest_ready(partition);
        let told = self.notices.peek(self.destination, partition);
        let new = self.port.peek_rewind(partition);
        told.into_iter().chain(new).chain(ready).min()
    }

    fn revoke(&self, claimed: &[(Partition, i64)]) {
        self.port.revoke(claimed);
    }

    fn waiting_changes(&self) -> u32 {
        self.port.waiting_changes()
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
