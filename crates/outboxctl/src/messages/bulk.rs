//! The calls that retry, discard or replay all messages that match the criteria, for the commands and for `serve`.

use super::When;
use super::sql::{Argument, Call};
use clap::Args;
use outbox_core::words::Word;

outbox_core::words! {
    /// An action of an operator.
    pub enum Verb {
        Retry = "retry",
        Discard = "discard",
        Replay = "replay",
        // Of a destination:
        Pause = "pause",
        Resume = "resume",
    }
}

/// The criteria that all actions have.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct BulkCriteria {
    /// Only events of this type
    #[arg(long = "type", value_name = "TYPE")]
    pub event_type: Option<String>,
    /// Only events of this aggregate type
    #[arg(long, value_name = "TYPE")]
    pub aggregate_type: Option<String>,
    /// Only events of this aggregate
    #[arg(long, value_name = "ID")]
    pub aggregate_id: Option<String>,
    /// Only messages with this ordering key
    #[arg(long)]
    pub key: Option<String>,
    /// Only from this seq on
    #[arg(long = "from", value_name = "SEQ")]
    pub seq_from: Option<i64>,
    /// Only up to this seq
    #[arg(long = "to", value_name = "SEQ")]
    pub seq_to: Option<i64>,
}

/// The criteria for the messages, as options of `retry` and `discard`. A criterion that is `None` matches all messages.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Only messages to this destination
    // For a replay: that were published to it.
    #[arg(long)]
    pub destination: Option<String>,
    #[command(flatten)]
    pub criteria: BulkCriteria,
    /// Only with an error LIKE this
    #[arg(long, value_name = "PATTERN")]
    pub error_like: Option<String>,
    /// Only with fewer attempts than this
    #[arg(long, value_name = "N")]
    pub attempts_below: Option<i32>,
    /// Only those that became dead letters since this time: a time, or an age (90s, 15m, 2h, 7d)
    // For a replay: whose events were created since then.
    #[arg(long, value_name = "WHEN")]
    pub since: Option<When>,
    /// Only those that became dead letters before this time
    #[arg(long, value_name = "WHEN")]
    pub until: Option<When>,
    /// For a replay: the destination to send them to.
    #[arg(skip)]
    pub to_destination: Option<String>,
    /// The most messages to act on; `None` means no limit.
    #[arg(skip)]
    pub max_rows: Option<i32>,
}

impl Verb {
    /// The verb in the past, for the result.
    pub fn past(self) -> &'static str {
        match self {
            Self::Retry => "Retried",
            Self::Discard => "Discarded",
            Self::Replay => "Replayed",
            Self::Pause => "Paused",
            Self::Resume => "Resumed",
        }
    }

    /// What the action does, in sentences.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Retry => "It is delivered again, with attempt 1. Later messages of its key follow.",
            Self::Discard => "It is never delivered and moves to the history. Later messages of its key are delivered.",
            Self::Replay => "It is sent again, with the same seq and id and the header replayed.",
            Self::Pause => "Delivery stops within about a second. Enqueue goes on; its messages wait.",
            Self::Resume => "Delivery continues with the waiting messages.",
        }
    }

    /// Why the call changed nothing.
    pub fn obstacle(self) -> &'static str {
        match self {
            Self::Retry => "is in flight, was published or discarded already, or waits behind another of its key",
            Self::Discard => "was published or discarded already, or does not exist",
            Self::Replay => "was not published or discarded, or does not exist",
            Self::Pause => "is already paused; its reason is kept",
            Self::Resume => "was not paused",
        }
    }
}

impl Choice {
    /// Whether a criterion asks for what only dead letters have.
    pub fn is_about_death(&self) -> bool {
        self.since.is_some() || self.until.is_some() || self.attempts_below.is_some()
    }

    pub fn call(&self, verb: Verb, reason: Option<&str>, dry_run: bool) -> Call {
        let text = |value: &Option<String>| Argument::Text(value.clone());
        let time = |value: &Option<When>| Argument::Time(value.clone());
        let (function, mut arguments) = match verb {
            Verb::Replay => (
                "outbox_replay".to_owned(),
                vec![
                    ("source_destination", text(&self.destination)),
                    ("destination", text(&self.to_destination)),
                    ("created_from", time(&self.since)),
                    ("created_to", time(&self.until)),
                ],
            ),
            verb => (
                format!("outbox_{}_where", verb.name()),
                vec![
                    ("destination", text(&self.destination)),
                    ("error_like", text(&self.error_like)),
                    ("attempts_below", Argument::Integer(self.attempts_below)),
                    ("died_after", time(&self.since)),
                    ("died_before", time(&self.until)),
                ],
            ),
        };
        let criteria = &self.criteria;
        arguments.extend([
            ("type", text(&criteria.event_type)),
            ("aggregate_type", text(&criteria.aggregate_type)),
            ("aggregate_id", text(&criteria.aggregate_id)),
            ("key", text(&criteria.key)),
            ("seq_from", Argument::BigInt(criteria.seq_from)),
            ("seq_to", Argument::BigInt(criteria.seq_to)),
            ("max_rows", Argument::Integer(self.max_rows)),
            ("reason", Argument::Text(reason.map(str::to_owned))),
            ("dry_run", Argument::Boolean(dry_run)),
        ]);
        Call {
            function,
            arguments,
            only_of: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_is_run_passes_every_argument() {
        for (verb, count) in [(Verb::Retry, 14), (Verb::Discard, 14), (Verb::Replay, 13)] {
            let (sql, _) = Choice::default().call(verb, None, true).to_run();
            assert_eq!(sql.matches(" => ").count(), count, "{sql}");
        }
    }

    #[test]
    fn a_call_that_is_shown_passes_only_the_given_arguments() {
        let choice = Choice {
            criteria: BulkCriteria {
                key: Some("it's".into()),
                ..BulkCriteria::default()
            },
            max_rows: Some(7),
            ..Choice::default()
        };
        let shown = choice.call(Verb::Discard, None, false).to_show();
        let expected = "select outbox_discard_where(key => 'it''s', max_rows => 7, dry_run => false) as n";
        assert_eq!(shown, expected);
    }
}
