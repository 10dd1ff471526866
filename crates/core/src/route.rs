//! Routing keys from a template such as `{aggregate_type}.{operation}`. Parsed when a setting or a destination is read,
//! rendered once per message by `envelope`, on the worker's main thread.
//!
//! | placeholder | value | case |
//! |---|---|---|
//! | `{aggregate_type}`, `{operation}` | of the event | lower: routing keys match by case |
//! | `{type}`, `{aggregate_id}` | of the event | as stored |
//! | `{key}` | the ordering key | as stored |
//!
//! `:raw` or `:lower` after the name chooses the other case: `{aggregate_type:raw}`. `{{` and `}}` are literal braces.
//! A missing value renders as nothing, and nothing around it is stripped: a fanout exchange ignores the key anyway.

use std::fmt;

use crate::message::Event;

/// Where a destination's messages go: a fixed exchange and a routing key per message.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    /// Empty is the broker's default exchange, which routes by queue name.
    pub exchange: &'a str,
    pub template: &'a Template,
}

/// A parsed routing key template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Literal(String),
    Value { field: Field, lower: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    AggregateType,
    Operation,
    Type,
    AggregateId,
    Key,
}

impl Template {
    /// AMQP sends a routing key as a short string: its length is one byte.
    pub const RENDERED_MAX_BYTES: usize = 255;

    /// # Errors
    /// [`TemplateError`] for an unknown placeholder or modifier, a brace without its other half, or more literal text
    /// than any routing key can hold.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut literal_bytes = 0;
        let mut rest = text;
        while let Some(brace_at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..brace_at]);
            let from_brace = &rest[brace_at..];
            if let Some(after) = from_brace.strip_prefix("{{") {
                literal.push('{');
                rest = after;
            } else if let Some(after) = from_brace.strip_prefix("}}") {
                literal.push('}');
                rest = after;
            } else if let Some(after) = from_brace.strip_prefix('{') {
                let (inside, after) = after
                    .split_once('}')
                    .ok_or_else(|| TemplateError::Unclosed(cut(after)))?;
                let value = Part::parse(inside)?;
                literal_bytes += literal.len();
                if !literal.is_empty() {
                    parts.push(Part::Literal(std::mem::take(&mut literal)));
                }
                parts.push(value);
                rest = after;
            } else {
                return Err(TemplateError::Unopened);
            }
        }
        literal.push_str(rest);
        literal_bytes += literal.len();
        if !literal.is_empty() {
            parts.push(Part::Literal(literal));
        }
        if literal_bytes > Self::RENDERED_MAX_BYTES {
            return Err(TemplateError::TooLong { bytes: literal_bytes });
        }
        Ok(Self { parts })
    }

    /// The routing key of one message.
    ///
    /// # Errors
    /// [`RouteError::TooLong`] when it exceeds [`Template::RENDERED_MAX_BYTES`].
    pub fn render(&self, event: &Event, key: Option<&str>) -> Result<String, RouteError> {
        let mut rendered = String::new();
        for part in &self.parts {
            match part {
                Part::Literal(text) => rendered.push_str(text),
                Part::Value { field, lower: false } => rendered.push_str(field.of(event, key)),
                Part::Value { field, lower: true } => rendered.push_str(&field.of(event, key).to_lowercase()),
            }
        }
        match rendered.len() {
            0..=Self::RENDERED_MAX_BYTES => Ok(rendered),
            bytes => Err(RouteError::TooLong { bytes }),
        }
    }
}

impl Part {
    /// What stands between the braces.
    fn parse(inside: &str) -> Result<Self, TemplateError> {
        let (name, modifier) = match inside.split_once(':') {
            Some((name, modifier)) => (name, Some(modifier)),
            None => (inside, None),
        };
        let (field, lower_by_default) = match name {
            "aggregate_type" => (Field::AggregateType, true),
            "operation" => (Field::Operation, true),
            "type" => (Field::Type, false),
            "aggregate_id" => (Field::AggregateId, false),
            "key" => (Field::Key, false),
            _ => return Err(TemplateError::UnknownPlaceholder(cut(name))),
        };
        let lower = match modifier {
            None => lower_by_default,
            Some("lower") => true,
            Some("raw") => false,
            Some(other) => return Err(TemplateError::UnknownModifier(cut(other))),
        };
        Ok(Self::Value { field, lower })
    }
}

impl Field {
    fn of<'a>(self, event: &'a Event, key: Option<&'a str>) -> &'a str {
        match self {
            Self::AggregateType => event.aggregate_type.as_deref(),
            Self::Operation => event.operation.as_deref(),
            Self::Type => Some(event.kind.as_str()),
            Self::AggregateId => event.aggregate_id.as_deref(),
            Self::Key => key,
        }
        .unwrap_or_default()
    }
}

/// Why a text is not a template. `Display` says what is wrong, [`TemplateError::hint`] what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateError {
    /// The name between the braces, cut to 32 characters.
    UnknownPlaceholder(String),
    /// What stands after the colon, cut to 32 characters.
    UnknownModifier(String),
    /// What follows the open brace, cut to 32 characters.
    Unclosed(String),
    Unopened,
    /// The literal text alone is longer than any routing key.
    TooLong {
        bytes: usize,
    },
}

impl TemplateError {
    pub fn hint(&self) -> &'static str {
        match self {
            Self::UnknownPlaceholder(_) => {
                "Known placeholders: {aggregate_type}, {operation}, {type}, {aggregate_id}, {key}; write {{ and }} for \
                 literal braces."
            }
            Self::UnknownModifier(_) => {
                "Known modifiers: :raw and :lower, as in {aggregate_type:raw}. Known placeholders: {aggregate_type}, \
                 {operation}, {type}, {aggregate_id}, {key}."
            }
            Self::Unclosed(_) | Self::Unopened => {
                "Write {{ and }} for literal braces. Known placeholders: {aggregate_type}, {operation}, {type}, \
                 {aggregate_id}, {key}."
            }
            Self::TooLong { .. } => {
                "A routing key holds 255 bytes. Known placeholders: {aggregate_type}, {operation}, {type}, \
                 {aggregate_id}, {key}."
            }
        }
    }
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownPlaceholder(name) => write!(f, "unknown placeholder \"{{{name}}}\" in the template"),
            Self::UnknownModifier(name) => write!(f, "unknown modifier \":{name}\" in the template"),
            Self::Unclosed(text) => write!(f, "the brace before \"{text}\" is not closed"),
            Self::Unopened => write!(f, "a closing brace in the template has no opening one"),
            Self::TooLong { bytes } => write!(f, "the template's own text is {bytes} bytes long"),
        }
    }
}

impl std::error::Error for TemplateError {}

/// Why one message cannot be routed by a valid template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteError {
    TooLong { bytes: usize },
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::TooLong { bytes } = self;
        write!(
            f,
            "the routing key is {bytes} bytes long, AMQP carries at most {}",
            Template::RENDERED_MAX_BYTES
        )
    }
}

impl std::error::Error for RouteError {}

fn cut(text: &str) -> String {
    text.chars().take(32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn event() -> Event {
        Event {
            kind: "OrderPlaced".into(),
            aggregate_type: Some("Order".into()),
            aggregate_id: Some("A-42".into()),
            operation: Some("INSERT".into()),
            ..Event::default()
        }
    }

    fn rendered(template: &str) -> String {
        Template::parse(template)
            .unwrap()
            .render(&event(), Some("Key-1"))
            .unwrap()
    }

    #[test]
    fn the_default_template_is_lower_case() {
        assert_eq!(rendered("{aggregate_type}.{operation}"), "order.insert");
    }

    #[test]
    fn other_values_stay_as_stored() {
        assert_eq!(rendered("{type}/{aggregate_id}/{key}"), "OrderPlaced/A-42/Key-1");
    }

    #[test]
    fn a_modifier_chooses_the_case() {
        assert_eq!(
            rendered("{aggregate_type:raw}.{operation:lower}.{type:lower}.{key:raw}"),
            "Order.insert.orderplaced.Key-1"
        );
    }

    #[test]
    fn a_template_without_placeholders_is_a_fixed_key() {
        assert_eq!(rendered("orders.all"), "orders.all");
        assert_eq!(rendered(""), "");
    }

    #[test]
    fn doubled_braces_are_literal() {
        assert_eq!(rendered("{{{type}}}"), "{OrderPlaced}");
        assert_eq!(rendered("a{{b}}c"), "a{b}c");
    }

    #[test]
    fn a_missing_value_renders_as_nothing_and_nothing_around_it_is_stripped() {
        let template = Template::parse("{aggregate_type}.{operation}.{key}").unwrap();
        assert_eq!(template.render(&Event::default(), None), Ok("..".to_owned()));
    }

    #[test]
    fn lower_case_knows_more_than_ascii() {
        let event = Event {
            aggregate_type: Some("ÜBERGABE".into()),
            ..Event::default()
        };
        assert_eq!(
            Template::parse("{aggregate_type}").unwrap().render(&event, None),
            Ok("übergabe".to_owned())
        );
    }

    #[test]
    fn an_unknown_placeholder_is_refused_with_the_known_ones() {
        let error = Template::parse("a.{tenant}").unwrap_err();
        assert_eq!(error.to_string(), "unknown placeholder \"{tenant}\" in the template");
        assert!(
            error
                .hint()
                .contains("{aggregate_type}, {operation}, {type}, {aggregate_id}, {key}")
        );
        for text in ["{}", "{Type}", "{ type }", "{a{type}", "{:raw}"] {
            assert!(
                matches!(Template::parse(text), Err(TemplateError::UnknownPlaceholder(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn an_unknown_modifier_is_refused() {
        for (text, modifier) in [
            ("{type:upper}", "upper"),
            ("{type:}", ""),
            ("{type:raw:lower}", "raw:lower"),
        ] {
            assert_eq!(
                Template::parse(text),
                Err(TemplateError::UnknownModifier(modifier.into()))
            );
        }
    }

    #[test]
    fn a_brace_without_its_other_half_is_refused() {
        assert_eq!(Template::parse("a.{type"), Err(TemplateError::Unclosed("type".into())));
        assert_eq!(Template::parse("{"), Err(TemplateError::Unclosed(String::new())));
        assert_eq!(Template::parse("a}b"), Err(TemplateError::Unopened));
        assert_eq!(Template::parse("{type}}"), Err(TemplateError::Unopened));
    }

    #[test]
    fn literal_text_longer_than_any_routing_key_is_refused() {
        assert!(Template::parse(&"é".repeat(127)).is_ok());
        assert_eq!(
            Template::parse(&"é".repeat(128)),
            Err(TemplateError::TooLong { bytes: 256 })
        );
        let split = format!("{}{{key}}{}", "a".repeat(128), "a".repeat(128));
        assert_eq!(Template::parse(&split), Err(TemplateError::TooLong { bytes: 256 }));
    }

    #[test]
    fn a_routing_key_over_255_bytes_is_an_error_of_the_message() {
        let template = Template::parse("{key}").unwrap();
        assert_eq!(template.render(&event(), Some(&"k".repeat(255))).unwrap().len(), 255);
        assert_eq!(
            template.render(&event(), Some(&"k".repeat(256))),
            Err(RouteError::TooLong { bytes: 256 })
        );
    }

    proptest! {
        #[test]
        fn no_text_panics_the_parser(
            text in r"[{}:a-zé]{0,40}|(\{(type|key|operation)(:raw|:lower|:)?\}|\{\{|\}\}|\PC){0,12}",
        ) {
            match Template::parse(&text) {
                Ok(template) => { let _ = template.render(&event(), None); }
                Err(error) => prop_assert!(error.hint().contains("aggregate_type")),
            }
        }

        #[test]
        fn escaped_text_renders_as_itself(text in "\\PC{0,60}") {
            let escaped = text.replace('{', "{{").replace('}', "}}");
            prop_assert_eq!(rendered(&escaped), text);
        }
    }
}
