//! The one session that reads the database for all viewers, and makes the live parts of the pages from it. It reads
//! once a second while a page is open, and every few seconds otherwise.

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

/// The first reading. A failure now is for the caller to fix, and ends the program.
pub async fn first(args: &ConnectArgs) -> Result<(MonitorSession, View), Failure> {
    let session = MonitorSession::open(args, &SessionPurpose::Watch).await?;
    let snapshot = MonitorSnapshot::read(&session, &mut SlowParts::default()).await?;
    Ok((session, view(Some(snapshot), None, SystemTime::now())))
}

fn view(snapshot: Option<MonitorSnapshot>, lost: Option<Lost>, read_at: SystemTime) -> View {
    View {
        live: live_parts(snapshot.as_ref(), lost.as_ref()),
        snapshot,
        lost,
        read_at,
    }
}

/// Reads forever.
pub async fn run(app: Arc<App>, session: MonitorSession, views: watch::Sender<Arc<View>>) {
    let mut session = Some(session);
    let mut slow = SlowParts::default();
    loop {
        let started = Instant::now();
        let read = timeout(PATIENCE, read(&app, &mut session, &mut slow)).await;
        let read = read.unwrap_or_else(|_| {
            session.take().map(|session| tokio::spawn(session.cancel()));
            Err(no_answer())
        });
        let before = views.borrow().clone();
        let view = match read {
            Ok(snapshot) => view(Some(snapshot), None, SystemTime::now()),
            Err(failure) => {
                let since = before.lost.as_ref().map_or_else(SystemTime::now, |lost| lost.since);
                let message = failure.to_string().replace('\n', " ");
                view(before.snapshot.clone(), Some(Lost { since, message }), before.read_at)
            }
        };
        views.send_replace(Arc::new(view));
        wait(&app, started).await;
    }
}

async fn read(
    app: &App,
    session: &mut Option<MonitorSession>,
    slow: &mut SlowParts,
) -> Result<MonitorSnapshot, Failure> {
    if session.as_ref().is_none_or(MonitorSession::is_closed) {
        *slow = SlowParts::default();
        *session = Some(MonitorSession::open(&app.pool.args, &SessionPurpose::Watch).await?);
    }
    let read = MonitorSnapshot::read(session.as_ref().expect("opened above"), slow).await;
    if read
        .as_ref()
        .is_err_and(|failure| !failure.is(&SqlState::QUERY_CANCELED))
    {
        *session = None; // also if only a view changed: a new session prepares again
    }
    read
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
