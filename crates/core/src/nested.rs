//! What a transaction has noted, by the savepoint in which it did: kept when the savepoint is released, forgotten when it
//! is rolled back. Called by the sessions; `crate::wake` of the extension has one list for each kind of note.
//!
//! Savepoints are nested and their numbers grow, so the notes of a savepoint are always the last ones. A release renames
//! the end of the list and moves nothing: a transaction of n savepoints costs n steps, not n².

/// Notes in the order in which they were made.
#[derive(Debug)]
pub struct Nested<T> {
    notes: Vec<T>,
    /// Where the notes of each savepoint begin that has some, the outermost first: (savepoint, index).
    levels: Vec<(u32, usize)>,
}

impl<T> Nested<T> {
    pub const fn new() -> Self {
        Self {
            notes: Vec::new(),
            levels: Vec::new(),
        }
    }

    pub fn push(&mut self, savepoint: u32, note: T) {
        if self.levels.last().is_none_or(|(last, _)| *last != savepoint) {
            self.levels.push((savepoint, self.notes.len()));
        }
        self.notes.push(note);
    }

    /// Adds to the last note of this savepoint, if `merge` says that it can; else makes one.
    pub fn add(&mut self, savepoint: u32, note: T, merge: impl FnOnce(&mut T, &T) -> bool) {
        let merged = self.of_mut(savepoint).last_mut().is_some_and(|last| merge(last, &note));
        if !merged {
            self.push(savepoint, note);
        }
    }

    /// The notes of this savepoint, which is the innermost one.
    pub fn of_mut(&mut self, savepoint: u32) -> &mut [T] {
        match self.levels.last() {
            Some((last, from)) if *last == savepoint => self.notes.get_mut(*from..).unwrap_or_default(),
            _ => &mut [],
        }
    }

    /// The innermost savepoint is over, and what was noted in it belongs to the one around it. `merge` adds a note to the one
    /// before it, if it can: at most once for each release.
    pub fn release(&mut self, id: u32, into: u32, merge: impl FnOnce(&mut T, &T) -> bool) {
        let Some((_, from)) = self.levels.pop_if(|(last, _)| *last == id) else {
            return;
        };
        if self.levels.last().is_none_or(|(last, _)| *last != into) {
            self.levels.push((into, from));
        } else if let Some((before, [alone])) = self.notes.split_at_mut_checked(from)
            && before.last_mut().is_some_and(|before| merge(before, alone))
        {
            self.notes.pop();
        }
    }

    /// The innermost savepoint was rolled back: `forgotten` sees what was noted in it.
    pub fn abort(&mut self, id: u32, forgotten: impl FnMut(T)) {
        if let Some((_, from)) = self.levels.pop_if(|(last, _)| *last == id) {
            self.notes.drain(from..).for_each(forgotten);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.notes.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.notes.iter_mut()
    }

    pub fn len(&self) -> usize {
        self.notes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.notes.is_empty()
    }

    /// The transaction is over.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.levels.clear();
        self.notes.drain(..)
    }

    /// The transaction is over.
    pub fn clear(&mut self) {
        self.levels.clear();
        self.notes.clear();
    }
}

impl<T> Default for Nested<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOP: u32 = 1;

    fn sum(before: &mut i64, note: &i64) -> bool {
        *before += note;
        true
    }

    #[test]
    fn forty_thousand_released_savepoints_leave_one_sum() {
        let mut sums = Nested::new();
        let mut merges = 0;
        for savepoint in 2..40_002 {
            sums.add(savepoint, 1, sum);
            sums.release(savepoint, TOP, |before, note| {
                merges += 1;
                sum(before, note)
            });
            assert_eq!((sums.len(), sums.levels.len()), (1, 1));
        }
        assert_eq!(merges, 39_999);
        assert_eq!(sums.iter().copied().collect::<Vec<_>>(), [40_000]);
    }

    #[test]
    fn a_release_looks_at_one_note_however_deep_the_savepoints_are_nested() {
        let mut notes = Nested::new();
        (2..10_002).for_each(|savepoint| notes.push(savepoint, savepoint));
        let mut looks = 0;
        for savepoint in (2..10_002).rev() {
            notes.release(savepoint, savepoint - 1, |_, _| {
                looks += 1;
                false
            });
            assert_eq!(notes.len(), 10_000, "nothing is moved or lost");
        }
        assert!(looks <= 10_000, "{looks}");
        assert_eq!(notes.levels, [(TOP, 0)]);
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
        fn what_was_rolled_back_is_forgotten_and_nothing_else(steps in proptest::collection::vec(step(), 0..200), merged: bool) {
            let mut notes = Nested::new();
            let (mut open, mut next) = (vec![TOP], TOP);
            let mut expected: Vec<Vec<i64>> = vec![Vec::new()]; // of each open savepoint
            let merge = |before: &mut i64, note: &i64| merged && sum(before, note);
            for step in steps {
                let current = open[open.len() - 1];
                match step {
                    Step::Note(note) => {
                        notes.add(current, note, merge);
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
                        notes.release(current, open[open.len() - 1], merge);
                    }
                    Step::Abort if open.len() > 1 => {
                        open.pop();
                        let gone = expected.pop().unwrap();
                        let mut forgotten = Vec::new();
                        notes.abort(current, |note| forgotten.push(note));
                        prop_assert_eq!(forgotten.iter().sum::<i64>(), gone.iter().sum::<i64>());
                    }
                    Step::Release | Step::Abort => {}
                }
                let of_current: i64 = notes.of_mut(open[open.len() - 1]).iter().sum();
                prop_assert_eq!(of_current, expected.last().unwrap().iter().sum::<i64>());
                let all: Vec<i64> = expected.iter().flatten().copied().collect();
                prop_assert_eq!(notes.iter().sum::<i64>(), all.iter().sum::<i64>());
                if !merged {
                    prop_assert_eq!(notes.iter().copied().collect::<Vec<_>>(), all);
                }
            }
        }
    }
}
