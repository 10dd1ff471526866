//! Where the messages of a destination go, and their form: what `envelope` needs in addition to the event. Made from
//! settings when a worker reads them; used for each message, on the worker's main thread.

pub use crate::form::Form;
pub use crate::format::Format;
pub use crate::template::Template;

use crate::refusal::{Refusal, check_short};
use crate::text::Text;

/// One destination, as the worker's settings describe it.
#[derive(Clone, Copy, Debug)]
pub struct Route<'a> {
    pub form: &'static Form,
    pub format: Format,
    /// The address of each message, such as a routing key.
    pub address: &'a Template,
    pub statics: &'a Statics,
}

/// Properties and headers that each message of a destination has.
#[derive(Clone, Debug, PartialEq)]
pub struct Statics {
    pub app_id: Text,
    /// Only with [`Format::Payload`], whose body then need not be JSON.
    pub content_type: Option<Text>,
    /// The `source` of CloudEvents, a URI reference; ids are unique within it.
    pub source: Template,
    /// They replace headers of the user, and never those of outbox.
    pub headers: StaticHeaders,
}

/// Headers of a destination: names that may be sent there, and templates of their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StaticHeaders(Vec<(Text, Template)>);

/// Unless a destination has another one.
pub const SOURCE: &str = "/outbox";
pub const APP_ID: &str = "outbox";

impl Default for Statics {
    fn default() -> Self {
        Self {
            app_id: Text::Static(APP_ID),
            content_type: None,
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
    pub fn add(&mut self, form: &Form, format: Format, name: &str, template: &str) -> Result<(), Refusal> {
        let name = form.static_name(format, name)?;
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
    /// # Errors [`Refusal`] for an option that the format has no place for, or that cannot be sent.
    pub fn check(&self, format: Format) -> Result<(), Refusal> {
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
    use crate::fixtures::{TEXT, TYPED};
    use crate::words::Word;

    #[test]
    fn options_without_a_place_in_the_format_are_refused() {
        use Format::{CloudEvents, Envelope, Payload};
        let with = |change: fn(&mut Statics)| {
            let mut statics = Statics::default();
            change(&mut statics);
            statics
        };
        for format in Format::ALL.iter().copied() {
            assert_eq!(Statics::default().check(format), Ok(()));
        }
        let typed = with(|s| s.content_type = Some("text/plain".into()));
        assert_eq!(typed.check(Payload), Ok(()));
        assert!(typed.check(Envelope).is_err());
        for bad in [
            with(|s| s.content_type = Some("text/plain\r\nx: y".into())),
            with(|s| s.content_type = Some("text".into())),
            with(|s| s.app_id = "x".repeat(256).into()),
        ] {
            assert!(bad.check(Payload).is_err(), "{bad:?}");
        }
        let nowhere = with(|s| s.source = Template::parse_text("").unwrap());
        assert_eq!(nowhere.check(Envelope), Ok(()));
        assert!(nowhere.check(CloudEvents).is_err());
    }

    #[test]
    fn a_static_header_has_a_unique_name_and_a_template() {
        let mut headers = StaticHeaders::default();
        let mut add = |form, name: &str, template: &str| headers.add(form, Format::Envelope, name, template);
        assert_eq!(add(TYPED, "tenant", "{header:tenant|none}"), Ok(()));
        assert!(add(TYPED, "tenant", "x").unwrap_err().message.contains("twice"));
        let refusal = add(TYPED, "other", "{tenant}").unwrap_err();
        assert!(
            refusal
                .message
                .starts_with("the value of the header other: unknown placeholder"),
            "{refusal}"
        );
        assert!(refusal.hint.contains("{header:NAME}"));
        assert_eq!(add(TEXT, "X-Team", "a"), Ok(()));
        assert!(add(TEXT, "x-team", "b").unwrap_err().message.contains("twice"));
    }
}
