//! The calls that retry, discard or replay all messages that meet criteria: one for the commands and the page.

use super::When;
use super::sql::Sql;

/// What is done to messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Retry,
    Discard,
    Replay,
}

/// Which messages: what is not given does not matter.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    pub event_type: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    pub key: Option<String>,
    /// Where they were to go.
    pub destination: Option<String>,
    /// Of a replay: where they go now.
    pub to_destination: Option<String>,
    /// Of dead letters.
    pub error_like: Option<String>,
    /// Of dead letters.
    pub attempts_below: Option<i32>,
    /// When they died; of a replay, when their events were created.
    pub since: Option<When>,
    pub until: Option<When>,
    pub seq_from: Option<i64>,
    pub seq_to: Option<i64>,
    /// At most; None: all.
    pub max_rows: Option<i32>,
}

/// Whether a call names what it leaves open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Arguments {
    /// For people.
    Given,
    /// To be run. Others may create functions in the schema of the extension: each argument is given, with its type, so that
    /// none of theirs fits better.
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

    /// What was done.
    pub fn past(self) -> &'static str {
        match self {
            Self::Retry => "Retried",
            Self::Discard => "Discarded",
            Self::Replay => "Replayed",
        }
    }

    /// As the first word of a question.
    pub fn capitalised(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Discard => "Discard",
            Self::Replay => "Replay",
        }
    }
}

impl Choice {
    /// The call, whose one row has the number of messages in the column `n`.
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
        let all_of_them = || Sql::new("null::integer"); // left out it would be the default
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
                Some(small(self.max_rows).unwrap_or_else(all_of_them)),
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
    fn what_is_run_leaves_no_argument_open() {
        for (verb, count) in [(Verb::Retry, 14), (Verb::Discard, 14), (Verb::Replay, 13)] {
            let (sql, _) = Choice::default().call(verb, None, true, Arguments::All).to_run();
            assert_eq!(sql.matches(" => ").count(), count, "{sql}");
        }
    }

    #[test]
    fn what_is_shown_names_what_was_chosen_and_no_more() {
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
