//! `outboxctl status`: the backlog, the workers, the destinations and what is wrong. Its cost does not grow with the
//! queue.

use super::{CommandContext, age, cell, count, exit_code, number, text};
use crate::connect::Session;
use crate::failure::Failure;
use crate::output::{self, Table};
use crate::queries::model::{Check, Problem};
use crate::queries::state::DestinationState;
use crate::screen::theme;
use outbox_core::words::Word;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use serde::Deserialize;
use serde_json::{Value, json};
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct StatusArgs {
    /// Exit with code 1 if a health check fails
    #[arg(long)]
    exit_code: bool,
}

pub async fn run(context: &CommandContext, args: &StatusArgs) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    let document = document(&session).await?;
    match context.json {
        true => context.print_json(&document)?,
        false => output::print_lines(in_words(&document))?,
    }
    let is_well = document["problems"].as_array().is_none_or(Vec::is_empty);
    Ok(exit_code(is_well || !args.exit_code))
}

async fn document(session: &Session) -> Result<Value, Failure> {
    let standby = "select pg_is_in_recovery() as standby";
    let messages =
        "select pending, in_flight, dead, extract(epoch from oldest_pending_age)::float8 as oldest_pending_age_s,
                           published_total, failed_total, published_per_s, failed_per_s, stats_reset
                    from outbox_status";
    let destinations = "select destination, described_by, state, since,
                               extract(epoch from clock_timestamp() - since)::float8 as since_s, reason, detail, pending,
                               max_pending, in_flight, extract(epoch from oldest_pending_age)::float8 as oldest_pending_age_s,
                               published_total, failed_total, dead_total, released_total, published_per_s, p50_ms, p95_ms,
                               p99_ms, stats_reset
                        from outbox_destination_status";
    let workers = "select worker_id, pid, state, reason, detail, alive, extract(epoch from heartbeat_ttl)::float8 as heartbeat_ttl_s,
                          partitions, started_at, extract(epoch from clock_timestamp() - started_at)::float8 as uptime_s,
                          destinations, destinations_down
                   from outbox_worker_status order by worker_id";
    let problems = r#"select "check", destination, ok, problem, remedy from outbox_health where not ok"#;
    let extension = session.extension.as_ref();
    Ok(json!({
        "database": session.database,
        "server": session.server_version,
        "extension": extension.map(|extension| &extension.version),
        "standby": session.rows(standby, &[]).await?[0]["standby"],
        "messages": session.rows(messages, &[]).await?.into_iter().next(),
        "destinations": session.rows(destinations, &[]).await?,
        "workers": session.rows(workers, &[]).await?,
        "problems": session.rows(problems, &[]).await?,
    }))
}

fn in_words(document: &Value) -> Vec<Line<'static>> {
    let mut lines = vec![Line::raw(format!(
        "outbox {} in database {}, PostgreSQL {}{}",
        text(document, "extension"),
        text(document, "database"),
        text(document, "server"),
        match document["standby"] == true {
            true => ", standby: nothing is delivered from here",
            false => "",
        }
    ))];
    let rows = |part: &str| document[part].as_array().map_or(&[][..], Vec::as_slice);
    let workers = match rows("workers") {
        [] => vec![Line::raw("No worker runs in this database.")],
        rows => workers(rows).lines(),
    };
    let sections = [
        messages(&document["messages"]).lines(),
        destinations(rows("destinations")).lines(),
        workers,
        problems(&document["problems"]),
    ];
    for section in sections.into_iter().filter(|section| !section.is_empty()) {
        lines.push(Line::default());
        lines.extend(section);
    }
    lines
}

fn messages(messages: &Value) -> Table {
    let total = |name: &str| match count(messages, name) {
        none if none.is_empty() => "unknown".into(),
        count => count,
    };
    // The view counts up to 10,000.
    let dead = match messages["dead"].as_i64() {
        Some(10_000) => "10,000 or more".into(),
        _ => count(messages, "dead"),
    };
    let style = if messages["dead"].as_i64() > Some(0) {
        theme::BAD
    } else {
        Style::new()
    };
    let rate = |name: &str| {
        let rate = messages[name]
            .as_f64()
            .map(|rate| format!("{rate:.1}/s in the last minute"));
        rate.unwrap_or_default()
    };
    let oldest = match age(messages, "oldest_pending_age_s") {
        none if none.is_empty() => none,
        oldest => format!("the oldest deliverable one has waited for {oldest}"),
    };
    let rows: [[Span; 3]; 5] = [
        ["pending".into(), total("pending").into(), oldest.into()],
        ["in flight".into(), total("in_flight").into(), "".into()],
        ["dead".into(), Span::styled(dead, style), "".into()],
        [
            "published".into(),
            total("published_total").into(),
            rate("published_per_s").into(),
        ],
        [
            "failed attempts".into(),
            total("failed_total").into(),
            rate("failed_per_s").into(),
        ],
    ];
    let [name, number, remark] = [0, 1, 2].map(|n| move |row: &[Span<'static>; 3]| row[n].clone());
    Table::of(&rows, &[("MESSAGES", &name), (">COUNT", &number), ("", &remark)])
}

fn state(state: String) -> Span<'static> {
    let style = theme::state(DestinationState::of_name(&state));
    Span::styled(state, style)
}

fn reason(row: &Value) -> Span<'static> {
    match (text(row, "reason"), text(row, "detail")) {
        (reason, detail) if detail.is_empty() => reason.into(),
        (reason, detail) if reason.is_empty() => detail.into(),
        (reason, detail) => format!("{reason}: {detail}").into(),
    }
}

fn destinations(rows: &[Value]) -> Table {
    let p95 = |row: &Value| row["p95_ms"].as_f64().map(|ms| format!("{ms:.1}")).unwrap_or_default();
    let columns: &[(_, &dyn Fn(&Value) -> Span<'static>)] = &[
        ("DESTINATION", &cell(text, "destination")),
        ("STATE", &|row| state(text(row, "state"))),
        ("FOR", &cell(age, "since_s")),
        (">PENDING", &cell(count, "pending")),
        (">IN FLIGHT", &cell(count, "in_flight")),
        (">PUBLISHED", &cell(count, "published_total")),
        (">FAILED", &cell(count, "failed_total")),
        (">P95 MS", &|row| p95(row).into()),
        ("DETAIL", &reason),
    ];
    Table::of(rows, columns)
}

fn workers(rows: &[Value]) -> Table {
    let of_alive = |name: &'static str| {
        move |row: &Value| {
            if row["alive"] == true {
                age(row, name).into()
            } else {
                "".into()
            }
        }
    };
    let columns: &[(_, &dyn Fn(&Value) -> Span<'static>)] = &[
        ("WORKER", &cell(text, "worker_id")),
        (">PID", &cell(number, "pid")),
        ("STATE", &|row| match row["alive"] == true {
            true => state(text(row, "state")),
            false => Span::styled("ended", theme::BAD),
        }),
        (">PARTITIONS", &cell(count, "partitions")),
        ("HEARTBEAT TTL", &of_alive("heartbeat_ttl_s")),
        ("UP FOR", &of_alive("uptime_s")),
        ("DETAIL", &reason),
    ];
    Table::of(rows, columns)
}

fn problems(rows: &Value) -> Vec<Line<'static>> {
    let checks: Vec<Check> = Vec::deserialize(rows).unwrap_or_default();
    if checks.is_empty() {
        return vec![Line::styled("No known problems.", theme::GOOD)];
    }
    let mut lines = vec![Line::styled("PROBLEMS", theme::STRONG)];
    for problem in Problem::of(&checks) {
        let title = Span::styled(problem.title(), theme::BAD);
        lines.push(Line::from(vec![title, format!(": {}", problem.problem).into()]));
        if !problem.remedy.is_empty() {
            lines.push(Line::raw(format!("  Fix: {}", problem.remedy)));
        }
    }
    lines
}
