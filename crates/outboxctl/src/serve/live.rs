//! The live parts of the pages: the poller makes each once for all viewers, pages show them, and the event stream of a
//! page sends those that have changed since they were last sent to this viewer.

use super::backlog::BacklogHistory;
use super::chart::{self, RANGES};
use super::context::{Fields, PageContext, Site, SiteDatabase, View};
use super::format::clock;
use super::page::MonitorPage::{self, Audit, Destinations, Messages, Other, Overview, Partitions, Workers};
use super::page::{LivePart, LiveParts};
use super::snapshot::{Lost, MonitorSnapshot};
use super::{fleet, overview};
use crate::format::capitalised;
use axum::Extension;
use axum::extract::{Form, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use maud::{Markup, html};
use outbox_core::words::Word;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{OwnedSemaphorePermit, watch};

/// A part of this size, as for a thousand partitions, is sent only with every fifth reading.
const LARGE_BYTES: usize = 64 * 1024;
const LARGE_EVERY: u64 = 5;

const NOT_OVERVIEW: &[MonitorPage] = &[Messages, Destinations, Partitions, Workers, Audit, Other];

pub fn live_parts(snapshot: Option<&MonitorSnapshot>, lost: Option<&Lost>, backlog: &BacklogHistory) -> LiveParts {
    let part = |pages, id, markup: Markup| LivePart {
        pages,
        id,
        markup: markup.into_string(),
    };
    let alerts = overview::alerts(snapshot, lost);
    let mut parts = vec![
        part(MonitorPage::ALL, "pulse", pulse(snapshot, lost)),
        part(&[Overview], "alerts", overview::alert_strip(&alerts, true)),
        part(NOT_OVERVIEW, "alerts", overview::alert_strip(&alerts, false)),
    ];
    if let Some(snapshot) = snapshot {
        parts.extend([
            part(&[Overview], "cards", overview::cards(snapshot)),
            part(&[Overview], "start", overview::start(snapshot)),
            part(&[Overview], "errors", overview::errors(snapshot)),
            part(&[Overview], "destinations-brief", overview::destinations(snapshot)),
            part(&[Destinations], "destinations", fleet::destinations(snapshot)),
            part(&[Partitions], "partitions", fleet::partitions(snapshot)),
            part(&[Workers], "workers", fleet::workers(snapshot)),
        ]);
        let charts = RANGES.iter();
        parts.extend(charts.map(|range| part(&[Overview], range.id, chart::chart(snapshot, backlog, range))));
    }
    LiveParts {
        parts,
        problems: title_prefix(alerts.len()),
        change: snapshot.map_or_else(String::new, MonitorSnapshot::change),
    }
}

/// The number of problems in the title of a page.
pub fn title_prefix(problems: usize) -> String {
    match problems {
        0 => String::new(),
        some => format!("({some}) "),
    }
}

fn pulse(snapshot: Option<&MonitorSnapshot>, lost: Option<&Lost>) -> Markup {
    html! {
        @match (snapshot, lost) {
            (Some(snapshot), None) => { (clock_of_reading(snapshot.now.epoch_s)) }
            _ => { span.dot.bad {} " no database" }
        }
    }
}

pub fn clock_of_reading(epoch_s: f64) -> Markup {
    html! { span.dot.ok {} " " span.when { (clock(epoch_s)) " UTC" } }
}

/// A page that is its live part.
pub fn live_page(context: &PageContext, page: MonitorPage) -> Markup {
    context.layout(
        page,
        &capitalised(page.name()),
        &context.view.live.element(page, page.name()),
    )
}

pub fn overview_page(context: &PageContext) -> Markup {
    let element = |id| context.view.live.element(Overview, id);
    let body = html! {
        (element("cards"))
        (element("alerts"))
        (element("start"))
        section.panel aria-labelledby="chart-title" {
            h2 #chart-title { "Backlog and throughput" }
            @for (index, range) in RANGES.iter().enumerate() {
                input.range type="radio" name="range" id={ "range-" (range.id) } checked[index == 0];
                label.range for={ "range-" (range.id) } { (range.label) }
            }
            @for range in &RANGES { (element(range.id)) }
            p.readout #readout role="status" {}
        }
        div.columns {
            section.panel aria-labelledby="errors-title" { h2 #errors-title { "Recent errors" } (element("errors")) }
            section.panel aria-labelledby="brief-title" { h2 #brief-title { "Destinations" } (element("destinations-brief")) }
        }
    };
    context.layout(Overview, "Overview", &body)
}

/// What one viewer of a page has seen.
struct EventStream {
    site: Arc<Site>,
    /// The stream ends with it.
    session: Option<String>,
    page: MonitorPage,
    views: watch::Receiver<Arc<View>>,
    sent: HashMap<&'static str, String>,
    looks: u64,
    _permit: OwnedSemaphorePermit,
}

/// The parts of a page of the database that the path names, or of the list of the databases.
pub async fn events(
    State(site): State<Arc<Site>>,
    database: Option<Extension<Arc<SiteDatabase>>>,
    headers: HeaderMap,
    Form(fields): Form<Fields>,
) -> Response {
    let Ok(permit) = Arc::clone(&site.streams).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "Too many pages are open.\n").into_response();
    };
    let mut views = match database {
        Some(Extension(database)) => {
            database.asked_at.send_replace(Instant::now());
            database.views.clone()
        }
        None => site.list.subscribe(),
    };
    views.mark_changed(); // what the page shows may be older than the stream
    let stream = EventStream {
        session: site.access.session(&headers),
        site,
        page: MonitorPage::of_name(fields.get("page")).unwrap_or(Other),
        views,
        sent: HashMap::new(),
        looks: 0,
        _permit: permit,
    };
    let events = stream::unfold(stream, |mut stream| async move {
        loop {
            stream.views.changed().await.ok()?;
            let access = &stream.site.access;
            if (stream.session.as_ref()).is_some_and(|id| access.viewer_of_session(id).is_none()) {
                return None; // the browser connects again, and is asked for the secret
            }
            let changed = stream.changed();
            // At least the clock has changed, after each successful reading.
            if !changed.is_empty() {
                let event = Event::default().data(Value::Object(changed).to_string());
                return Some((Ok::<_, Infallible>(event), stream));
            }
        }
    });
    Sse::new(events).into_response()
}

impl EventStream {
    fn changed(&mut self) -> Map<String, Value> {
        let view = self.views.borrow_and_update().clone();
        let is_turn = self.looks.is_multiple_of(LARGE_EVERY);
        self.looks += 1;
        let parts = view.live.of_page(self.page).map(|part| (part.id, &part.markup));
        let mut changed = Map::new();
        for (id, text) in parts.chain([("change", &view.live.change), ("problems", &view.live.problems)]) {
            if (text.len() < LARGE_BYTES || is_turn) && self.sent.get(id) != Some(text) {
                self.sent.insert(id, text.clone());
                changed.insert(id.to_owned(), text.as_str().into());
            }
        }
        changed
    }
}
