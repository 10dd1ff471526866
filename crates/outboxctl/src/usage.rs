//! Turns an error of clap into a failure with the form of the other errors of outboxctl. `main` calls it when the
//! command line does not parse, before any connection.

use crate::failure::{Code, Failure};
use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::error::Error as _;

/// The failure that describes an error of clap; `command` is the name of the subcommand, if there is one.
pub fn failure(error: &Error, command: Option<&str>) -> Failure {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let argument = text(ContextKind::InvalidArg).unwrap_or_default();
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    let message = match error.kind() {
        ErrorKind::UnknownArgument => format!("unknown option or argument {argument}"),
        ErrorKind::InvalidSubcommand => format!(
            "unknown command {}",
            text(ContextKind::InvalidSubcommand).unwrap_or_default()
        ),
        ErrorKind::InvalidValue if value.is_empty() => format!("{argument} needs a value"),
        ErrorKind::InvalidValue => format!("invalid value \"{value}\" for {argument}"),
        ErrorKind::ValueValidation => match error.source() {
            Some(why) => format!("invalid value \"{value}\" for {argument}: {why}"),
            None => format!("invalid value \"{value}\" for {argument}"),
        },
        ErrorKind::MissingRequiredArgument => format!("missing: {argument}"),
        ErrorKind::MissingSubcommand => "a command is missing".to_owned(),
        ErrorKind::ArgumentConflict => match text(ContextKind::PriorArg) {
            Some(other) => format!("{argument} cannot be combined with {other}"),
            None => format!("{argument} is given twice, or cannot be combined with the others"),
        },
        ErrorKind::TooManyValues | ErrorKind::TooFewValues | ErrorKind::WrongNumberOfValues => {
            format!("{argument} has the wrong number of values")
        }
        ErrorKind::NoEquals => format!("{argument} needs = before its value"),
        _ => first_line(&error.to_string()),
    };
    let known = text(ContextKind::SuggestedArg).or_else(|| text(ContextKind::SuggestedSubcommand));
    let valid = text(ContextKind::ValidValue).filter(|valid| !valid.is_empty());
    let help = match command {
        Some(command) => format!("outboxctl {command} --help lists all options."),
        None => "outboxctl --help lists all commands.".to_owned(),
    };
    let hint = match (valid, known) {
        (Some(valid), _) => format!("Valid values: {valid}."),
        (None, Some(known)) => format!("Did you mean {known}? {help}"),
        (None, None) => help,
    };
    Failure::new(Code::Usage, message).hint(hint)
}

/// The first line of a message of clap, without its prefix `error: `.
fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
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
                "invalid value \"x\" for --partition <PARTITION>: a partition is p00 to p1023",
                "outboxctl list --help",
            ),
            (
                "list --colour",
                "unknown option or argument --colour",
                "outboxctl list --help",
            ),
            ("lst", "unknown command lst", "Did you mean list?"),
            ("show", "missing: <SEQ>", "outboxctl show --help"),
            ("list --limit", "--limit <LIMIT> needs a value", "outboxctl list --help"),
        ] {
            let (reported, help) = refusal_of(line);
            assert_eq!(reported, message, "{line}");
            assert!(help.contains(hint), "{line}: {help}");
        }
    }
}
