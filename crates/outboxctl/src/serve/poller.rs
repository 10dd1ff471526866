//! The one session that reads the database for all viewers, and makes the live parts of the pages from it. It reads
//! once a second while a page is open, and every few seconds otherwise.

use super::backlog::BacklogHistory;
use super::base::BasePath;
use super::chart::PERIODS;
use super::context::{Site, SiteDatabase, View};
use super::databases;
use super::live::live_parts;
use super::session_pool::{MonitorSession, PATIENCE, SessionPool, SessionPurpose, no_answer};
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
/// After the last request of a page it reads often for so long.
const WATCHED_FOR: Duration = Duration::from_secs(30);
/// With a thousand partitions one reading takes a good part of a second. The poller then reads less often, and uses at
/// most a tenth of a processor of the server.
const REST_PER_REFRESH: u32 = 9;

/// The session, and what is kept from one reading to the next.
pub struct Poller {
    pub database: Arc<SiteDatabase>,
    views: watch::Sender<Arc<View>>,
    /// None: lost.
    session: Option<MonitorSession>,
    slow: SlowParts,
    backlog: BacklogHistory,
}

impl Poller {
    pub fn new(name: &str, base: BasePath, args: ConnectArgs) -> Self {
        let backlog = BacklogHistory::default();
        let unread = View {
            live: live_parts(None, None, &backlog),
            snapshot: None,
            lost: None,
            read_at: SystemTime::now(),
        };
        let views = watch::Sender::new(Arc::new(unread));
        let database = SiteDatabase {
            name: name.to_owned(),
            base,
            pool: SessionPool::new(args),
            views: views.subscribe(),
            asked_at: watch::Sender::new(Instant::now()),
        };
        Self {
            database: Arc::new(database),
            views,
            session: None,
            slow: SlowParts::default(),
            backlog,
        }
    }

    /// One reading, for at most `patience`. Without an answer the view has the values of the one before.
    pub async fn refresh(&mut self, patience: Duration) {
        let read = timeout(patience, self.read()).await.unwrap_or_else(|_| {
            self.session.take().map(|session| tokio::spawn(session.cancel()));
            Err(no_answer())
        });
        let before = self.database.view();
        let (snapshot, lost, read_at) = match read {
            Ok(snapshot) => (Some(snapshot), None, SystemTime::now()),
            Err(failure) => {
                let since = before.lost.as_ref().map_or_else(SystemTime::now, |lost| lost.since);
                (before.snapshot.clone(), Some(Lost { since, failure }), before.read_at)
            }
        };
        self.views.send_replace(Arc::new(View {
            live: live_parts(snapshot.as_ref(), lost.as_ref(), &self.backlog),
            snapshot,
            lost,
            read_at,
        }));
    }

    /// Reads forever.
    pub async fn run(mut self, site: Arc<Site>) {
        loop {
            let started = Instant::now();
            self.refresh(PATIENCE).await;
            if site.has_several() {
                // Within the lock, so that the last list has the last views.
                site.list
                    .send_modify(|list| *list = Arc::new(databases::view(&site.databases)));
            }
            wait(&self.database, &self.views, started).await;
        }
    }

    async fn read(&mut self) -> Result<MonitorSnapshot, Failure> {
        if self.session.as_ref().is_none_or(MonitorSession::is_closed) {
            self.slow = SlowParts::default();
            self.session = Some(MonitorSession::open(&self.database.pool.args, &SessionPurpose::Watch).await?);
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

async fn wait(database: &SiteDatabase, views: &watch::Sender<Arc<View>>, started: Instant) {
    let elapsed = started.elapsed();
    let rest = |interval: Duration| {
        interval
            .saturating_sub(elapsed)
            .max(elapsed * REST_PER_REFRESH)
            .min(PATIENCE)
    };
    // Also if a page was just opened: many of them must not make it read more often.
    sleep(rest(WATCHED)).await;
    let mut asked = database.asked_at.subscribe();
    let has_page = views.receiver_count() > 1; // the other one is in the database
    if !has_page && asked.borrow().elapsed() >= WATCHED_FOR {
        _ = timeout(rest(UNWATCHED) - rest(WATCHED), asked.changed()).await;
    }
}
