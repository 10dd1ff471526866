//! What a board shows in `outboxctl work` in addition to the outbox: the worker of this process, and its log.

use super::panel::{facts, total};
use super::state::BoardState;
use crate::progress::{DestinationFacts, LogLine, OwnWorker, WorkerFacts};
use crate::queries::state::{DestinationState, Toned};
use crate::screen::list::{ListRow, RowField};
use crate::screen::text::{self, age, count, known, ms, short};
use crate::screen::theme;
use outbox_core::engine::{Bounds, Sharing};
use outbox_core::words::Word;
use outbox_worker::StatusReason;
use ratatui::text::Line;
use std::time::Instant;

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

/// Why nothing is delivered, or soon will not be. It shows one reason: the end before a hold.
pub fn banner(state: &BoardState) -> Option<String> {
    let own = state.own.as_ref()?;
    if state.ends {
        let said = "ENDING: claims nothing, waits up to 5 s for confirms, releases its partitions. A second time ends immediately.";
        return Some(said.into());
    }
    if let Some((why, since)) = &own.lost {
        let since = age(seconds(*since, state.now));
        return Some(format!("SESSION LOST for {since}: {why}. It tries again every second."));
    }
    if state.holds {
        let said = "HELD: claims nothing and keeps its partitions, so their messages wait. Press space to resume.";
        return Some(said.into());
    }
    let why = own.facts.as_ref()?.obstacle.as_ref()?;
    Some(format!("NOTHING IS DELIVERED: {why}."))
}

pub fn up(own: &OwnWorker, now: Instant) -> String {
    format!("up {}", age(seconds(own.began, now)))
}

/// The totals of the worker, its last pass, the sums of its passes, and its session.
pub fn head(own: &OwnWorker, worker: &WorkerFacts, now: Instant, width: usize) -> Vec<Line<'static>> {
    let (pass, ended) = (&own.last_pass, &worker.ended);
    let is_leasing = worker.sharing == Sharing::Leases;
    let shares = match (is_leasing, worker.is_alone) {
        (false, _) => "rows, by claims (leasing is off)",
        (true, true) => "nothing (--no-leasing)",
        (true, false) => "partitions, by leases",
    };
    let partitions = match is_leasing {
        true => format!("{} of {}", worker.owned, worker.desired),
        false => "any".to_owned(),
    };
    let in_flight: usize = worker.destinations.iter().map(|row| row.in_flight).sum();
    let window = (Bounds::USUAL.window * worker.destinations.len()) as i64;
    let in_flight = format!("{}/{}", count(in_flight as i64), short(window));
    let heartbeat = |at| format!("{} ago", age(seconds(at, now)));
    let leases = format!("+{} -{}", pass.leased_count, pass.released_count);
    let has_passed = own.passes.count > 0;
    let of_pass = |said: String| if has_passed { said } else { "–".to_owned() };
    let values = [
        ("published", number(ended.published), false),
        ("retried", number(ended.retried), ended.retried > 0),
        ("failed", number(ended.failed()), ended.failed() > 0),
        ("died", number(ended.all_dead()), ended.all_dead() > 0),
        ("claimed", number(worker.claimed), false),
        ("in flight", in_flight, false),
        ("workers", count(i64::from(worker.workers)), false),
        ("partitions", partitions, worker.owned == 0 && is_leasing),
        ("heartbeat", known(own.heartbeat_at, heartbeat), false),
        ("last pass", of_pass(ms(pass.duration_ms)), false),
        ("last claim", of_pass(number(pass.claimed)), false),
        ("last lease", of_pass(leases), false),
        ("backoff", of_pass(ms(f64::from(pass.backoff_ms))), false),
    ];
    let mut lines = facts(&[("server", worker.who.server.clone(), false)], width);
    lines.extend(facts(&[("shares", shares.to_owned(), false)], width));
    lines.extend(facts(&values, width));
    if has_passed {
        lines.extend(sums(own, now).map(|line| Line::styled(text::fit(&line, width), theme::DIM)));
    }
    lines
}

fn number(n: u64) -> String {
    total(i64::try_from(n).unwrap_or(i64::MAX))
}

/// The sums of its passes, in the window or since the start.
fn sums(own: &OwnWorker, now: Instant) -> [String; 4] {
    let (sum, passes) = (&own.passes.pass, own.passes.count);
    let span = own
        .window
        .map_or("in all passes since the start:".to_owned(), |window| {
            let left = window.saturating_sub(now.saturating_duration_since(own.passes.since));
            format!("in this window, the next in {}:", age(left.as_secs_f64()))
        });
    let mean = ms(sum.duration_ms / passes.max(1) as f64);
    let [claimed, sent, failed] = [sum.claimed, sum.published, sum.failed].map(number);
    let (purged, leased, released) = (sum.purged_stale, sum.leased_count, sum.released_count);
    [
        span,
        format!("  {} passes of {mean} each", number(passes)),
        format!("  {claimed} claimed, {sent} sent, {failed} not"),
        format!("  {purged} purged, {leased} leased, {released} released"),
    ]
}

/// The connection of this worker to a destination.
pub fn destination(row: &DestinationFacts, now: Instant) -> ListRow {
    let words = [row.status.reason.map(StatusReason::name), row.status.detail()];
    let why = words.into_iter().flatten().collect::<Vec<_>>().join(": ");
    let state = row.status.state;
    let fields = vec![
        RowField::prose("destination", 0, 9, &row.name),
        RowField::words("state", 0, state.name()).style(theme::tone(DestinationState::Reported(state).tone())),
        RowField::number("since", 1, seconds(row.since, now), age),
        RowField::count("flight", 2, row.in_flight as i64),
        RowField::prose("why", 0, 18, why),
    ];
    ListRow::new(row.name.clone(), fields)
}

pub fn log_line(row: &LogLine) -> ListRow {
    let fields = vec![
        RowField::words("UTC", 0, &row.clock),
        RowField::prose("message", 0, 20, &row.text),
    ];
    ListRow::new(row.number.to_string(), fields)
}
