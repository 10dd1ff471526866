//! What every handler has: the state that all requests and pollers share, and for a page its database, the view that it
//! shows, and its viewer. It makes the frame of the page, and the page for a failure.

use super::access::{Access, Viewer};
use super::base::BasePath;
use super::page::{LiveParts, MonitorPage, head};
use super::session_pool::{SessionPool, WAIT_MAX};
use super::snapshot::{Lost, MonitorSnapshot};
use crate::failure::{Code, Failure};
use crate::format::capitalised;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{Request, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use maud::{DOCTYPE, Markup, html};
use outbox_core::words::Word;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Instant, SystemTime};
use tokio::sync::{Semaphore, watch};
use tokio_postgres::error::SqlState;

/// The most streams at a time: fewer than connections. A browser has one for each page that it shows.
pub const STREAMS_MAX: usize = 100;
/// The most payloads on their way to clients, of up to 15 MiB each.
pub const DOWNLOADS_MAX: usize = 4;

pub struct Site {
    pub access: Arc<Access>,
    pub base: BasePath,
    /// If there are several, the pages of each are below `/db/NAME/`.
    pub databases: Vec<Arc<SiteDatabase>>,
    /// The list of several databases. Each poller writes it.
    pub list: watch::Sender<Arc<View>>,
    /// For each open event stream.
    pub streams: Arc<Semaphore>,
    /// For each payload.
    pub downloads: Arc<Semaphore>,
}

pub struct SiteDatabase {
    pub name: String,
    /// Of its pages.
    pub base: BasePath,
    pub pool: SessionPool,
    /// Only its poller writes it.
    pub views: watch::Receiver<Arc<View>>,
    /// The time of the last request of a page. It wakes the poller from its long wait.
    pub asked_at: watch::Sender<Instant>,
}

impl Site {
    pub fn has_several(&self) -> bool {
        self.databases.len() > 1
    }

    /// The request with its path from `/` on, the database that the path names, and the base path of its answer. Only
    /// here a request gets its database.
    pub fn route<B>(&self, request: Request<B>) -> Request<B> {
        let mut request = self.base.strip(request);
        let word = request.uri().path().strip_prefix("/db/").unwrap_or_default();
        let word = word.split('/').next().unwrap_or_default().to_owned();
        let name = percent_decode_str(&word).decode_utf8_lossy(); // a proxy may have decoded it
        let database = match &self.databases[..] {
            [only] => Some(only),
            several => several.iter().find(|database| database.name == name),
        };
        let mut base = &self.base;
        if let Some(database) = database {
            if self.has_several() {
                request = BasePath::default().of_database(&word).strip(request);
            }
            base = &database.base;
            request.extensions_mut().insert(Arc::clone(database));
        }
        request.extensions_mut().insert(base.clone());
        request
    }
}

impl SiteDatabase {
    pub fn view(&self) -> Arc<View> {
        self.views.borrow().clone()
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

/// What a request for a page has, with and without a login or a database.
pub struct PageRequest {
    pub site: Arc<Site>,
    /// Of the links of its answer.
    pub base: BasePath,
    /// The link to the page itself.
    link: String,
}

impl FromRequestParts<Arc<Site>> for PageRequest {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, site: &Arc<Site>) -> Result<Self, Infallible> {
        Ok(Self {
            site: Arc::clone(site),
            base: parts.extensions.get().cloned().unwrap_or_default(),
            link: parts.uri.to_string().trim_start_matches('/').to_owned(),
        })
    }
}

pub struct PageContext {
    pub request: PageRequest,
    pub database: Arc<SiteDatabase>,
    pub view: Arc<View>,
    pub viewer: Viewer,
}

impl FromRequestParts<Arc<Site>> for PageContext {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, site: &Arc<Site>) -> Result<Self, StatusCode> {
        let database = parts.extensions.get::<Arc<SiteDatabase>>().cloned();
        let database = database.ok_or(StatusCode::NOT_FOUND)?;
        database.asked_at.send_replace(Instant::now());
        // The guard has admitted a viewer to all pages but those of the login.
        let viewer = parts.extensions.get::<Viewer>().cloned();
        let Ok(request) = PageRequest::from_request_parts(parts, site).await;
        Ok(Self {
            viewer: viewer.ok_or(StatusCode::INTERNAL_SERVER_ERROR)?,
            request,
            view: database.view(),
            database,
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
                p { a href=(MonitorPage::Overview.path()) { "To the overview" } }
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
        let (name, live) = (Some(&*self.database.name), &self.view.live);
        self.request.frame(name, live, &self.viewer, page, title, body)
    }

    /// The time of the view by the clock of the database, in seconds since 1970.
    pub fn now_s(&self) -> f64 {
        self.view.snapshot.as_ref().map_or(0.0, |snapshot| snapshot.now.epoch_s)
    }

    pub fn form_token(&self) -> Markup {
        form_token(&self.viewer)
    }
}

/// The token of a form with an action.
fn form_token(viewer: &Viewer) -> Markup {
    html! { input type="hidden" name="form_token" value=(viewer.form_token); }
}

impl PageRequest {
    /// Leads the browser to another page.
    pub fn redirect(&self, link: &str) -> Response {
        Redirect::to(&self.base.to(link)).into_response()
    }

    /// A page of the database of this name, or the list of the databases.
    pub fn frame(
        &self,
        name: Option<&str>,
        live: &LiveParts,
        viewer: &Viewer,
        page: MonitorPage,
        title: &str,
        body: &Markup,
    ) -> Markup {
        let pages = MonitorPage::ALL.iter().filter(|page| **page != MonitorPage::Other);
        html! {
            (DOCTYPE)
            html lang="en" {
                (head(&self.base, &format!("{}{}{title}", live.problems, name.map_or_else(String::new, |name| format!("{name} · ")))))
                body class=[viewer.may_act.then_some("may-act")] data-page=(page.name()) data-change=(live.change) {
                    a.skip href={ (self.link) "#main" } { "Skip to the content" }
                    header.top {
                        a.brand href=(MonitorPage::Overview.path()) { img src="icon.svg" alt="" width="24" height="24"; " Outbox Monitor" }
                        @if name.is_some() {
                            nav aria-label="Pages" { ul {
                                @for (index, item) in pages.enumerate() {
                                    li { a href=(item.path()) aria-current=[(*item == page).then_some("page")] data-key=(index + 1) {
                                        (capitalised(item.name()))
                                    } }
                                }
                            } }
                        }
                        div.state {
                            @if let Some(name) = name {
                                @if self.site.has_several() {
                                    a.database href=(self.site.base.to("")) title="all databases" { "‹ " (name) }
                                } @else { span.database title="database" { (name) } }
                            }
                            span #pulse data-live { (live.content(page, "pulse")) }
                            @if let Some(name) = &viewer.name { span.who { (name) } }
                            @if viewer.logged_in {
                                form method="post" action="logout" { (form_token(viewer)) button.quiet { "Log out" } }
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
