//! The one session that reads the database for all viewers, and makes the live parts of the pages from it. It reads
//! once a second while a page is open, and every few seconds otherwise.

use super::app::{App, View};
use super::session::{PATIENCE, Purpose, Session, Trouble, TroubleKind};
use super::snapshot::{Lost, Slow, Snapshot};
use crate::connect::ConnectArgs;
use crate::failure::{Code, Failure};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

const WATCHED: Duration = Duration::from_secs(1);
const UNWATCHED: Duration = Duration::from_secs(5);
/// With a thousand partitions one reading takes a good part of a second. The poller then reads less often, and uses at
/// most a tenth of a processor of the server.
const REST_PER_REFRESH: u32 = 9;

/// The first reading. A failure now is for the caller to fix, and ends the program.
pub async fn first(args: &ConnectArgs) -> Result<(Session, View), Failure> {
    let session = Session::open(args, &Purpose::Watch).await?;
    let snapshot = Snapshot::read(&session, &mut Slow::default())
        .await
        .map_err(|trouble| trouble.failure)?;
    Ok((session, View::new(Some(snapshot), None, SystemTime::now())))
}

/// Reads forever.
pub async fn run(app: Arc<App>, session: Session, views: watch::Sender<Arc<View>>) {
    let mut session = Some(session);
    let mut slow = Slow::default();
    loop {
        let started = Instant::now();
        let read = timeout(PATIENCE, read(&app, &mut session, &mut slow)).await;
        let read = read.unwrap_or_else(|_| {
            if let Some(session) = session.take() {
                tokio::spawn(session.cancel());
            }
            Err(Failure::new(Code::CannotConnect, "the database does not answer").into())
        });
        let before = views.borrow().clone();
        let view = match read {
            Ok(snapshot) => View::new(Some(snapshot), None, SystemTime::now()),
            Err(trouble) => {
                let since = before.lost.as_ref().map_or_else(SystemTime::now, |lost| lost.since);
                let message = trouble.failure.to_string().replace('\n', " ");
                View::new(before.snapshot.clone(), Some(Lost { since, message }), before.read_at)
            }
        };
        views.send_replace(Arc::new(view));
        wait(&app, started).await;
    }
}

async fn read(app: &App, session: &mut Option<Session>, slow: &mut Slow) -> Result<Snapshot, Trouble> {
    if session.as_ref().is_none_or(Session::is_closed) {
        *slow = Slow::default();
        *session = Some(Session::open(app.pool.args(), &Purpose::Watch).await?);
    }
    let open = session.as_ref().expect("opened above");
    let read = Snapshot::read(open, slow).await;
    if read
        .as_ref()
        .is_err_and(|trouble| trouble.kind != TroubleKind::TimedOut)
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
    if app.is_watched() {
        return;
    }
    tokio::select! {
        () = sleep(rest(UNWATCHED) - rest(WATCHED)) => (),
        () = app.asked.notified() => (),
    }
}
