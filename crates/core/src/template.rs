//! Texts from a template such as `{aggregate_type}.{operation}`: routing keys, and other texts that a destination adds
//! to each message. Parsed when a setting or a destination is read, rendered by `envelope` on the worker's main thread.
//!
//! | placeholder | value | case |
//! |---|---|---|
//! | `{aggregate_type}`, `{operation}` | of the event | lower: routing keys match by case |
//! | `{type}`, `{aggregate_id}` | of the event | as stored |
//! | `{key}` | the ordering key | as stored |
//! | `{partition}` | its partition, such as `p07` | |
//! | `{destination}` | name of the destination | as stored |
//! | `{header:NAME}` | a header of the user; NAME as written, without `:`, `|` and braces | as stored |
//!
//! `:raw` or `:lower` after the name chooses the other case: `{aggregate_type:raw}`, `{header:tenant:lower}`. A missing
//! value renders as nothing, and the text around it stays: a fanout exchange ignores the key anyway. The text after `|`
//! replaces a value that is missing or empty, as it is written: `{header:tenant|none}`. `{{` and `}}` are literal
//! braces.

use std::sync::Arc;

use crate::message::{Event, HeaderValue, Pointer};
use crate::partition::Partition;
use crate::refusal::{Refusal, SHORT_STRING_MAX};
use crate::text::Text;

/// A parsed template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Parts,
    bytes_max: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Parts {
    /// The same text for each message.
    Fixed(Arc<str>),
    Mixed(Vec<TemplatePart>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplatePart {
    Literal(String),
    Value {
        field: TemplateField,
        lower: bool,
        fallback: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplateField {
    AggregateType,
    Operation,
    Type,
    AggregateId,
    Key,
    Partition,
    Destination,
    Header(String),
}

/// The values of one message that a template may name.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    pub event: &'a Event,
    pub key: Option<&'a str>,
    pub partition: Partition,
    pub destination: &'a str,
    /// The headers of the user.
    pub headers: &'a [(Text, HeaderValue)],
}

impl<'a> Values<'a> {
    pub fn new(pointer: &'a Pointer, event: &'a Event, headers: &'a [(Text, HeaderValue)]) -> Self {
        Self {
            event,
            key: pointer.key.as_deref(),
            partition: pointer.partition,
            destination: &pointer.destination,
            headers,
        }
    }
}

/// Renders to nothing.
impl Default for Template {
    fn default() -> Self {
        Self::fixed("")
    }
}

impl Template {
    /// The limit of an address.
    pub const ADDRESS_MAX_BYTES: usize = SHORT_STRING_MAX;
    /// The limit of any other text.
    pub const TEXT_MAX_BYTES: usize = 1024;

    /// Parses the template of an address, such as a routing key: it renders to at most [`Template::ADDRESS_MAX_BYTES`].
    ///
    /// # Errors [`Refusal`] for an unknown placeholder or modifier, a brace without its other half, or more
    /// literal text than fits.
    pub fn parse(text: &str) -> Result<Self, Refusal> {
        Self::parse_up_to(text, Self::ADDRESS_MAX_BYTES)
    }

    /// Parses any other text, such as the value of a header: it renders to at most [`Template::TEXT_MAX_BYTES`].
    ///
    /// # Errors
    /// As [`Template::parse`].
    pub fn parse_text(text: &str) -> Result<Self, Refusal> {
        Self::parse_up_to(text, Self::TEXT_MAX_BYTES)
    }

    /// The same text for each message, as it is written: braces have no meaning.
    pub fn fixed(text: &str) -> Self {
        Self {
            parts: Parts::Fixed(text.into()),
            bytes_max: Self::TEXT_MAX_BYTES,
        }
    }

    /// Renders to nothing for every message.
    pub fn is_empty(&self) -> bool {
        matches!(&self.parts, Parts::Fixed(text) if text.is_empty())
    }

    fn parse_up_to(text: &str, bytes_max: usize) -> Result<Self, Refusal> {
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
                    .ok_or_else(|| refused(format!("the brace before \"{}\" is not closed", cut(after)), BRACES))?;
                let value = TemplatePart::parse(inside)?;
                literal_bytes += literal.len();
                if !literal.is_empty() {
                    parts.push(TemplatePart::Literal(std::mem::take(&mut literal)));
                }
                parts.push(value);
                rest = after;
            } else {
                return Err(refused("a closing brace in the template has no opening one", BRACES));
            }
        }
        literal.push_str(rest);
        literal_bytes += literal.len();
        if literal_bytes > bytes_max {
            let message = format!("the template's own text is {literal_bytes} bytes long");
            return Err(refused(message, &format!("At most {bytes_max} bytes fit.")));
        }
        let parts = if parts.is_empty() {
            Parts::Fixed(literal.into())
        } else {
            if !literal.is_empty() {
                parts.push(TemplatePart::Literal(literal));
            }
            Parts::Mixed(parts)
        };
        Ok(Self { parts, bytes_max })
    }

    /// The text for one message. A template without placeholders always returns the same, shared text.
    ///
    /// # Errors [`TooLong`] if it exceeds the limit.
    pub fn render(&self, values: &Values<'_>) -> Result<Text, TooLong> {
        let parts = match &self.parts {
            Parts::Fixed(text) => return Ok(Text::Shared(text.clone())),
            Parts::Mixed(parts) => parts,
        };
        let mut rendered = String::with_capacity(64);
        for part in parts {
            match part {
                TemplatePart::Literal(text) => rendered.push_str(text),
                TemplatePart::Value { field, lower, fallback } => {
                    let from = rendered.len();
                    field.push_to(&mut rendered, values, *lower);
                    if rendered.len() == from {
                        rendered.push_str(fallback);
                    }
                }
            }
        }
        match rendered.len() {
            bytes if bytes > self.bytes_max => Err(TooLong {
                bytes,
                bytes_max: self.bytes_max,
            }),
            _ => Ok(Text::Owned(rendered)),
        }
    }
}

impl TemplatePart {
    /// The text between the braces: `name[:modifier][|fallback]`.
    fn parse(inside: &str) -> Result<Self, Refusal> {
        let (value, fallback) = inside.split_once('|').unwrap_or((inside, ""));
        if fallback.contains('{') {
            let message = format!("the fallback \"{}\" contains a brace", cut(fallback));
            return Err(refused(
                message,
                "A fallback is plain text, as in {header:tenant|none}.",
            ));
        }
        let (name, argument) = match value.split_once(':') {
            Some((name, argument)) => (name, Some(argument)),
            None => (value, None),
        };
        let (header, modifier) = match argument {
            Some(argument) if name == "header" => match argument.split_once(':') {
                Some((header, modifier)) => (header, Some(modifier)),
                None => (argument, None),
            },
            modifier => ("", modifier),
        };
        let (field, lower_by_default) = match name {
            "aggregate_type" => (TemplateField::AggregateType, true),
            "operation" => (TemplateField::Operation, true),
            "type" => (TemplateField::Type, false),
            "aggregate_id" => (TemplateField::AggregateId, false),
            "key" => (TemplateField::Key, false),
            "partition" => (TemplateField::Partition, false),
            "destination" => (TemplateField::Destination, false),
            "header" if header.is_empty() => {
                let hint = "Name the header, as in {header:tenant}.";
                return Err(refused("the placeholder {header:…} names no header", hint));
            }
            "header" => (TemplateField::Header(header.to_owned()), false),
            _ => {
                let message = format!("unknown placeholder \"{{{}}}\" in the template", cut(name));
                return Err(refused(message, BRACES));
            }
        };
        let lower = match modifier {
            None => lower_by_default,
            Some("lower") => true,
            Some("raw") => false,
            Some(other) => {
                let message = format!("unknown modifier \":{}\" in the template", cut(other));
                let hint = "Known modifiers: :raw and :lower, as in {aggregate_type:raw}.";
                return Err(refused(message, hint));
            }
        };
        Ok(Self::Value {
            field,
            lower,
            fallback: fallback.to_owned(),
        })
    }
}

impl TemplateField {
    fn push_to(&self, rendered: &mut String, values: &Values<'_>, lower: bool) {
        let printed;
        let value = match self {
            Self::AggregateType => values.event.aggregate_type.as_deref(),
            Self::Operation => values.event.operation.as_deref(),
            Self::Type => Some(values.event.kind.as_str()),
            Self::AggregateId => values.event.aggregate_id.as_deref(),
            Self::Key => values.key,
            Self::Partition => {
                printed = values.partition.label();
                Some(printed.as_str())
            }
            Self::Destination => Some(values.destination),
            Self::Header(wanted) => match values.headers.iter().find(|(name, _)| name == wanted) {
                Some((_, HeaderValue::Text(text))) => Some(text.as_str()),
                Some((_, value)) => {
                    printed = value.to_string();
                    Some(printed.as_str())
                }
                None => None,
            },
        };
        match value {
            Some(value) if lower && value.is_ascii() => {
                let from = rendered.len();
                rendered.push_str(value);
                rendered[from..].make_ascii_lowercase();
            }
            Some(value) if lower => rendered.push_str(&value.to_lowercase()),
            Some(value) => rendered.push_str(value),
            None => {}
        }
    }
}

const BRACES: &str = "Write {{ and }} for literal braces.";
const KNOWN: &str = "Known placeholders: {aggregate_type}, {operation}, {type}, {aggregate_id}, {key}, {partition}, \
                     {destination}, {header:NAME}; each may end in a fallback, as in {key|none}.";

/// Why a text is not a template. Quoted text of the template is truncated.
fn refused(message: impl Into<String>, hint: &str) -> Refusal {
    Refusal::new(message, format!("{hint} {KNOWN}"))
}

/// The text of one message is too long, although the template is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong {
    pub bytes: usize,
    pub bytes_max: usize,
}

impl TooLong {
    /// `what` is the text, `limit` says whose limit it exceeds.
    pub(crate) fn refusal(self, what: &str, limit: &str) -> Refusal {
        let Self { bytes, bytes_max } = self;
        let message = format!("the {what} is {bytes} bytes long; {limit} is {bytes_max}");
        Refusal::new(message, "Shorten the template or the values that it uses.")
    }
}

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

    fn headers() -> Vec<(Text, HeaderValue)> {
        vec![
            ("Tenant".into(), HeaderValue::Text("ACME".into())),
            ("empty".into(), HeaderValue::Text("".into())),
            ("n".into(), HeaderValue::Int(-3)),
            ("f".into(), HeaderValue::Float(1.5)),
            ("b".into(), HeaderValue::Bool(true)),
        ]
    }

    fn problem(text: &str) -> String {
        Template::parse(text).expect_err("a problem").message
    }

    fn render_with(template: &Template, event: &Event, key: Option<&str>) -> Result<String, TooLong> {
        let values = Values {
            event,
            key,
            partition: Partition::new(7).unwrap(),
            destination: "Orders Bus",
            headers: &headers(),
        };
        template.render(&values).map(Text::into_string)
    }

    fn rendered(template: &str) -> String {
        render_with(&Template::parse(template).unwrap(), &event(), Some("Key-1")).unwrap()
    }

    #[test]
    fn the_default_template_is_lower_case() {
        assert_eq!(rendered("{aggregate_type}.{operation}"), "order.insert");
    }

    #[test]
    fn other_values_are_rendered_as_stored() {
        assert_eq!(rendered("{type}/{aggregate_id}/{key}"), "OrderPlaced/A-42/Key-1");
        assert_eq!(rendered("{partition}/{destination}"), "p07/Orders Bus");
    }

    #[test]
    fn a_modifier_chooses_the_case() {
        assert_eq!(
            rendered("{aggregate_type:raw}.{operation:lower}.{type:lower}.{key:raw}"),
            "Order.insert.orderplaced.Key-1"
        );
        assert_eq!(rendered("{destination:lower}"), "orders bus");
    }

    #[test]
    fn a_header_of_the_user_is_found_by_its_exact_name() {
        assert_eq!(
            rendered("{header:Tenant}.{header:Tenant:lower}.{header:tenant}"),
            "ACME.acme."
        );
        assert_eq!(rendered("{header:n},{header:f},{header:b}"), "-3,1.5,true");
    }

    #[test]
    fn a_fallback_replaces_missing_and_empty_values_only() {
        let template =
            Template::parse("{key|no key}.{header:Tenant:lower|None}.{header:empty|E}.{header:x|a|b:c}.{type|t}")
                .unwrap();
        assert_eq!(
            render_with(&template, &Event::default(), None).unwrap(),
            "no key.acme.E.a|b:c.t"
        );
        assert_eq!(
            rendered("{key|none}{operation:raw|none}{type|}"),
            "Key-1INSERTOrderPlaced"
        );
    }

    #[test]
    fn a_template_without_placeholders_is_a_fixed_key_and_shared() {
        assert_eq!(rendered("orders.all"), "orders.all");
        assert_eq!(rendered(""), "");
        let values = Values {
            event: &event(),
            key: None,
            partition: Partition::new(0).unwrap(),
            destination: "",
            headers: &[],
        };
        let text = Template::parse("a{{b").unwrap().render(&values).unwrap();
        assert!(matches!(text, Text::Shared(_)) && text == "a{b", "{text:?}");
    }

    #[test]
    fn doubled_braces_are_literal() {
        assert_eq!(rendered("{{{type}}}"), "{OrderPlaced}");
        assert_eq!(rendered("a{{b}}c"), "a{b}c");
    }

    #[test]
    fn a_missing_value_renders_as_nothing_and_nothing_around_it_is_stripped() {
        let template = Template::parse("{aggregate_type}.{operation}.{key}").unwrap();
        assert_eq!(render_with(&template, &Event::default(), None), Ok("..".to_owned()));
    }

    #[test]
    fn lower_case_knows_more_than_ascii() {
        let event = Event {
            aggregate_type: Some("ÜBERGABE".into()),
            ..Event::default()
        };
        let template = Template::parse("{aggregate_type}").unwrap();
        assert_eq!(render_with(&template, &event, None), Ok("übergabe".to_owned()));
    }

    #[test]
    fn an_unknown_placeholder_is_refused_with_the_known_ones() {
        let error = Template::parse("a.{tenant}").unwrap_err();
        assert_eq!(error.to_string(), "unknown placeholder \"{tenant}\" in the template");
        assert!(
            error
                .hint
                .contains("{aggregate_type}, {operation}, {type}, {aggregate_id}, {key}, {partition}")
        );
        for text in ["{}", "{Type}", "{ type }", "{a{type}", "{:raw}", "{|x}", "{headers:x}"] {
            assert!(problem(text).starts_with("unknown placeholder"), "{text}");
        }
    }

    #[test]
    fn a_header_needs_a_name() {
        for text in ["{header}", "{header:}", "{header::raw}", "{header|x}", "{header:|x}"] {
            assert_eq!(problem(text), "the placeholder {header:…} names no header", "{text}");
        }
    }

    #[test]
    fn an_unknown_modifier_is_refused() {
        for (text, modifier) in [
            ("{type:upper}", "upper"),
            ("{type:}", ""),
            ("{type:raw:lower}", "raw:lower"),
            ("{header:x:upper}", "upper"),
            ("{header:x:}", ""),
            ("{header:x:y:raw}", "y:raw"),
            ("{type:upper|x}", "upper"),
        ] {
            assert_eq!(
                problem(text),
                format!("unknown modifier \":{modifier}\" in the template")
            );
        }
    }

    #[test]
    fn a_brace_without_its_other_half_is_refused() {
        assert_eq!(problem("a.{type"), "the brace before \"type\" is not closed");
        assert_eq!(problem("{"), "the brace before \"\" is not closed");
        for text in ["a}b", "{type}}"] {
            assert_eq!(problem(text), "a closing brace in the template has no opening one");
        }
        assert_eq!(problem("{type|{key}}"), "the fallback \"{key\" contains a brace");
    }

    #[test]
    fn literal_text_longer_than_any_routing_key_is_refused() {
        let too_long = "the template's own text is 256 bytes long";
        assert!(Template::parse(&"é".repeat(127)).is_ok());
        assert_eq!(problem(&"é".repeat(128)), too_long);
        let split = format!("{}{{key}}{}", "a".repeat(128), "a".repeat(128));
        assert_eq!(problem(&split), too_long);
        assert!(Template::parse_text(&"a".repeat(1024)).is_ok());
        assert!(Template::parse_text(&"a".repeat(1025)).is_err());
    }

    #[test]
    fn a_text_over_its_limit_is_an_error_of_the_message() {
        for (template, bytes_max) in [(Template::parse("{key}"), 255), (Template::parse_text("{key}"), 1024)] {
            let template = template.unwrap();
            let render = |bytes: usize| render_with(&template, &event(), Some(&"k".repeat(bytes)));
            assert_eq!(render(bytes_max).unwrap().len(), bytes_max);
            let bytes = bytes_max + 1;
            assert_eq!(render(bytes), Err(TooLong { bytes, bytes_max }));
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_the_parser(
            text in r"[{}:|a-zé]{0,40}|(\{(type|key|header:n|partition)(:raw|:lower|:)?(\|[a-z|:]{0,3})?\}|\{\{|\}\}|\PC){0,12}",
        ) {
            match Template::parse(&text) {
                Ok(template) => { let _ = render_with(&template, &event(), None); }
                Err(error) => prop_assert!(error.hint.contains("aggregate_type")),
            }
        }

        #[test]
        fn escaped_text_renders_as_itself(text in "\\PC{0,60}") {
            let escaped = text.replace('{', "{{").replace('}', "}}");
            prop_assert_eq!(rendered(&escaped), text);
        }

        #[test]
        fn parts_are_rendered_in_order(
            before in "[^{}]{0,20}", fallback in "[^{}]{0,20}", after in "[^{}]{0,20}", key in proptest::option::of("\\PC{0,20}"),
        ) {
            let template = Template::parse_text(&format!("{before}{{key|{fallback}}}{after}")).unwrap();
            let value = key.as_deref().filter(|key| !key.is_empty()).unwrap_or(&fallback);
            prop_assert_eq!(
                render_with(&template, &event(), key.as_deref()).unwrap(),
                format!("{before}{value}{after}")
            );
        }
    }
}
