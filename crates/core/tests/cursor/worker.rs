//! The protocol of a worker.

use super::{
    Access, END, EarlierOwner, Key, LowCursor, May, Mistake, PRODUCERS, STRAY, Seq, Slot, State, bit, members,
};

impl LowCursor {
    /// The last producer is at most a bystander: its entry is read with the one before.
    pub(super) fn pass(&self) -> &'static [Access] {
        use Access::*;
        match self.mistake {
            Some(Mistake::RewindTakenAfterSnapshot) => &[Claim, TakeRewind, ReadEntry(0), ReadEntry(1), Peek],
            Some(Mistake::RegistryReadBeforeSnapshot) => &[TakeRewind, ReadEntry(0), ReadEntry(1), Claim, Peek],
            Some(Mistake::PeekedBeforeRegistryRead) => &[TakeRewind, Claim, Peek, ReadEntry(0), ReadEntry(1)],
            Some(Mistake::NotPeeked) => &[TakeRewind, Claim, ReadEntry(0), ReadEntry(1)],
            Some(Mistake::SlotsReadBeforeSessions) => &[
                TakeRewind,
                Claim,
                SeeSlotEnded,
                FreeSlot,
                ReadSlot,
                ReadEntry(0),
                ReadEntry(1),
                Peek,
            ],
            _ if self.scripts.iter().all(|script| script.may != May::Prepare) => {
                &[TakeRewind, Claim, ReadEntry(0), ReadEntry(1), Peek]
            }
            _ => &[
                TakeRewind,
                Claim,
                SeeSlotEnded,
                FreeSlot,
                ReadEntry(0),
                ReadEntry(1),
                ReadSlot,
                Peek,
            ],
        }
    }

    pub(super) fn worker_acts(&self, state: &mut State) {
        let pass = self.pass();
        self.access(state, pass[state.worker.at]);
        state.worker.at += 1;
        if state.worker.at == pass.len() {
            self.send(state);
            state.worker.end_pass();
        }
    }

    fn access(&self, state: &mut State, access: Access) {
        match access {
            Access::TakeRewind => {
                if state.earlier_owner != EarlierOwner::Owning
                    && let Some(seq) = state.rewind.take()
                {
                    state.worker.cursor = state.worker.cursor.min(seq.saturating_sub(1));
                }
            }
            Access::Claim => self.claim(state, false),
            Access::SeeSlotEnded => state.worker.frees = self.see_slot_ended(state),
            Access::FreeSlot => {
                if let Some(slot) = state.worker.frees.take() {
                    self.free_slot(state, slot);
                }
            }
            Access::ReadEntry(first) => {
                let last = if first == PRODUCERS - 2 { PRODUCERS - 1 } else { first };
                for p in first..=last {
                    state.worker.held[p] = state.worker.held[p].or(state.registry[p]);
                }
            }
            Access::ReadSlot => {
                if let Some(slot) = state.slot.filter(|slot| slot.keys) {
                    let held = &mut state.worker.held[slot.producer];
                    *held = Some(held.map_or(slot.low, |low| low.min(slot.low)));
                }
            }
            Access::Peek => state.worker.peeked = state.rewind.unwrap_or(END),
        }
    }

    pub(super) fn see_slot_ended(&self, state: &mut State) -> Option<Slot> {
        let ended = state.ended_slot()?;
        match self.made(Mistake::SlotFreedBeforeRewindLowered) {
            true => state.slot = None,
            false => state.lower_rewind(ended.low),
        }
        Some(ended)
    }

    pub(super) fn free_slot(&self, state: &mut State, slot: Slot) {
        if self.made(Mistake::SlotFreedBeforeRewindLowered) {
            state.lower_rewind(slot.low);
        } else if state.slot == Some(slot) || self.made(Mistake::SlotFreedWhosever) {
            state.slot = None;
        }
    }

    pub(super) fn claim(&self, state: &mut State, misses_first: bool) {
        let cursor = state.worker.cursor;
        let taken = state.sent | state.discarded | state.worker.parked;
        let found: Vec<Seq> = (state.visible())
            .filter(|seq| cursor < *seq && taken & bit(*seq) == 0)
            .take(self.limit)
            .collect();
        let got = &found[usize::from(misses_first).min(found.len())..];
        state.discarded |= found[..found.len() - got.len()]
            .iter()
            .fold(0, |set, seq| set | bit(*seq));
        state.worker.claimed = got.iter().fold(0, |set, seq| set | bit(*seq));
        let count = match self.made(Mistake::RowsGotCounted) {
            true => got.len(),
            false => found.len(),
        };
        state.worker.cursor = match found.last() {
            Some(last) if count == self.limit => *last,
            _ => END,
        };
    }

    /// The end of a pass: sends or parks the claimed messages; then sends those that need not be parked any more.
    fn send(&self, state: &mut State) {
        for seq in members(state.worker.claimed) {
            let Some(key) = self.key_of(state, seq) else { continue };
            let behind_parked = members(state.worker.parked).any(|parked| self.key_of(state, parked) == Some(key));
            match behind_parked || self.held(state, key, seq) {
                true => state.worker.parked |= bit(seq),
                false => self.send_one(state, key, seq),
            }
        }
        for key in [Key::A, Key::B] {
            for seq in members(state.worker.parked) {
                if self.key_of(state, seq) != Some(key) {
                    continue;
                }
                let read_past = state.worker.cursor >= seq || self.made(Mistake::ParkedReleasedAboveCursor);
                if self.held(state, key, seq) || !read_past {
                    break;
                }
                state.worker.parked &= !bit(seq);
                self.send_one(state, key, seq);
            }
        }
    }

    fn held(&self, state: &State, key: Key, seq: Seq) -> bool {
        let mut held = state.worker.held.iter().zip(&self.scripts);
        state.worker.peeked < seq || held.any(|(low, script)| script.key == key && low.is_some_and(|low| low < seq))
    }

    fn send_one(&self, state: &mut State, key: Key, seq: Seq) {
        let ordered = |seq: Seq| {
            let writer = state.writer(seq).filter(|_| seq != STRAY);
            writer.is_some_and(|p| self.scripts[p].key == key && !state.producers[p].outlived_crash)
        };
        let late = ordered(seq) && members(state.sent).any(|earlier| earlier > seq && ordered(earlier));
        if late {
            state.overtaken.get_or_insert(seq);
        }
        state.sent |= bit(seq);
    }

    pub(super) fn key_of(&self, state: &State, seq: Seq) -> Option<Key> {
        state.writer(seq).map(|p| self.scripts[p].key)
    }

    /// The result of a state if only the worker runs: passes until one changes nothing. Without a sweep, because a row
    /// that only a sweep finds is late.
    pub(super) fn worker_alone(&self, state: &State) -> State {
        let mut state = *state;
        loop {
            let before = state;
            self.worker_acts(&mut state);
            while !state.worker.between_passes() {
                self.worker_acts(&mut state);
            }
            if state == before {
                return state;
            }
        }
    }
}
