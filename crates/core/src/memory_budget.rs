//! The memory that the messages of a worker take, from their claim to their outcome, and how much of it each destination
//! may use. Pure; the engines of a worker share it on its main thread.
//!
//! One that has answered later than each of those that are silent may use all memory, a quarter of what is free at a time.
//! One that is silent gets more only while half of it is free. Any other one gets a small part of what is free until it
//! answers, while a part is free that is kept for those that have. So destinations that hang do not take the memory of
//! those that work, however many they are.

use std::cell::Cell;
use std::rc::Rc;

/// What a message takes besides its headers and its body, in bytes: its structures, the entries for them, and those of its
/// key.
pub const MESSAGE_BYTES: usize = 6 * 1024;
/// For how long a destination has messages and answers none before it counts as silent, in ms.
pub const SILENT_AFTER_MS: u64 = 2_000;
/// The part of the free memory that a destination may use until it answers.
const UNPROVEN_PART: usize = 256;

/// What a destination has shown so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Its last message was answered, after the last answer of any that is silent.
    Answers,
    /// It has not answered since then.
    New,
    /// Its last message was not answered.
    Failed,
    /// It has messages and has answered none for [`SILENT_AFTER_MS`].
    Silent,
}

/// The memory for the messages of a worker.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes: usize,
    taken: Cell<usize>,
    /// The last answer of a destination that was silent afterwards, in ms; None = none was.
    doubted_ms: Cell<Option<u64>>,
}

impl MemoryBudget {
    pub fn new(bytes: usize) -> Rc<Self> {
        Rc::new(Self {
            bytes,
            taken: Cell::new(0),
            doubted_ms: Cell::new(None),
        })
    }

    /// What a destination has shown. `last`: whether its last outcome was an answer, and when it came, in ms; None = it
    /// had none. `silent_ms`: for how long it has answered none of the messages that it has.
    pub fn standing(&self, last: Option<(bool, u64)>, silent_ms: u64) -> Standing {
        match last {
            _ if silent_ms >= SILENT_AFTER_MS => {
                let at_ms = last.map(|(_, at_ms)| at_ms);
                self.doubted_ms.set(self.doubted_ms.get().max(at_ms));
                Standing::Silent
            }
            Some((false, _)) => Standing::Failed,
            Some((true, at_ms)) if Some(at_ms) > self.doubted_ms.get() => Standing::Answers,
            Some(_) | None => Standing::New,
        }
    }

    /// The most bytes that messages should take. Each claim returns at least one message, so they may take a little
    /// more.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes that must be free before a destination that has not answered may take any.
    pub fn short_of(&self) -> usize {
        self.taken().saturating_sub(self.limit(Standing::Failed))
    }

    /// A destination may take more while all messages take less than this.
    fn limit(&self, standing: Standing) -> usize {
        match standing {
            Standing::Answers => self.bytes,
            Standing::New => self.bytes / 4 * 3,
            Standing::Failed => self.bytes / 8 * 5,
            Standing::Silent => self.bytes / 2,
        }
    }

    /// The bytes that messages take now.
    pub fn taken(&self) -> usize {
        self.taken.get()
    }

    /// Takes memory, whether or not there is room. It is free again when the value is dropped.
    pub fn take(self: &Rc<Self>, bytes: usize) -> TakenMemory {
        self.taken.set(self.taken() + bytes);
        let budget = Rc::clone(self);
        TakenMemory { bytes, budget }
    }

    /// The bytes that the next claim of a destination may take; 0 = it may not claim. `sent`: the bytes of its messages
    /// that are without an answer.
    pub fn room(&self, standing: Standing, sent: usize) -> usize {
        let free = self.limit(standing).saturating_sub(self.taken());
        match standing {
            Standing::Answers | Standing::Silent => free.div_ceil(4),
            Standing::New | Standing::Failed => free.div_ceil(UNPROVEN_PART).saturating_sub(sent),
        }
    }
}

/// The memory that one message takes.
#[derive(Debug)]
pub struct TakenMemory {
    bytes: usize,
    budget: Rc<MemoryBudget>,
}

impl TakenMemory {
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for TakenMemory {
    fn drop(&mut self) {
        self.budget.taken.set(self.budget.taken() - self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: usize = 1 << 20;

    #[test]
    fn what_is_dropped_is_free_again() {
        let budget = MemoryBudget::new(ALL);
        let message = budget.take(1_000);
        let _other = budget.take(20);
        assert_eq!((message.bytes(), budget.taken()), (1_000, 1_020));
        assert_eq!(budget.room(Standing::Answers, 0), (ALL - 1_020) / 4);
        drop(message);
        assert_eq!(budget.taken(), 20);
    }

    #[test]
    fn an_answer_counts_if_it_came_after_the_last_one_of_any_that_is_silent() {
        let budget = MemoryBudget::new(ALL);
        let answered = |at_ms| budget.standing(Some((true, at_ms)), 0);
        assert_eq!(budget.standing(None, 0), Standing::New);
        assert_eq!(answered(5), Standing::Answers);
        assert_eq!(budget.standing(None, SILENT_AFTER_MS), Standing::Silent);
        assert_eq!(answered(5), Standing::Answers);
        assert_eq!(budget.standing(Some((true, 7)), SILENT_AFTER_MS), Standing::Silent);
        assert_eq!(
            [5, 7, 8].map(answered),
            [Standing::New, Standing::New, Standing::Answers]
        );
        assert_eq!(budget.standing(Some((false, 9)), 0), Standing::Failed);
    }

    #[test]
    fn any_number_of_destinations_that_hang_leave_room_for_those_that_answer_or_are_new() {
        let budget = MemoryBudget::new(ALL);
        let mut taken = Vec::new();
        for (standing, limit) in [
            (Standing::Silent, ALL / 2),
            (Standing::Failed, ALL / 8 * 5),
            (Standing::New, ALL / 4 * 3),
        ] {
            for _ in 0..10_000 {
                let room = budget.room(standing, 0);
                assert!(room <= ALL / UNPROVEN_PART || standing == Standing::Silent);
                taken.push(budget.take(room));
            }
            assert_eq!(budget.taken(), limit, "{standing:?}");
        }
        assert_eq!(budget.room(Standing::Answers, 0), ALL / 16);
    }

    #[test]
    fn a_destination_without_an_answer_gets_one_message_of_any_size_at_a_time() {
        for standing in [Standing::New, Standing::Failed] {
            for bytes in [UNPROVEN_PART / 2, ALL] {
                let budget = MemoryBudget::new(bytes);
                assert!(budget.room(standing, 0) > 0, "{bytes}");
                let message = budget.take(bytes / 4);
                assert_eq!(budget.room(standing, message.bytes()), 0);
            }
        }
    }
}
