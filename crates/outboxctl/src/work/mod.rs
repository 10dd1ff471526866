//! `outboxctl work`: a worker outside the server. It shares partitions, leases and claims with the workers in the server,
//! by SQL functions that the role outbox_relay may call.
//!
//! | module | question it answers |
//! |---|---|
//! | `worker` | in which order does what happen, and what if it fails? |
//! | `destination` | a destination: its messages between claim and settle, its connection |
//! | `ports` | what does the engine of crates/core stand on? |
//! | `session` | which SQL is called, and what do the answers mean? |
//! | `settings` | what does it go by, and where are the secrets? |
//! | `report` | what is printed? |

mod destination;
mod ports;
mod report;
mod session;
mod settings;
mod worker;

use crate::commands::Context;
use crate::failure::{Code, Failure};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};

/// How long an orderly end may take.
const LAST: Duration = Duration::from_secs(15);

/// How a worker outside the server runs.
#[derive(Args, Clone, Debug)]
pub struct WorkArgs {
    /// Take every partition, shared with nobody; refused while other workers live
    #[arg(long)]
    no_leasing: bool,
    /// Run a single tick and exit
    #[arg(long)]
    once: bool,
    #[arg(skip)]
    json: bool,
    /// Print nothing
    #[arg(long)]
    silent: bool,
    /// Rest so long between two ticks
    #[arg(long, value_name = "MS", default_value_t = 0)]
    interval_ms: u64,
    /// Print one line for so many seconds, with their sums
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    window: u64,
    /// The broker of the default destination as seen from here, without a password: amqp://user@host/vhost; else outbox.url
    #[arg(long, env = "OUTBOX_URL", hide_env_values = true)]
    url: Option<String>,
    /// File whose first line is the password for it, readable by its owner only
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
    /// With amqps: file of the CAs to trust, in PEM; else those of the system
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// With amqps: file of the client certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// File of its key, readable by its owner only
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Part of the worker's name; else the name of this host
    #[arg(long, value_name = "LABEL")]
    name: Option<String>,
}

impl WorkArgs {
    fn label(&self) -> String {
        let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let label = self.name.clone().or_else(host).unwrap_or_default();
        label.trim().to_owned()
    }
}

/// Delivers until SIGTERM or SIGINT, or for one tick.
pub async fn run(context: &Context, args: &WorkArgs) -> Result<ExitCode, Failure> {
    if let Some(url) = &args.url {
        // Checked here and not by clap, which would repeat it: it may carry a password.
        outbox_transport::parse_url(url).map_err(|error| {
            Failure::new(Code::Usage, format!("--url (OUTBOX_URL) is refused: {error}"))
                .hint("Write amqp://user@host:5672/vhost, and put the password into a file that --password-file names.")
        })?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        let mut signals =
            signal(kind).map_err(|error| Failure::new(Code::Refused, format!("cannot wait for signals: {error}")))?;
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            signals.recv().await;
            stop.store(true, SeqCst);
            // A server that does not answer must not hold it up, nor whoever asks twice. Its leases run out.
            _ = tokio::time::timeout(LAST, signals.recv()).await;
            std::process::exit(Code::CannotConnect as i32);
        });
    }
    let (handle, connect, once) = (Handle::current(), context.connect.clone(), args.once);
    let args = WorkArgs {
        json: context.json, // a line for each tick
        ..args.clone()
    };
    let worker = tokio::task::spawn_blocking(move || worker::run(&handle, &connect, &args, &stop));
    let totals = worker
        .await
        .map_err(|error| Failure::new(Code::Refused, format!("the worker ended: {error}")))??;
    Ok(match once && totals.failed > 0 {
        true => ExitCode::from(Code::SomeFailed as u8),
        false => ExitCode::SUCCESS,
    })
}
