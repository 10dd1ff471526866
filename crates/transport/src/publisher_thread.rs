//! The life of the publisher thread: connect, serve, tear down, wait, again; and end in bounded time when told to. For HTTP
//! `http` is what it does instead.
//!
//! ======== From here on: publisher thread. No Postgres, no signal, no panic that gets out. ========
//!
//! Started by `publisher`. A current-thread runtime drives everything here and lapin's tasks; lapin's own thread does the
//! socket calls. `session` is what happens while connected.

use crate::amqp::{self, Fault};
use crate::config::{AmqpConfig, TransportConfig};
use crate::guard::Wire;
use crate::http;
use crate::publisher::{Answered, ConnectionState, Event, Handed, Shared};
use crate::session::{self, Ended, Over};
use crate::unconfirmed::Patience;
use crate::{Outcome, Publication};
use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};

/// For a goodbye to a broker that still answers.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);
/// For lapin's thread to notice that its socket is shut.
const CUT_LIMIT: Duration = Duration::from_secs(2);
/// So many threads of lapin that outlive their socket are a leak that only a new process mends.
const STUCK_THREADS_MAX: u32 = 3;

/// The body of the thread.
pub(crate) fn main(
    config: TransportConfig,
    shared: &Shared,
    batches: mpsc::Receiver<Handed>,
    stop: watch::Receiver<Option<Instant>>,
) {
    let death = death_of(|| {
        let runtime = OurRuntime::new().map_err(|e| format!("no runtime: {e}"))?;
        let mut intake = Intake {
            batches,
            stop,
            shared,
            losses: 0,
        };
        match config {
            TransportConfig::Amqp(config) => runtime.get().block_on(keep_connected(&config, &mut intake)),
            TransportConfig::Http(config) => runtime.get().block_on(http::keep_posting(config, &mut intake)),
        }
    });
    if let Some(text) = death {
        shared.push(Event::Died(text));
    }
}

/// Why `run` ended, unless it ended as told. A panic that left the thread would be lost on the worker.
fn death_of(run: impl FnOnce() -> Result<(), String>) -> Option<String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(ended) => ended.err(),
        Err(panic) => Some(format!("the publisher thread panicked: {}", panic_text(&*panic))),
    }
}

/// A runtime whose drop never waits. Tokio's waits for its pool, and there a name look-up can hang for half a minute.
struct OurRuntime(Option<Runtime>);

impl OurRuntime {
    fn new() -> std::io::Result<Self> {
        // The pool only resolves names: one, and one more if that one hangs.
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(2)
            .build()?;
        Ok(Self(Some(runtime)))
    }

    fn get(&self) -> &Runtime {
        self.0.as_ref().expect("taken by drop only")
    }
}

impl Drop for OurRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text")
}

/// What comes from, and goes back to, the main thread.
pub(crate) struct Intake<'a> {
    batches: mpsc::Receiver<Handed>,
    stop: watch::Receiver<Option<Instant>>,
    shared: &'a Shared,
    /// How often messages were lost together, with a connection or for want of one.
    losses: u64,
}

/// Told to stop, and to be done by then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopBy(pub(crate) Instant);

impl Intake<'_> {
    /// The next batch that may go, if one is there.
    pub(crate) fn try_next(&mut self) -> Option<Vec<Publication>> {
        loop {
            let handed = self.batches.try_recv().ok()?;
            if let Some(batch) = self.accept(handed) {
                return Some(batch);
            }
        }
    }

    /// The batch, unless the worker handed it over before it heard of a loss: it may hold a later message of a key of which
    /// an earlier one was lost, so it is lost as well.
    pub(crate) fn accept(&mut self, Handed { batch, heard }: Handed) -> Option<Vec<Publication>> {
        if heard >= self.losses {
            return Some(batch);
        }
        self.lose(batch, "messages before it were lost");
        None
    }

    /// The next batch, or the order to stop, which goes first.
    pub(crate) async fn next_or_stop(&mut self, want_batch: bool) -> Result<Handed, StopBy> {
        let Self { batches, stop, .. } = self;
        tokio::select! {
            biased;
            stop = stop_order(stop) => Err(stop),
            Some(handed) = batches.recv(), if want_batch => Ok(handed),
        }
    }

    /// Whether main lets confirms wait.
    pub(crate) fn is_main_patient(&self) -> bool {
        self.shared.is_main_patient()
    }

    pub(crate) fn say_state(&self, state: ConnectionState) {
        self.shared.push(Event::State(state));
    }

    pub(crate) fn say_outcomes(&self, outcomes: Vec<Answered>) {
        if !outcomes.is_empty() {
            self.shared.push(Event::Outcomes(outcomes));
        }
    }

    /// Of a transport that counts failures.
    pub(crate) fn say_outcomes_counted(&self, outcomes: Vec<Answered>, failures: u64) {
        if !outcomes.is_empty() {
            self.shared.push_counted(Event::Outcomes(outcomes), Some(failures));
        }
    }

    /// What became of the messages of a connection that is over.
    pub(crate) fn say_last_outcomes(&mut self, outcomes: Vec<Answered>) {
        if !outcomes.is_empty() {
            self.losses += 1;
            self.say_outcomes_counted(outcomes, self.losses);
        }
    }

    fn lose(&mut self, batch: Vec<Publication>, reason: &str) {
        let lost = || Outcome::Lost {
            reason: reason.to_owned(),
        };
        let outcomes = batch.into_iter().map(|p| Answered::now(p.handle, lost()));
        self.say_last_outcomes(outcomes.collect());
    }

    /// Does `work` while there is no connection: every batch is answered at once, so that the caller can release it.
    async fn losing_batches<T>(&mut self, reason: &str, work: impl Future<Output = T>) -> Result<T, StopBy> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                next = self.next_or_stop(true) => self.lose(next?.batch, reason),
                done = &mut work => return Ok(done),
            }
        }
    }

    /// Does `work`; batches wait meanwhile.
    async fn unless_stopped<T>(&mut self, work: impl Future<Output = T>) -> Result<T, StopBy> {
        tokio::select! {
            biased;
            stop = stop_order(&mut self.stop) => Err(stop),
            done = work => Ok(done),
        }
    }

    pub(crate) fn lose_queue(&mut self, reason: &str) {
        self.batches.close();
        while let Ok(handed) = self.batches.try_recv() {
            self.lose(handed.batch, reason);
        }
    }
}

/// Ready once `stop` was called, or the publisher was dropped.
async fn stop_order(stop: &mut watch::Receiver<Option<Instant>>) -> StopBy {
    loop {
        if let Some(deadline) = *stop.borrow_and_update() {
            return StopBy(deadline);
        }
        if stop.changed().await.is_err() {
            return StopBy(Instant::now());
        }
    }
}

/// Ends when told to stop, or with `Err` when only a new process helps.
async fn keep_connected(config: &AmqpConfig, intake: &mut Intake<'_>) -> Result<(), String> {
    let mut backoff = Backoff::new(config.backoff_min, config.backoff_max);
    let mut patience = Patience::new(config.patience, config.confirm_timeout);
    let mut stuck_threads = 0;
    let mut why = "not connected yet".to_owned();
    intake.say_state(ConnectionState::Connecting);
    loop {
        let gone = match connect_and_serve(config, intake, &mut backoff, &mut patience, &mut why).await {
            Ok(gone) => gone,
            Err(StopBy(_)) => break,
        };
        if !gone {
            stuck_threads += 1;
            if stuck_threads >= STUCK_THREADS_MAX {
                return Err(format!("{stuck_threads} connections could not be closed"));
            }
        }
        if intake
            .losing_batches(&why, tokio::time::sleep(backoff.next()))
            .await
            .is_err()
        {
            break;
        }
    }
    intake.lose_queue("the publisher was stopped");
    Ok(())
}

/// One connection from first to last, or one failed attempt. `Ok(false)`: lapin's thread did not end with its socket.
async fn connect_and_serve(
    config: &AmqpConfig,
    intake: &mut Intake<'_>,
    backoff: &mut Backoff,
    patience: &mut Patience,
    why: &mut String,
) -> Result<bool, StopBy> {
    let mut wire = None;
    let mut link = None;
    let ended = match intake.losing_batches(why, amqp::connect(config, &mut wire)).await? {
        Err(fault) => Over::Fault(fault),
        Ok(new_link) => {
            intake.say_state(ConnectionState::Connected);
            let since = Instant::now();
            let ended = serve_channels(link.insert(new_link), &mut wire, config, patience, intake).await;
            backoff.connection_lived(since.elapsed());
            patience.disconnected();
            ended
        }
    };
    let (close_limit, cut_limit) = match &ended {
        Over::Fault(fault) => {
            say_down(intake, why, fault);
            (CLOSE_LIMIT, CUT_LIMIT)
        }
        // A share of the time left each, so that all of it ends before `stop` gives up on this thread.
        Over::Stopped(StopBy(deadline)) => {
            let left = deadline.saturating_duration_since(Instant::now());
            (CLOSE_LIMIT.min(left / 3), CUT_LIMIT.min(left / 3))
        }
    };
    // A goodbye comes behind what lapin holds of messages. After the deadline those must not go out: the socket is cut.
    let polite = |link: &amqp::Link| {
        let status = link.connection.status();
        status.connected() && !status.blocked() && !config.deadline.has_passed()
    };
    let tear_down = async {
        if let Some(link) = link.filter(polite) {
            amqp::close(&link.connection, close_limit).await;
        }
        match wire {
            Some(wire) => wire.cut(cut_limit).await,
            None => true,
        }
    };
    match ended {
        Over::Fault(_) => intake.losing_batches(why, tear_down).await,
        Over::Stopped(stop) => {
            tear_down.await;
            Err(stop)
        }
    }
}

/// Serves one channel after the other. Returns why the connection is over.
async fn serve_channels(
    link: &mut amqp::Link,
    wire: &mut Option<Wire>,
    config: &AmqpConfig,
    patience: &mut Patience,
    intake: &mut Intake<'_>,
) -> Over {
    loop {
        match session::serve(link, wire.as_mut(), config, patience, intake).await {
            Ended::Over(over) => return over,
            Ended::Unconfirmed => {}
        }
        match intake.unless_stopped(amqp::renew_channel(config, link)).await {
            Ok(Ok(())) => {}
            Ok(Err(fault)) => return Over::Fault(fault),
            Err(stop) => return Over::Stopped(stop),
        }
    }
}

fn say_down(intake: &Intake<'_>, why: &mut String, fault: &Fault) {
    *why = format!("{}: {}", fault.reason, fault.detail);
    intake.say_state(ConnectionState::Down {
        reason: fault.reason,
        detail: fault.detail.clone(),
    });
}

/// Doubles from min to max. A connection starts it afresh only by living for max: one that breaks at once, again and
/// again (a publish that the broker punishes by closing), must not be retried at full speed. With HTTP one success does.
pub(crate) struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(min: Duration, max: Duration) -> Self {
        Self {
            min,
            max: max.max(min),
            next: min,
        }
    }

    pub(crate) fn restart(&mut self) {
        self.next = self.min;
    }

    pub(crate) fn next(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.max);
        now
    }

    fn connection_lived(&mut self, time: Duration) {
        if time >= self.max {
            self.restart();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Secret;

    #[test]
    fn a_panic_is_told_with_its_text() {
        assert_eq!(death_of(|| Ok(())), None);
        assert_eq!(death_of(|| Err("stuck".to_owned())), Some("stuck".to_owned()));
        assert!(death_of(|| panic!("a literal")).is_some_and(|t| t.ends_with("panicked: a literal")));
        let number = 7;
        assert!(death_of(|| panic!("number {number}")).is_some_and(|t| t.ends_with("panicked: number 7")));
    }

    #[test]
    fn the_backoff_doubles_to_its_maximum_and_restarts_only_after_a_connection_that_lived() {
        let config = AmqpConfig::new(crate::parse_url("amqp://h").unwrap(), Secret::default());
        let mut backoff = Backoff::new(config.backoff_min, config.backoff_max);
        let waits: Vec<u128> = (0..8).map(|_| backoff.next().as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        backoff.connection_lived(Duration::from_secs(1));
        assert_eq!(backoff.next().as_millis(), 5000);
        backoff.connection_lived(Duration::from_secs(5));
        assert_eq!(backoff.next().as_millis(), 100);
    }
}
