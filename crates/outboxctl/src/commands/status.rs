//! `outboxctl status`: the backlog, the workers, the destinations and what is wrong. Its cost does not grow with the
//! queue.

use super::{CommandContext, exit_code};
use crate::board;
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::output;
use crate::queries::model::Snapshot;
use crate::queries::snapshot;
use crate::screen::{text, theme};
use ratatui::text::{Line, Span};
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
    let is_well = match context.json {
        true => {
            let document = document(&session).await?;
            context.print_json(&document)?;
            document["problems"].as_array().is_none_or(Vec::is_empty)
        }
        false => {
            let snapshot = snapshot::read(&session).await?;
            output::print_lines(in_words(&session, &snapshot)?)?;
            snapshot.problems.is_ok_and(|problems| problems.is_empty())
        }
    };
    Ok(exit_code(is_well || !args.exit_code))
}

async fn document(session: &Session) -> Result<Value, Failure> {
    let standby = "select pg_is_in_recovery() as standby";
    let messages =
        "select pending, in_flight, dead, extract(epoch from oldest_pending_age)::float8 as oldest_pending_age_s,
                           published_total, failed_total, published_per_s, failed_per_s, stats_reset, p95_ms
                    from @extschema@.outbox_status";
    let destinations = "select destination, described_by, state, since,
                               extract(epoch from clock_timestamp() - since)::float8 as since_s, reason, detail, pending,
                               max_pending, in_flight, extract(epoch from oldest_pending_age)::float8 as oldest_pending_age_s,
                               published_total, failed_total, dead_total, released_total, published_per_s, p50_ms, p95_ms,
                               p99_ms, stats_reset
                        from @extschema@.outbox_destination_status";
    let workers = "select worker_id, pid, state, reason, detail, alive, extract(epoch from heartbeat_ttl)::float8 as heartbeat_ttl_s,
                          hangs, partitions, started_at, extract(epoch from clock_timestamp() - started_at)::float8 as uptime_s,
                          destinations, destinations_down
                   from @extschema@.outbox_worker_status order by worker_id";
    let problems = r#"select "check", destination, ok, code, args, since, problem, remedy, coalesce(commands, '[]') as commands
                      from @extschema@.outbox_health where not ok"#;
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

fn in_words(session: &Session, snapshot: &Snapshot) -> Result<Vec<Line<'static>>, Failure> {
    let refused = |why: &String| Failure::new(Code::Refused, why);
    let status = snapshot.status.as_ref().map_err(refused)?;
    let problems = snapshot.problems.as_ref().map_err(refused)?;
    let (database, server) = (&session.database, &session.server_version);
    let version = session.extension.as_ref().map_or("", |extension| &extension.version);
    let standby = match snapshot.now.is_standby {
        true => ", standby: nothing is delivered from here",
        false => "",
    };
    let mut lines = vec![
        Line::raw(format!(
            "outbox {version} in database {database}, PostgreSQL {server}{standby}"
        )),
        Line::default(),
    ];
    lines.extend(board::report(snapshot, status, output::room()));
    lines.push(Line::default());
    if problems.is_empty() {
        lines.push(Line::styled("No known problems.", theme::GOOD));
    }
    for problem in problems {
        let mut said = text::wrapped(&format!("{}: {}", problem.title(), problem.problem), output::room());
        if let Some(rest) = said[0].strip_prefix(&problem.title()) {
            let title = Span::styled(problem.title(), theme::BAD);
            lines.push(Line::from(vec![title, rest.to_owned().into()]));
            said.remove(0);
        }
        if !problem.remedy.is_empty() {
            said.extend(text::wrapped(&format!("  Fix: {}", problem.remedy), output::room()));
        }
        lines.extend(said.into_iter().map(Line::raw));
    }
    Ok(lines)
}
