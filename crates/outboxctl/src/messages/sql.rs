//! A call of a function of the extension that can be run, with its values as parameters, and shown to the user, with the
//! given ones as literals.

use super::When;
use std::fmt::Write;

/// It returns one row with the number of messages in the column `n`.
pub struct Call {
    pub function: String,
    pub arguments: Vec<(&'static str, Argument)>,
    /// Nothing is called unless there is a message with this seq to this destination.
    pub only_of: Option<(i64, String)>,
}

/// The value of an argument. `None` = it is not given.
pub enum Argument {
    Text(Option<String>),
    BigInt(Option<i64>),
    Integer(Option<i32>),
    Time(Option<When>),
    Boolean(bool),
}

impl Call {
    /// The statement with `$1`, `$2` … and their values. It passes every argument with its type: other roles may create
    /// functions in the schema of the extension, but none of them can match such a call better.
    pub fn to_run(&self) -> (String, Vec<Option<String>>) {
        let mut values = Vec::new();
        // Cast through text: otherwise the driver requires a different Rust type for each SQL type.
        let mut parameter = |value: Option<String>| {
            values.push(value);
            format!("${}::text", values.len())
        };
        let mut sql = format!("select @extschema@.{}(", self.function);
        for (n, (name, argument)) in self.arguments.iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            let value = match argument {
                Argument::Text(value) => parameter(value.clone()),
                Argument::BigInt(value) => parameter(value.map(|n| n.to_string())) + "::bigint",
                Argument::Integer(value) => parameter(value.map(|n| n.to_string())) + "::integer",
                Argument::Time(Some(When::SecondsAgo(s))) => {
                    format!("now() - {}::interval", parameter(Some(format!("{s} s"))))
                }
                Argument::Time(Some(When::At(moment))) => parameter(Some(moment.clone())) + "::timestamptz",
                Argument::Time(None) => "null::timestamptz".to_owned(),
                Argument::Boolean(value) => value.to_string(),
            };
            write!(sql, "{comma}{name} => {value}").expect("write to a string");
        }
        sql.push_str(")::integer as n");
        if let Some((seq, destination)) = &self.only_of {
            let (seq, destination) = (parameter(Some(seq.to_string())), parameter(Some(destination.clone())));
            write!(
                sql,
                " where exists (select from outbox_internal.message_rows({seq}::bigint) m where m.destination = {destination})"
            )
            .expect("write to a string");
        }
        (sql, values)
    }

    /// The statement with the given arguments as literals, ready to copy.
    pub fn to_show(&self) -> String {
        let literal = |argument: &Argument| match argument {
            Argument::Text(value) => value.as_deref().map(quoted),
            Argument::BigInt(value) => value.map(|n| n.to_string()),
            Argument::Integer(value) => value.map(|n| n.to_string()),
            Argument::Time(value) => value.as_ref().map(|when| match when {
                When::SecondsAgo(seconds) => format!("now() - interval '{seconds} s'"),
                When::At(moment) => format!("timestamptz {}", quoted(moment)),
            }),
            Argument::Boolean(value) => Some(value.to_string()),
        };
        let given = self.arguments.iter();
        let given = given.filter_map(|(name, argument)| Some(format!("{name} => {}", literal(argument)?)));
        format!(
            "select {}({}) as n",
            self.function,
            given.collect::<Vec<_>>().join(", ")
        )
    }
}

/// Quotes a literal like quote_literal(), correct for any standard_conforming_strings.
pub fn quoted(text: &str) -> String {
    let doubled = text.replace('\'', "''");
    match doubled.contains('\\') {
        true => format!("E'{}'", doubled.replace('\\', "\\\\")),
        false => format!("'{doubled}'"),
    }
}

/// A pattern of LIKE that matches `text` anywhere in a value.
pub fn containing(text: &str) -> String {
    let escaped = text.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_");
    format!("%{escaped}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_runs_with_parameters_and_is_shown_with_literals() {
        let call = Call {
            function: "f".into(),
            arguments: vec![
                ("a", Argument::Text(Some("it's".into()))),
                ("b", Argument::BigInt(Some(7))),
                ("c", Argument::Time(Some(When::At("2026-01-31".into())))),
                ("d", Argument::Time(Some(When::SecondsAgo(90)))),
                ("e", Argument::Integer(None)),
                ("f", Argument::Boolean(true)),
            ],
            only_of: None,
        };
        let (text, values) = call.to_run();
        assert_eq!(
            text,
            "select @extschema@.f(a => $1::text, b => $2::text::bigint, c => $3::text::timestamptz, \
             d => now() - $4::text::interval, e => $5::text::integer, f => true)::integer as n"
        );
        let values: Vec<_> = values.iter().map(Option::as_deref).collect();
        assert_eq!(
            values,
            [Some("it's"), Some("7"), Some("2026-01-31"), Some("90 s"), None]
        );
        assert_eq!(
            call.to_show(),
            "select f(a => 'it''s', b => 7, c => timestamptz '2026-01-31', d => now() - interval '90 s', f => true) as n"
        );
    }

    #[test]
    fn no_character_inside_a_literal_ends_it() {
        assert_eq!(quoted(r"\'; drop table x"), r"E'\\''; drop table x'");
        assert_eq!(containing("50%_\\"), r"%50\%\_\\%");
    }
}
