//! The slots that sessions fill for the worker of their lane: the content of `src/shared/fast_path.rs`. Each
//! function here is one access there, unless it says otherwise.

use super::config::Flaw;
use super::memory::Memory;
use outbox_core::engine::SlotId;

/// Fewer than sessions may want: some messages take the table.
pub const SLOTS: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Filled,
    Ready,
    Taken,
    Revoked,
}

#[derive(Clone, Copy, Debug)]
pub struct Slot {
    pub state: State,
    /// A new number each time that the slot is filled.
    pub tenant: u64,
    /// The worker that read the lane when the slot was filled.
    pub owner: usize,
    pub partition: u16,
    pub destination: usize,
    pub seq: i64,
}

#[derive(Default)]
pub struct Slots {
    slots: [Option<Slot>; SLOTS],
    /// Workers that exist.
    alive: Vec<usize>,
    tenants: u64,
}

impl Slots {
    pub fn begin_worker(&mut self, worker: usize) {
        self.alive.push(worker);
    }

    pub fn is_alive(&self, worker: usize) -> bool {
        self.alive.contains(&worker)
    }

    /// The first slot that is not free: for the end, when none may be left.
    pub fn first(&self) -> Option<Slot> {
        self.slots.iter().flatten().next().copied()
    }

    pub fn copy_to_slot(&mut self, owner: usize, (partition, seq): (u16, i64), destination: usize) -> Option<SlotId> {
        let free = self.slots.iter().position(Option::is_none)?;
        self.tenants += 1;
        self.slots[free] = Some(Slot {
            state: State::Filled,
            tenant: self.tenants,
            owner,
            partition,
            destination,
            seq,
        });
        Some(free as SlotId)
    }

    pub fn get(&self, slot_id: SlotId) -> Option<Slot> {
        self.slots[slot_id as usize]
    }

    pub fn free(&mut self, slot_id: SlotId) {
        self.slots[slot_id as usize] = None;
    }

    /// Returns false if another process was first.
    pub fn transition(&mut self, slot_id: SlotId, tenant: u64, from: State, to: State) -> bool {
        let slot = self.slots[slot_id as usize].as_mut();
        let slot = slot.filter(|slot| slot.tenant == tenant && slot.state == from);
        slot.map(|slot| slot.state = to).is_some()
    }

    pub fn find(&self, at: (u16, i64)) -> Vec<SlotId> {
        let is_it = |slot: &Option<Slot>| slot.is_some_and(|slot| (slot.partition, slot.seq) == at);
        (0..SLOTS as SlotId)
            .filter(|slot_id| is_it(&self.slots[*slot_id as usize]))
            .collect()
    }

    pub fn is_fast_in_flight(&self, worker: usize, at: (u16, i64)) -> bool {
        let slots = self.slots.iter().flatten();
        let mut taken = slots.filter(|slot| slot.state == State::Taken && slot.owner == worker);
        taken.any(|slot| (slot.partition, slot.seq) == at)
    }

    pub fn lowest_ready(&self, partition: u16, destination: usize) -> Option<i64> {
        let slots = self.slots.iter().flatten();
        let is_there = |slot: &&Slot| (slot.partition, slot.destination) == (partition, destination);
        let ready = slots.filter(|slot| slot.state == State::Ready).filter(is_there);
        ready.map(|slot| slot.seq).min()
    }
}

impl Memory {
    /// The worker that reads a lane, if it exists.
    pub fn reader(&self, partition: u16) -> Option<usize> {
        self.owner(partition).filter(|worker| self.slots.is_alive(*worker))
    }

    /// At once. Returns false if a worker has it in flight.
    fn withdraw(&mut self, slot_id: SlotId) -> bool {
        let Some(slot) = self.slots.get(slot_id) else {
            return true;
        };
        match slot.state {
            State::Filled => self
                .slots
                .transition(slot_id, slot.tenant, State::Filled, State::Revoked),
            State::Ready => {
                self.rewind(slot.partition, slot.destination, slot.seq);
                self.slots.free(slot_id);
                true
            }
            State::Taken => false,
            State::Revoked => true,
        }
    }

    /// A worker reads the partition from now on. In the server this goes slot by slot.
    pub fn begin_lane(&mut self, partition: u16) {
        for slot_id in 0..SLOTS as SlotId {
            if self.slots.get(slot_id).is_some_and(|slot| slot.partition == partition) {
                self.withdraw(slot_id);
            }
        }
    }

    /// A worker has ended. In the server this goes slot by slot.
    pub fn end_worker(&mut self, worker: usize, flaw: Option<Flaw>) {
        self.slots.alive.retain(|alive| *alive != worker);
        for slot_id in 0..SLOTS as SlotId {
            let is_its = |slot: Slot| slot.owner == worker;
            if flaw == Some(Flaw::EndsWithFastInFlight) || !self.slots.get(slot_id).is_some_and(is_its) {
                continue;
            }
            if !self.withdraw(slot_id) {
                self.slots.free(slot_id);
            }
        }
    }

    /// No worker takes it from now on; false if one has. At once.
    pub fn is_free_to_end(&mut self, at: (u16, i64)) -> bool {
        let found = self.slots.find(at);
        found.into_iter().all(|slot_id| self.withdraw(slot_id))
    }
}
