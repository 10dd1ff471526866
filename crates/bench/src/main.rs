//! `make bench` measures how fast the outbox is, on private servers. Each row runs two sides in turn, in pairs, and
//! reports the median of the pairs' ratios. The speed of the machine drifts, and both runs of a pair drift together.
//!
//! | module | question it answers |
//! |---|---|
//! | `options` | which rows run, and with how many messages? |
//! | `servers` | which Postgres and RabbitMQ run, what do they contain, how is delivery paused? |
//! | `cores`, `cpu` | which process runs on which core, and how much processor time does each take? |
//! | `events` | which messages are sent? The same bytes on both sides |
//! | `bare` | how fast is lapin alone? |
//! | `backlog` | how fast does the outbox drain? |
//! | `clients` | how long do transactions of an application take, and when does the consumer have the message? |
//! | `drain`, `shapes`, `latency`, `http`, `destinations`, `memory`, `capture`, `idle`, `peers`, `profile` | the rows |
//! | `stats`, `report` | what do the samples show, and how are they printed? |
//!
//! docs/benchmark-rows.md explains the rows.

mod backlog;
mod bare;
mod capture;
mod clients;
mod cores;
mod cpu;
mod destinations;
mod drain;
mod events;
mod http;
mod idle;
mod latency;
mod memory;
mod options;
mod peers;
mod profile;
mod report;
mod servers;
mod shapes;
mod stats;

use clap::Parser;

use crate::options::{Options, RowName};
use crate::report::BenchReport;

fn main() {
    let options = Options::parse();
    let mut report = BenchReport::new(&options);
    for row in &options.rows {
        match row {
            RowName::Drain => drain::drain(&options, &mut report),
            RowName::Sizes => drain::sizes(&options, &mut report),
            RowName::Latency => latency::latency(&options, &mut report),
            RowName::Commits => latency::commits(&options, &mut report),
            RowName::Keys => shapes::keys(&options, &mut report),
            RowName::Snapshot => shapes::snapshot(&options, &mut report),
            RowName::Backlog => shapes::large_backlog(&options, &mut report),
            RowName::Http => http::http(&options, &mut report),
            RowName::Destinations => destinations::destinations(&options, &mut report),
            RowName::Memory => memory::memory(&mut report),
            RowName::Capture => capture::capture(&options, &mut report),
            RowName::Idle => idle::idle(&options, &mut report),
            RowName::Peers => peers::peers(&options, &mut report),
            RowName::Profile => profile::profile(&options, &mut report),
        }
    }
    println!("\n{}", report.text());
    println!("written to {}", report.file().display());
    if !report.are_goals_met() {
        std::process::exit(1);
    }
}
