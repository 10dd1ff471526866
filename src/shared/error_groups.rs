//! What failed lately, in shared memory: failures of one cause and destination make one group. Noted when a transaction
//! commits in which messages failed, and by a worker whose destination goes down; read by outbox_errors. Nothing that goes
//! well comes here. A restart of the server begins anew.

use crate::pg::catalog;
use crate::pg::clock::now_us;
use crate::pg::shmem::{Shareable, Shared, ShortText, SpinLock};
use crate::shared::statistics::number_of;
use outbox_core::error_group;
use std::sync::atomic::{
    AtomicI64, AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// Of all databases together. Where it is full the oldest group makes room,
const MAX_GROUPS: usize = 1024;
/// and the oldest of a database that has so many.
pub const MAX_OF_DATABASE: usize = 100;

#[repr(C)]
struct Table {
    /// Of who reads or writes groups.
    lock: SpinLock,
    /// Which group is where: apart from the texts, for each note looks through them.
    keys: [Key; MAX_GROUPS],
    groups: [Group; MAX_GROUPS],
}

/// Written and read in turn, by all.
#[repr(C)]
struct Key {
    /// 0 = free.
    database: AtomicU32,
    /// Of destination, kind and message.
    name: AtomicU64,
    last_us: AtomicI64,
}

/// Written and read in turn, by all.
#[repr(C)]
struct Group {
    count: AtomicU64,
    first_us: AtomicI64,
    /// 0 = it was about no message.
    last_seq: AtomicI64,
    destination: ShortText<64>,
    kind: ShortText<32>,
    message: ShortText<{ error_group::TEXT_MAX_BYTES }>,
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for Table {}

static TABLE: Shared<Table> = Shared::new();

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Table>()
}

/// In the startup hook.
pub fn attach() {
    TABLE.attach(c"outbox error groups");
}

/// Failures of one group, before they are told.
pub struct ErrorGroup {
    name: u64,
    destination: String,
    kind: &'static str,
    message: String,
    count: u64,
    /// 0 = it is about no message.
    last_seq: i64,
}

impl ErrorGroup {
    /// Messages failed with this text.
    pub fn of_messages(destination: &str, error: &str, is_dead: bool, last_seq: i64, count: u64) -> Self {
        Self::new(destination, error_group::kind(error, is_dead), error, last_seq, count)
    }

    /// A destination cannot be used.
    pub fn of_destination(destination: &str, reason: &'static str, detail: &str) -> Self {
        Self::new(destination, reason, detail, 0, 1)
    }

    fn new(destination: &str, kind: &'static str, text: &str, last_seq: i64, count: u64) -> Self {
        let message = error_group::group(text);
        Self {
            // What the parts are made of holds no zero byte.
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
        self.last_seq = self.last_seq.max(more.last_seq);
    }
}

/// Tells of failures in this database. Called in the commit callback too: no allocation, no error.
pub fn record(error_group: &ErrorGroup) {
    let (Some(table), database, now_us) = (TABLE.get(), catalog::my_database(), now_us()) else {
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
        group.count.fetch_add(error_group.count, Relaxed);
        if error_group.last_seq > 0 {
            group.last_seq.store(error_group.last_seq, Relaxed);
        }
    });
}

impl Table {
    /// Where this group is, or is to be.
    fn entry_of(&self, database: u32, name: u64) -> usize {
        let (mut free, mut oldest, mut oldest_here, mut here) = (None, (i64::MAX, 0), (i64::MAX, 0), 0);
        for (index, key) in self.keys.iter().enumerate() {
            let last = (key.last_us.load(Relaxed), index);
            match key.database.load(Relaxed) {
                0 => free = free.or(Some(index)),
                known if known == database => {
                    if key.name.load(Relaxed) == name {
                        return index;
                    }
                    here += 1;
                    oldest_here = oldest_here.min(last);
                }
                _ => oldest = oldest.min(last),
            }
        }
        match here < MAX_OF_DATABASE {
            true => free.unwrap_or(oldest.min(oldest_here).1),
            false => oldest_here.1,
        }
    }
}

/// The extension is new here: failures of an earlier one say nothing. Called in the commit callback.
pub fn forget_here() {
    let database = catalog::my_database();
    forget_those(|known| known == database);
}

/// Frees the places of databases that are gone. Launcher only.
pub fn forget_databases_but(alive: &[u32]) {
    forget_those(|known| !alive.contains(&known));
}

fn forget_those(is_gone: impl Fn(u32) -> bool) {
    let Some(table) = TABLE.get() else { return };
    table.lock.with(|| {
        for key in table.keys.iter().filter(|key| is_gone(key.database.load(Relaxed))) {
            key.database.store(0, SeqCst);
        }
    });
}

/// Of each group of this database: destination, kind, message, count, first and last time in µs since 1970, and the seq of
/// the last message. None when not preloaded.
pub fn here() -> Option<Vec<Option<String>>> {
    let (table, database) = (TABLE.get()?, catalog::my_database());
    let mut groups = Vec::with_capacity(MAX_OF_DATABASE * 7);
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
                ]);
            }
        }
    });
    Some(groups)
}
