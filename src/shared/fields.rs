//! Kinds of fields in shared memory. All bytes zero is the value with which an entry begins.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::SeqCst};

/// Counts events of one kind. A process reads it before it checks what the events are about. If the count differs
/// later, there is something new to check.
#[repr(C)]
#[derive(Default)]
pub struct EventCount(AtomicU32);

impl EventCount {
    pub fn read(&self) -> u32 {
        self.0.load(SeqCst)
    }

    pub fn advance(&self) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[repr(C)]
pub struct Flag(AtomicU32);

impl Flag {
    pub fn is_set(&self) -> bool {
        self.0.load(SeqCst) == 1
    }

    pub fn set(&self) {
        self.0.store(1, SeqCst);
    }

    pub fn clear(&self) {
        self.0.store(0, SeqCst);
    }

    /// Clears the flag. Returns whether this process did it.
    pub fn take(&self) -> bool {
        self.is_set() && self.0.swap(0, SeqCst) == 1
    }
}

/// A number that may be missing. It is stored as its distance from `i64::MAX`, which stands for None.
#[repr(C)]
pub struct OptionalI64(AtomicU64);

impl OptionalI64 {
    pub fn get(&self) -> Option<i64> {
        decoded(self.0.load(SeqCst))
    }

    pub fn set(&self, value: Option<i64>) {
        self.0.store(value.map_or(0, encoded), SeqCst);
    }

    /// Stores a value if it is lower than the stored one. Returns whether it was.
    pub fn lower(&self, value: i64) -> bool {
        self.0.fetch_max(encoded(value), SeqCst) < encoded(value)
    }

    pub fn take(&self) -> Option<i64> {
        decoded(self.0.swap(0, SeqCst))
    }
}

/// How many rows of a kind there are. Transactions that change it add at COMMIT, and maintenance corrects it when it
/// counts the rows. It has no meaning before the first count.
#[repr(C)]
pub struct RowCount {
    rows: AtomicI64,
    is_counted: Flag,
}

impl RowCount {
    pub fn add(&self, rows: i64) {
        self.rows.fetch_add(rows, SeqCst);
    }

    /// None = not counted yet.
    pub fn get(&self) -> Option<i64> {
        self.is_counted.is_set().then(|| self.uncertain())
    }

    /// The number, even if the rows were never counted.
    pub fn uncertain(&self) -> i64 {
        self.rows.load(SeqCst)
    }

    pub fn forget(&self) {
        self.is_counted.clear();
        self.rows.store(0, SeqCst);
    }

    /// Takes over the rows that were found by a count, if the number was `before` when the count began. While rows come
    /// and go, the count and the number may both include the same one, so a known number that has changed stays.
    /// Returns whether rows were changed without a record.
    pub fn correct(&self, before: i64, found: i64) -> bool {
        let is_steady = self.get().is_none_or(|known| known == before);
        if is_steady {
            self.add(found - before);
        }
        self.is_counted.set();
        is_steady && found != before
    }
}

/// A number that no row exceeds. It is known once the rows have been read that were there before the shared memory.
#[repr(C)]
pub struct Highest {
    number: AtomicI64,
    is_known: Flag,
}

impl Highest {
    /// Called before a row with this number can be seen.
    pub fn raise(&self, number: i64) {
        self.number.fetch_max(number, SeqCst);
    }

    /// Takes over the highest number of all rows that can be seen.
    pub fn know(&self, number: i64) {
        self.raise(number);
        self.is_known.set();
    }

    pub fn get(&self) -> Option<i64> {
        self.is_known.is_set().then(|| self.number.load(SeqCst))
    }

    /// The number stays: rows may be on their way.
    pub fn forget(&self) {
        self.is_known.clear();
    }
}

fn encoded(value: i64) -> u64 {
    (i64::MAX as u64).wrapping_sub(value as u64)
}

fn decoded(distance: u64) -> Option<i64> {
    (distance != 0).then(|| (i64::MAX as u64).wrapping_sub(distance) as i64)
}
