//! Which messages must not be sent, because the worker handed them over before it knew that one before them had failed:
//! they would overtake it. Pure; used by `intake` on the publisher thread.
//!
//! So failures are numbered. The worker drains them with their outcomes, and each batch carries the number of those that
//! it had drained.

use crate::Publication;
use crate::crossing::Handed;
use std::collections::HashMap;
use std::rc::Rc;

pub(crate) type MessageKey = Rc<str>;

/// Why a message is lost that was handed over before the worker knew of a failure.
const ALL_FAILED: &str = "messages before it were lost";
pub(crate) const KEY_FAILED: &str = "an earlier message of its key failed";

#[derive(Default)]
pub(crate) struct Failures {
    /// The number of failures so far, to be reported with their outcomes.
    pub(crate) count: u64,
    /// The newest failure that may concern any key.
    of_all: u64,
    /// The newest failure of each key, unless the worker is known to have drained it.
    of_key: HashMap<MessageKey, u64>,
}

impl Failures {
    pub(crate) fn all_failed(&mut self) {
        self.count += 1;
        self.of_all = self.count;
    }

    pub(crate) fn key_failed(&mut self, key: MessageKey) {
        self.count += 1;
        self.of_key.insert(key, self.count);
    }

    /// Divides a batch into the messages that may be sent, and the others, with the reason: their loss is a failure, too.
    pub(crate) fn accept(
        &mut self,
        Handed { batch, failures_seen }: Handed,
    ) -> (Vec<Publication>, Vec<(u64, &'static str)>) {
        if failures_seen < self.of_all {
            self.all_failed();
            return (
                Vec::new(),
                batch.iter().map(|message| (message.handle, ALL_FAILED)).collect(),
            );
        }
        self.of_key.retain(|_, failure| *failure > failures_seen);
        if self.of_key.is_empty() {
            return (batch, Vec::new());
        }
        let (mut sent, mut lost) = (Vec::with_capacity(batch.len()), Vec::new());
        for message in batch {
            let failed = message.key.as_deref().and_then(|key| self.of_key.get_key_value(key));
            match failed.map(|(key, _)| Rc::clone(key)) {
                None => sent.push(message),
                Some(key) => {
                    lost.push((message.handle, KEY_FAILED));
                    self.key_failed(key);
                }
            }
        }
        (sent, lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Properties, Text};

    fn handed(messages: &[(u64, Option<&str>)], failures_seen: u64) -> Handed {
        let message = |(handle, key): &(u64, Option<&str>)| Publication {
            handle: *handle,
            address: Text::default(),
            key: key.map(Into::into),
            properties: Properties::default(),
            body: Vec::new(),
        };
        Handed {
            batch: messages.iter().map(message).collect(),
            failures_seen,
        }
    }

    fn accepted(failures: &mut Failures, messages: &[(u64, Option<&str>)], failures_seen: u64) -> (Vec<u64>, Vec<u64>) {
        let (sent, lost) = failures.accept(handed(messages, failures_seen));
        let handles = lost.iter().map(|(handle, _)| *handle).collect();
        (sent.iter().map(|message| message.handle).collect(), handles)
    }

    #[test]
    fn no_message_of_a_failed_key_goes_until_the_worker_has_drained_the_failure() {
        let mut failures = Failures::default();
        failures.key_failed("a".into());
        // Handed over before the worker drained the failure.
        let batch = [(3, Some("a")), (4, Some("b")), (5, None)];
        assert_eq!(accepted(&mut failures, &batch, 0), (vec![4, 5], vec![3]));
        // The worker has drained the first failure, but not the loss of 3.
        assert_eq!(accepted(&mut failures, &[(6, Some("a"))], 1), (vec![], vec![6]));
        let seen = failures.count;
        assert_eq!(accepted(&mut failures, &[(7, Some("a"))], seen), (vec![7], vec![]));
        assert!(failures.of_key.is_empty());
    }

    #[test]
    fn no_message_goes_until_the_worker_has_drained_a_failure_of_all() {
        let mut failures = Failures::default();
        failures.all_failed();
        let batch = [(1, Some("a")), (2, None)];
        assert_eq!(accepted(&mut failures, &batch, 0), (vec![], vec![1, 2]));
        assert_eq!(
            accepted(&mut failures, &batch, 1),
            (vec![], vec![1, 2]),
            "not the loss of these"
        );
        let seen = failures.count;
        assert_eq!(accepted(&mut failures, &batch, seen), (vec![1, 2], vec![]));
    }
}
