//! Transactions that have enqueued and are not over yet, as shared memory tells of them. A later message of one of their
//! keys must not overtake what they will commit. Written by the sessions through `src/shared/transactions.rs`, read by
//! [`crate::engine`] before each claim.

use crate::key_order::OrderedKey;
use crate::partition::{Partition, crc32};
use std::collections::HashMap;

/// Bits of a filter. A key has one of them by its CRC-32; two keys that share one hold each other up for as long as the
/// transaction is open, and nothing worse.
pub const FILTER_BITS: usize = 16_384;
/// The words of a filter.
pub const FILTER_WORDS: usize = FILTER_BITS / 64;

/// Where the bit of a key lies: word, and mask in the word.
pub fn filter_bit(crc: u32) -> (usize, u64) {
    let bit = crc as usize % FILTER_BITS;
    (bit / 64, 1 << (bit % 64))
}

/// A partition has a bit as if it were a key, and as a key has it whatever the destination: a transaction may enqueue for
/// another one later, by the same seq.
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
    /// Stands for transactions that nobody can tell of: every message must wait for it.
    pub fn holds_everything() -> Self {
        Self {
            low: i64::MIN,
            filter: Box::new([u64::MAX; FILTER_WORDS]),
        }
    }

    /// The same where a partition is one order, by [`lane_crc`]. While the transaction draws a seq it does not know
    /// yet in which partition it will be, and tells of no lowest one.
    pub fn holds_lane(&self, crc: u32, seq: i64) -> bool {
        (self.low <= 0 && self.low < seq) || self.holds(crc, seq)
    }

    /// Whether a message with this seq, of the key with this CRC, must wait for the transaction.
    pub fn holds(&self, crc: u32, seq: i64) -> bool {
        let (word, mask) = filter_bit(crc);
        self.low < seq && self.filter.get(word).is_some_and(|bits| bits & mask != 0)
    }
}

/// What holds back messages in one pass of a worker.
pub(crate) struct OpenTransactions {
    /// The claim may have missed a row between those that it brought.
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
