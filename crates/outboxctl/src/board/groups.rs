//! Groups of failed messages with the same cause: which messages form one, its row, and the command that retries it.

use super::state::BoardState;
use crate::format::harmless;
use crate::messages::sql::containing;
use crate::queries::model::{Message, Part};
use crate::queries::snapshot::MESSAGES_MAX;
use crate::queries::state::MessageStatus;
use crate::screen::list::{ListRow, RowField};
use outbox_core::error_group;
use outbox_core::finding::shell_word;

/// Messages with the same status, destination and cause, in the order of the list. One without an error is alone.
struct MessageGroup<'a> {
    /// The error, with `#` for what differs from message to message.
    cause: Option<String>,
    messages: Vec<&'a Message>,
}

fn groups(messages: &[Message]) -> Vec<MessageGroup<'_>> {
    let mut groups: Vec<MessageGroup> = Vec::new();
    for message in messages {
        let has_failed = message.status.is(MessageStatus::Dead) || message.status.is(MessageStatus::Retrying);
        let error = message.note.as_deref().filter(|_| has_failed);
        let cause = error.map(error_group::group);
        let alike = groups.iter_mut().find(|group| {
            let first = group.messages[0];
            cause.is_some()
                && group.cause == cause
                && (&first.status, &first.destination) == (&message.status, &message.destination)
        });
        match alike {
            Some(group) => group.messages.push(message),
            None => groups.push(MessageGroup {
                cause,
                messages: vec![message],
            }),
        }
    }
    groups
}

impl MessageGroup<'_> {
    /// No seq begins like it, so it is not the id of a message.
    fn id(&self) -> String {
        let Message {
            status, destination, ..
        } = self.messages[0];
        format!("{status} {destination} {}", self.cause.as_deref().unwrap_or_default())
    }
}

/// A row for each message, made by `row_of`, and for each group of several. The messages of the group that is open
/// follow its row.
pub fn messages(state: &BoardState, row_of: fn(&Message) -> ListRow) -> Part<Vec<ListRow>> {
    let messages = state.shown.messages.as_ref().map_err(Clone::clone)?;
    let mut rows = Vec::new();
    for group in groups(messages) {
        let members = group.messages.iter().map(|message| row_of(message));
        if group.messages.len() == 1 {
            rows.extend(members);
            continue;
        }
        let id = group.id();
        let is_open = state.opened_group.as_ref() == Some(&id);
        let first = row_of(group.messages[0]);
        rows.push(row(id, first, &group, messages, is_open));
        if is_open {
            rows.extend(members);
        }
    }
    Ok(rows)
}

/// `▸ 150 × HTTP 422: …` over all columns but the status. `200+`: there may be more than were read.
fn row(id: String, first_row: ListRow, group: &MessageGroup, all: &[Message], is_open: bool) -> ListRow {
    let first = group.messages[0];
    let is_dead = |row: &Message| row.status.is(MessageStatus::Dead);
    let is_due = |row: &Message| row.status.is(MessageStatus::Retrying) || row.status.is(MessageStatus::Scheduled);
    let is_alike = |row: &&Message| if is_dead(first) { is_dead(row) } else { is_due(row) };
    let is_cut = all.iter().filter(is_alike).count() >= MESSAGES_MAX;
    let (sign, more) = (if is_open { "▾" } else { "▸" }, if is_cut { "+" } else { "" });
    let is_same = group.messages.iter().all(|row| row.note == first.note);
    let cause = if is_same { &first.note } else { &group.cause };
    let cause = cause.as_deref().unwrap_or_default();
    let to = match first.destination.as_str() {
        "default" => String::new(),
        other => format!("to {other}: "),
    };
    let mut fields = first_row.fields;
    fields.iter_mut().skip(1).for_each(RowField::clear);
    if let Some(why) = fields.last_mut() {
        why.text = harmless(&format!("{sign} {}{more} × {to}{cause}", group.messages.len()));
    }
    ListRow::new(id, fields)
}

/// The command that retries the messages of the group with this id. `None` = they are no dead letters, or their error
/// does not tell them from others.
pub fn retry_command(state: &BoardState, id: &str) -> Option<String> {
    let messages = state.shown.messages.as_ref().ok()?;
    let group = groups(messages).into_iter().find(|group| group.id() == id)?;
    let (first, cause) = (group.messages[0], group.cause?);
    if !first.status.is(MessageStatus::Dead) || cause.trim_matches(['#', ' ']).is_empty() {
        return None;
    }
    // A pattern matches what a terminal does not show.
    let shown = |c: char| Some(c).filter(|c| *c != '#' && harmless(c.encode_utf8(&mut [0; 4])).starts_with(*c));
    let pattern: String = containing(&cause).chars().map(|c| shown(c).unwrap_or('%')).collect();
    let (destination, pattern) = (shell_word(&first.destination), shell_word(&pattern));
    Some(format!(
        "outboxctl retry --destination {destination} --error-like {pattern}"
    ))
}
