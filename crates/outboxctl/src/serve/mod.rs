//! `outboxctl serve`: the Outbox Monitor, a few pages and /metrics over HTTP, of one or several databases. One session
//! reads a database for all viewers (`poller`). Requests of viewers share a few other sessions (`session_pool`).

mod access;
mod act;
mod audit;
mod backlog;
mod base;
mod causes;
mod chart;
mod connections;
mod context;
mod databases;
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
mod session_pool;
mod snapshot;
mod tab;

use crate::commands::CommandContext;
use crate::connect::{self, ConnectArgs};
use crate::failure::{Code, Failure};
use crate::shutdown::Shutdown;
use access::{Access, guard, listen_address};
use axum::http::{HeaderName, header};
use axum::routing::{get, post};
use axum::{Router, middleware};
use base::BasePath;
use clap::Args;
use context::{DOWNLOADS_MAX, PageContext, STREAMS_MAX, Site};
use futures_util::future::join_all;
use live::live_page;
use outbox_transport::network::Network;
use page::MonitorPage;
use poller::Poller;
use proxy::TrustedProxy;
use serde_json::json;
use session_pool::PATIENCE;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

#[derive(Args)]
pub struct ServeArgs {
    /// Database name, connection string or URI; may be repeated
    #[arg(short = 'd', long, value_name = "DBNAME", help_heading = "Connection, as with psql")]
    dbname: Vec<String>,
    /// Address and port; addresses other than loopback need a token
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: String,
    /// Let viewers retry, discard, replay, pause and resume
    #[arg(long)]
    allow_actions: bool,
    /// File with the one token that grants access
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
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
    let connects = args.connects(&context.connect)?;
    let address = listen_address(&args.listen)?;
    // Checked before anything is opened.
    let header = args.trusted_user_header.clone();
    let proxy = header.map(|header| TrustedProxy::new(header, &args.trusted_proxy));
    let access = Access::new(
        args.token_file.as_deref(),
        proxy,
        address,
        args.allow_actions,
        &args.allow_host,
        &args.base_path,
    )?;
    let forms: Result<Vec<_>, _> = connects.iter().map(connect::names).collect();
    let names = databases::names(&forms?)?;
    let pollers = open_pollers(&args.base_path, &names, connects).await?;
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Failure::new(Code::Refused, format!("cannot listen at {address}: {error}"))
            .hint("Give another address or port with --listen.")
    })?;
    let bound = listener.local_addr().unwrap_or(address);
    let databases: Vec<_> = pollers.iter().map(|poller| Arc::clone(&poller.database)).collect();
    let site = Arc::new(Site {
        access: Arc::new(access),
        base: args.base_path.clone(),
        list: watch::Sender::new(Arc::new(databases::view(&databases))),
        databases,
        streams: Arc::new(Semaphore::new(STREAMS_MAX)),
        downloads: Arc::new(Semaphore::new(DOWNLOADS_MAX)),
    });
    let shutdown = Shutdown::on_signals()?; // before the address is printed
    let url = format!("http://{bound}{}", site.base.to(""));
    if context.json {
        let actions = args.allow_actions;
        let said = match &names[..] {
            [database] => json!({ "url": url, "database": database, "actions": actions }),
            databases => json!({ "url": url, "databases": databases, "actions": actions }),
        };
        println!("{said}");
    } else {
        let what = match args.allow_actions {
            true => "actions allowed",
            false => "read-only",
        };
        let of = if site.has_several() { "databases" } else { "database" };
        println!("Outbox Monitor of {of} {} at {url} ({what})", names.join(", "));
    }
    let mut reading = JoinSet::new(); // ends them with it
    for poller in pollers {
        reading.spawn(poller.run(Arc::clone(&site)));
    }
    tokio::select! {
        never = connections::serve(listener, router(Arc::clone(&site)), move |request| site.route(request)) => match never {},
        // Event streams are cut: browsers reconnect.
        () = shutdown.requested() => Ok(ExitCode::SUCCESS),
        // Pages that no longer change would look like an idle system.
        ended = reading.join_next() => {
            let ended = format!("cannot serve: a task that reads a database has ended: {ended:?}");
            Err(Failure::new(Code::Refused, ended))
        }
    }
}

/// A poller for each database, after its first reading. It is an error if no database can be read.
async fn open_pollers(base: &BasePath, names: &[String], connects: Vec<ConnectArgs>) -> Result<Vec<Poller>, Failure> {
    let base_of = |name: &String| match names {
        [_] => base.clone(),
        _ => base.of_database(&databases::word(name)),
    };
    let pollers = names.iter().zip(connects);
    let mut pollers: Vec<_> = pollers
        .map(|(name, connect)| Poller::new(name, base_of(name), connect))
        .collect();
    // A single database may ask for a password.
    let patience = if names.len() > 1 { PATIENCE } else { Duration::MAX };
    join_all(pollers.iter_mut().map(|poller| poller.refresh(patience))).await;
    let views: Vec<_> = pollers.iter().map(|poller| poller.database.view()).collect();
    let lost = views.iter().zip(names);
    let lost: Vec<_> = lost
        .filter_map(|(view, name)| Some((name, &view.lost.as_ref()?.failure)))
        .collect();
    if lost.len() == names.len() {
        return Err(lost[0].1.clone());
    }
    for (name, failure) in lost {
        eprintln!("outboxctl: warning: database {name}: {failure}");
    }
    Ok(pollers)
}

impl ServeArgs {
    /// How to connect to each database.
    fn connects(&self, shared: &ConnectArgs) -> Result<Vec<ConnectArgs>, Failure> {
        if self.dbname.len() < 2 {
            return Ok(vec![shared.clone()]);
        }
        if shared.ask_password {
            let several = Failure::new(Code::Usage, "-W asks for one password, but there are several databases");
            return Err(several.hint("Put the passwords into ~/.pgpass, or into the file that PGPASSFILE names."));
        }
        let of = |name: &String| ConnectArgs {
            dbname: Some(name.clone()),
            no_password: true, // the typed one would go to the servers of all
            ..shared.clone()
        };
        Ok(self.dbname.iter().map(of).collect())
    }
}

fn router(site: Arc<Site>) -> Router {
    let live = |page| get(async move |context: PageContext| live_page(&context, page));
    // A file of the program itself. Not cached between pages, because the next version may have another.
    let asset = |kind: &'static str, text: &'static str| {
        let headers = [(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache")];
        get(async move || (headers, text))
    };
    Router::new()
        .route("/", get(databases::home))
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
        .layer(middleware::from_fn_with_state(Arc::clone(&site.access), guard))
        // Behind no check: a health check may come by any name, and learns only that the process lives.
        .route(
            "/healthz",
            get(async || ([(header::CACHE_CONTROL, "no-store")], "ok\n")),
        )
        .with_state(site)
}
