//! The session with the database: one task reads all values at each interval, carries out actions, and connects again
//! when the session is lost. Each part is read by a separate statement, so that one that fails leaves the others.

use super::state::{Action, Letter, Notice};
use super::update::{Event, Request};
use crate::connect::{ConnectArgs, connect_session};
use crate::failure::{Code, Failure};
use crate::queries::message::{ATTEMPTS, DEAD, EVENT, MessageRow, ONE_MESSAGE, OUTBOX, StoredEvent, Table, WAITING};
use crate::queries::model::{Check, ErrorGroup, Part, Problem, Snapshot};
use crate::queries::{Fetch, IN_ORDER, Parameters, as_json, qualified, views, why};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

/// Longer than the time limit of the statements: a server that does not even report that is lost.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const BACKOFF_FIRST: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// The most characters of an event that are shown.
const SHOWN_MAX: i32 = 16_000;

/// Messages that do not move, worst first: dead letters, scheduled and retried ones, those behind another of their key,
/// and the first of each lane. Each kind is found by an index and limited.
static MESSAGES: LazyLock<String> = LazyLock::new(|| {
    let rows = |table: &Table, due_s: &str, note: &str, from: &str| {
        format!(
            "select {} as status, t.seq, t.destination, outbox_partition_label(t.partition::integer) as partition, t.key, t.attempts,
                    extract(epoch from clock_timestamp() - t.enqueued_at)::float8 as age_s, {due_s} as due_s, {note} as note
             from {from}",
            table.status
        )
    };
    let due_s = "extract(epoch from t.due_at - clock_timestamp())::float8";
    let parts = [
        rows(
            &DEAD,
            "null::float8",
            DEAD.last_error,
            "outbox_dead t order by t.died_at desc limit 50",
        ),
        rows(
            &WAITING,
            due_s,
            WAITING.last_error,
            "outbox_waiting t where t.due_at is not null order by t.due_at limit 50",
        ),
        rows(
            &WAITING,
            "null",
            "'behind an earlier message of its key'",
            "outbox_waiting t where t.state = 'g' order by t.destination, t.partition, t.key collate \"C\", t.seq limit 50",
        ),
        rows(
            &OUTBOX,
            "null",
            OUTBOX.last_error,
            "(select * from outbox_internal.first_shown limit 50) l
             join outbox t on t.destination = l.destination and t.partition = l.partition and t.seq = l.seq",
        ),
    ];
    format!("({})", parts.join(")\nunion all\n("))
});

/// The address of the database, and the session with it while there is one.
pub struct Session {
    connect: ConnectArgs,
    may_act: bool,
    link: Option<Link>,
}

struct Link {
    client: Client,
    schema: String,
    /// Statements that the server refused, with the error: each further try would be a line in its log.
    refused: Mutex<HashMap<&'static str, (Instant, String)>>,
}

/// A refused statement is tried again after this time: a right may have been granted.
const RETRY_AFTER: Duration = Duration::from_secs(60);

impl Session {
    /// Without `may_act` the server itself refuses every write of this session.
    pub async fn open(connect: &ConnectArgs, may_act: bool) -> Result<Self, Failure> {
        let link = Link::open(connect, may_act).await?;
        Ok(Self {
            connect: connect.clone(),
            may_act,
            link: Some(link),
        })
    }

    async fn link(&mut self) -> Result<&Link, Failure> {
        if self.link.is_none() {
            self.link = Some(Link::open(&self.connect, self.may_act).await?);
        }
        self.link.as_ref().ok_or_else(unanswered)
    }

    /// All values. An error means that there is no session any more.
    pub async fn read(&mut self) -> Result<Snapshot, Failure> {
        let link = self.link().await?;
        let read = timeout(ANSWER_TIMEOUT, link.snapshot()).await;
        let read = read.map_err(|_| unanswered()).and_then(|read| read);
        if read.is_err() {
            self.link = None;
        }
        read
    }

    async fn letter(&mut self, seq: i64, destination: String) -> Letter {
        let read = match self.link().await {
            Ok(link) => timeout(ANSWER_TIMEOUT, link.letter(seq, &destination)).await,
            Err(failure) => Ok(Err(failure.message)),
        };
        read.unwrap_or_else(|_| Err(unanswered().message))
            .unwrap_or_else(|why| Letter {
                seq,
                destination,
                event: Err(why.clone()),
                attempts: Err(why.clone()),
                reasons: Err(why),
            })
    }

    async fn act(&mut self, action: &Action) -> Notice {
        let done = match self.link().await {
            Ok(link) => match timeout(ANSWER_TIMEOUT, link.act(action)).await {
                Ok(done) => done,
                // It may still be carried out, or not.
                Err(_) => Err(Failure::new(
                    Code::CannotConnect,
                    "The server did not answer; check whether the action was carried out.",
                )),
            },
            Err(failure) => Err(failure),
        };
        match done {
            Ok(was_done) => said(action, was_done),
            Err(failure) => Notice {
                text: failure.to_string(),
                is_bad: true,
            },
        }
    }
}

fn unanswered() -> Failure {
    let seconds = ANSWER_TIMEOUT.as_secs();
    Failure::new(
        Code::CannotConnect,
        format!("the server has not answered for {seconds} s"),
    )
}

/// The meaning of a function's result.
fn said(action: &Action, was_done: bool) -> Notice {
    let text = match (action, was_done) {
        (Action::Retry { seq, .. }, true) => format!("Message {seq} is delivered again."),
        (Action::Retry { seq, .. }, false) => {
            format!("Message {seq} no longer exists, or waits behind another of its key.")
        }
        (Action::Discard { seq, .. }, true) => format!("Message {seq} is discarded."),
        (Action::Discard { seq, .. }, false) => format!("Message {seq} no longer exists."),
        (Action::Pause { destination }, true) => format!("Delivery to {destination} is paused."),
        (Action::Pause { destination }, false) => format!("Delivery to {destination} was paused already."),
        (Action::Resume { destination }, true) => format!("Delivery to {destination} is resumed."),
        (Action::Resume { destination }, false) => format!("Delivery to {destination} was not paused."),
    };
    Notice {
        text,
        is_bad: !was_done,
    }
}

/// Reads at each interval until the receiver is dropped, and carries out actions in between.
pub async fn watch(mut session: Session, first: Duration, mut requests: Receiver<Request>, events: Sender<Event>) {
    let mut interval = first;
    let mut backoff = BACKOFF_FIRST;
    let mut due = Instant::now() + interval;
    loop {
        tokio::select! {
            () = sleep_until(due) => {
                let began = Instant::now();
                let event = match session.read().await {
                    Ok(snapshot) => {
                        backoff = BACKOFF_FIRST;
                        // A server that is slower than the interval is left alone for as long as it took.
                        due = (began + interval).max(Instant::now() + began.elapsed().min(interval));
                        Event::Snapshot(Box::new(snapshot))
                    }
                    Err(failure) => {
                        let next_try = backoff;
                        due = Instant::now() + next_try;
                        backoff = (backoff * 2).min(BACKOFF_MAX);
                        Event::Lost { why: failure.message, next_try }
                    }
                };
                if events.send(event).await.is_err() {
                    return;
                }
            }
            request = requests.recv() => {
                let answer = match request {
                    None => return,
                    Some(Request::Interval(other)) => {
                        interval = other;
                        due = due.min(Instant::now() + interval);
                        continue;
                    }
                    Some(Request::Letter { seq, destination }) => {
                        Event::Letter(Box::new(session.letter(seq, destination).await))
                    }
                    Some(Request::Act(action)) => {
                        let done = session.act(&action).await;
                        due = Instant::now(); // to see what it did
                        Event::Done(done)
                    }
                };
                if events.send(answer).await.is_err() {
                    return;
                }
            }
        }
    }
}

impl Link {
    async fn open(args: &ConnectArgs, may_act: bool) -> Result<Self, Failure> {
        let session = timeout(CONNECT_TIMEOUT, connect_session(args)).await;
        let session = session.map_err(|_| unanswered()).and_then(|session| session)?;
        let client = session.client;
        let read_only = if may_act { "off" } else { "on" };
        client
            .batch_execute(&format!(
                "set application_name = 'outboxctl top'; set statement_timeout = '5s'; set lock_timeout = '2s';
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
            self.fetch(views::ERRORS, &[]),
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
            errors: errors.map(ErrorGroup::merged),
            messages,
            problems: checks.map(|checks| Problem::of(&checks)),
        })
    }

    /// Empty if the message is gone.
    async fn letter(&self, seq: i64, destination: &str) -> Part<Letter> {
        let rows: Part<Vec<MessageRow>> = self.fetch(&ONE_MESSAGE, &[&seq, &destination]).await;
        let reasons = match rows {
            Ok(rows) => match rows.first() {
                Some(row) => why::of(self, row).await,
                None => Ok(Vec::new()),
            },
            Err(why) => Err(why),
        };
        let events: Part<Vec<StoredEvent>> = self.fetch(&EVENT, &[&seq, &SHOWN_MAX]).await;
        Ok(Letter {
            seq,
            destination: destination.to_owned(),
            event: events.map(|events| events.into_iter().next()),
            attempts: self.fetch(ATTEMPTS, &[&seq, &destination]).await,
            reasons,
        })
    }

    async fn act(&self, action: &Action) -> Result<bool, Failure> {
        let (function, seq, destination) = match action {
            Action::Retry { seq, destination } => {
                ("outbox_retry($1::bigint, $2::text, null::text)", Some(seq), destination)
            }
            Action::Discard { seq, destination } => (
                "outbox_discard($1::bigint, $2::text, null::text)",
                Some(seq),
                destination,
            ),
            Action::Pause { destination } => ("outbox_pause($1::text, null::text)", None, destination),
            Action::Resume { destination } => ("outbox_resume($1::text, null::text)", None, destination),
        };
        let mut arguments: Vec<(&(dyn ToSql + Sync), Type)> = Vec::new();
        if let Some(seq) = seq {
            arguments.push((seq, Type::INT8));
        }
        arguments.push((destination, Type::TEXT));
        let sql = qualified(&format!("select {function}"), &self.schema);
        let row = self.client.query_typed_one(&sql, &arguments).await?;
        Ok(row.try_get::<_, Option<bool>>(0)?.unwrap_or(false))
    }
}

impl Fetch for Link {
    type Error = String;

    async fn fetch<T: DeserializeOwned + Send>(&self, sql: &'static str, parameters: &Parameters<'_>) -> Part<Vec<T>> {
        let refused = || self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((until, why)) = refused().get(sql)
            && Instant::now() < *until
        {
            return Err(why.clone());
        }
        let text = qualified(&as_json(sql), &self.schema);
        // Without parameters it need not be prepared, which would take a round trip.
        let rows = match parameters {
            [] => self.client.query_typed(&text, &[]).await,
            parameters => self.client.query(&text, parameters).await,
        };
        let rows = rows.and_then(|rows| rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<Value>, _>>());
        let rows = rows.map_err(|error| {
            let is_lasting = [
                SqlState::INSUFFICIENT_PRIVILEGE,
                SqlState::UNDEFINED_TABLE,
                SqlState::UNDEFINED_COLUMN,
            ]
            .iter()
            .any(|state| error.code() == Some(state));
            let failure = Failure::from(error);
            // The missing right, and the statement that grants it.
            let why = [Some(failure.message), failure.hint.filter(|_| is_lasting)]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(": ");
            if is_lasting {
                refused().insert(sql, (Instant::now() + RETRY_AFTER, why.clone()));
            }
            why
        })?;
        let read = rows.into_iter().map(serde_json::from_value).collect::<Result<_, _>>();
        read.map_err(|error| Failure::from(error).message)
    }
}
