//! The protocol of a worker's passes: crates/core/src/engine/claim.rs, receive.rs, and the second half of
//! `src/shared/fast_path.rs`.

use super::{
    Action, END, FastPath, Key, MESSAGES, Mistake, SESSIONS, SLOTS, Seq, Seqs, SlotState, State, WORKERS, Way,
    Withdraw, bit, members,
};

/// A set of slots.
type Slots = u8;

/// The next access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Between two passes.
    Rest,
    /// (b) Checks whether it may take the message of a slot ..
    See(usize),
    /// .. and takes it.
    Take(usize),
    /// (c) The entry of a session. The flag, here and below: after the claim.
    Entry(usize, bool),
    /// (d)
    PeekReady(usize, bool),
    PeekRewind(bool),
    /// Reads the events of the pointers that it may take.
    Read,
    /// Gives up the message that it took: publishes a rewind ..
    Rewind(usize),
    /// .. and frees the slot.
    FreeGiven(usize),
    TakeRewind,
    Claim,
    Revoke(usize, Withdraw),
    /// Frees the slots of messages that are over.
    LetGo,
    /// It has ended, and the slots for it are withdrawn.
    Ending(usize, Withdraw),
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Worker {
    pub at: At,
    /// Of the lease that it believes to hold; 0 = none.
    pub epoch: u8,
    /// Its lease has expired: its publisher hands over no more messages.
    pub is_late: bool,
    pub cursor: Seq,
    arrived: Slots,
    given_up: Slots,
    /// With the engine and not claimed.
    pub fast_in_flight: Seqs,
    /// The rows of this pass's claim.
    claimed: Seqs,
    pub parked: Seqs,
    /// Handed over and not settled.
    pub out: Seqs,
    /// Not needed any more.
    pub over: Slots,
    /// Read in this pass: low bounds of open transactions; their keys are in the scripts.
    held: [Option<Seq>; SESSIONS],
    /// Read in this pass.
    looked: Seq,
}

impl Worker {
    pub const STARTED: Self = Self {
        at: At::Rest,
        epoch: 0,
        is_late: false,
        cursor: 0,
        arrived: 0,
        given_up: 0,
        fast_in_flight: 0,
        claimed: 0,
        parked: 0,
        out: 0,
        over: 0,
        held: [None; SESSIONS],
        looked: END,
    };

    pub fn is_alive(&self) -> bool {
        !matches!(self.at, At::Ending(..) | At::Dead)
    }

    pub fn claim_late(&mut self) {
        let lowest = members(self.fast_in_flight).next().unwrap_or(END);
        self.cursor = self.cursor.min(lowest.saturating_sub(1));
    }

    /// The claim of this pass failed, or is left out.
    pub fn leave_claim(&mut self) {
        self.at = At::LetGo;
        self.rest_if_over();
    }

    fn rest_if_over(&mut self) {
        if self.at == At::LetGo && self.over == 0 {
            (self.at, self.claimed, self.held, self.looked) = (At::Rest, 0, [None; SESSIONS], END);
        }
    }

    pub fn has_nothing(&self) -> bool {
        self.fast_in_flight | self.parked | self.out | self.over == 0
    }
}

impl FastPath {
    /// The next slot at or after this one that can be filled.
    pub fn slot_from(&self, from: usize) -> Option<usize> {
        (from..SLOTS).find(|slot| {
            let way = self.scripts[slot / MESSAGES].ways.get(slot % MESSAGES);
            way.is_some_and(|way| *way != Way::Table)
        })
    }

    pub(super) fn worker_actions(&self, state: &State, number: usize, actions: &mut Vec<Action>) {
        let worker = &state.workers[number];
        let taking = state.lane.taking;
        if taking.is_some_and(|taking| usize::from(taking.worker) == number) {
            return; // that is what it does now
        }
        let filled_for_it = |slot: &super::Slot| slot.state == SlotState::Ready && usize::from(slot.owner) == number;
        match worker.at {
            At::Dead => {}
            At::Rest => {
                if worker.epoch > 0 || worker.over != 0 || state.slots.iter().any(filled_for_it) {
                    actions.push(Action::Worker(number));
                }
                if worker.out != 0 && taking.is_none() {
                    actions.push(Action::Settle(number));
                }
                if worker.fast_in_flight != 0 && worker.cursor == END && state.late_claims < self.late_claims {
                    actions.push(Action::LateClaim(number));
                }
            }
            At::TakeRewind => actions.extend([Action::Worker(number), Action::ClaimsNothing(number)]),
            At::Claim => actions.extend([Action::Worker(number), Action::ClaimFails(number)]),
            At::Read => actions.extend([Action::Worker(number), Action::ReadFails(number)]),
            _ => actions.push(Action::Worker(number)),
        }
    }

    pub(super) fn worker_acts(&self, state: &mut State, number: usize) {
        let me = number as u8;
        let worker = &mut state.workers[number];
        let next = match worker.at {
            At::Rest if self.made(Mistake::RegistryReadBeforeTaking) => self.entry_from(0, false),
            At::Rest => self.see_from(state, number, 0),
            At::See(slot) => {
                let entry = state.slots[slot];
                let is_mine = entry.state == SlotState::Ready && entry.owner == me && state.reader() == Some(me);
                match is_mine {
                    true => At::Take(slot),
                    false => self.see_from(state, number, slot + 1),
                }
            }
            At::Take(slot) => {
                if state.slots[slot].state == SlotState::Ready {
                    state.slots[slot].state = SlotState::Taken;
                    state.workers[number].arrived |= 1 << slot;
                }
                self.see_from(state, number, slot + 1)
            }
            At::Entry(session, after) => {
                worker.held[session] = worker.held[session].or(state.registry[session]);
                self.entry_from(session + 1, after)
            }
            At::PeekReady(slot, after) => {
                let entry = state.slots[slot];
                if entry.state == SlotState::Ready {
                    worker.looked = worker.looked.min(entry.seq);
                }
                match self.slot_from(slot + 1) {
                    Some(slot) => At::PeekReady(slot, after),
                    None if self.made(Mistake::ReadyPeekedLast) => self.decide(state, number, after),
                    None => At::PeekRewind(after),
                }
            }
            At::PeekRewind(after) => {
                worker.looked = worker.looked.min(state.lane.rewind.unwrap_or(END));
                match self.slot_from(0) {
                    Some(slot) if self.made(Mistake::ReadyPeekedLast) => At::PeekReady(slot, after),
                    _ => self.decide(state, number, after),
                }
            }
            At::Read => {
                self.receive(state, number, true);
                self.give_up_next(state, number)
            }
            At::Rewind(slot) => {
                let seq = state.slots[slot].seq;
                state.rewind(seq);
                At::FreeGiven(slot)
            }
            At::FreeGiven(slot) => {
                worker.given_up &= !(1 << slot);
                state.free(slot);
                self.give_up_next(state, number)
            }
            At::TakeRewind => {
                if state.lane.owner == me
                    && let Some(seq) = state.lane.rewind.take()
                {
                    worker.cursor = worker.cursor.min(seq.saturating_sub(1));
                }
                match worker.cursor {
                    END if worker.parked == 0 => At::LetGo,
                    END => self.entry_from(0, true),
                    _ => At::Claim,
                }
            }
            At::Claim => {
                self.claim(state, number);
                self.revoke_from(state, number, 0)
            }
            At::Revoke(slot, withdraw) => match self.withdraw(state, slot, withdraw) {
                Some(withdraw) => At::Revoke(slot, withdraw),
                None => self.revoke_from(state, number, slot + 1),
            },
            At::LetGo => {
                let slot = worker.over.trailing_zeros() as usize;
                worker.over &= !(1 << slot);
                state.free(slot);
                At::LetGo
            }
            At::Ending(slot, withdraw) => self.end_at(state, number, slot, withdraw),
            At::Dead => At::Dead,
        };
        state.workers[number].at = next;
        state.workers[number].rest_if_over();
    }

    fn see_from(&self, state: &State, number: usize, from: usize) -> At {
        let worker = &state.workers[number];
        match self.slot_from(from) {
            Some(slot) => At::See(slot),
            None if worker.arrived == 0 => Self::begin_claim(worker),
            None if self.made(Mistake::RegistryReadBeforeTaking) => self.look(false),
            None => self.entry_from(0, false),
        }
    }

    fn begin_claim(worker: &Worker) -> At {
        if worker.epoch > 0 { At::TakeRewind } else { At::LetGo }
    }

    fn entry_from(&self, from: usize, after: bool) -> At {
        match (from..SESSIONS).find(|session| !self.scripts[*session].ways.is_empty()) {
            Some(session) => At::Entry(session, after),
            None if !after && self.made(Mistake::RegistryReadBeforeTaking) => {
                self.slot_from(0).map_or(At::TakeRewind, At::See)
            }
            None => self.look(after),
        }
    }

    fn look(&self, after: bool) -> At {
        match self.slot_from(0) {
            Some(slot) if !self.made(Mistake::ReadyNotPeeked) && !self.made(Mistake::ReadyPeekedLast) => {
                At::PeekReady(slot, after)
            }
            _ => At::PeekRewind(after),
        }
    }

    /// Everything is read: messages that may be sent are sent.
    fn decide(&self, state: &mut State, number: usize, after: bool) -> At {
        let next = match after {
            false if self.is_pointer_among(state.workers[number].arrived) => return At::Read,
            false => {
                self.receive(state, number, true);
                self.give_up_next(state, number)
            }
            true => {
                for seq in members(state.workers[number].claimed) {
                    self.admit(state, number, seq);
                }
                self.unpark(state, number);
                At::LetGo
            }
        };
        let worker = &mut state.workers[number];
        (worker.held, worker.looked) = ([None; SESSIONS], END);
        next
    }

    fn is_pointer(&self, slot: usize) -> bool {
        self.scripts[slot / MESSAGES].ways.get(slot % MESSAGES) == Some(&Way::Pointer)
    }

    fn is_pointer_among(&self, arrived: Slots) -> bool {
        (0..SLOTS).any(|slot| arrived & (1 << slot) != 0 && self.is_pointer(slot))
    }

    pub(super) fn read_fails(&self, state: &mut State, number: usize) {
        self.receive(state, number, false);
        state.workers[number].at = self.give_up_next(state, number);
    }

    /// `reads`: whether the events of pointers can be read.
    fn receive(&self, state: &mut State, number: usize, reads: bool) {
        let worker = &mut state.workers[number];
        let arrived = std::mem::take(&mut worker.arrived);
        let may_take = worker.epoch > 0 && (worker.cursor == END || self.made(Mistake::TakenAboveCursor));
        let seqs = (0..SLOTS)
            .filter(|slot| arrived & (1 << slot) != 0)
            .fold(0, |set, slot| set | bit(state.slots[slot].seq));
        let mut goes_on = may_take;
        for (count, seq) in members(seqs).enumerate() {
            let Some(slot) = state.slot_of(seq) else { continue };
            let is_read = reads || !self.is_pointer(slot);
            goes_on &= is_read && count < self.limit;
            if goes_on {
                let is_edited = self.scripts[slot / MESSAGES].edits;
                state.outdated |= is_edited && self.is_pointer(slot) && self.made(Mistake::EventHandedOver);
                state.workers[number].fast_in_flight |= bit(seq);
                self.admit(state, number, seq);
            } else if is_read || !self.made(Mistake::UnreadForgotten) {
                state.workers[number].given_up |= 1 << slot;
            } else {
                state.workers[number].over |= 1 << slot;
            }
        }
        let worker = &mut state.workers[number];
        (worker.held, worker.looked) = ([None; SESSIONS], END);
    }

    fn give_up_next(&self, state: &State, number: usize) -> At {
        let worker = &state.workers[number];
        match worker.given_up {
            0 => Self::begin_claim(worker),
            left => At::Rewind(left.trailing_zeros() as usize),
        }
    }

    fn claim(&self, state: &mut State, number: usize) {
        let rows = state.visible() & !state.gone;
        let (lane, worker) = (&state.lane, &mut state.workers[number]);
        let is_fenced = lane.lease != Some(number as u8) || lane.epoch != worker.epoch;
        let mut found = [0; 8];
        let mut count = 0;
        for seq in members(rows) {
            let is_new = worker.cursor < seq && state.tokens[usize::from(seq)] != worker.epoch;
            if is_new && !is_fenced && count < self.limit {
                found[count] = seq;
                count += 1;
            }
        }
        worker.cursor = if count == self.limit { found[count - 1] } else { END };
        for seq in &found[..count] {
            state.tokens[usize::from(*seq)] = state.workers[number].epoch;
            let slot = state.slot_of(*seq);
            let worker = &mut state.workers[number];
            if worker.fast_in_flight & bit(*seq) == 0 || self.made(Mistake::ClaimedNotRecognised) {
                worker.claimed |= bit(*seq);
            } else {
                worker.fast_in_flight &= !bit(*seq);
                worker.over |= slot.map_or(0, |slot| 1 << slot);
            }
        }
    }

    fn revoke_from(&self, state: &State, number: usize, from: usize) -> At {
        let is_claimed = |slot: &usize| {
            let entry = state.slots[*slot];
            entry.state != SlotState::Free && state.workers[number].claimed & bit(entry.seq) != 0
        };
        match (from..SLOTS).find(is_claimed) {
            Some(slot) if !self.made(Mistake::ClaimedNotRevoked) => At::Revoke(slot, Withdraw::Peek),
            _ => self.entry_from(0, true),
        }
    }

    fn admit(&self, state: &mut State, number: usize, seq: Seq) {
        let Some(key) = self.key_of(state, seq) else { return };
        let worker = &state.workers[number];
        let is_behind = members(worker.parked).any(|parked| self.key_of(state, parked) == Some(key));
        match is_behind || self.is_held(state, number, key, seq) {
            true => state.workers[number].parked |= bit(seq),
            false => self.send(state, number, key, seq),
        }
    }

    fn unpark(&self, state: &mut State, number: usize) {
        for key in [Key::A, Key::B] {
            for seq in members(state.workers[number].parked) {
                if self.key_of(state, seq) != Some(key) {
                    continue;
                }
                if self.is_held(state, number, key, seq) || state.workers[number].cursor < seq {
                    break;
                }
                state.workers[number].parked &= !bit(seq);
                self.send(state, number, key, seq);
            }
        }
    }

    fn is_held(&self, state: &State, number: usize, key: Key, seq: Seq) -> bool {
        let worker = &state.workers[number];
        let mut held = worker.held.iter().zip(&self.scripts);
        worker.looked < seq || held.any(|(low, script)| script.key == key && low.is_some_and(|low| low < seq))
    }

    fn send(&self, state: &mut State, number: usize, key: Key, seq: Seq) {
        let worker = &mut state.workers[number];
        if worker.is_late {
            worker.parked |= bit(seq); // it is ready, and the publisher does not take it
            return;
        }
        worker.out |= bit(seq);
        let is_first = state.sent & bit(seq) == 0;
        state.doubled |= !is_first && state.excused & bit(seq) == 0;
        state.excused &= !bit(seq);
        let later = members(state.sent & !state.elsewhere).filter(|later| *later > seq);
        state.overtaken |= is_first && later.map(|later| self.key_of(state, later)).any(|of| of == Some(key));
        state.sent |= bit(seq);
    }

    /// One transaction; changed rows are left alone.
    pub(super) fn settle(&self, state: &mut State, number: usize) {
        let out = std::mem::take(&mut state.workers[number].out);
        let is_held = state.lane.lease == Some(number as u8) && state.lane.epoch == state.workers[number].epoch;
        for seq in members(out) {
            let token = state.tokens[usize::from(seq)];
            if is_held && state.gone & bit(seq) == 0 && (token == 0 || token == state.lane.epoch) {
                state.gone |= bit(seq);
                state.unclaimed |= token == 0;
            }
            let slot = state.slot_of(seq);
            let worker = &mut state.workers[number];
            if worker.fast_in_flight & bit(seq) != 0 {
                worker.fast_in_flight &= !bit(seq);
                worker.over |= slot.map_or(0, |slot| 1 << slot);
            }
        }
        let worker = &mut state.workers[number];
        worker.at = if worker.over == 0 { At::Rest } else { At::LetGo };
    }

    /// The result of a state if only the workers run: passes until one changes nothing. No message in flight is claimed
    /// because it takes long, and there is no sweep.
    pub(super) fn workers_alone(&self, state: &State, holder: usize) -> State {
        let mut state = *state;
        for number in (0..WORKERS).filter(|number| *number != holder) {
            state.learn(number);
        }
        loop {
            let before = state;
            for number in (0..WORKERS).filter(|number| before.workers[*number].is_alive()) {
                self.worker_acts(&mut state, number);
                while state.workers[number].at != At::Rest {
                    self.worker_acts(&mut state, number);
                }
                if state.workers[number].out != 0 {
                    self.settle(&mut state, number);
                }
            }
            if state == before {
                return state;
            }
        }
    }
}
