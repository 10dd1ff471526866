//! The protocol of a worker's passes: crates/core/src/engine/claim.rs, receive.rs, and the second half of
//! `src/shared/fastpath/slot.rs`.

use super::{
    Action, END, Express, Key, MESSAGES, Mistake, PLACES, SESSIONS, Seq, Seqs, Spot, State, WORKERS, Way, Withdraw,
    bit, members,
};

/// A set of places.
type Places = u8;

/// The next access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Between two passes.
    Rest,
    /// (b) Whether it may take what lies in a place ..
    See(usize),
    /// .. and takes it.
    Take(usize),
    /// (c) The entry of a session. The flag, here and below: after the claim.
    Entry(usize, bool),
    /// (d)
    LookAtReady(usize, bool),
    LookAtReopen(bool),
    /// Gives up what it took: tells ..
    Tell(usize),
    /// .. and frees the place.
    FreeGiven(usize),
    TakeReopen,
    Claim,
    Revoke(usize, Withdraw),
    /// Frees the places of what is over.
    LetGo,
    /// It has ended, and what lies there for it is withdrawn.
    Ending(usize, Withdraw),
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Worker {
    pub at: At,
    /// Of the lease that it believes to hold; 0 = none.
    pub epoch: u8,
    /// Its lease has run out: its publisher hands over nothing any more.
    pub is_late: bool,
    pub mark: Seq,
    arrived: Places,
    given_up: Places,
    /// With the engine and not claimed.
    pub in_hand: Seqs,
    /// What the claim of this pass brought.
    claimed: Seqs,
    pub parked: Seqs,
    /// Handed over and not settled.
    pub out: Seqs,
    /// Needed no more.
    pub over: Places,
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
        mark: 0,
        arrived: 0,
        given_up: 0,
        in_hand: 0,
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
        let lowest = members(self.in_hand).next().unwrap_or(END);
        self.mark = self.mark.min(lowest.saturating_sub(1));
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
        self.in_hand | self.parked | self.out | self.over == 0
    }
}

impl Express {
    /// The next place at or after this one where something can lie.
    pub fn place_from(&self, from: usize) -> Option<usize> {
        (from..PLACES).find(|place| {
            let way = self.scripts[place / MESSAGES].ways.get(place % MESSAGES);
            way.is_some_and(|way| *way != Way::Table)
        })
    }

    pub(super) fn worker_actions(&self, state: &State, number: usize, actions: &mut Vec<Action>) {
        let worker = &state.workers[number];
        let taking = state.lane.taking;
        if taking.is_some_and(|taking| usize::from(taking.worker) == number) {
            return; // that is what it does now
        }
        let laid_for_it = |place: &super::Place| place.state == Spot::Ready && usize::from(place.owner) == number;
        match worker.at {
            At::Dead => {}
            At::Rest => {
                if worker.epoch > 0 || worker.over != 0 || state.places.iter().any(laid_for_it) {
                    actions.push(Action::Worker(number));
                }
                if worker.out != 0 && taking.is_none() {
                    actions.push(Action::Settle(number));
                }
                if worker.in_hand != 0 && worker.mark == END && state.late_claims < self.late_claims {
                    actions.push(Action::LateClaim(number));
                }
            }
            At::TakeReopen => actions.extend([Action::Worker(number), Action::ClaimsNothing(number)]),
            At::Claim => actions.extend([Action::Worker(number), Action::ClaimFails(number)]),
            _ => actions.push(Action::Worker(number)),
        }
    }

    pub(super) fn worker_acts(&self, state: &mut State, number: usize) {
        let me = number as u8;
        let worker = &mut state.workers[number];
        let next = match worker.at {
            At::Rest if self.made(Mistake::RegistryReadBeforeTaking) => self.entry_from(0, false),
            At::Rest => self.see_from(state, number, 0),
            At::See(place) => {
                let spot = state.places[place];
                let is_mine = spot.state == Spot::Ready && spot.owner == me && state.reader() == Some(me);
                match is_mine {
                    true => At::Take(place),
                    false => self.see_from(state, number, place + 1),
                }
            }
            At::Take(place) => {
                if state.places[place].state == Spot::Ready {
                    state.places[place].state = Spot::Taken;
                    state.workers[number].arrived |= 1 << place;
                }
                self.see_from(state, number, place + 1)
            }
            At::Entry(session, after) => {
                worker.held[session] = worker.held[session].or(state.registry[session]);
                self.entry_from(session + 1, after)
            }
            At::LookAtReady(place, after) => {
                let spot = state.places[place];
                if spot.state == Spot::Ready {
                    worker.looked = worker.looked.min(spot.seq);
                }
                match self.place_from(place + 1) {
                    Some(place) => At::LookAtReady(place, after),
                    None if self.made(Mistake::ReadyLookedAtLast) => self.decide(state, number, after),
                    None => At::LookAtReopen(after),
                }
            }
            At::LookAtReopen(after) => {
                worker.looked = worker.looked.min(state.lane.reopen.unwrap_or(END));
                match self.place_from(0) {
                    Some(place) if self.made(Mistake::ReadyLookedAtLast) => At::LookAtReady(place, after),
                    _ => self.decide(state, number, after),
                }
            }
            At::Tell(place) => {
                let seq = state.places[place].seq;
                state.reopen(seq);
                At::FreeGiven(place)
            }
            At::FreeGiven(place) => {
                worker.given_up &= !(1 << place);
                state.free(place);
                self.give_up_next(state, number)
            }
            At::TakeReopen => {
                if state.lane.owner == me
                    && let Some(seq) = state.lane.reopen.take()
                {
                    worker.mark = worker.mark.min(seq.saturating_sub(1));
                }
                match worker.mark {
                    END if worker.parked == 0 => At::LetGo,
                    END => self.entry_from(0, true),
                    _ => At::Claim,
                }
            }
            At::Claim => {
                self.claim(state, number);
                self.revoke_from(state, number, 0)
            }
            At::Revoke(place, withdraw) => match self.withdraw(state, place, withdraw) {
                Some(withdraw) => At::Revoke(place, withdraw),
                None => self.revoke_from(state, number, place + 1),
            },
            At::LetGo => {
                let place = worker.over.trailing_zeros() as usize;
                worker.over &= !(1 << place);
                state.free(place);
                At::LetGo
            }
            At::Ending(place, withdraw) => self.end_at(state, number, place, withdraw),
            At::Dead => At::Dead,
        };
        state.workers[number].at = next;
        state.workers[number].rest_if_over();
    }

    fn see_from(&self, state: &State, number: usize, from: usize) -> At {
        let worker = &state.workers[number];
        match self.place_from(from) {
            Some(place) => At::See(place),
            None if worker.arrived == 0 => Self::begin_claim(worker),
            None if self.made(Mistake::RegistryReadBeforeTaking) => self.look(false),
            None => self.entry_from(0, false),
        }
    }

    fn begin_claim(worker: &Worker) -> At {
        if worker.epoch > 0 { At::TakeReopen } else { At::LetGo }
    }

    fn entry_from(&self, from: usize, after: bool) -> At {
        match (from..SESSIONS).find(|session| !self.scripts[*session].ways.is_empty()) {
            Some(session) => At::Entry(session, after),
            None if !after && self.made(Mistake::RegistryReadBeforeTaking) => {
                self.place_from(0).map_or(At::TakeReopen, At::See)
            }
            None => self.look(after),
        }
    }

    fn look(&self, after: bool) -> At {
        match self.place_from(0) {
            Some(place) if !self.made(Mistake::ReadyNotLookedAt) && !self.made(Mistake::ReadyLookedAtLast) => {
                At::LookAtReady(place, after)
            }
            _ => At::LookAtReopen(after),
        }
    }

    /// All is read: what may go goes.
    fn decide(&self, state: &mut State, number: usize, after: bool) -> At {
        let next = match after {
            false => {
                self.receive(state, number);
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

    fn receive(&self, state: &mut State, number: usize) {
        let worker = &mut state.workers[number];
        let arrived = std::mem::take(&mut worker.arrived);
        let may_take = worker.epoch > 0 && (worker.mark == END || self.made(Mistake::TakenAboveMark));
        let seqs = (0..PLACES)
            .filter(|place| arrived & (1 << place) != 0)
            .fold(0, |set, place| set | bit(state.places[place].seq));
        for (count, seq) in members(seqs).enumerate() {
            if may_take && count < self.limit {
                state.workers[number].in_hand |= bit(seq);
                self.admit(state, number, seq);
            } else if let Some(place) = state.place_of(seq) {
                state.workers[number].given_up |= 1 << place;
            }
        }
    }

    fn give_up_next(&self, state: &State, number: usize) -> At {
        let worker = &state.workers[number];
        match worker.given_up {
            0 => Self::begin_claim(worker),
            left => At::Tell(left.trailing_zeros() as usize),
        }
    }

    fn claim(&self, state: &mut State, number: usize) {
        let rows = state.visible() & !state.gone;
        let (lane, worker) = (&state.lane, &mut state.workers[number]);
        let is_fenced = lane.lease != Some(number as u8) || lane.epoch != worker.epoch;
        let mut found = [0; 8];
        let mut count = 0;
        for seq in members(rows) {
            let is_new = worker.mark < seq && state.tokens[usize::from(seq)] != worker.epoch;
            if is_new && !is_fenced && count < self.limit {
                found[count] = seq;
                count += 1;
            }
        }
        worker.mark = if count == self.limit { found[count - 1] } else { END };
        for seq in &found[..count] {
            state.tokens[usize::from(*seq)] = state.workers[number].epoch;
            let place = state.place_of(*seq);
            let worker = &mut state.workers[number];
            if worker.in_hand & bit(*seq) == 0 || self.made(Mistake::ClaimedNotRecognised) {
                worker.claimed |= bit(*seq);
            } else {
                worker.in_hand &= !bit(*seq);
                worker.over |= place.map_or(0, |place| 1 << place);
            }
        }
    }

    fn revoke_from(&self, state: &State, number: usize, from: usize) -> At {
        let is_claimed = |place: &usize| {
            let spot = state.places[*place];
            spot.state != Spot::Free && state.workers[number].claimed & bit(spot.seq) != 0
        };
        match (from..PLACES).find(is_claimed) {
            Some(place) if !self.made(Mistake::ClaimedNotRevoked) => At::Revoke(place, Withdraw::Look),
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
                if self.is_held(state, number, key, seq) || state.workers[number].mark < seq {
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

    /// One transaction; what it finds changed is left alone.
    pub(super) fn settle(&self, state: &mut State, number: usize) {
        let out = std::mem::take(&mut state.workers[number].out);
        let is_held = state.lane.lease == Some(number as u8) && state.lane.epoch == state.workers[number].epoch;
        for seq in members(out) {
            let token = state.tokens[usize::from(seq)];
            if is_held && state.gone & bit(seq) == 0 && (token == 0 || token == state.lane.epoch) {
                state.gone |= bit(seq);
                state.unclaimed |= token == 0;
            }
            let place = state.place_of(seq);
            let worker = &mut state.workers[number];
            if worker.in_hand & bit(seq) != 0 {
                worker.in_hand &= !bit(seq);
                worker.over |= place.map_or(0, |place| 1 << place);
            }
        }
        let worker = &mut state.workers[number];
        worker.at = if worker.over == 0 { At::Rest } else { At::LetGo };
    }

    /// What becomes of a state if only the workers go on: passes until one changes nothing. Nothing that is in hand is
    /// claimed because it lasts, and nobody sweeps.
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
