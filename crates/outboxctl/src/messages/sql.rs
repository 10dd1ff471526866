//! A statement that can be run, with its values as parameters, and shown to the user, with the values as literals.

use crate::queries::unqualified;
use std::fmt::Write;

#[derive(Clone, Debug, Default)]
pub struct Sql {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    /// A value, and the type to which it is cast.
    Value(String, &'static str),
}

impl Sql {
    pub fn new(text: &str) -> Self {
        let mut sql = Self::default();
        sql.push(text);
        sql
    }

    pub fn of(value: impl ToString, kind: &'static str) -> Self {
        let mut sql = Self::default();
        sql.value(value, kind);
        sql
    }

    pub fn push(&mut self, text: &str) -> &mut Self {
        self.pieces.push(Piece::Text(text.to_owned()));
        self
    }

    pub fn value(&mut self, value: impl ToString, kind: &'static str) -> &mut Self {
        self.pieces.push(Piece::Value(value.to_string(), kind));
        self
    }

    pub fn append(&mut self, other: &Self) -> &mut Self {
        self.pieces.extend(other.pieces.iter().cloned());
        self
    }

    /// The statement with `$1`, `$2` … and their values.
    pub fn to_run(&self) -> (String, Vec<String>) {
        let mut text = String::new();
        let mut values = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(piece) => text.push_str(piece),
                Piece::Value(value, kind) => {
                    values.push(value.clone());
                    // Cast through text: otherwise the driver requires a different Rust type for each SQL type.
                    write!(text, "${}::text::{kind}", values.len()).expect("write to a string");
                }
            }
        }
        (text, values)
    }

    /// The statement with its values as literals, ready to copy.
    pub fn to_show(&self) -> String {
        let mut text = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(piece) => text.push_str(&unqualified(piece)),
                Piece::Value(value, "bigint" | "integer" | "smallint") => text.push_str(value),
                Piece::Value(value, "text") => text.push_str(&quoted(value)),
                Piece::Value(value, kind) => write!(text, "{} '{}'", kind, value.replace('\'', "''")).expect("write"),
            }
        }
        text
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
    fn a_statement_runs_with_parameters_and_is_shown_with_literals() {
        let mut sql = Sql::new("select 1 where a = ");
        sql.value("it's", "text").push(" and b = ").value(7, "bigint");
        sql.push(" and c > ").value("2026-01-31", "timestamptz");
        let (text, values) = sql.to_run();
        assert_eq!(
            text,
            "select 1 where a = $1::text::text and b = $2::text::bigint and c > $3::text::timestamptz"
        );
        assert_eq!(values, ["it's", "7", "2026-01-31"]);
        let shown = "select 1 where a = 'it''s' and b = 7 and c > timestamptz '2026-01-31'";
        assert_eq!(sql.to_show(), shown);
    }

    #[test]
    fn no_character_inside_a_literal_ends_it() {
        assert_eq!(quoted(r"\'; drop table x"), r"E'\\''; drop table x'");
        assert_eq!(containing("50%_\\"), r"%50\%\_\\%");
    }
}
