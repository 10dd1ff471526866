//! `outboxctl retry`, `discard` and `replay`: what a person does to messages. By filter they are counted first; on a terminal the
//! person is asked, a script says --yes; and no more is changed than was counted.

use super::{Context, text};
use crate::connect::Session;
use crate::failure::{Code, Failure};
use crate::format::{self, counted};
use crate::messages::When;
use crate::messages::bulk::{Arguments, Choice, Verb};
use crate::messages::page::FetchOnce;
use crate::messages::sql::Sql;
use crate::output;
use crate::queries::message::CURRENT_MESSAGES;
use clap::Args;
use serde::Deserialize;
use serde_json::json;
use std::io::{BufRead, IsTerminal, Write, stderr, stdin};
use std::process::ExitCode;
use tokio_postgres::error::SqlState;

/// Which dead letters.
#[derive(Args)]
pub struct DeadArgs {
    /// Seqs of messages; without any, the dead letters that meet the options
    #[arg(value_name = "SEQ")]
    seqs: Vec<i64>,
    /// To this destination
    #[arg(long)]
    destination: Option<String>,
    #[command(flatten)]
    criteria: Criteria,
    /// With an error LIKE this
    #[arg(long, value_name = "PATTERN", conflicts_with = "seqs")]
    error_like: Option<String>,
    /// With fewer attempts than this
    #[arg(long, value_name = "N", conflicts_with = "seqs")]
    attempts_below: Option<i32>,
    /// That died since then: a time, or how long ago (90s, 15m, 2h, 7d)
    #[arg(long, value_name = "WHEN", conflicts_with = "seqs")]
    since: Option<When>,
    /// That died before then
    #[arg(long, value_name = "WHEN", conflicts_with = "seqs")]
    until: Option<When>,
    #[command(flatten)]
    consent: Consent,
}

/// Which messages to send again.
#[derive(Args)]
pub struct ReplayArgs {
    #[command(flatten)]
    criteria: Criteria,
    /// Of events created since then: a time, or how long ago (90s, 15m, 2h, 7d)
    #[arg(long, value_name = "WHEN")]
    since: Option<When>,
    /// Of events created before then
    #[arg(long, value_name = "WHEN")]
    until: Option<When>,
    /// Only what was published to this destination
    #[arg(long, value_name = "DESTINATION")]
    source_destination: Option<String>,
    /// Send them there instead of to where they went
    #[arg(long = "to-destination", value_name = "DESTINATION")]
    to_destination: Option<String>,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Args)]
struct Criteria {
    /// Events of this type
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
    /// Events of this type of aggregate
    #[arg(long, value_name = "TYPE")]
    aggregate_type: Option<String>,
    /// Events of this aggregate
    #[arg(long, value_name = "ID")]
    aggregate_id: Option<String>,
    /// Of this ordering key
    #[arg(long)]
    key: Option<String>,
    /// From this seq on
    #[arg(long = "from", value_name = "SEQ")]
    seq_from: Option<i64>,
    /// Up to this seq
    #[arg(long = "to", value_name = "SEQ")]
    seq_to: Option<i64>,
    /// The first so many by seq
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(i32).range(1..), conflicts_with = "no_max")]
    max: i32,
    /// However many there are
    #[arg(long)]
    no_max: bool,
}

#[derive(Args)]
struct Consent {
    /// Why; it stands in the audit
    #[arg(long)]
    reason: Option<String>,
    /// Only say how many it would be
    #[arg(long)]
    dry_run: bool,
    /// Do not ask
    #[arg(short = 'y', long)]
    yes: bool,
}

impl Criteria {
    fn is_empty(&self) -> bool {
        let texts = [&self.event_type, &self.aggregate_type, &self.aggregate_id, &self.key];
        texts.iter().all(|text| text.is_none()) && self.seq_from.is_none() && self.seq_to.is_none()
    }

    /// How many at most; none = no limit.
    fn max_rows(&self) -> Option<i32> {
        Some(self.max).filter(|_| !self.no_max)
    }

    fn choice(&self) -> Choice {
        Choice {
            event_type: self.event_type.clone(),
            aggregate_type: self.aggregate_type.clone(),
            aggregate_id: self.aggregate_id.clone(),
            key: self.key.clone(),
            seq_from: self.seq_from,
            seq_to: self.seq_to,
            max_rows: self.max_rows(),
            ..Choice::default()
        }
    }
}

/// Dead letters.
pub async fn dead(context: &Context, verb: Verb, args: &DeadArgs) -> Result<ExitCode, Failure> {
    if args.seqs.is_empty() {
        return by_criteria(context, verb, args).await;
    }
    if !args.criteria.is_empty() {
        return Err(Failure::new(Code::Usage, "give either seqs or criteria, not both"));
    }
    by_seq(context, verb, args).await
}

async fn by_criteria(context: &Context, verb: Verb, args: &DeadArgs) -> Result<ExitCode, Failure> {
    let choice = Choice {
        destination: args.destination.clone(),
        error_like: args.error_like.clone(),
        attempts_below: args.attempts_below,
        since: args.since.clone(),
        until: args.until.clone(),
        ..args.criteria.choice()
    };
    counted_first(context, verb, ("dead letter", "dead letters"), choice, &args.consent).await
}

pub async fn replay(context: &Context, args: &ReplayArgs) -> Result<ExitCode, Failure> {
    let choice = Choice {
        since: args.since.clone(),
        until: args.until.clone(),
        destination: args.source_destination.clone(),
        to_destination: args.to_destination.clone(),
        ..args.criteria.choice()
    };
    counted_first(context, Verb::Replay, ("message", "messages"), choice, &args.consent).await
}

async fn counted_first(
    context: &Context,
    verb: Verb,
    nouns: (&str, &str),
    mut choice: Choice,
    consent: &Consent,
) -> Result<ExitCode, Failure> {
    let session = context.actor().await?;
    let found = run(&session, &choice.call(verb, None, true, Arguments::All)).await?;
    let what = counted(found, nouns.0, nouns.1);
    if consent.dry_run || found == 0 {
        let words = format!("{what} would be meant; nothing is changed.");
        report(context, verb, found, 0, consent.dry_run, &words)?;
        return Ok(ExitCode::SUCCESS);
    }
    consent.fetch(&format!("{} {what}?", verb.capitalised())).await?;
    // What came meanwhile was not counted, so nobody has agreed to it.
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

async fn run(session: &Session, call: &Sql) -> Result<i64, Failure> {
    #[derive(Deserialize)]
    struct Number {
        n: i64,
    }
    let found: Vec<Number> = session.fetch_once(call).await?;
    Ok(found.first().map_or(0, |found| found.n))
}

fn report(context: &Context, verb: Verb, matched: i64, done: i64, dry_run: bool, words: &str) -> Result<(), Failure> {
    match context.json {
        true => {
            context.print_json(&json!({ "action": verb.word(), "matched": matched, "done": done, "dry_run": dry_run }))
        }
        false => output::print(&format!("{words}\n")),
    }
}

impl Consent {
    /// Asks, unless that was answered beforehand. Who cannot be asked has not agreed.
    async fn fetch(&self, question: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !stdin().is_terminal() || !stderr().is_terminal() {
            let message = format!("{question} There is no terminal to ask on; nothing is changed.");
            return Err(Failure::new(Code::Refused, message).hint("Say --yes, or look first with --dry-run."));
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
            // A statement that can be cancelled has taken Ctrl-C from the system; and a read that has begun cannot be taken back.
            _ = tokio::signal::ctrl_c() => {
                eprintln!("\noutboxctl: {NOT_AGREED}");
                std::process::exit(i32::from(Code::Refused as u8));
            }
        };
        match answer {
            Ok(Ok(answer)) if answer == "y" || answer == "yes" => Ok(()),
            _ => Err(Failure::new(Code::Refused, NOT_AGREED)),
        }
    }
}

const NOT_AGREED: &str = "you did not agree; nothing is changed";

// ---- one by one -----------------------------------------------------------------------------------------------------

async fn by_seq(context: &Context, verb: Verb, args: &DeadArgs) -> Result<ExitCode, Failure> {
    let session = context.actor().await?;
    let mut chosen = Vec::new();
    let mut results = Vec::new();
    for seq in &args.seqs {
        match destination_of(&session, *seq, args.destination.as_deref()).await? {
            Ok(destination) => chosen.push((*seq, destination)),
            Err(problem) => {
                results.push(json!({ "seq": seq, "destination": args.destination, "done": false, "error": problem }))
            }
        }
    }
    let what = counted(chosen.len() as i64, "message", "messages");
    if args.consent.dry_run {
        results.extend(
            chosen.iter().map(
                |(seq, destination)| json!({ "seq": seq, "destination": destination, "done": false, "error": null }),
            ),
        );
    } else if !chosen.is_empty() {
        args.consent.fetch(&format!("{} {what}?", verb.capitalised())).await?;
        for (seq, destination) in &chosen {
            let problem = act(&session, verb, *seq, destination, &args.consent.reason).await?;
            results
                .push(json!({ "seq": seq, "destination": destination, "done": problem.is_none(), "error": problem }));
        }
    }
    let failed = results.iter().filter(|result| !result["error"].is_null()).count();
    let done = results.iter().filter(|result| result["done"] == true).count();
    if context.json {
        context.print_json(&json!({
            "action": verb.word(), "matched": chosen.len(), "done": done, "dry_run": args.consent.dry_run, "messages": results,
        }))?;
    } else {
        for result in results.iter().filter(|result| !result["error"].is_null()) {
            eprintln!(
                "outboxctl: message {}: {}",
                result["seq"],
                format::clean(text(result, "error"))
            );
        }
        output::print(&match args.consent.dry_run {
            true => format!("{what} would be meant; nothing is changed.\n"),
            false => format!("{}: {}.\n", verb.past(), counted(done as i64, "message", "messages")),
        })?;
    }
    Ok(match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::from(Code::SomeFailed as u8),
    })
}

/// Where the message with this seq can be acted on: the one that was named, or the only one there is.
async fn destination_of(session: &Session, seq: i64, named: Option<&str>) -> Result<Result<String, String>, Failure> {
    if let Some(named) = named {
        return Ok(Ok(named.to_owned()));
    }
    let sql = format!(
        "select distinct p.destination from ({}) p order by 1",
        *CURRENT_MESSAGES
    );
    let found = session.rows(&sql, &[&seq]).await?;
    let names: Vec<&str> = found.iter().map(|row| text(row, "destination")).collect();
    Ok(match names[..] {
        [] => Err("no message of this seq is dead or waits".into()),
        [only] => Ok(only.to_owned()),
        _ => Err(format!(
            "it is for {}: say which with --destination",
            names.join(" and ")
        )),
    })
}

/// Why it was not done; none if it was.
async fn act(
    session: &Session,
    verb: Verb,
    seq: i64,
    destination: &str,
    reason: &Option<String>,
) -> Result<Option<String>, Failure> {
    let client = &session.client;
    let sql = format!("select outbox_{}($1::bigint, $2::text, $3::text)", verb.word());
    let done = session
        .until_done(client.query_one(&session.qualified(&sql), &[&seq, &destination, reason]))
        .await;
    match done {
        Ok(row) if row.get(0) => Ok(None),
        Ok(_) => Ok(Some(match verb {
            Verb::Discard => "it has ended, or there is none".into(),
            _ => "it is in flight, has ended, or waits behind another of its key".into(),
        })),
        // One that is in flight says so; the others are done all the same.
        Err(error) if error.code() == Some(&SqlState::OBJECT_IN_USE) => Ok(Some(Failure::from(error).message)),
        Err(error) => Err(error.into()),
    }
}
