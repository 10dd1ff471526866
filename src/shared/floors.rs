//! Where views begin to search for the first waiting message, in shared memory. Each lane (destination and partition)
//! in which a message waited has a floor, and the first message that was seen there. Sessions record their messages at
//! COMMIT (`session::effects`); outbox_internal.shared_memory() reads. An old snapshot keeps the index entries of
//! messages that have ended. Without floors, each search walks them.
//!
//! Only displayed values come from here. A search that cannot rely on the floors begins at the start.
//!
//! | a database is | COMMIT | a search |
//! |---|---|---|
//! | off | records nothing | changes it to beginning |
//! | beginning | records | reads all lanes from their start, creates those that it found (floor 0), changes to on |
//! | on | records, and creates lanes; changes it to off if there is no room | reads the known lanes, from their floors |
//!
//! A transaction that recorded nothing was visible before that search began, so the search meets its lane.

use crate::pg::lane_scan::{FirstRow, OutboxLanes};
use crate::pg::shmem::{Shareable, SharedStruct, ShortText, SpinLock};
use crate::pg::{catalog, xact};
use crate::shared::free_but;
use crate::shared::statistics::number_of;
use outbox_core::floor::{Floor, FloorVersion};
use std::sync::atomic::{
    AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// Lanes that can have an entry, of all databases together.
const MAX_LANES: usize = 8192;
/// Entries that are tried for one lane.
const MAX_PROBES: usize = 64;
/// The most bytes of a destination's name: a destination is a foreign server, so its name is no longer than this.
const NAME_BYTES: usize = 64;

#[repr(C)]
pub(super) struct FloorTable {
    /// Held by a process that creates or frees a lane, or reads or writes the first message that was seen in one.
    lock: SpinLock,
    lanes: [LaneFloor; MAX_LANES],
}

#[repr(C)]
struct LaneFloor {
    /// The OID of the database; 0 = the entry is free. Written under the lock, after the fields that name the lane, by
    /// the process that creates it; read by views.
    database: AtomicU32,
    partition: AtomicU32,
    /// The hash of the destination's name; see `statistics::number_of`.
    number: AtomicU64,
    destination: ShortText<NAME_BYTES>,
    /// Lowered at COMMIT, raised by readers.
    floor: Floor,
    /// The first message, as seen by the search that raised the floor to it. Written by readers, under the lock.
    seen: FirstSeen,
}

#[repr(C)]
struct FirstSeen {
    /// The version of the floor when the message was seen. The message is the first of its lane while the floor has
    /// this version and `moves` has not grown.
    version: AtomicU64,
    /// The database's `moves` when the message was seen. It grows when messages leave the outbox.
    moves: AtomicU32,
    /// When the message was enqueued, in µs since 2000.
    enqueued_at: AtomicI64,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for FloorTable {}

pub(super) static AREA: SharedStruct<FloorTable> = SharedStruct::new(c"outbox floors");

/// How a database uses its floors.
#[repr(C)]
pub struct ViewFloors {
    /// A version, which grows with each change, and the mode in the lower 2 bits. Written by readers, by sessions that
    /// find no room for a lane, and by `doubt`.
    word: AtomicU32,
    /// The floors of its dead letters, and of those that block others. Lowered at COMMIT, raised by readers.
    dead: [Floor; 2],
}

#[derive(Clone, Copy, PartialEq)]
enum FloorMode {
    Off = 0,
    Beginning = 1,
    On = 2,
}

impl ViewFloors {
    fn now(&self) -> (u32, FloorMode) {
        let word = self.word.load(SeqCst);
        let mode = match word & 3 {
            0 => FloorMode::Off,
            1 => FloorMode::Beginning,
            _ => FloorMode::On,
        };
        (word, mode)
    }

    /// Returns the new word; None = another process has changed it.
    fn change(&self, word: u32, to: FloorMode) -> Option<u32> {
        let changed = (word & !3).wrapping_add(4) | to as u32;
        let done = self.word.compare_exchange(word, changed, SeqCst, SeqCst);
        done.is_ok().then_some(changed)
    }

    /// Makes the next search begin at the start, because rows may have changed without a record. Neither allocates nor
    /// raises an error.
    pub fn doubt(&self) {
        self.dead.iter().for_each(|floor| floor.record(0));
        let off = |word: u32| Some((word & !3).wrapping_add(4) | FloorMode::Off as u32);
        _ = self.word.fetch_update(SeqCst, SeqCst, off);
    }

    /// Records the lowest seq of dead letters that are visible now; with `blocks`, of those that block others. Called
    /// in the commit callback, so it neither allocates nor raises an error.
    pub fn record_dead(&self, blocks: bool, seq: i64) {
        self.dead[usize::from(blocks)].record(seq);
    }

    /// The first dead letter; with `blocks`, the first that blocks others. `first` searches for the first one that is
    /// not below a seq.
    pub fn read_dead(&self, blocks: bool, first: impl Fn(i64) -> Option<i64>) -> Option<i64> {
        let floor = &self.dead[usize::from(blocks)];
        if !xact::sees_latest_commits() {
            return first(floor.peek().from()?);
        }
        let version = floor.take();
        let found = first(version.from()?);
        floor.raise(version, found);
        found
    }
}

impl FloorTable {
    fn entries(&self, database: u32, partition: u16, number: u64) -> impl Iterator<Item = &LaneFloor> {
        let mixed = (number ^ u64::from(database) << 16 ^ u64::from(partition)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let start = (mixed >> 32) as usize;
        (0..MAX_PROBES).map(move |step| &self.lanes[(start + step) % MAX_LANES])
    }

    fn find(&self, database: u32, partition: u16, number: u64) -> Option<&LaneFloor> {
        self.entries(database, partition, number).find(|lane| {
            lane.database.load(SeqCst) == database
                && lane.number.load(Relaxed) == number
                && lane.partition.load(Relaxed) == u32::from(partition)
        })
    }

    /// The lane, created if it is missing; None if there is no room. Neither allocates nor raises an error.
    fn lane(&self, database: u32, destination: &str, partition: u16, number: u64) -> Option<&LaneFloor> {
        let find = || self.find(database, partition, number);
        find().or_else(|| {
            self.lock.with(|| {
                find().or_else(|| {
                    if destination.len() > NAME_BYTES || destination.contains(char::REPLACEMENT_CHARACTER) {
                        return None;
                    }
                    let mut entries = self.entries(database, partition, number);
                    let free = entries.find(|lane| lane.database.load(SeqCst) == 0)?;
                    free.number.store(number, Relaxed);
                    free.partition.store(u32::from(partition), Relaxed);
                    free.destination.set(destination);
                    free.floor.record(0);
                    free.database.store(database, SeqCst);
                    Some(free)
                })
            })
        })
    }

    fn lanes_here(&self) -> impl Iterator<Item = &LaneFloor> {
        let database = catalog::my_database();
        (self.lanes.iter()).filter(move |lane| lane.database.load(SeqCst) == database)
    }
}

/// Frees the lanes of databases that no longer exist. Called only by the launcher.
pub fn forget_databases_but(alive: &[u32]) {
    if let Some(table) = AREA.get() {
        free_but(&table.lock, table.lanes.iter().map(|lane| &lane.database), alive);
    }
}

// ---- at COMMIT ------------------------------------------------------------------------------------------------------

/// Records that a message of this lane is visible now. Called in the commit callback, so it neither allocates nor
/// raises an error.
pub fn record(floors: &ViewFloors, destination: &str, partition: u16, number: u64, seq: i64) {
    let (word, mode) = floors.now();
    if mode == FloorMode::Off {
        return;
    }
    let lane = AREA
        .get()
        .and_then(|table| table.lane(catalog::my_database(), destination, partition, number));
    match lane {
        Some(lane) => lane.floor.record(seq),
        None => _ = floors.change(word, FloorMode::Off),
    }
}

// ---- a search -------------------------------------------------------------------------------------------------------

/// The first waiting message of each lane. `floors`: those of this database, with the current value of its `moves`. The
/// caller has reaped prepared transactions that are over, because no session records what those enqueued.
pub fn read(outbox: &OutboxLanes, floors: Option<(&ViewFloors, u32)>) -> Vec<FirstRow> {
    let Some((table, (floors, moves))) = AREA.get().zip(floors) else {
        return everywhere(outbox);
    };
    match floors.now() {
        (_, FloorMode::On) => at_known_lanes(outbox, table, moves),
        (word, FloorMode::Off | FloorMode::Beginning) if xact::sees_latest_commits() => {
            let Some(word) = floors.change(word, FloorMode::Beginning) else {
                return everywhere(outbox);
            };
            table.lanes_here().for_each(|lane| lane.floor.record(0));
            let first_rows = everywhere(outbox);
            let made = first_rows.iter().all(|first| {
                let number = number_of(&first.destination);
                let lane = table.lane(catalog::my_database(), &first.destination, first.partition, number);
                lane.is_some()
            });
            // COMMIT need not record while nothing waits.
            let mode = if made && !first_rows.is_empty() {
                FloorMode::On
            } else {
                FloorMode::Off
            };
            floors.change(word, mode);
            first_rows
        }
        _ => everywhere(outbox),
    }
}

fn everywhere(outbox: &OutboxLanes) -> Vec<FirstRow> {
    std::iter::successors(outbox.next(None), |first| outbox.next(Some(first))).collect()
}

fn at_known_lanes(outbox: &OutboxLanes, table: &FloorTable, moves: u32) -> Vec<FirstRow> {
    let may_raise = xact::sees_latest_commits();
    let first_of = |lane: &LaneFloor| {
        let version = match may_raise {
            true => lane.floor.take(),
            false => lane.floor.peek(),
        };
        let floor = version.from()?;
        let (destination, partition) = (lane.destination.get(), lane.partition.load(Relaxed) as u16);
        if may_raise && let Some(enqueued_at) = table.lock.with(|| lane.seen.at(version, moves)) {
            return Some(FirstRow::known(destination, partition, floor, enqueued_at));
        }
        let first = outbox.first(&destination, partition, floor);
        if may_raise {
            table.lock.with(|| {
                let raised = lane.floor.raise(version, first.as_ref().map(|first| first.seq));
                if let (Some(raised), Some(first)) = (raised, &first) {
                    lane.seen.record(raised, moves, first.enqueued_at);
                }
            });
        }
        first
    };
    table.lanes_here().filter_map(first_of).collect()
}

impl FirstSeen {
    fn at(&self, version: FloorVersion, moves: u32) -> Option<i64> {
        let is_it = self.version.load(Relaxed) == version.bits() && self.moves.load(Relaxed) == moves;
        is_it.then(|| self.enqueued_at.load(Relaxed))
    }

    fn record(&self, version: FloorVersion, moves: u32, enqueued_at: i64) {
        self.version.store(version.bits(), Relaxed);
        self.moves.store(moves, Relaxed);
        self.enqueued_at.store(enqueued_at, Relaxed);
    }
}
