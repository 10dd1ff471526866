//! Turns an error of clap into a failure with the form of the other errors of outboxctl. `main` calls it when the
//! command line does not parse, before any connection.

use crate::failure::{Code, Failure};
use crate::format::capitalised;
use clap::Error;

/// The failure for an error of clap, with its tips as the hint; `command` is the name of the subcommand, if there is
/// one.
pub fn failure(error: &Error, command: Option<&str>) -> Failure {
    let text = error.to_string();
    let paragraphs = text
        .split("\n\n")
        .map(|lines| lines.lines().map(str::trim).collect::<Vec<_>>().join(" "));
    let mut paragraphs = paragraphs.filter(|paragraph| !paragraph.starts_with("Usage: "));
    let message = paragraphs.next().unwrap_or_default();
    let mut hint: String = paragraphs
        .filter_map(|line| Some(capitalised(line.strip_prefix("tip: ")?) + ". "))
        .collect();
    hint += &match command {
        Some(command) => format!("outboxctl {command} --help lists all options."),
        None => "outboxctl --help lists all commands.".to_owned(),
    };
    Failure::new(Code::Usage, message.trim_start_matches("error: ")).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::Parser;

    fn refusal_of(line: &str) -> (String, String) {
        let words = line.split_whitespace();
        let error = Cli::try_parse_from(std::iter::once("outboxctl").chain(words.clone()))
            .err()
            .expect(line);
        let failure = failure(&error, words.clone().next());
        assert_eq!(failure.code, Code::Usage);
        (failure.message, failure.hint.unwrap_or_default())
    }

    #[test]
    fn each_mistake_is_reported_with_a_hint() {
        for (line, message, hint) in [
            (
                "list --partition x",
                "invalid value 'x' for '--partition <PARTITION>': a partition is p00 to p1023",
                "outboxctl list --help",
            ),
            (
                "list --colour",
                "unexpected argument '--colour' found",
                "outboxctl list --help",
            ),
            (
                "top -d shop -d billing",
                "the argument '--dbname <DBNAME>' cannot be used multiple times",
                "outboxctl top --help",
            ),
            ("lst", "unrecognized subcommand 'lst'", "list"),
            (
                "show",
                "the following required arguments were not provided: <SEQ>",
                "outboxctl show --help",
            ),
            (
                "list --limit",
                "a value is required for '--limit <LIMIT>' but none was supplied",
                "outboxctl list --help",
            ),
        ] {
            let (reported, help) = refusal_of(line);
            assert_eq!(reported, message, "{line}");
            assert!(help.contains(hint), "{line}: {help}");
        }
    }
}
