//! The life of a connection to a broker: connect, serve, close, wait, repeat. After a stop request it ends in bounded
//! time.
//!
//! Runs on the publisher thread. A current-thread runtime drives everything here and lapin's tasks; lapin's own thread
//! makes the socket calls. `session` covers the time while connected.

mod attempts;
mod config;
mod connect;
mod guard;
mod returns;
mod sendable;
mod session;
mod unconfirmed;

pub use config::{AmqpConfig, ExchangeType};

use crate::Publication;
use crate::backoff::Backoff;
use crate::brokers::OpenConnection;
use crate::crossing::Handed;
use crate::down::{DownReason, Fault};
use crate::event::ConnectionState;
use crate::intake::{Intake, StopBy};
use crate::pool;
use crate::transport::{SharedPools, Transport};
use connect::Link;
use guard::SocketHandle;
use session::SessionEnd;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};
use unconfirmed::ConfirmWatchdog;

/// The time limit for a polite close, with a broker that still answers.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);
/// The time limit for lapin's thread to notice that its socket is shut.
const CUT_LIMIT: Duration = Duration::from_secs(2);
/// The time limit for each step of connecting to one of several endpoints: the next one may answer immediately.
const STEP_LIMIT: Duration = Duration::from_secs(5);
const REFUSED: &str = "a queue refuses messages (basic.nack), and none is confirmed";
/// The publisher gives up once this number of lapin threads have outlived their sockets: only a new process frees them.
const STUCK_THREADS_MAX: u32 = 3;

impl Transport for AmqpConfig {
    fn check(&self) -> io::Result<()> {
        self.validate()
    }

    fn window(&self) -> usize {
        self.window
    }

    async fn run(mut self, intake: &mut Intake<'_>, pools: &SharedPools) -> Result<(), String> {
        if self.endpoints.len() > 1 {
            self.connect_timeout = self.connect_timeout.min(STEP_LIMIT);
        }
        match keep_connected(&mut self, intake, pools).await {
            Ok(why) => Err(why),
            Err(StopBy(_)) => {
                intake.lose_queue("the publisher was stopped");
                Ok(())
            }
        }
    }
}

/// Connects again and again until a stop request. Returns why only a new process can continue.
async fn keep_connected(
    config: &mut AmqpConfig,
    intake: &mut Intake<'_>,
    pools: &SharedPools,
) -> Result<String, StopBy> {
    let mut life = Reconnection {
        backoff: Backoff::new(config.backoff_min, config.backoff_max),
        watchdog: ConfirmWatchdog::new(config.patience, config.confirm_timeout, config.endpoints.len() > 1),
        why: "not connected yet".to_owned(),
        turn: EndpointRound::default(),
        is_slow: false,
        first: None,
    };
    let mut stuck_threads = 0;
    intake.report_state(ConnectionState::Connecting);
    loop {
        let (gone, is_idle) = connect_and_serve(config, intake, pools, &mut life).await?;
        if !gone {
            stuck_threads += 1;
            if stuck_threads >= STUCK_THREADS_MAX {
                return Ok(format!("{stuck_threads} connections could not be closed"));
            }
        }
        if is_idle {
            life.turn = EndpointRound::default();
            life.first = Some(intake.next_or_stop(true).await?);
            continue;
        }
        life.turn.tried += 1;
        config.endpoints.rotate_left(1);
        // Waits only after a turn over all endpoints: one that takes and drops each connection is no loop at full
        // speed.
        let mut wait = Duration::ZERO;
        if life.turn.tried >= config.endpoints.len() {
            wait = life.backoff.next();
            life.turn = EndpointRound::default();
        }
        intake.losing_batches(&life.why, tokio::time::sleep(wait)).await?;
    }
}

/// What outlives a connection.
struct Reconnection {
    backoff: Backoff,
    watchdog: ConfirmWatchdog,
    /// Why there is no connection.
    why: String,
    turn: EndpointRound,
    /// Whether the last connect failed after a long time.
    is_slow: bool,
    /// The batch for which a connection that was idle is opened again.
    first: Option<Handed>,
}

/// The endpoints that were tried one after the other without a wait.
#[derive(Default)]
struct EndpointRound {
    tried: usize,
    /// Why each connect failed.
    failures: Vec<String>,
}

impl EndpointRound {
    /// Records a failed connect. Returns what to report if that was the last endpoint: while others may answer, the
    /// broker does not count as down.
    fn failed(&mut self, config: &AmqpConfig, fault: &Fault) -> Option<Fault> {
        self.failures.push(fault.detail.clone());
        let is_last = self.tried + 1 >= config.endpoints.len();
        is_last.then(|| Fault::new(fault.reason, self.failures.join("; ")))
    }
}

/// One connection from start to end, or one failed attempt. Returns whether lapin's thread has ended with its socket,
/// and whether the connection was idle: then it is opened again for the next batch.
async fn connect_and_serve(
    config: &AmqpConfig,
    intake: &mut Intake<'_>,
    pools: &SharedPools,
    life: &mut Reconnection,
) -> Result<(bool, bool), StopBy> {
    let mut wire = None;
    let mut link = None;
    let connecting = async {
        let slot = pools.pool.wait_for_slot(life.is_slow).await;
        let connected = connect::connect(config, &mut wire).await;
        (connected, slot.took())
    };
    let connected = match life.first {
        None => intake.losing_batches(&life.why, connecting).await,
        Some(_) => intake.unless_stopped(connecting).await,
    };
    let first = life.first.take();
    let (connected, took) = match connected {
        Ok(connected) => connected,
        Err(stop) => {
            let batch = first.map(|first| first.batch).unwrap_or_default();
            intake.lose(batch, "the publisher was stopped");
            return Err(stop);
        }
    };
    life.is_slow = connected.is_err() && pool::is_slow(took);
    let ended = match connected {
        Err(fault) => {
            let fault = config.at_endpoint(fault);
            if let Some(fault) = life.turn.failed(config, &fault) {
                intake.report_down(&fault);
            }
            let batch = first.map(|first| first.batch).unwrap_or_default();
            intake.lose(batch, &fault.to_string());
            Ok(Some(fault))
        }
        Ok(new_link) => {
            life.turn.failures.clear();
            intake.report_state(ConnectionState::Connected);
            let since = Instant::now();
            let mut open = pools.brokers.opened();
            let waiting = first.and_then(|first| intake.accept(first)).unwrap_or_default();
            let link = link.insert(new_link);
            let watchdog = &mut life.watchdog;
            let ended = serve_channels(link, &mut wire, config, watchdog, intake, &mut open, waiting.into()).await;
            life.backoff.connection_lived(since.elapsed());
            life.watchdog.disconnected();
            ended
        }
    };
    let why = &mut life.why;
    let (close_limit, cut_limit) = match &ended {
        Ok(fault) => {
            *why = fault.as_ref().map_or(std::mem::take(why), Fault::to_string);
            (CLOSE_LIMIT, CUT_LIMIT)
        }
        // Each step gets a third of the time left, so that both end before `Publisher::stop` gives up on this thread.
        Err(StopBy(deadline)) => {
            let left = deadline.saturating_duration_since(Instant::now());
            (CLOSE_LIMIT.min(left / 3), CUT_LIMIT.min(left / 3))
        }
    };
    // A polite close is sent after the messages that lapin still buffers. After the deadline those must not go out, so
    // the socket is cut instead.
    let polite = |link: &Link| {
        let status = link.connection.status();
        status.connected() && !status.blocked() && !config.deadline.has_passed()
    };
    let tear_down = async {
        if let Some(link) = link.filter(polite) {
            connect::close(&link.connection, wire.as_mut(), close_limit).await;
        }
        match wire {
            Some(wire) => wire.cut(cut_limit).await,
            None => true,
        }
    };
    match ended {
        Ok(Some(_)) => Ok((intake.losing_batches(why, tear_down).await?, false)),
        Ok(None) => Ok((intake.unless_stopped(tear_down).await?, true)),
        Err(stop) => {
            tear_down.await;
            Err(stop)
        }
    }
}

/// Serves one channel after the other. Returns why the connection is over.
async fn serve_channels(
    link: &mut Link,
    wire: &mut Option<SocketHandle>,
    config: &AmqpConfig,
    watchdog: &mut ConfirmWatchdog,
    intake: &mut Intake<'_>,
    open: &mut OpenConnection,
    mut waiting: VecDeque<Publication>,
) -> Result<Option<Fault>, StopBy> {
    loop {
        match session::serve(link, wire.as_mut(), config, watchdog, intake, open, waiting).await? {
            SessionEnd::Connection(fault) => return Ok(fault),
            SessionEnd::Channel {
                waiting: next,
                rest: None,
            } => waiting = next,
            SessionEnd::Channel {
                waiting: next,
                rest: Some(rest),
            } => {
                waiting = VecDeque::new();
                let fault = config.at_endpoint(Fault::new(DownReason::QueueRefused, REFUSED));
                let why = fault.to_string();
                intake.report_down(&fault);
                intake.lose(next.into(), &why);
                intake.losing_batches(&why, tokio::time::sleep(rest)).await?;
                intake.report_state(ConnectionState::Connected);
            }
        }
        match intake.unless_stopped(connect::renew_channel(config, link)).await {
            Ok(Ok(())) => {}
            Ok(Err(fault)) => {
                let fault = config.at_endpoint(fault);
                intake.report_down(&fault);
                intake.lose(waiting.into(), &fault.to_string());
                return Ok(Some(fault));
            }
            Err(stop) => {
                intake.lose(waiting.into(), "the publisher was stopped");
                return Err(stop);
            }
        }
    }
}
