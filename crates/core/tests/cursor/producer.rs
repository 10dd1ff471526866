//! The protocol of a producer.

use super::{Action, Draws, LowCursor, May, Mistake, NONE, PRODUCERS, Producer, STRAY, Slot, State, Step};

impl LowCursor {
    /// The seq is drawn before the call.
    fn draws_first(&self, p: usize) -> bool {
        !matches!(self.scripts[p].draws, Draws::ByUs | Draws::Nested) || self.made(Mistake::RegisteredAfterDrawing)
    }

    pub(super) fn producer_actions(&self, state: &State, p: usize, actions: &mut Vec<Action>) {
        let producer = &state.producers[p];
        let script = self.scripts[p];
        let all_drawn = producer.seqs().count() == script.messages;
        match producer.step {
            Step::Outside if script.messages == 0 || !self.may_begin(state, p) => {}
            Step::Outside if self.draws_first(p) => actions.push(Action::Draw(p)),
            Step::Outside => actions.push(Action::Register(p)),
            Step::DrewUnregistered if script.draws == Draws::ByApplicationInTurn && !self.key_is_free(state, p) => {}
            Step::DrewUnregistered => actions.push(Action::Register(p)),
            Step::Registered => actions.push(Action::Draw(p)),
            Step::Drew if script.draws == Draws::Nested && !all_drawn => actions.push(Action::Draw(p)),
            Step::Drew | Step::RecordedInner => actions.push(Action::Record(p)),
            Step::Recorded if !all_drawn => actions.push(Action::Register(p)),
            Step::Recorded => {
                actions.push(Action::Commit(p));
                let mut others = (0..PRODUCERS).filter(|other| *other != p);
                let room = state.slot.is_none() && !others.any(|other| state.producers[other].prepared());
                if script.may == May::Prepare && room {
                    actions.push(Action::CopyToSlot(p));
                }
            }
            Step::Visible if self.made(Mistake::LeftBeforeRewindLowered) => actions.push(Action::Leave(p)),
            Step::Visible | Step::LeftEarly => actions.push(Action::LowerRewind(p)),
            Step::Rewinds => actions.push(Action::Leave(p)),
            Step::CopiedToSlot => actions.push(Action::Prepare(p)),
            Step::Prepared => actions.push(Action::LeavePrepared(p)),
            Step::PreparedAndLeft => actions.extend([Action::CommitPrepared(p), Action::RollbackPrepared(p)]),
            Step::Committed | Step::Aborted => {}
        }
        if producer.open() && script.may != May::EndAtOnce {
            actions.push(Action::Abort(p));
        }
    }

    fn may_begin(&self, state: &State, p: usize) -> bool {
        // Of two with the same script, it does not matter which is first.
        let twin = |earlier: usize| self.scripts[earlier] == self.scripts[p];
        let first = |earlier: usize| state.producers[earlier].step != Step::Outside;
        (0..p).all(|earlier| !twin(earlier) || first(earlier))
    }

    /// The application lets `p` continue: the transactions of the key before it are over, as far as it can see.
    fn key_is_free(&self, state: &State, p: usize) -> bool {
        let other_key = |earlier: usize| self.scripts[earlier].key != self.scripts[p].key;
        let over = |producer: &Producer| producer.visible() || producer.step == Step::Aborted;
        (0..p).all(|earlier| other_key(earlier) || over(&state.producers[earlier]))
    }

    /// Takes the indivisible steps of a bystander.
    pub(super) fn hasten(&self, state: &mut State) {
        let hasty = |p: &usize| self.scripts[*p].may == May::EndAtOnce;
        for p in (0..PRODUCERS).filter(hasty) {
            let waits = |step| matches!(step, Step::Outside | Step::Recorded | Step::Committed | Step::Aborted);
            while !waits(state.producers[p].step) {
                let mut actions = Vec::new();
                self.producer_actions(state, p, &mut actions);
                self.producer_acts(state, actions[0]);
            }
        }
    }

    pub(super) fn producer_acts(&self, state: &mut State, action: Action) {
        match action {
            Action::Draw(p) => self.draw(state, p),
            Action::Register(p) => self.register(state, p),
            Action::Record(p) => {
                let producer = &mut state.producers[p];
                let inner_first = self.scripts[p].draws == Draws::Nested && producer.step == Step::Drew;
                (producer.step, state.registry[p]) = match inner_first {
                    true if self.made(Mistake::LowRaisedWhileDrawing) => (Step::RecordedInner, producer.seqs().max()),
                    true => (Step::RecordedInner, Some(0)),
                    false => (Step::Recorded, Some(producer.lowest())),
                };
            }
            Action::Abort(p) => {
                state.producers[p].abort();
                state.registry[p] = None;
            }
            Action::Commit(p) => state.producers[p].step = Step::Visible,
            Action::LowerRewind(p) => {
                let producer = &mut state.producers[p];
                producer.step = match producer.step {
                    Step::LeftEarly => Step::Committed,
                    _ => Step::Rewinds,
                };
                let lowest = producer.lowest();
                state.lower_rewind(lowest);
            }
            Action::Leave(p) => {
                let producer = &mut state.producers[p];
                producer.step = match producer.step {
                    Step::Visible => Step::LeftEarly,
                    _ => Step::Committed,
                };
                state.registry[p] = None;
            }
            Action::CopyToSlot(p) => {
                if !self.made(Mistake::PreparedWithoutSlot) {
                    state.slot = state.registry[p].map(|low| Slot {
                        producer: p,
                        low,
                        keys: true,
                    });
                }
                state.producers[p].step = Step::CopiedToSlot;
            }
            Action::Prepare(p) => state.producers[p].step = Step::Prepared,
            Action::LeavePrepared(p) => {
                state.producers[p].step = Step::PreparedAndLeft;
                state.registry[p] = None;
            }
            Action::CommitPrepared(p) => state.producers[p].step = Step::Committed,
            Action::RollbackPrepared(p) => state.producers[p].abort(),
            _ => unreachable!("{action:?} is not a producer's"),
        }
    }

    fn draw(&self, state: &mut State, p: usize) {
        let producer = &mut state.producers[p];
        let seq = match self.scripts[p].draws {
            Draws::StrayFirst if producer.step == Step::Outside => STRAY,
            _ => {
                state.last_drawn += 1;
                state.last_drawn
            }
        };
        let free = producer.seqs.iter().position(|seq| *seq == NONE).expect("a place");
        producer.seqs[free] = seq;
        producer.step = match producer.step {
            Step::Outside => Step::DrewUnregistered,
            _ => Step::Drew,
        };
    }

    fn register(&self, state: &mut State, p: usize) {
        let producer = &mut state.producers[p];
        (producer.step, state.registry[p]) = match producer.step {
            Step::DrewUnregistered => (Step::Recorded, Some(producer.lowest())),
            Step::Recorded if self.made(Mistake::LowKeptWhileDrawing) => (Step::Registered, state.registry[p]),
            _ => (Step::Registered, Some(0)),
        };
    }
}
