//! Sessions with the database, each for one purpose that the server enforces. Sessions that read are read-only and run
//! as the least role that the login may take, with short statements. `Pool` keeps a few for queries of viewers.

use crate::connect::{ConnectArgs, connect_session};
use crate::failure::{Code, Failure};
use crate::messages::page::FetchOnce;
use crate::messages::sql::Sql;
use crate::queries::{Fetch, IN_ORDER, Parameters, as_json, qualified};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use tokio::sync::Semaphore;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{Json, ToSql};
use tokio_postgres::{Client, Statement};

/// The most queries of viewers at a time. More of them wait.
const READERS_MAX: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose<'a> {
    /// The one poller: states, no payloads.
    Watch,
    /// Queries of a viewer: payloads too, if the login may read them.
    Read,
    /// An action of a viewer; the audit names the viewer.
    Act { who: &'a str },
}

/// Why a statement failed, and whether it was the time limit.
#[derive(Debug)]
pub struct Trouble {
    pub failure: Failure,
    pub timed_out: bool,
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            timed_out: false,
        }
    }
}

impl From<tokio_postgres::Error> for Trouble {
    fn from(error: tokio_postgres::Error) -> Self {
        Self {
            timed_out: error.code() == Some(&SqlState::QUERY_CANCELED),
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
    schema: String,
    /// Prepared once; the poller runs the same one every second.
    statements: Mutex<HashMap<&'static str, Statement>>,
    /// Whether it may read events, and so payloads.
    pub reads_events: bool,
}

impl Session {
    /// Opens a session and limits it to its purpose.
    pub async fn open(args: &ConnectArgs, purpose: Purpose<'_>) -> Result<Self, Failure> {
        let session = connect_session(args).await?;
        let schema = session.extension.as_ref().map(|extension| extension.schema.clone());
        let schema = schema.unwrap_or_default();
        let client = session.client;
        let (timeout_ms, read_only, application) = match purpose {
            Purpose::Watch => (5000, "on", "outboxctl serve".to_owned()),
            Purpose::Read => (4000, "on", "outboxctl serve".to_owned()),
            Purpose::Act { who } => (60_000, "off", format!("outboxctl serve{who}")),
        };
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
        error.timed_out
    }
}

fn read<T: DeserializeOwned>(rows: Vec<tokio_postgres::Row>) -> Result<Vec<T>, Trouble> {
    let rows = rows.iter().map(|row| {
        let Json(value): Json<serde_json::Value> = row.try_get(0)?;
        Ok(serde_json::from_value(value)?)
    });
    rows.collect()
}

/// A few sessions for queries of viewers; each is used by one query at a time.
pub struct Pool {
    args: ConnectArgs,
    idle: Mutex<Vec<Session>>,
    permits: Semaphore,
}

impl Pool {
    pub fn new(args: ConnectArgs) -> Self {
        Self {
            args,
            idle: Mutex::default(),
            permits: Semaphore::new(READERS_MAX),
        }
    }

    pub fn args(&self) -> &ConnectArgs {
        &self.args
    }

    /// Runs a query in one of the sessions, opening one if none is idle.
    pub async fn read<T>(&self, question: impl AsyncFnOnce(&Session) -> Result<T, Trouble>) -> Result<T, Trouble> {
        let _permit = self.permits.acquire().await.expect("never closed");
        let idle = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.retain(|session| !session.is_closed());
            idle.pop()
        };
        let session = match idle {
            Some(session) => session,
            None => Session::open(&self.args, Purpose::Read).await?,
        };
        let answer = question(&session).await;
        if !session.is_closed() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        }
        answer
    }
}
