//! Sessions with the database, each for one purpose that the server enforces. Sessions that read are read-only and run
//! as the least role that the login may take, with short statements. `SessionPool` bounds those of all viewers
//! together.

use crate::connect::{self, ConnectArgs, connect_session};
use crate::failure::{Code, Failure};
use crate::queries::{Fetch, IN_ORDER, Parameters, as_json};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_postgres::Statement;
use tokio_postgres::error::SqlState;

/// The most sessions of all viewers together: for pages, counts and actions, in use and idle.
const SESSIONS_MAX: usize = 4;
/// A request waits this long for one of them.
pub const WAIT_MAX: Duration = Duration::from_secs(5);
/// A server that has not answered by then counts as lost: a cut network gives no error.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// What sessions with the database are named; behind it stands the user of an action.
const APPLICATION: &str = "outboxctl serve";
/// A longer name of a user would be truncated there: Postgres keeps 63 bytes.
pub const USER_MAX_BYTES: usize = 63 - APPLICATION.len() - ": ".len();

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionPurpose {
    /// The one poller: states, no payloads.
    Watch,
    /// Queries of a viewer: payloads too, if the login may read them.
    Read,
    /// An action of a viewer; the audit names the viewer.
    Act { who: String },
}

impl SessionPurpose {
    fn statement_max(&self) -> Duration {
        Duration::from_secs(match self {
            Self::Watch => 5,
            Self::Read => 4,
            Self::Act { .. } => 60,
        })
    }
}

/// All sessions are in use.
pub fn busy() -> Failure {
    let failure = Failure::new(Code::Refused, "too many requests are being answered");
    failure
        .hint("Try again in a few seconds.")
        .sqlstate(SqlState::TOO_MANY_CONNECTIONS)
}

/// The time limit of the request is over.
pub fn no_answer() -> Failure {
    Failure::new(Code::CannotConnect, "the database does not answer").sqlstate(SqlState::QUERY_CANCELED)
}

pub struct MonitorSession {
    session: connect::Session,
    /// Prepared once; the poller runs the same ones every second.
    statements: Mutex<HashMap<String, Statement>>,
    /// Whether it may read events, and so payloads.
    pub reads_events: bool,
}

impl MonitorSession {
    /// Opens a session and limits it to its purpose.
    pub async fn open(args: &ConnectArgs, purpose: &SessionPurpose) -> Result<Self, Failure> {
        let session = connect_session(args).await?;
        // As the functions of the extension do: there are indexes for these queries, and statistics may be out of date.
        let by_index =
            format!("{IN_ORDER}; set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off");
        let (who, read_only, roles, plans) = match purpose {
            SessionPurpose::Watch => {
                let roles = &["outbox_monitor", "outbox_admin"][..];
                ("", "on", roles, by_index + "; set enable_bitmapscan = off")
            }
            SessionPurpose::Read => ("", "on", &["outbox_admin", "outbox_monitor"][..], by_index),
            SessionPurpose::Act { who } => (who.as_str(), "off", &["outbox_admin"][..], String::new()),
        };
        let name = "select set_config('application_name', $1, false)";
        session.client.execute(name, &[&format!("{APPLICATION}{who}")]).await?;
        let limits = format!(
            "set statement_timeout = '{}s'; set lock_timeout = '1s'; set idle_in_transaction_session_timeout = '10s';
             set timezone = 'UTC'; set default_transaction_read_only = {read_only}; {plans}",
            purpose.statement_max().as_secs()
        );
        session.client.batch_execute(&limits).await?;
        let of_login = "
            select session_user::text as login,
                   (select quote_ident(r.rolname) from unnest($1::text[]) with ordinality w (name, n)
                    join pg_roles r on r.rolname = w.name where pg_has_role(session_user, r.oid, 'member')
                    order by w.n limit 1) as role";
        let row = session.client.query_one(of_login, &[&roles]).await?;
        let (login, role): (String, Option<String>) = (row.get("login"), row.get("role"));
        let Some(role) = role else {
            let what = if read_only == "on" { "look" } else { "act" };
            return Err(Failure::new(Code::Refused, format!("role {login} may not {what}"))
                .hint(format!("GRANT {} TO {login}", roles[0]))
                .sqlstate(SqlState::INSUFFICIENT_PRIVILEGE));
        };
        session.client.batch_execute(&format!("set role {role}")).await?;
        Ok(Self {
            reads_events: session.reads_events().await?,
            session,
            statements: Mutex::default(),
        })
    }

    async fn prepared(&self, sql: &str) -> Result<Statement, Failure> {
        let statements = || self.statements.lock().unwrap_or_else(PoisonError::into_inner);
        let known = statements().get(sql).cloned();
        if let Some(statement) = known {
            return Ok(statement);
        }
        let made = self
            .session
            .client
            .prepare(&self.session.qualified(&as_json(sql)))
            .await?;
        statements().insert(sql.to_owned(), made.clone());
        Ok(made)
    }

    pub async fn execute(&self, sql: &str) -> Result<(), Failure> {
        Ok(self.session.client.batch_execute(sql).await?)
    }

    pub fn is_closed(&self) -> bool {
        self.session.client.is_closed()
    }

    /// Cancels what the session still runs, and ends it. It is not used again: the server may handle the cancel late,
    /// during the next statement.
    pub async fn cancel(self) {
        let stop = self.session.stop();
        let ended = async {
            stop.now().await;
            self.execute("").await // answered behind the statement
        };
        if timeout(PATIENCE, ended).await.is_err() {
            stop.cut();
        }
    }
}

impl Fetch for MonitorSession {
    async fn fetch<T: DeserializeOwned + Send>(
        &self,
        sql: &str,
        parameters: &Parameters<'_>,
    ) -> Result<Vec<T>, Failure> {
        let statement = self.prepared(sql).await?;
        let rows = self.session.client.query(&statement, parameters).await?;
        rows.iter()
            .map(|row| Ok(serde_json::from_value(row.try_get(0)?)?))
            .collect()
    }
}

/// The sessions of viewers, at most `SESSIONS_MAX`. Each is used by one request at a time.
pub struct SessionPool {
    pub args: ConnectArgs,
    /// Sessions that read.
    idle: Arc<Mutex<Vec<MonitorSession>>>,
    /// For each session in use. A request takes one before it takes or opens a session, so sessions in use and idle
    /// ones are never more than that.
    permits: Arc<Semaphore>,
}

impl SessionPool {
    pub fn new(args: ConnectArgs) -> Self {
        Self {
            args,
            idle: Arc::default(),
            permits: Arc::new(Semaphore::new(SESSIONS_MAX)),
        }
    }

    /// Runs queries in a session for this purpose: an idle one that reads, or one that ends with the request.
    pub async fn run<T>(
        &self,
        purpose: SessionPurpose,
        question: impl AsyncFnOnce(&MonitorSession) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let limit = purpose.statement_max() + PATIENCE;
        let mut lease = self.lease(purpose).await?;
        lease.is_running = true;
        let answer = timeout(limit, question(&lease.held.as_ref().expect("until it is dropped").0)).await;
        lease.is_running = answer.is_err();
        answer.unwrap_or_else(|_| Err(no_answer()))
    }

    pub async fn read<T>(
        &self,
        question: impl AsyncFnOnce(&MonitorSession) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.run(SessionPurpose::Read, question).await
    }

    async fn lease(&self, purpose: SessionPurpose) -> Result<PooledSession, Failure> {
        let permit = timeout(WAIT_MAX, Arc::clone(&self.permits).acquire_owned()).await;
        let permit = permit.map_err(|_| busy())?.expect("never closed");
        let kept = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.retain(|session| !session.is_closed());
            idle.pop()
        };
        let idle = (purpose == SessionPurpose::Read).then(|| Arc::clone(&self.idle));
        let lease = move |session| PooledSession {
            held: Some((session, permit)),
            idle,
            is_running: false,
        };
        if let (Some(session), SessionPurpose::Read) = (kept, &purpose) {
            return Ok(lease(session));
        }
        // A task: if the client leaves, the next request finds the session, and does not open another.
        let args = self.args.clone();
        let opened = tokio::spawn(async move {
            let opened = timeout(PATIENCE, MonitorSession::open(&args, &purpose)).await;
            Ok(lease(opened.map_err(|_| no_answer())??))
        });
        opened.await.expect("a task that does not panic")
    }
}

/// A session in use by a request, which is dropped with it. The permit lasts until the session is idle or ended.
struct PooledSession {
    /// None only while it is dropped.
    held: Option<(MonitorSession, OwnedSemaphorePermit)>,
    /// Where the session goes; None: it ends.
    idle: Option<Arc<Mutex<Vec<MonitorSession>>>>,
    is_running: bool,
}

impl Drop for PooledSession {
    fn drop(&mut self) {
        let Some((session, permit)) = self.held.take() else {
            return;
        };
        if self.is_running {
            tokio::spawn(async move {
                session.cancel().await;
                drop(permit);
            });
        } else if let Some(idle) = &self.idle {
            idle.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        }
    }
}
