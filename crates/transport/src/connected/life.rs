//! The life of the connections of a destination: connect, serve, close, wait, repeat. After a stop request it ends in
//! bounded time. A connection that has lived for long is replaced: the next one is opened first, and takes over once all
//! messages have their answers.
//!
//! Runs on the publisher thread. `publish_loop` covers the time while connected.

use super::endpoints::{CUT_LIMIT, Endpoints, Opened, Successor};
use super::link::{Connection, Connector, Terms, Wire};
use super::publish_loop::{self, ConnectionEnd, PublishLoopEnd, ServedConnection};
use super::unconfirmed::ConfirmWatchdog;
use crate::Publication;
use crate::backoff::Backoff;
use crate::crossing::Handed;
use crate::event::ConnectionState;
use crate::intake::{Intake, STOPPED, StopBy};
use crate::transport::SharedPools;
use std::collections::VecDeque;
use std::pin::pin;
use std::time::{Duration, Instant};

/// The time limit for a polite close, with a peer that still answers.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);
/// The publisher gives up once this number of connections have outlived their sockets: only a new process frees them.
const STUCK_MAX: u32 = 3;

/// Carries messages until a stop request. Err: why only a new process can continue.
pub(crate) async fn keep_connected<C: Connector>(
    connector: C,
    terms: Terms,
    intake: &mut Intake<'_>,
    pools: &SharedPools,
) -> Result<(), String> {
    match connect_again_and_again(Endpoints::new(connector, terms, pools), intake).await {
        Ok(why) => Err(why),
        Err(StopBy(_)) => {
            intake.lose_queue(STOPPED);
            Ok(())
        }
    }
}

/// Connects again and again until a stop request. Returns why only a new process can continue.
async fn connect_again_and_again<C: Connector>(
    mut endpoints: Endpoints<'_, C>,
    intake: &mut Intake<'_>,
) -> Result<String, StopBy> {
    let terms = &endpoints.terms;
    let mut life = Reconnection {
        backoff: Backoff::new(terms.backoff_min, terms.backoff_max),
        watchdog: ConfirmWatchdog::new(terms.patience, terms.answer_timeout, terms.endpoints.len() > 1),
        why: "not connected yet".to_owned(),
        first: None,
    };
    intake.report_state(ConnectionState::Connecting);
    loop {
        let is_idle = connect_and_serve(&mut endpoints, intake, &mut life).await?;
        let stuck = endpoints.stuck.get();
        if stuck >= STUCK_MAX {
            return Ok(format!("{stuck} connections could not be closed"));
        }
        if is_idle {
            endpoints.begin_turn();
            life.first = Some(intake.next_or_stop(true).await?);
            continue;
        }
        // Waits only after a turn over all endpoints: one that takes and drops each connection is no loop at full
        // speed.
        let wait = match endpoints.go_on() {
            true => life.backoff.next(),
            false => Duration::ZERO,
        };
        intake.losing_batches(&life.why, tokio::time::sleep(wait)).await?;
    }
}

/// What outlives a connection.
struct Reconnection {
    backoff: Backoff,
    watchdog: ConfirmWatchdog,
    /// Why there is no connection.
    why: String,
    /// The batch for which a connection that was idle is opened again.
    first: Option<Handed>,
}

/// One connection and those that replace it, from start to end, or one failed attempt. Returns whether the connection
/// was idle: then it is opened again for the next batch.
async fn connect_and_serve<C: Connector>(
    endpoints: &mut Endpoints<'_, C>,
    intake: &mut Intake<'_>,
    life: &mut Reconnection,
) -> Result<bool, StopBy> {
    let mut wire = None;
    let connecting = endpoints.open(&mut wire);
    let connected = match life.first {
        None => intake.losing_batches(&life.why, connecting).await,
        Some(_) => intake.unless_stopped(connecting).await,
    };
    let first = life.first.take();
    match connected {
        Ok(Ok(opened)) => {
            endpoints.connected();
            intake.report_state(ConnectionState::Connected);
            let waiting = first.map_or(Vec::new(), |first| intake.accept(first));
            serve_connections(endpoints, opened, waiting.into(), intake, life).await
        }
        Ok(Err(fault)) => {
            let fault = endpoints.at_endpoint(fault);
            if let Some(fault) = endpoints.failed(&fault) {
                intake.report_down(&fault);
            }
            life.why = fault.to_string();
            let batch = first.map(|first| first.batch).unwrap_or_default();
            intake.lose(batch, &life.why);
            Ok(false)
        }
        Err(stop) => {
            let batch = first.map(|first| first.batch).unwrap_or_default();
            intake.lose(batch, STOPPED);
            if let Some(mut wire) = wire {
                wire.cut(close_limits(Some(stop)).1).await;
            }
            Err(stop)
        }
    }
}

/// Serves a connection, and the one that replaces it, until one ends. `waiting` goes first.
async fn serve_connections<C: Connector>(
    endpoints: &Endpoints<'_, C>,
    mut opened: Opened<C>,
    mut waiting: VecDeque<Publication>,
    intake: &mut Intake<'_>,
    life: &mut Reconnection,
) -> Result<bool, StopBy> {
    let deadline = &endpoints.terms.deadline;
    // After the deadline no message may go out, also none that is still buffered: the socket is cut instead.
    let close = |opened: Opened<C>, stop| {
        let (close_limit, cut_limit) = close_limits(stop);
        opened.close(!deadline.has_passed(), close_limit, cut_limit)
    };
    loop {
        let since = Instant::now();
        let mut place = endpoints.pools.open.opened();
        let opening = pin!(endpoints.successor());
        let mut served = ServedConnection {
            opened: &mut opened,
            endpoints,
            watchdog: &mut life.watchdog,
            place: &mut place,
            successor: Successor::new(opening),
        };
        let ended = serve_lanes(&mut served, intake, waiting).await;
        let unused = served.successor.opened;
        life.backoff.connection_lived(since.elapsed());
        life.watchdog.disconnected();
        let stop = ended.as_ref().err().copied();
        let address = opened.address;
        let tear_down = async {
            let unused = async {
                if let Some(unused) = unused {
                    endpoints.count_stuck(close(*unused, stop).await);
                }
            };
            let (is_gone, ()) = tokio::join!(close(opened, stop), unused);
            endpoints.count_stuck(is_gone);
        };
        match ended {
            Ok(ConnectionEnd::Idle) => {
                intake.unless_stopped(tear_down).await?;
                return Ok(true);
            }
            Ok(ConnectionEnd::Failed(fault)) => {
                if !deadline.has_passed() {
                    endpoints.host().failed(address);
                }
                life.why = fault.to_string();
                intake.losing_batches(&life.why, tear_down).await?;
                return Ok(false);
            }
            Ok(ConnectionEnd::Replaced { by, waiting: rest }) => {
                if let Err(stop) = intake.unless_stopped(tear_down).await {
                    intake.lose(rest, STOPPED);
                    close(*by, Some(stop)).await;
                    return Err(stop);
                }
                (opened, waiting) = (*by, rest);
            }
            Err(stop) => {
                tear_down.await;
                return Err(stop);
            }
        }
    }
}

/// The time limits for a polite close, and for the end of what serves it. Each gets a third of the time left of a stop,
/// so that both end before `Publisher::stop` gives up on this thread.
fn close_limits(stop: Option<StopBy>) -> (Duration, Duration) {
    let Some(StopBy(deadline)) = stop else {
        return (CLOSE_LIMIT, CUT_LIMIT);
    };
    let part = deadline.saturating_duration_since(Instant::now()) / 3;
    (CLOSE_LIMIT.min(part), CUT_LIMIT.min(part))
}

/// Serves one channel after the other. Returns why the connection is over.
async fn serve_lanes<C: Connector>(
    served: &mut ServedConnection<'_, C>,
    intake: &mut Intake<'_>,
    mut waiting: VecDeque<Publication>,
) -> Result<ConnectionEnd<C>, StopBy> {
    let endpoints = served.endpoints;
    loop {
        match publish_loop::serve(served, intake, waiting).await? {
            PublishLoopEnd::Connection(end) => return Ok(end),
            PublishLoopEnd::Channel {
                waiting: next,
                rest: None,
            } => waiting = next,
            PublishLoopEnd::Channel {
                waiting: next,
                rest: Some(rest),
            } => {
                waiting = VecDeque::new();
                let fault = endpoints.at_endpoint(C::refusal());
                let why = fault.to_string();
                intake.report_down(&fault);
                intake.lose(next, &why);
                intake.losing_batches(&why, tokio::time::sleep(rest)).await?;
                intake.report_state(ConnectionState::Connected);
            }
        }
        let renewing = served.opened.connection.renew(endpoints.terms.connect_timeout);
        match intake.unless_stopped(renewing).await {
            Ok(Ok(())) => {}
            Ok(Err(fault)) => {
                let fault = endpoints.at_endpoint(fault);
                intake.report_down(&fault);
                intake.lose(waiting, &fault.to_string());
                return Ok(ConnectionEnd::Failed(fault));
            }
            Err(stop) => {
                intake.lose(waiting, STOPPED);
                return Err(stop);
            }
        }
    }
}
