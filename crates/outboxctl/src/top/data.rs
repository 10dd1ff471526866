//! The session with the database: one task reads all figures at each interval, carries out what is asked, and connects again
//! when the session is lost. Each part is read by a statement of its own, so that one that fails leaves the others.

use super::state::{Action, Notice};
use super::update::{Event, Request};
use crate::connect::{ConnectArgs, connect};
use crate::failure::{Code, Failure};
use crate::screen::model::{
    Attempt, Destination, ErrorGroup, EventText, Letter, Message, Minute, Now, Part, Partition, Problem, Snapshot,
    Status, Ticks, Worker,
};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{Client, Row};

/// Longer than the statements may take by themselves: a server that does not even say so is lost.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const BACKOFF_FIRST: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

// Whatever the backlog, each of them reads a bounded number of rows.

const NOW: &str = "select extract(epoch from clock_timestamp())::float8, to_char(clock_timestamp(), 'HH24:MI:SS'),
  current_database()::text, current_user::text, pg_is_in_recovery()";

const STATUS: &str =
    "select pending::int8, in_flight::int8, dead::int8, extract(epoch from oldest_pending_age)::float8,
  published_total::int8, failed_total::int8, published_per_s::float8, failed_per_s::float8 from outbox_status";

const MINUTES: &str = "select to_char(minute, 'HH24:MI'), published::int8, retried::int8, failed::int8, p95_ms::float8
  from outbox_throughput order by minute";

const PARTITIONS: &str =
    "select p.partition_key, p.lease_owner, extract(epoch from p.lease_ttl)::float8, p.lease_epoch::int8,
    p.first_waiting_seq::int8, b.partition_key is not null
  from outbox_partition_status p left join (
    select distinct outbox_partition_label(d.partition) as partition_key
    from (select x.partition from outbox_dead x where x.blocks limit 10000) d) b on b.partition_key = p.partition_key
  order by length(p.partition_key), p.partition_key";

const WORKERS: &str = "select worker_id, pid, state, reason, detail, alive, extract(epoch from heartbeat_ttl)::float8,
    partitions::int8, extract(epoch from clock_timestamp() - started_at)::float8
  from outbox_worker_status order by length(worker_id), worker_id limit 1000";

// 120 of each worker are kept: fewer are all of the minute.
const TICKS: &str = "select worker_id, count(*)::int8,
    case when count(*) < 120 then 60 else greatest(extract(epoch from clock_timestamp() - min(at)), 0.001) end::float8,
    avg(duration_ms)::float8, sum(claimed)::int8, sum(published)::int8, sum(failed)::int8,
    (array_agg(backoff_ms order by at desc))[1]::float8, (array_agg(desired_count order by at desc))[1]::int8,
    sum(leased_count)::int8, sum(released_count)::int8
  from outbox_ticks where at > clock_timestamp() - interval '1 minute' group by 1";

const DESTINATIONS: &str =
    "select destination, described_by, state, extract(epoch from clock_timestamp() - since)::float8, reason, detail,
    extract(epoch from oldest_pending_age)::float8, pending::int8, max_pending::int8, in_flight::int8, published_total::int8,
    failed_total::int8, dead_total::int8, published_per_s::float8, p50_ms::float8, p95_ms::float8, p99_ms::float8
  from outbox_destination_status limit 1000";

const ERRORS: &str =
    "select destination, kind, message, count::int8, extract(epoch from clock_timestamp() - first_at)::float8,
    extract(epoch from clock_timestamp() - last_at)::float8, last_seq::int8
  from outbox_errors limit 100";

// What does not move, worst first: dead letters, what waits for a time, what is behind another of its key, and the first of each
// lane. Each is looked up by an index and cut, but for dead letters, of which 10,000 at most are looked at.
const MESSAGES: &str = "
  (select 'dead', d.seq::int8, d.destination::text, outbox_partition_label(d.partition), d.key, d.attempts,
     extract(epoch from clock_timestamp() - d.enqueued_at)::float8, null::float8, d.reason
   from (select * from outbox_dead limit 10000) d order by d.died_at desc limit 50)
  union all
  (select case when w.state = 'b' and w.attempts > 0 then 'retrying' when w.due_at > clock_timestamp() then 'scheduled' else 'pending' end,
     w.seq, w.destination, outbox_partition_label(w.partition), w.key, w.attempts,
     extract(epoch from clock_timestamp() - w.enqueued_at)::float8, extract(epoch from w.due_at - clock_timestamp())::float8, w.last_error
   from outbox_waiting w where w.due_at is not null order by w.due_at limit 50)
  union all
  (select 'pending', w.seq, w.destination, outbox_partition_label(w.partition), w.key, w.attempts,
     extract(epoch from clock_timestamp() - w.enqueued_at)::float8, null, 'behind an earlier message of its key'
   from outbox_waiting w where w.state = 'g' order by w.destination, w.partition, w.key, w.seq limit 50)
  union all
  (select case when outbox_claim_is_live(o.claim_token, o.partition, o.claim_until) then 'in flight'
               when o.attempts > 0 then 'retrying' else 'pending' end,
     o.seq, o.destination, outbox_partition_label(o.partition), o.key, o.attempts,
     extract(epoch from clock_timestamp() - o.enqueued_at)::float8, null, o.last_error
   from (select * from outbox_first_pending limit 50) f
   join outbox o on o.destination = f.destination and o.partition = f.partition and o.seq = f.seq)";

const PROBLEMS: &str = r#"select "check", coalesce(problem, ''), coalesce(remedy, '') from outbox_health where not ok"#;

const EVENT: &str = "select id::text, type, aggregate_type || coalesce(':' || aggregate_id, ''), operation,
    to_char(created_at, 'YYYY-MM-DD HH24:MI:SS TZ'), correlation_id, actor, left(headers::text, 4000), left(payload::text, 16000)
  from outbox_events where seq = $1";

const ATTEMPTS: &str = "select attempt, to_char(at, 'YYYY-MM-DD HH24:MI:SS'), outcome, error, worker_id
  from outbox_attempts where seq = $1 and destination = $2 order by at desc limit 50";

/// Where the database is, and the session with it while there is one.
pub struct Session {
    connect: ConnectArgs,
    may_act: bool,
    link: Option<Link>,
}

struct Link {
    client: Client,
    /// Statements that the server refuses whenever they come, with its words: each would be a line in its log.
    refused: Mutex<HashMap<&'static str, (Instant, String)>>,
}

/// What was refused is asked again after so long: somebody may have granted a right.
const ASK_AGAIN: Duration = Duration::from_secs(60);

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

    /// All figures. An error means that there is no session any more.
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
        let (event, attempts) = match self.link().await {
            Ok(link) => match timeout(ANSWER_TIMEOUT, link.letter(seq, &destination)).await {
                Ok(letter) => letter,
                Err(_) => (Err(unanswered().message), Err(unanswered().message)),
            },
            Err(failure) => (Err(failure.message.clone()), Err(failure.message)),
        };
        Letter {
            seq,
            destination,
            event,
            attempts,
        }
    }

    async fn act(&mut self, action: &Action) -> Notice {
        let done = match self.link().await {
            Ok(link) => match timeout(ANSWER_TIMEOUT, link.act(action)).await {
                Ok(done) => done,
                // It may be carried out yet, or not.
                Err(_) => Err(Failure::new(
                    Code::CannotConnect,
                    "The server did not answer; look whether it was done.",
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

/// What the answer of a function means.
fn said(action: &Action, was_done: bool) -> Notice {
    let text = match (action, was_done) {
        (Action::Retry { seq, .. }, true) => format!("Message {seq} goes again."),
        (Action::Retry { seq, .. }, false) => {
            format!("Message {seq} is not there to be retried, or waits behind another of its key.")
        }
        (Action::Discard { seq, .. }, true) => format!("Message {seq} is discarded."),
        (Action::Discard { seq, .. }, false) => format!("Message {seq} is not there to be discarded."),
        (Action::Pause { destination }, true) => format!("Delivery to {destination} is paused."),
        (Action::Pause { destination }, false) => format!("Delivery to {destination} was paused already."),
        (Action::Resume { destination }, true) => format!("Delivery to {destination} goes on."),
        (Action::Resume { destination }, false) => format!("Delivery to {destination} was not paused."),
    };
    Notice {
        text,
        is_bad: !was_done,
    }
}

/// Reads at each interval until nobody listens, and does what is asked between.
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
                        // A server that is slower than the interval gets as long to rest as it took.
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
        let client = timeout(CONNECT_TIMEOUT, connect(args)).await;
        let client = client.map_err(|_| unanswered()).and_then(|client| client)?;
        let read_only = if may_act { "off" } else { "on" };
        client
            .batch_execute(&format!(
                "set application_name = 'outboxctl top'; set statement_timeout = '5s'; set lock_timeout = '2s';
                 set default_transaction_read_only = {read_only}"
            ))
            .await?;
        Ok(Self {
            client,
            refused: Mutex::default(),
        })
    }

    /// The statements go out together, so that the distance to the server counts once.
    async fn snapshot(&self) -> Result<Snapshot, Failure> {
        let (now, status, minutes, partitions, workers, ticks, destinations, errors, messages, problems) = tokio::join!(
            self.client.query_typed_one(NOW, &[]),
            self.part(STATUS, status),
            self.part(MINUTES, minute),
            self.part(PARTITIONS, partition),
            self.part(WORKERS, worker),
            self.part(TICKS, tick),
            self.part(DESTINATIONS, destination),
            self.part(ERRORS, error),
            self.part(MESSAGES, message),
            self.part(PROBLEMS, problem),
        );
        let row = now?;
        Ok(Snapshot {
            now: now_of(&row)?,
            status: status.and_then(|rows| rows.into_iter().next().ok_or_else(|| "no row".into())),
            minutes,
            partitions,
            workers,
            ticks,
            destinations,
            errors,
            messages,
            problems,
        })
    }

    async fn part<T>(&self, sql: &'static str, take: fn(&Row) -> Taken<T>) -> Part<Vec<T>> {
        self.part_of(sql, &[], take).await
    }

    async fn part_of<T>(
        &self,
        sql: &'static str,
        arguments: &[(&(dyn ToSql + Sync), Type)],
        take: fn(&Row) -> Taken<T>,
    ) -> Part<Vec<T>> {
        let refused = || self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((until, why)) = refused().get(sql)
            && Instant::now() < *until
        {
            return Err(why.clone());
        }
        let rows = self.client.query_typed(sql, arguments).await;
        let taken = rows.and_then(|rows| rows.iter().map(take).collect());
        taken.map_err(|error| {
            let is_lasting = [
                SqlState::INSUFFICIENT_PRIVILEGE,
                SqlState::UNDEFINED_TABLE,
                SqlState::UNDEFINED_COLUMN,
            ]
            .iter()
            .any(|state| error.code() == Some(state));
            let failure = Failure::from(error);
            // Which right is missing, and what gives it.
            let why = [Some(failure.message), failure.hint.filter(|_| is_lasting)]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(": ");
            if is_lasting {
                refused().insert(sql, (Instant::now() + ASK_AGAIN, why.clone()));
            }
            why
        })
    }

    async fn letter(&self, seq: i64, destination: &str) -> (Part<Option<EventText>>, Part<Vec<Attempt>>) {
        let by_seq = [(&seq as &(dyn ToSql + Sync), Type::INT8)];
        let by_both = [
            (&seq as &(dyn ToSql + Sync), Type::INT8),
            (&destination as &(dyn ToSql + Sync), Type::TEXT),
        ];
        let (events, attempts) = tokio::join!(
            self.part_of(EVENT, &by_seq, event),
            self.part_of(ATTEMPTS, &by_both, attempt)
        );
        (events.map(|events| events.into_iter().next()), attempts)
    }

    async fn act(&self, action: &Action) -> Result<bool, Failure> {
        let (function, seq, destination) = match action {
            Action::Retry { seq, destination } => ("outbox_retry($1, $2, null::text)", Some(seq), destination),
            Action::Discard { seq, destination } => ("outbox_discard($1, $2, null::text)", Some(seq), destination),
            Action::Pause { destination } => ("outbox_pause($1, null::text)", None, destination),
            Action::Resume { destination } => ("outbox_resume($1, null::text)", None, destination),
        };
        let mut arguments: Vec<(&(dyn ToSql + Sync), Type)> = Vec::new();
        if let Some(seq) = seq {
            arguments.push((seq, Type::INT8));
        }
        arguments.push((destination, Type::TEXT));
        let sql = format!("select {function}");
        let row = self.client.query_typed_one(&sql, &arguments).await?;
        Ok(row.try_get::<_, Option<bool>>(0)?.unwrap_or(false))
    }
}

// ---- rows as plain data ---------------------------------------------------------------------------------------------

type Taken<T> = Result<T, tokio_postgres::Error>;

fn or_default<'a, T: FromSql<'a> + Default>(row: &'a Row, i: usize) -> Taken<T> {
    Ok(row.try_get::<_, Option<T>>(i)?.unwrap_or_default())
}

fn now_of(row: &Row) -> Taken<Now> {
    Ok(Now {
        epoch_s: row.try_get(0)?,
        clock: row.try_get(1)?,
        database: row.try_get(2)?,
        user: row.try_get(3)?,
        is_standby: row.try_get(4)?,
    })
}

fn status(row: &Row) -> Taken<Status> {
    Ok(Status {
        pending: row.try_get(0)?,
        in_flight: row.try_get(1)?,
        dead: or_default(row, 2)?,
        oldest_s: row.try_get(3)?,
        published_total: row.try_get(4)?,
        failed_total: row.try_get(5)?,
        published_per_s: row.try_get(6)?,
        failed_per_s: row.try_get(7)?,
    })
}

fn minute(row: &Row) -> Taken<Minute> {
    Ok(Minute {
        clock: row.try_get(0)?,
        published: or_default(row, 1)?,
        retried: or_default(row, 2)?,
        failed: or_default(row, 3)?,
        p95_ms: row.try_get(4)?,
    })
}

fn partition(row: &Row) -> Taken<Partition> {
    Ok(Partition {
        label: row.try_get(0)?,
        owner: row.try_get(1)?,
        ttl_s: row.try_get(2)?,
        epoch: row.try_get(3)?,
        first_waiting_seq: row.try_get(4)?,
        is_blocked: row.try_get(5)?,
    })
}

fn worker(row: &Row) -> Taken<Worker> {
    Ok(Worker {
        id: row.try_get(0)?,
        pid: row.try_get(1)?,
        state: or_default(row, 2)?,
        reason: row.try_get(3)?,
        detail: row.try_get(4)?,
        is_alive: or_default(row, 5)?,
        heartbeat_s: or_default(row, 6)?,
        partitions: or_default(row, 7)?,
        age_s: or_default(row, 8)?,
    })
}

fn tick(row: &Row) -> Taken<Ticks> {
    Ok(Ticks {
        worker_id: row.try_get(0)?,
        count: row.try_get(1)?,
        span_s: or_default(row, 2)?,
        mean_ms: or_default(row, 3)?,
        claimed: or_default(row, 4)?,
        published: or_default(row, 5)?,
        failed: or_default(row, 6)?,
        backoff_ms: or_default(row, 7)?,
        desired: or_default(row, 8)?,
        leased: or_default(row, 9)?,
        released: or_default(row, 10)?,
    })
}

fn destination(row: &Row) -> Taken<Destination> {
    Ok(Destination {
        name: row.try_get(0)?,
        described_by: row.try_get(1)?,
        state: or_default(row, 2)?,
        since_s: row.try_get(3)?,
        reason: row.try_get(4)?,
        detail: row.try_get(5)?,
        oldest_s: row.try_get(6)?,
        pending: row.try_get(7)?,
        max_pending: row.try_get(8)?,
        in_flight: row.try_get(9)?,
        published_total: row.try_get(10)?,
        failed_total: row.try_get(11)?,
        dead_total: row.try_get(12)?,
        published_per_s: row.try_get(13)?,
        p50_ms: row.try_get(14)?,
        p95_ms: row.try_get(15)?,
        p99_ms: row.try_get(16)?,
    })
}

fn error(row: &Row) -> Taken<ErrorGroup> {
    Ok(ErrorGroup {
        destination: or_default(row, 0)?,
        kind: or_default(row, 1)?,
        message: or_default(row, 2)?,
        count: or_default(row, 3)?,
        first_age_s: or_default(row, 4)?,
        last_age_s: or_default(row, 5)?,
        last_seq: row.try_get(6)?,
    })
}

fn message(row: &Row) -> Taken<Message> {
    Ok(Message {
        status: row.try_get(0)?,
        seq: row.try_get(1)?,
        destination: row.try_get(2)?,
        partition: row.try_get(3)?,
        key: row.try_get(4)?,
        attempts: row.try_get(5)?,
        age_s: or_default(row, 6)?,
        due_s: row.try_get(7)?,
        note: row.try_get(8)?,
    })
}

fn problem(row: &Row) -> Taken<Problem> {
    Ok(Problem {
        check: row.try_get(0)?,
        problem: row.try_get(1)?,
        remedy: row.try_get(2)?,
    })
}

fn event(row: &Row) -> Taken<EventText> {
    Ok(EventText {
        id: row.try_get(0)?,
        kind: row.try_get(1)?,
        aggregate: row.try_get(2)?,
        operation: row.try_get(3)?,
        created_at: row.try_get(4)?,
        correlation_id: row.try_get(5)?,
        actor: row.try_get(6)?,
        headers: row.try_get(7)?,
        payload: row.try_get(8)?,
    })
}

fn attempt(row: &Row) -> Taken<Attempt> {
    Ok(Attempt {
        number: or_default(row, 0)?,
        clock: or_default(row, 1)?,
        outcome: or_default(row, 2)?,
        error: row.try_get(3)?,
        worker_id: row.try_get(4)?,
    })
}
