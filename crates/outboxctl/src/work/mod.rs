//! `outboxctl work`: a worker outside the server. It shares partitions, leases and claims with the workers in the server,
//! by SQL functions that the role outbox_relay may call.
//!
//! | module | question it answers |
//! |---|---|
//! | `worker` | when does a session begin, a pass, a tick, and the end? |
//! | `host` | what does the worker of crates/worker stand on here? |
//! | `port` | and each of its destinations? |
//! | `session` | which SQL is called, and what do the answers mean? |
//! | `settings` | what does it go by, and where are the secrets? |
//! | `totals` | what did the run do? |
//! | `report` | what is printed? |
//! | `board` | what do the worker and its screen tell each other? |
//! | `screen` | what is shown on a terminal? |

mod board;
mod host;
mod port;
mod report;
mod screen;
mod session;
mod settings;
mod totals;
mod worker;

use crate::commands::Context;
use crate::failure::{Code, Failure};
use crate::screen::terminal;
use board::Board;
use clap::Args;
use report::Printer;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

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
    /// Print lines also where a terminal is, which else has a screen
    #[arg(long)]
    no_screen: bool,
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
    let stop = Stop::on_signals()?;
    let has_screen = !(context.json || args.silent || args.once || args.no_screen) && screen::is_possible();
    let board = has_screen.then(|| Arc::new(Board::new()));
    if has_screen {
        stop.on(SignalKind::hangup(), Stop::begin)?; // a terminal that goes says it again and again
    }
    let (handle, connect, once) = (Handle::current(), context.connect.clone(), args.once);
    let args = WorkArgs {
        json: context.json, // a line for each tick
        ..args.clone()
    };
    let (for_worker, worker_stop) = (board.clone(), stop.clone());
    let mut worker = tokio::task::spawn_blocking(move || {
        let screen = for_worker.as_ref();
        let mut printer = Printer::new(args.silent, args.json, args.window, screen.cloned());
        let ended = worker::run(&handle, &connect, &args, &worker_stop, screen, &mut printer);
        (ended, printer)
    });
    let (mut has_begun, mut trouble) = (false, None);
    let ended = match board {
        None => worker.await,
        Some(board) => tokio::select! {
            ended = &mut worker => ended,
            // Not before: until then a password may be asked for.
            () = board.begun() => {
                has_begun = true;
                let mut why_not = screen::show(&board, &context.connect, &stop);
                let ended = worker.await;
                trouble = why_not.try_recv().ok();
                terminal::restore();
                ended
            }
        },
    };
    let (ended, mut printer) =
        ended.map_err(|error| Failure::new(Code::Refused, format!("the worker ended: {error}")))?;
    if ended.is_ok() || has_begun {
        printer.flush();
    }
    let failed = ended?;
    if let Some(error) = trouble {
        return Err(Failure::new(Code::Refused, format!("the terminal: {error}")));
    }
    Ok(match once && failed > 0 {
        true => ExitCode::from(Code::SomeFailed as u8),
        false => ExitCode::SUCCESS,
    })
}

/// The wish that the worker ends. Whoever asks twice does not wait for its orderly end.
#[derive(Clone)]
pub struct Stop {
    is_asked: Arc<AtomicBool>,
    asks: UnboundedSender<()>,
}

impl Stop {
    fn on_signals() -> Result<Self, Failure> {
        let (asks, mut asked) = unbounded_channel();
        let stop = Self {
            is_asked: Arc::default(),
            asks,
        };
        tokio::spawn(async move {
            asked.recv().await;
            // A server that does not answer must not hold it up, nor whoever asks twice. Its leases run out.
            _ = tokio::time::timeout(LAST, asked.recv()).await;
            terminal::restore();
            std::process::exit(Code::CannotConnect as i32);
        });
        stop.on(SignalKind::terminate(), Self::ask)?;
        stop.on(SignalKind::interrupt(), Self::ask)?;
        Ok(stop)
    }

    fn on(&self, kind: SignalKind, then: fn(&Self)) -> Result<(), Failure> {
        let mut signals =
            signal(kind).map_err(|error| Failure::new(Code::Refused, format!("cannot wait for signals: {error}")))?;
        let stop = self.clone();
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                then(&stop);
            }
        });
        Ok(())
    }

    pub fn is_asked(&self) -> bool {
        self.is_asked.load(SeqCst)
    }

    /// To end in order; the second time to end at once.
    pub fn ask(&self) {
        self.is_asked.store(true, SeqCst);
        _ = self.asks.send(());
    }

    /// To end in order, however often.
    pub fn begin(&self) {
        if !self.is_asked.swap(true, SeqCst) {
            _ = self.asks.send(());
        }
    }
}
