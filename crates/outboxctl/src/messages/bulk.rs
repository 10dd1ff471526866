//! The calls that retry, discard or replay all messages that match the criteria, for the commands and for `serve`.

use super::When;
use super::sql::Sql;

/// The action on the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Retry,
    Discard,
    Replay,
}

/// The criteria for the messages. A criterion that is `None` matches all messages.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    pub event_type: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    pub key: Option<String>,
    /// The destination of the messages; for a replay, the one to which they were published.
    pub destination: Option<String>,
    /// For a replay: the destination to send them to.
    pub to_destination: Option<String>,
    /// For dead letters: a LIKE pattern for the last error.
    pub error_like: Option<String>,
    /// For dead letters: they have fewer attempts than this.
    pub attempts_below: Option<i32>,
    /// The start of a time range: of when dead letters were given up; for a replay, of when the events were created.
    pub since: Option<When>,
    /// The end of that time range.
    pub until: Option<When>,
    pub seq_from: Option<i64>,
    pub seq_to: Option<i64>,
    /// The most messages to act on; `None` means no limit.
    pub max_rows: Option<i32>,
}

/// Whether a call passes the arguments that have no value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Arguments {
    /// The call passes only the arguments with a value: it is shown to people.
    Given,
    /// The call passes every argument with its type: it is run. Other roles may create functions in the schema of the
    /// extension, but none of them can match such a call better.
    All,
}

impl Verb {
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Retry, Self::Discard, Self::Replay]
            .into_iter()
            .find(|verb| verb.word() == word)
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Discard => "discard",
            Self::Replay => "replay",
        }
    }

    /// The verb in the past, for the result.
    pub fn past(self) -> &'static str {
        match self {
            Self::Retry => "Retried",
            Self::Discard => "Discarded",
            Self::Replay => "Replayed",
        }
    }

    /// The verb with a capital letter, as the first word of a question.
    pub fn capitalised(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Discard => "Discard",
            Self::Replay => "Replay",
        }
    }
}

impl Choice {
    /// The call. It returns one row with the number of messages in the column `n`.
    pub fn call(&self, verb: Verb, reason: Option<&str>, dry_run: bool, arguments: Arguments) -> Sql {
        let text = |value: &Option<String>| value.as_ref().map(|value| Sql::of(value, "text"));
        let time = |value: &Option<When>| value.as_ref().map(When::sql);
        let number = |value: Option<i64>| value.map(|value| Sql::of(value, "bigint"));
        let small = |value: Option<i32>| value.map(|value| Sql::of(value, "integer"));
        let dead = || {
            vec![
                ("destination", "text", text(&self.destination)),
                ("error_like", "text", text(&self.error_like)),
                ("attempts_below", "integer", small(self.attempts_below)),
                ("died_after", "timestamptz", time(&self.since)),
                ("died_before", "timestamptz", time(&self.until)),
            ]
        };
        let (function, own) = match verb {
            Verb::Retry => ("outbox_retry_where", dead()),
            Verb::Discard => ("outbox_discard_where", dead()),
            Verb::Replay => (
                "outbox_replay",
                vec![
                    ("source_destination", "text", text(&self.destination)),
                    ("destination", "text", text(&self.to_destination)),
                    ("created_from", "timestamptz", time(&self.since)),
                    ("created_to", "timestamptz", time(&self.until)),
                ],
            ),
        };
        let no_limit = || Sql::new("null::integer"); // without the argument its default would apply
        let common = [
            ("type", "text", text(&self.event_type)),
            ("aggregate_type", "text", text(&self.aggregate_type)),
            ("aggregate_id", "text", text(&self.aggregate_id)),
            ("key", "text", text(&self.key)),
            ("seq_from", "bigint", number(self.seq_from)),
            ("seq_to", "bigint", number(self.seq_to)),
            (
                "max_rows",
                "integer",
                Some(small(self.max_rows).unwrap_or_else(no_limit)),
            ),
            ("reason", "text", reason.map(|reason| Sql::of(reason, "text"))),
        ];
        let mut sql = Sql::new(&format!("select {function}("));
        for (name, kind, value) in own.into_iter().chain(common) {
            match value {
                Some(value) => sql.push(&format!("{name} => ")).append(&value).push(", "),
                None if arguments == Arguments::All => sql.push(&format!("{name} => null::{kind}, ")),
                None => &mut sql,
            };
        }
        sql.push(&format!("dry_run => {dry_run}) as n"));
        sql
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_is_run_passes_every_argument() {
        for (verb, count) in [(Verb::Retry, 14), (Verb::Discard, 14), (Verb::Replay, 13)] {
            let (sql, _) = Choice::default().call(verb, None, true, Arguments::All).to_run();
            assert_eq!(sql.matches(" => ").count(), count, "{sql}");
        }
    }

    #[test]
    fn a_call_that_is_shown_passes_only_the_given_arguments() {
        let choice = Choice {
            key: Some("it's".into()),
            max_rows: Some(7),
            ..Choice::default()
        };
        let shown = choice.call(Verb::Discard, None, false, Arguments::Given).to_show();
        let expected = "select outbox_discard_where(key => 'it''s', max_rows => 7, dry_run => false) as n";
        assert_eq!(shown, expected);
    }

    #[test]
    fn a_word_names_its_verb() {
        for verb in [Verb::Retry, Verb::Discard, Verb::Replay] {
            assert_eq!(Verb::parse(verb.word()), Some(verb));
        }
        assert_eq!(Verb::parse("drop"), None);
    }
}
