//! `outboxctl show`: all of one message: where it stands, its event, its attempts, and why it does not move.

use super::why::{Facts, Reason, reasons};
use super::{Context, list, text, time};
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::messages::events_are_readable;
use crate::output::{self, Cell, Colour, Table, paint};
use clap::Args;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::process::ExitCode;

#[derive(Args)]
pub struct ShowArgs {
    /// Seq of the message
    seq: i64,
    /// Only to this destination
    #[arg(long)]
    destination: Option<String>,
}

/// A seq, its event, and one message for each destination and replay.
#[derive(Serialize)]
struct Shown {
    seq: i64,
    /// As the server writes it: a number of the payload may have more digits than a float.
    event: Option<Box<RawValue>>,
    messages: Vec<Message>,
}

#[derive(Serialize)]
struct Message {
    #[serde(flatten)]
    row: Map<String, Value>,
    why: Vec<Reason>,
    failed_attempts: Vec<Value>,
}

pub async fn run(context: &Context, args: &ShowArgs) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    let mut messages = Vec::new();
    for row in messages_of(&session, args).await? {
        messages.push(Message {
            why: why(&session, &row).await?,
            failed_attempts: attempts(&session, &row).await?,
            row: row.as_object().cloned().unwrap_or_default(),
        });
    }
    if messages.is_empty() {
        let place = args
            .destination
            .as_ref()
            .map(|name| format!(" to {name}"))
            .unwrap_or_default();
        return Err(
            Failure::new(Code::SomeFailed, format!("there is no message {}{place}", args.seq))
                .hint("It may be rolled back, not be committed yet, or have left the history (outbox.retention)."),
        );
    }
    let readable = events_are_readable(&session).await?;
    if context.json {
        let event = match readable {
            true => event(&session, args.seq).await?,
            false => None,
        };
        context.print_json(&Shown {
            seq: args.seq,
            event,
            messages,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut page = String::new();
    for message in &messages {
        page.push_str(&in_words(message));
    }
    page.push_str(&match readable {
        true => event_in_words(&session, args.seq).await?,
        false => {
            "The event is not shown: it takes SELECT on outbox_events (outbox_admin), and no source of your own.\n"
                .into()
        }
    });
    output::print(&page)?;
    Ok(ExitCode::SUCCESS)
}

/// From each table by its own index: outbox has none that begins with seq, so each lane is asked.
async fn messages_of(session: &Session, args: &ShowArgs) -> Result<Vec<Value>, Failure> {
    let sql = "
        select m.seq, m.destination, outbox_partition_label(m.partition::integer) as partition_key, m.partition, m.key, m.status,
               m.attempts, m.crashes, m.available_at, m.enqueued_at, m.ended_at, m.last_error, m.replayed, m.expires_at,
               m.waits, m.blocks, m.claim_token
        from (
          select t.seq, t.destination, t.partition, t.key,
                 case when outbox_claim_is_live(t.claim_token, t.partition, t.claim_until) then 'in flight'
                      when t.attempts > 0 then 'retrying' else 'pending' end as status,
                 t.attempts, t.crashes, t.enqueued_at as available_at, t.enqueued_at, null::timestamptz as ended_at, t.last_error,
                 t.replayed, t.expires_at, null::text as waits, null::boolean as blocks, t.claim_token
          from (with s as materialized (select destination from outbox_destination_status) select * from s) d
          cross join outbox_partitions p
          cross join lateral (select * from outbox o where o.destination = d.destination and o.partition = p.partition and o.seq = $1
                              offset 0) t
          union all
          select t.seq, t.destination, t.partition, t.key,
                 case when t.state = 'b' and t.attempts > 0 then 'retrying'
                      when t.due_at > now() then 'scheduled' else 'pending' end,
                 t.attempts, t.crashes, t.due_at, t.enqueued_at, null, t.last_error, t.replayed, t.expires_at, t.state::text, null, null
          from outbox_waiting t where t.seq = $1
          union all
          select t.seq, t.destination, t.partition, t.key, 'dead', t.attempts, null, null, t.enqueued_at, t.died_at, t.reason,
                 t.replayed, t.expires_at, null, t.blocks, null
          from outbox_dead t where t.seq = $1
          union all
          select t.seq, t.destination, t.partition, t.key, case when t.discarded then 'discarded' else 'published' end,
                 t.attempts, null, null, t.enqueued_at, t.published_at, t.last_error, t.replayed, null, null, null, null
          from outbox_history t where t.seq = $1
        ) m where $2::text is null or m.destination = $2 order by m.destination, m.ended_at nulls last";
    session.rows(sql, &[&args.seq, &args.destination]).await
}

async fn why(session: &Session, message: &Value) -> Result<Vec<Reason>, Failure> {
    if matches!(text(message, "status"), "published" | "discarded" | "dead") {
        return Ok(reasons(&Facts {
            message,
            standby: false,
            problems: &[],
            destination: &Value::Null,
            partition: &Value::Null,
            ahead: &Value::Null,
            transaction: &Value::Null,
        }));
    }
    let seq = message["seq"].as_i64().unwrap_or_default();
    let destination = text(message, "destination");
    let partition = message["partition"]
        .as_i64()
        .and_then(|partition| i16::try_from(partition).ok());
    let key = message["key"].as_str();
    // What is wrong with one destination stands in its own row; but for a broker only health knows the remedy.
    let problems = session
        .rows(
            r#"select h."check", h.problem, h.remedy from outbox_health h
               where not h.ok and (h."check" in ('preload', 'enabled', 'identity', 'role', 'workers', 'source')
                 or h."check" = 'broker' and case when $1 = 'default' then h.problem not like 'destination %: %'
                                             else starts_with(h.problem, format('destination %I: ', $1)) end)"#,
            &[&destination],
        )
        .await?;
    let destinations = session
        .rows(
            "select state, reason, detail, extract(epoch from oldest_pending_age)::float8 as oldest_pending_age_s
             from outbox_destination_status where destination = $1",
            &[&destination],
        )
        .await?;
    let partitions = session
        .rows(
            "select p.lease_owner, p.first_waiting_seq, s.leasing from outbox_partition_status p, outbox_settings s
             where p.partition_key = outbox_partition_label($1::integer)",
            &[&partition.map(i32::from)],
        )
        .await?;
    // In the order in which they hold up what is behind them. A lane has no index by key: only its start is looked through.
    let ahead = session
        .rows(
            "(select h.seq, h.status, h.last_error, h.available_at, true as whole
              from outbox_closed_lanes() l cross join lateral (
                select d.seq, 'dead' as status, d.reason as last_error, null::timestamptz as available_at
                from outbox_dead d where d.seq = l.head and d.destination = l.destination
                union all
                select w.seq, 'retrying', w.last_error, w.due_at
                from outbox_waiting w where w.seq = l.head and w.destination = l.destination) h
              where l.destination = $1 and l.partition = $2 and l.head < $4)
             union all
             (select d.seq, 'dead' as status, d.reason as last_error, null::timestamptz as available_at, false from outbox_dead d
              where d.partition = $2 and d.destination = $1 and d.key = $3 and d.blocks order by d.seq limit 1)
             union all
             (select w.seq, 'retrying', w.last_error, w.due_at, false from outbox_waiting w
              where w.due_at is not null and w.state = 'b' and w.attempts > 0 and w.partition = $2 and w.destination = $1
                and w.key = $3 and (w.seq < $4 or ($5 and w.seq <> $4)) order by w.seq limit 1)
             union all
             (select o.seq, 'pending', o.last_error, null, false
              from (select * from outbox x where x.destination = $1 and x.partition = $2 order by x.seq limit 10000) o
              where o.seq < $4 and o.key = $3 order by o.seq limit 1)
             limit 1",
            // What was put behind another may be behind a later one: that was replayed, or came back by hand.
            &[&destination, &partition, &key, &seq, &(text(message, "waits") == "g")],
        )
        .await?;
    let transactions = session
        .rows(
            "select t.pid, t.xid::text, extract(epoch from t.age)::float8 as age_s from outbox_open_transactions() t
             where t.low <= $1 and t.age > interval '1 second' order by t.age desc limit 1",
            &[&seq],
        )
        .await?;
    let standby = session.rows("select pg_is_in_recovery() as standby", &[]).await?[0]["standby"] == true;
    let first = |rows: Vec<Value>| rows.into_iter().next().unwrap_or_default();
    Ok(reasons(&Facts {
        message,
        standby,
        problems: &problems,
        destination: &first(destinations),
        partition: &first(partitions),
        ahead: &first(ahead),
        transaction: &first(transactions),
    }))
}

/// Those that failed; what was published at once has none.
async fn attempts(session: &Session, message: &Value) -> Result<Vec<Value>, Failure> {
    let sql = "select attempt, at, outcome, error, worker_id from outbox_attempts
               where seq = $1 and destination = $2 order by at, attempt";
    session
        .rows(sql, &[&message["seq"].as_i64(), &text(message, "destination")])
        .await
}

async fn event(session: &Session, seq: i64) -> Result<Option<Box<RawValue>>, Failure> {
    let sql = "select row_to_json(x)::text from (
                 select e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation, e.payload, e.previous_payload, e.metadata,
                        e.headers, e.actor, e.correlation_id, e.created_at
                 from outbox_events e where e.seq = $1) x";
    let row = session.until_done(session.client.query_opt(sql, &[&seq])).await?;
    Ok(row.and_then(|row| RawValue::from_string(row.get(0)).ok()))
}

fn line(page: &mut String, name: &str, value: &str) {
    if !value.is_empty() {
        writeln!(page, "  {name:<14} {}", output::clean(value)).expect("write to a string");
    }
}

fn in_words(message: &Message) -> String {
    let row = Value::Object(message.row.clone());
    let row = &row;
    let status = text(row, "status");
    let coloured = list::status_colour(status).map_or(status.to_owned(), |colour| paint(status, colour));
    let mut page = format!(
        "{}\n",
        paint(
            &output::clean(&format!("Message {} to {}", row["seq"], text(row, "destination"))),
            Colour::Bold
        )
    );
    writeln!(page, "  {:<14} {coloured}", "status").expect("write to a string");
    let ended = match status {
        "published" => "published",
        "dead" => "given up",
        _ => "discarded",
    };
    line(&mut page, "key", text(row, "key"));
    line(&mut page, "partition", text(row, "partition_key"));
    line(&mut page, "attempts", &row["attempts"].to_string());
    if row["crashes"].as_i64().is_some_and(|crashes| crashes > 0) {
        line(&mut page, "crashes", &row["crashes"].to_string());
    }
    line(&mut page, "enqueued", &time(row, "enqueued_at"));
    if !text(row, "waits").is_empty() {
        line(&mut page, "due", &time(row, "available_at"));
    }
    line(&mut page, ended, &time(row, "ended_at"));
    line(&mut page, "expires", &time(row, "expires_at"));
    line(&mut page, "replayed", if row["replayed"] == true { "yes" } else { "" });
    line(&mut page, "last error", text(row, "last_error"));
    if !message.why.is_empty() {
        writeln!(page, "{}", paint("Why it does not move", Colour::Bold)).expect("write to a string");
        for reason in &message.why {
            writeln!(page, "  {}", output::clean(&reason.why)).expect("write to a string");
            if let Some(remedy) = &reason.remedy {
                writeln!(page, "    remedy: {}", output::clean(remedy)).expect("write to a string");
            }
        }
    }
    if !message.failed_attempts.is_empty() {
        writeln!(page, "{}", paint("Failed attempts", Colour::Bold)).expect("write to a string");
        let mut table = Table::new(&[">ATTEMPT", "AT", "OUTCOME", "WORKER", "ERROR"]);
        for attempt in &message.failed_attempts {
            table.row([
                attempt["attempt"].to_string().into(),
                time(attempt, "at").into(),
                Cell::from(text(attempt, "outcome")),
                text(attempt, "worker_id").into(),
                text(attempt, "error").into(),
            ]);
        }
        table.render().lines().for_each(|line| _ = writeln!(page, "  {line}"));
    }
    page
}

async fn event_in_words(session: &Session, seq: i64) -> Result<String, Failure> {
    // Numbers as they are stored, so the server writes the JSON.
    let sql =
        "select e.id, e.type, e.aggregate_type, e.aggregate_id, e.operation, e.actor, e.correlation_id, e.created_at,
                      jsonb_pretty(e.headers) as headers, jsonb_pretty(e.metadata) as metadata,
                      jsonb_pretty(e.payload) as payload, jsonb_pretty(e.previous_payload) as previous_payload
               from outbox_events e where e.seq = $1";
    let mut page = format!("{}\n", paint("Event", Colour::Bold));
    let Some(event) = session.rows(sql, &[&seq]).await?.into_iter().next() else {
        page.push_str("  There is none of this seq: it was removed, or never stored.\n");
        return Ok(page);
    };
    for (name, column) in [
        ("id", "id"),
        ("type", "type"),
        ("aggregate type", "aggregate_type"),
        ("aggregate id", "aggregate_id"),
        ("operation", "operation"),
        ("actor", "actor"),
        ("correlation id", "correlation_id"),
    ] {
        line(&mut page, name, text(&event, column));
    }
    line(&mut page, "created", &time(&event, "created_at"));
    for name in ["headers", "metadata", "payload", "previous_payload"] {
        let pretty = output::clean_lines(text(&event, name));
        if !pretty.is_empty() {
            writeln!(page, "  {name}").expect("write to a string");
            pretty.lines().for_each(|line| _ = writeln!(page, "    {line}"));
        }
    }
    Ok(page)
}
