//! `outboxctl retry`, `discard` and `replay`: actions on messages. With criteria the program counts the messages first.
//! On a terminal it asks for confirmation; a script passes --yes. It never changes more messages than it counted.

use super::{CommandContext, exit_code, text};
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::format::{capitalised, counted};
use crate::messages::When;
use crate::messages::bulk::{Arguments, BulkCriteria, Choice, Verb, run};
use crate::operation::{ActionVerb, OperatorAction};
use crate::output;
use crate::screen::text::harmless;
use clap::Args;
use outbox_core::words::Word;
use serde_json::json;
use std::io::{BufRead, IsTerminal, Write, stderr, stdin};
use std::process::ExitCode;
use tokio_postgres::error::SqlState;

/// Which dead letters or waiting messages to act on.
#[derive(Args)]
pub struct DeadArgs {
    /// Seqs of messages; if none is given, all dead letters that match the options
    #[arg(value_name = "SEQ")]
    seqs: Vec<i64>,
    /// Only messages to this destination
    #[arg(long)]
    destination: Option<String>,
    #[command(flatten)]
    criteria: BulkCriteria,
    #[command(flatten)]
    limit: Limit,
    /// Only with an error LIKE this
    #[arg(long, value_name = "PATTERN", conflicts_with = "seqs")]
    error_like: Option<String>,
    /// Only with fewer attempts than this
    #[arg(long, value_name = "N", conflicts_with = "seqs")]
    attempts_below: Option<i32>,
    /// Only those that became dead letters since this time: a time, or an age (90s, 15m, 2h, 7d)
    #[arg(long, value_name = "WHEN", conflicts_with = "seqs")]
    since: Option<When>,
    /// Only those that became dead letters before this time
    #[arg(long, value_name = "WHEN", conflicts_with = "seqs")]
    until: Option<When>,
    #[command(flatten)]
    consent: Consent,
}

/// Which messages to send again.
#[derive(Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    criteria: BulkCriteria,
    #[command(flatten)]
    limit: Limit,
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
struct Limit {
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

impl Limit {
    fn rows(&self) -> Option<i32> {
        Some(self.max).filter(|_| !self.no_max)
    }
}

/// Runs `retry` or `discard`, for seqs or by criteria.
pub async fn dead(context: &CommandContext, verb: Verb, args: &DeadArgs) -> Result<ExitCode, Failure> {
    if args.seqs.is_empty() {
        return by_criteria(context, verb, args).await;
    }
    if args.criteria != BulkCriteria::default() {
        return Err(Failure::new(Code::Usage, "give either seqs or criteria, not both"));
    }
    by_seq(context, verb, args).await
}

async fn by_criteria(context: &CommandContext, verb: Verb, args: &DeadArgs) -> Result<ExitCode, Failure> {
    let choice = Choice {
        destination: args.destination.clone(),
        error_like: args.error_like.clone(),
        attempts_below: args.attempts_below,
        since: args.since.clone(),
        until: args.until.clone(),
        criteria: args.criteria.clone(),
        max_rows: args.limit.rows(),
        ..Choice::default()
    };
    act_on_counted(context, verb, ("dead letter", "dead letters"), choice, &args.consent).await
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
    let found = run(&session, &choice.call(verb, None, true, Arguments::All)).await?;
    let what = counted(found, nouns.0, nouns.1);
    if consent.dry_run || found == 0 {
        let words = format!("{what} matched; nothing is changed.");
        report(context, verb, found, 0, consent.dry_run, &words)?;
        return Ok(ExitCode::SUCCESS);
    }
    consent
        .confirm(&format!("{} {what}?", capitalised(verb.name())))
        .await?;
    // A message that arrived after the count was not part of the question.
    choice.max_rows = i32::try_from(found).ok().or(choice.max_rows);
    let done = run(
        &session,
        &choice.call(verb, consent.reason.as_deref(), false, Arguments::All),
    )
    .await?;
    let words = format!("{}: {}.", verb.past(), counted(done, nouns.0, nouns.1));
    report(context, verb, found, done, false, &words)?;
    Ok(ExitCode::SUCCESS)
}

fn report(
    context: &CommandContext,
    verb: Verb,
    matched: i64,
    done: i64,
    dry_run: bool,
    words: &str,
) -> Result<(), Failure> {
    match context.json {
        true => {
            context.print_json(&json!({ "action": verb.name(), "matched": matched, "done": done, "dry_run": dry_run }))
        }
        false => output::print(&format!("{words}\n")),
    }
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
            stdin()
                .lock()
                .read_line(&mut answer)
                .map(|_| answer.trim().to_lowercase())
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

// ---- by seq ---------------------------------------------------------------------------------------------------------

async fn by_seq(context: &CommandContext, verb: Verb, args: &DeadArgs) -> Result<ExitCode, Failure> {
    let session = context.actor().await?;
    let Consent { dry_run, reason, .. } = &args.consent;
    let mut found = Vec::new();
    for seq in &args.seqs {
        found.push((*seq, destination_of(&session, *seq, args.destination.as_deref()).await?));
    }
    let matched = found.iter().filter(|(_, destination)| destination.is_ok()).count();
    let what = counted(matched as i64, "message", "messages");
    if !dry_run && matched > 0 {
        args.consent
            .confirm(&format!("{} {what}?", capitalised(verb.name())))
            .await?;
    }
    let mut messages = Vec::new();
    let (mut done, mut failed) = (0, 0);
    for (seq, found) in found {
        let (destination, problem) = match found {
            Err(problem) => (args.destination.clone(), Some(problem)),
            Ok(destination) if *dry_run => (Some(destination), None),
            Ok(destination) => {
                let problem = act(&session, verb, seq, &destination, reason).await?;
                done += usize::from(problem.is_none());
                (Some(destination), problem)
            }
        };
        if let Some(problem) = &problem {
            failed += 1;
            if !context.json {
                eprintln!("outboxctl: message {seq}: {}", harmless(problem));
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
    let names: Vec<String> = found.iter().map(|row| text(row, "destination")).collect();
    Ok(match &names[..] {
        [] => Err("no message with this seq is dead or waiting".into()),
        [only] => Ok(only.clone()),
        _ => Err(format!(
            "it is for {}: choose one with --destination",
            names.join(" and ")
        )),
    })
}

/// Acts on one message. Returns why that was not possible, or `None` on success.
async fn act(
    session: &Session,
    verb: Verb,
    seq: i64,
    destination: &str,
    reason: &Option<String>,
) -> Result<Option<String>, Failure> {
    let verb = if verb == Verb::Discard {
        ActionVerb::Discard
    } else {
        ActionVerb::Retry
    };
    let action = OperatorAction {
        verb,
        seq: Some(seq),
        destination: destination.to_owned(),
    };
    let sql = session.qualified(&action.sql());
    match session
        .until_done(session.client.query_one(&sql, &[&destination, reason]))
        .await
    {
        Ok(row) if row.get(0) => Ok(None),
        Ok(_) => Ok(Some(verb.obstacle().to_owned())),
        // A message in flight is reported; the other seqs are still acted on.
        Err(error) if error.code() == Some(&SqlState::OBJECT_IN_USE) => Ok(Some(Failure::from(error).message)),
        Err(error) => Err(error.into()),
    }
}
