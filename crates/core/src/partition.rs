//! The partition of a key, and the label of a partition. Every backend calls it at enqueue, and foreign writers compute
//! it themselves, so it never changes: the tests pin its vectors.
//!
//! partition = CRC-32 (IEEE, as zlib and PHP's `crc32()`) of the key's UTF-8 bytes, modulo the partition count.

use std::fmt;

/// The number of partitions of a database: 1 to 1024. A property of the database, never of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartitionCount(u16);

impl PartitionCount {
    /// Each partition has a lease row, a lock and a fair share of each claim: beyond this number they cost more than
    /// they spread.
    pub const MAX: u16 = 1024;

    /// # Errors
    /// Unless `1 <= count <= 1024`.
    pub fn new(count: i64) -> Result<Self, String> {
        match u16::try_from(count) {
            Ok(n @ 1..=Self::MAX) => Ok(Self(n)),
            _ => Err(format!("partition count {count} is outside 1 to {}", Self::MAX)),
        }
    }

    pub fn get(self) -> u16 {
        self.0
    }

    /// All partitions of such a database, ascending.
    pub fn partitions(self) -> impl Iterator<Item = Partition> {
        (0..self.0).map(Partition)
    }
}

/// The IEEE CRC-32 of the key's UTF-8 bytes.
pub fn crc32(key: &str) -> u32 {
    crc32fast::hash(key.as_bytes())
}

/// The number of a partition, 0 to 1023. It keeps the order of its keys; one worker holds its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition(u16);

impl Partition {
    /// The highest of any database: its label is the longest.
    pub const LAST: Self = Self(PartitionCount::MAX - 1);

    /// From a stored smallint.
    ///
    /// # Errors
    /// Unless `0 <= index <= 1023`.
    pub fn new(index: i64) -> Result<Self, String> {
        match u16::try_from(index) {
            Ok(n) if n < PartitionCount::MAX => Ok(Self(n)),
            _ => Err(format!("partition {index} is outside 0 to {}", PartitionCount::MAX - 1)),
        }
    }

    /// The partition of an ordering key; the empty string is a key like any other.
    pub fn of_key(key: &str, count: PartitionCount) -> Self {
        let remainder = crc32(key) % u32::from(count.0);
        Self(remainder as u16) // lossless: below the count, which is at most 1024
    }

    pub fn index(self) -> u16 {
        self.0
    }

    /// As a smallint; lossless, because an index is below 1024.
    pub fn as_i16(self) -> i16 {
        self.0 as i16
    }

    /// `p` and at least two digits: `p07`, `p63`, `p1023`.
    pub fn label(self) -> String {
        format!("p{:02}", self.0)
    }

    /// The strict inverse of [`Partition::label`]: `p07`, never `p7`, `07`, `P07` or `p007`.
    ///
    /// # Errors
    /// For every other text.
    pub fn parse_label(label: &str) -> Result<Self, String> {
        let refused = || {
            let text: String = label.chars().take(32).collect();
            format!("\"{text}\" is not a partition label such as p07")
        };
        let digits = label.strip_prefix('p').ok_or_else(refused)?;
        let index = digits.parse::<i64>().map_err(|_| refused())?;
        let partition = Self::new(index).map_err(|_| refused())?;
        if partition.label() == label {
            Ok(partition)
        } else {
            Err(refused())
        }
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{:02}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn count(n: i64) -> PartitionCount {
        PartitionCount::new(n).unwrap()
    }

    /// Key, CRC, then the partition among 16, 64, 10 and 1024: from Python's `zlib.crc32(key.encode()) % count`.
    const VECTORS: [(&str, u32, [u16; 4]); 7] = [
        ("order-42", 0x57f7_06de, [14, 30, 2, 734]),
        ("Ünï", 0x7bf6_e7d4, [4, 20, 2, 980]),
        ("", 0x0000_0000, [0, 0, 0, 0]),
        ("a", 0xe8b7_be43, [3, 3, 7, 579]),
        ("注文-7", 0x871d_4bd3, [3, 19, 5, 979]),
        ("🐇", 0x53f0_aaef, [15, 47, 7, 751]),
        ("123456789", 0xcbf4_3926, [6, 38, 2, 294]), // the check value of every CRC catalogue
    ];

    #[test]
    fn the_partition_of_a_key_never_changes() {
        for (key, crc, expected) in VECTORS {
            assert_eq!(crc32fast::hash(key.as_bytes()), crc, "crc of {key:?}");
            let found = [16, 64, 10, 1024].map(|n| Partition::of_key(key, count(n)).index());
            assert_eq!(found, expected, "partitions of {key:?}");
        }
    }

    #[test]
    fn one_partition_takes_every_key() {
        assert_eq!(Partition::of_key("order-42", count(1)).index(), 0);
    }

    #[test]
    fn a_count_is_between_1_and_1024() {
        for refused in [i64::MIN, -1, 0, 1025, 65_537, i64::MAX] {
            assert!(PartitionCount::new(refused).is_err(), "{refused}");
        }
        assert_eq!(count(1024).get(), 1024);
        assert_eq!(
            count(3).partitions().map(Partition::index).collect::<Vec<_>>(),
            [0, 1, 2]
        );
    }

    #[test]
    fn an_index_is_between_0_and_1023() {
        for refused in [i64::MIN, -1, 1024, 65_536, i64::MAX] {
            assert!(Partition::new(refused).is_err(), "{refused}");
        }
        assert_eq!(Partition::new(1023).unwrap().as_i16(), 1023);
    }

    #[test]
    fn a_label_has_at_least_two_digits() {
        for (index, label) in [(0, "p00"), (7, "p07"), (63, "p63"), (100, "p100"), (1023, "p1023")] {
            assert_eq!(Partition::new(index).unwrap().label(), label);
            assert_eq!(Partition::new(index).unwrap().to_string(), label);
            assert_eq!(Partition::parse_label(label), Partition::new(index));
        }
    }

    #[test]
    fn a_text_that_only_resembles_a_label_is_refused() {
        for text in [
            "", "p", "p7", "07", "p007", "P07", "p+7", "p-1", "p 7", " p07", "p07 ", "p1024", "p٠٧", "pp07",
        ] {
            assert!(Partition::parse_label(text).is_err(), "{text:?}");
        }
        let error = Partition::parse_label(&"x".repeat(1_000)).unwrap_err();
        assert!(error.len() < 100, "an error does not carry a whole document");
    }

    proptest! {
        #[test]
        fn every_key_has_a_partition_below_the_count(key: String, n in 1_i64..=1024) {
            prop_assert!(Partition::of_key(&key, count(n)).index() < count(n).get());
        }

        #[test]
        fn labels_and_partitions_are_one_to_one(text in "p[0-9]{1,5}|\\PC{0,6}") {
            if let Ok(partition) = Partition::parse_label(&text) {
                prop_assert_eq!(partition.label(), text);
            }
        }
    }
}
