//! The function that makes the message bodies of a destination, as its option `body` names it. Pure; called by
//! `target`.

/// A function's name, as the system catalogs store it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyFunction {
    pub schema: String,
    pub name: String,
    /// Whether the function must return JSON, because the format needs it.
    pub as_json: bool,
}

/// NAMEDATALEN minus the terminating NUL, in bytes.
const NAME_BYTES_MAX: usize = 63;

impl BodyFunction {
    pub const HINT: &str = "Name a function and its schema, without arguments: shop.for_search";

    /// Parses `schema.name` by the rules of SQL: quoted identifiers stay as they are, others are folded to lower case.
    pub fn parse(text: &str) -> Option<Self> {
        let (schema, rest) = identifier(text.trim())?;
        let (name, rest) = identifier(rest.strip_prefix('.')?)?;
        rest.is_empty().then_some(Self {
            schema,
            name,
            as_json: false,
        })
    }
}

/// The identifier at the start of `text`, and the rest after it.
fn identifier(text: &str) -> Option<(String, &str)> {
    let (name, rest) = match text.strip_prefix('"') {
        Some(quoted) => quoted_identifier(quoted)?,
        None => {
            let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_' || !c.is_ascii();
            let ends = |c: char| !(is_letter(c) || c.is_ascii_digit() || c == '$');
            let (name, rest) = text.split_at(text.find(ends).unwrap_or(text.len()));
            if !name.starts_with(is_letter) {
                return None;
            }
            (name.to_ascii_lowercase(), rest)
        }
    };
    (1..=NAME_BYTES_MAX).contains(&name.len()).then_some((name, rest))
}

/// The quoted identifier at the start of `text`, which begins after the opening quote, and the rest. A quote inside is
/// doubled.
fn quoted_identifier(text: &str) -> Option<(String, &str)> {
    let mut name = String::new();
    let mut rest = text;
    loop {
        let (part, behind) = rest.split_once('"')?;
        name.push_str(part);
        match behind.strip_prefix('"') {
            Some(more) => {
                name.push('"');
                rest = more;
            }
            None => return Some((name, behind)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::{Kind, Target, described};
    use outbox_core::route::Format;

    #[test]
    fn names_are_parsed_by_the_rules_of_sql() {
        let long = format!("s.{}", "f".repeat(63));
        for (text, schema, name) in [
            ("shop.for_search", "shop", "for_search"),
            (" Shop.For_Search ", "shop", "for_search"),
            (r#""My Shop"."f""g.h""#, "My Shop", "f\"g.h"),
            ("größe.f$1", "größe", "f$1"),
            (&long, "s", &long[2..]),
        ] {
            let parsed = BodyFunction::parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((parsed.schema.as_str(), parsed.name.as_str()), (schema, name), "{text}");
        }
    }

    #[test]
    fn a_body_function_excludes_the_envelope_and_must_return_json_for_cloudevents() {
        let by = |format: Option<&str>| {
            let format = format.map(|format| ("format", format));
            let pairs = format.into_iter().chain([("body", "shop.f")]);
            let options: Vec<_> = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            described(Kind::Amqp, &Target::default(), &options, &[])
        };
        for (format, meant, as_json) in [
            (None, Format::Payload, false),
            (Some("payload"), Format::Payload, false),
            (Some("cloudevents"), Format::CloudEvents, true),
            (Some("cloudevents_binary"), Format::CloudEventsBinary, true),
        ] {
            let target = by(format).unwrap();
            assert_eq!((target.format, target.body.unwrap().as_json), (meant, as_json));
        }
        assert!(by(Some("envelope")).unwrap_err().hint.contains("payload"));
    }

    #[test]
    fn a_text_that_is_not_a_qualified_name_is_refused() {
        for text in [
            "",
            ".",
            "f",
            "s.",
            ".f",
            "s.f(jsonb)",
            "d.s.f",
            "s.1f",
            "1s.f",
            "s. f",
            "s.f; drop table t",
            r#""s.f"#,
            r#""".f"#,
            r#"s."f"g"#,
            &format!("s.{}", "f".repeat(64)),
        ] {
            assert_eq!(BodyFunction::parse(text), None, "{text}");
        }
    }
}
