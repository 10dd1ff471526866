//! The actions of viewers: none without --allow-actions. A GET asks for confirmation, a POST acts. Each action gets a
//! separate session, as outbox_admin, so that the database refuses what the login may not do. Many messages need a
//! count and a typed confirmation.

use super::causes::Causes;
use super::context::{Fields, PageContext};
use super::format::{count, encode, message_path};
use super::page::{MonitorPage, as_sql, problem};
use super::search;
use super::session_pool::{MonitorSession, SessionPurpose};
use super::snapshot::MonitorSnapshot;
use crate::failure::{Code, Failure};
use crate::format::capitalised;
use crate::messages::bulk::{BulkCriteria, Choice, Verb};
use crate::messages::page::MessageRow;
use crate::messages::sql::Call;
use crate::messages::{Filter, tab};
use crate::operation::{OperatorAction, run};
use crate::queries::state::MessageStatus;
use axum::extract::{Form, Path};
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use outbox_core::words::Word;

/// The most messages that one action changes.
const BULK_MAX: i64 = 10_000;
/// The messages that a confirmation shows.
const EXAMPLES: usize = 5;
/// The most messages that can be selected; a page has 50.
const SELECTED_MAX: usize = 200;

/// The address of the form that acts on a message.
pub fn act_path(verb: Verb, seq: i64, destination: &str) -> String {
    let message = encode(&format!("{seq} {destination}"));
    format!("act/message?verb={}&m={message}", verb.name())
}

/// What a request asks for.
enum MonitorAction<'a> {
    /// On all messages that a search finds.
    Bulk(Verb, &'a str),
    /// On these messages, all with the same verb, or on a destination.
    Each(Vec<OperatorAction>),
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
        false => action.confirm(context, fields, None).await,
        true => action.carry_out(context, fields).await,
    }
}

/// What an action on many messages did.
pub async fn done(context: PageContext, Form(fields): Form<Fields>) -> Response {
    let n = fields.get("n").parse().unwrap_or_default();
    let body = html! {
        p { "The " a href="audit" { "audit" } " has the record. " a href=(MessageStatus::Dead.path()) { "See the dead letters" } " or "
            a href=(MessageStatus::Ready.path()) { "what is ready" } "." }
    };
    context.answer(verb(&fields).map(|verb| {
        let title = format!("{} messages {}", count(n), verb.past().to_lowercase());
        context.layout(MonitorPage::Messages, &title, &body)
    }))
}

fn verb(fields: &Fields) -> Result<Verb, Failure> {
    let verb = Verb::of_name(fields.get("verb")).filter(|verb| !matches!(verb, Verb::Pause | Verb::Resume));
    verb.ok_or_else(|| invalid("the action does not exist"))
}

fn invalid(what: impl Into<String>) -> Failure {
    Failure::new(Code::Usage, what)
}

impl<'a> MonitorAction<'a> {
    fn parse(what: &'a str, fields: &'a Fields) -> Result<Self, Failure> {
        match what {
            "bulk" => Ok(Self::Bulk(verb(fields)?, fields.get("q"))),
            "message" => selected(verb(fields)?, fields).map(Self::Each),
            "pause" | "resume" => Ok(Self::Each(vec![OperatorAction {
                verb: if what == "pause" { Verb::Pause } else { Verb::Resume },
                seq: None,
                destination: fields.get("destination").to_owned(),
            }])),
            _ => Err(invalid("the action does not exist")),
        }
    }

    fn verb(&self) -> Verb {
        match self {
            Self::Bulk(verb, _) => *verb,
            Self::Each(actions) => actions[0].verb,
        }
    }

    /// The form that asks for confirmation. It is sent to the address of its page.
    async fn confirm(
        &self,
        context: &PageContext,
        fields: &Fields,
        refused: Option<&str>,
    ) -> Result<Response, Failure> {
        let verb = self.verb();
        let what = capitalised(verb.name());
        let question = match self {
            Self::Bulk(verb, search) => question_on_search(context, *verb, search).await?,
            Self::Each(actions) => question_on_actions(actions, fields),
        };
        let reason = match verb {
            Verb::Pause => "Reason, for operators and the audit",
            _ => "Reason, for the audit",
        };
        let body = html! {
            @if let Some(refused) = refused { (problem("Nothing was done", refused)) }
            section.panel {
                (question.about)
                @if question.is_possible { form.confirm method="post" {
                    (context.form_token())
                    input type="hidden" name="verb" value=(verb.name());
                    @for (name, value) in &question.fields { input type="hidden" name=(name) value=(value); }
                    label for="reason" { (reason) }
                    input #reason name="reason" autocomplete="off" maxlength="500";
                    @if let Some(typed) = &question.typed {
                        label for="typed" { "Type " code { (typed) } " to confirm" }
                        input #typed name="typed" autocomplete="off" required pattern=(typed) title=(typed);
                    }
                    div.actions {
                        button.primary.danger[verb == Verb::Discard] { (what) }
                        a.button href=(question.back) { "Cancel" }
                    }
                } } @else { p { a href=(question.back) { "Back to the messages" } } }
            }
            @if let Some(sql) = &question.sql { (as_sql([&**sql])) }
        };
        Ok(context.layout(question.page, &question.title, &body).into_response())
    }

    async fn carry_out(&self, context: &PageContext, fields: &Fields) -> Result<Response, Failure> {
        let reason = fields.given("reason");
        let calls = match self {
            Self::Bulk(verb, search) => {
                let n = fields.get("count").parse().unwrap_or_default();
                if fields.get("typed").trim() != format!("{} {n}", verb.name()) || !(1..=BULK_MAX).contains(&n) {
                    return self
                        .confirm(context, fields, Some("The typed text does not match."))
                        .await;
                }
                // At most as many as were counted, whatever arrived since.
                vec![choice(*verb, &parsed(search)?, n)?.call(*verb, reason, false)]
            }
            Self::Each(actions) => actions.iter().map(|action| action.call(reason)).collect(),
        };
        let changed = change(context, &calls).await?;
        let to = match self {
            Self::Each(actions) if actions[0].seq.is_none() => "destinations".to_owned(),
            Self::Each(_) if changed == 0 => {
                let gone = "the message no longer exists, or cannot be changed now";
                let hint = "Open it again: it may be delivered by now, or wait behind another message of its key.";
                return Err(Failure::new(Code::SomeFailed, gone).hint(hint));
            }
            Self::Each(actions)
                if let [
                    OperatorAction {
                        seq: Some(seq),
                        destination,
                        ..
                    },
                ] = &actions[..] =>
            {
                message_path(*seq, destination)
            }
            _ => format!("act/done?verb={}&n={changed}", self.verb().name()),
        };
        Ok(context.request.redirect(&to))
    }
}

/// What a form asks before an action.
struct Question {
    page: MonitorPage,
    title: String,
    about: Markup,
    /// The page that asked.
    back: String,
    /// What the form sends back.
    fields: Vec<(&'static str, String)>,
    /// What must be typed.
    typed: Option<String>,
    sql: Option<String>,
    is_possible: bool,
}

/// The messages that a search finds are counted first.
async fn question_on_search(context: &PageContext, verb: Verb, search: &str) -> Result<Question, Failure> {
    let (n, call) = count_matches(context, verb, search).await?;
    let (of, back) = match verb {
        Verb::Replay if parsed(search)?.destination.is_some() => ("published messages", MessageStatus::Published),
        Verb::Replay => ("published or discarded messages", MessageStatus::Published),
        _ => ("dead letters", MessageStatus::Dead),
    };
    let sample = match n {
        0 => Vec::new(),
        _ => sample(context, back, search).await?,
    };
    let about = html! {
        p { @if search.is_empty() { "All of them." } @else { "Those that match the search " code { (search) } "." } }
        @if n >= BULK_MAX { p.note { "No more than " (count(BULK_MAX)) " at a time, the lowest seqs first. Do it again for the rest." } }
        @if n == 0 { p.empty { "No message matches." } }
        @if !sample.is_empty() {
            h3 { @if n > sample.len() as i64 { "The latest " (sample.len()) " by cause" } @else { "By cause" } }
            (Causes::of_page(&sample).list())
            h3 { "For example" }
            ul.sample { @for row in sample.iter().take(EXAMPLES) {
                @let (seq, to) = (row.number("seq"), row.text("destination").unwrap_or_default());
                li { a href=(message_path(seq, to)) { (seq) } " " (row.text("type").unwrap_or_default()) " " (row.text("key").unwrap_or_default()) }
            } }
        }
    };
    Ok(Question {
        page: MonitorPage::Messages,
        title: format!("{} {} {of}", capitalised(verb.name()), count(n)),
        about,
        back: format!("{}&q={}", back.path(), encode(search)),
        fields: vec![("q", search.to_owned()), ("count", n.to_string())],
        typed: Some(format!("{} {n}", verb.name())),
        sql: Some(call),
        is_possible: n > 0,
    })
}

/// The messages, or the destination, are named.
fn question_on_actions(actions: &[OperatorAction], fields: &Fields) -> Question {
    let verb = actions[0].verb;
    let field = |OperatorAction { seq, destination, .. }: &OperatorAction| match seq {
        Some(seq) => ("m", format!("{seq} {destination}")),
        None => ("destination", destination.clone()),
    };
    let about = html! {
        p { @if actions.len() > 1 { "Of each: " } (verb.meaning()) }
        ul { @for OperatorAction { seq, destination: to, .. } in actions {
            @if let Some(seq) = seq { li { a href=(message_path(*seq, to)) { (seq) } " to " (to) } }
        } }
    };
    Question {
        page: match actions[0].seq {
            Some(_) => MonitorPage::Messages,
            None => MonitorPage::Destinations,
        },
        title: match actions {
            [only] => only.title(),
            all => format!("{} {} messages", capitalised(verb.name()), all.len()),
        },
        about,
        back: match actions {
            [OperatorAction { seq: None, .. }, ..] => MonitorPage::Destinations.path().to_owned(),
            [only] if let Some(seq) = only.seq => message_path(seq, &only.destination),
            _ => format!(
                "messages?tab={}&q={}",
                encode(fields.get("tab")),
                encode(fields.get("q"))
            ),
        },
        fields: actions.iter().map(field).collect(),
        typed: None,
        sql: None,
        is_possible: true,
    }
}

/// The selected messages: the fields `m`, or the fields `seq` and `destination`.
fn selected(verb: Verb, fields: &Fields) -> Result<Vec<OperatorAction>, Failure> {
    let action = |seq: &str, destination: &str| {
        Some(OperatorAction {
            verb,
            seq: Some(seq.parse().ok()?),
            destination: destination.to_owned(),
        })
    };
    let mut messages = Vec::new();
    for value in fields.all("m") {
        let message = value.split_once(' ').and_then(|(seq, to)| action(seq, to));
        messages.push(message.ok_or_else(|| invalid("a selected message has no seq and destination"))?);
    }
    messages.extend(action(fields.get("seq"), fields.get("destination")));
    match messages.len() {
        0 => Err(invalid("no message is selected")),
        1..=SELECTED_MAX => Ok(messages),
        _ => Err(invalid("too many messages are selected")),
    }
}

// ---- calls in the database ------------------------------------------------------------------------------------------

/// The number of messages that the search finds, and the call that acts on them, to show.
async fn count_matches(context: &PageContext, verb: Verb, search: &str) -> Result<(i64, String), Failure> {
    let filter = parsed(search)?;
    let call = choice(verb, &filter, BULK_MAX)?.call(verb, None, true);
    let counting = async |session: &MonitorSession| {
        session.execute("begin read only").await?; // although the session may act
        run(session, &call).await // the session ends, and the transaction with it
    };
    let n = context.database.pool.run(purpose(context), counting).await?;
    let shown = choice(verb, &filter, n.max(1))?.call(verb, Some("why"), false);
    Ok((n, shown.to_show()))
}

/// The latest of the messages that the search finds; at most a page.
async fn sample(context: &PageContext, tab: MessageStatus, search: &str) -> Result<Vec<MessageRow>, Failure> {
    let (filter, lanes) = (
        parsed(search)?,
        context.view.snapshot.as_ref().map_or(1, MonitorSnapshot::lanes),
    );
    let read = async |session: &MonitorSession| tab::page(session, lanes, tab, false, &filter, &[]).await;
    Ok(context.database.pool.read(read).await?.rows)
}

/// The viewer appears in the audit.
fn purpose(context: &PageContext) -> SessionPurpose {
    let name = context.viewer.name.as_deref();
    SessionPurpose::Act {
        who: name.map_or_else(String::new, |name| format!(": {name}")),
    }
}

/// Makes the calls in one transaction, and returns the number of changed messages.
async fn change(context: &PageContext, calls: &[Call]) -> Result<i64, Failure> {
    let act = async |session: &MonitorSession| {
        session.execute("begin").await?;
        let mut changed = 0;
        for call in calls {
            changed += run(session, call).await?;
        }
        session.execute("commit").await?;
        Ok(changed)
    };
    context.database.pool.run(purpose(context), act).await
}

fn parsed(text: &str) -> Result<Filter, Failure> {
    search::parse(text).map_err(invalid)
}

/// The arguments for all messages that match the search.
fn choice(verb: Verb, filter: &Filter, max_rows: i64) -> Result<Choice, Failure> {
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
        ("since:", since.is_some() && verb == Verb::Replay), // of the end; a replay knows the times of events
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
        let choice = choice(verb, &search::parse(text).unwrap(), 7);
        let shown = |choice: Choice| choice.call(verb, Some("it's late"), false).to_show();
        choice.map(shown).map_err(|failure| failure.message)
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
        for search in ["error:x", "since:2h"] {
            let word = search.split_inclusive(':').next().unwrap();
            let refused = format!("{word} cannot choose what to replay");
            assert_eq!(shown(Verb::Replay, search).unwrap_err(), refused);
        }
    }
}
