//! What this session is writing, for the triggers that fire while it writes. Runs in a user's backend.
//!
//! Statements on a captured table may be inside of another statement on it: a trigger that the outer one fires changes
//! rows of the table again. The events of the inner one are written first, because the rows of the outer one can only be
//! read at its end. But what the outer one did to a row happened before. So the messages of inner statements are recorded
//! here, and get new seqs once the events of the outer one are written. A record without a message changes nothing, and a
//! statement without a record leaves the order of the writes.

use outbox_core::partition::Partition;
use std::cell::RefCell;
use std::collections::HashMap;

/// A message of an inner statement.
#[derive(Clone, Debug, PartialEq)]
pub struct Inner {
    /// The depth of triggers of its statement.
    depth: i32,
    /// Its position among the messages of inner statements.
    position: usize,
    pub destination: String,
    pub partition: Partition,
    pub seq: i64,
}

#[derive(Default)]
struct CapturedTable {
    /// The depths of triggers at which statements have begun, also such as have ended, and how many messages there were.
    begun: Vec<(i32, usize)>,
    inner: Vec<Inner>,
}

#[derive(Default)]
struct Nesting {
    tables: HashMap<u32, CapturedTable>,
    /// The table and the depth of the statement whose events are being written, if it is an inner one.
    written: Option<(u32, i32)>,
}

thread_local! {
    static NESTING: RefCell<Nesting> = RefCell::default();
}

/// A statement on a table begins. Partitions count as the whole table.
pub fn begins(table: u32, depth: i32) {
    NESTING.with_borrow_mut(|nesting| {
        let table = nesting.tables.entry(table).or_default();
        table.begun.retain(|(begun, _)| *begun < depth);
        if table.begun.is_empty() {
            table.inner.clear(); // of an earlier statement
        }
        table.begun.push((depth, table.inner.len()));
    });
}

/// Writes the events of a statement on a table. Records its messages if the statement is an inner one.
pub fn write<T>(table: u32, depth: i32, body: impl FnOnce() -> T) -> T {
    let _restores = NESTING.with_borrow_mut(|nesting| {
        let begun = nesting.tables.get(&table).map_or(&[][..], |table| &table.begun);
        let is_inner = begun.iter().any(|(begun, _)| *begun < depth);
        Restores(std::mem::replace(
            &mut nesting.written,
            is_inner.then_some((table, depth)),
        ))
    });
    body()
}

struct Restores(Option<(u32, i32)>);

impl Drop for Restores {
    fn drop(&mut self) {
        NESTING.with_borrow_mut(|nesting| nesting.written = self.0);
    }
}

/// Whether the events of an inner statement are being written: their seqs may change.
pub fn is_inner() -> bool {
    NESTING.with_borrow(|nesting| nesting.written.is_some())
}

/// A message is enqueued.
pub fn enqueued(destination: &str, partition: Partition, seq: i64) {
    NESTING.with_borrow_mut(|nesting| {
        let Some((table, depth)) = nesting.written else {
            return;
        };
        let inner = &mut nesting.tables.entry(table).or_default().inner;
        inner.push(Inner {
            depth,
            position: inner.len(),
            destination: destination.to_owned(),
            partition,
            seq,
        });
    });
}

/// The messages of the statements inside of one that has now written its events, in order of seq.
pub fn inside(table: u32, depth: i32) -> Vec<Inner> {
    let mut inside: Vec<Inner> = NESTING.with_borrow(|nesting| {
        let Some(table) = nesting.tables.get(&table) else {
            return Vec::new();
        };
        let Some((_, from)) = table.begun.iter().find(|(begun, _)| *begun == depth) else {
            return Vec::new();
        };
        table.inner[*from..]
            .iter()
            .filter(|inner| inner.depth > depth)
            .cloned()
            .collect()
    });
    inside.sort_by_key(|inner| inner.seq);
    inside
}

/// These messages have new seqs.
pub fn renumbered(table: u32, inside: Vec<Inner>) {
    NESTING.with_borrow_mut(|nesting| {
        let known = &mut nesting.tables.entry(table).or_default().inner;
        for inner in inside {
            if let Some(known) = known.get_mut(inner.position) {
                known.seq = inner.seq;
            }
        }
    });
}

/// After COMMIT nothing may allocate or raise an error: the map only shrinks.
pub fn transaction_over() {
    NESTING.with_borrow_mut(|nesting| nesting.tables.clear());
}
