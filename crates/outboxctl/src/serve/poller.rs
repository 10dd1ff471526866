//! The one session that reads the database for all viewers, and makes the live parts of the pages from it. It reads
//! once a second while a page is open, and every few seconds otherwise.

use super::backlog::BacklogHistory;
use super::chart::PERIODS;
use super::context::{App, View};
use super::live::live_parts;
use super::session::{MonitorSession, PATIENCE, SessionPurpose, no_answer};
use super::snapshot::{Lost, MonitorSnapshot, SlowParts};
use crate::connect::ConnectArgs;
use crate::failure::Failure;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_postgres::error::SqlState;

const WATCHED: Duration = Duration::from_secs(1);
const UNWATCHED: Duration = Duration::from_secs(5);
/// With a thousand partitions one reading takes a good part of a second. The poller then reads less often, and uses at
/// most a tenth of a processor of the server.
const REST_PER_REFRESH: u32 = 9;

/// The session, and what is kept from one reading to the next.
pub struct Poller {
    /// None: lost.
    session: Option<MonitorSession>,
    slow: SlowParts,
    backlog: BacklogHistory,
}

impl Poller {
    /// The first reading. A failure now is for the caller to fix, and ends the program.
    pub async fn first(args: &ConnectArgs) -> Result<(Self, View), Failure> {
        let mut poller = Self {
            session: Some(MonitorSession::open(args, &SessionPurpose::Watch).await?),
            slow: SlowParts::default(),
            backlog: BacklogHistory::default(),
        };
        let snapshot = poller.read(args).await?;
        let view = poller.view(Some(snapshot), None, SystemTime::now());
        Ok((poller, view))
    }

    fn view(&self, snapshot: Option<MonitorSnapshot>, lost: Option<Lost>, read_at: SystemTime) -> View {
        View {
            live: live_parts(snapshot.as_ref(), lost.as_ref(), &self.backlog),
            snapshot,
            lost,
            read_at,
        }
    }

    /// Reads forever.
    pub async fn run(mut self, app: Arc<App>, views: watch::Sender<Arc<View>>) {
        loop {
            let started = Instant::now();
            let read = timeout(PATIENCE, self.read(&app.pool.args)).await;
            let read = read.unwrap_or_else(|_| {
                self.session.take().map(|session| tokio::spawn(session.cancel()));
                Err(no_answer())
            });
            let before = views.borrow().clone();
            let view = match read {
                Ok(snapshot) => self.view(Some(snapshot), None, SystemTime::now()),
                Err(failure) => {
                    let since = before.lost.as_ref().map_or_else(SystemTime::now, |lost| lost.since);
                    let message = failure.to_string().replace('\n', " ");
                    let lost = Lost { since, message };
                    self.view(before.snapshot.clone(), Some(lost), before.read_at)
                }
            };
            views.send_replace(Arc::new(view));
            wait(&app, started).await;
        }
    }

    async fn read(&mut self, args: &ConnectArgs) -> Result<MonitorSnapshot, Failure> {
        if self.session.as_ref().is_none_or(MonitorSession::is_closed) {
            self.slow = SlowParts::default();
            self.session = Some(MonitorSession::open(args, &SessionPurpose::Watch).await?);
        }
        let session = self.session.as_ref().expect("opened above");
        let read = MonitorSnapshot::read(session, &mut self.slow).await;
        match &read {
            Ok(snapshot) => self
                .backlog
                .record(snapshot.now.epoch_s, &PERIODS, &snapshot.destinations),
            Err(failure) if failure.is(&SqlState::QUERY_CANCELED) => {}
            Err(_) => self.session = None, // also if only a view changed: a new session prepares again
        }
        read
    }
}

async fn wait(app: &App, started: Instant) {
    let took = started.elapsed();
    let rest = |interval: Duration| interval.saturating_sub(took).max(took * REST_PER_REFRESH).min(PATIENCE);
    // Also if a page was just opened: many of them must not make it read more often.
    sleep(rest(WATCHED)).await;
    let mut asked = app.asked_at.subscribe();
    if !app.is_watched() {
        _ = timeout(rest(UNWATCHED) - rest(WATCHED), asked.changed()).await;
    }
}
