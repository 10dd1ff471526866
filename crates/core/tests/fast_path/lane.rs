//! The owner of the lane: leases that are given back, taken and lost, and workers that die. Models `src/worker/` and
//! `src/shared/rewinds.rs`.

use super::worker::{At, Worker};
use super::{Action, FastPath, Mistake, SLOTS, SlotState, State, Taking, Withdraw, members};

impl State {
    /// A worker forgets the messages of its lease.
    pub fn learn(&mut self, number: usize) {
        let kept = members(self.workers[number].fast_in_flight).filter_map(|seq| self.slot_of(seq));
        let over = kept.fold(self.workers[number].over, |over, slot| over | 1 << slot);
        let worker = &mut self.workers[number];
        if worker.is_alive() {
            *worker = Worker::STARTED;
            worker.over = over;
        }
    }

    fn is_taking(&self, number: usize) -> bool {
        (self.lane.taking).is_some_and(|taking| usize::from(taking.worker) == number)
    }

    /// Has begun to revoke or withdraw. It ends only before or after: there is no check for interrupts, and a crash
    /// takes the server down, with shared memory.
    fn is_withdrawing(&self, number: usize) -> bool {
        let revokes = matches!(self.workers[number].at, At::Revoke(_, at) if at != Withdraw::Peek);
        revokes || (self.is_taking(number) && self.lane.taking.is_some_and(|taking| taking.withdraw != Withdraw::Peek))
    }

    /// Its sent messages may be sent again.
    fn excuse(&mut self, number: usize) {
        self.excused |= self.workers[number].out;
    }
}

impl FastPath {
    pub(super) fn lane_actions(&self, state: &State, number: usize, actions: &mut Vec<Action>) {
        let (lane, worker) = (&state.lane, &state.workers[number]);
        if worker.at == At::Dead {
            actions.push(Action::Restart(number));
        }
        if worker.is_alive() && !state.is_withdrawing(number) && state.deaths < self.deaths {
            actions.push(Action::Die(number));
        }
        if worker.at != At::Rest || state.is_taking(number) {
            return;
        }
        let has_lease = lane.lease == Some(number as u8) && lane.epoch == worker.epoch && !worker.is_late;
        if worker.epoch > 0 && !has_lease {
            actions.push(Action::Learn(number));
        }
        if lane.taking.is_some() {
            return;
        }
        if has_lease && worker.has_nothing() && state.moves < self.moves {
            actions.push(Action::GiveBack(number));
        }
        if lane
            .lease
            .is_none_or(|holder| self.may_be_taken_from(state, usize::from(holder), number))
        {
            actions.push(Action::TakeOver(number));
        }
    }

    fn may_be_taken_from(&self, state: &State, holder: usize, by: usize) -> bool {
        let worker = &state.workers[holder];
        let has_run_out = !worker.is_alive() || worker.is_late || (holder == by && worker.epoch == 0);
        has_run_out || state.expiries < self.expiries
    }

    pub(super) fn lane_acts(&self, state: &mut State, action: Action) {
        match action {
            Action::GiveBack(number) => {
                state.moves += 1;
                state.lane.lease = None;
                state.learn(number);
            }
            Action::TakeOver(number) => {
                if let Some(holder) = state.lane.lease.map(usize::from) {
                    let worker = state.workers[holder];
                    if worker.is_alive() && !worker.is_late && (holder != number || worker.epoch > 0) {
                        state.expiries += 1;
                        state.excuse(holder);
                        state.workers[holder].is_late = true;
                    }
                }
                // Before another worker can take it, because the row of the lease is still locked.
                state.lane.owner = number as u8;
                let worker = number as u8;
                state.lane.taking = Some(Taking {
                    worker,
                    slot: 0,
                    withdraw: Withdraw::Peek,
                });
                self.take_from(state, 0);
            }
            Action::Taking => self.take_on(state),
            Action::Learn(number) => {
                state.excuse(number);
                state.learn(number);
            }
            Action::Die(number) => {
                state.deaths += 1;
                state.excuse(number);
                if state.is_taking(number) {
                    state.lane.taking = None;
                }
                let at = self.ending_from(state, number, 0);
                state.workers[number] = Worker::STARTED;
                state.workers[number].at = at;
            }
            Action::Restart(number) => state.workers[number] = Worker::STARTED,
            _ => unreachable!("{action:?} is not of the lane"),
        }
    }

    fn take_from(&self, state: &mut State, from: usize) {
        let skips = self.made(Mistake::LaneBegunWithoutWithdrawing);
        let slot = (from..SLOTS).find(|slot| state.slots[*slot].state != SlotState::Free && !skips);
        if let Some(taking) = &mut state.lane.taking {
            taking.slot = slot.unwrap_or(SLOTS) as u8;
            taking.withdraw = Withdraw::Peek;
        }
    }

    fn take_on(&self, state: &mut State) {
        let Some(taking) = state.lane.taking else { return };
        let slot = usize::from(taking.slot);
        if slot < SLOTS {
            match self.withdraw(state, slot, taking.withdraw) {
                Some(withdraw) => state.lane.taking = Some(Taking { withdraw, ..taking }),
                None => self.take_from(state, slot + 1),
            }
            return;
        }
        state.lane.taking = None;
        state.lane.lease = Some(taking.worker);
        state.lane.epoch += 1;
        let number = usize::from(taking.worker);
        state.learn(number);
        state.workers[number].epoch = state.lane.epoch;
    }

    fn ending_from(&self, state: &State, number: usize, from: usize) -> At {
        let is_for_it = |slot: &usize| {
            let entry = state.slots[*slot];
            entry.state != SlotState::Free && usize::from(entry.owner) == number
        };
        match (from..SLOTS).find(is_for_it) {
            Some(slot) if !self.made(Mistake::EndedWithoutWithdrawing) => At::Ending(slot, Withdraw::Peek),
            _ => At::Dead,
        }
    }

    pub(super) fn end_at(&self, state: &mut State, number: usize, slot: usize, withdraw: Withdraw) -> At {
        if let Some(withdraw) = self.withdraw(state, slot, withdraw) {
            return At::Ending(slot, withdraw);
        }
        if state.is_taken(slot) && usize::from(state.slots[slot].owner) == number {
            state.free(slot);
        }
        self.ending_from(state, number, slot + 1)
    }
}
