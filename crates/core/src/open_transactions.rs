//! Transactions that have enqueued and are not over yet, as shared memory lists them. A later message of one of their
//! keys must not overtake the messages that they will commit. The sessions write the list through
//! `src/shared/transactions.rs`, and [`crate::engine`] reads it before each claim.

use crate::key_order::OrderedKey;
use crate::partition::{Partition, crc32};
use std::collections::HashMap;

/// The bits of a filter. A key has one of them by its CRC-32. Two keys with the same bit hold each other while the
/// transaction is open; that is the only effect.
pub const FILTER_BITS: usize = 16_384;
/// The words of a filter.
pub const FILTER_WORDS: usize = FILTER_BITS / 64;

/// The bit of a key: the word, and the mask in the word.
pub fn filter_bit(crc: u32) -> (usize, u64) {
    let bit = crc as usize % FILTER_BITS;
    (bit / 64, 1 << (bit % 64))
}

/// A partition has a bit as if it were a key, and like a key has the same one for every destination. A transaction may
/// later enqueue the same seq for another destination.
pub fn lane_crc(partition: Partition) -> u32 {
    crc32(&partition.label())
}

/// One open transaction.
#[derive(Clone, Debug)]
pub struct OpenTransaction {
    /// No message that it enqueued has a lower seq.
    pub low: i64,
    /// The keys and partitions that it enqueued for.
    pub filter: Box<[u64; FILTER_WORDS]>,
}

impl OpenTransaction {
    /// Stands for transactions that are unknown: every message must wait for it.
    pub fn holds_everything() -> Self {
        Self {
            low: i64::MIN,
            filter: Box::new([u64::MAX; FILTER_WORDS]),
        }
    }

    /// The same if a partition is one order, by [`lane_crc`]. While the transaction draws a seq its partition is not
    /// known yet, and it has no lowest seq.
    pub fn holds_lane(&self, crc: u32, seq: i64) -> bool {
        (self.low <= 0 && self.low < seq) || self.holds(crc, seq)
    }

    /// Whether a message with this seq, of the key with this CRC, must wait for the transaction.
    pub fn holds(&self, crc: u32, seq: i64) -> bool {
        let (word, mask) = filter_bit(crc);
        self.low < seq && self.filter.get(word).is_some_and(|bits| bits & mask != 0)
    }
}

/// What holds messages back in one pass of a worker.
pub(crate) struct OpenTransactions {
    /// The claim may have missed a row between its rows.
    pub all: bool,
    pub open: Vec<OpenTransaction>,
    /// The lowest seq committed in a partition since the pass began to read it.
    pub rewinds: HashMap<Partition, i64>,
}

impl OpenTransactions {
    pub fn hold_back(&self, key: &OrderedKey, seq: i64) -> bool {
        self.all || self.rewinds.get(&key.partition).is_some_and(|low| *low < seq) || self.open(key, seq)
    }

    /// Whether a transaction is open that has enqueued an earlier one of the key, or of the partition.
    pub fn open(&self, ordered: &OrderedKey, seq: i64) -> bool {
        !self.open.is_empty()
            && match &ordered.key {
                Some(key) => {
                    let crc = crc32(key);
                    self.open.iter().any(|transaction| transaction.holds(crc, seq))
                }
                None => {
                    let crc = lane_crc(ordered.partition);
                    self.open.iter().any(|transaction| transaction.holds_lane(crc, seq))
                }
            }
    }
}
