//! `outboxctl serve`: the Outbox Monitor, a few pages and /metrics over HTTP. One session reads the database for all
//! viewers (`poller`). Requests of viewers share a few other sessions (`session`).

mod access;
mod act;
mod audit;
mod backlog;
mod base;
mod causes;
mod chart;
mod connections;
mod context;
mod fleet;
mod format;
mod list;
mod live;
mod login;
mod message;
mod metrics;
mod overview;
mod page;
mod poller;
mod proxy;
mod search;
mod session;
mod snapshot;
mod tab;

use crate::commands::CommandContext;
use crate::failure::{Code, Failure};
use crate::shutdown::Shutdown;
use access::{Access, guard, listen_address};
use axum::http::{HeaderName, header};
use axum::routing::{get, post};
use axum::{Router, middleware};
use base::{BasePath, rebased};
use clap::Args;
use context::{App, DOWNLOADS_MAX, PageContext, STREAMS_MAX};
use live::live_page;
use outbox_transport::network::Network;
use page::MonitorPage;
use poller::Poller;
use proxy::TrustedProxy;
use serde_json::json;
use session::SessionPool;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

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
    /// Header in which a proxy that signs users in names the user
    #[arg(long, value_name = "NAME", value_parser = proxy::parse_header)]
    trusted_user_header: Option<HeaderName>,
    /// Address or network from which that proxy connects; may be repeated [default: loopback]
    #[arg(long, value_name = "CIDR", requires = "trusted_user_header", value_parser = proxy::parse_network)]
    trusted_proxy: Vec<Network>,
    /// Host name by which browsers reach this monitor, in addition to localhost and addresses; may be repeated
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Path under which a proxy shows this monitor
    #[arg(long, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = BasePath::parse)]
    base_path: BasePath,
}

/// Serves until a signal ends it.
pub async fn run(context: &CommandContext, args: &ServeArgs) -> Result<ExitCode, Failure> {
    let connect = &context.connect;
    let address = listen_address(&args.listen)?;
    // Checked before anything is opened.
    let (token, users) = (args.token_file.as_deref(), args.users_file.as_deref());
    let header = args.trusted_user_header.clone();
    let proxy = header.map(|header| TrustedProxy::new(header, &args.trusted_proxy));
    let access = Access::new(token, users, proxy, address, args.allow_actions, &args.allow_host)?;
    let (poller, view) = Poller::first(connect).await?;
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::new(Code::Refused, format!("cannot listen at {address}: {error}"))
            .hint("Give another address or port with --listen.")
    })?;
    let bound = listener.local_addr().unwrap_or(address);
    let database = view.snapshot.as_ref().map(|snapshot| snapshot.now.database.clone());
    let (sender, views) = watch::channel(Arc::new(view));
    let app = Arc::new(App {
        access: Arc::new(access),
        pool: SessionPool::new(connect.clone()),
        database: database.unwrap_or_default(),
        base: args.base_path.clone(),
        views,
        asked_at: watch::Sender::new(Instant::now()),
        streams: Arc::new(Semaphore::new(STREAMS_MAX)),
        downloads: Arc::new(Semaphore::new(DOWNLOADS_MAX)),
    });
    let shutdown = Shutdown::on_signals()?; // before the address is printed
    let url = format!("http://{bound}{}/", app.base.as_str());
    if context.json {
        let said = json!({ "url": url, "database": app.database, "actions": args.allow_actions });
        println!("{said}");
    } else {
        let what = match args.allow_actions {
            true => "actions allowed",
            false => "read-only",
        };
        println!("Outbox Monitor of database {} at {url} ({what})", app.database);
    }
    let mut poller = tokio::spawn(poller.run(Arc::clone(&app), sender));
    let served = tokio::select! {
        never = connections::serve(listener, router(Arc::clone(&app)), app.base.clone()) => match never {},
        // Event streams are cut: browsers reconnect.
        () = shutdown.requested() => Ok(ExitCode::SUCCESS),
        // Pages that no longer change would look like an idle system.
        ended = &mut poller => {
            let ended = format!("cannot serve: the task that reads the database has ended: {ended:?}");
            Err(Failure::new(Code::Refused, ended))
        }
    };
    poller.abort();
    served
}

fn router(app: Arc<App>) -> Router {
    let live = |page| get(async move |context: PageContext| live_page(&context, page));
    // A file of the program itself. Not cached between pages, because the next version may have another.
    let asset = |kind: &'static str, text: &'static str| {
        let headers = [(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache")];
        get(async move || (headers, text))
    };
    Router::new()
        .route("/", get(live::overview_page))
        .route("/destinations", live(MonitorPage::Destinations))
        .route("/partitions", live(MonitorPage::Partitions))
        .route("/workers", live(MonitorPage::Workers))
        .route("/messages", get(list::list))
        .route("/message/{seq}", get(message::message))
        .route("/message/{seq}/payload", get(message::payload))
        .route("/audit", get(audit::audit))
        .route("/events", get(live::events))
        .route("/metrics", get(metrics::metrics))
        .route("/act/done", get(act::done))
        .route("/act/{what}", get(act::act).post(act::act))
        .route("/login", get(login::show_login).post(login::login))
        .route("/logout", post(login::logout))
        .route("/app.js", asset("text/javascript", include_str!("assets/app.js")))
        .route("/style.css", asset("text/css", include_str!("assets/style.css")))
        .route("/icon.svg", asset("image/svg+xml", include_str!("assets/icon.svg")))
        .layer(middleware::from_fn_with_state(Arc::clone(&app.access), guard))
        .layer(middleware::from_fn_with_state(app.base.clone(), rebased))
        .with_state(app)
}
