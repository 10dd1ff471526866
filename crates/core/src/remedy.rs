//! The command in a remedy of `outbox_health`, `outbox_why` or a refusal of a broker, for a program that copies or runs
//! it, and the words that it is made of. tests/remedies.rs types the commands that this finds.

/// What begins a command.
const BEGINS: [&str; 15] = [
    "outboxctl ",
    "rabbitmqctl set_",
    "rabbitmqctl add_",
    "rabbitmqctl list_queues",
    "rabbitmqctl list_unresponsive",
    "rabbitmq-diagnostics ",
    "ALTER ",
    "COMMIT PREPARED",
    "CREATE ",
    "DROP ",
    "GRANT ",
    "REVOKE ",
    "kill ",
    "select ",
    "SELECT ",
];

/// What ends it. Not every semicolon does: `ALTER SYSTEM …; SELECT pg_reload_conf()` is one command.
const ENDS: [&str; 15] = [
    ", or ",
    ", if ",
    ", unblocks",
    "; consume ",
    "; correct the cause",
    "; delivery resumes",
    "; or ",
    "; see ",
    "; start the nodes",
    "; the log of the server",
    "; then ",
    "; DROP EXTENSION would",
    " at the shell",
    " on the broker",
    " with the old",
];

/// The first command of a remedy. `None` = the remedy has none.
pub fn command(remedy: &str) -> Option<&str> {
    let (begin, _) = find_unquoted(remedy, &BEGINS)?;
    let command = &remedy[begin..];
    let end = find_unquoted(command, &ENDS).map_or(command.len(), |(at, _)| at);
    Some(&command[..end])
}

/// The alternatives of a remedy, which `, or ` separates.
pub fn alternatives(remedy: &str) -> Vec<&str> {
    let (mut found, mut rest) = (Vec::new(), remedy);
    while let Some((at, after)) = find_unquoted(rest, &[", or "]) {
        found.push(&rest[..at]);
        rest = &rest[after..];
    }
    found.push(rest);
    found
}

/// Where the first of the words outside of '…' and "…" begins and ends. Between quotes is a name of SQL or of a shell,
/// which another role may have chosen.
fn find_unquoted(text: &str, words: &[&str]) -> Option<(usize, usize)> {
    let mut quote = None;
    let (mut last, mut last_but_one) = (' ', ' ');
    for (at, c) in text.char_indices() {
        // "the server's" has an apostrophe, and E'…' does not.
        let is_apostrophe = last.is_alphanumeric() && (last != 'E' || last_but_one.is_alphanumeric());
        match (quote, c) {
            (Some(open), _) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '"') => quote = Some(c),
            (None, '\'') if last != '\\' && !is_apostrophe => quote = Some(c),
            (None, _) => {
                if let Some(word) = words.iter().find(|word| text[at..].starts_with(**word)) {
                    return Some((at, at + word.len()));
                }
            }
        }
        (last_but_one, last) = (last, c);
    }
    None
}

/// A word as a shell reads it, whatever characters it has.
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::{alternatives, command, shell_word};

    #[test]
    fn no_character_of_a_word_is_read_by_the_shell() {
        assert_eq!(shell_word("audit-2.eu"), "audit-2.eu");
        assert_eq!(shell_word("/"), "/");
        assert_eq!(shell_word("it's $(x)"), r"'it'\''s $(x)'");
        assert_eq!(shell_word(""), "''");
    }

    #[test]
    fn the_command_of_a_remedy_is_without_its_sentence() {
        for (remedy, wanted) in [
            (
                "start the receiver, or correct host and port: ALTER SERVER audit OPTIONS (SET url '...')",
                Some("ALTER SERVER audit OPTIONS (SET url '...')"),
            ),
            (
                "ALTER SYSTEM SET outbox.workers = '1'; SELECT pg_reload_conf()",
                Some("ALTER SYSTEM SET outbox.workers = '1'; SELECT pg_reload_conf()"),
            ),
            (
                "select outbox_retry(4, 'audit'), or outbox_discard(4, 'audit'), unblocks the key",
                Some("select outbox_retry(4, 'audit')"),
            ),
            ("outboxctl retry 7, or outboxctl discard 7", Some("outboxctl retry 7")),
            (
                "see rabbitmq-diagnostics alarms on the broker; delivery resumes by itself",
                Some("rabbitmq-diagnostics alarms"),
            ),
            (
                "if it is stopped, kill -CONT 12 at the shell of the server; else select pg_terminate_backend(12)",
                Some("kill -CONT 12"),
            ),
            ("check the network and the load of the broker", None),
        ] {
            assert_eq!(command(remedy), wanted, "{remedy}");
        }
    }

    #[test]
    fn a_name_in_quotes_begins_and_ends_no_command() {
        for (remedy, wanted) in [
            (
                "COMMIT PREPARED 'x, or select evil(); --', or ROLLBACK PREPARED 'x, or select evil(); --'",
                &[
                    "COMMIT PREPARED 'x, or select evil(); --'",
                    "ROLLBACK PREPARED 'x, or select evil(); --'",
                ][..],
            ),
            (
                r"COMMIT PREPARED E'a\\, or ''b, or c', or x",
                &[r"COMMIT PREPARED E'a\\, or ''b, or c'", "x"],
            ),
            (
                r#"DROP SERVER "a', or ""b, or c", or x"#,
                &[r#"DROP SERVER "a', or ""b, or c""#, "x"],
            ),
            (
                r"rabbitmqctl add_vhost 'it'\''s, or mine', or x",
                &[r"rabbitmqctl add_vhost 'it'\''s, or mine'", "x"],
            ),
        ] {
            assert_eq!(alternatives(remedy), wanted);
            assert_eq!(command(remedy), Some(wanted[0]));
        }
        let prose = "the server's user (see \"select 1\", 'kill 1'), or type ALTER SYSTEM SET a = '; or '; see b";
        assert_eq!(alternatives(prose).len(), 2);
        assert_eq!(command(prose), Some("ALTER SYSTEM SET a = '; or '"));
    }
}
