//! What the rest of the house knows of a destination by AMQP: an exchange of RabbitMQ, with its options and the form of
//! its messages. Pure.

use super::config::{AmqpConfig, ExchangeType};
use super::findings;
use super::url::{AmqpAddress, parse_url};
use crate::down::{DownReason, Fault};
use crate::kind::{Kind, Peer, Target};
use crate::options::{FileRule, OptionValue, Options, Refused, Setting};
use crate::start::Start;
use crate::url::Endpoint;
use crate::{Publisher, Secret, Text};
use outbox_core::envelope::Refusal;
use outbox_core::finding::Finding;
use outbox_core::form::Form;
use outbox_core::route::Template;
use std::any::Any;
use std::io;
use std::sync::Arc;

pub static KIND: Kind = Kind {
    wrapper: "outbox_amqp",
    protocol: "AMQP",
    about: "Destinations of outbox that are exchanges of an AMQP 0-9-1 broker (RabbitMQ). The password belongs in a user \
            mapping for the role of the workers.",
    peer: "broker",
    connects_first: true,
    place: Some("exchange"),
    without_mapping: "the user is the one in the option url, the password is guest",
    one_by_one: false,
    may_be_private: true,
    form: Form {
        address: "routing key",
        check_name: check_routes_nothing,
        ..Form::TYPED
    },
    address: Some("routing_key"),
    of_server: &[
        "url", "exchange", "exchange_type", "routing_key", "expiration", "priority", "on_unroutable", "max_in_flight",
        "confirm_timeout",
    ],
    of_mapping: &["user", "password"],
    settings: &[
        Setting::text(c"outbox.url", "url", c"", c"The broker: amqp://[user@]host[:port][,host[:port]...][/vhost], or amqps:// for TLS. Carries no password."),
        Setting::text(c"outbox.password_file", "password", c"", c"File that holds the broker's password: absolute path, mode 0600, owned by the server's user.")
            .of_file(FileRule::Secret)
            .of_mapping(),
        Setting::text(c"outbox.exchange", "exchange", c"outbox", c"The exchange that messages are published to."),
        Setting::text(c"outbox.exchange_type", "exchange_type", c"", c"direct, fanout, topic or headers: declare the exchange durable of that type. Empty: only check that it exists."),
        Setting::text(c"outbox.routing_key", "routing_key", c"{aggregate_type}.{operation}", c"Template of the routing key: {aggregate_type} {operation} (lower case), {type} {aggregate_id} {key} {partition} {header:NAME}, {key|fallback}."),
    ],
    reasons: super::findings::REASONS,
    words: super::findings::WORDS,
    read,
};

/// RabbitMQ closes the channel of a message with a longer expiration (`MAX_EXPIRY_TIMER` in rabbit.hrl).
pub(super) const EXPIRATION_MAX_MS: u64 = u32::MAX as u64;

/// RabbitMQ reads these as lists of further routing keys and closes the channel (406 PRECONDITION_FAILED) if they are
/// anything else (rabbit_basic.erl, header_routes). A header here is never a list, so one message would fail the whole
/// window, again and again.
const ROUTING_HEADERS: [&str; 2] = ["CC", "BCC"];

fn check_routes_nothing(name: &str) -> Result<(), Refusal> {
    match ROUTING_HEADERS.contains(&name) {
        false => Ok(()),
        true => Err(Refusal::new(
            format!("the header {name} cannot be set"),
            "RabbitMQ takes CC and BCC for lists of routing keys. Choose another name, or bind further queues to the \
             exchange.",
        )),
    }
}

/// An exchange of a broker.
struct Exchange {
    url: Option<(String, AmqpAddress)>,
    user: Option<String>,
    /// None = the protocol's default password.
    password: Option<OptionValue>,
    /// Empty is the broker's default exchange, which routes by queue name.
    name: Text,
    exchange_type: ExchangeType,
    routing_key: Template,
    expiration_ms: Option<u64>,
    priority: Option<u8>,
}

fn read(server: &Options, mapping: &Options) -> Result<Arc<dyn Peer>, Refused> {
    const URL: &str = "Examples: amqp://user@host:5672/vhost, amqps://user@host, amqp://user@host1,host2. A password \
                       belongs in a user mapping; that of outbox.url in the file that outbox.password_file names.";
    Ok(Arc::new(Exchange {
        url: server.read("url", |given| {
            let address = given.parsed(parse_url(given.text), URL)?;
            Ok((given.text.to_owned(), address))
        })?,
        user: mapping.text("user").map(str::to_owned),
        password: mapping.value("password").cloned(),
        name: server.read("exchange", |given| given.short())?.unwrap_or_default(),
        exchange_type: server
            .read("exchange_type", |given| {
                let known = ExchangeType::parse(given.text).ok_or("it is unknown");
                given.parsed(known, ExchangeType::HINT)
            })?
            .unwrap_or_default(),
        routing_key: server.read("routing_key", |given| given.address())?.unwrap_or_default(),
        expiration_ms: server.read("expiration", |given| given.millis(0..=EXPIRATION_MAX_MS))?,
        priority: server.read("priority", |given| given.number(0..=255).map(|priority| priority as u8))?,
    }))
}

impl Exchange {
    /// Whether it logs in as guest on another host, which RabbitMQ refuses (`loopback_users`).
    fn is_remote_guest(&self) -> bool {
        let is_local = |host: &str| host == "localhost" || host == "::1" || host.starts_with("127.");
        self.user() == Some("guest") && self.endpoints().iter().any(|at| !is_local(&at.host))
    }

    /// With whose password it logs in.
    fn user(&self) -> Option<&str> {
        let (_, address) = self.url.as_ref().filter(|(_, address)| !address.external)?;
        Some(self.user.as_deref().or(address.user.as_deref()).unwrap_or("guest"))
    }
}

impl Peer for Exchange {
    fn endpoints(&self) -> Vec<Endpoint> {
        self.url
            .as_ref()
            .map_or(Vec::new(), |(_, address)| address.endpoints.clone())
    }

    fn address(&self) -> &Template {
        &self.routing_key
    }

    fn facts(&self, address: &str) -> Vec<(&'static str, String)> {
        let exchange = match self.name.as_str() {
            "" => "(the default one)",
            name => name,
        };
        let broker = self.url.iter().map(|(url, _)| ("Broker", url.clone()));
        let place = [("Exchange", exchange.to_owned()), ("Routing key", address.to_owned())];
        broker.chain(place).collect()
    }

    fn start(&self, target: &Target, start: &mut Start<'_>) -> Result<io::Result<Publisher>, Finding> {
        let no_url = || Finding::new("no_url", "outbox.url is empty: there is no broker to deliver to");
        let (_, mut address) = self.url.clone().ok_or_else(no_url)?;
        if self.user.is_some() {
            address.user.clone_from(&self.user);
        }
        let password = match &self.password {
            None => Secret::new("guest"), // the protocol's default, as is the user
            Some(password) => start.password(password)?,
        };
        let tls = address.tls.then(|| start.tls(&target.certificates)).transpose()?;
        Ok(start.publisher(AmqpConfig {
            allow: target.allow.clone(),
            exchange: self.name.to_string(),
            exchange_type: self.exchange_type.clone(),
            expiration_ms: self.expiration_ms,
            priority: self.priority,
            window: target.max_in_flight,
            connect_timeout: target.connect_timeout,
            confirm_timeout: target.answer_timeout,
            min_send_rate: target.min_send_rate,
            connection_name: start.connection_name.to_owned(),
            deadline: start.deadline.clone(),
            tls,
            ..AmqpConfig::new(address, password)
        }))
    }

    fn explain(&self, fault: Fault, all: &[Target]) -> Finding {
        let own = |target: &Target| {
            let other: &Self = (target.peer() as &dyn Any).downcast_ref()?;
            let is_same_user = (&self.url, &self.user) == (&other.url, &other.user);
            is_same_user.then(|| other.name.to_string())
        };
        let exchanges = all.iter().filter_map(own).chain([self.name.to_string()]).collect();
        let is_login = fault.reason == DownReason::AUTH_REFUSED;
        let mut finding = findings::of_refusal(fault, &exchanges, self.is_remote_guest());
        if let Some(user) = self.user().filter(|_| is_login) {
            finding.detail = format!("user \"{user}\": {}", finding.detail);
        }
        finding
    }

    fn blocked(&self, detail: String) -> Finding {
        findings::of_alarm(detail)
    }
}

#[cfg(test)]
mod tests {
    use outbox_core::envelope::check_headers;

    #[test]
    fn headers_that_rabbitmq_would_close_the_channel_for_are_refused() {
        for json in [r#"{"CC": "a.b"}"#, r#"{"BCC": ["a"]}"#] {
            let refusal = check_headers(json, crate::kinds::forms()).unwrap_err();
            assert!(refusal.hint.contains("routing keys"), "{json}");
        }
        assert_eq!(check_headers(r#"{"cc": "a.b"}"#, crate::kinds::forms()), Ok(()));
    }
}
