//! The session of the board with the database. It reads all values at each interval, carries out actions, and connects
//! again when the session is lost. Each part is read by a separate statement, so that one that fails leaves the others.

use super::state::{Notice, OpenedMessage};
use super::update::{BoardEvent, BoardRequest};
use crate::connect::{ConnectArgs, Session, connect_session};
use crate::failure::{Code, Failure};
use crate::operation::{OperatorAction, run};
use crate::queries::detail::{self, Fact, MessageDetail};
use crate::queries::model::Snapshot;
use crate::queries::why::Reason;
use crate::queries::{Fetch, IN_ORDER, Parameters, snapshot};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::error::SqlState;

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

/// The address of the database, and the session with it while there is one.
pub struct BoardReader {
    connect: ConnectArgs,
    program: &'static str,
    may_act: bool,
    session: Option<ReaderSession>,
}

struct ReaderSession {
    session: Session,
    /// Statements that the server refused, with the error: each further try would be a line in its log.
    refused: Mutex<HashMap<String, (Instant, Failure)>>,
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
        let read = answered(snapshot::read(self.session().await?)).await;
        if read.is_err() {
            self.session = None;
        }
        read
    }

    async fn open_message(&mut self, seq: i64, destination: String) -> OpenedMessage {
        let facts = match self.session().await {
            Ok(session) => answered(session.read_message(seq, &destination)).await,
            Err(failure) => Err(failure),
        };
        OpenedMessage {
            seq,
            destination,
            facts: facts.map_err(|failure| failure.message),
        }
    }

    async fn remedy(&mut self, seq: i64, destination: &str) -> Result<Option<Reason>, Failure> {
        let messages = answered(detail::read(self.session().await?, seq, Some(destination))).await?;
        Ok(messages.into_iter().find_map(MessageDetail::into_remedy))
    }

    async fn act(&mut self, action: &OperatorAction) -> Notice {
        let done = match self.session().await {
            Ok(session) => timeout(ANSWER_TIMEOUT, run(&session.session, &action.call(None)))
                .await
                .unwrap_or_else(|_| {
                    let unknown = "The server did not answer; check whether the action was carried out.";
                    Err(Failure::new(Code::CannotConnect, unknown))
                }),
            Err(failure) => Err(failure),
        };
        match done {
            Ok(n) => Notice::new(action.outcome(n > 0), n == 0),
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
                    Some(BoardRequest::Remedy { seq, destination }) => {
                        let remedy = self.remedy(seq, &destination).await;
                        BoardEvent::Remedy(remedy.map_err(|failure| failure.message))
                    }
                    Some(BoardRequest::Act(action)) => {
                        let done = self.act(&action).await;
                        due = Instant::now(); // to see what it did
                        BoardEvent::Done(done)
                    }
                    Some(BoardRequest::End | BoardRequest::Hold(_) | BoardRequest::Copy(_)) => continue,
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
        let read_only = if may_act { "off" } else { "on" };
        session
            .client
            .batch_execute(&format!(
                "set application_name = '{program}'; set statement_timeout = '5s'; set lock_timeout = '2s';
                 set default_transaction_read_only = {read_only}; {IN_ORDER}"
            ))
            .await?;
        let refused = Mutex::default();
        Ok(Self { session, refused })
    }

    async fn read_message(&self, seq: i64, destination: &str) -> Result<Vec<Fact>, Failure> {
        let messages = detail::read(self, seq, Some(destination)).await?;
        let mut facts: Vec<Fact> = messages.iter().flat_map(|message| message.facts()).collect();
        let event = detail::event_facts(self, seq, SHOWN_MAX).await;
        facts.extend(event.unwrap_or_else(|why| vec![("event".into(), format!("not readable: {why}"))]));
        Ok(facts)
    }
}

impl Fetch for ReaderSession {
    async fn fetch<T: DeserializeOwned + Send>(
        &self,
        sql: &str,
        parameters: &Parameters<'_>,
    ) -> Result<Vec<T>, Failure> {
        let refused = || self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let known = refused().get(sql).cloned().filter(|(until, _)| Instant::now() < *until);
        if let Some((_, failure)) = known {
            return Err(failure);
        }
        let read = self.session.query(sql, parameters).await;
        read.map_err(|failure| {
            let is_lasting = LASTING.iter().any(|state| failure.is(state));
            // The missing right, and the statement that grants it.
            let hint = failure.hint.filter(|_| is_lasting);
            let why = failure.message + &hint.map_or(String::new(), |hint| format!(": {hint}"));
            let failure = Failure::new(failure.code, why);
            if is_lasting {
                refused().insert(sql.to_owned(), (Instant::now() + RETRY_AFTER, failure.clone()));
            }
            failure
        })
    }
}
