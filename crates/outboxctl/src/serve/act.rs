//! The actions of viewers: none without --allow-actions. Each action gets a separate session, as outbox_admin, so that
//! the database refuses what the login may not do. Many messages at once need a count and a typed confirmation.

use super::access::{Viewer, same};
use super::answer::{PageContext, page};
use super::format::encode;
use super::pages::act as pages;
use super::search;
use super::session::{Session, Trouble};
use crate::failure::{Code, Failure};
use crate::messages::Filter;
use crate::messages::bulk::{Arguments, Choice, Criteria, Verb, run};
use crate::messages::sql::Sql;
use axum::extract::{Form, Path, Query};
use axum::response::{IntoResponse, Redirect, Response};
use outbox_core::words::Word;
use serde::Deserialize;

/// The most messages that one action changes.
const BULK_MAX: i64 = 10_000;
/// The most messages that can be selected at once; a page has 50.
const SELECTED_MAX: usize = 200;

#[derive(Deserialize)]
pub struct BulkRequest {
    verb: String,
    #[serde(default)]
    q: String,
}

#[derive(Deserialize)]
pub struct BulkForm {
    form_token: String,
    verb: String,
    #[serde(default)]
    q: String,
    count: i64,
    typed: String,
    #[serde(default)]
    reason: String,
}

#[derive(Deserialize)]
pub struct DestinationRequest {
    destination: String,
}

#[derive(Deserialize)]
pub struct DestinationForm {
    form_token: String,
    destination: String,
    #[serde(default)]
    reason: String,
}

#[derive(Deserialize)]
pub struct Done {
    verb: String,
    n: i64,
}

/// Counts the messages, and asks for confirmation.
pub async fn confirm_bulk(context: PageContext, Query(asked): Query<BulkRequest>) -> Response {
    match may(&context.frame.viewer).and_then(|()| known(&asked.verb)) {
        Ok(verb) => form_bulk(&context, verb, &asked.q, None).await,
        Err(failure) => context.refused(&failure),
    }
}

async fn form_bulk(context: &PageContext, verb: Verb, text: &str, problem: Option<&str>) -> Response {
    let counted = async {
        let search = parsed(text)?;
        let call = chosen(verb, &search, BULK_MAX)?.call(verb, None, true, Arguments::All);
        let count = context.app.pool.act(who(&context.frame.viewer), async |session| {
            session.execute("begin read only").await?;
            run(session, &call).await // the session ends, and the transaction with it
        });
        let count = count.await?;
        let shown = chosen(verb, &search, count.max(1))?;
        Ok::<_, Trouble>((count, shown.call(verb, Some("why"), false, Arguments::Given)))
    };
    match counted.await {
        Err(found) => context.trouble(&found),
        Ok((count, sql)) => {
            let ask = pages::Bulk {
                verb,
                search: text,
                count,
                cap: BULK_MAX,
                sql: &sql.to_show(),
                problem,
            };
            page(&pages::bulk(&context.frame, &ask))
        }
    }
}

pub async fn do_bulk(context: PageContext, Form(form): Form<BulkForm>) -> Response {
    let verb = match admitted(&context.frame.viewer, &form.form_token).and_then(|()| known(&form.verb)) {
        Ok(verb) => verb,
        Err(failure) => return context.refused(&failure),
    };
    if form.typed.trim() != format!("{} {}", verb.name(), form.count) || !(1..=BULK_MAX).contains(&form.count) {
        return form_bulk(&context, verb, &form.q, Some("The typed text does not match.")).await;
    }
    let done = async {
        // At most as many as were counted, whatever arrived since.
        let chosen = chosen(verb, &parsed(&form.q)?, form.count)?;
        let call = chosen.call(verb, given(&form.reason), false, Arguments::All);
        change(&context, &call).await
    };
    match done.await {
        Ok(n) => Redirect::to(&format!("/act/done?verb={}&n={n}", verb.name())).into_response(),
        Err(found) => context.trouble(&found),
    }
}

pub async fn done(context: PageContext, Query(done): Query<Done>) -> Response {
    match known(&done.verb) {
        Ok(verb) => page(&pages::done(&context.frame, verb, done.n)),
        Err(failure) => context.refused(&failure),
    }
}

/// The call that changes one message; its one row has the number of changed messages in the column `n`.
fn of_one(verb: Verb, seq: i64, destination: &str, reason: &str) -> Sql {
    if verb == Verb::Replay {
        let only = Choice {
            criteria: Criteria {
                seq_from: Some(seq),
                seq_to: Some(seq),
                ..Criteria::default()
            },
            destination: Some(destination.to_owned()),
            max_rows: Some(1),
            ..Choice::default()
        };
        return only.call(verb, given(reason), false, Arguments::All);
    }
    let mut call = Sql::new(&format!("select outbox_{}(", verb.name()));
    call.value(seq, "bigint").push(", ");
    call.value(destination, "text")
        .push(", nullif(")
        .value(reason, "text")
        .push(", ''))::integer as n");
    call
}

/// The fields of a form, which may repeat a name.
type Fields = Vec<(String, String)>;

/// The selected messages, each with seq and destination: those of fields `m`, or the one of `seq` and `destination`.
fn selected(fields: &Fields) -> Result<Vec<(i64, String)>, Failure> {
    let one = format!("{} {}", field(fields, "seq"), field(fields, "destination"));
    let values = fields.iter().filter(|(name, _)| name == "m").map(|(_, value)| value);
    let values = values.chain(Some(&one).filter(|one| *one != " "));
    let messages: Option<Vec<(i64, String)>> = values
        .map(|value| {
            let (seq, destination) = value.split_once(' ')?;
            Some((seq.parse().ok()?, destination.to_owned()))
        })
        .collect();
    let invalid = |what: &str| Failure::new(Code::Usage, what.to_owned());
    match messages {
        None => Err(invalid("a selected message has no seq and destination")),
        Some(none) if none.is_empty() => Err(invalid("no message is selected")),
        Some(many) if many.len() > SELECTED_MAX => Err(invalid("too many messages are selected")),
        Some(messages) => Ok(messages),
    }
}

fn field<'a>(fields: &'a Fields, name: &str) -> &'a str {
    let found = fields.iter().find(|(known, _)| known == name);
    found.map_or("", |(_, value)| value)
}

/// Asks for confirmation before the selected messages are changed.
pub async fn confirm_messages(context: PageContext, Query(fields): Query<Fields>) -> Response {
    let asked = may(&context.frame.viewer)
        .and_then(|()| known(field(&fields, "verb")))
        .and_then(|verb| Ok((verb, selected(&fields)?)));
    match asked {
        Err(failure) => context.refused(&failure),
        Ok((verb, messages)) => page(&pages::messages(&context.frame, verb, &messages)),
    }
}

/// Changes the selected messages in one transaction.
pub async fn do_messages(context: PageContext, Form(fields): Form<Fields>) -> Response {
    let asked = admitted(&context.frame.viewer, field(&fields, "form_token"))
        .and_then(|()| known(field(&fields, "verb")))
        .and_then(|verb| Ok((verb, selected(&fields)?)));
    let (verb, messages) = match asked {
        Ok(asked) => asked,
        Err(failure) => return context.refused(&failure),
    };
    let done = context.app.pool.act(who(&context.frame.viewer), async |session| {
        session.execute("begin").await?;
        let mut changed = 0;
        for (seq, destination) in &messages {
            changed += run(session, &of_one(verb, *seq, destination, field(&fields, "reason"))).await?;
        }
        session.execute("commit").await?;
        Ok(changed)
    });
    match (done.await, &messages[..]) {
        (Err(found), _) => context.trouble(&found),
        (Ok(0), _) => {
            let failure = Failure::new(
                Code::SomeFailed,
                "the message no longer exists, or cannot be changed now",
            );
            let hint = "Open it again: it may be delivered by now, or wait behind another message of its key.";
            context.refused(&failure.hint(hint))
        }
        (Ok(_), [(seq, destination)]) => {
            Redirect::to(&format!("/message/{seq}?destination={}", encode(destination))).into_response()
        }
        (Ok(n), _) => Redirect::to(&format!("/act/done?verb={}&n={n}", verb.name())).into_response(),
    }
}

/// Asks for confirmation before a destination is paused or resumed.
pub async fn confirm_destination(
    context: PageContext,
    Path(verb): Path<String>,
    Query(asked): Query<DestinationRequest>,
) -> Response {
    let verb = if verb == "pause" { "pause" } else { "resume" };
    match may(&context.frame.viewer) {
        Err(failure) => context.refused(&failure),
        Ok(()) => page(&pages::destination(&context.frame, verb, &asked.destination)),
    }
}

pub async fn do_destination(
    context: PageContext,
    Path(verb): Path<String>,
    Form(form): Form<DestinationForm>,
) -> Response {
    if let Err(failure) = admitted(&context.frame.viewer, &form.form_token) {
        return context.refused(&failure);
    }
    let mut call = Sql::default();
    let function = match verb.as_str() {
        "pause" => "outbox_pause",
        _ => "outbox_resume",
    };
    call.push(&format!("select {function}("))
        .value(&form.destination, "text")
        .push(", nullif(")
        .value(&form.reason, "text")
        .push(", ''))::integer as n");
    match change(&context, &call).await {
        Ok(_) => Redirect::to("/destinations").into_response(),
        Err(found) => context.trouble(&found),
    }
}

// ---- checks of all actions
// --------------------------------------------------------------------------------------------

fn may(viewer: &Viewer) -> Result<(), Failure> {
    if viewer.may_act {
        return Ok(());
    }
    Err(Failure::new(Code::Refused, "this monitor or this user is read-only").hint("Start it with --allow-actions"))
}

fn admitted(viewer: &Viewer, form_token: &str) -> Result<(), Failure> {
    may(viewer)?;
    if same(&viewer.form_token, form_token) {
        return Ok(());
    }
    Err(Failure::new(Code::Refused, "the form is from another session").hint("Open the page again and resend it"))
}

fn known(verb: &str) -> Result<Verb, Failure> {
    Verb::of_name(verb).ok_or_else(|| Failure::new(Code::Usage, "the action does not exist"))
}

// ---- calls in the database
// --------------------------------------------------------------------------------------------

/// How the viewer appears in the audit.
fn who(viewer: &Viewer) -> String {
    let name = viewer.name.as_deref();
    name.map_or_else(String::new, |name| format!(": {name}"))
}

async fn change(context: &PageContext, call: &Sql) -> Result<i64, Trouble> {
    let act = async |session: &Session| run(session, call).await;
    context.app.pool.act(who(&context.frame.viewer), act).await
}

fn parsed(text: &str) -> Result<Filter, Failure> {
    search::parse(text).map_err(|problem| Failure::new(Code::Usage, problem))
}

fn given(text: &str) -> Option<&str> {
    Some(text.trim()).filter(|text| !text.is_empty())
}

/// The arguments for all messages that match the search.
fn chosen(verb: Verb, filter: &Filter, max_rows: i64) -> Result<Choice, Failure> {
    let unfit = |word: &str| {
        let said = format!("{word} cannot choose what to {}", verb.name());
        Failure::new(Code::Usage, said).hint("Leave it out, choose by another criterion, or select single messages.")
    };
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
    if let Some((name, _)) = unfit_words.iter().find(|(_, is_given)| *is_given) {
        return Err(unfit(name));
    }
    Ok(Choice {
        criteria: Criteria {
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
