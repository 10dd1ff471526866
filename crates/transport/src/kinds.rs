//! The registry: which kinds of destinations there are.

use crate::kind::Kind;
use outbox_core::form::Form;
use std::sync::LazyLock;

/// All kinds. The settings of the server describe a destination of the first.
pub static KINDS: &[&Kind] = &[
    &crate::amqp::KIND,
    &crate::http::KIND,
    #[cfg(feature = "toy")]
    &crate::toy::KIND,
];

impl Kind {
    /// The kind of a foreign data wrapper.
    pub fn of_wrapper(wrapper: &str) -> Option<&'static Self> {
        KINDS.iter().copied().find(|kind| kind.wrapper == wrapper)
    }

    /// The kind of the destination that the settings of the server describe.
    pub fn of_settings() -> &'static Self {
        KINDS[0]
    }
}

/// The forms of all kinds: what a message may have whose destinations are unknown.
pub fn forms() -> &'static [&'static Form] {
    static FORMS: LazyLock<Vec<&'static Form>> = LazyLock::new(|| KINDS.iter().map(|kind| &kind.form).collect());
    &FORMS
}
