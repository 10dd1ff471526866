//! `outboxctl retry`, `discard` and `replay`: actions on messages. With criteria the program counts the messages first.
//! On a terminal it asks for confirmation; a script passes --yes. It never changes more messages than it counted.

use super::{CommandContext, exit_code, text};
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::format::{capitalised, counted};
use crate::messages::bulk::{BulkCriteria, Choice, Verb};
use crate::messages::page::SearchRequest;
use crate::messages::{Filter, When};
use crate::operation::{OperatorAction, run};
use crate::output;
use crate::queries::state::MessageStatus;
use crate::screen::text::harmless;
use clap::Args;
use outbox_core::words::Word;
use serde_json::json;
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write, stderr, stdin};
use std::process::ExitCode;
use tokio_postgres::error::SqlState;

/// Which dead letters or waiting messages to act on.
#[derive(Args)]
pub struct DeadArgs {
    /// Seqs of messages; if none is given, all dead letters that match the options
    #[arg(value_name = "SEQ")]
    seqs: Vec<i64>,
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    consent: Consent,
}

/// Which messages to try again.
#[derive(Args)]
pub struct RetryArgs {
    #[command(flatten)]
    dead: DeadArgs,
    /// The messages that wait for their next attempt, instead of dead letters
    #[arg(long, conflicts_with_all = ["seqs", "since", "until", "attempts_below"])]
    retrying: bool,
}

/// Which messages to send again.
#[derive(Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    criteria: BulkCriteria,
    #[command(flatten)]
    limit: LimitArgs,
    /// Only events created since this time: a time, or an age (90s, 15m, 2h, 7d)
    #[arg(long, value_name = "WHEN")]
    since: Option<When>,
    /// Only events created before this time
    #[arg(long, value_name = "WHEN")]
    until: Option<When>,
    /// Only messages that were published to this destination
    #[arg(long, value_name = "DESTINATION")]
    source_destination: Option<String>,
    /// Send them to this destination instead of the original one
    #[arg(long = "to-destination", value_name = "DESTINATION")]
    to_destination: Option<String>,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Args)]
struct LimitArgs {
    /// At most this many messages, the lowest seqs first
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(i32).range(1..), conflicts_with = "no_max")]
    max: i32,
    /// No limit on the number of messages
    #[arg(long)]
    no_max: bool,
}

#[derive(Args)]
struct Consent {
    /// The reason, recorded in the audit log
    #[arg(long)]
    reason: Option<String>,
    /// Only show the number of messages
    #[arg(long)]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(short = 'y', long)]
    yes: bool,
}

impl LimitArgs {
    fn rows(&self) -> Option<i32> {
        Some(self.max).filter(|_| !self.no_max)
    }
}

pub async fn retry(context: &CommandContext, args: &RetryArgs) -> Result<ExitCode, Failure> {
    if !args.retrying {
        return dead(context, Verb::Retry, &args.dead).await;
    }
    if args.dead.choice == Choice::default() {
        let all = Failure::new(Code::Refused, "no criterion is given: this would be every message");
        return Err(all.hint("For all of them use --from 1."));
    }
    let session = context.actor().await?;
    let found = retrying(&session, &args.dead.choice, args.dead.limit.rows()).await?;
    let found = found.into_iter().map(|(seq, destination)| (seq, Ok(destination)));
    act_on_each(context, &session, Verb::Retry, found.collect(), &args.dead).await
}

/// Runs `retry` or `discard`, for seqs or by criteria.
pub async fn dead(context: &CommandContext, verb: Verb, args: &DeadArgs) -> Result<ExitCode, Failure> {
    let mut choice = args.choice.clone();
    if args.seqs.is_empty() {
        choice.max_rows = args.limit.rows();
        return act_on_counted(context, verb, ("dead letter", "dead letters"), choice, &args.consent).await;
    }
    choice.destination = None;
    if choice != Choice::default() {
        return Err(Failure::new(Code::Usage, "give either seqs or criteria, not both"));
    }
    let session = context.actor().await?;
    let named = args.choice.destination.as_deref();
    let mut found = Vec::new();
    for seq in &args.seqs {
        found.push((*seq, destination_of(&session, *seq, named).await?));
    }
    act_on_each(context, &session, verb, found, args).await
}

/// Seq and destination of the messages that wait for their next attempt, the lowest seqs first.
async fn retrying(session: &Session, choice: &Choice, max_rows: Option<i32>) -> Result<Vec<(i64, String)>, Failure> {
    let criteria = choice.criteria.clone();
    let filter = Filter {
        destination: choice.destination.clone(),
        key: criteria.key,
        event_type: criteria.event_type,
        aggregate_type: criteria.aggregate_type,
        aggregate_id: criteria.aggregate_id,
        error_like: choice.error_like.clone(),
        ..Filter::default()
    };
    let request = SearchRequest {
        statuses: &[MessageStatus::Retrying],
        filter: &filter,
        span_s: None,
        by_delivery: false,
        descending: false,
        after: &Vec::from_iter(criteria.seq_from.map(|from| from.saturating_sub(1).to_string())),
        page_rows: max_rows.unwrap_or(i32::MAX),
        read_max: None,
    };
    let rows = request.run(session).await?.rows;
    let messages = rows.iter().map(|row| {
        let destination = row.text("destination").unwrap_or_default();
        (row.number("seq"), destination.to_owned())
    });
    let mut found: Vec<_> = messages
        .filter(|(seq, _)| criteria.seq_to.is_none_or(|to| *seq <= to))
        .collect();
    found.truncate(max_rows.map_or(usize::MAX, |rows| rows as usize)); // the last seq may have several
    Ok(found)
}

pub async fn replay(context: &CommandContext, args: &ReplayArgs) -> Result<ExitCode, Failure> {
    let choice = Choice {
        since: args.since.clone(),
        until: args.until.clone(),
        destination: args.source_destination.clone(),
        to_destination: args.to_destination.clone(),
        criteria: args.criteria.clone(),
        max_rows: args.limit.rows(),
        ..Choice::default()
    };
    act_on_counted(context, Verb::Replay, ("message", "messages"), choice, &args.consent).await
}

/// Counts the messages, asks for confirmation, and acts on no more than were counted.
async fn act_on_counted(
    context: &CommandContext,
    verb: Verb,
    nouns: (&str, &str),
    mut choice: Choice,
    consent: &Consent,
) -> Result<ExitCode, Failure> {
    let session = context.actor().await?;
    let matched = run(&session, &choice.call(verb, None, true)).await?;
    let what = counted(matched, nouns.0, nouns.1);
    let is_done = !consent.dry_run && matched > 0;
    let mut done = 0;
    if is_done {
        let question = format!("{} {what}?", capitalised(verb.name()));
        consent.confirm(&question).await?;
        // A message that arrived after the count was not part of the question.
        choice.max_rows = i32::try_from(matched).ok().or(choice.max_rows);
        let call = choice.call(verb, consent.reason.as_deref(), false);
        done = run(&session, &call).await?;
    }
    let (action, dry_run) = (verb.name(), consent.dry_run);
    match context.json {
        true => {
            context.print_json(&json!({ "action": action, "matched": matched, "done": done, "dry_run": dry_run }))?;
        }
        false if is_done => output::print(&format!("{}: {}.\n", verb.past(), counted(done, nouns.0, nouns.1)))?,
        false => output::print(&format!("{what} matched; nothing is changed.\n"))?,
    }
    if verb == Verb::Retry && matched == 0 && !context.json && !choice.is_about_death() {
        let waiting = retrying(&session, &choice, choice.max_rows).await?.len() as i64;
        if waiting > 0 {
            let messages = counted(waiting, "message is", "messages are");
            output::log(&format!("{messages} retrying: add --retrying for another attempt now"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Consent {
    /// Asks for confirmation, unless --yes was given. Without a terminal to ask on, the action is refused.
    async fn confirm(&self, question: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !stdin().is_terminal() || !stderr().is_terminal() {
            let message = format!("{question} There is no terminal to confirm on; nothing is changed.");
            return Err(Failure::new(Code::Refused, message).hint("Add --yes, or check first with --dry-run."));
        }
        eprint!("{question} [y/N] ");
        let _ = stderr().flush();
        let answer = tokio::task::spawn_blocking(|| {
            let mut answer = String::new();
            stdin().read_line(&mut answer).map(|_| answer.trim().to_lowercase())
        });
        let answer = tokio::select! {
            answer = answer => answer,
            // Ctrl-C no longer ends the process: tokio has handled its signal since the first statement. The read of
            // standard input cannot be cancelled, so the process exits here.
            _ = tokio::signal::ctrl_c() => {
                eprintln!("\noutboxctl: {NOT_CONFIRMED}");
                std::process::exit(i32::from(Code::Refused as u8));
            }
        };
        match answer {
            Ok(Ok(answer)) if answer == "y" || answer == "yes" => Ok(()),
            _ => Err(Failure::new(Code::Refused, NOT_CONFIRMED)),
        }
    }
}

const NOT_CONFIRMED: &str = "not confirmed; nothing is changed";

// ---- one by one -----------------------------------------------------------------------------------------------------

/// Acts on each message at its destination. Without one there is the reason why not.
async fn act_on_each(
    context: &CommandContext,
    session: &Session,
    verb: Verb,
    found: Vec<(i64, Result<String, String>)>,
    args: &DeadArgs,
) -> Result<ExitCode, Failure> {
    let Consent { dry_run, reason, .. } = &args.consent;
    let named = args.choice.destination.as_deref();
    let matched = found.iter().filter(|(_, destination)| destination.is_ok()).count();
    let what = counted(matched as i64, "message", "messages");
    if !dry_run && matched > 0 {
        let destinations: BTreeSet<&str> = found.iter().flat_map(|(_, found)| found).map(String::as_str).collect();
        let destinations = Vec::from_iter(destinations).join(" and ");
        let question = format!("{} {what} to {}?", capitalised(verb.name()), harmless(&destinations));
        args.consent.confirm(&question).await?;
    }
    let mut messages = Vec::new();
    let (mut done, mut failed) = (0, 0);
    for (seq, found) in found {
        let (destination, problem) = match found {
            Err(problem) => (named.map(str::to_owned), Some(problem)),
            Ok(destination) if *dry_run => (Some(destination), None),
            Ok(destination) => {
                let action = OperatorAction {
                    verb,
                    seq: Some(seq),
                    destination,
                };
                let problem = act(session, &action, reason.as_deref()).await?;
                done += usize::from(problem.is_none());
                (Some(action.destination), problem)
            }
        };
        if let Some(problem) = &problem {
            failed += 1;
            if !context.json {
                output::log(&format!("message {seq}: {problem}"));
            }
        }
        let is_done = !dry_run && problem.is_none();
        messages.push(json!({ "seq": seq, "destination": destination, "done": is_done, "error": problem }));
    }
    let action = verb.name();
    match context.json {
        true => context.print_json(
            &json!({ "action": action, "matched": matched, "done": done, "dry_run": dry_run, "messages": messages }),
        )?,
        false if *dry_run => output::print(&format!("{what} matched; nothing is changed.\n"))?,
        false => output::print(&format!(
            "{}: {}.\n",
            verb.past(),
            counted(done as i64, "message", "messages")
        ))?,
    }
    Ok(exit_code(failed == 0))
}

/// The destination of the message with this seq: the one that was named, or the only one it has. The inner error is for
/// the user.
async fn destination_of(session: &Session, seq: i64, named: Option<&str>) -> Result<Result<String, String>, Failure> {
    if let Some(named) = named {
        return Ok(Ok(named.to_owned()));
    }
    let sql = "select distinct m.destination from outbox_internal.message_rows($1) m
               where m.status not in ('published', 'discarded') order by 1";
    let found = session.rows(sql, &[&seq]).await?;
    let names: Vec<&str> = found.iter().map(|row| text(row, "destination")).collect();
    Ok(match &names[..] {
        [] => Err("no message with this seq is dead or waiting".into()),
        [only] => Ok((*only).to_owned()),
        _ => Err(format!(
            "it is for {}: choose one with --destination",
            names.join(" and ")
        )),
    })
}

/// Acts on one message. Returns why that was not possible, or `None` on success.
async fn act(session: &Session, action: &OperatorAction, reason: Option<&str>) -> Result<Option<String>, Failure> {
    match run(session, &action.call(reason)).await {
        Ok(0) => Ok(Some(action.verb.obstacle().to_owned())),
        Ok(_) => Ok(None),
        // A message in flight is reported; the other seqs are still acted on.
        Err(failure) if failure.is(&SqlState::OBJECT_IN_USE) => Ok(Some(failure.message)),
        Err(failure) => Err(failure),
    }
}
