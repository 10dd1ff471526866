//! The event stream of a page: the parts that have changed since they were last sent to this viewer. The poller makes
//! each part once for all viewers.

use super::app::{App, View};
use super::pages::layout::Page;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The most streams at a time: fewer than connections. A browser has one for each page that it shows.
const STREAMS_MAX: usize = 100;
/// A part of this size, as for a thousand partitions, is sent only with every fifth reading.
const LARGE_BYTES: usize = 64 * 1024;
const LARGE_EVERY: u64 = 5;

#[derive(Deserialize)]
pub struct Asked {
    page: String,
}

struct Stream {
    app: Arc<App>,
    page: Page,
    views: tokio::sync::watch::Receiver<Arc<View>>,
    sent: HashMap<&'static str, String>,
    change: String,
    looks: u64,
}

pub async fn stream(State(app): State<Arc<App>>, Query(asked): Query<Asked>) -> Response {
    let page = Page::parse(&asked.page).unwrap_or(Page::Other);
    if app.viewers.fetch_add(1, Ordering::Relaxed) >= STREAMS_MAX {
        app.viewers.fetch_sub(1, Ordering::Relaxed);
        return (StatusCode::SERVICE_UNAVAILABLE, "Too many pages are open.\n").into_response();
    }
    app.asked.notify_one();
    let mut views = app.views.clone();
    views.mark_changed(); // what it shows may be older than the stream
    let stream = Stream {
        app,
        page,
        views,
        sent: HashMap::new(),
        change: String::new(),
        looks: 0,
    };
    let events = stream::unfold(stream, |mut stream| async move {
        loop {
            stream.views.changed().await.ok()?;
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

impl Stream {
    fn changed(&mut self) -> Map<String, Value> {
        let view = self.views.borrow_and_update().clone();
        let mut changed = Map::new();
        for (id, text) in view.live.parts(self.page) {
            let is_turn = text.len() < LARGE_BYTES || self.looks.is_multiple_of(LARGE_EVERY);
            if is_turn && self.sent.get(id) != Some(text) {
                self.sent.insert(id, text.clone());
                changed.insert((*id).to_owned(), self.app.base.in_markup(text).into());
            }
        }
        if self.change != view.live.change {
            self.change.clone_from(&view.live.change);
            changed.insert("change".to_owned(), view.live.change.clone().into());
        }
        self.looks += 1;
        changed
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.app.viewers.fetch_sub(1, Ordering::Relaxed);
    }
}
