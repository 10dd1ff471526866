//! What a transaction has recorded so far, by savepoint: kept when the savepoint is released, forgotten when it is
//! rolled back. Called by the sessions: `src/session/effects.rs`.
//!
//! Savepoints are nested and their numbers grow, so the innermost one is always the last.

/// The record of a savepoint.
pub trait Absorb: Default {
    /// Takes over the record of an inner savepoint, which was released. The cost must grow with the smaller of the two,
    /// or a transaction with n nested savepoints takes n² steps.
    fn absorb(&mut self, child: Self);
}

/// The number of the transaction itself (TopSubTransactionId).
const WHOLE: u32 = 1;

#[derive(Debug, Default)]
pub struct Nested<E> {
    /// The record outside of any savepoint, and of released ones.
    whole: E,
    /// The record of each open savepoint that has one, the outermost first.
    open: Vec<(u32, E)>,
}

impl<E: Absorb> Nested<E> {
    /// The record of this savepoint. It is the innermost one.
    pub fn of(&mut self, savepoint: u32) -> &mut E {
        if savepoint != WHOLE && self.open.last().is_none_or(|(last, _)| *last != savepoint) {
            self.open.push((savepoint, E::default()));
        }
        match self.open.last_mut() {
            Some((last, effects)) if *last == savepoint => effects,
            _ => &mut self.whole,
        }
    }

    /// The innermost savepoint was released: the one around it absorbs its record.
    pub fn release(&mut self, id: u32, into: u32) {
        if let Some((_, child)) = self.open.pop_if(|(last, _)| *last == id) {
            match self.open.last_mut() {
                Some((last, parent)) if *last == into => parent.absorb(child),
                _ if into == WHOLE => self.whole.absorb(child),
                _ => self.open.push((into, child)),
            }
        }
    }

    /// The innermost savepoint was rolled back. Returns its record.
    pub fn abort(&mut self, id: u32) -> Option<E> {
        let (_, undone) = self.open.pop_if(|(last, _)| *last == id)?;
        Some(undone)
    }

    /// The record outside of open savepoints: the whole one, once none is open.
    pub fn whole(&mut self) -> &mut E {
        &mut self.whole
    }

    /// The record of the transaction, then that of each open savepoint.
    pub fn iter(&self) -> impl Iterator<Item = &E> {
        std::iter::once(&self.whole).chain(self.open.iter().map(|(_, effects)| effects))
    }

    /// The transaction is over.
    pub fn clear(&mut self) {
        self.open.clear();
        self.whole = E::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// In the order in which they were made, and how many were moved.
    #[derive(Debug, Default)]
    struct Notes {
        made: Vec<i64>,
        moved: usize,
    }

    impl Absorb for Notes {
        fn absorb(&mut self, mut child: Self) {
            let larger_is_child = child.made.len() > self.made.len();
            if larger_is_child {
                std::mem::swap(self, &mut child);
            }
            self.moved += child.moved + child.made.len();
            match larger_is_child {
                true => _ = self.made.splice(..0, child.made),
                false => self.made.extend(child.made),
            }
        }
    }

    #[test]
    fn forty_thousand_released_savepoints_leave_nothing_open() {
        let mut notes = Nested::<Notes>::default();
        for savepoint in 2..40_002 {
            notes.of(savepoint).made.push(i64::from(savepoint));
            notes.release(savepoint, WHOLE);
            assert!(notes.open.is_empty());
        }
        assert_eq!(notes.whole().made.len(), 40_000);
        assert!(notes.whole().moved <= 40_000, "{}", notes.whole().moved);
    }

    #[test]
    fn a_release_moves_one_note_however_deep_the_savepoints_are_nested() {
        let mut notes = Nested::<Notes>::default();
        (2..10_002).for_each(|savepoint| notes.of(savepoint).made.push(i64::from(savepoint)));
        for savepoint in (2..10_002).rev() {
            notes.release(savepoint, savepoint - 1);
        }
        assert!(notes.open.is_empty());
        assert!(notes.whole().made.iter().copied().eq(2..10_002), "nothing is lost");
        assert!(notes.whole().moved <= 10_000, "{}", notes.whole().moved);
    }

    #[test]
    fn the_record_of_a_savepoint_passes_through_one_without_a_record() {
        let mut notes = Nested::<Notes>::default();
        notes.of(4).made.push(1);
        notes.release(4, 3);
        notes.release(3, 2);
        assert_eq!(notes.abort(2).expect("it is of this one now").made, [1]);
        assert!(notes.whole().made.is_empty());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Note(i64),
        Begin,
        Release,
        Abort,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..100_i64).prop_map(Step::Note),
            Just(Step::Begin),
            Just(Step::Release),
            Just(Step::Abort)
        ]
    }

    proptest! {
        #[test]
        fn only_records_that_were_rolled_back_are_forgotten(steps in proptest::collection::vec(step(), 0..200)) {
            let mut notes = Nested::<Notes>::default();
            let (mut open, mut next) = (vec![WHOLE], WHOLE);
            let mut expected: Vec<Vec<i64>> = vec![Vec::new()]; // one for each open savepoint
            for step in steps {
                let current = open[open.len() - 1];
                match step {
                    Step::Note(note) => {
                        notes.of(current).made.push(note);
                        expected.last_mut().unwrap().push(note);
                    }
                    Step::Begin => {
                        next += 1;
                        open.push(next);
                        expected.push(Vec::new());
                    }
                    Step::Release if open.len() > 1 => {
                        open.pop();
                        let gone = expected.pop().unwrap();
                        expected.last_mut().unwrap().extend(gone);
                        notes.release(current, open[open.len() - 1]);
                    }
                    Step::Abort if open.len() > 1 => {
                        open.pop();
                        let gone = expected.pop().unwrap();
                        prop_assert_eq!(notes.abort(current).unwrap_or_default().made, gone);
                    }
                    Step::Release | Step::Abort => {}
                }
                let all: Vec<i64> = expected.iter().flatten().copied().collect();
                prop_assert_eq!(notes.iter().flat_map(|notes| notes.made.iter().copied()).collect::<Vec<_>>(), all);
            }
            for savepoint in (1..open.len()).rev() {
                notes.release(open[savepoint], open[savepoint - 1]);
            }
            prop_assert_eq!(&notes.whole().made, &expected.concat());
        }
    }
}
