//! Workers, partitions and destinations.

use super::format::{capped, count, duration, encode, known, message_path, ms, rate, time};
use super::page::{badge, bar, state_badge};
use super::search::word;
use super::snapshot::MonitorSnapshot;
use crate::queries::model::{DestinationRow, Passes, WorkerRow};
use crate::queries::state::Tone;
use maud::{Markup, html};
use outbox_transport::kind::Kind;

/// From this number on destinations and workers are lines of a table.
const TABLE_FROM: usize = 4;

pub fn workers(snapshot: &MonitorSnapshot) -> Markup {
    html! {
        @if snapshot.workers.is_empty() { p.empty { "No worker has reported in this database." } }
        @if snapshot.workers.len() < TABLE_FROM {
            div.tiles { @for worker in &snapshot.workers { section.panel.tile {
                h2 { (worker.id) " " (worker_state(worker)) }
                @if let Some(detail) = worker_detail(worker) { p.detail { (detail) } }
                (worker_facts(worker, snapshot))
            } } }
        } @else {
            div.scroll tabindex="0" role="region" aria-label="Workers" { table.stack.fleet {
                thead { tr { th { "Worker" } th.n { "Partitions" } th.n { "Published a second" } th.n { "Failed a minute" } th { "Problem" } } }
                tbody { @for worker in &snapshot.workers {
                    @let passes = passes(worker, snapshot);
                    tr data-of=(worker.id) {
                        td data-label="Worker" { details { summary { b { (worker.id) } " " (worker_state(worker)) } (worker_facts(worker, snapshot)) } }
                        td.n data-label="Partitions" { (worker.partitions) }
                        td.n data-label="Published a second" { (known(passes.map(|passes| passes.per_s(|p| p.published)), rate)) }
                        td.n data-label="Failed a minute" { (known(passes.map(|passes| passes.per_s(|p| p.failed) * 60.0), rate)) }
                        td.error data-label="Problem" { (worker_detail(worker).map_or("–", String::as_str)) }
                    }
                } }
            } }
        }
    }
}

fn worker_state(worker: &WorkerRow) -> Markup {
    match worker.is_alive {
        true => state_badge(&worker.state),
        false => badge(worker.end(), Tone::Bad),
    }
}

fn worker_detail(worker: &WorkerRow) -> Option<&String> {
    worker.detail.as_ref().or(worker.reason.as_ref())
}

fn passes<'a>(worker: &WorkerRow, snapshot: &'a MonitorSnapshot) -> Option<&'a Passes> {
    snapshot.passes.iter().find(|passes| passes.worker_id == worker.id)
}

fn worker_facts(worker: &WorkerRow, snapshot: &MonitorSnapshot) -> Markup {
    let (left_s, ttl_s) = (worker.heartbeat_s, snapshot.server.heartbeat_ttl_s.unwrap_or(20.0));
    html! {
        dl.facts {
            @if let Some(passes) = passes(worker, snapshot) {
                div.wide { dt { (count(passes.count)) " passes in the last minute" }
                    dd { (count(passes.claimed)) " claimed, " (count(passes.published)) " published, " (count(passes.failed))
                        " failed, " (ms(passes.mean_ms)) " each" } }
            }
            div { dt { "Partitions" } dd { (worker.partitions) } }
            div { dt { "Process" } dd { @match worker.pid { Some(pid) => { (pid) } None => { "–" } } } }
            div { dt { "Up for" } dd { (duration(worker.age_s)) } }
            div.wide {
                dt { "Heartbeat " (duration(worker.heartbeat_age_s)) " ago, valid for " (duration(left_s)) }
                dd { (bar(left_s, ttl_s, &format!("{} of its heartbeat are left", duration(left_s)))) }
            }
        }
    }
}

/// One cell for each partition.
fn cells(snapshot: &MonitorSnapshot) -> Markup {
    html! {
        ol.strip { @for partition in &snapshot.partitions {
            // The darker, the more messages: none, below 10, 100, 1000, or more.
            @let heat = snapshot.depth_of(&partition.label).unwrap_or(0).checked_ilog10().map_or(0, |digits| digits.min(3) + 1);
            @let owner = partition.owner.as_deref().unwrap_or("none");
            @let blocked = if partition.is_blocked { ", a key is blocked" } else { "" };
            // One blocked key leaves the rest of its partition deliverable, so only a blocked partition is red.
            @let whole = snapshot.blocked.iter().any(|b| b.whole && b.partition_key == partition.label);
            li {
                a class={ "cell h" (heat) @if partition.owner.is_none() { " unowned" } @if whole { " blocked" } }
                    href={ "messages?q=partition%3A" (encode(&partition.label)) } title={ (partition.label) ": owner " (owner) ", epoch " (partition.epoch) (blocked) } {
                    b { (partition.label) }
                    span { (depth_text(snapshot, &partition.label)) }
                    @if whole { span.mark { "blocked" } } @else if partition.is_blocked { span.mark { "blocked key" } }
                    @else if partition.owner.is_none() { span.mark { "no owner" } }
                }
            }
        } }
        @if snapshot.slow.depths.is_none() { p.note { "Counting the messages took too long; the numbers are left out." } }
    }
}

fn depth_text(snapshot: &MonitorSnapshot, partition: &str) -> String {
    let depths = snapshot.slow.depths.as_ref();
    let depth = depths.zip(snapshot.depth_of(partition));
    depth.map_or_else(|| "–".to_owned(), |(depths, depth)| capped(depth, depths.cap))
}

pub fn partitions(snapshot: &MonitorSnapshot) -> Markup {
    let ttl_s = snapshot.server.lease_ttl_s.unwrap_or(15.0);
    html! {
        p.lead { "One cell for each partition: the darker, the more messages wait in it." }
        (cells(snapshot))
        @if !snapshot.server.leasing {
            p.note { "Leasing is off: workers claim rows of all partitions, and no order of a key is kept." }
        }
        div.scroll tabindex="0" role="region" aria-label="Partitions" { table.stack.fleet.leases {
            thead { tr {
                th { "Partition" } th { "Owner" } th { "Lease" } th.n { "Epoch" } th.n { "Ready or in flight" } th.n { "First seq" } th { "Blocked key" }
            } }
            tbody { @for partition in &snapshot.partitions { tr {
                td data-label="Partition" { b { (partition.label) } }
                td data-label="Owner" { (partition.owner.as_deref().unwrap_or("none")) }
                td data-label="Lease" { @match partition.ttl_s {
                    Some(left) => { (bar(left, ttl_s, &format!("{} until the lease expires", duration(left)))) " " span.note { (duration(left)) } }
                    None => { "–" }
                } }
                td.n data-label="Epoch" { (partition.epoch) }
                td.n data-label="Ready or in flight" { (depth_text(snapshot, &partition.label)) }
                td.n data-label="First seq" { @match partition.first_waiting_seq {
                    Some(seq) => { a href={ "message/" (seq) } { (seq) } }
                    None => { "–" }
                } }
                td data-label="Blocked key" { @match snapshot.blocked.iter().find(|b| b.partition_key == partition.label) {
                    Some(b) => { a href=(message_path(b.seq, &b.destination)) { (b.key.as_deref().unwrap_or("(none)")) " behind " (b.seq) } }
                    None => { "–" }
                } }
            } } }
        } }
    }
}

pub fn destinations(snapshot: &MonitorSnapshot) -> Markup {
    let all = &snapshot.destinations;
    html! {
        @if all.len() < TABLE_FROM {
            div.tiles { @for d in all { section.panel.tile {
                h2 { (d.name) " " (state_badge(&d.state)) }
                @if let Some(detail) = destination_detail(d) { p.detail { (detail) } }
                dl.facts {
                    div { dt { "Pending" } dd { (pending(d)) } }
                    div { dt { "Oldest pending" } dd { (known(d.oldest_s, duration)) } }
                    div { dt { "Published a second" } dd { (known(d.published_per_s, rate)) } }
                    div { dt { "p95" } dd { (known(d.p95_ms, ms)) } }
                    div.wide { dt { "Last error" } dd { (last_error(snapshot, &d.name)) } }
                }
                details { summary { "More" } (destination_facts(d)) }
                p.links { (destination_links(d)) }
            } } }
        } @else {
            div.scroll tabindex="0" role="region" aria-label="Destinations" { table.stack.fleet {
                thead { tr {
                    th { "Destination" } th.n { "Pending" } th { "Oldest" } th.n { "Published a second" } th.n { "p95" } th { "Last error" } th { "Actions" }
                } }
                tbody { @for d in all { tr data-of=(d.name) {
                    td data-label="Destination" {
                        details { summary { b { (d.name) } " " (state_badge(&d.state)) } (destination_facts(d)) }
                        @if let Some(detail) = destination_detail(d) { p.note { (detail) } }
                    }
                    td.n data-label="Pending" { (pending(d)) }
                    td.time data-label="Oldest" { (known(d.oldest_s, duration)) }
                    td.n data-label="Published a second" { (known(d.published_per_s, rate)) }
                    td.n data-label="p95" { (known(d.p95_ms, ms)) }
                    td.error data-label="Last error" { (last_error(snapshot, &d.name)) }
                    td.links data-label="Actions" { (destination_links(d)) }
                } } }
            } }
        }
    }
}

fn destination_detail(d: &DestinationRow) -> Option<&String> {
    d.detail.as_ref().or(d.reason.as_ref())
}

fn pending(d: &DestinationRow) -> Markup {
    html! { (known(d.pending, count)) @if let Some(most) = d.max_pending.filter(|n| *n > 0) { " of " (count(most)) } }
}

/// Of the recent ones, which are the latest first.
fn last_error(snapshot: &MonitorSnapshot, destination: &str) -> Markup {
    let error = snapshot
        .slow
        .errors
        .iter()
        .find(|error| error.group.destination == destination);
    html! {
        @match error {
            Some(error) => {
                (error.group.last_error) " "
                span.note { (duration(snapshot.now.epoch_s - error.group.last_at)) " ago" @if error.is_resolved() { ", resolved" } }
            }
            None => { "–" }
        }
    }
}

fn destination_links(d: &DestinationRow) -> Markup {
    let act = |verb: &str| format!("act/{verb}?destination={}", encode(&d.name));
    html! {
        a href={ "messages?q=" (encode(&word("destination", &d.name))) } { "Its messages" }
        @if d.paused { a.button.act href=(act("resume")) { "Resume…" } }
        @else if d.described_by.is_some() { a.button.act href=(act("pause")) { "Pause…" } }
    }
}

fn destination_facts(d: &DestinationRow) -> Markup {
    let described = match d.described_by.as_deref() {
        Some("settings") => "the settings".to_owned(),
        Some(wrapper) => match Kind::of_wrapper(wrapper) {
            Some(kind) => format!("a server, {}", kind.protocol),
            None => wrapper.to_owned(),
        },
        None => "nothing".to_owned(),
    };
    html! {
        dl.facts {
            div.wide { dt { "Described by " (described) } dd.address { (d.url.as_deref().unwrap_or("–")) } }
            div { dt { "In flight" } dd { (known(d.in_flight, count)) } }
            div { dt { "p50" } dd { (known(d.p50_ms, ms)) } }
            div { dt { "p99" } dd { (known(d.p99_ms, ms)) } }
            div { dt { "Published" } dd { (known(d.published_total, count)) } }
            div { dt { "Failed attempts" } dd { (known(d.failed_total, count)) } }
            div { dt { "Died" } dd { (known(d.dead_total, count)) } }
            div { dt { "Released" } dd { (known(d.released_total, count)) } }
            @if let Some(since) = d.since { div { dt { (d.state) " since" } dd { (time(since)) } } }
        }
    }
}
