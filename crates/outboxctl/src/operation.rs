//! An action of an operator on one message or one destination, for the commands and the board.

use outbox_core::words::Word;

outbox_core::words! {
    pub enum ActionVerb {
        Retry = "retry",
        Discard = "discard",
        Pause = "pause",
        Resume = "resume",
    }
}

/// An action on a message (with a seq) or a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorAction {
    pub verb: ActionVerb,
    pub seq: Option<i64>,
    pub destination: String,
}

impl OperatorAction {
    /// The call, with the destination as `$1` and the reason as `$2`. It returns whether anything changed.
    pub fn sql(&self) -> String {
        let seq = self.seq.map_or(String::new(), |seq| format!("{seq}::bigint, "));
        format!(
            "select @extschema@.outbox_{}({seq}$1::text, $2::text) as changed",
            self.verb.name()
        )
    }

    pub fn question(&self) -> String {
        let Self { verb, seq, destination } = self;
        let seq = seq.unwrap_or_default();
        match verb {
            ActionVerb::Retry => format!("Retry message {seq} to {destination}?"),
            ActionVerb::Discard => format!("Discard message {seq} to {destination}? It is never delivered."),
            ActionVerb::Pause => format!("Pause delivery to {destination}?"),
            ActionVerb::Resume => format!("Resume delivery to {destination}?"),
        }
    }

    /// What the result of the call means, as a sentence.
    pub fn outcome(&self, changed: bool) -> String {
        let subject = match self.seq {
            Some(seq) => format!("Message {seq}"),
            None => format!("Delivery to {}", self.destination),
        };
        let predicate = match (self.verb, changed) {
            (ActionVerb::Retry, true) => "is delivered again",
            (ActionVerb::Discard, true) => "is discarded",
            (ActionVerb::Pause, true) => "is paused; its messages wait",
            (ActionVerb::Resume, true) => "is resumed",
            (_, false) => self.verb.obstacle(),
        };
        format!("{subject} {predicate}.")
    }
}

impl ActionVerb {
    /// Why the call changed nothing.
    pub fn obstacle(self) -> &'static str {
        match self {
            Self::Retry => "is in flight, was published or discarded already, or waits behind another of its key",
            Self::Discard => "was published or discarded already, or does not exist",
            Self::Pause => "is already paused; its reason is kept",
            Self::Resume => "was not paused",
        }
    }
}
