//! Adds the schema of the extension to the names in a statement, just before the statement is sent. The statements in
//! this program name the objects of the extension without a schema, and sessions have only pg_catalog in their
//! search_path.
//!
//! The schema must not be in search_path. Another role could create a function or operator there that matches a call
//! better than the one in pg_catalog. It would run with the privileges of the user of this program.

/// The SQL text with the tables, views and functions of the extension qualified by `schema`.
pub fn qualified(sql: &str, schema: &str) -> String {
    let prefix = format!("\"{}\".", schema.replace('"', "\"\""));
    let mut text = String::with_capacity(sql.len() + 256);
    // The previous word, and the text between it and the current position.
    let (mut word_before, mut between) = ("", String::new());
    let mut rest = sql;
    while let Some(first) = rest.chars().next() {
        let piece = match first {
            '\'' | '"' => quoted(rest),
            '-' if rest.starts_with("--") => rest.split_inclusive('\n').next().unwrap_or(rest),
            c if c.is_ascii_alphabetic() || c == '_' => word(rest),
            _ => &rest[..first.len_utf8()],
        };
        rest = &rest[piece.len()..];
        if first == '\'' {
            let name = piece.trim_matches('\'');
            match word_before == "has_table_privilege" && between == "(" && is_ours(name) {
                true => text.push_str(&format!("'{}{name}'", prefix.replace('\'', "''"))),
                false => text.push_str(piece),
            }
        } else {
            let is_call = rest.trim_start().starts_with('(');
            let is_relation = matches!(word_before, "from" | "join" | "into" | "update") && between.trim().is_empty();
            let is_schema = rest.starts_with('.'); // outbox_internal, a schema with a fixed name
            if is_ours(piece) && !is_schema && !between.ends_with('.') && (is_call || is_relation) {
                text.push_str(&prefix);
            }
            text.push_str(piece);
        }
        if first.is_ascii_alphabetic() || first == '_' {
            word_before = piece;
            between.clear();
        } else {
            between.push_str(piece);
        }
    }
    text
}

fn is_ours(name: &str) -> bool {
    let is_plain = name
        .chars()
        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    is_plain && (name == "outbox" || name.starts_with("outbox_"))
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$');
    &text[..end.unwrap_or(text.len())]
}

/// The quoted text at the start of `text`, to its closing quote. A doubled quote ends it, and the rest is read as a
/// second quoted text: the result is the same. A backslash is no escape; no statement of this program has one before a
/// quote.
fn quoted(text: &str) -> &str {
    let quote = text.chars().next().unwrap_or_default();
    let end = text[1..].find(quote).map_or(text.len(), |at| at + 2);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::qualified;

    #[test]
    fn only_relations_and_functions_of_the_extension_get_its_schema() {
        for (sql, expected) in [
            (
                "select * from outbox o join outbox_waiting w on w.seq = o.seq",
                r#"select * from "S".outbox o join "S".outbox_waiting w on w.seq = o.seq"#,
            ),
            (
                "select outbox_retry($1), max(outbox_errors.last_at) from outbox_errors",
                r#"select "S".outbox_retry($1), max(outbox_errors.last_at) from "S".outbox_errors"#,
            ),
            (
                "select * from outbox_open_transactions() t, lateral (select from\n  outbox_dead) x",
                "select * from \"S\".outbox_open_transactions() t, lateral (select from\n  \"S\".outbox_dead) x",
            ),
            (
                "select outbox_internal.is_taken($1) from outbox_internal.destinations() d join outbox o on true",
                r#"select outbox_internal.is_taken($1) from outbox_internal.destinations() d join "S".outbox o on true"#,
            ),
            // String literals do not change, and names with a schema keep it.
            (
                "select 'from outbox', 'it''s outbox_retry(1)', current_setting('outbox.url'), e.outbox_id from x.outbox e",
                "select 'from outbox', 'it''s outbox_retry(1)', current_setting('outbox.url'), e.outbox_id from x.outbox e",
            ),
            (
                r#"select "outbox", o.outbox_retry from pg_extension x where x.extname = 'outbox' -- from outbox"#,
                r#"select "outbox", o.outbox_retry from pg_extension x where x.extname = 'outbox' -- from outbox"#,
            ),
            (
                "select has_table_privilege('outbox_events', 'select')",
                r#"select has_table_privilege('"S".outbox_events', 'select')"#,
            ),
        ] {
            assert_eq!(qualified(sql, "S"), expected);
        }
    }

    #[test]
    fn a_schema_with_quotes_in_its_name_is_quoted() {
        assert_eq!(
            qualified(
                "select from outbox where has_table_privilege('outbox', 'select')",
                r#"a"b'c"#
            ),
            r#"select from "a""b'c".outbox where has_table_privilege('"a""b''c".outbox', 'select')"#
        );
    }
}
