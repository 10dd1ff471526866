//! Recent failures in shared memory: failures of one destination with the same cause form a group. A failure of
//! messages is recorded when its transaction commits. A worker records a destination that goes down. outbox_errors
//! reads the groups. Successful deliveries never come here. A restart of the server clears the groups.

use crate::pg::catalog;
use crate::pg::clock::now_us;
use crate::pg::shmem::{Shareable, SharedStruct, ShortText, SpinLock};
use crate::shared::free_but;
use crate::shared::statistics::number_of;
use outbox_core::error_group;
use outbox_core::settle::FailureKind;
use outbox_core::words::Word;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The most groups of all databases together. If all are in use, the oldest one is replaced.
const MAX_GROUPS: usize = 1024;
/// The most groups of one database. A database that has this many replaces its own oldest one.
pub const MAX_OF_DATABASE: usize = 100;

#[repr(C)]
pub(super) struct GroupTable {
    /// Held by a process that reads or writes groups.
    lock: SpinLock,
    /// Identifies each group. Kept apart from the texts, because each new failure searches all keys.
    keys: [GroupKey; MAX_GROUPS],
    groups: [Group; MAX_GROUPS],
}

/// The identity of a group. Written and read by all processes, under the lock.
#[repr(C)]
struct GroupKey {
    /// The OID of the database; 0 = the group is free.
    database: AtomicU32,
    /// A hash of destination, kind and message.
    name: AtomicU64,
    /// When the last failure was recorded, in µs since 1970.
    last_us: AtomicI64,
}

/// The contents of a group. Written and read by all processes, under the lock.
#[repr(C)]
struct Group {
    count: AtomicU64,
    first_us: AtomicI64,
    /// The seq of the last message that failed; 0 = the group is about no message.
    last_seq: AtomicI64,
    destination: ShortText<64>,
    kind: ShortText<32>,
    message: ShortText<{ error_group::TEXT_MAX_BYTES }>,
    /// The last error as it was, with its numbers.
    last_error: ShortText<{ error_group::TEXT_MAX_BYTES }>,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for GroupTable {}

pub(super) static AREA: SharedStruct<GroupTable> = SharedStruct::new(c"outbox error groups");

/// Failures of one group, before they are recorded.
pub struct FailureGroup {
    name: u64,
    destination: String,
    kind: &'static str,
    message: String,
    last_error: String,
    count: u64,
    /// The seq of the last message that failed; 0 = the group is about no message.
    last_seq: i64,
}

impl FailureGroup {
    /// A group of `count` messages that failed with this error.
    pub fn of_messages(destination: &str, kind: FailureKind, error: &str, last_seq: i64, count: u64) -> Self {
        Self::new(destination, kind.name(), error, last_seq, count)
    }

    /// A group for a destination that cannot be used.
    pub fn of_destination(destination: &str, reason: &'static str, detail: &str) -> Self {
        Self::new(destination, reason, detail, 0, 1)
    }

    /// A group for a statement of a worker that failed: of the extension, or one that reads the source.
    pub fn of_statement(error: &str, is_of_source: bool) -> Self {
        Self::new("", if is_of_source { "source" } else { "database" }, error, 0, 1)
    }

    fn new(destination: &str, kind: &'static str, text: &str, last_seq: i64, count: u64) -> Self {
        let message = error_group::group(text);
        Self {
            last_error: text[..text.floor_char_boundary(error_group::TEXT_MAX_BYTES)].to_owned(),
            // The parts contain no zero byte, so a zero byte separates them.
            name: number_of(&format!("{destination}\0{kind}\0{message}")),
            destination: destination.to_owned(),
            kind,
            message,
            count,
            last_seq,
        }
    }

    pub fn is_like(&self, other: &Self) -> bool {
        self.name == other.name
    }

    pub fn add(&mut self, more: &Self) {
        self.count += more.count;
        if more.last_seq >= self.last_seq {
            self.last_seq = more.last_seq;
            self.last_error.clone_from(&more.last_error);
        }
    }
}

/// Records failures in this database. Also called in the commit callback, so it neither allocates nor raises an error.
pub fn record(error_group: &FailureGroup) {
    let (Some(table), database, now_us) = (AREA.get(), catalog::my_database(), now_us()) else {
        return;
    };
    table.lock.with(|| {
        let index = table.entry_of(database, error_group.name);
        let (Some(key), Some(group)) = (table.keys.get(index), table.groups.get(index)) else {
            return;
        };
        let is_known = key.database.load(Relaxed) == database && key.name.load(Relaxed) == error_group.name;
        if !is_known {
            key.database.store(database, Relaxed);
            key.name.store(error_group.name, Relaxed);
            group.count.store(0, Relaxed);
            group.first_us.store(now_us, Relaxed);
            group.last_seq.store(0, Relaxed);
            group.destination.set(&error_group.destination);
            group.kind.set(error_group.kind);
            group.message.set(&error_group.message);
        }
        key.last_us.store(now_us, Relaxed);
        group.last_error.set(&error_group.last_error);
        group.count.fetch_add(error_group.count, Relaxed);
        if error_group.last_seq > 0 {
            group.last_seq.store(error_group.last_seq, Relaxed);
        }
    });
}

impl GroupTable {
    fn databases(&self) -> impl Iterator<Item = &AtomicU32> {
        self.keys.iter().map(|key| &key.database)
    }

    /// The index of this group, or of the entry that it shall take: a free one, else the oldest. A database with
    /// `MAX_OF_DATABASE` groups takes one of its own.
    fn entry_of(&self, database: u32, name: u64) -> usize {
        let is_here = |key: &GroupKey| key.database.load(Relaxed) == database;
        let known = self
            .keys
            .iter()
            .position(|key| is_here(key) && key.name.load(Relaxed) == name);
        known.unwrap_or_else(|| {
            let is_full = self.keys.iter().filter(|key| is_here(key)).count() >= MAX_OF_DATABASE;
            let candidates = self.keys.iter().enumerate().filter(|(_, key)| !is_full || is_here(key));
            let age = |(_, key): &(usize, &GroupKey)| match key.database.load(Relaxed) {
                0 => i64::MIN,
                _ => key.last_us.load(Relaxed),
            };
            candidates.min_by_key(age).map_or(0, |(index, _)| index)
        })
    }
}

/// Removes the groups of this database, because the extension was just installed. Called in the commit callback.
pub fn forget_here() {
    let database = catalog::my_database();
    if let Some(table) = AREA.get() {
        let here = table.databases().filter(|known| known.load(Relaxed) == database);
        free_but(&table.lock, here, &[]);
    }
}

/// Frees the groups of databases that no longer exist. Called only by the launcher.
pub fn forget_databases_but(alive: &[u32]) {
    if let Some(table) = AREA.get() {
        free_but(&table.lock, table.databases(), alive);
    }
}

/// Eight values for each group of this database: destination, kind, message, count, first and last time in µs since
/// 1970, the seq of the last message, and the last error. None if the library was not preloaded.
pub fn here() -> Option<Vec<Option<String>>> {
    let (table, database) = (AREA.get()?, catalog::my_database());
    let mut groups = Vec::with_capacity(MAX_OF_DATABASE * 8);
    table.lock.with(|| {
        for (key, group) in table.keys.iter().zip(&table.groups) {
            if key.database.load(Relaxed) == database {
                let last_seq = group.last_seq.load(Relaxed);
                groups.extend([
                    Some(group.destination.get()),
                    Some(group.kind.get()),
                    Some(group.message.get()),
                    Some(group.count.load(Relaxed).to_string()),
                    Some(group.first_us.load(Relaxed).to_string()),
                    Some(key.last_us.load(Relaxed).to_string()),
                    (last_seq > 0).then(|| last_seq.to_string()),
                    Some(group.last_error.get()),
                ]);
            }
        }
    });
    Some(groups)
}
