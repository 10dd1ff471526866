//! The checks of settings that are texts. Core calls them when an operator sets one, and at each start of a session.

use crate::pg::guc::{Refused, check_hook};
use outbox_core::envelope;
use outbox_core::route::Template;
use outbox_core::standbys;
use outbox_transport::{AllowList, ExchangeType, UrlError, parse_url};

/// The limit of outbox.actor, outbox.metadata and outbox.headers, in bytes.
const SESSION_TEXT_MAX: usize = 1 << 20;

check_hook!(url_hook, check_url);
check_hook!(password_file_hook, check_password_file);
check_hook!(tls_ca_file_hook, check_tls_ca_file);
check_hook!(tls_cert_file_hook, check_tls_cert_file);
check_hook!(tls_key_file_hook, check_tls_key_file);
check_hook!(http_allow_hook, check_http_allow);
check_hook!(exchange_hook, check_exchange);
check_hook!(exchange_type_hook, check_exchange_type);
check_hook!(routing_key_hook, check_routing_key);
check_hook!(standby_names_hook, check_standby_names);
check_hook!(worker_role_hook, check_worker_role);
check_hook!(actor_hook, check_actor);
check_hook!(correlation_id_hook, check_correlation_id);
check_hook!(metadata_hook, check_metadata);
check_hook!(headers_hook, check_headers);

fn refused(message: impl Into<String>, hint: impl Into<String>) -> Result<(), Refused> {
    Err(Refused {
        message: message.into(),
        hint: hint.into(),
    })
}

fn check_url(url: &str) -> Result<(), Refused> {
    if url.is_empty() {
        return Ok(());
    }
    match parse_url(url) {
        Ok(_) => Ok(()),
        // The value itself is not repeated: it may contain a password.
        Err(error @ UrlError::CarriesPassword) => refused(
            format!("outbox.url is refused: {error}"),
            "Write amqp://user@host and put the password into a file that outbox.password_file names.",
        ),
        Err(error) => refused(
            format!("outbox.url is refused: {error}"),
            "Examples: amqp://user@host:5672/vhost, amqps://user@host, amqp://user@host1,host2",
        ),
    }
}

const SECRET_FILE: &str = "Name a file of mode 0600 that belongs to the server's user.";
const PEM_FILE: &str = "Name a file in PEM that the server's user can read.";

fn check_password_file(path: &str) -> Result<(), Refused> {
    check_path("outbox.password_file", path, SECRET_FILE)
}

fn check_tls_ca_file(path: &str) -> Result<(), Refused> {
    check_path("outbox.tls_ca_file", path, PEM_FILE)
}

fn check_tls_cert_file(path: &str) -> Result<(), Refused> {
    check_path("outbox.tls_cert_file", path, PEM_FILE)
}

fn check_tls_key_file(path: &str) -> Result<(), Refused> {
    check_path("outbox.tls_key_file", path, SECRET_FILE)
}

/// A worker's working directory is the data directory; that of the operator who sets it is another.
fn check_path(setting: &str, path: &str, hint: &str) -> Result<(), Refused> {
    if path.is_empty() || path.starts_with('/') {
        return Ok(());
    }
    refused(format!("{setting} is not an absolute path"), hint)
}

fn check_http_allow(list: &str) -> Result<(), Refused> {
    match AllowList::parse(list) {
        Ok(_) => Ok(()),
        Err(error) => refused(
            format!("outbox.http_allow is refused: {error}"),
            "Example: hooks.internal, 10.1.0.0/16",
        ),
    }
}

fn check_exchange(exchange: &str) -> Result<(), Refused> {
    if exchange.len() <= 255 {
        return Ok(());
    }
    refused(
        format!("outbox.exchange is {} bytes long", exchange.len()),
        "AMQP allows 255 bytes.",
    )
}

fn check_exchange_type(name: &str) -> Result<(), Refused> {
    match ExchangeType::parse(name) {
        Some(_) => Ok(()),
        None => refused(
            format!("outbox.exchange_type \"{name}\" is unknown"),
            ExchangeType::HINT,
        ),
    }
}

fn check_routing_key(template: &str) -> Result<(), Refused> {
    match Template::parse(template) {
        Ok(_) => Ok(()),
        Err(error) => refused(format!("outbox.routing_key is refused: {error}"), error.hint),
    }
}

fn check_standby_names(list: &str) -> Result<(), Refused> {
    match standbys::names(list) {
        Ok(_) => Ok(()),
        Err(error) => refused(
            format!("outbox.standby_names is refused: {error}"),
            "Examples: replica1, replica2; or db-* with a number in outbox.standby_quorum.",
        ),
    }
}

fn check_worker_role(name: &str) -> Result<(), Refused> {
    if !name.is_empty() && name.len() < 64 {
        return Ok(());
    }
    refused(
        "outbox.worker_role is not the name of a role",
        "Leave it at outbox_worker unless that name is taken.",
    )
}

fn check_correlation_id(id: &str) -> Result<(), Refused> {
    refused_if_not("outbox.correlation_id", id, envelope::check_short("correlation id", id))
}

fn check_actor(actor: &str) -> Result<(), Refused> {
    check_length("outbox.actor", actor)
}

/// It is copied for each event, and an allocation that fails aborts the process.
fn check_length(name: &str, value: &str) -> Result<(), Refused> {
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

fn check_metadata(json: &str) -> Result<(), Refused> {
    check_length("outbox.metadata", json)?;
    refused_if_not("outbox.metadata", json, envelope::check_metadata(json))
}

fn check_headers(json: &str) -> Result<(), Refused> {
    check_length("outbox.headers", json)?;
    refused_if_not("outbox.headers", json, envelope::check_headers(json))
}

/// An empty value means none, so it is never checked.
fn refused_if_not(name: &str, value: &str, checked: Result<(), envelope::Refusal>) -> Result<(), Refused> {
    match checked {
        Err(refusal) if !value.is_empty() => refused(format!("{name} is refused: {}", refusal.message), refusal.hint),
        _ => Ok(()),
    }
}
