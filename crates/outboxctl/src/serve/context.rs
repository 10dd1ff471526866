//! What every handler has: the state that all requests and the poller share, and for a page the view that it shows, and
//! its viewer. It makes the frame of the page, and the page for a failure.

use super::access::{Access, Viewer};
use super::base::BasePath;
use super::page::{LiveParts, MonitorPage, head};
use super::session::{SessionPool, WAIT_MAX};
use super::snapshot::{Lost, MonitorSnapshot};
use crate::failure::{Code, Failure};
use crate::format::capitalised;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use maud::{DOCTYPE, Markup, html};
use outbox_core::words::Word;
use serde::Deserialize;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{Semaphore, watch};
use tokio_postgres::error::SqlState;

/// The most streams at a time: fewer than connections. A browser has one for each page that it shows.
pub const STREAMS_MAX: usize = 100;
/// The most payloads on their way to clients, of up to 15 MiB each.
pub const DOWNLOADS_MAX: usize = 4;
/// After the last request the poller reads often for so long.
const WATCHED_FOR: Duration = Duration::from_secs(30);

pub struct App {
    pub access: Arc<Access>,
    pub pool: SessionPool,
    pub database: String,
    pub base: BasePath,
    /// Only the poller writes it.
    pub views: watch::Receiver<Arc<View>>,
    /// The time of the last request of a page. It wakes the poller from its long wait.
    pub asked_at: watch::Sender<Instant>,
    /// For each open event stream.
    pub streams: Arc<Semaphore>,
    /// For each payload.
    pub downloads: Arc<Semaphore>,
}

impl App {
    pub fn view(&self) -> Arc<View> {
        self.views.borrow().clone()
    }

    /// Whether a page is open, or was just requested.
    pub fn is_watched(&self) -> bool {
        self.streams.available_permits() < STREAMS_MAX || self.asked_at.borrow().elapsed() < WATCHED_FOR
    }
}

/// The last known state. The poller makes it, all requests show it.
pub struct View {
    pub snapshot: Option<MonitorSnapshot>,
    pub lost: Option<Lost>,
    pub read_at: SystemTime,
    pub live: LiveParts,
}

/// The fields of a query or a form, which may repeat a name.
#[derive(Deserialize)]
#[serde(transparent)]
pub struct Fields(Vec<(String, String)>);

impl Fields {
    /// The first field of this name, or an empty text.
    pub fn get(&self, name: &str) -> &str {
        self.all(name).next().unwrap_or_default()
    }

    /// None: the field is missing or empty.
    pub fn given(&self, name: &str) -> Option<&str> {
        Some(self.get(name).trim()).filter(|text| !text.is_empty())
    }

    pub fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        let fields = self.0.iter().filter(move |(known, _)| known == name);
        fields.map(|(_, value)| value.as_str())
    }
}

pub struct PageContext {
    pub app: Arc<App>,
    pub view: Arc<View>,
    pub viewer: Viewer,
}

impl FromRequestParts<Arc<App>> for PageContext {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, StatusCode> {
        app.asked_at.send_replace(Instant::now());
        // The guard has admitted a viewer to all pages but those of the login.
        let viewer = parts.extensions.get::<Viewer>().cloned();
        Ok(Self {
            viewer: viewer.ok_or(StatusCode::INTERNAL_SERVER_ERROR)?,
            app: Arc::clone(app),
            view: app.view(),
        })
    }
}

impl PageContext {
    /// The answer, or the page for the failure.
    pub fn answer(&self, answer: Result<impl IntoResponse, Failure>) -> Response {
        match answer {
            Ok(answer) => answer.into_response(),
            Err(failure) => self.refusal(&failure),
        }
    }

    fn refusal(&self, failure: &Failure) -> Response {
        let (status, title) = match failure.code {
            _ if failure.is(&SqlState::TOO_MANY_CONNECTIONS) => {
                (StatusCode::SERVICE_UNAVAILABLE, "The monitor is busy")
            }
            _ if failure.is(&SqlState::QUERY_CANCELED) => (StatusCode::SERVICE_UNAVAILABLE, "That took too long"),
            _ if failure.is(&SqlState::NO_DATA) => (StatusCode::NOT_FOUND, "There is no such message"),
            Code::CannotConnect => (StatusCode::SERVICE_UNAVAILABLE, "The database refused"),
            Code::SomeFailed => (StatusCode::CONFLICT, "Nothing was done"),
            Code::Usage => (StatusCode::BAD_REQUEST, "Nothing was done"),
            Code::Refused if failure.sqlstate.is_none() => (StatusCode::FORBIDDEN, "Nothing was done"),
            Code::Refused | Code::Incompatible => (StatusCode::UNPROCESSABLE_ENTITY, "The database refused"),
        };
        let body = html! {
            section.panel {
                p { (failure.message) "." }
                @if let Some(detail) = &failure.detail { p { (detail) } }
                @if let Some(hint) = &failure.hint { p.remedy { "Fix: " (hint) } }
                p { a href="/" { "To the overview" } }
            }
        };
        let mut answer = (status, self.layout(MonitorPage::Other, title, &body)).into_response();
        if failure.is(&SqlState::TOO_MANY_CONNECTIONS) {
            let wait_s = WAIT_MAX.as_secs().into();
            answer.headers_mut().insert(header::RETRY_AFTER, wait_s);
        }
        answer
    }

    /// A page below its title.
    pub fn layout(&self, page: MonitorPage, title: &str, body: &Markup) -> Markup {
        self.frame(page, title, &html! { h1 { (title) } (body) })
    }

    /// A page in the frame of all pages but the login.
    pub fn frame(&self, page: MonitorPage, title: &str, body: &Markup) -> Markup {
        let (live, viewer) = (&self.view.live, &self.viewer);
        let problems = match live.problems {
            0 => String::new(),
            some => format!("({some}) "),
        };
        let pages = MonitorPage::ALL.iter().filter(|page| **page != MonitorPage::Other);
        html! {
            (DOCTYPE)
            html lang="en" {
                (head(&format!("{problems}{} · {title}", self.app.database)))
                body class=[viewer.may_act.then_some("may-act")] data-page=(page.name()) data-change=(live.change) {
                    a.skip href="#main" { "Skip to the content" }
                    header.top {
                        a.brand href="/" { img src="/icon.svg" alt="" width="24" height="24"; " Outbox Monitor" }
                        nav aria-label="Pages" { ul {
                            @for (index, item) in pages.enumerate() {
                                li { a href=(item.path()) aria-current=[(*item == page).then_some("page")] data-key=(index + 1) {
                                    (capitalised(item.name()))
                                } }
                            }
                        } }
                        div.state {
                            span.database title="database" { (self.app.database) }
                            span #pulse data-live { (live.content(page, "pulse")) }
                            @if let Some(name) = &viewer.name { span.who { (name) } }
                            @if viewer.logged_in {
                                form method="post" action="/logout" { (self.form_token()) button.quiet { "Log out" } }
                            }
                        }
                    }
                    main #main tabindex="-1" {
                        @if page != MonitorPage::Overview { (live.element(page, "alerts")) } // there the numbers come first
                        (body)
                    }
                    footer {
                        span { "outboxctl " (env!("CARGO_PKG_VERSION")) }
                        span {
                            button.quiet.scripted #zone type="button" { "Times in UTC" }
                            button.quiet.scripted #help-button type="button" { "Keys: ?" }
                        }
                    }
                    (help())
                }
            }
        }
    }

    /// The time of the view by the clock of the database, in seconds since 1970.
    pub fn now_s(&self) -> f64 {
        self.view.snapshot.as_ref().map_or(0.0, |snapshot| snapshot.now.epoch_s)
    }

    /// The token of a form with an action.
    pub fn form_token(&self) -> Markup {
        html! { input type="hidden" name="form_token" value=(self.viewer.form_token); }
    }
}

/// Those of the script.
const KEYS: [(&str, &str); 6] = [
    ("1 – 6", "the pages"),
    ("/", "search messages"),
    ("j k", "next, previous line"),
    ("Enter", "open the line"),
    ("Space", "pause the page, and continue"),
    ("?", "this help"),
];

fn help() -> Markup {
    html! {
        dialog #help aria-labelledby="help-title" {
            h2 #help-title { "Keys" }
            dl.keys { @for (key, what) in KEYS { div { dt { kbd { (key) } } dd { (what) } } } }
            form method="dialog" { button { "Close" } }
        }
    }
}
