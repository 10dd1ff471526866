//! The page of one message: its state, its event, its attempts, why it waits, and its publication to its destination as
//! a worker would make it.

use super::act::act_path;
use super::context::{Fields, PageContext};
use super::format::{count, distance, encode, message_path};
use super::page::{MonitorPage, as_sql, copyable, copyable_block, remedy, state_badge};
use super::session_pool::{MonitorSession, busy};
use crate::failure::{Code, Failure};
use crate::format::capitalised;
use crate::messages::bulk::Verb;
use crate::messages::sql::quoted;
use crate::queries::Fetch;
use crate::queries::message::{ATTEMPTS, Attempt, EVENT, EventShown, MESSAGE, StoredMessageRow};
use crate::queries::state::MessageStatus;
use crate::queries::why::{self, Reason};
use axum::body::Bytes;
use axum::extract::{Form, Path};
use axum::http::header;
use axum::response::Response;
use maud::{Markup, html};
use outbox_core::envelope::publication;
use outbox_core::event::{COLUMNS, ColumnKind};
use outbox_core::message::{Pointer, Publication};
use outbox_core::partition::Partition;
use outbox_core::words::Word;
use outbox_transport::AllowList;
use outbox_transport::described::described;
use outbox_transport::kind::Kind;
use outbox_transport::kind::Target;
use outbox_transport::options::split;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use tokio::sync::OwnedSemaphorePermit;
use tokio_postgres::error::SqlState;

/// Larger events are shown truncated, without their publication.
const SHOWN_MAX_BYTES: i64 = 256 * 1024;

/// A row of the message, and what else a worker knows of it. There may be several: published once, and waiting again
/// after a replay.
#[derive(Deserialize)]
struct LocatedMessage {
    #[serde(flatten)]
    row: StoredMessageRow,
    enqueued_at_us: i64,
    expires_at_us: Option<i64>,
    /// The owner of its partition, now.
    lease_epoch: Option<i64>,
    /// Whether the destination exists. Its options are those of its server; the others are the default.
    is_described: bool,
    wrapper: Option<String>,
    options: Option<Vec<String>>,
    /// The settings of the outbox by name, in the units of pg_settings.
    settings: HashMap<String, String>,
}

static LOCATED: LazyLock<String> = LazyLock::new(|| {
    format!(
        "select p.*, (extract(epoch from p.enqueued_at) * 1e6)::bigint as enqueued_at_us,
                (extract(epoch from p.expires_at) * 1e6)::bigint as expires_at_us,
                (select x.lease_epoch from @extschema@.outbox_partitions x where x.partition = p.partition) as lease_epoch,
                d.destination is not null as is_described, d.wrapper, d.options,
                (select jsonb_object_agg(s.name, coalesce(s.setting, '')) from pg_settings s where s.name like 'outbox.%')
                  as settings
         from ({MESSAGE}) p left join outbox_internal.destinations() d on d.destination = p.destination"
    )
});

const PAYLOAD: &str = "
    select payload::text as payload from outbox_internal.event_shown($1) where error is null";

fn no_message(seq: i64) -> Failure {
    Failure::new(Code::Usage, format!("no message {seq} waits or is kept"))
        .hint("It may not be committed, or the history has dropped it")
        .sqlstate(SqlState::NO_DATA)
}

/// The seq of the event with this id, a UUID. None: there is none, or events cannot be read here.
pub async fn seq_of(session: &MonitorSession, id: &str) -> Result<Option<i64>, Failure> {
    if !session.reads_events {
        return Ok(None);
    }
    let sql = "select e.seq from @extschema@.outbox_events e where e.id = $1::text::uuid
               and not exists (select from @extschema@.outbox_source)";
    let found: Vec<Value> = session.fetch(sql, &[&id]).await?;
    Ok(found.first().and_then(|event| event["seq"].as_i64()))
}

pub async fn message(context: PageContext, Path(seq): Path<i64>, Form(fields): Form<Fields>) -> Response {
    let destination = fields.given("destination");
    let shown = async |session: &MonitorSession| shown(&context, session, seq, destination).await;
    context.answer(context.database.pool.read(shown).await)
}

/// A payload on its way to a client. It takes memory until the client has read it.
struct PayloadDownload {
    payload: String,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for PayloadDownload {
    fn as_ref(&self) -> &[u8] {
        self.payload.as_bytes()
    }
}

/// As a download, never as something that a browser shows.
pub async fn payload(context: PageContext, Path(seq): Path<i64>) -> Response {
    let answer = async {
        let permit = Arc::clone(&context.request.site.downloads).try_acquire_owned();
        let _permit = permit.map_err(|_| busy())?;
        let read = async |session: &MonitorSession| session.fetch::<Value>(PAYLOAD, &[&seq]).await;
        let found = context.database.pool.read(read).await?.pop();
        let Some(Value::String(payload)) = found.map(|mut event| event["payload"].take()) else {
            return Err(no_message(seq));
        };
        let disposition = format!("attachment; filename=\"message-{seq}.json\"");
        let headers = [
            (header::CONTENT_TYPE, "application/json".to_owned()),
            (header::CONTENT_DISPOSITION, disposition),
        ];
        Ok((headers, Bytes::from_owner(PayloadDownload { payload, _permit })))
    };
    context.answer(answer.await)
}

/// The publication to the destination, as a worker would make it; of a message that has ended, as the last one was.
fn publication_of(located: &LocatedMessage, event: &EventShown) -> Result<(Target, Publication), String> {
    if event.body_bytes > SHOWN_MAX_BYTES {
        return Err("The event is too large to be shown as it is sent.".to_owned());
    }
    if !located.is_described {
        return Err("The destination no longer exists.".to_owned());
    }
    let settings = Kind::of_settings()
        .settings
        .iter()
        .filter(|setting| setting.file.is_none());
    let own = settings.filter_map(|setting| {
        let name = setting.name.to_str().unwrap_or_default();
        setting.value(located.settings.get(name).cloned().unwrap_or_default())
    });
    let known = |name: &str| {
        located
            .settings
            .get(&format!("outbox.{name}"))
            .cloned()
            .unwrap_or_default()
    };
    // A server that has not loaded the library knows no setting.
    let mut target = Target::of_settings(known, own.collect(), AllowList::default()).unwrap_or_default();
    if let Some(wrapper) = &located.wrapper {
        let kind = Kind::of_wrapper(wrapper).ok_or("This version does not know the kind of the destination.")?;
        target = described(kind, &target, &located.options(), &[]).map_err(|refused| refused.to_string())?;
    }
    let (row, is_over) = (&located.row, located.is_over());
    let pointer = Pointer {
        seq: row.seq,
        destination: row.destination.as_str().into(),
        partition: Partition::new(row.partition.into()).map_err(|_| "It has no partition.")?,
        key: row.key.clone(),
        attempts: (row.attempts - i32::from(is_over)).max(0),
        crashes: 0,
        lease_epoch: located.lease_epoch.unwrap_or_default(),
        replayed: row.replayed,
        enqueued_at_us: located.enqueued_at_us,
        expires_at_us: located.expires_at_us,
    };
    let publication = publication(0, &pointer, event.event.clone(), &target.route());
    let mut publication = publication.map_err(|refusal| format!("It cannot be sent: {}", refusal.message))?;
    if is_over {
        let headers = &mut publication.properties.headers;
        headers.retain(|(name, _)| !["lease_epoch", "outbox-lease-epoch"].contains(&&**name)); // no table keeps it
    }
    Ok((target, publication))
}

impl LocatedMessage {
    /// Whether its last attempt is charged, and no other follows unless a person asks for it.
    fn is_over(&self) -> bool {
        let status = self.row.status.known();
        status.is_some_and(|status| status.has_ended() || status == MessageStatus::Dead)
    }

    fn options(&self) -> Vec<(String, String)> {
        split(self.options.as_deref().unwrap_or_default())
    }
}

async fn shown(context: &PageContext, session: &MonitorSession, seq: i64, to: Option<&str>) -> Result<Markup, Failure> {
    let located: Vec<LocatedMessage> = session.fetch(&LOCATED, &[&seq, &to]).await?;
    let (first, others) = located.split_first().ok_or_else(|| no_message(seq))?;
    let row = &first.row;
    let event: Option<EventShown> = match session.reads_events {
        true => session.fetch(&EVENT, &[&seq, &(SHOWN_MAX_BYTES as i32)]).await?.pop(),
        false => None,
    };
    let attempts: Vec<Attempt> = session
        .fetch(ATTEMPTS, &[&seq, &row.destination, &row.enqueued_at])
        .await?;
    let reasons = why::reasons(session, row).await?;
    let publication = match &event {
        Some(event) if event.error.is_none() => publication_of(first, event),
        _ => Err("The event cannot be read here.".to_owned()),
    };
    let (title, now_s) = (format!("Message {seq}"), context.now_s());
    let shown = html! {
        h1 { (title) " to " (row.destination) " " (state_badge(&row.status)) }
        @for reason in &reasons { (obstacle(context, row, reason)) }
        (actions(context, row))
        section.panel {
            h2 { "Event" }
            @match &event {
                None if !session.reads_events => { p.empty { "The login of this monitor may not read events: GRANT outbox_admin to it." } }
                None => { p.empty { "outbox_events does not have it: it was removed." } }
                Some(EventShown { error: Some(why), .. }) => { p.empty { "It is not shown: " (why) "." } }
                Some(event) => { (event_content(seq, event, now_s)) }
            }
        }
        section.panel {
            h2 { "Attempts" }
            @if attempts.is_empty() { p.empty { "No attempt is recorded." } }
            @else { div.scroll tabindex="0" role="region" aria-label="Attempts" { table.stack {
                thead { tr { th.n { "Attempt" } th { "At" } th { "Outcome" } th { "Error" } th { "Worker" } } }
                tbody { @for same in attempts.chunk_by(|a, b| (&a.outcome, &a.error) == (&b.outcome, &b.error)) { (folded(same, now_s)) } }
            } } }
        }
        section.panel { h2 { "State" } (state(row, &reasons, now_s)) (also(others, now_s)) }
        (sent(publication, first.is_over()))
        (as_sql(sql(row).lines()))
    };
    let body = html! { div #message data-refresh { (shown) } };
    Ok(context.frame(MonitorPage::Messages, &title, &body))
}

/// Why the message waits, and what ends that.
fn obstacle(context: &PageContext, row: &StoredMessageRow, reason: &Reason) -> Markup {
    let (to, may_act) = (&row.destination, context.viewer.may_act);
    html! {
        div.obstacle.plain[reason.remedy.is_none()].warn[reason.remedy.is_some()] {
            p { (reason.why) }
            @if let Some(text) = &reason.remedy { (remedy(text, &reason.commands)) }
        }
        div.actions {
            @if let Some(seq) = reason.behind {
                @if may_act { (retry(context, seq, to, &format!("Retry {seq} now"))) }
                a.button href=(message_path(seq, to)) { "See message " (seq) }
                @if may_act { a.button.danger href=(act_path(Verb::Discard, seq, to)) { "Discard " (seq) "…" } }
            }
            @if may_act && reason.reason == "paused" && reason.remedy.is_some() {
                a.button.primary href={ "act/resume?destination=" (encode(to)) } { "Resume " (to) "…" }
            }
        }
    }
}

/// The actions on a message of this status.
fn actions(context: &PageContext, row: &StoredMessageRow) -> Markup {
    let status = row.status.known().filter(|_| context.viewer.may_act);
    let verbs = status.map_or(&[][..], MessageStatus::verbs);
    html! {
        @if !verbs.is_empty() {
            div.actions { @for verb in verbs {
                @if *verb == Verb::Retry { (retry(context, row.seq, &row.destination, "Retry now")) }
                @else { a.button.danger[*verb == Verb::Discard] href=(act_path(*verb, row.seq, &row.destination)) { (capitalised(verb.name())) "…" } }
            } }
        }
    }
}

/// An error that a reason has told already is left out.
fn state(row: &StoredMessageRow, reasons: &[Reason], now_s: f64) -> Markup {
    let is_told = |error: &String| reasons.iter().any(|reason| reason.why.contains(error.as_str()));
    html! {
        dl.facts {
            div { dt { "Destination" } dd { a href="destinations" { (row.destination) } } }
            div { dt { "Key" } dd { @match &row.key { Some(key) => { (copyable(key)) } None => { "none: not ordered" } } } }
            div { dt { "Partition" } dd { a href="partitions" { (row.partition_key) } } }
            div { dt { "Attempts charged" } dd { (row.attempts) } }
            div { dt { "Enqueued" } dd { (distance(&row.enqueued_at, now_s)) } }
            @if let Some((what, at)) = row.time() { div { dt { (what) } dd { (distance(at, now_s)) } } }
            @if let Some(at) = &row.expires_at { div { dt { "Expires" } dd { (distance(at, now_s)) } } }
            @if row.replayed { div { dt { "Replayed" } dd { "yes" } } }
            @if let Some(error) = row.last_error.as_ref().filter(|error| !is_told(error)) { div.wide { dt { "Last error" } dd.error { (error) } } }
        }
    }
}

/// The other rows with this seq.
fn also(others: &[LocatedMessage], now_s: f64) -> Markup {
    html! {
        @if !others.is_empty() {
            p.note { "Also: " @for (index, LocatedMessage { row, .. }) in others.iter().enumerate() {
                @if index > 0 { ", " }
                a href=(message_path(row.seq, &row.destination)) { (row.status) " to " (row.destination) }
                @if let Some((_, at)) = row.time() { " " (distance(at, now_s)) }
            } }
        }
    }
}

/// A line for attempts with the same result that follow each other, the latest first.
fn folded(attempts: &[Attempt], now_s: f64) -> Markup {
    let (Some(latest), Some(earliest)) = (attempts.first(), attempts.last()) else {
        return html! {};
    };
    let mut workers: Vec<&str> = attempts
        .iter()
        .filter_map(|attempt| attempt.worker_id.as_deref())
        .collect();
    workers.sort_unstable();
    workers.dedup();
    html! {
        tr {
            td.n data-label="Attempt" { @if attempts.len() > 1 { (earliest.attempt) "–" } (latest.attempt) }
            td.time data-label="At" { @if attempts.len() > 1 { (distance(&earliest.at, now_s)) " to " } (distance(&latest.at, now_s)) }
            td data-label="Outcome" { (latest.outcome) }
            td.error data-label="Error" { (latest.error.as_deref().unwrap_or("–")) @if attempts.len() > 1 { " " span.note { "(same error)" } } }
            td data-label="Worker" { @if workers.is_empty() { "–" } (workers.join(", ")) }
        }
    }
}

/// A button that retries a message without a question.
fn retry(context: &PageContext, seq: i64, destination: &str, label: &str) -> Markup {
    html! {
        form method="post" action="act/message" {
            (context.form_token())
            input type="hidden" name="verb" value="retry";
            input type="hidden" name="m" value={ (seq) " " (destination) };
            button.primary { (label) }
        }
    }
}

fn sent(publication: Result<(Target, Publication), String>, is_over: bool) -> Markup {
    html! {
        section.panel {
            details.plain {
                summary { h2 { "What is sent" } }
                @match publication {
                    Err(why) => { p.empty { (why) } }
                    Ok((target, publication)) => {
                        @let sent = &publication.properties;
                        dl.facts {
                            @for (name, value) in target.peer().facts(&publication.address) {
                                div.wide { dt { (name) } dd.address { (copyable(&value)) } }
                            }
                            div { dt { "Content type" } dd { (&*sent.content_type) } }
                            div { dt { "Body" } dd { (count(publication.body.len() as i64)) " bytes" } }
                        }
                        h3 { "Headers" }
                        @if is_over { p.note { "The lease epoch is left out: it is not kept." } }
                        dl.pairs { @for (name, value) in &sent.headers { div { dt { (&**name) } dd { (value.to_string()) } } } }
                        h3 { "Body as sent" }
                        (copyable_block(&String::from_utf8_lossy(&publication.body)))
                    }
                }
            }
        }
    }
}

fn event_content(seq: i64, event: &EventShown, now_s: f64) -> Markup {
    let columns = || COLUMNS.iter().zip(event.event.texts());
    let name = |name: &str| capitalised(&name.replace('_', " "));
    let facts = columns().filter(|(column, _)| column.kind != ColumnKind::Json);
    let others = columns().filter(|(column, _)| column.kind == ColumnKind::Json && column.name != "payload");
    html! {
        (copyable_block(&event.event.payload))
        p.note {
            "The payload, " (count(event.payload_bytes)) " bytes"
            @if event.payload_bytes > SHOWN_MAX_BYTES { ", of which " (count(SHOWN_MAX_BYTES)) " are shown" }
            " · " a href={ "message/" (seq) "/payload" } { "download" }
        }
        dl.facts {
            @for (column, value) in facts { @if let Some(value) = value { div { dt { (name(column.name)) } dd {
                @if column.name == "id" { (copyable(value)) } @else { (value) }
            } } } }
            div { dt { "Created" } dd { (distance(&event.event.created_at, now_s)) } }
        }
        @for (column, text) in others { @if let Some(text) = text { h3 { (name(column.name)) } (copyable_block(text)) } }
    }
}

/// To read the message and to act on it with psql.
fn sql(row: &StoredMessageRow) -> String {
    let (seq, destination) = (row.seq, quoted(&row.destination));
    let mut sql = format!("select * from outbox_messages where seq = {seq} and destination = {destination};\n");
    if row.has_ended() {
        sql += &format!(
            "select outbox_replay(seq_from => {seq}, seq_to => {seq}, destination => {destination}, dry_run => false);\n"
        );
    } else {
        sql += &format!("select outbox_retry({seq}, {destination});\n");
        sql += &format!("select outbox_discard({seq}, {destination}, reason => 'why');\n");
    }
    sql
}
