//! From where views look for what waits first, in shared memory: of each lane (destination and partition) in which something
//! waited a floor, and the first message that was seen there. Sessions tell it at COMMIT (`session::effects`); it is asked for by
//! outbox_internal.first_waiting(). An old snapshot keeps the index entries of what has ended; without floors each look walks them.
//!
//! Only what is displayed comes from here. Who is in doubt looks from the start.
//!
//! | a database is | COMMIT | a look |
//! |---|---|---|
//! | off | tells nothing | begins |
//! | beginning | tells | reads all lanes from their start, makes those that it found, with floor 0; then the database is on |
//! | on | tells, and makes lanes | reads the lanes that are known, from their floors |
//! | unfit | tells nothing | reads all lanes from their start: there was no room for a lane |
//!
//! A transaction that told nothing was visible before a look began, so that look meets its lane.

use crate::pg::lanes::{First, Lanes};
use crate::pg::shmem::{Shareable, Shared, ShortText, SpinLock};
use crate::pg::{catalog, xact};
use crate::shared::statistics::number_of;
use outbox_core::floor::{Floor, FloorVersion};
use std::sync::atomic::{
    AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// Of all databases together.
const MAX_LANES: usize = 8192;
/// Places in which a lane may be.
const MAX_PROBES: usize = 64;
/// A destination is a foreign server, so its name is no longer than this.
const NAME_BYTES: usize = 64;

#[repr(C)]
struct Table {
    /// Of who makes or frees a lane, or reads or writes what was seen in one.
    lock: SpinLock,
    lanes: [Lane; MAX_LANES],
}

#[repr(C)]
struct Lane {
    /// 0 = free. Written in turn, after what names the lane, by the session that tells of the first message there; read by views.
    database: AtomicU32,
    partition: AtomicU32,
    /// See `statistics::number_of`.
    number: AtomicU64,
    destination: ShortText<NAME_BYTES>,
    /// Lowered at COMMIT, raised by readers.
    floor: Floor,
    /// The first message, as the look saw it that raised the floor to it. Written by readers, in turn.
    seen: Seen,
}

#[repr(C)]
struct Seen {
    /// While the lane gives this ticket it is the first.
    version: AtomicU64,
    /// And while no more messages left the outbox.
    moves: AtomicU32,
    /// In µs since 2000.
    enqueued_at: AtomicI64,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Table {}

static TABLE: Shared<Table> = Shared::new();

/// The floors of a database.
#[repr(C)]
pub struct Use {
    /// How those of its lanes are used: a version, which grows with each change, and a mode. Written by readers, and by who is
    /// in doubt.
    word: AtomicU32,
    /// Of its dead letters; of those that block others. Lowered at COMMIT, raised by readers.
    dead: [Floor; 2],
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Off = 0,
    Beginning = 1,
    On = 2,
    Unfit = 3,
}

impl Use {
    fn now(&self) -> (u32, Mode) {
        let word = self.word.load(SeqCst);
        let mode = match word & 3 {
            0 => Mode::Off,
            1 => Mode::Beginning,
            2 => Mode::On,
            _ => Mode::Unfit,
        };
        (word, mode)
    }

    /// Returns the new word; None = somebody else has changed it.
    fn change(&self, word: u32, to: Mode) -> Option<u32> {
        let changed = (word & !3).wrapping_add(4) | to as u32;
        let done = self.word.compare_exchange(word, changed, SeqCst, SeqCst);
        done.is_ok().then_some(changed)
    }

    /// What waits may have changed without a word: look at all of it. No allocation, no error.
    pub fn doubt(&self) {
        self.dead.iter().for_each(|floor| floor.record(0));
        _ = self.word.fetch_update(SeqCst, SeqCst, |word| {
            (word & 3 != Mode::Unfit as u32).then_some((word & !3).wrapping_add(4))
        });
    }

    /// The database is new in its place.
    pub fn forget(&self) {
        self.doubt();
        self.word.store(0, SeqCst);
    }

    /// A dead letter is visible now, which may block others. Called in the commit callback: no allocation, no error.
    pub fn record_dead(&self, blocks: bool, seq: i64) {
        self.dead[usize::from(blocks)].record(seq);
    }

    /// The first dead letter; the first that blocks others. `first` looks for one that is not below a seq.
    pub fn read_dead(&self, blocks: bool, first: impl Fn(i64) -> Option<i64>) -> Option<i64> {
        let floor = &self.dead[usize::from(blocks)];
        if !xact::may_judge_for_all() {
            return first(floor.peek().from()?);
        }
        let version = floor.take();
        let found = first(version.from()?);
        floor.raise(version, found);
        found
    }
}

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Table>()
}

/// In the startup hook.
pub fn attach() {
    TABLE.attach(c"outbox floors");
}

fn table() -> Option<&'static Table> {
    static HOLD: &Shared<Table> = &TABLE;
    HOLD.get()
}

impl Table {
    fn entries(&self, database: u32, partition: u16, number: u64) -> impl Iterator<Item = &Lane> {
        let mixed = (number ^ u64::from(database) << 16 ^ u64::from(partition)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let start = (mixed >> 32) as usize;
        (0..MAX_PROBES).map(move |step| &self.lanes[(start + step) % MAX_LANES])
    }

    fn find(&self, database: u32, partition: u16, number: u64) -> Option<&Lane> {
        self.entries(database, partition, number).find(|lane| {
            lane.database.load(SeqCst) == database
                && lane.number.load(Relaxed) == number
                && lane.partition.load(Relaxed) == u32::from(partition)
        })
    }

    /// The lane, made if it is missing. No allocation, no error.
    fn lane(&self, database: u32, destination: &str, partition: u16, number: u64) -> Option<&Lane> {
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

    fn lanes_here(&self) -> impl Iterator<Item = &Lane> {
        let database = catalog::my_database();
        (self.lanes.iter()).filter(move |lane| lane.database.load(SeqCst) == database)
    }
}

/// Frees the lanes of databases that are gone. Launcher only.
pub fn forget_databases_but(alive: &[u32]) {
    let Some(table) = table() else { return };
    table.lock.with(|| {
        for lane in &table.lanes {
            if !alive.contains(&lane.database.load(Relaxed)) {
                lane.database.store(0, SeqCst);
            }
        }
    });
}

// ---- at COMMIT ------------------------------------------------------------------------------------------------------

/// A message of this lane is visible now. Called in the commit callback: no allocation, no error.
pub fn record(floors: &Use, destination: &str, partition: u16, number: u64, seq: i64) {
    let (word, mode) = floors.now();
    if mode != Mode::Beginning && mode != Mode::On {
        return;
    }
    let lane = table().and_then(|table| table.lane(catalog::my_database(), destination, partition, number));
    match lane {
        Some(lane) => lane.floor.record(seq),
        None => _ = floors.change(word, Mode::Unfit),
    }
}

// ---- a look ---------------------------------------------------------------------------------------------------------

/// Of each lane the first message that waits. `floors`: of this database, and how often messages left its outbox so far. Prepared
/// transactions that are over were noticed before: nobody tells of what they enqueued.
pub fn read(outbox: &Lanes, floors: Option<(&Use, u32)>) -> Vec<First> {
    let Some((table, (floors, moves))) = table().zip(floors) else {
        return everywhere(outbox);
    };
    match floors.now() {
        (_, Mode::On) => at_known_lanes(outbox, table, moves),
        (word, Mode::Off | Mode::Beginning) if xact::may_judge_for_all() => {
            let Some(word) = floors.change(word, Mode::Beginning) else {
                return everywhere(outbox);
            };
            table.lanes_here().for_each(|lane| lane.floor.record(0));
            let firsts = everywhere(outbox);
            let made = firsts.iter().all(|first| {
                let number = number_of(&first.destination);
                let lane = table.lane(catalog::my_database(), &first.destination, first.partition, number);
                lane.is_some()
            });
            let mode = match (made, firsts.is_empty()) {
                (true, true) => Mode::Off,
                (true, false) => Mode::On,
                (false, _) => Mode::Unfit,
            };
            floors.change(word, mode);
            firsts
        }
        _ => everywhere(outbox),
    }
}

fn everywhere(outbox: &Lanes) -> Vec<First> {
    std::iter::successors(outbox.next(None), |first| outbox.next(Some(first))).collect()
}

fn at_known_lanes(outbox: &Lanes, table: &Table, moves: u32) -> Vec<First> {
    let may_raise = xact::may_judge_for_all();
    let first_of = |lane: &Lane| {
        let version = match may_raise {
            true => lane.floor.take(),
            false => lane.floor.peek(),
        };
        let floor = version.from()?;
        let (destination, partition) = (lane.destination.get(), lane.partition.load(Relaxed) as u16);
        if may_raise && let Some(enqueued_at) = table.lock.with(|| lane.seen.at(version, moves)) {
            return Some(First::known(destination, partition, floor, enqueued_at));
        }
        let first = outbox.first(&destination, partition, floor);
        if may_raise {
            table.lock.with(|| {
                let raised = lane.floor.raise(version, first.as_ref().map(|first| first.seq));
                if let (Some(raised), Some(first)) = (raised, &first) {
                    lane.seen.note(raised, moves, first.enqueued_at);
                }
            });
        }
        first
    };
    table.lanes_here().filter_map(first_of).collect()
}

impl Seen {
    fn at(&self, version: FloorVersion, moves: u32) -> Option<i64> {
        let is_it = self.version.load(Relaxed) == version.bits() && self.moves.load(Relaxed) == moves;
        is_it.then(|| self.enqueued_at.load(Relaxed))
    }

    fn note(&self, version: FloorVersion, moves: u32, enqueued_at: i64) {
        self.version.store(version.bits(), Relaxed);
        self.moves.store(moves, Relaxed);
        self.enqueued_at.store(enqueued_at, Relaxed);
    }
}
