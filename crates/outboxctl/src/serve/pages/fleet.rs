//! Workers, partitions and destinations.

use super::layout::{Tone, badge, bar, state_badge};
use crate::queries::model::{Partition, Worker};
use crate::queries::state::DestinationState;
use crate::serve::format::{capped, count, encode, maybe_count, maybe_span, millis, rate, span, time};
use crate::serve::search::word;
use crate::serve::snapshot::{Destination, Snapshot};
use maud::{Markup, html};

pub fn workers(snapshot: &Snapshot) -> Markup {
    let ttl_s = snapshot.server.heartbeat_ttl_s.unwrap_or(20.0);
    html! {
        @if snapshot.workers.is_empty() { p.empty { "No worker has reported in this database." } }
        div.tiles {
            @for worker in &snapshot.workers { (worker_tile(worker, ttl_s, snapshot)) }
        }
    }
}

fn worker_tile(worker: &Worker, ttl_s: f64, snapshot: &Snapshot) -> Markup {
    let state = match worker.is_alive {
        true => badge(
            worker.state.as_str(),
            Tone::of_state(worker.state.known().map(DestinationState::Reported)),
        ),
        false => badge("ended", Tone::Bad),
    };
    html! {
        section.panel.tile {
            h2 { (worker.id) " " (state) }
            @if let Some(detail) = worker.detail.as_ref().or(worker.reason.as_ref()) { p.detail { (detail) } }
            dl.facts {
                div.wide {
                    dt { "Heartbeat " (span(worker.heartbeat_age_s)) " ago, valid for " (span(worker.heartbeat_s)) }
                    dd { (bar(worker.heartbeat_s, ttl_s, &format!("{} of its heartbeat are left", span(worker.heartbeat_s)))) }
                }
                div { dt { "Partitions" } dd { (worker.partitions) } }
                div { dt { "Process" } dd { (worker.pid.map_or_else(|| "–".to_owned(), |pid| pid.to_string())) } }
                div { dt { "Up for" } dd { (span(worker.age_s)) } }
                @if let Some(pass) = snapshot.passes.get(&worker.id) {
                    div.wide { dt { "Last pass, " (span(snapshot.now.epoch_s - pass.at)) " ago" }
                        dd { (count(pass.claimed)) " claimed, " (count(pass.published)) " published, " (count(pass.failed))
                            " failed in " (millis(Some(pass.duration_ms))) } }
                }
            }
        }
    }
}

/// The number of waiting messages in a partition, in five steps.
fn heat(depth: Option<i64>) -> &'static str {
    match depth {
        None | Some(0) => "h0",
        Some(1..10) => "h1",
        Some(10..100) => "h2",
        Some(100..1000) => "h3",
        Some(_) => "h4",
    }
}

/// One cell for each partition.
pub fn strip(snapshot: &Snapshot) -> Markup {
    html! {
        ol.strip {
            @for partition in &snapshot.partitions {
                @let depth = snapshot.depth_of(&partition.label);
                @let blocked = partition.is_blocked;
                // One blocked key leaves the rest of its partition deliverable, so only a blocked partition is red.
                @let whole = snapshot.blocked.iter().any(|b| b.whole && b.partition_key == partition.label);
                li {
                    a class={ "cell " (heat(depth)) @if partition.owner.is_none() { " unowned" } @if whole { " blocked" } }
                        href={ "/messages?q=partition%3A" (encode(&partition.label)) }
                        title=(cell_title(partition, blocked)) {
                        b { (partition.label) }
                        span { (depth_text(snapshot, depth)) }
                        @if whole { span.mark { "blocked" } } @else if blocked { span.mark { "blocked key" } }
                        @else if partition.owner.is_none() { span.mark { "no owner" } }
                    }
                }
            }
        }
        @if snapshot.depths.is_none() { p.note { "Counting the messages took too long; the numbers are left out." } }
    }
}

fn cell_title(partition: &Partition, blocked: bool) -> String {
    let owner = partition.owner.as_deref().unwrap_or("none");
    let blocked = if blocked { ", a key is blocked" } else { "" };
    format!("{}: owner {owner}, epoch {}{blocked}", partition.label, partition.epoch)
}

fn depth_text(snapshot: &Snapshot, depth: Option<i64>) -> String {
    match (&snapshot.depths, depth) {
        (Some(depths), Some(depth)) => capped(depth, depths.cap),
        _ => "–".to_owned(),
    }
}

pub fn partitions(snapshot: &Snapshot) -> Markup {
    let ttl_s = snapshot.server.lease_ttl_s.unwrap_or(15.0);
    html! {
        @if !snapshot.server.leasing {
            p.note { "Leasing is off: workers claim rows of all partitions, and no order of a key is kept." }
        }
        div.scroll tabindex="0" role="region" aria-label="Partitions" {
            table.stack {
                thead { tr {
                    th { "Partition" } th { "Owner" } th { "Lease" } th.n { "Epoch" } th.n { "Ready or in flight" } th.n { "First seq" } th { "Blocked key" }
                } }
                tbody {
                    @for partition in &snapshot.partitions {
                        @let blocked = snapshot.blocked.iter().find(|b| b.partition_key == partition.label);
                        tr {
                            td data-label="Partition" { b { (partition.label) } }
                            td data-label="Owner" { (partition.owner.as_deref().unwrap_or("none")) }
                            td data-label="Lease" { @match partition.ttl_s {
                                Some(left) => { (bar(left, ttl_s, &format!("{} until the lease expires", span(left)))) " " span.note { (span(left)) } }
                                None => { "–" }
                            } }
                            td.n data-label="Epoch" { (partition.epoch) }
                            td.n data-label="Ready or in flight" { (depth_text(snapshot, snapshot.depth_of(&partition.label))) }
                            td.n data-label="First seq" { @match partition.first_waiting_seq {
                                Some(seq) => { a href={ "/message/" (seq) } { (seq) } }
                                None => { "–" }
                            } }
                            td data-label="Blocked key" { @match blocked {
                                Some(blocked) => {
                                    a href={ "/message/" (blocked.seq) "?destination=" (encode(&blocked.destination)) } {
                                        (blocked.key.as_deref().unwrap_or("(none)")) " behind " (blocked.seq)
                                    }
                                }
                                None => { "–" }
                            } }
                        }
                    }
                }
            }
        }
    }
}

pub fn destinations(snapshot: &Snapshot) -> Markup {
    html! { div.tiles { @for destination in &snapshot.destinations { (destination_tile(destination)) } } }
}

fn destination_tile(d: &Destination) -> Markup {
    let name = encode(&d.name);
    let described = match d.described_by.as_deref() {
        Some("settings") => "the settings",
        Some("outbox_amqp") => "a server, AMQP",
        Some("outbox_http") => "a server, HTTP",
        Some(other) => other,
        None => "nothing",
    };
    html! {
        section.panel.tile {
            h2 { (d.name) " " (state_badge(&d.state)) }
            @if let Some(detail) = d.detail.as_ref().or(d.reason.as_ref()) { p.detail { (detail) } }
            dl.facts {
                div.wide { dt { "Described by " (described) } dd.address { (d.url.as_deref().unwrap_or("–")) } }
                div { dt { "Pending" } dd { (maybe_count(d.pending)) @if let Some(most) = d.max_pending.filter(|n| *n > 0) { " of " (count(most)) } } }
                div { dt { "Oldest pending" } dd { (maybe_span(d.oldest_s)) } }
                div { dt { "In flight" } dd { (maybe_count(d.in_flight)) } }
                div { dt { "Published a second" } dd { (rate(d.published_per_s)) } }
                div { dt { "p50" } dd { (millis(d.p50_ms)) } }
                div { dt { "p95" } dd { (millis(d.p95_ms)) } }
                div { dt { "p99" } dd { (millis(d.p99_ms)) } }
                div { dt { "Published" } dd { (maybe_count(d.published_total)) } }
                div { dt { "Failed attempts" } dd { (maybe_count(d.failed_total)) } }
                div { dt { "Died" } dd { (maybe_count(d.dead_total)) } }
                div { dt { "Released" } dd { (maybe_count(d.released_total)) } }
                @if let Some(since) = d.since { div { dt { (d.state) " since" } dd { (time(since)) } } }
            }
            p.links {
                a href={ "/messages?q=" (encode(&word("destination", &d.name))) } { "Its messages" }
                @if d.paused {
                    a.button.act href={ "/act/resume?destination=" (name) } { "Resume…" }
                } @else if d.described_by.is_some() {
                    a.button.act href={ "/act/pause?destination=" (name) } { "Pause…" }
                }
            }
        }
    }
}
