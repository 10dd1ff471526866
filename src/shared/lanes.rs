//! Lanes: a lane is a partition of a class of destinations. Its word says from which seq on it is to be read again (*reopen*), and
//! which worker reads it. Sessions lower the seq at COMMIT, the worker takes it. crates/core/tests/model_cursor.rs models it.

use super::MAX_DATABASES;
use crate::pg::shmem::{Shareable, Shared};
use outbox_core::partition::{Partition, crc32};
use outbox_worker::DEFAULT_DESTINATION;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const MAX_PARTITIONS: usize = 1024;
const CLASSES: usize = 4;

/// Destinations by which word of *reopen* they use: the default one has its own, the others share three.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Class(u8);

impl Class {
    pub fn of(destination: &str) -> Self {
        match destination {
            DEFAULT_DESTINATION => Self(0),
            name => Self(1 + (crc32(name) % (CLASSES as u32 - 1)) as u8),
        }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        (0..CLASSES as u8).map(Self)
    }
}

#[repr(C)]
struct Lanes([[[Rewind; MAX_PARTITIONS]; CLASSES]; MAX_DATABASES]);

/// Of each class the partitions of one database.
type LanesOfDatabase = [[Rewind; MAX_PARTITIONS]];

/// The lowest seq that was committed in a partition since its owner last asked, and who the owner is: its place among the
/// workers + 1 in the upper 16 bits. A worker that lost the partition and does not know it yet takes nothing away. Sessions
/// lower it at COMMIT, and processes that withdraw a message from the fast path; the owner takes it.
#[repr(C)]
pub struct Rewind(AtomicU64);

const SEQ_BITS: u32 = 48;
const NO_SEQ: u64 = (1 << SEQ_BITS) - 1;

// SAFETY: only arrays of atomics; zero is a valid value of each.
unsafe impl Shareable for Lanes {}

static LANES: Shared<Lanes> = Shared::new();

/// Shared memory that is needed, in bytes.
pub fn bytes() -> usize {
    size_of::<Lanes>()
}

/// In the startup hook.
pub fn attach() {
    LANES.attach(c"outbox lanes");
}

/// All lanes of the database in this place.
pub fn all(database: usize) -> impl Iterator<Item = &'static Rewind> {
    of_database(database).iter().flatten()
}

/// One lane of the database in this place.
pub fn of(database: usize, class: Class, partition: Partition) -> Option<&'static Rewind> {
    let lanes = of_database(database).get(usize::from(class.0))?;
    lanes.get(usize::from(partition.index()))
}

fn of_database(database: usize) -> &'static LanesOfDatabase {
    let lanes = LANES.get().and_then(|lanes| lanes.0.get(database));
    lanes.map_or(&[], |lanes| lanes.as_slice())
}

impl Rewind {
    /// Its database is new in its place.
    pub fn forget(&self) {
        self.0.store(NO_SEQ, SeqCst);
    }

    /// A message with this seq is visible now.
    pub fn lower(&self, seq: i64) {
        let seq = u64::try_from(seq).unwrap_or(0).min(NO_SEQ - 1); // a lower one than meant only costs a look
        self.change(|owner, known| Some((owner, known.min(seq))));
    }

    /// From now on this worker reads it, and nobody else.
    pub fn own(&self, worker: u64) {
        self.change(|_, known| Some((worker, known)));
    }

    /// From which seq on its owner must read it again, if so; it is told once.
    pub fn take(&self, worker: u64) -> Option<i64> {
        let before = self.change(|owner, _| (owner == worker).then_some((owner, NO_SEQ)))?;
        let seq = before & NO_SEQ;
        (seq != NO_SEQ).then_some(seq as i64)
    }

    /// The same, left there.
    pub fn peek(&self) -> Option<i64> {
        let seq = self.0.load(SeqCst) & NO_SEQ;
        (seq != NO_SEQ).then_some(seq as i64)
    }

    /// The place + 1 of the worker that reads it, as of when it took it over.
    pub fn owner(&self) -> u32 {
        (self.0.load(SeqCst) >> SEQ_BITS) as u32
    }

    fn change(&self, to: impl Fn(u64, u64) -> Option<(u64, u64)>) -> Option<u64> {
        let changed = self.0.fetch_update(SeqCst, SeqCst, |word| {
            to(word >> SEQ_BITS, word & NO_SEQ).map(|(owner, seq)| owner << SEQ_BITS | seq)
        });
        changed.ok()
    }
}
