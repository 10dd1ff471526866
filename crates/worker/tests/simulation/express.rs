//! Messages that sessions lay down for the worker of their lane: what `src/shared/fastpath/slot.rs` keeps in shared memory. Each
//! function here is one access there, but for those that say otherwise.

use super::config::Flaw;
use super::memory::Memory;
use outbox_core::engine::Place;

/// Fewer than sessions may want: some messages go by the table.
pub const PLACES: usize = 10;

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
    pub destination: usize,
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

    pub fn lay_down(&mut self, owner: usize, (partition, seq): (u16, i64), destination: usize) -> Option<Place> {
        let free = self.spots.iter().position(Option::is_none)?;
        self.tenants += 1;
        self.spots[free] = Some(Spot {
            state: State::Laid,
            tenant: self.tenants,
            owner,
            partition,
            destination,
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

    pub fn find(&self, at: (u16, i64)) -> Vec<Place> {
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

    pub fn is_something_ready(&self, worker: usize) -> bool {
        let mut spots = self.spots.iter().flatten();
        spots.any(|spot| spot.state == State::Ready && spot.owner == worker)
    }

    pub fn lowest_ready(&self, partition: u16, destination: usize) -> Option<i64> {
        let spots = self.spots.iter().flatten();
        let is_there = |spot: &&Spot| (spot.partition, spot.destination) == (partition, destination);
        let ready = spots.filter(|spot| spot.state == State::Ready).filter(is_there);
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
                self.reopen(spot.partition, spot.destination, spot.seq);
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
