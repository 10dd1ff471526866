//! One message: its table, its event, its attempts, and the publication to its destination, as a worker would make it.

use super::session::{Session, Trouble};
use crate::queries::Fetch;
use crate::queries::message::{ATTEMPTS, Attempt, EVENT, MESSAGE, MessageRow, StoredEvent};
use crate::queries::why::{self, Reason};
use outbox_core::envelope::publication;
use outbox_core::message::{Pointer, Publication, Text};
use outbox_core::partition::Partition;
use outbox_core::route::Template;
use outbox_transport::target::{Kind, Target, Transport, described, split};
use serde::Deserialize;
use std::sync::LazyLock;

/// Larger events are shown truncated, without their publication.
pub const SHOWN_MAX_BYTES: i64 = 256 * 1024;

/// A row of the message, and what a worker knows of it besides. There may be several: published once, and waiting again
/// after a replay.
#[derive(Deserialize)]
struct Located {
    #[serde(flatten)]
    row: MessageRow,
    enqueued_at_us: i64,
    expires_at_us: Option<i64>,
    /// The owner of its partition, now.
    lease_epoch: Option<i64>,
}

static LOCATED: LazyLock<String> = LazyLock::new(|| {
    format!(
        "select p.*, (extract(epoch from p.enqueued_at) * 1e6)::bigint as enqueued_at_us,
                (extract(epoch from p.expires_at) * 1e6)::bigint as expires_at_us,
                (select x.lease_epoch from outbox_partitions x where x.partition = p.partition) as lease_epoch
         from ({MESSAGE}) p"
    )
});

const PAYLOAD: &str = "
    select payload::text as payload from outbox_events where seq = $1 and not exists (select from outbox_source)";

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
    from outbox_internal.destinations() d where d.destination = $1";

/// The publication to the destination.
pub struct Sent {
    pub url: String,
    pub publication: Publication,
    pub is_http: bool,
    /// The function that makes the body, which then replaces that of the publication.
    pub body_by: Option<String>,
}

pub struct Message {
    pub row: MessageRow,
    /// Other rows of the same seq.
    pub others: Vec<MessageRow>,
    pub event: Option<StoredEvent>,
    pub may_read_event: bool,
    pub attempts: Vec<Attempt>,
    pub sent: Result<Sent, String>,
    /// Why it does not move.
    pub reasons: Vec<Reason>,
}

/// The seq of the event with this id, a UUID. None: there is none, or events cannot be read here.
pub async fn seq_of(session: &Session, id: &str) -> Result<Option<i64>, Trouble> {
    #[derive(Deserialize)]
    struct Found {
        seq: i64,
    }
    if !session.reads_events {
        return Ok(None);
    }
    let found: Vec<Found> = session
        .fetch("select e.seq from outbox_events e where e.id = $1::text::uuid", &[&id])
        .await?;
    Ok(found.first().map(|found| found.seq))
}

/// None: the message does not exist, or is not committed.
pub async fn message(session: &Session, seq: i64, destination: Option<&str>) -> Result<Option<Message>, Trouble> {
    let located: Vec<Located> = session.fetch(&LOCATED, &[&seq, &destination]).await?;
    let mut located = located.into_iter();
    let Some(first) = located.next() else {
        return Ok(None);
    };
    let destination = &first.row.destination;
    let may_read_event = session.reads_events;
    let shown_max = SHOWN_MAX_BYTES as i32;
    let events: Vec<StoredEvent> = match may_read_event {
        true => session.fetch(&EVENT, &[&seq, &shown_max]).await?,
        false => Vec::new(),
    };
    let event = events.into_iter().next();
    let attempts = session.fetch(ATTEMPTS, &[&seq, destination]).await?;
    let described: Vec<Described> = session.fetch(DESCRIBED, &[destination]).await?;
    let sent = match (&event, described.into_iter().next()) {
        (None, _) => Err("The event cannot be read here.".to_owned()),
        (Some(event), _) if event.body_bytes > SHOWN_MAX_BYTES => {
            Err("The event is too large to be shown as it is sent.".to_owned())
        }
        (Some(_), None) => Err("The destination no longer exists.".to_owned()),
        (Some(event), Some(described)) => sent(&first, event, &described),
    };
    Ok(Some(Message {
        reasons: why::of(session, &first.row).await?,
        row: first.row,
        others: located.map(|located| located.row).collect(),
        event,
        may_read_event,
        attempts,
        sent,
    }))
}

/// The whole payload.
pub async fn payload(session: &Session, seq: i64) -> Result<Option<String>, Trouble> {
    #[derive(Deserialize)]
    struct Payload {
        payload: String,
    }
    let found: Vec<Payload> = session.fetch(PAYLOAD, &[&seq]).await?;
    Ok(found.into_iter().next().map(|found| found.payload))
}

fn sent(located: &Located, event: &StoredEvent, described_by: &Described) -> Result<Sent, String> {
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
        &pointer(located)?,
        &event.event, // without a body: only a worker calls a function that makes it
        &target.route(&nothing),
    );
    Ok(Sent {
        url: url.clone(),
        publication: publication.map_err(|refusal| format!("It cannot be sent: {}", refusal.message))?,
        is_http: matches!(target.transport, Transport::Http(_)),
        body_by,
    })
}

fn pointer(located: &Located) -> Result<Pointer, String> {
    let row = &located.row;
    Ok(Pointer {
        seq: row.seq,
        destination: row.destination.clone(),
        partition: Partition::new(row.partition.into()).map_err(|_| "It has no partition.".to_owned())?,
        key: row.key.clone(),
        attempts: row.attempts,
        crashes: 0,
        lease_epoch: located.lease_epoch.unwrap_or_default(),
        replayed: row.replayed,
        enqueued_at_us: located.enqueued_at_us,
        expires_at_us: located.expires_at_us,
    })
}
