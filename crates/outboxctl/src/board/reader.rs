//! The session of the board with the database. It reads all values at each interval, carries out actions, and connects
//! again when the session is lost. Each part is read by a separate statement, so that one that fails leaves the others.

use super::state::{Notice, OpenedMessage};
use super::update::{BoardEvent, BoardRequest};
use crate::connect::{ConnectArgs, connect_session};
use crate::failure::{Code, Failure};
use crate::operation::OperatorAction;
use crate::queries::message::{self, Fact, MessageTable};
use crate::queries::model::{Check, Part, Problem, Snapshot};
use crate::queries::{Fetch, IN_ORDER, Parameters, as_json, qualified, views};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

/// Longer than the time limit of the statements: a server that does not even report that is lost.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
const BACKOFF_FIRST: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// A refused statement is tried again after this time: a right may have been granted.
const RETRY_AFTER: Duration = Duration::from_secs(60);

const LASTING: [SqlState; 3] = [
    SqlState::INSUFFICIENT_PRIVILEGE,
    SqlState::UNDEFINED_TABLE,
    SqlState::UNDEFINED_COLUMN,
];

/// The most characters of an event that are shown.
const SHOWN_MAX: i32 = 16_000;

/// Messages that do not move, worst first: dead letters, scheduled and retried ones, those behind another of their key,
/// and the first of each lane. Each kind is found by an index and limited.
static MESSAGES: LazyLock<String> = LazyLock::new(|| {
    let columns = "t.seq, t.destination, t.partition, t.key, t.attempts, t.enqueued_at";
    let [waiting, outbox] = [MessageTable::Waiting, MessageTable::Outbox].map(|table| table.column("status"));
    format!(
        "select m.status, m.seq, m.destination, outbox_partition_label(m.partition::integer) as partition, m.key, m.attempts,
                extract(epoch from clock_timestamp() - m.enqueued_at)::float8 as age_s,
                extract(epoch from m.due_at - clock_timestamp())::float8 as due_s, m.note
         from ((select 'dead' as status, {columns}, null::timestamptz as due_at, t.reason as note
                from outbox_dead t order by t.died_at desc limit 50)
               union all
               (select {waiting}, {columns}, t.due_at, t.last_error
                from outbox_waiting t where t.due_at is not null order by t.due_at limit 50)
               union all
               (select {waiting}, {columns}, null, 'behind an earlier message of its key'
                from outbox_waiting t where t.state = 'g' order by t.destination, t.partition, t.key collate \"C\", t.seq limit 50)
               union all
               (select {outbox}, {columns}, null, t.last_error
                from (select * from outbox_internal.first_shown limit 50) l
                join outbox t on t.destination = l.destination and t.partition = l.partition and t.seq = l.seq)) m"
    )
});

/// The address of the database, and the session with it while there is one.
pub struct BoardReader {
    connect: ConnectArgs,
    program: &'static str,
    may_act: bool,
    session: Option<ReaderSession>,
}

struct ReaderSession {
    client: Client,
    schema: String,
    /// Statements that the server refused, with the error: each further try would be a line in its log.
    refused: Mutex<HashMap<&'static str, (Instant, String)>>,
}

impl BoardReader {
    /// Connects with the first reading. Without `may_act` the server itself refuses every write.
    pub fn new(connect: &ConnectArgs, program: &'static str, may_act: bool) -> Self {
        Self {
            connect: connect.clone(),
            program,
            may_act,
            session: None,
        }
    }

    async fn session(&mut self) -> Result<&ReaderSession, Failure> {
        let session = match self.session.take() {
            Some(session) => session,
            None => answered(ReaderSession::open(&self.connect, self.program, self.may_act)).await?,
        };
        Ok(self.session.insert(session))
    }

    /// All values. An error means that there is no session any more.
    pub async fn read(&mut self) -> Result<Snapshot, Failure> {
        let read = answered(self.session().await?.snapshot()).await;
        if read.is_err() {
            self.session = None;
        }
        read
    }

    async fn open_message(&mut self, seq: i64, destination: String) -> OpenedMessage {
        let read = match self.session().await {
            Ok(session) => answered(async { Ok(session.read_message(seq, &destination).await) }).await,
            Err(failure) => Err(failure),
        };
        let facts = read.unwrap_or_else(|failure| Err(failure.message));
        OpenedMessage {
            seq,
            destination,
            facts,
        }
    }

    async fn act(&mut self, action: &OperatorAction) -> Notice {
        let done = match self.session().await {
            Ok(session) => timeout(ANSWER_TIMEOUT, session.act(action)).await.unwrap_or_else(|_| {
                let unknown = "The server did not answer; check whether the action was carried out.";
                Err(Failure::new(Code::CannotConnect, unknown))
            }),
            Err(failure) => Err(failure),
        };
        match done {
            Ok(changed) => Notice::new(action.outcome(changed), !changed),
            Err(failure) => Notice::new(failure.to_string(), true),
        }
    }

    /// Reads at each interval, and carries out requests in between, until `emit` fails or no request can come.
    pub async fn watch(
        mut self,
        mut interval: Duration,
        mut requests: Receiver<BoardRequest>,
        mut emit: impl FnMut(BoardEvent) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut backoff = BACKOFF_FIRST;
        // What was read before is shown already.
        let mut due = Instant::now() + self.session.as_ref().map_or(Duration::ZERO, |_| interval);
        loop {
            let event = tokio::select! {
                () = sleep_until(due) => {
                    let began = Instant::now();
                    match self.read().await {
                        Ok(snapshot) => {
                            backoff = BACKOFF_FIRST;
                            // A server that is slower than the interval is left alone for as long as it took.
                            due = (began + interval).max(Instant::now() + began.elapsed().min(interval));
                            BoardEvent::Snapshot(Box::new(snapshot))
                        }
                        Err(failure) => {
                            let next_try = backoff;
                            due = Instant::now() + next_try;
                            backoff = (backoff * 2).min(BACKOFF_MAX);
                            BoardEvent::Lost(failure.message, next_try)
                        }
                    }
                }
                request = requests.recv() => match request {
                    None => return Ok(()),
                    Some(BoardRequest::Interval(other)) => {
                        interval = other;
                        due = due.min(Instant::now() + interval);
                        continue;
                    }
                    Some(BoardRequest::Open { seq, destination }) => {
                        BoardEvent::Opened(Box::new(self.open_message(seq, destination).await))
                    }
                    Some(BoardRequest::Act(action)) => {
                        let done = self.act(&action).await;
                        due = Instant::now(); // to see what it did
                        BoardEvent::Done(done)
                    }
                    Some(BoardRequest::End | BoardRequest::Hold(_)) => continue,
                },
            };
            emit(event)?;
        }
    }
}

/// The answer of the server, if it comes in time.
async fn answered<T>(answer: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    timeout(ANSWER_TIMEOUT, answer).await.unwrap_or_else(|_| {
        let seconds = ANSWER_TIMEOUT.as_secs();
        let why = format!("the server has not answered for {seconds} s");
        Err(Failure::new(Code::CannotConnect, why))
    })
}

impl ReaderSession {
    async fn open(args: &ConnectArgs, program: &str, may_act: bool) -> Result<Self, Failure> {
        let session = connect_session(args).await?;
        let client = session.client;
        let read_only = if may_act { "off" } else { "on" };
        client
            .batch_execute(&format!(
                "set application_name = '{program}'; set statement_timeout = '5s'; set lock_timeout = '2s';
                 set default_transaction_read_only = {read_only}; {IN_ORDER}"
            ))
            .await?;
        Ok(Self {
            client,
            schema: session.extension.map(|extension| extension.schema).unwrap_or_default(),
            refused: Mutex::default(),
        })
    }

    /// All statements are sent together, so that the round trip counts once.
    async fn snapshot(&self) -> Result<Snapshot, Failure> {
        let now = as_json(views::NOW);
        let (now, status, throughput, partitions, workers, passes, destinations, errors, messages, checks) = tokio::join!(
            self.client.query_typed_one(&now, &[]),
            self.fetch(views::STATUS, &[]),
            self.fetch(views::THROUGHPUT, &[]),
            self.fetch(views::PARTITIONS, &[]),
            self.fetch(views::WORKERS, &[]),
            self.fetch(views::PASSES, &[]),
            self.fetch(views::DESTINATIONS, &[]),
            self.fetch(&views::MERGED_ERRORS, &[]),
            self.fetch(&MESSAGES, &[]),
            self.fetch::<Check>(views::HEALTH, &[]),
        );
        Ok(Snapshot {
            now: serde_json::from_value(now?.try_get(0)?)?,
            status: status.and_then(|rows| rows.into_iter().next().ok_or_else(|| "no row".into())),
            throughput,
            partitions,
            workers,
            passes,
            destinations,
            errors,
            messages,
            problems: checks.map(|checks| Problem::of(&checks)),
        })
    }

    async fn read_message(&self, seq: i64, destination: &str) -> Part<Vec<Fact>> {
        let messages = message::read(self, seq, Some(destination)).await?;
        let mut facts: Vec<Fact> = messages.iter().flat_map(|message| message.facts()).collect();
        let event = message::event_facts(self, seq, SHOWN_MAX).await;
        facts.extend(event.unwrap_or_else(|why| vec![("event".into(), format!("not readable: {why}"))]));
        Ok(facts)
    }

    async fn act(&self, action: &OperatorAction) -> Result<bool, Failure> {
        let sql = qualified(&action.sql(), &self.schema);
        let arguments: [(&(dyn ToSql + Sync), Type); 2] =
            [(&action.destination, Type::TEXT), (&None::<&str>, Type::TEXT)];
        let row = self.client.query_typed_one(&sql, &arguments).await?;
        Ok(row.try_get::<_, Option<bool>>(0)?.unwrap_or(false))
    }
}

impl Fetch for ReaderSession {
    type Error = String;

    async fn fetch<T: DeserializeOwned + Send>(&self, sql: &'static str, parameters: &Parameters<'_>) -> Part<Vec<T>> {
        let refused = || self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let known = refused().get(sql).cloned().filter(|(until, _)| Instant::now() < *until);
        if let Some((_, why)) = known {
            return Err(why);
        }
        let text = qualified(&as_json(sql), &self.schema);
        // Without parameters it need not be prepared, which would take a round trip.
        let rows = match parameters {
            [] => self.client.query_typed(&text, &[]).await,
            parameters => self.client.query(&text, parameters).await,
        };
        let rows = rows.and_then(|rows| rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<Value>, _>>());
        let rows = rows.map_err(|error| {
            let is_lasting = error.code().is_some_and(|code| LASTING.contains(code));
            let Failure { message, hint, .. } = error.into();
            // The missing right, and the statement that grants it.
            let why = message
                + &hint
                    .filter(|_| is_lasting)
                    .map_or(String::new(), |hint| format!(": {hint}"));
            if is_lasting {
                refused().insert(sql, (Instant::now() + RETRY_AFTER, why.clone()));
            }
            why
        })?;
        let read = rows.into_iter().map(serde_json::from_value).collect::<Result<_, _>>();
        read.map_err(|error| Failure::from(error).message)
    }
}
