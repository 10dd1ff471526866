//! Statements name objects of the extension without a schema. Here they get it, just before they are sent: sessions look
//! names up in pg_catalog alone. Were the schema in search_path, a function or operator that somebody created there could fit a
//! call better than the one of pg_catalog, and would run with the rights of who uses this program.

/// An SQL text in which the tables, views and functions of the extension are qualified with its schema.
pub fn qualified(sql: &str, schema: &str) -> String {
    let prefix = format!("\"{}\".", schema.replace('"', "\"\""));
    let mut text = String::with_capacity(sql.len() + 256);
    // The word before, and what stood between.
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
            let is_schema = rest.starts_with('.'); // outbox_internal, which has one name everywhere
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

/// To the quote that ends it. One that is doubled inside makes two pieces, which comes to the same; a backslash counts as no
/// escape, and no statement here has one before a quote.
fn quoted(text: &str) -> &str {
    let quote = text.chars().next().unwrap_or_default();
    let end = text[1..].find(quote).map_or(text.len(), |at| at + 2);
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::qualified;

    #[test]
    fn relations_and_functions_of_the_extension_get_its_schema_and_nothing_else_does() {
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
            // What is text stays text, and what has a schema keeps it.
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
    fn a_strange_schema_is_quoted() {
        assert_eq!(
            qualified(
                "select from outbox where has_table_privilege('outbox', 'select')",
                r#"a"b'c"#
            ),
            r#"select from "a""b'c".outbox where has_table_privilege('"a""b''c".outbox', 'select')"#
        );
    }
}
