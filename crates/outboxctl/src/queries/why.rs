//! Why a message is not delivered. The database knows the reasons and has the words (`outbox_why`).

use super::Fetch;
use super::message::StoredMessageRow;
use super::model::CommandShown;
use super::state::MessageStatus;
use crate::failure::Failure;
use outbox_core::finding::shell_word;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashMap;

/// A reason as a sentence, and what removes the cause, if something does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Reason {
    pub reason: String,
    pub why: String,
    pub remedy: Option<String>,
    pub commands: Vec<CommandShown>,
    /// The seq of the message behind which it waits.
    #[serde(skip_serializing)]
    pub behind: Option<i64>,
}

const WHY: &str = "
    select reason, why, remedy, coalesce(commands, '[]') as commands, behind
    from @extschema@.outbox_why($1::bigint, $2::text)";

/// The reasons why the message of this row is not delivered, the most specific first.
pub async fn reasons<S: Fetch>(session: &S, message: &StoredMessageRow) -> Result<Vec<Reason>, Failure> {
    if message.has_ended() {
        return Ok(Vec::new());
    }
    let is_dead = message.status.is(MessageStatus::Dead);
    let mut reasons: Vec<Reason> = session.fetch(WHY, &[&message.seq, &message.destination]).await?;
    // The same seq may be dead and wait again.
    reasons.retain(|reason| (reason.reason == "dead") == is_dead);
    for reason in &mut reasons {
        reason.name_commands(message);
    }
    Ok(reasons)
}

/// The first reason of each message.
const FIRST: &str = "
    select distinct on (o.seq, o.destination) o.seq, o.destination, o.why
    from outbox_internal.obstacles($1::text::jsonb) o order by o.seq, o.destination, o.rank";

/// The first reason of each message of a list, by seq and destination. `rows` have the columns of outbox_messages.
pub async fn first_reasons<S: Fetch>(session: &S, rows: Value) -> Result<HashMap<(i64, String), String>, Failure> {
    #[derive(Deserialize)]
    struct FirstReason {
        seq: i64,
        destination: String,
        why: String,
    }
    let found: Vec<FirstReason> = session.fetch(FIRST, &[&rows.to_string()]).await?;
    let found = found.into_iter().map(|row| ((row.seq, row.destination), row.why));
    Ok(found.collect())
}

impl Reason {
    /// Puts the commands of outboxctl in the place of its SQL, where there are some.
    fn name_commands(&mut self, message: &StoredMessageRow) {
        let seq = self.behind.unwrap_or(message.seq);
        let destination = shell_word(&message.destination);
        let message = format!("{seq} --destination {destination}");
        let retry = format!("outboxctl retry {message}");
        let commands = match self.reason.as_str() {
            "dead" | "behind dead" => vec![retry, format!("outboxctl discard {message}")],
            "retrying" | "scheduled" | "behind retrying" => vec![retry],
            "paused" if self.remedy.is_some() => vec![format!("outboxctl resume {destination}")],
            _ => return,
        };
        self.remedy = Some(commands.join(", or "));
        let in_shell = |command| CommandShown {
            command,
            place: "shell".into(),
            role: None,
        };
        self.commands = commands.into_iter().map(in_shell).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_of_a_message_is_a_command_for_the_message_that_it_is_about() {
        let named = |reason: &str, behind: Option<i64>, destination: &str| {
            let mut named = Reason {
                reason: reason.into(),
                remedy: Some("do: select 1".into()),
                commands: vec![CommandShown {
                    command: "select 1".into(),
                    ..CommandShown::default()
                }],
                behind,
                ..Reason::default()
            };
            let message = StoredMessageRow {
                seq: 7,
                destination: destination.into(),
                ..StoredMessageRow::default()
            };
            named.name_commands(&message);
            let commands: Vec<String> = named.commands.into_iter().map(|command| command.command).collect();
            (named.remedy.unwrap_or_default(), commands)
        };
        let one = |command: &str| (command.to_owned(), vec![command.to_owned()]);
        let (retry, discard) = (
            "outboxctl retry 7 --destination bus",
            "outboxctl discard 7 --destination bus",
        );
        assert_eq!(
            named("dead", None, "bus"),
            (format!("{retry}, or {discard}"), vec![retry.into(), discard.into()])
        );
        // Without the option, the command could act on the message of this seq to another destination.
        assert_eq!(
            named("behind retrying", Some(3), "default"),
            one("outboxctl retry 3 --destination default")
        );
        assert_eq!(named("paused", None, "default"), one("outboxctl resume default"));
        assert_eq!(
            named("broker", None, "default"),
            ("do: select 1".into(), vec!["select 1".into()])
        );
    }
}
