//! Where the messages of a destination go, and their form: what `envelope` needs in addition to the event. Made from
//! settings when a worker reads them; used for each message, on the worker's main thread.

pub use crate::format::{Format, TransportKind};
pub use crate::template::Template;

use crate::header_names::static_name;
use crate::refusal::{Refusal, check_short};
use crate::text::Text;

/// One destination, as the worker's settings describe it.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    pub transport: TransportKind,
    pub format: Format,
    /// Empty is the broker's default exchange, which routes by queue name. Only with AMQP.
    pub exchange: &'a Text,
    /// The template of the routing key. Only with AMQP.
    pub template: &'a Template,
    pub statics: &'a Statics,
}

/// Properties and headers that each message of a destination has.
#[derive(Clone, Debug, PartialEq)]
pub struct Statics {
    pub app_id: Text,
    /// Only with [`Format::Payload`], whose body then need not be JSON.
    pub content_type: Option<Text>,
    /// How long RabbitMQ keeps the message in a queue. Only with AMQP.
    pub expiration_ms: Option<u64>,
    /// For queues with `x-max-priority`. Only with AMQP.
    pub priority: Option<u8>,
    /// The `source` of CloudEvents, a URI reference; ids are unique within it.
    pub source: Template,
    /// They replace headers of the user, and never those of outbox.
    pub headers: StaticHeaders,
}

/// Headers of a destination: names that may be sent there, and templates of their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StaticHeaders(Vec<(Text, Template)>);

/// RabbitMQ closes the channel of a message with a longer expiration (`MAX_EXPIRY_TIMER` in rabbit.hrl).
pub const EXPIRATION_MAX_MS: u64 = u32::MAX as u64;

/// Unless a destination has another one.
pub const SOURCE: &str = "/outbox";
pub const APP_ID: &str = "outbox";

impl Default for Statics {
    fn default() -> Self {
        Self {
            app_id: Text::Static(APP_ID),
            content_type: None,
            expiration_ms: None,
            priority: None,
            source: Template::fixed(SOURCE),
            headers: StaticHeaders::default(),
        }
    }
}

impl StaticHeaders {
    /// Adds a header whose value is rendered from `template`; if the result is empty, the header is absent.
    ///
    /// # Errors [`Refusal`] for a reserved name, a name that cannot be sent or was added before, and for a text that is
    /// not a template.
    pub fn add(&mut self, transport: TransportKind, format: Format, name: &str, template: &str) -> Result<(), Refusal> {
        let name = static_name(transport, format, name)?;
        if self.0.iter().any(|(other, _)| *other == name) {
            return Err(Refusal::new(
                format!("the header {name} is set twice"),
                "Name each header once.",
            ));
        }
        let template = Template::parse_text(template)
            .map_err(|error| Refusal::new(format!("the value of the header {name}: {error}"), error.hint))?;
        self.0.push((name, template));
        Ok(())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(Text, Template)> {
        self.0.iter()
    }
}

impl Statics {
    /// Checks what can be checked without an event.
    ///
    /// # Errors [`Refusal`] for an option that the format or the transport has no place for, or cannot carry.
    pub fn check(&self, transport: TransportKind, format: Format) -> Result<(), Refusal> {
        let refuse = |message: &str, hint: &str| Err(Refusal::new(message.to_owned(), hint));
        check_short("app_id", &self.app_id)?;
        if let Some(content_type) = &self.content_type {
            check_short("content type", content_type)?;
            if format != Format::Payload {
                return refuse(
                    "the content type can be set only with the format payload",
                    "The other formats are JSON and say so. Choose the format payload or leave the content type out.",
                );
            }
            let is_printable = content_type.bytes().all(|byte| matches!(byte, b' '..=b'~'));
            if !is_printable || !content_type.contains('/') {
                return refuse(
                    "the content type is not valid",
                    "Write it as type/subtype, such as text/plain.",
                );
            }
        }
        if transport == TransportKind::Http && (self.expiration_ms.is_some() || self.priority.is_some()) {
            return refuse(
                "expiration and priority cannot be set for HTTP",
                "They are properties of AMQP. Leave them out.",
            );
        }
        if self
            .expiration_ms
            .is_some_and(|expiration| expiration > EXPIRATION_MAX_MS)
        {
            return refuse(
                "the expiration exceeds the limit of RabbitMQ",
                "At most 4294967295 ms, which are 49 days.",
            );
        }
        if format.is_cloudevents() && self.source.is_empty() {
            return refuse(
                "the source of CloudEvents is empty",
                "Set a URI reference, such as /orders or https://example.com/orders.",
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::Word;

    #[test]
    fn options_without_a_place_in_the_format_or_transport_are_refused() {
        use Format::{CloudEvents, Envelope, Payload};
        use TransportKind::{Amqp, Http};
        let with = |change: fn(&mut Statics)| {
            let mut statics = Statics::default();
            change(&mut statics);
            statics
        };
        for format in Format::ALL.iter().copied() {
            for transport in [Amqp, Http] {
                assert_eq!(Statics::default().check(transport, format), Ok(()));
            }
        }
        let typed = with(|s| s.content_type = Some("text/plain".into()));
        assert_eq!(typed.check(Amqp, Payload), Ok(()));
        assert!(typed.check(Amqp, Envelope).is_err());
        assert!(
            with(|s| s.content_type = Some("text/plain\r\nx: y".into()))
                .check(Http, Payload)
                .is_err()
        );
        assert!(
            with(|s| s.content_type = Some("text".into()))
                .check(Http, Payload)
                .is_err()
        );
        let longest = with(|s| s.expiration_ms = Some(4_294_967_295));
        assert_eq!(longest.check(Amqp, Envelope), Ok(()));
        assert!(longest.check(Http, Envelope).is_err());
        assert!(
            with(|s| s.expiration_ms = Some(4_294_967_296))
                .check(Amqp, Envelope)
                .is_err()
        );
        assert!(with(|s| s.priority = Some(0)).check(Http, Envelope).is_err());
        assert!(
            with(|s| s.app_id = "x".repeat(256).into())
                .check(Amqp, Envelope)
                .is_err()
        );
        let nowhere = with(|s| s.source = Template::parse_text("").unwrap());
        assert_eq!(nowhere.check(Amqp, Envelope), Ok(()));
        assert!(nowhere.check(Amqp, CloudEvents).is_err());
    }

    #[test]
    fn a_static_header_has_a_unique_name_and_a_template() {
        use TransportKind::{Amqp, Http};
        let mut headers = StaticHeaders::default();
        let mut add = |transport, name: &str, template: &str| headers.add(transport, Format::Envelope, name, template);
        assert_eq!(add(Amqp, "tenant", "{header:tenant|none}"), Ok(()));
        assert!(add(Amqp, "tenant", "x").unwrap_err().message.contains("twice"));
        let refusal = add(Amqp, "other", "{tenant}").unwrap_err();
        assert!(
            refusal
                .message
                .starts_with("the value of the header other: unknown placeholder"),
            "{refusal}"
        );
        assert!(refusal.hint.contains("{header:NAME}"));
        assert_eq!(add(Http, "X-Team", "a"), Ok(()));
        assert!(add(Http, "x-team", "b").unwrap_err().message.contains("twice"));
    }
}
