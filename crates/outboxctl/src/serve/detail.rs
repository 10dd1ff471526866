//! One message: where it is, its event, its attempts, and what goes out to its destination, as a worker would make it.

use super::format::time;
use super::session::{Session, Trouble};
use super::snapshot::Snapshot;
use crate::commands::why::{Facts, Reason, reasons};
use outbox_core::envelope::publication;
use outbox_core::message::{Event, Pointer, Publication, Text};
use outbox_core::partition::Partition;
use outbox_core::route::Template;
use outbox_transport::target::{Kind, Target, Transport, described, split};
use serde::Deserialize;
use serde_json::{Value, json};

/// Larger events are shown cut, and what is sent of them is not made.
pub const SHOWN_MAX_BYTES: i64 = 256 * 1024;

/// A row of a message. There may be several: published once, and waiting again after a replay.
#[derive(Clone, Debug, Deserialize)]
pub struct Place {
    pub status: String,
    pub seq: i64,
    pub destination: String,
    pub partition: i64,
    pub key: Option<String>,
    pub attempts: i64,
    pub enqueued_at: f64,
    /// Due, published, discarded or died.
    pub at: Option<f64>,
    pub error: Option<String>,
    pub replayed: bool,
    pub blocks: bool,
    /// In outbox_waiting: for what.
    waits: Option<String>,
    pub expires_at: Option<f64>,
    /// Of its partition, now.
    pub lease_epoch: Option<i64>,
}

/// The outbox itself lane by lane: its index begins with the lane.
const PLACES: &str = "
    select x.status, x.seq, x.destination, x.partition, x.key, x.attempts, extract(epoch from x.enqueued_at)::float8 as enqueued_at,
           extract(epoch from x.at)::float8 as at, x.error, x.replayed, x.blocks, x.waits, extract(epoch from x.expires_at)::float8 as expires_at,
           (select p.lease_epoch from outbox_partitions p where p.partition = x.partition) as lease_epoch
    from (
      select 1 as rank, case when outbox_claim_is_live(o.claim_token, o.partition, o.claim_until) then 'in flight'
                             when o.attempts > 0 then 'retrying' else 'pending' end as status,
             o.seq, o.destination, o.partition, o.key, o.attempts, o.enqueued_at, null::timestamptz as at, o.last_error as error,
             o.replayed, false as blocks, null::text as waits, o.expires_at
      from outbox_first_pending l
      cross join lateral (select * from outbox x where x.destination = l.destination and x.partition = l.partition and x.seq = $1) o
      union all
      select 2, case when w.state = 'g' then 'held back' when w.attempts > 0 then 'retrying' else 'scheduled' end,
             w.seq, w.destination, w.partition, w.key, w.attempts, w.enqueued_at, w.due_at, w.last_error, w.replayed, false, w.state::text,
             w.expires_at
      from outbox_waiting w where w.seq = $1
      union all
      select 3, 'dead', d.seq, d.destination, d.partition, d.key, d.attempts, d.enqueued_at, d.died_at, d.reason, d.replayed,
             d.blocks, null, d.expires_at
      from outbox_dead d where d.seq = $1
      union all
      select 4, case when h.discarded then 'discarded' else 'published' end, h.seq, h.destination, h.partition, h.key, h.attempts,
             h.enqueued_at, h.published_at, h.last_error, h.replayed, false, null, null
      from outbox_history h where h.seq = $1
    ) x
    where $2::text is null or x.destination = $2
    order by x.rank, x.at desc nulls last limit 50";

/// The event as it is stored; texts of JSON untouched.
#[derive(Clone, Debug, Deserialize)]
pub struct StoredEvent {
    pub id: String,
    pub kind: String,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    pub operation: Option<String>,
    pub payload: String,
    pub payload_bytes: i64,
    pub previous_payload: Option<String>,
    pub metadata: Option<String>,
    pub headers: Option<String>,
    pub actor: Option<String>,
    pub correlation_id: Option<String>,
    pub created_at: String,
    pub created_at_s: i64,
    pub body_bytes: i64,
}

const EVENT: &str = "
    select id::text, type as kind, aggregate_type, aggregate_id, operation, left(payload::text, $2::integer) as payload,
           octet_length(payload::text) as payload_bytes, left(previous_payload::text, $2::integer) as previous_payload,
           left(metadata::text, $2::integer) as metadata, left(headers::text, $2::integer) as headers, actor, correlation_id,
           to_char(created_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') as created_at,
           floor(extract(epoch from created_at))::bigint as created_at_s, body_bytes
    from outbox_events where seq = $1 and not exists (select from outbox_source)";

const PAYLOAD: &str = "
    select payload::text as payload from outbox_events where seq = $1 and not exists (select from outbox_source)";

#[derive(Clone, Debug, Deserialize)]
pub struct Attempt {
    pub attempt: i64,
    pub at: f64,
    pub outcome: String,
    pub error: Option<String>,
    pub worker_id: Option<String>,
}

const ATTEMPTS: &str = "
    select attempt, extract(epoch from at)::float8 as at, outcome, error, worker_id
    from outbox_attempts where seq = $1 and destination = $2 order by at desc limit 50";

#[derive(Deserialize)]
struct Described {
    wrapper: Option<String>,
    options: Option<Vec<String>>,
    url: Option<String>,
    exchange: Option<String>,
    routing_key: Option<String>,
}

const DESCRIBED: &str = "
    select d.wrapper, d.options, current_setting('outbox.url', true) as url, current_setting('outbox.exchange', true) as exchange,
           current_setting('outbox.routing_key', true) as routing_key
    from outbox_destinations() d where d.destination = $1";

/// What goes to the destination.
pub struct Sent {
    pub url: String,
    pub publication: Publication,
    pub is_http: bool,
    /// The function that makes the body, which is then not the publication's.
    pub body_by: Option<String>,
}

pub struct Message {
    pub place: Place,
    /// Where else it is or was.
    pub others: Vec<Place>,
    pub event: Option<StoredEvent>,
    pub may_read_event: bool,
    pub attempts: Vec<Attempt>,
    pub sent: Result<Sent, String>,
    /// Why it does not move.
    pub reasons: Vec<Reason>,
}

/// None: there is no such message, or none that is committed.
pub async fn message(
    session: &Session,
    snapshot: Option<&Snapshot>,
    seq: i64,
    destination: Option<&str>,
) -> Result<Option<Message>, Trouble> {
    let mut places: Vec<Place> = session.rows(PLACES, &[&seq, &destination]).await?;
    if places.is_empty() {
        return Ok(None);
    }
    let place = places.remove(0);
    let may_read_event = session.reads_events;
    let shown_max = SHOWN_MAX_BYTES as i32;
    let events: Vec<StoredEvent> = match may_read_event {
        true => session.rows(EVENT, &[&seq, &shown_max]).await?,
        false => Vec::new(),
    };
    let event = events.into_iter().next();
    let attempts = session.rows(ATTEMPTS, &[&seq, &place.destination]).await?;
    let described: Vec<Described> = session.rows(DESCRIBED, &[&place.destination]).await?;
    let sent = match (&event, described.into_iter().next()) {
        (None, _) => Err("The event cannot be read here.".to_owned()),
        (Some(event), _) if event.body_bytes > SHOWN_MAX_BYTES => {
            Err("The event is too large to be shown as it is sent.".to_owned())
        }
        (Some(_), None) => Err("There is no such destination any more.".to_owned()),
        (Some(event), Some(described)) => sent(&place, event, &described),
    };
    let reasons = match snapshot {
        Some(snapshot) => why(session, snapshot, &place).await?,
        None => Vec::new(),
    };
    Ok(Some(Message {
        reasons,
        place,
        others: places,
        event,
        may_read_event,
        attempts,
        sent,
    }))
}

/// What it waits behind, in the order in which it holds up what comes later; see `outboxctl show`. A lane has no index by key:
/// only its start is looked through.
const AHEAD: &str = "
    (select h.seq, h.status, h.last_error, h.available_at, true as whole
     from outbox_closed_lanes() l cross join lateral (
       select d.seq, 'dead' as status, d.reason as last_error, null::text as available_at
       from outbox_dead d where d.seq = l.head and d.destination = l.destination
       union all
       select w.seq, 'retrying', w.last_error, to_char(w.due_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS \"UTC\"')
       from outbox_waiting w where w.seq = l.head and w.destination = l.destination) h
     where l.destination = $1 and l.partition = $2 and l.head < $4)
    union all
    (select d.seq, 'dead' as status, d.reason as last_error, null::text as available_at, false from outbox_dead d
     where d.partition = $2 and d.destination = $1 and d.key = $3 and d.blocks order by d.seq limit 1)
    union all
    (select w.seq, 'retrying', w.last_error, to_char(w.due_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS \"UTC\"'), false
     from outbox_waiting w
     where w.due_at is not null and w.state = 'b' and w.attempts > 0 and w.partition = $2 and w.destination = $1
       and w.key = $3 and (w.seq < $4 or ($5 and w.seq <> $4)) order by w.seq limit 1)
    union all
    (select o.seq, 'pending', o.last_error, null, false
     from (select * from outbox x where x.destination = $1 and x.partition = $2 order by x.seq limit 10000) o
     where o.seq < $4 and o.key = $3 order by o.seq limit 1)
    limit 1";

const TRANSACTION: &str = "
    select t.pid, t.xid::text as xid, extract(epoch from t.age)::float8 as age_s from outbox_open_transactions() t
    where t.low <= $1 and t.age > interval '1 second' order by t.age desc limit 1";

/// In the words of `outboxctl show`.
async fn why(session: &Session, snapshot: &Snapshot, place: &Place) -> Result<Vec<Reason>, Trouble> {
    let message = json!({
        "seq": place.seq, "status": place.status, "destination": place.destination, "partition_key": place.partition_key(),
        "available_at": place.at.map(|at| format!("{} UTC", time(at))), "last_error": place.error, "blocks": place.blocks,
        "waits": place.waits,
    });
    let mut facts = Facts {
        message: &message,
        standby: snapshot.server.standby,
        problems: &[],
        destination: &Value::Null,
        partition: &Value::Null,
        ahead: &Value::Null,
        transaction: &Value::Null,
    };
    if place.has_ended() || place.status == "dead" {
        return Ok(reasons(&facts));
    }
    let general = ["preload", "enabled", "identity", "role", "workers", "source"];
    let failing = snapshot
        .health
        .iter()
        .filter(|check| !check.ok && general.contains(&check.check.as_str()));
    let problems: Vec<Value> = failing
        .map(|check| json!({ "problem": check.problem, "remedy": check.remedy }))
        .collect();
    let destination = snapshot
        .destinations
        .iter()
        .find(|d| d.destination == place.destination);
    let destination = destination.map(
        |d| json!({ "state": d.state, "reason": d.reason, "detail": d.detail, "oldest_pending_age_s": d.oldest_s }),
    );
    let label = place.partition_key();
    let partition = snapshot.partitions.iter().find(|p| p.partition_key == label);
    let partition = partition.map(|p| {
        json!({ "lease_owner": p.lease_owner, "first_waiting_seq": p.first_waiting_seq, "leasing": snapshot.server.leasing })
    });
    let number = i16::try_from(place.partition).unwrap_or_default();
    let is_held = place.waits.as_deref() == Some("g");
    let ahead = session
        .rows(AHEAD, &[&place.destination, &number, &place.key, &place.seq, &is_held])
        .await?;
    let transaction = session.rows(TRANSACTION, &[&place.seq]).await?;
    let first = |rows: Vec<Value>| rows.into_iter().next().unwrap_or_default();
    let (destination, partition) = (destination.unwrap_or_default(), partition.unwrap_or_default());
    let (ahead, transaction) = (first(ahead), first(transaction));
    facts.problems = &problems;
    facts.destination = &destination;
    facts.partition = &partition;
    facts.ahead = &ahead;
    facts.transaction = &transaction;
    Ok(reasons(&facts))
}

/// The whole payload.
pub async fn payload(session: &Session, seq: i64) -> Result<Option<String>, Trouble> {
    #[derive(Deserialize)]
    struct Payload {
        payload: String,
    }
    let found: Vec<Payload> = session.rows(PAYLOAD, &[&seq]).await?;
    Ok(found.into_iter().next().map(|found| found.payload))
}

fn sent(place: &Place, event: &StoredEvent, described_by: &Described) -> Result<Sent, String> {
    let mut default = Target::plain();
    if let Transport::Amqp(amqp) = &mut default.transport {
        amqp.url = described_by.url.clone().unwrap_or_default();
        amqp.exchange = Text::shared(described_by.exchange.as_deref().unwrap_or_default());
        let template = described_by.routing_key.as_deref().unwrap_or_default();
        amqp.routing_key = Template::parse(template).map_err(|error| error.to_string())?;
    }
    let options = split(described_by.options.as_deref().unwrap_or_default());
    let body_by = options
        .iter()
        .find(|(name, _)| name == "body")
        .map(|(_, function)| function.clone());
    let target = match described_by.wrapper.as_deref().and_then(Kind::of_wrapper) {
        None => default,
        Some(kind) => described(kind, &default, &options, &[]).map_err(|refused| refused.message)?,
    };
    let nothing = (Text::default(), Template::fixed(""));
    let url = match &target.transport {
        Transport::Amqp(amqp) => &amqp.url,
        Transport::Http(http) => &http.url,
    };
    let publication = publication(
        0,
        &pointer(place)?,
        &as_event(place.seq, event),
        &target.route(&nothing),
    );
    Ok(Sent {
        url: url.clone(),
        publication: publication.map_err(|refusal| format!("It cannot be sent: {}", refusal.message))?,
        is_http: matches!(target.transport, Transport::Http(_)),
        body_by,
    })
}

fn pointer(place: &Place) -> Result<Pointer, String> {
    Ok(Pointer {
        seq: place.seq,
        destination: place.destination.clone(),
        partition: Partition::new(place.partition).map_err(|_| "It lies in no partition.".to_owned())?,
        key: place.key.clone(),
        attempts: i32::try_from(place.attempts).unwrap_or(i32::MAX),
        crashes: 0,
        lease_epoch: place.lease_epoch.unwrap_or_default(),
        replayed: place.replayed,
        enqueued_at_us: (place.enqueued_at * 1e6) as i64,
        expires_at_us: place.expires_at.map(|at| (at * 1e6) as i64),
    })
}

fn as_event(seq: i64, stored: &StoredEvent) -> Event {
    let stored = stored.clone();
    Event {
        id: stored.id,
        seq,
        kind: stored.kind,
        aggregate_type: stored.aggregate_type,
        aggregate_id: stored.aggregate_id,
        operation: stored.operation,
        payload: stored.payload,
        previous_payload: stored.previous_payload,
        metadata: stored.metadata,
        headers: stored.headers,
        actor: stored.actor,
        correlation_id: stored.correlation_id,
        created_at: stored.created_at,
        created_at_s: stored.created_at_s,
        body: None, // where a function makes it, only a worker calls that
    }
}

impl Place {
    pub fn partition_key(&self) -> String {
        Partition::new(self.partition).map(Partition::label).unwrap_or_default()
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.status.as_str(), "published" | "discarded")
    }
}
