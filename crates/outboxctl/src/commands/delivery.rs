//! `outboxctl pause`, `resume` and `relay`: stops and resumes delivery, and delivers by hand.

use super::{CommandContext, exit_code, text};
use crate::connect::Session;
use crate::failure::Failure;
use crate::format::{self, counted};
use crate::messages::bulk::Verb;
use crate::operation::{OperatorAction, run};
use crate::output;
use clap::Args;
use outbox_core::words::Word;
use ratatui::text::Line;
use serde_json::{Value, json};
use std::process::ExitCode;

#[derive(Args)]
pub struct PauseArgs {
    /// Destination
    #[arg(default_value = "default")]
    destination: String,
    /// The reason, recorded in the audit log; that of a pause is shown in the status
    #[arg(long)]
    reason: Option<String>,
}

#[derive(Args)]
pub struct RelayArgs {
    /// The most messages to deliver
    #[arg(short = 'l', long, default_value_t = 100, value_parser = clap::value_parser!(i32).range(1..=10_000))]
    limit: i32,
    /// How long to wait for them
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(i32).range(1..=3600))]
    timeout: i32,
}

/// Runs `pause` or `resume`.
pub async fn switch(context: &CommandContext, verb: Verb, args: &PauseArgs) -> Result<ExitCode, Failure> {
    let session = context.actor().await?;
    let destination = args.destination.clone();
    let action = OperatorAction {
        verb,
        seq: None,
        destination,
    };
    let changed = run(&session, &action.call(args.reason.as_deref())).await? > 0;
    match context.json {
        true => context
            .print_json(&json!({ "action": verb.name(), "destination": args.destination, "changed": changed }))?,
        false => output::print_lines([Line::raw(action.outcome(changed))])?,
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn relay(context: &CommandContext, args: &RelayArgs) -> Result<ExitCode, Failure> {
    let session = context.actor().await?;
    let began = session.rows("select clock_timestamp()::text as at", &[]).await?;
    let rows = session
        .rows(
            "select messages, published, failed, dead, waiting, ok from @extschema@.outbox_relay($1::integer, make_interval(secs => $2::integer::float8))",
            &[&args.limit, &args.timeout],
        )
        .await?;
    let relayed = &rows[0];
    let ok = relayed["ok"] == true;
    let failures = match ok {
        true => Vec::new(),
        false => failures(&session, text(&began[0], "at")).await?,
    };
    if context.json {
        let mut document = relayed.clone();
        document["failures"] = failures.into();
        context.print_json(&document)?;
    } else {
        for failure in &failures {
            let (destination, error) = (text(failure, "destination"), text(failure, "error"));
            output::log(&format!("message {} to {destination}: {error}", failure["seq"]));
        }
        output::print(&in_words(relayed))?;
    }
    Ok(exit_code(ok))
}

fn in_words(relayed: &Value) -> String {
    let number = |name: &str| relayed[name].as_i64().unwrap_or_default();
    let mut words = format!(
        "{} of {} published",
        number("published"),
        counted(number("messages"), "message", "messages")
    );
    for (name, what) in [
        ("failed", "failed and will be retried"),
        ("dead", "given up"),
        (
            "waiting",
            "not tried: they wait behind a failed message, for an open transaction, or for a destination that is down",
        ),
    ] {
        if number(name) > 0 {
            words.push_str(&format!("; {} {what}", format::grouped(number(name))));
        }
    }
    words + ".\n"
}

/// The failures since that time. Empty if this role cannot read the tables, such as a role that may only relay.
async fn failures(session: &Session, since: &str) -> Result<Vec<Value>, Failure> {
    let may = "select has_table_privilege('@extschema@.outbox_attempts', 'select')
                 and has_table_privilege('@extschema@.outbox_dead', 'select') as readable";
    if session.rows(may, &[]).await?[0]["readable"] != true {
        return Ok(Vec::new());
    }
    // An expired message becomes a dead letter without an attempt.
    let sql = "select a.seq, a.destination, a.error from @extschema@.outbox_attempts a where a.at >= ($1::text)::timestamptz
               union all
               select d.seq, d.destination, d.reason from @extschema@.outbox_dead d
               where d.died_at >= ($1::text)::timestamptz
                 and not exists (select from @extschema@.outbox_attempts a where a.seq = d.seq and a.destination = d.destination)
               order by 1, 2 limit 1000";
    session.rows(sql, &[&since]).await
}
