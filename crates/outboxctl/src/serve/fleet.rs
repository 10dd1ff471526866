//! Workers, partitions and destinations.

use super::format::{capped, count, duration, encode, known, message_path, ms, rate, time};
use super::page::{badge, bar, state_badge};
use super::search::word;
use super::snapshot::MonitorSnapshot;
use crate::queries::model::{DestinationRow, WorkerRow};
use crate::queries::state::Tone;
use maud::{Markup, html};

pub fn workers(snapshot: &MonitorSnapshot) -> Markup {
    html! {
        @if snapshot.workers.is_empty() { p.empty { "No worker has reported in this database." } }
        div.tiles { @for worker in &snapshot.workers { (worker_tile(worker, snapshot)) } }
    }
}

fn worker_tile(worker: &WorkerRow, snapshot: &MonitorSnapshot) -> Markup {
    let state = match worker.is_alive {
        true => state_badge(&worker.state),
        false => badge("ended", Tone::Bad),
    };
    let (left_s, ttl_s) = (worker.heartbeat_s, snapshot.server.heartbeat_ttl_s.unwrap_or(20.0));
    html! {
        section.panel.tile {
            h2 { (worker.id) " " (state) }
            @if let Some(detail) = worker.detail.as_ref().or(worker.reason.as_ref()) { p.detail { (detail) } }
            dl.facts {
                div.wide {
                    dt { "Heartbeat " (duration(worker.heartbeat_age_s)) " ago, valid for " (duration(left_s)) }
                    dd { (bar(left_s, ttl_s, &format!("{} of its heartbeat are left", duration(left_s)))) }
                }
                div { dt { "Partitions" } dd { (worker.partitions) } }
                div { dt { "Process" } dd { @match worker.pid { Some(pid) => { (pid) } None => { "–" } } } }
                div { dt { "Up for" } dd { (duration(worker.age_s)) } }
                @if let Some(passes) = snapshot.passes.iter().find(|passes| passes.worker_id == worker.id) {
                    div.wide { dt { (count(passes.count)) " passes in the last minute" }
                        dd { (count(passes.claimed)) " claimed, " (count(passes.published)) " published, " (count(passes.failed))
                            " failed, " (ms(passes.mean_ms)) " each" } }
                }
            }
        }
    }
}

/// One cell for each partition.
fn strip(snapshot: &MonitorSnapshot) -> Markup {
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
                    href={ "/messages?q=partition%3A" (encode(&partition.label)) } title={ (partition.label) ": owner " (owner) ", epoch " (partition.epoch) (blocked) } {
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
        (strip(snapshot))
        @if !snapshot.server.leasing {
            p.note { "Leasing is off: workers claim rows of all partitions, and no order of a key is kept." }
        }
        div.scroll tabindex="0" role="region" aria-label="Partitions" { table.stack {
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
                    Some(seq) => { a href={ "/message/" (seq) } { (seq) } }
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
    html! { div.tiles { @for destination in &snapshot.destinations { (destination_tile(destination)) } } }
}

fn destination_tile(d: &DestinationRow) -> Markup {
    let act = |verb: &str| format!("/act/{verb}?destination={}", encode(&d.name));
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
                div { dt { "Pending" } dd { (known(d.pending, count)) @if let Some(most) = d.max_pending.filter(|n| *n > 0) { " of " (count(most)) } } }
                div { dt { "Oldest pending" } dd { (known(d.oldest_s, duration)) } }
                div { dt { "In flight" } dd { (known(d.in_flight, count)) } }
                div { dt { "Published a second" } dd { (known(d.published_per_s, rate)) } }
                div { dt { "p50" } dd { (known(d.p50_ms, ms)) } }
                div { dt { "p95" } dd { (known(d.p95_ms, ms)) } }
                div { dt { "p99" } dd { (known(d.p99_ms, ms)) } }
                div { dt { "Published" } dd { (known(d.published_total, count)) } }
                div { dt { "Failed attempts" } dd { (known(d.failed_total, count)) } }
                div { dt { "Died" } dd { (known(d.dead_total, count)) } }
                div { dt { "Released" } dd { (known(d.released_total, count)) } }
                @if let Some(since) = d.since { div { dt { (d.state) " since" } dd { (time(since)) } } }
            }
            p.links {
                a href={ "/messages?q=" (encode(&word("destination", &d.name))) } { "Its messages" }
                @if d.paused { a.button.act href=(act("resume")) { "Resume…" } }
                @else if d.described_by.is_some() { a.button.act href=(act("pause")) { "Pause…" } }
            }
        }
    }
}
