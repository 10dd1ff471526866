//! The actions of an operator: their names, calls, questions and results, for the commands, the board and the page.

use crate::failure::Failure;
use crate::format::capitalised;
use crate::messages::bulk::{BulkCriteria, Choice, Verb};
use crate::messages::sql::{Argument, Call};
use crate::queries::Fetch;
use outbox_core::words::Word;
use serde::Deserialize;

/// An action on a message (with a seq) or a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorAction {
    pub verb: Verb,
    pub seq: Option<i64>,
    pub destination: String,
}

/// Runs a call of one row, and returns the number of messages in its column `n`.
pub async fn run<S: Fetch>(session: &S, call: &Call) -> Result<i64, Failure> {
    #[derive(Deserialize)]
    struct CountRow {
        n: i64,
    }
    let (text, values) = call.to_run();
    let values: Vec<_> = values.iter().map(|value| value as _).collect();
    let found: Vec<CountRow> = session.fetch(&text, &values).await?;
    Ok(found.first().map_or(0, |found| found.n))
}

impl OperatorAction {
    /// The call. Its number is 1 if anything changed, or 0.
    pub fn call(&self, reason: Option<&str>) -> Call {
        let Self { verb, seq, destination } = self;
        if *verb == Verb::Replay {
            let only = Choice {
                criteria: BulkCriteria {
                    seq_from: *seq,
                    seq_to: *seq,
                    ..BulkCriteria::default()
                },
                to_destination: Some(destination.clone()),
                max_rows: Some(1),
                ..Choice::default()
            };
            return Call {
                // Else a message that was only for other destinations would be sent to this one.
                only_of: seq.map(|seq| (seq, destination.clone())),
                ..only.call(*verb, reason, false)
            };
        }
        let seq = seq.map(|seq| ("seq", Argument::BigInt(Some(seq))));
        let others = [
            ("destination", Argument::Text(Some(destination.clone()))),
            ("reason", Argument::Text(reason.map(str::to_owned))),
        ];
        Call {
            function: format!("outbox_{}", verb.name()),
            arguments: seq.into_iter().chain(others).collect(),
            only_of: None,
        }
    }

    /// `Retry message 7 to bus`, `Pause destination bus`
    pub fn title(&self) -> String {
        let Self { verb, seq, destination } = self;
        let verb = capitalised(verb.name());
        match seq {
            Some(seq) => format!("{verb} message {seq} to {destination}"),
            None => format!("{verb} destination {destination}"),
        }
    }

    /// What the result of the call means, as a sentence.
    pub fn outcome(&self, changed: bool) -> String {
        let subject = match self.seq {
            Some(seq) => format!("Message {seq}"),
            None => format!("Delivery to {}", self.destination),
        };
        let predicate = match (self.verb, changed) {
            (Verb::Retry, true) => "is delivered again",
            (Verb::Discard, true) => "is discarded",
            (Verb::Replay, true) => "is sent again",
            (Verb::Pause, true) => "is paused; its messages wait",
            (Verb::Resume, true) => "is resumed",
            (_, false) => self.verb.obstacle(),
        };
        format!("{subject} {predicate}.")
    }
}
