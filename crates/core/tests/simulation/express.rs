//! Messages that sessions lay down for the worker of their lane: what `src/shared/fastpath/slot.rs` keeps in shared memory. Each
//! function here is one access there, but for those that say otherwise.

use super::config::Flaw;
use super::memory::Memory;
use super::run::Simulation;
use super::world::{Ports, World, as_claimed};
use outbox_core::engine::{self, Claimed, Place};
use outbox_core::partition::Partition;

/// Fewer than sessions may want: some messages go by the table.
const PLACES: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Laid,
    Ready,
    Taken,
    Revoked,
}

#[derive(Clone, Copy, Debug)]
pub struct Spot {
    pub state: State,
    /// Another one each time that the place is filled.
    pub tenant: u64,
    /// The worker that read the lane when this was laid down.
    pub owner: usize,
    pub partition: u16,
    pub seq: i64,
}

#[derive(Default)]
pub struct Places {
    spots: [Option<Spot>; PLACES],
    /// Workers that are there.
    alive: Vec<usize>,
    tenants: u64,
}

impl Places {
    pub fn begin_worker(&mut self, worker: usize) {
        self.alive.push(worker);
    }

    pub fn is_alive(&self, worker: usize) -> bool {
        self.alive.contains(&worker)
    }

    /// What is not free: for the end, when nothing may be left.
    pub fn first(&self) -> Option<Spot> {
        self.spots.iter().flatten().next().copied()
    }

    pub fn lay_down(&mut self, owner: usize, partition: u16, seq: i64) -> Option<Place> {
        let free = self.spots.iter().position(Option::is_none)?;
        self.tenants += 1;
        self.spots[free] = Some(Spot {
            state: State::Laid,
            tenant: self.tenants,
            owner,
            partition,
            seq,
        });
        Some(free as Place)
    }

    pub fn get(&self, place: Place) -> Option<Spot> {
        self.spots[place as usize]
    }

    pub fn free(&mut self, place: Place) {
        self.spots[place as usize] = None;
    }

    /// False if somebody else was first.
    pub fn go(&mut self, place: Place, tenant: u64, from: State, to: State) -> bool {
        let spot = self.spots[place as usize].as_mut();
        let spot = spot.filter(|spot| spot.tenant == tenant && spot.state == from);
        spot.map(|spot| spot.state = to).is_some()
    }

    fn find(&self, at: (u16, i64)) -> Vec<Place> {
        let is_it = |spot: &Option<Spot>| spot.is_some_and(|spot| (spot.partition, spot.seq) == at);
        (0..PLACES as Place)
            .filter(|place| is_it(&self.spots[*place as usize]))
            .collect()
    }

    pub fn is_in_hand(&self, worker: usize, at: (u16, i64)) -> bool {
        let spots = self.spots.iter().flatten();
        let mut taken = spots.filter(|spot| spot.state == State::Taken && spot.owner == worker);
        taken.any(|spot| (spot.partition, spot.seq) == at)
    }

    fn lowest_ready(&self, partition: u16) -> Option<i64> {
        let spots = self.spots.iter().flatten();
        let ready = spots.filter(|spot| spot.state == State::Ready && spot.partition == partition);
        ready.map(|spot| spot.seq).min()
    }
}

impl Memory {
    /// The worker that reads a lane, if it is there.
    pub fn reader(&self, partition: u16) -> Option<usize> {
        self.owner(partition).filter(|worker| self.places.is_alive(*worker))
    }

    /// At once. False if a worker has it in hand.
    fn withdraw(&mut self, place: Place) -> bool {
        let Some(spot) = self.places.get(place) else {
            return true;
        };
        match spot.state {
            State::Laid => self.places.go(place, spot.tenant, State::Laid, State::Revoked),
            State::Ready => {
                self.reopen(spot.partition, spot.seq);
                self.places.free(place);
                true
            }
            State::Taken => false,
            State::Revoked => true,
        }
    }

    /// A worker reads the partition from now on. Place by place there.
    pub fn begin_lane(&mut self, partition: u16) {
        for place in 0..PLACES as Place {
            if self.places.get(place).is_some_and(|spot| spot.partition == partition) {
                self.withdraw(place);
            }
        }
    }

    /// A worker has ended. Place by place there.
    pub fn end_worker(&mut self, worker: usize, flaw: Option<Flaw>) {
        self.places.alive.retain(|alive| *alive != worker);
        for place in 0..PLACES as Place {
            let is_its = |spot: Spot| spot.owner == worker;
            if flaw == Some(Flaw::EndsInHand) || !self.places.get(place).is_some_and(is_its) {
                continue;
            }
            if !self.withdraw(place) {
                self.places.free(place);
            }
        }
    }

    /// Nobody takes it in hand from now on; false if somebody has. At once.
    pub fn is_free_to_end(&mut self, at: (u16, i64)) -> bool {
        let found = self.places.find(at);
        found.into_iter().all(|place| self.withdraw(place))
    }
}

// ---- a worker -------------------------------------------------------------------------------------------------------

impl Ports<'_> {
    fn memory<T>(&self, access: impl FnOnce(&mut Memory) -> T) -> T {
        let Simulation { world, .. } = self.simulation;
        self.simulation.interrupt(self.worker);
        access(&mut world.borrow_mut().memory)
    }

    /// (d), first half.
    pub fn lowest_ready(&self, partition: u16) -> Option<i64> {
        let flaw = self.flaw();
        self.memory(|memory| memory.places.lowest_ready(partition))
            .filter(|_| flaw != Some(Flaw::NoLookAtReady))
    }

    fn flaw(&self) -> Option<Flaw> {
        self.simulation.world.borrow().config.flaw
    }

    pub fn revoke_one(&self, at: (u16, i64)) {
        if self.flaw() == Some(Flaw::ClaimedNotRevoked) {
            return;
        }
        for place in self.memory(|memory| memory.places.find(at)) {
            while let Some(spot) = self.memory(|memory| memory.places.get(place)) {
                let is_over = match spot.state {
                    _ if (spot.partition, spot.seq) != at => true,
                    State::Laid => self.memory(|m| m.places.go(place, spot.tenant, State::Laid, State::Revoked)),
                    State::Ready => {
                        self.memory(|memory| memory.reopen(spot.partition, spot.seq));
                        let is_ours = self.memory(|m| m.places.go(place, spot.tenant, State::Ready, State::Revoked));
                        if is_ours {
                            self.memory(|memory| memory.places.free(place));
                        }
                        is_ours
                    }
                    State::Taken | State::Revoked => true,
                };
                if is_over {
                    break;
                }
            }
        }
    }
}

impl engine::Express<u64> for Ports<'_> {
    fn take(&self) -> Vec<(Place, Claimed<u64>)> {
        let mut taken = Vec::new();
        for place in 0..PLACES as Place {
            let Some(spot) = self.memory(|memory| memory.places.get(place)) else {
                continue;
            };
            let is_mine = spot.state == State::Ready && spot.owner == self.worker;
            if !is_mine || self.memory(|memory| memory.reader(spot.partition)) != Some(self.worker) {
                continue;
            }
            if self.memory(|memory| memory.places.go(place, spot.tenant, State::Ready, State::Taken)) {
                let world = self.simulation.world.borrow();
                taken.push((place, as_claimed(&world, spot.seq)));
            }
        }
        taken
    }

    fn let_go(&self, place: Place) {
        self.memory(|memory| memory.places.free(place));
    }

    fn give_up(&self, place: Place, partition: Partition, seq: i64) {
        self.memory(|memory| memory.reopen(partition.index(), seq));
        self.memory(|memory| memory.places.free(place));
    }
}

impl World {
    /// A worker ends, however it does.
    pub fn end_worker(&mut self, worker: usize) {
        self.memory.end_worker(worker, self.config.flaw);
    }
}
