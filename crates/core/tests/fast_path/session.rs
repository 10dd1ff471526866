//! The protocol of a session: `src/session/effects.rs` and the first half of `src/shared/fast_path.rs`.

use super::{Action, FastPath, MESSAGES, Mistake, NONE, SESSIONS, Seq, SlotState, State, Way};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// No transaction yet.
    Outside,
    /// Its low bound is 0 until all its seqs are drawn.
    Drawing,
    /// About to change its events.
    Editing,
    /// About to read the reader of a message's lane.
    Copying(usize),
    OwnerRead(usize, u8),
    Committing,
    /// Visible. About to make a message ready.
    Handing(usize),
    /// It is ready; about to check the reader of the lane again.
    Rechecking(usize),
    Freeing(usize),
    Rewinding(usize),
    Leaving,
    LeftEarly,
    Committed,
    /// Has left the list of open transactions; about to empty its slots.
    TakingBack(usize),
    Aborted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Session {
    pub step: Step,
    /// The seqs of its messages that are drawn.
    pub seqs: [Seq; MESSAGES],
    /// Those with a filled slot.
    filled: [bool; MESSAGES],
    committed: bool,
}

impl Session {
    pub const NEW: Self = Self {
        step: Step::Outside,
        seqs: [NONE; MESSAGES],
        filled: [false; MESSAGES],
        committed: false,
    };

    pub fn seqs(&self) -> impl Iterator<Item = Seq> {
        self.seqs.into_iter().filter(|seq| *seq != NONE)
    }

    pub fn is_visible(&self) -> bool {
        self.committed
    }

    pub fn is_at_rest(&self) -> bool {
        matches!(self.step, Step::Outside | Step::Committed | Step::Aborted)
    }

    fn is_open(&self) -> bool {
        matches!(
            self.step,
            Step::Drawing | Step::Editing | Step::Copying(_) | Step::OwnerRead(..) | Step::Committing
        ) && !self.committed
    }
}

impl FastPath {
    pub(super) fn session_actions(&self, state: &State, number: usize, actions: &mut Vec<Action>) {
        let (session, script) = (&state.sessions[number], self.scripts[number]);
        match session.step {
            Step::Committed | Step::Aborted => {}
            Step::Outside if script.ways.is_empty() || !self.may_begin(state, number) => {}
            Step::Copying(message) if script.ways[message] == Way::Either => {
                actions.extend([Action::Session(number), Action::NoRoom(number)]);
            }
            _ => actions.push(Action::Session(number)),
        }
        if session.is_open() && !script.at_once {
            actions.push(Action::Abort(number));
        }
    }

    /// Of two with the same script, it does not matter which is first.
    fn may_begin(&self, state: &State, number: usize) -> bool {
        let twin = |earlier: usize| self.scripts[earlier] == self.scripts[number];
        (0..number).all(|earlier| !twin(earlier) || state.sessions[earlier].step != Step::Outside)
    }

    /// Takes the indivisible steps of a bystander.
    pub(super) fn hasten(&self, state: &mut State) {
        for number in (0..SESSIONS).filter(|number| self.scripts[*number].at_once) {
            let waits = |step| matches!(step, Step::Outside | Step::Committing | Step::Committed);
            while !waits(state.sessions[number].step) {
                self.session_acts(state, number, true);
            }
        }
    }

    pub(super) fn abort(&self, state: &mut State, number: usize) {
        state.registry[number] = None;
        let session = &mut state.sessions[number];
        session.step = Step::TakingBack(0);
        session.seqs = [NONE; MESSAGES]; // they are never seen, so states that differ in them are the same
        self.take_back_next(state, number, 0);
    }

    fn take_back_next(&self, state: &mut State, number: usize, from: usize) {
        let session = &mut state.sessions[number];
        session.step = match (from..MESSAGES).find(|message| session.filled[*message]) {
            Some(message) => Step::TakingBack(message),
            None => Step::Aborted,
        };
    }

    pub(super) fn session_acts(&self, state: &mut State, number: usize, room: bool) {
        let messages = self.scripts[number].ways.len();
        let slot = |message: usize| number * MESSAGES + message;
        match state.sessions[number].step {
            Step::Outside => {
                state.registry[number] = Some(0);
                state.sessions[number].step = Step::Drawing;
            }
            Step::Drawing => {
                state.last_drawn += 1;
                let session = &mut state.sessions[number];
                let drawn = session.seqs().count();
                session.seqs[drawn] = state.last_drawn;
                if drawn + 1 == messages {
                    state.registry[number] = Some(session.seqs[0]);
                    match self.scripts[number].edits {
                        true => session.step = Step::Editing,
                        false => self.end_next(state, number),
                    }
                }
            }
            Step::Editing => self.end_next(state, number),
            Step::Copying(message) => match state.reader().filter(|_| room) {
                Some(owner) => state.sessions[number].step = Step::OwnerRead(message, owner),
                None => self.copy_next(state, number, message + 1),
            },
            Step::OwnerRead(message, owner) => {
                let seq = state.sessions[number].seqs[message];
                let entry = &mut state.slots[slot(message)];
                (entry.state, entry.seq, entry.owner) = (SlotState::Filled, seq, owner);
                state.sessions[number].filled[message] = true;
                self.copy_next(state, number, message + 1);
            }
            Step::Committing => {
                state.sessions[number].committed = true;
                match self.mistake {
                    Some(Mistake::CopiedAfterCommit) => self.copy_next(state, number, 0),
                    Some(Mistake::LeftBeforeReady) => state.sessions[number].step = Step::LeftEarly,
                    _ => self.hand_next(state, number, 0),
                }
            }
            Step::LeftEarly => {
                state.registry[number] = None;
                self.hand_next(state, number, 0);
            }
            Step::Handing(message) => {
                let entry = &mut state.slots[slot(message)];
                let is_filled = entry.state == SlotState::Filled;
                if is_filled {
                    entry.state = SlotState::Ready;
                }
                match is_filled {
                    true if self.made(Mistake::ReaderNotRechecked) => self.hand_next(state, number, message + 1),
                    true => state.sessions[number].step = Step::Rechecking(message),
                    false => state.sessions[number].step = Step::Freeing(message),
                }
            }
            Step::Rechecking(message) => {
                let reader = state.reader();
                let entry = &mut state.slots[slot(message)];
                // Two accesses: the lane, and its own slot. Between them the slot can only be taken or withdrawn, as
                // before.
                let is_mine = entry.state == SlotState::Ready && entry.seq == state.sessions[number].seqs[message];
                if is_mine && reader != Some(entry.owner) {
                    entry.state = SlotState::Revoked;
                    state.sessions[number].step = Step::Freeing(message);
                } else {
                    self.hand_next(state, number, message + 1);
                }
            }
            Step::Freeing(message) => {
                state.free(slot(message));
                state.sessions[number].step = Step::Rewinding(message);
            }
            Step::Rewinding(message) => {
                let seq = state.sessions[number].seqs[message];
                state.rewind(seq);
                self.hand_next(state, number, message + 1);
            }
            Step::Leaving => {
                state.registry[number] = None;
                state.sessions[number].step = Step::Committed;
                state.sessions[number].filled = [false; MESSAGES];
            }
            Step::TakingBack(message) => {
                state.free(slot(message));
                state.sessions[number].filled[message] = false;
                self.take_back_next(state, number, message + 1);
            }
            Step::Committed | Step::Aborted => unreachable!("it is over"),
        }
    }

    /// All statements of the transaction are done.
    fn end_next(&self, state: &mut State, number: usize) {
        match self.made(Mistake::CopiedAfterCommit) {
            true => state.sessions[number].step = Step::Committing,
            false => self.copy_next(state, number, 0),
        }
    }

    fn copy_next(&self, state: &mut State, number: usize, from: usize) {
        let ways = self.scripts[number].ways;
        let session = &mut state.sessions[number];
        session.step = match (from..ways.len()).find(|message| ways[*message] != Way::Table) {
            Some(message) => Step::Copying(message),
            None if session.committed => return self.hand_next(state, number, 0),
            None => Step::Committing,
        };
    }

    fn hand_next(&self, state: &mut State, number: usize, message: usize) {
        let session = &mut state.sessions[number];
        session.step = match message {
            _ if message == self.scripts[number].ways.len() && state.registry[number].is_none() => Step::Committed,
            _ if message == self.scripts[number].ways.len() => Step::Leaving,
            _ if session.filled[message] => Step::Handing(message),
            _ => Step::Rewinding(message),
        };
    }
}
