//! The command in a remedy of `outbox_health`, `outbox_why` or a refusal of a broker, for a program that copies or runs it,
//! and the words that it is made of.
//! tests/remedies.rs types the commands that this finds.

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
    let begin = BEGINS.iter().filter_map(|word| remedy.find(word)).min()?;
    let command = &remedy[begin..];
    let end = ENDS.iter().filter_map(|word| command.find(word)).min();
    Some(&command[..end.unwrap_or(command.len())])
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
    use super::{command, shell_word};

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
}
