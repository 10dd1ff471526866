//! The flags of outbox-bench. A run with the defaults takes an hour and three quarters on two cores.

use clap::{Parser, ValueEnum};
use serde_json::{Value, json};

#[derive(Parser, Clone, Debug)]
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
    /// Messages in a run of drain and of standby.
    #[arg(long, default_value_t = 100_000, value_parser = at_least_1000)]
    pub backlog: u32,
    /// Publishes that the bare publisher hands to lapin at once; its window stays 1,000.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub bare_batch: u32,
    /// Transactions per second, for latency.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000], value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub rates: Vec<u32>,
    /// Seconds of one run of latency.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Messages in a run of keys, and messages beside the blocked key.
    #[arg(long, default_value_t = 20_000, value_parser = at_least_1000)]
    pub messages: u32,
    /// Messages that are drained while a snapshot is held.
    #[arg(long, default_value_t = 100_000, value_parser = at_least_1000)]
    pub snapshot_backlog: u32,
    /// Messages behind the blocked key.
    #[arg(long, default_value_t = 100_000, value_parser = at_least_1000)]
    pub blocked_backlog: u32,
    /// Messages of 10 kB, for sizes.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(3..))]
    pub medium_messages: u32,
    /// Messages of 1 MB, for sizes.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(3..))]
    pub large_messages: u32,
    /// Messages of the large backlog, for backlog; the small one is that of drain. A million takes 2 GB of disk.
    #[arg(long, default_value_t = 500_000, value_parser = at_least_1000)]
    pub large_backlog: u32,
    /// Seconds of one run of idle.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub idle_seconds: u32,
    /// Transactions per second, for capacity.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 500, 1000, 2000], value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub steady_rates: Vec<u32>,
    /// Seconds of one run at such a rate.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub steady_seconds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RowName {
    Drain,
    Latency,
    Keys,
    Snapshot,
    Blocked,
    Standby,
    Sizes,
    Backlog,
    Isolation,
    Idle,
    Capacity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QueueType {
    Quorum,
    Classic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Placement {
    /// The broker, with one scheduler, runs on one core, and all other processes on another.
    Pinned,
    /// The kernel places the processes; the broker has its default number of schedulers.
    Unpinned,
}

/// Parses a multiple of 1000, because backlogs are loaded a thousand events at a time.
fn at_least_1000(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(n) if n >= 1000 && n.is_multiple_of(1000) => Ok(n),
        _ => Err("the number must be a positive multiple of 1000".into()),
    }
}

impl QueueType {
    pub fn name(self) -> &'static str {
        match self {
            Self::Quorum => "quorum",
            Self::Classic => "classic",
        }
    }
}

impl Placement {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Unpinned => "unpinned",
        }
    }
}

impl Options {
    /// The queue type of the rows that do not vary it.
    pub fn first_queue(&self) -> QueueType {
        self.queues[0]
    }

    pub fn to_json(&self) -> Value {
        json!({
            "rows": self.rows.iter().map(|row| format!("{row:?}").to_lowercase()).collect::<Vec<_>>(),
            "pairs": self.pairs,
            "queues": self.queues.iter().map(|queue| queue.name()).collect::<Vec<_>>(),
            "placements": self.placements.iter().map(|placement| placement.name()).collect::<Vec<_>>(),
            "backlog": self.backlog,
            "bare_batch": self.bare_batch,
            "rates": self.rates,
            "seconds": self.seconds,
            "messages": self.messages,
            "snapshot_backlog": self.snapshot_backlog,
            "blocked_backlog": self.blocked_backlog,
            "medium_messages": self.medium_messages,
            "large_messages": self.large_messages,
            "large_backlog": self.large_backlog,
            "idle_seconds": self.idle_seconds,
            "steady_rates": self.steady_rates,
            "steady_seconds": self.steady_seconds,
        })
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

    #[test]
    fn a_backlog_that_is_not_a_multiple_of_1000_is_refused() {
        for bad in ["0", "1500", "x"] {
            assert!(Options::try_parse_from(["bench", "--backlog", bad]).is_err(), "{bad}");
        }
    }
}
