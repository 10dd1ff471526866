//! The rows that a transaction has written and that have no event yet, in the order of the writes. Called by the
//! session that writes them: `src/session/capture.rs`.
//!
//! A change is noted when its row is written. Its event is made later, at the end of its query or earlier, and in the
//! order of this log. Two kinds of change wait for the end of their query: a delete that may be the first half of a
//! move to another partition, and the new aggregate of an update that changes the id. Another row may still have that
//! id.
//!
//! If a savepoint is rolled back, its changes are forgotten. A change from before it, whose event was stored inside, is
//! to be stored again.

use crate::engine::RowId;
use std::collections::{HashMap, VecDeque};

/// A version of a row. It stays readable until the transaction ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// The OID of the table; of the partition, if the table has any.
    pub table: u32,
    pub at: RowId,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    Insert(Version),
    Update {
        old: Version,
        new: Version,
    },
    Delete(Version),
    /// The second half of an update that changed the id of the aggregate: the new one, by its key.
    Arrive {
        new: Version,
        key: String,
    },
}

/// The role that wrote a row, and the restrictions of the server that were in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Writer {
    pub role: u32,
    pub restrictions: i32,
}

/// Who writes a row, for all rows of a table that a query writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    pub query: u64,
    pub savepoint: u32,
    pub writer: Writer,
    /// The OID of the table whose capture makes the event, if it is not that of the row: a parent by inheritance.
    pub through: Option<u32>,
    /// A delete may be the first half of a move.
    pub may_move: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowChange {
    pub number: u64,
    pub origin: Origin,
    pub write: Write,
}

impl RowChange {
    /// The OID of the table whose capture makes the event.
    pub fn table(&self) -> u32 {
        let version = match &self.write {
            Write::Insert(version) | Write::Delete(version) => version,
            Write::Update { new, .. } | Write::Arrive { new, .. } => new,
        };
        self.origin.through.unwrap_or(version.table)
    }
}

/// A query that may still write rows.
#[derive(Debug)]
struct RunningQuery {
    id: u64,
    savepoint: u32,
    /// The first row of each kind that it wrote. Their triggers report its end.
    first_writes: Vec<Write>,
    moving: Option<Moving>,
    arrivals: Arrivals,
}

/// The last row that a query has deleted from a partition, if it may be moving to another one: the numbers of both
/// halves.
#[derive(Clone, Copy, Debug)]
struct Moving {
    left: u64,
    arrived: Option<u64>,
}

/// What comes after all rows of a query.
#[derive(Debug, Default)]
struct Arrivals {
    all: Vec<Arrival>,
    /// Their positions by key.
    by_key: HashMap<String, Vec<usize>>,
    /// Those that were stored early, and the savepoint in which that happened.
    stored: Vec<(usize, u32)>,
}

#[derive(Debug)]
struct Arrival {
    origin: Origin,
    new: Version,
    key: String,
    is_stored: bool,
}

#[derive(Debug, Default)]
pub struct ChangeLog {
    /// In order of their numbers.
    pending: VecDeque<RowChange>,
    /// Changes whose event was stored in a savepoint after them, and that savepoint.
    stored: Vec<(RowChange, u32)>,
    /// Mostly one: that of the running statement.
    running: Vec<RunningQuery>,
    next_number: u64,
    next_query: u64,
}

impl ChangeLog {
    // ---- queries ----------------------------------------------------------------------------------------------------

    /// A query will write rows. Returns its id.
    pub fn begin(&mut self, savepoint: u32) -> u64 {
        self.next_query += 1;
        self.running.push(RunningQuery {
            id: self.next_query,
            savepoint,
            first_writes: Vec::new(),
            moving: None,
            arrivals: Arrivals::default(),
        });
        self.next_query
    }

    fn running(&mut self, query: u64) -> Option<&mut RunningQuery> {
        self.running.iter_mut().rev().find(|running| running.id == query)
    }

    /// The trigger of this row, the first one of a query, fires: the query has written all its rows.
    pub fn first_fires(&mut self, first: &Write) {
        let of_first = |running: &RunningQuery| running.first_writes.contains(first);
        if let Some(query) = self.running.iter().rev().find(|running| of_first(running)) {
            self.ended(query.id);
        }
    }

    /// A query is over.
    pub fn ended(&mut self, query: u64) {
        let Some(position) = self.running.iter().rposition(|running| running.id == query) else {
            return;
        };
        let RunningQuery {
            mut arrivals,
            savepoint: of_query,
            ..
        } = self.running.remove(position);
        let mut of = |position: usize, arrivals: &mut Arrivals| {
            let Arrival { origin, new, key, .. } = &mut arrivals.all[position];
            self.next_number += 1;
            RowChange {
                number: self.next_number,
                origin: Origin {
                    savepoint: of_query,
                    ..*origin
                },
                write: Write::Arrive {
                    new: *new,
                    key: std::mem::take(key),
                },
            }
        };
        for (position, savepoint) in std::mem::take(&mut arrivals.stored) {
            let change = of(position, &mut arrivals);
            self.stored.push((change, savepoint));
        }
        for position in 0..arrivals.all.len() {
            if !arrivals.all[position].is_stored {
                let change = of(position, &mut arrivals);
                self.pending.push_back(change);
            }
        }
    }

    /// Whether there is memory for a further change, and for a new aggregate that waits for its query.
    pub fn has_room(&mut self, arrives: bool) -> bool {
        let mut queries = self.running.iter_mut().filter(|_| arrives);
        self.pending.try_reserve(2).is_ok()
            && queries.all(|query| {
                let Arrivals { all, by_key, .. } = &mut query.arrivals;
                all.try_reserve(1).is_ok() && by_key.try_reserve(1).is_ok()
            })
    }

    // ---- rows -------------------------------------------------------------------------------------------------------

    /// A row is written. `is_first`: its trigger will report the end of the query.
    pub fn add(&mut self, origin: Origin, write: Write, is_first: bool) {
        if self.pending.back().is_some_and(|last| last.write == write) {
            return; // a trigger of a user has the same WHEN clause
        }
        self.next_number += 1;
        let number = self.next_number;
        if let Some(query) = self.running(origin.query) {
            if is_first {
                query.first_writes.push(write.clone());
            }
            query.moving = match (&write, query.moving) {
                (Write::Delete(_), _) if origin.may_move => Some(Moving {
                    left: number,
                    arrived: None,
                }),
                (Write::Insert(_), Some(Moving { left, arrived: None })) => Some(Moving {
                    left,
                    arrived: Some(number),
                }),
                _ => None,
            };
        }
        self.pending.push_back(RowChange { number, origin, write });
    }

    /// Whether this query has deleted a row and inserted one, which may be a move.
    pub fn may_be_move(&self, query: u64) -> bool {
        let mut running = self.running.iter().rev();
        let query = running.find(|running| running.id == query);
        query.is_some_and(|query| query.moving.is_some_and(|moving| moving.arrived.is_some()))
    }

    /// Core has evaluated the clause of a partitioned table, as it does right after a row has moved between partitions:
    /// the delete and the insert are one update. `left`: the version that the row has left; None = core says nothing of
    /// it. False: this is no move, or its events are stored.
    pub fn moved(&mut self, query: u64, left: Option<Version>) -> bool {
        let moving = self.running(query).and_then(|query| query.moving.take());
        moving.is_some_and(|moving| self.join(moving, |old| left.is_none_or(|left| left == old)))
    }

    /// Events are to be stored before that clause was evaluated: functions in RETURNING have written rows.
    pub fn assume_moves(&mut self, is_moved: impl Fn(Version) -> bool) {
        for position in 0..self.running.len() {
            if let Some(moving) = self.running[position].moving.take_if(|moving| moving.arrived.is_some()) {
                self.join(moving, &is_moved);
            }
        }
    }

    /// Makes one update of a delete and an insert, if nothing was written between both.
    fn join(&mut self, moving: Moving, is_it: impl Fn(Version) -> bool) -> bool {
        let Some(at) = self.position(moving.left) else {
            return false;
        };
        let next = self
            .pending
            .get(at + 1)
            .filter(|next| Some(next.number) == moving.arrived);
        match (&self.pending[at].write, next.map(|next| &next.write)) {
            (Write::Delete(old), Some(Write::Insert(new))) if is_it(*old) => {
                self.pending[at].write = Write::Update { old: *old, new: *new };
                self.pending.remove(at + 1);
                true
            }
            _ => false,
        }
    }

    fn position(&self, number: u64) -> Option<usize> {
        self.pending.binary_search_by_key(&number, |change| change.number).ok()
    }

    // ---- events -----------------------------------------------------------------------------------------------------

    /// How many changes have no event.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// The next changes whose events are to be stored, at most as many. Not a delete that may be half of a move, while
    /// nothing was written after it and `is_moved` is true.
    pub fn next(&self, count: usize, is_moved: impl Fn(Version) -> bool) -> Vec<RowChange> {
        let mut next: Vec<RowChange> = self.pending.iter().take(count).cloned().collect();
        if next.len() == self.pending.len()
            && let Some(RowChange {
                origin,
                write: Write::Delete(old),
                ..
            }) = next.last()
            && origin.may_move
            && self.running.iter().any(|query| query.id == origin.query)
            && is_moved(*old)
        {
            next.pop();
        }
        next
    }

    /// This update changes the id of the aggregate. It is a delete from now on; the new aggregate comes after the rows
    /// of its query.
    pub fn split(&mut self, number: u64, key: String) {
        let Some(position) = self.position(number) else { return };
        let RowChange { origin, write, .. } = &mut self.pending[position];
        let Write::Update { old, new } = *write else { return };
        *write = Write::Delete(old);
        let origin = Origin {
            may_move: false,
            ..*origin
        };
        self.pending[position].origin = origin;
        match self.running(origin.query) {
            Some(query) => query.arrivals.add(Arrival {
                origin,
                new,
                key,
                is_stored: false,
            }),
            None => {
                self.next_number += 1;
                self.pending.push_back(RowChange {
                    number: self.next_number,
                    origin,
                    write: Write::Arrive { new, key },
                });
            }
        }
    }

    /// Whether new aggregates wait for the end of a query.
    pub fn has_arrivals(&self) -> bool {
        self.running.iter().any(|query| !query.arrivals.by_key.is_empty())
    }

    /// The new aggregate with this key, if it waits for the end of another query than this one. It counts as stored in
    /// this savepoint.
    pub fn take_arrival(&mut self, key: &str, other_than: u64, savepoint: u32) -> Option<RowChange> {
        let mut queries = self.running.iter_mut().filter(|query| query.id != other_than);
        queries.find_map(|query| query.arrivals.take(key, query.savepoint, savepoint))
    }

    /// The events of the first changes, up to the one with this number, are stored in this savepoint.
    pub fn stored(&mut self, last: u64, savepoint: u32) {
        while let Some(change) = self.pending.pop_front_if(|change| change.number <= last) {
            if change.origin.savepoint != savepoint {
                self.stored.push((change, savepoint));
            }
        }
    }

    // ---- savepoints -------------------------------------------------------------------------------------------------

    /// The innermost savepoint was released: its changes are those of the savepoint around it.
    pub fn released(&mut self, id: u32, into: u32) {
        let renamed = |savepoint: &mut u32| {
            if *savepoint == id {
                *savepoint = into;
            }
        };
        for change in &mut self.pending {
            renamed(&mut change.origin.savepoint);
        }
        self.stored.retain_mut(|(change, savepoint)| {
            renamed(&mut change.origin.savepoint);
            renamed(savepoint);
            change.origin.savepoint != *savepoint
        });
        for query in &mut self.running {
            renamed(&mut query.savepoint);
            query.arrivals.stored.retain_mut(|(_, savepoint)| {
                renamed(savepoint);
                *savepoint != query.savepoint
            });
        }
    }

    /// The innermost savepoint was rolled back.
    pub fn aborted(&mut self, id: u32) {
        self.running.retain(|query| query.savepoint != id);
        self.pending.retain(|change| change.origin.savepoint != id);
        for (change, savepoint) in std::mem::take(&mut self.stored) {
            match savepoint == id {
                true if change.origin.savepoint == id => {}
                true => self.pending.push_back(change),
                false => self.stored.push((change, savepoint)),
            }
        }
        self.pending.make_contiguous().sort_by_key(|change| change.number);
        for query in &mut self.running {
            query.arrivals.aborted(id);
        }
    }

    /// No query runs any more: the transaction is about to end.
    pub fn all_ended(&mut self) {
        while let Some(query) = self.running.last().map(|query| query.id) {
            self.ended(query);
        }
    }

    /// The transaction is over. This allocates nothing.
    pub fn clear(&mut self) {
        self.pending.clear();
        self.stored.clear();
        self.running.clear();
        if self.pending.capacity() > KEPT {
            self.pending = VecDeque::new();
        }
    }
}

/// The room for changes that a session keeps.
const KEPT: usize = 4_096;

impl Arrivals {
    fn add(&mut self, arrival: Arrival) {
        let positions = self.by_key.entry(arrival.key.clone()).or_default();
        positions.push(self.all.len());
        self.all.push(arrival);
    }

    /// `of_query`: the savepoint of the query.
    fn take(&mut self, key: &str, of_query: u32, savepoint: u32) -> Option<RowChange> {
        let position = self
            .by_key
            .get(key)?
            .iter()
            .find(|position| !self.all[**position].is_stored)?;
        let arrival = &mut self.all[*position];
        arrival.is_stored = true;
        if savepoint != of_query {
            self.stored.push((*position, savepoint));
        }
        Some(RowChange {
            number: 0,
            origin: Origin {
                savepoint: of_query,
                ..arrival.origin
            },
            write: Write::Arrive {
                new: arrival.new,
                key: arrival.key.clone(),
            },
        })
    }

    fn aborted(&mut self, id: u32) {
        let all = &mut self.all;
        self.stored.retain(|(position, savepoint)| {
            if *savepoint == id {
                all[*position].is_stored = false;
            }
            *savepoint != id
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The transaction itself, and savepoints in it.
    const OUTER: u32 = 1;
    const INNER: u32 = 2;

    fn version(table: u32, line: u16) -> Version {
        Version {
            table,
            at: RowId { block: 0, line },
        }
    }

    fn origin(query: u64, savepoint: u32) -> Origin {
        Origin {
            query,
            savepoint,
            writer: Writer::default(),
            through: None,
            may_move: true,
        }
    }

    fn insert(line: u16) -> Write {
        Write::Insert(version(7, line))
    }

    fn update(line: u16) -> Write {
        Write::Update {
            old: version(7, line),
            new: version(7, line + 100),
        }
    }

    /// The next changes, as a session would store their events in this savepoint.
    fn store(log: &mut ChangeLog, savepoint: u32) -> Vec<Write> {
        let next = log.next(100, |_| true);
        if let Some(last) = next.last() {
            log.stored(last.number, savepoint);
        }
        next.into_iter().map(|change| change.write).collect()
    }

    #[test]
    fn changes_come_in_the_order_of_the_writes_and_once() {
        let mut log = ChangeLog::default();
        let (outer, inner) = (log.begin(OUTER), log.begin(OUTER));
        log.add(origin(outer, OUTER), insert(1), true);
        log.add(origin(inner, OUTER), update(1), true);
        log.add(origin(inner, OUTER), update(1), false); // the clause of another trigger, for the same row
        log.add(origin(outer, OUTER), insert(2), false);
        assert_eq!(store(&mut log, OUTER), [insert(1), update(1), insert(2)]);
        assert_eq!(store(&mut log, OUTER), []);
    }

    #[test]
    fn a_delete_waits_for_the_insert_that_makes_it_a_move_until_another_row_is_written_or_its_query_ends() {
        let mut log = ChangeLog::default();
        let query = origin(log.begin(OUTER), OUTER);
        let (old, new) = (version(7, 1), version(8, 1));
        log.add(query, Write::Delete(old), true);
        assert_eq!(store(&mut log, OUTER), []);
        log.add(query, Write::Insert(new), true);
        assert!(log.moved(query.query, Some(old)));
        assert_eq!(store(&mut log, OUTER), [Write::Update { old, new }]);

        log.add(query, Write::Delete(old), false);
        log.add(query, Write::Insert(new), false);
        log.add(origin(log.next_query + 1, OUTER), insert(3), true); // by a function in RETURNING
        log.assume_moves(|_| true);
        assert_eq!(store(&mut log, OUTER), [Write::Update { old, new }, insert(3)]);
        assert!(!log.moved(query.query, Some(old)));

        log.add(query, Write::Delete(old), false);
        log.add(origin(log.next_query + 1, OUTER), insert(4), true);
        assert_eq!(store(&mut log, OUTER), [Write::Delete(old), insert(4)]);

        log.add(query, Write::Delete(old), false);
        log.first_fires(&Write::Insert(new));
        assert_eq!(store(&mut log, OUTER), [Write::Delete(old)]);
    }

    /// A trigger dropped the row in the partition to which it was to move.
    #[test]
    fn an_insert_behind_a_delete_is_no_move_unless_the_clause_of_the_partitioned_table_follows() {
        let mut log = ChangeLog::default();
        let query = origin(log.begin(OUTER), OUTER);
        let (old, other) = (version(7, 1), version(8, 2));
        log.add(query, Write::Delete(old), true);
        log.add(query, Write::Insert(other), true);
        assert!(
            !log.moved(query.query, Some(version(9, 1))),
            "an update of another table"
        );
        assert!(!log.moved(query.query, None), "there was an update between");
        log.assume_moves(|_| true);
        assert_eq!(store(&mut log, OUTER), [Write::Delete(old), Write::Insert(other)]);
    }

    #[test]
    fn a_savepoint_that_is_rolled_back_takes_its_changes_and_gives_back_those_from_before_it() {
        let mut log = ChangeLog::default();
        let (outer, inner) = (log.begin(OUTER), log.begin(INNER));
        log.add(origin(outer, OUTER), insert(1), true);
        log.add(origin(inner, INNER), insert(2), true);
        assert_eq!(store(&mut log, INNER), [insert(1), insert(2)]);
        log.add(origin(inner, INNER), insert(3), false);
        log.aborted(INNER);
        log.add(origin(outer, OUTER), insert(4), false);
        assert_eq!(store(&mut log, OUTER), [insert(1), insert(4)]);
    }

    #[test]
    fn a_savepoint_that_is_released_leaves_nothing_to_store_again() {
        let mut log = ChangeLog::default();
        let (outer, inner) = (log.begin(OUTER), log.begin(3));
        log.add(origin(outer, OUTER), insert(1), true);
        log.add(origin(inner, 3), insert(2), true);
        assert_eq!(store(&mut log, 3).len(), 2);
        log.released(3, INNER);
        assert_eq!(log.stored.len(), 1);
        log.released(INNER, OUTER);
        assert_eq!((log.stored.len(), store(&mut log, OUTER)), (0, Vec::new()));
    }

    #[test]
    fn a_new_aggregate_comes_after_the_rows_of_its_query_but_before_another_query_changes_it() {
        let mut log = ChangeLog::default();
        let query = log.begin(OUTER);
        for line in [1, 2] {
            log.add(origin(query, OUTER), update(line), line == 1);
        }
        for (change, key) in log.next(100, |_| false).iter().zip(["a", "b"]) {
            log.split(change.number, key.into());
        }
        let arrival = |line, key: &str| Write::Arrive {
            new: version(7, line),
            key: key.into(),
        };
        assert_eq!(
            store(&mut log, OUTER),
            [1, 2].map(|line| Write::Delete(version(7, line)))
        );
        assert_eq!(log.take_arrival("b", query, OUTER), None);
        // In a savepoint that is rolled back, and then in one that is not.
        for end in [ChangeLog::aborted, |log: &mut ChangeLog, id| log.released(id, OUTER)] {
            let early = log.take_arrival("b", query + 1, INNER).map(|change| change.write);
            assert_eq!(early, Some(arrival(102, "b")));
            assert_eq!(log.take_arrival("b", query + 1, INNER), None);
            end(&mut log, INNER);
        }
        log.first_fires(&update(1));
        assert_eq!(store(&mut log, OUTER), [arrival(101, "a")]);
        assert!(!log.has_arrivals());
    }

    #[test]
    fn a_query_that_ends_by_an_error_leaves_nothing() {
        let mut log = ChangeLog::default();
        let query = log.begin(INNER);
        log.add(origin(query, INNER), update(1), true);
        log.split(1, "a".into());
        log.ended(query); // its memory is freed before the savepoint ends
        log.aborted(INNER);
        log.all_ended();
        assert_eq!(log.pending(), 0);
    }
}
