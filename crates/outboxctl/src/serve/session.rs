//! Sessions with the database, each for one purpose that the server enforces. Sessions that read are read-only and run
//! as the least role that the login may take, with short statements. `Pool` bounds those of all viewers together.

use crate::connect::{ConnectArgs, Stop, connect_session};
use crate::failure::{Code, Failure};
use crate::messages::page::FetchOnce;
use crate::messages::sql::Sql;
use crate::queries::{Fetch, IN_ORDER, Parameters, as_json, qualified};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{Json, ToSql};
use tokio_postgres::{Client, Statement};

/// The most sessions of all viewers together: for pages, counts and actions, in use and idle.
const SESSIONS_MAX: usize = 4;
/// A request waits this long for one of them.
pub const WAIT_MAX: Duration = Duration::from_secs(5);
/// A server that has not answered by then counts as lost: a cut network gives no error.
pub const PATIENCE: Duration = Duration::from_secs(15);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The one poller: states, no payloads.
    Watch,
    /// Queries of a viewer: payloads too, if the login may read them.
    Read,
    /// An action of a viewer; the audit names the viewer.
    Act { who: String },
}

impl Purpose {
    /// The time limit of a statement.
    fn statement_max(&self) -> Duration {
        Duration::from_secs(match self {
            Self::Watch => 5,
            Self::Read => 4,
            Self::Act { .. } => 60,
        })
    }
}

/// Why there is no answer of the database.
#[derive(Debug)]
pub struct Trouble {
    pub failure: Failure,
    pub kind: TroubleKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TroubleKind {
    /// All sessions are in use.
    Busy,
    /// The time limit of the statement, or of the request.
    TimedOut,
    Failed,
}

impl Trouble {
    pub fn busy() -> Self {
        let failure = Failure::new(Code::Refused, "too many requests are being answered");
        Self {
            failure: failure.hint("Try again in a few seconds."),
            kind: TroubleKind::Busy,
        }
    }
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            kind: TroubleKind::Failed,
        }
    }
}

impl From<tokio_postgres::Error> for Trouble {
    fn from(error: tokio_postgres::Error) -> Self {
        Self {
            kind: match error.code() {
                Some(&SqlState::QUERY_CANCELED) => TroubleKind::TimedOut,
                _ => TroubleKind::Failed,
            },
            failure: Failure::from(error),
        }
    }
}

impl From<serde_json::Error> for Trouble {
    fn from(error: serde_json::Error) -> Self {
        Failure::from(error).into()
    }
}

pub struct Session {
    client: Client,
    stop: Stop,
    schema: String,
    /// Prepared once; the poller runs the same one every second.
    statements: Mutex<HashMap<&'static str, Statement>>,
    /// Whether it may read events, and so payloads.
    pub reads_events: bool,
}

impl Session {
    /// Opens a session and limits it to its purpose.
    pub async fn open(args: &ConnectArgs, purpose: &Purpose) -> Result<Self, Failure> {
        let session = connect_session(args).await?;
        let stop = session.stop();
        let schema = session.extension.as_ref().map(|extension| extension.schema.clone());
        let schema = schema.unwrap_or_default();
        let client = session.client;
        let (read_only, application) = match purpose {
            Purpose::Watch | Purpose::Read => ("on", "outboxctl serve".to_owned()),
            Purpose::Act { who } => ("off", format!("outboxctl serve{who}")),
        };
        let timeout_ms = purpose.statement_max().as_millis();
        // As the functions of the extension do: there are indexes for these queries, and statistics may be out of date.
        let by_index = "set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off";
        let plans = match purpose {
            Purpose::Watch => format!("; {IN_ORDER}; {by_index}; set enable_bitmapscan = off"),
            Purpose::Read => format!("; {IN_ORDER}; {by_index}"),
            Purpose::Act { .. } => String::new(),
        };
        client
            .execute("select set_config('application_name', $1, false)", &[&application])
            .await?;
        client
            .batch_execute(&format!(
                "set statement_timeout = '{timeout_ms}ms'; set lock_timeout = '1s';
                 set idle_in_transaction_session_timeout = '10s'; set timezone = 'UTC'; set jit = off;
                 set default_transaction_read_only = {read_only}{plans}"
            ))
            .await?;
        let roles: &[&str] = match purpose {
            Purpose::Watch => &["outbox_monitor", "outbox_admin"],
            Purpose::Read => &["outbox_admin", "outbox_monitor"],
            Purpose::Act { .. } => &["outbox_admin"],
        };
        let role: Option<String> = client
            .query_one(
                "select (select quote_ident(r.rolname) from unnest($1::text[]) with ordinality w (name, n)
                         join pg_roles r on r.rolname = w.name where pg_has_role(session_user, r.oid, 'member')
                         order by w.n limit 1)",
                &[&roles],
            )
            .await?
            .get(0);
        match role {
            Some(role) => client.batch_execute(&format!("set role {role}")).await?,
            None => {
                let login: String = client.query_one("select session_user::text", &[]).await?.get(0);
                let refused = format!(
                    "role {login} may not {}",
                    if read_only == "on" { "look" } else { "act" }
                );
                return Err(Failure::new(Code::Refused, refused).hint(format!(
                    "GRANT {} TO {login}",
                    roles.first().unwrap_or(&"outbox_monitor")
                )));
            }
        }
        let row = client
            .query_one(
                &qualified("select has_table_privilege('outbox_events', 'select')", &schema),
                &[],
            )
            .await?;
        Ok(Self {
            client,
            stop,
            schema,
            statements: Mutex::default(),
            reads_events: row.get(0),
        })
    }

    async fn prepared(&self, sql: &'static str) -> Result<Statement, Trouble> {
        let known = self
            .statements
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(sql)
            .cloned();
        if let Some(statement) = known {
            return Ok(statement);
        }
        let made = self.client.prepare(&qualified(&as_json(sql), &self.schema)).await?;
        let mut statements = self.statements.lock().unwrap_or_else(PoisonError::into_inner);
        statements.insert(sql, made.clone());
        Ok(made)
    }

    pub async fn execute(&self, sql: &str) -> Result<(), Trouble> {
        Ok(self.client.batch_execute(sql).await?)
    }

    pub fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Cancels what the session still runs, and ends it. It is not used again: the server may handle the cancel late,
    /// during the next statement.
    pub async fn cancel(self) {
        let ended = async {
            self.stop.now().await;
            self.client.batch_execute("").await // answered behind the statement
        };
        if timeout(PATIENCE, ended).await.is_err() {
            self.stop.cut();
        }
    }
}

impl Fetch for Session {
    type Error = Trouble;

    async fn fetch<T: DeserializeOwned + Send>(
        &self,
        sql: &'static str,
        parameters: &Parameters<'_>,
    ) -> Result<Vec<T>, Trouble> {
        let statement = self.prepared(sql).await?;
        read(self.client.query(&statement, parameters).await?)
    }
}

impl FetchOnce for Session {
    type Error = Trouble;

    async fn fetch_once<T: DeserializeOwned + Send>(&self, sql: &Sql) -> Result<Vec<T>, Trouble> {
        let (text, values) = sql.to_run();
        let values: Vec<&(dyn ToSql + Sync)> = values.iter().map(|value| value as _).collect();
        read(
            self.client
                .query(&qualified(&as_json(&text), &self.schema), &values)
                .await?,
        )
    }

    fn timed_out(error: &Trouble) -> bool {
        error.kind == TroubleKind::TimedOut
    }
}

fn read<T: DeserializeOwned>(rows: Vec<tokio_postgres::Row>) -> Result<Vec<T>, Trouble> {
    let rows = rows.iter().map(|row| {
        let Json(value): Json<serde_json::Value> = row.try_get(0)?;
        Ok(serde_json::from_value(value)?)
    });
    rows.collect()
}

/// The sessions of viewers, at most `SESSIONS_MAX`. Each is used by one request at a time.
pub struct Pool {
    args: ConnectArgs,
    /// Sessions that read.
    idle: Arc<Mutex<Vec<Session>>>,
    /// For each session in use. A request takes one before it takes or opens a session, so sessions in use and idle ones
    /// are never more than that.
    permits: Arc<Semaphore>,
}

impl Pool {
    pub fn new(args: ConnectArgs) -> Self {
        Self {
            args,
            idle: Arc::default(),
            permits: Arc::new(Semaphore::new(SESSIONS_MAX)),
        }
    }

    pub fn args(&self) -> &ConnectArgs {
        &self.args
    }

    /// Runs a query in one of the sessions that read.
    pub async fn read<T>(&self, question: impl AsyncFnOnce(&Session) -> Result<T, Trouble>) -> Result<T, Trouble> {
        self.run(Purpose::Read, question).await
    }

    /// Runs an action in a separate session, or the count before it.
    pub async fn act<T>(
        &self,
        who: String,
        action: impl AsyncFnOnce(&Session) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        self.run(Purpose::Act { who }, action).await
    }

    async fn run<T>(
        &self,
        purpose: Purpose,
        question: impl AsyncFnOnce(&Session) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        let limit = purpose.statement_max() + PATIENCE;
        let mut lease = self.lease(purpose).await?;
        lease.is_running = true;
        let answer = timeout(limit, question(lease.session())).await;
        lease.is_running = answer.is_err();
        answer.unwrap_or_else(|_| Err(no_answer()))
    }

    async fn lease(&self, purpose: Purpose) -> Result<Lease, Trouble> {
        let permit = timeout(WAIT_MAX, Arc::clone(&self.permits).acquire_owned()).await;
        let permit = permit.map_err(|_| Trouble::busy())?.expect("never closed");
        let kept = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.retain(|session| !session.is_closed());
            idle.pop()
        };
        let idle = (purpose == Purpose::Read).then(|| Arc::clone(&self.idle));
        let lease = move |session| Lease {
            held: Some((session, permit)),
            idle,
            is_running: false,
        };
        if let (Some(session), Purpose::Read) = (kept, &purpose) {
            return Ok(lease(session));
        }
        // A task: if the client leaves, the next request finds the session, and does not open another beside it.
        let args = self.args.clone();
        let opened = tokio::spawn(async move {
            let opened = timeout(PATIENCE, Session::open(&args, &purpose)).await;
            Ok(lease(opened.map_err(|_| no_answer())??))
        });
        opened.await.expect("a task that does not panic")
    }
}

fn no_answer() -> Trouble {
    Trouble {
        failure: Failure::new(Code::CannotConnect, "the database does not answer"),
        kind: TroubleKind::TimedOut,
    }
}

/// A session in use by a request, which is dropped with it. The permit lasts until the session is idle or ended.
struct Lease {
    /// None only while it is dropped.
    held: Option<(Session, OwnedSemaphorePermit)>,
    /// Where the session goes; None: it ends.
    idle: Option<Arc<Mutex<Vec<Session>>>>,
    is_running: bool,
}

impl Lease {
    fn session(&self) -> &Session {
        &self.held.as_ref().expect("until it is dropped").0
    }
}

impl Drop for Lease {
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
