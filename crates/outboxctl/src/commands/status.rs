//! `outboxctl status`: the backlog, the workers, the destinations and what is wrong. Its cost does not grow with the
//! queue.

use super::{Context, age, count, text};
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::format;
use crate::output::{self, Cell, Colour, Table, paint};
use crate::queries::model::{Check, Problem};
use crate::queries::state::DestinationState::{self, Missing, NotServed, Reported};
use outbox_core::words::Word;
use outbox_worker::State;
use serde::Deserialize;
use serde_json::{Value, json};
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct StatusArgs {
    /// Exit with code 1 if a health check fails
    #[arg(long)]
    exit_code: bool,
}

pub async fn run(context: &Context, args: &StatusArgs) -> Result<ExitCode, Failure> {
    let session = context.reader().await?;
    let document = document(&session).await?;
    match context.json {
        true => context.print_json(&document)?,
        false => output::print(&in_words(&document))?,
    }
    let is_well = document["problems"].as_array().is_none_or(Vec::is_empty);
    Ok(match args.exit_code && !is_well {
        true => ExitCode::from(Code::SomeFailed as u8),
        false => ExitCode::SUCCESS,
    })
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

fn in_words(document: &Value) -> String {
    let mut page = format!(
        "{}\n\n",
        format::clean(&format!(
            "outbox {} in database {}, PostgreSQL {}{}",
            text(document, "extension"),
            text(document, "database"),
            text(document, "server"),
            if document["standby"] == true {
                ", standby: nothing is delivered from here"
            } else {
                ""
            }
        ))
    );
    let sections = [
        messages(&document["messages"]),
        destinations(&document["destinations"]).render(),
        match workers(&document["workers"]) {
            table if table.is_empty() => "No worker runs in this database.\n".into(),
            table => table.render(),
        },
        problems(&document["problems"]),
    ];
    page.push_str(&sections.join("\n"));
    page
}

fn messages(messages: &Value) -> String {
    let unknown = |count: String| if count.is_empty() { "unknown".into() } else { count };
    let oldest = match age(messages, "oldest_pending_age_s") {
        none if none.is_empty() => String::new(),
        oldest => format!("the oldest deliverable one has waited for {oldest}"),
    };
    // The view counts up to 10,000.
    let dead = match messages["dead"].as_i64() {
        Some(10_000) => "10,000 or more".into(),
        _ => count(messages, "dead"),
    };
    let rate = |name: &str| {
        messages[name]
            .as_f64()
            .map(|rate| format!("{rate:.1}/s in the last minute"))
            .unwrap_or_default()
    };
    let mut table = Table::new(&["MESSAGES", ">COUNT", ""]);
    table.row([
        "pending".into(),
        unknown(count(messages, "pending")).into(),
        oldest.into(),
    ]);
    table.row([
        "in flight".into(),
        unknown(count(messages, "in_flight")).into(),
        "".into(),
    ]);
    let colour = messages["dead"].as_i64().filter(|dead| *dead > 0).map(|_| Colour::Bad);
    table.row(["dead".into(), Cell::coloured(&dead, colour), "".into()]);
    table.row([
        "published".into(),
        unknown(count(messages, "published_total")).into(),
        rate("published_per_s").into(),
    ]);
    table.row([
        "failed attempts".into(),
        unknown(count(messages, "failed_total")).into(),
        rate("failed_per_s").into(),
    ]);
    table.render()
}

/// The colour of a state of a destination or a worker.
fn state_colour(state: &str) -> Option<Colour> {
    match DestinationState::of_name(state) {
        Some(Reported(State::Connected)) => Some(Colour::Good),
        Some(Reported(State::Down | State::Unconfigured | State::NotAdopted) | Missing | NotServed) => {
            Some(Colour::Bad)
        }
        _ => Some(Colour::Careful),
    }
}

fn with_reason(row: &Value) -> String {
    let parts = [text(row, "reason"), text(row, "detail")];
    parts
        .iter()
        .filter(|part| !part.is_empty())
        .copied()
        .collect::<Vec<_>>()
        .join(": ")
}

fn destinations(rows: &Value) -> Table {
    let mut table = Table::new(&[
        "DESTINATION",
        "STATE",
        "FOR",
        ">PENDING",
        ">IN FLIGHT",
        ">PUBLISHED",
        ">FAILED",
        ">P95 MS",
        "DETAIL",
    ]);
    for row in rows.as_array().into_iter().flatten() {
        let state = text(row, "state");
        table.row([
            text(row, "destination").into(),
            Cell::coloured(state, state_colour(state)),
            age(row, "since_s").into(),
            count(row, "pending").into(),
            count(row, "in_flight").into(),
            count(row, "published_total").into(),
            count(row, "failed_total").into(),
            row["p95_ms"]
                .as_f64()
                .map(|ms| format!("{ms:.1}"))
                .unwrap_or_default()
                .into(),
            with_reason(row).into(),
        ]);
    }
    table
}

fn workers(rows: &Value) -> Table {
    let mut table = Table::new(&[
        "WORKER",
        ">PID",
        "STATE",
        ">PARTITIONS",
        "HEARTBEAT TTL",
        "UP FOR",
        "DETAIL",
    ]);
    for row in rows.as_array().into_iter().flatten() {
        let alive = row["alive"] == true;
        let state = if alive { text(row, "state") } else { "ended" };
        table.row([
            text(row, "worker_id").into(),
            row["pid"]
                .as_i64()
                .map(|pid| pid.to_string())
                .unwrap_or_default()
                .into(),
            Cell::coloured(state, state_colour(state)),
            count(row, "partitions").into(),
            if alive {
                age(row, "heartbeat_ttl_s")
            } else {
                String::new()
            }
            .into(),
            if alive { age(row, "uptime_s") } else { String::new() }.into(),
            with_reason(row).into(),
        ]);
    }
    table
}

fn problems(rows: &Value) -> String {
    let checks: Vec<Check> = Vec::deserialize(rows).unwrap_or_default();
    if checks.is_empty() {
        return format!("{}\n", paint("No known problems.", Colour::Good));
    }
    let mut page = format!("{}\n", paint("PROBLEMS", Colour::Bold));
    for problem in Problem::of(&checks) {
        let title = paint(&format::clean(&problem.title()), Colour::Bad);
        page.push_str(&format!("{title}: {}\n", format::clean(&problem.problem)));
        if !problem.remedy.is_empty() {
            page.push_str(&format!("  Fix: {}\n", format::clean(&problem.remedy)));
        }
    }
    page
}
