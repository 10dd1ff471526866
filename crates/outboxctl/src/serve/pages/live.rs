//! The pages that consist of live parts, and the making of all parts.

use super::chart::{self, Range};
use super::layout::{Live, Page, PageFrame, layout};
use super::{fleet, overview};
use crate::serve::format::clock;
use crate::serve::snapshot::{Lost, Snapshot};
use maud::{Markup, html};

/// Makes all parts.
pub fn live(snapshot: Option<&Snapshot>, lost: Option<&Lost>) -> Live {
    let part = |id: &'static str, markup: Markup| (id, markup.into_string());
    let mut live = Live {
        pulse: vec![part("pulse", pulse(snapshot, lost))],
        alerts: vec![part("alerts", overview::alerts(snapshot, lost, true))],
        folded_alerts: vec![part("alerts", overview::alerts(snapshot, lost, false))],
        ..Live::default()
    };
    if let Some(snapshot) = snapshot {
        live.change = snapshot.change();
        live.overview = vec![
            part("cards", overview::cards(snapshot)),
            part("errors", overview::errors(snapshot)),
            part("destinations-brief", overview::destinations(snapshot)),
        ];
        live.overview
            .extend(Range::ALL.map(|range| part(range.id(), chart::chart(snapshot, range))));
        live.destinations = vec![part("destinations", fleet::destinations(snapshot))];
        live.partitions = vec![
            part("strip", fleet::strip(snapshot)),
            part("partitions", fleet::partitions(snapshot)),
        ];
        live.workers = vec![part("workers", fleet::workers(snapshot))];
    }
    live
}

fn pulse(snapshot: Option<&Snapshot>, lost: Option<&Lost>) -> Markup {
    html! {
        @match (snapshot, lost) {
            (Some(snapshot), None) => {
                span.dot.ok {} " " span.when { (clock(snapshot.now.epoch_s)) " UTC" }
            }
            _ => { span.dot.bad {} " no database" }
        }
    }
}

/// One of the pages that consist of live parts.
pub fn live_page(page: Page, frame: &PageFrame) -> Markup {
    let live = &frame.live;
    let body = html! {
        h1 { (page.title()) }
        @match page {
            Page::Overview => {
                (live.part(page, "cards"))
                (live.part(page, "alerts"))
                section.panel aria-labelledby="chart-title" {
                    h2 #chart-title { "Published messages" }
                    @for range in Range::ALL {
                        input.range type="radio" name="range" id={ "range-" (range.id()) } checked[range == Range::Hour];
                        label.range for={ "range-" (range.id()) } { (range.label()) }
                    }
                    @for range in Range::ALL { (live.part(page, range.id())) }
                    p.readout #readout role="status" {}
                }
                div.columns {
                    section.panel aria-labelledby="errors-title" {
                        h2 #errors-title { "Recent errors" }
                        (live.part(page, "errors"))
                    }
                    section.panel aria-labelledby="brief-title" {
                        h2 #brief-title { "Destinations" }
                        (live.part(page, "destinations-brief"))
                    }
                }
            }
            Page::Destinations => { (live.part(page, "destinations")) }
            Page::Partitions => {
                p.lead { "One cell for each partition: the darker, the more messages wait in it." }
                (live.part(page, "strip"))
                (live.part(page, "partitions"))
            }
            Page::Workers => { (live.part(page, "workers")) }
            _ => {}
        }
    };
    layout(page, page.title(), frame, &body)
}
