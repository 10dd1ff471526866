//! The checks of settings that are texts. Core calls them when an operator sets one, and at each start of a session.

use super::options;
use crate::pg::guc::{CheckHook, RefusedSetting, check_hook};
use outbox_core::envelope;
use outbox_core::standbys;
use outbox_transport::AllowList;
use outbox_transport::kind::Kind;
use outbox_transport::kinds::forms;

/// The limit of outbox.actor, outbox.metadata and outbox.headers, in bytes.
const SESSION_TEXT_MAX: usize = 1 << 20;

check_hook!(http_allow_hook, check_http_allow);
check_hook!(standby_names_hook, check_standby_names);
check_hook!(worker_role_hook, check_worker_role);
check_hook!(actor_hook, check_actor);
check_hook!(correlation_id_hook, check_correlation_id);
check_hook!(metadata_hook, check_metadata);
check_hook!(headers_hook, check_headers);

fn refused(message: impl Into<String>, hint: impl Into<String>) -> Result<(), RefusedSetting> {
    Err(RefusedSetting {
        message: message.into(),
        hint: hint.into(),
    })
}

/// The hooks of the settings in a table. Core passes no name to a hook, so each place has one.
macro_rules! option_hooks {
    ($($hook:ident = $place:literal)+) => {
        $(check_hook!($hook, |value: &str| check_option($place, value));)+
        pub(super) const OPTION_HOOKS: &[CheckHook] = &[$(Some($hook)),+];
    };
}

option_hooks! {
    option_0 = 0 option_1 = 1 option_2 = 2 option_3 = 3 option_4 = 4 option_5 = 5
    option_6 = 6 option_7 = 7 option_8 = 8 option_9 = 9 option_10 = 10 option_11 = 11
}

/// The value itself is not repeated: it may contain a password.
fn check_option(place: usize, value: &str) -> Result<(), RefusedSetting> {
    let Some(setting) = options().nth(place) else {
        return Ok(());
    };
    let name = setting.name.to_str().unwrap_or_default();
    let checked = setting.check(Kind::of_settings(), value);
    checked.map_err(|(why, hint)| RefusedSetting {
        message: format!("{name} is refused: {why}"),
        hint,
    })
}

fn check_http_allow(list: &str) -> Result<(), RefusedSetting> {
    match AllowList::parse(list) {
        Ok(_) => Ok(()),
        Err(error) => refused(
            format!("outbox.http_allow is refused: {error}"),
            "Example: hooks.internal, 10.1.0.0/16",
        ),
    }
}

fn check_standby_names(list: &str) -> Result<(), RefusedSetting> {
    match standbys::names(list) {
        Ok(_) => Ok(()),
        Err(error) => refused(
            format!("outbox.standby_names is refused: {error}"),
            "Examples: replica1, replica2; or db-* with a number in outbox.standby_quorum.",
        ),
    }
}

fn check_worker_role(name: &str) -> Result<(), RefusedSetting> {
    if !name.is_empty() && name.len() < 64 {
        return Ok(());
    }
    refused(
        "outbox.worker_role is not the name of a role",
        "Leave it at outbox_worker unless that name is taken.",
    )
}

fn check_correlation_id(id: &str) -> Result<(), RefusedSetting> {
    refused_if_not("outbox.correlation_id", id, envelope::check_short("correlation id", id))
}

fn check_actor(actor: &str) -> Result<(), RefusedSetting> {
    check_length("outbox.actor", actor)
}

/// It is copied for each event, and an allocation that fails aborts the process.
fn check_length(name: &str, value: &str) -> Result<(), RefusedSetting> {
    match value.len() <= SESSION_TEXT_MAX {
        true => Ok(()),
        false => refused(
            format!(
                "{name} is refused: it has {} bytes; the limit is {SESSION_TEXT_MAX}",
                value.len()
            ),
            "Pass such a large value to outbox_publish.",
        ),
    }
}

fn check_metadata(json: &str) -> Result<(), RefusedSetting> {
    check_length("outbox.metadata", json)?;
    refused_if_not("outbox.metadata", json, envelope::check_metadata(json))
}

fn check_headers(json: &str) -> Result<(), RefusedSetting> {
    check_length("outbox.headers", json)?;
    refused_if_not("outbox.headers", json, envelope::check_headers(json, forms()))
}

/// An empty value means none, so it is never checked.
fn refused_if_not(name: &str, value: &str, checked: Result<(), envelope::Refusal>) -> Result<(), RefusedSetting> {
    match checked {
        Err(refusal) if !value.is_empty() => refused(format!("{name} is refused: {}", refusal.message), refusal.hint),
        _ => Ok(()),
    }
}
