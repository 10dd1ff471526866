//! The actions of viewers: none without --allow-actions. A GET asks for confirmation, a POST acts. Each action gets a
//! separate session, as outbox_admin, so that the database refuses what the login may not do. Many messages need a count
//! and a typed confirmation.

use super::context::{Fields, PageContext};
use super::format::{count, encode, message_path};
use super::page::{MonitorPage, as_sql, problem};
use super::search;
use super::session::{MonitorSession, SessionPurpose};
use crate::failure::{Code, Failure};
use crate::format::capitalised;
use crate::messages::Filter;
use crate::messages::bulk::{Arguments, BulkCriteria, Choice, Verb, run};
use crate::messages::sql::Sql;
use crate::queries::state::MessageStatus;
use axum::extract::{Form, Path};
use axum::http::Method;
use axum::response::{IntoResponse, Redirect, Response};
use maud::html;
use outbox_core::words::Word;

/// The most messages that one action changes.
const BULK_MAX: i64 = 10_000;
/// The most messages that can be selected; a page has 50.
const SELECTED_MAX: usize = 200;

/// The address of the form that acts on a message.
pub fn act_path(verb: Verb, seq: i64, destination: &str) -> String {
    let message = encode(&format!("{seq} {destination}"));
    format!("/act/message?verb={}&m={message}", verb.name())
}

/// What a request asks for.
enum MonitorAction<'a> {
    /// On all messages that a search finds.
    Bulk(Verb, &'a str),
    /// On these messages, each with its seq and destination.
    Messages(Verb, Vec<(i64, &'a str)>),
    /// Pause or resume a destination.
    Destination(&'a str, &'a str),
}

pub async fn act(
    context: PageContext,
    method: Method,
    Path(what): Path<String>,
    Form(fields): Form<Fields>,
) -> Response {
    context.answer(answer(&context, method == Method::POST, &what, &fields).await)
}

/// Asks for confirmation, or acts. Only a form of this monitor, of the session of its viewer, can act.
async fn answer(context: &PageContext, is_form: bool, what: &str, fields: &Fields) -> Result<Response, Failure> {
    context.viewer.check(is_form.then(|| fields.get("form_token")))?;
    let action = MonitorAction::parse(what, fields)?;
    match is_form {
        false => action.confirm(context, None).await,
        true => action.carry_out(context, fields).await,
    }
}

/// What an action on many messages did.
pub async fn done(context: PageContext, Form(fields): Form<Fields>) -> Response {
    let n = fields.get("n").parse().unwrap_or_default();
    let body = html! {
        p { "The " a href="/audit" { "audit" } " has the record. " a href=(MessageStatus::Dead.path()) { "See the dead letters" } " or "
            a href=(MessageStatus::Ready.path()) { "what is ready" } "." }
    };
    context.answer(verb(&fields).map(|verb| {
        let title = format!("{} messages {}", count(n), verb.past().to_lowercase());
        context.layout(MonitorPage::Messages, &title, &body)
    }))
}

fn verb(fields: &Fields) -> Result<Verb, Failure> {
    Verb::of_name(fields.get("verb")).ok_or_else(|| invalid("the action does not exist"))
}

fn invalid(what: impl Into<String>) -> Failure {
    Failure::new(Code::Usage, what)
}

impl<'a> MonitorAction<'a> {
    fn parse(what: &'a str, fields: &'a Fields) -> Result<Self, Failure> {
        match what {
            "bulk" => Ok(Self::Bulk(verb(fields)?, fields.get("q"))),
            "message" => Ok(Self::Messages(verb(fields)?, selected(fields)?)),
            "pause" | "resume" => Ok(Self::Destination(what, fields.get("destination"))),
            _ => Err(invalid("the action does not exist")),
        }
    }

    fn verb(&self) -> &str {
        match self {
            Self::Bulk(verb, _) | Self::Messages(verb, _) => verb.name(),
            Self::Destination(verb, _) => verb,
        }
    }

    /// The form that asks for confirmation. Many messages are counted first.
    async fn confirm(&self, context: &PageContext, refused: Option<&str>) -> Result<Response, Failure> {
        let what = capitalised(self.verb());
        let mut hidden = vec![("verb", self.verb().to_owned())];
        let (mut typed, mut sql, mut reason) = (None, None, "Reason, for the audit");
        let mut is_possible = true;
        let (page, title, about) = match self {
            Self::Bulk(verb, search) => {
                let (n, call) = counted(context, *verb, search).await?;
                is_possible = n > 0;
                hidden.extend([("q", (*search).to_owned()), ("count", n.to_string())]);
                (typed, sql) = (Some(format!("{} {n}", verb.name())), Some(call));
                let (of, back) = match verb {
                    Verb::Replay => ("messages that have ended", MessageStatus::Published),
                    _ => ("dead letters", MessageStatus::Dead),
                };
                let about = html! {
                    p { @if search.is_empty() { "All of them." } @else { "Those that match the search " code { (search) } "." } }
                    @if n >= BULK_MAX { p.note { "No more than " (count(BULK_MAX)) " at a time, the lowest seqs first. Do it again for the rest." } }
                    @if n == 0 { p.empty { "No message matches." } }
                    p { a href={ (back.path()) "&q=" (encode(search)) } { "Back to the messages" } }
                };
                (MonitorPage::Messages, format!("{what} {} {of}", count(n)), about)
            }
            Self::Messages(verb, messages) => {
                hidden.extend(messages.iter().map(|(seq, to)| ("m", format!("{seq} {to}"))));
                let title = match messages[..] {
                    [(seq, to)] => format!("{what} message {seq} to {to}"),
                    _ => format!("{what} {} messages", messages.len()),
                };
                let about = html! {
                    p { @if messages.len() > 1 { "Of each: " } (meaning(*verb)) }
                    ul { @for (seq, to) in messages { li { a href=(message_path(*seq, to)) { (seq) } " to " (to) } } }
                };
                (MonitorPage::Messages, title, about)
            }
            Self::Destination(verb, destination) => {
                hidden.push(("destination", (*destination).to_owned()));
                let about = match *verb {
                    "pause" => "Delivery stops within about a second. Enqueue goes on; its messages wait.",
                    _ => "Delivery continues with the waiting messages.",
                };
                if *verb == "pause" {
                    reason = "Reason, for operators and the audit";
                }
                let about = html! { p { (about) } p { a href="/destinations" { "Back to the destinations" } } };
                (
                    MonitorPage::Destinations,
                    format!("{what} destination {destination}"),
                    about,
                )
            }
        };
        let body = html! {
            @if let Some(refused) = refused { (problem("Nothing was done", refused)) }
            section.panel {
                (about)
                // It is sent to the address of this page.
                @if is_possible { form.confirm method="post" {
                    (context.form_token())
                    @for (name, value) in &hidden { input type="hidden" name=(name) value=(value); }
                    label for="reason" { (reason) }
                    input #reason name="reason" autocomplete="off" maxlength="500";
                    @if let Some(typed) = &typed {
                        label for="typed" { "Type " code { (typed) } " to confirm" }
                        input #typed name="typed" autocomplete="off" required pattern=(typed) title=(typed);
                    }
                    button.primary { (what) }
                } }
            }
            @if let Some(sql) = sql { (as_sql(&sql)) }
        };
        Ok(context.layout(page, &title, &body).into_response())
    }

    async fn carry_out(&self, context: &PageContext, fields: &Fields) -> Result<Response, Failure> {
        let reason = fields.given("reason");
        let calls = match self {
            Self::Bulk(verb, search) => {
                let n = fields.get("count").parse().unwrap_or_default();
                if fields.get("typed").trim() != format!("{} {n}", verb.name()) || !(1..=BULK_MAX).contains(&n) {
                    return self.confirm(context, Some("The typed text does not match.")).await;
                }
                // At most as many as were counted, whatever arrived since.
                vec![chosen(*verb, &parsed(search)?, n)?.call(*verb, reason, false, Arguments::All)]
            }
            Self::Messages(verb, messages) => {
                let call = |(seq, destination): &(i64, &str)| of_one(*verb, *seq, destination, reason);
                messages.iter().map(call).collect()
            }
            Self::Destination(verb, destination) => {
                let mut call = Sql::new(&format!("select @extschema@.outbox_{verb}("));
                call.value(destination, "text");
                vec![with_reason(call, reason)]
            }
        };
        let changed = change(context, &calls).await?;
        let to = match self {
            Self::Destination(..) => "/destinations".to_owned(),
            Self::Messages(..) if changed == 0 => {
                let gone = "the message no longer exists, or cannot be changed now";
                let hint = "Open it again: it may be delivered by now, or wait behind another message of its key.";
                return Err(Failure::new(Code::SomeFailed, gone).hint(hint));
            }
            Self::Messages(_, messages) if messages.len() == 1 => message_path(messages[0].0, messages[0].1),
            Self::Messages(verb, _) | Self::Bulk(verb, _) => format!("/act/done?verb={}&n={changed}", verb.name()),
        };
        Ok(Redirect::to(&to).into_response())
    }
}

/// The selected messages: the fields `m`, or the fields `seq` and `destination`.
fn selected(fields: &Fields) -> Result<Vec<(i64, &str)>, Failure> {
    let mut messages = Vec::new();
    for value in fields.all("m") {
        let message = value
            .split_once(' ')
            .and_then(|(seq, to)| Some((seq.parse().ok()?, to)));
        messages.push(message.ok_or_else(|| invalid("a selected message has no seq and destination"))?);
    }
    if let Ok(seq) = fields.get("seq").parse() {
        messages.push((seq, fields.get("destination")));
    }
    match messages.len() {
        0 => Err(invalid("no message is selected")),
        1..=SELECTED_MAX => Ok(messages),
        _ => Err(invalid("too many messages are selected")),
    }
}

/// What an action does to a message.
fn meaning(verb: Verb) -> &'static str {
    match verb {
        Verb::Retry => "It is delivered again, with attempt 1. Later messages of its key follow.",
        Verb::Discard => "It is never delivered and moves to the history. Later messages of its key are delivered.",
        Verb::Replay => "It is sent again, with the same seq and id and the header replayed.",
    }
}

// ---- calls in the database ------------------------------------------------------------------------------------------

/// The number of messages that the search finds, and the call that acts on them, to show.
async fn counted(context: &PageContext, verb: Verb, search: &str) -> Result<(i64, String), Failure> {
    let filter = parsed(search)?;
    let call = chosen(verb, &filter, BULK_MAX)?.call(verb, None, true, Arguments::All);
    let counting = async |session: &MonitorSession| {
        session.execute("begin read only").await?; // although the session may act
        run(session, &call).await // the session ends, and the transaction with it
    };
    let n = context.app.pool.run(purpose(context), counting).await?;
    let shown = chosen(verb, &filter, n.max(1))?.call(verb, Some("why"), false, Arguments::Given);
    Ok((n, shown.to_show()))
}

/// The viewer appears in the audit.
fn purpose(context: &PageContext) -> SessionPurpose {
    let name = context.viewer.name.as_deref();
    SessionPurpose::Act {
        who: name.map_or_else(String::new, |name| format!(": {name}")),
    }
}

/// Makes the calls in one transaction, and returns the number of changed messages.
async fn change(context: &PageContext, calls: &[Sql]) -> Result<i64, Failure> {
    let act = async |session: &MonitorSession| {
        session.execute("begin").await?;
        let mut changed = 0;
        for call in calls {
            changed += run(session, call).await?;
        }
        session.execute("commit").await?;
        Ok(changed)
    };
    context.app.pool.run(purpose(context), act).await
}

/// The call that changes one message; its one row has the number of changed messages in the column `n`.
fn of_one(verb: Verb, seq: i64, destination: &str, reason: Option<&str>) -> Sql {
    if verb == Verb::Replay {
        let only = Choice {
            criteria: BulkCriteria {
                seq_from: Some(seq),
                seq_to: Some(seq),
                ..BulkCriteria::default()
            },
            destination: Some(destination.to_owned()),
            max_rows: Some(1),
            ..Choice::default()
        };
        return only.call(verb, reason, false, Arguments::All);
    }
    let mut call = Sql::new(&format!("select @extschema@.outbox_{}(", verb.name()));
    call.value(seq, "bigint").push(", ").value(destination, "text");
    with_reason(call, reason)
}

/// The call with the reason as its last argument.
fn with_reason(mut call: Sql, reason: Option<&str>) -> Sql {
    call.push(", nullif(")
        .value(reason.unwrap_or_default(), "text")
        .push(", ''))::integer as n");
    call
}

fn parsed(text: &str) -> Result<Filter, Failure> {
    search::parse(text).map_err(invalid)
}

/// The arguments for all messages that match the search.
fn chosen(verb: Verb, filter: &Filter, max_rows: i64) -> Result<Choice, Failure> {
    let is_empty = filter.is_empty();
    // Every field by name, so that a new criterion cannot be forgotten here: the call would change more than the search
    // finds.
    let Filter {
        destination,
        partition,
        key,
        event_type,
        aggregate_type,
        aggregate_id,
        error_like,
        since,
        id,
        correlation_id,
        word,
        seq,
    } = filter.clone();
    let unfit_words = [
        ("partition:", partition.is_some()),
        ("error:", error_like.is_some() && verb == Verb::Replay),
        ("id:", id.is_some()),
        ("correlation:", correlation_id.is_some()),
        ("a word without a name", word.is_some()),
    ];
    if let Some((word, _)) = unfit_words.iter().find(|(_, is_given)| *is_given) {
        let unfit = invalid(format!("{word} cannot choose what to {}", verb.name()));
        return Err(unfit.hint("Leave it out, choose by another criterion, or select single messages."));
    }
    Ok(Choice {
        criteria: BulkCriteria {
            // A call without a criterion is refused; this one means all messages.
            seq_from: seq.or_else(|| is_empty.then_some(1)),
            seq_to: seq,
            event_type,
            aggregate_type,
            aggregate_id,
            key,
        },
        destination,
        error_like,
        since,
        max_rows: i32::try_from(max_rows).ok(),
        ..Choice::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(verb: Verb, text: &str) -> Result<String, String> {
        let chosen = chosen(verb, &search::parse(text).unwrap(), 7);
        let shown = |chosen: Choice| chosen.call(verb, Some("it's late"), false, Arguments::Given).to_show();
        chosen.map(shown).map_err(|failure| failure.message)
    }

    #[test]
    fn a_search_becomes_the_arguments_of_a_call() {
        assert_eq!(
            shown(Verb::Retry, "destination:audit error:50% since:2h").unwrap(),
            r"select outbox_retry_where(destination => 'audit', error_like => E'%50\\%%', died_after => now() - interval '7200 s', max_rows => 7, reason => 'it''s late', dry_run => false) as n"
        );
        assert_eq!(
            shown(Verb::Discard, "").unwrap(),
            "select outbox_discard_where(seq_from => 1, max_rows => 7, reason => 'it''s late', dry_run => false) as n"
        );
        assert_eq!(
            shown(Verb::Replay, "destination:audit agg:order:42 seq:9").unwrap(),
            "select outbox_replay(source_destination => 'audit', aggregate_type => 'order', aggregate_id => '42', seq_from => 9, seq_to => 9, max_rows => 7, reason => 'it''s late', dry_run => false) as n"
        );
    }

    /// A word that the function does not support must not be left out: more messages would be changed than were shown.
    #[test]
    fn a_word_that_cannot_choose_is_refused() {
        assert_eq!(
            shown(Verb::Retry, "partition:p07").unwrap_err(),
            "partition: cannot choose what to retry"
        );
        assert_eq!(
            shown(Verb::Replay, "error:x").unwrap_err(),
            "error: cannot choose what to replay"
        );
    }
}
