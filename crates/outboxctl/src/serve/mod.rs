//! `outboxctl serve`: the Outbox Monitor, a few pages and /metrics over HTTP. One session reads the database for all
//! viewers (`poller`). Requests of viewers share a few other sessions (`session`).

mod access;
mod act;
mod answer;
mod app;
mod base;
mod connections;
mod detail;
mod events;
mod format;
mod metrics;
mod pages;
mod poller;
mod search;
mod session;
mod snapshot;
mod tab;

use crate::commands::Context;
use crate::failure::{Code, Failure};
use crate::messages;
use crate::queries::state::MessageStatus;
use crate::queries::{Fetch, why};
use access::{Access, Secrets, guard, listen_address};
use answer::{PageContext, page};
use app::App;
use axum::body::Bytes;
use axum::extract::{Form, Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::{get, post};
use axum::{Router, middleware};
use base::BasePath;
use clap::Args;
use pages::{act::Deed, layout::Page, live::live_page, messages::List};
use serde::Deserialize;
use serde_json::json;
use session::{Pool, Trouble, TroubleKind};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Instant;
use tokio::net::TcpListener;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};

/// The most payloads on their way to clients, of up to 15 MiB each.
const DOWNLOADS_MAX: usize = 4;

#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// Address and port; addresses other than loopback need a token or users
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: String,
    /// Let viewers retry, discard, replay, pause and resume
    #[arg(long)]
    allow_actions: bool,
    /// File with the one token that grants access
    #[arg(long, value_name = "FILE", conflicts_with = "users_file")]
    token_file: Option<PathBuf>,
    /// File with a line name:view:secret or name:act:secret for each user
    #[arg(long, value_name = "FILE")]
    users_file: Option<PathBuf>,
    /// Host name by which browsers reach this monitor, beside localhost and addresses; may be repeated
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Path under which a proxy shows this monitor
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = BasePath::parse)]
    base_path: BasePath,
}

/// Serves until a signal ends it.
pub async fn run(context: &Context, args: &ServeArgs) -> Result<ExitCode, Failure> {
    let connect = &context.connect;
    let address = listen_address(&args.listen)?;
    let secrets = match (&args.token_file, &args.users_file) {
        (Some(path), _) => Secrets::Token(path),
        (None, Some(path)) => Secrets::Users(path),
        (None, None) => Secrets::None,
    };
    // Checked before anything is opened.
    let access = Arc::new(Access::new(&secrets, address, args.allow_actions, &args.allow_host)?);
    let (session, view) = poller::first(connect).await?;
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::new(Code::Refused, format!("cannot listen at {address}: {error}"))
            .hint("Give another address or port with --listen.")
    })?;
    let bound = listener.local_addr().unwrap_or(address);
    let database = view.snapshot.as_ref().map(|snapshot| snapshot.now.database.clone());
    let (sender, views) = watch::channel(Arc::new(view));
    let app = Arc::new(App {
        access,
        pool: Pool::new(connect.clone()),
        database: database.unwrap_or_default(),
        base: args.base_path.clone(),
        views,
        started: Instant::now(),
        viewers: AtomicUsize::new(0),
        asked_at_ms: AtomicU64::new(0),
        asked: Notify::new(),
        downloads: Arc::new(Semaphore::new(DOWNLOADS_MAX)),
    });
    let is_ending = is_ending(); // before the address is printed
    let url = format!("http://{bound}{}/", app.base.as_str());
    if context.json {
        let said = json!({ "url": url, "database": app.database, "actions": args.allow_actions });
        println!("{said}");
    } else {
        let what = if args.allow_actions {
            "actions allowed"
        } else {
            "read-only"
        };
        println!("Outbox Monitor of database {} at {url} ({what})", app.database);
    }
    let mut poller = tokio::spawn(poller::run(Arc::clone(&app), session, sender));
    let served = tokio::select! {
        never = connections::serve(listener, router(app)) => match never {},
        () = is_ending => Ok(()),
        // Pages that no longer change would look like an idle system.
        ended = &mut poller => Err(std::io::Error::other(format!("the task that reads the database has ended: {ended:?}"))),
    };
    poller.abort();
    served.map_err(|error| Failure::new(Code::Refused, format!("cannot serve: {error}")))?;
    Ok(ExitCode::SUCCESS)
}

/// Waits for Ctrl-C or SIGTERM, from here on. Event streams are cut: browsers reconnect.
fn is_ending() -> impl Future<Output = ()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).expect("a handler of SIGTERM");
    let mut interrupt = signal(SignalKind::interrupt()).expect("a handler of SIGINT");
    async move {
        tokio::select! {
            _ = terminate.recv() => (),
            _ = interrupt.recv() => (),
        }
    }
}

fn router(app: Arc<App>) -> Router {
    let guarded = |routes: Router<Arc<App>>| {
        let guard = middleware::from_fn_with_state(Arc::clone(&app.access), guard);
        routes.layer(guard).with_state(Arc::clone(&app))
    };
    let overview = get(async |context| live(&context, Page::Overview));
    let pages = Router::new()
        .route("/", overview.clone())
        .route("/destinations", get(async |context| live(&context, Page::Destinations)))
        .route("/partitions", get(async |context| live(&context, Page::Partitions)))
        .route("/workers", get(async |context| live(&context, Page::Workers)))
        .route("/messages", get(list))
        .route("/message/{seq}", get(message))
        .route("/message/{seq}/payload", get(payload))
        .route("/audit", get(audit))
        .route("/events", get(events::stream))
        .route("/metrics", get(metrics::metrics))
        .route("/act/bulk", get(act::confirm_bulk).post(act::do_bulk))
        .route("/act/done", get(act::done))
        .route("/act/message", get(act::confirm_messages).post(act::do_messages))
        .route("/act/{verb}", get(act::confirm_destination).post(act::do_destination))
        .route("/login", get(show_login).post(login))
        .route("/logout", post(logout))
        .route(
            "/app.js",
            get(async || asset("text/javascript", include_str!("assets/app.js"))),
        )
        .route(
            "/style.css",
            get(async || asset("text/css", include_str!("assets/style.css"))),
        )
        .route(
            "/icon.svg",
            get(async || asset("image/svg+xml", include_str!("assets/icon.svg"))),
        );
    // A nested router has no path that ends in a slash.
    let first = Router::new().route(&format!("{}/", app.base.as_str()), overview);
    app.base.around(guarded(pages), guarded(first))
}

/// A file of the program itself. Not cached between pages, because the next version may have another.
fn asset(kind: &'static str, text: &'static str) -> Response {
    (
        [(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache")],
        text,
    )
        .into_response()
}

fn live(context: &PageContext, which: Page) -> Response {
    context.app.record_request();
    page(&live_page(which, &context.frame))
}

#[derive(Deserialize)]
struct Listed {
    #[serde(default)]
    tab: String,
    #[serde(default)]
    q: String,
    /// The cursors of the pages up to this one, as JSON.
    #[serde(default)]
    trail: String,
    /// `reversed`, or the usual order of the tab.
    #[serde(default)]
    order: String,
    #[serde(flatten)]
    fields: HashMap<String, String>,
}

async fn list(context: PageContext, Query(listed): Query<Listed>) -> Response {
    let app = &context.app;
    app.record_request();
    // The fields make a search like a typed one.
    let named = search::WORDS
        .iter()
        .filter_map(|word| Some((word, listed.fields.get(*word)?.trim())));
    let named: Vec<String> = named
        .filter(|(_, value)| !value.is_empty())
        .map(|(word, value)| search::word(word, value))
        .collect();
    let text = format!("{} {}", listed.q.trim(), named.join(" "));
    let text = text.trim();
    // A number alone is a seq, and a UUID alone is an id.
    if let Ok(seq) = text.parse::<i64>() {
        return Redirect::to(&format!("/message/{seq}")).into_response();
    }
    if let Ok(id) = messages::filter::uuid(text) {
        let found = app.pool.read(async |session| detail::seq_of(session, &id).await).await;
        if let Ok(Some(seq)) = found {
            return Redirect::to(&format!("/message/{seq}")).into_response();
        }
    }
    let tab = MessageStatus::parse(&listed.tab).unwrap_or(MessageStatus::Ready);
    let reversed = tab.can_reverse() && listed.order == "reversed";
    let trail: Vec<Vec<String>> = serde_json::from_str(&listed.trail).unwrap_or_default();
    let after = trail.last().cloned().unwrap_or_default();
    let (mut reads_events, mut reasons) = (false, HashMap::new());
    let lanes = context.view.snapshot.as_ref().map_or(1, |snapshot| snapshot.lanes());
    let found = match search::parse(text) {
        Err(problem) => Err(problem),
        Ok(filter) => {
            let found = app.pool.read(async |session| {
                reads_events = session.reads_events;
                if filter.asks_for_events() && !reads_events {
                    let said =
                        "type:, agg:, id: and correlation: need events, which the login of this monitor may not read";
                    return Err(Failure::new(Code::Refused, said)
                        .hint("GRANT outbox_admin to it.")
                        .into());
                }
                let page = messages::tab::page(session, lanes, tab, reversed, &filter, &after).await?;
                if tab.shows_reasons() && !page.rows.is_empty() {
                    reasons = why::of_list(session, page.rows.iter().map(|row| row.message.clone()).collect()).await?;
                }
                Ok(page)
            });
            match found.await {
                Err(busy) if busy.kind == TroubleKind::Busy => return context.trouble(&busy),
                found => found.map_err(|trouble| match trouble.kind {
                    TroubleKind::TimedOut => {
                        "It took too long. Narrow it by destination: or partition:, or look for a seq.".to_owned()
                    }
                    _ => trouble.failure.to_string(),
                }),
            }
        }
    };
    let view = app.view();
    let list = List {
        tab,
        search: text,
        found,
        trail: &trail,
        reversed,
        reads_events,
        snapshot: view.snapshot.as_ref(),
        reasons: &reasons,
    };
    page(&pages::messages::list(&context.frame, &list))
}

#[derive(Deserialize)]
struct WhichDestination {
    destination: Option<String>,
}

async fn message(context: PageContext, Path(seq): Path<i64>, Query(which): Query<WhichDestination>) -> Response {
    let app = &context.app;
    app.record_request();
    let destination = which.destination.as_deref();
    let found = app
        .pool
        .read(async |session| detail::message(session, seq, destination).await)
        .await;
    match found {
        Err(found) => context.trouble(&found),
        Ok(Some(message)) => page(&pages::messages::detail(&context.frame, &message)),
        Ok(None) => {
            let none = Failure::new(Code::Usage, format!("no message {seq} waits or is kept"))
                .hint("It may not be committed, or the history has dropped it");
            let said = pages::act::refusal(&context.frame, "There is no such message", &none);
            (StatusCode::NOT_FOUND, page(&said)).into_response()
        }
    }
}

/// A payload on its way to a client. It takes memory until the client has read it.
struct Download {
    payload: String,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Download {
    fn as_ref(&self) -> &[u8] {
        self.payload.as_bytes()
    }
}

/// As a download, never as something that a browser shows.
async fn payload(context: PageContext, Path(seq): Path<i64>) -> Response {
    let app = &context.app;
    let Ok(permit) = Arc::clone(&app.downloads).try_acquire_owned() else {
        return context.trouble(&Trouble::busy());
    };
    match app.pool.read(async |session| detail::payload(session, seq).await).await {
        Err(found) => context.trouble(&found),
        Ok(None) => (StatusCode::NOT_FOUND, "The event does not exist.\n").into_response(),
        Ok(Some(payload)) => {
            let payload = Bytes::from_owner(Download {
                payload,
                _permit: permit,
            });
            let disposition = format!("attachment; filename=\"message-{seq}.json\"");
            let headers = [
                (header::CONTENT_TYPE, "application/json".to_owned()),
                (header::CONTENT_DISPOSITION, disposition),
            ];
            (headers, payload).into_response()
        }
    }
}

#[derive(Deserialize)]
struct Before {
    before: Option<String>,
}

/// Actions on a page of the audit.
const DEEDS: usize = 100;

const AUDIT: &str = "
    select extract(epoch from at)::float8 as at, actor, acted_as, action, left(filter::text, 1000) as filter, count, reason,
           application_name, at::text as cursor
    from outbox_audit where $1::text is null or at < $1::text::timestamptz order by outbox_audit.at desc limit 101";

async fn audit(context: PageContext, Query(before): Query<Before>) -> Response {
    let app = &context.app;
    app.record_request();
    let found = app
        .pool
        .read(async |session| session.fetch::<Deed>(AUDIT, &[&before.before]).await);
    match found.await {
        Err(found) => context.trouble(&found),
        Ok(mut deeds) => {
            let more = deeds.len() > DEEDS;
            deeds.truncate(DEEDS);
            let next = deeds.last().filter(|_| more).map(|deed| deed.cursor.clone());
            page(&pages::act::audit(&context.frame, &deeds, next.as_deref()))
        }
    }
}

// ---- login -----------------------------------------------------------------------------------------------------------

#[derive(Deserialize)]
struct LoginRequest {
    #[serde(default)]
    to: String,
}

#[derive(Deserialize)]
struct LoginForm {
    #[serde(default)]
    name: String,
    secret: String,
    #[serde(default)]
    to: String,
}

async fn show_login(State(app): State<Arc<App>>, Query(asked): Query<LoginRequest>) -> Response {
    if !app.access.asks_for_secret() {
        return Redirect::to("/").into_response();
    }
    page(&pages::act::login(app.access.has_names(), &asked.to, false))
}

async fn login(State(app): State<Arc<App>>, headers: HeaderMap, Form(form): Form<LoginForm>) -> Response {
    match app.access.login(form.name.trim(), form.secret.trim(), &headers).await {
        Some(cookie) => ([(header::SET_COOKIE, cookie)], Redirect::to(own_path(&form.to))).into_response(),
        None => {
            let again = pages::act::login(app.access.has_names(), &form.to, true);
            (StatusCode::UNAUTHORIZED, page(&again)).into_response()
        }
    }
}

async fn logout(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let cookie = app.access.logout(&headers);
    ([(header::SET_COOKIE, cookie)], Redirect::to("/login")).into_response()
}

/// A path of this monitor, never another site: `//evil.example` and `/\evil.example` are addresses to a browser.
fn own_path(to: &str) -> &str {
    let is_own = to.starts_with('/') && !to.starts_with("//") && !to.contains(['\\', '\r', '\n', '\t']);
    if is_own { to } else { "/" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_login_never_leads_to_another_site() {
        assert_eq!(own_path("/messages?tab=dead"), "/messages?tab=dead");
        for to in [
            "",
            "https://evil.example",
            "//evil.example",
            "/\\evil.example",
            "/\t/evil.example",
        ] {
            assert_eq!(own_path(to), "/", "{to}");
        }
    }
}
