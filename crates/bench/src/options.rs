//! The flags of outbox-bench. A run with the defaults takes about an hour and a half on two cores.

use clap::{Parser, ValueEnum};
use serde::Serialize;

#[derive(Parser, Serialize, Clone, Debug)]
#[command(name = "outbox-bench", about = "How fast is the outbox? See docs/benchmarks.md")]
pub struct Options {
    /// Which rows to run.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = RowName::value_variants().to_vec())]
    pub rows: Vec<RowName>,
    /// Pairs of runs for each measurement; each pair starts with the other side.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// Queue types for drain and latency; the other rows use the first.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = QueueType::value_variants().to_vec())]
    pub queues: Vec<QueueType>,
    /// Placements of the processes, for drain; the other rows are unpinned.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Placement::value_variants().to_vec())]
    pub placements: Vec<Placement>,
    /// Messages in a drain. The row sizes drains a 5th of them with 10 kB, and a 300th with 1 MB; http a 5th.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1000..))]
    pub backlog: u32,
    /// Messages of the large backlog, for backlog. A million takes 2 GB of disk.
    #[arg(long, default_value_t = 500_000, value_parser = clap::value_parser!(u32).range(1000..))]
    pub large_backlog: u32,
    /// Publishes that the bare publisher hands to lapin at once; its window stays 1,000.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub bare_batch: u32,
    /// Transactions per second, for latency.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000], value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub rates: Vec<u32>,
    /// Seconds of one run of latency and commits.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Seconds of one run of idle.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub idle_seconds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RowName {
    Drain,
    Sizes,
    Latency,
    Commits,
    Keys,
    Snapshot,
    Backlog,
    Http,
    Destinations,
    Memory,
    Capture,
    Idle,
    Peers,
    Profile,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum QueueType {
    Quorum,
    Classic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The broker, with one scheduler, runs on one core, and all other processes on another.
    Pinned,
    /// The kernel places the processes; the broker has its default number of schedulers.
    Unpinned,
}

/// The name of a queue type or placement, as in the flags.
pub fn name(value: &impl ValueEnum) -> String {
    let named = value.to_possible_value().expect("a value with a name");
    named.get_name().to_owned()
}

impl Options {
    /// The queue type of the rows that do not vary it.
    pub fn first_queue(&self) -> QueueType {
        self.queues[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_flags_are_well_formed() {
        Options::command().debug_assert();
    }

    #[test]
    fn without_flags_every_row_runs_in_five_pairs() {
        let options = Options::parse_from(["bench"]);
        assert_eq!(options.rows, RowName::value_variants());
        assert_eq!((options.pairs, options.backlog), (5, 100_000));
        assert_eq!((options.queues.len(), options.placements.len()), (2, 2));
    }

    #[test]
    fn rows_are_chosen_by_name() {
        let options = Options::parse_from(["bench", "--rows", "latency,keys"]);
        assert_eq!(options.rows, [RowName::Latency, RowName::Keys]);
        assert!(Options::try_parse_from(["bench", "--rows", "speed"]).is_err());
    }
}
