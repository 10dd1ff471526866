//! Which destinations share a *rewind*: the lowest seq that was committed for them in a partition. Sessions record it at
//! COMMIT in the word of a lane, which is a partition of a group of destinations, and workers take it. Pure.

use crate::settings::DEFAULT_DESTINATION;
use outbox_core::partition::{Partition, PartitionCount, crc32};

const MAX_PARTITIONS: usize = PartitionCount::MAX as usize;
/// The number of lanes of a partition with a low index. There are usually few partitions.
const LANES_MAX: usize = 64;
/// The number of lanes of a partition with a high index.
const LANES_MIN: usize = 4;
/// The partitions with `LANES_MAX` lanes. Twice as many partitions have half as many lanes each, down to `LANES_MIN`.
const PARTITIONS_WITH_MOST: usize = 16;
/// The number of lanes of all partitions, with one of each for [`RewindLane::UNBLOCKED`].
pub const LANES: usize = first_lane(MAX_PARTITIONS) + MAX_PARTITIONS;

/// The group of a destination. The default destination has its own; the others are spread over the rest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RewindGroup(u8);

impl RewindGroup {
    pub fn of(destination: &str) -> Self {
        match destination {
            DEFAULT_DESTINATION => Self(0),
            name => Self(1 + (crc32(name) % (LANES_MAX as u32 - 1)) as u8),
        }
    }

    /// The lane of the group in a partition. Groups share one in a partition that has fewer lanes than there are groups.
    pub fn lane(self, partition: Partition) -> RewindLane {
        let shared = lanes_of(partition.index().into()) - 1;
        RewindLane(match self.0 {
            0 => 0,
            other => 1 + (other - 1) % shared as u8,
        })
    }
}

/// A lane, counted within its partition.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RewindLane(u8);

impl RewindLane {
    /// Of no group. Its seq says from where on messages may be gone that blocked others, of any destination.
    pub const UNBLOCKED: Self = Self(u8::MAX);

    /// The lanes of all groups.
    pub fn all(partition: Partition) -> impl Iterator<Item = Self> {
        (0..lanes_of(partition.index().into()) as u8).map(Self)
    }

    /// The lane with this number; None if the partition has fewer.
    pub fn new(partition: Partition, number: i64) -> Option<Self> {
        (Self::all(partition).chain([Self::UNBLOCKED])).find(|lane| i64::from(lane.0) == number)
    }

    pub fn number(self) -> u8 {
        self.0
    }

    /// Where it is among the lanes of all partitions.
    pub fn index(self, partition: Partition) -> usize {
        let partition = partition.index().into();
        match self {
            Self::UNBLOCKED => first_lane(MAX_PARTITIONS) + partition,
            Self(lane) => first_lane(partition) + usize::from(lane),
        }
    }
}

/// A rewind that was taken from its lane: its destinations may have new messages from `seq` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rewound {
    pub partition: Partition,
    pub lane: RewindLane,
    pub seq: i64,
}

const fn lanes_of(partition: usize) -> usize {
    let lanes = LANES_MAX * PARTITIONS_WITH_MOST / (partition + 1).next_power_of_two();
    if lanes > LANES_MAX {
        LANES_MAX
    } else if lanes < LANES_MIN {
        LANES_MIN
    } else {
        lanes
    }
}

/// The number of lanes of all partitions before this one.
const fn first_lane(partition: usize) -> usize {
    let (mut from, mut first) = (0, 0);
    let mut until = PARTITIONS_WITH_MOST;
    while until <= partition {
        first += (until - from) * lanes_of(from);
        (from, until) = (until, until * 2);
    }
    first + (partition - from) * lanes_of(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(index: usize) -> Partition {
        Partition::new(index as i64).unwrap()
    }

    #[test]
    fn each_lane_of_each_partition_has_a_place_of_its_own() {
        let mut places = (0..MAX_PARTITIONS)
            .map(partition)
            .flat_map(|partition| RewindLane::all(partition).map(move |lane| lane.index(partition)));
        assert!((0..6144).all(|place| places.next() == Some(place)));
        assert_eq!(places.next(), None);
        let unblocked = (0..MAX_PARTITIONS).map(|index| RewindLane::UNBLOCKED.index(partition(index)));
        assert!(unblocked.eq(6144..LANES));
    }

    #[test]
    fn a_group_has_a_lane_in_each_partition_and_the_default_destination_shares_none() {
        let names: Vec<String> = (0..1000).map(|n| format!("customer {n}")).collect();
        for index in [0, 15, 16, 40, 127, 128, 1023] {
            let partition = partition(index);
            let lanes = RewindLane::all(partition).count();
            let mut used = vec![0; lanes];
            for name in &names {
                used[usize::from(RewindGroup::of(name).lane(partition).number())] += 1;
            }
            assert_eq!(used[0], 0);
            let most = *used.iter().max().unwrap();
            assert!(most < 3 * names.len() / lanes, "{index}: {most} of {lanes} lanes");
            assert_eq!(RewindGroup::of(DEFAULT_DESTINATION).lane(partition), RewindLane(0));
        }
    }
}
