//! What is wrong, as data, and the words for it. A finding is a code and named values, as they are stored and returned.
//! A table has one row of words for each code: here for the checks of `outbox_health`, and with each kind of destination
//! for its connections. `outbox_internal.worded()` renders them for SQL.
//!
//! The words are templates:
//!
//! - `{name}` is a value as it is, `{name:I}` an identifier of SQL, `{name:L}` a literal of SQL, `{name:S}` a word of a
//!   shell. `{{` and `}}` are braces.
//! - `{name:set}`, `{name:alter}` and `{name:own}` are the commands that change the setting outbox.name: see [`setting`].
//! - `[some {name}|else]` is the first part if all its values are there, otherwise the second. `{name:?}` stands for
//!   nothing: it asks for the value.
//! - `` `place command` `` is a command, with the [`CommandPlace`] where it is typed. Names that others chose are in values, so
//!   none of them can begin or end a command.

use crate::words::Word;
use serde::Serialize;
use std::borrow::Cow;
use std::mem;

/// What is wrong, as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub code: &'static str,
    /// What happened, for people: often in the words of another program.
    pub detail: String,
    /// The other values of its words.
    pub args: Vec<(&'static str, String)>,
}

impl Finding {
    pub fn new(code: &'static str, detail: impl Into<String>) -> Self {
        Self {
            code,
            detail: detail.into(),
            args: Vec::new(),
        }
    }

    /// The same, with another value.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.args.push((name, value.into()));
        self
    }

    /// The other values as an object of JSON.
    pub fn args_json(&self) -> String {
        let args = self
            .args
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.as_str().into()));
        serde_json::Value::Object(args.collect()).to_string()
    }
}

/// A destination that cannot be used as it is described.
impl<T: Into<String>> From<T> for Finding {
    fn from(detail: T) -> Self {
        Self::new("unconfigured", detail)
    }
}

/// The words for a code.
#[derive(Debug)]
pub struct Words {
    pub code: &'static str,
    /// What is wrong.
    pub problem: &'static str,
    /// What ends it, the most probable first.
    pub remedy: &'static str,
}

/// A row of a table of words.
pub const fn words(code: &'static str, problem: &'static str, remedy: &'static str) -> Words {
    Words { code, problem, remedy }
}

crate::words! {
    /// Where a command is typed, and who may do so.
    pub enum CommandPlace {
        /// In psql, as a member of outbox_admin.
        Admin = "admin",
        /// In psql, as the owner of the object that it names.
        Owner = "owner",
        /// In psql, as a superuser.
        Superuser = "superuser",
        /// In psql; it changes a setting of the server, of the database, or of the server of a destination.
        Setting = "setting",
        /// In psql; it ends another session.
        Signal = "signal",
        /// In a shell of the database server.
        Host = "host",
        /// In a shell of the broker.
        Peer = "peer",
    }
}

impl CommandPlace {
    /// The program or the host, for people.
    pub fn shown(self) -> &'static str {
        match self {
            Self::Host => "shell of the database server",
            Self::Peer => "shell of the broker",
            _ => "psql",
        }
    }

    /// Who may type it, for people.
    pub fn role(self) -> &'static str {
        match self {
            Self::Admin => "a member of outbox_admin",
            Self::Owner => "the owner of what it names, or a superuser",
            Self::Superuser => "a superuser",
            Self::Setting => "a superuser, or the owner of the server or database that it names",
            Self::Signal => "a superuser, or a member of pg_signal_backend",
            Self::Host => "the user of the server, or root",
            Self::Peer => "an administrator of the broker",
        }
    }
}

/// A command of a remedy, as JSON in the column `commands`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemedyCommand {
    pub command: String,
    #[serde(rename = "where")]
    pub place: &'static str,
    pub role: &'static str,
}

/// A rendered text, and the commands in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    pub commands: Vec<RemedyCommand>,
}

impl Rendered {
    /// The commands as an array of JSON.
    pub fn commands_json(&self) -> String {
        serde_json::to_string(&self.commands).unwrap_or_default()
    }
}

/// The value of a name. None = it is missing.
pub type ValueLookup<'a> = &'a dyn Fn(&str) -> Option<Cow<'a, str>>;

/// Renders a template. `identifier` quotes an identifier of SQL, for which the server has the list of its words.
pub fn render(template: &str, value: ValueLookup, identifier: &dyn Fn(&str) -> String) -> Rendered {
    let mut rendered = Rendered::default();
    let mut rest = template;
    // Where the command that is being written begins, and where it is typed.
    let mut command = None;
    // What was rendered before the alternative that is being written, and whether one of its values is missing.
    let mut before: Option<(usize, usize)> = None;
    let mut lacks = false;
    while let Some(at) = rest.find(['{', '}', '[', '|', ']', '`']) {
        rendered.text.push_str(&rest[..at]);
        let (sign, after) = rest[at..].split_at(1);
        rest = after;
        match sign {
            "{" | "}" if rest.starts_with(sign) => {
                rendered.text.push_str(sign);
                rest = &rest[1..];
            }
            "{" => {
                let (name, after) = rest.split_once('}').unwrap_or((rest, ""));
                rest = after;
                let (name, style) = name.rsplit_once(':').unwrap_or((name, ""));
                match (value(name), style) {
                    (_, "set" | "alter" | "own") => match setting(name, style, value, identifier) {
                        Some(command) => rendered.text.push_str(&command),
                        None => lacks = true,
                    },
                    (None, _) => lacks = true,
                    (Some(_), "?") => {}
                    (Some(value), "I") => rendered.text.push_str(&identifier(&value)),
                    (Some(value), "L") => rendered.text.push_str(&literal(&value)),
                    (Some(value), "S") => rendered.text.push_str(&shell_word(&value)),
                    (Some(value), _) => rendered.text.push_str(&value),
                }
            }
            "[" => {
                before = Some((rendered.text.len(), rendered.commands.len()));
                lacks = false;
            }
            "|" if before.is_some() && !lacks => {
                before = None;
                rest = rest.split_once(']').map_or("", |(_, after)| after);
            }
            "|" | "]" if let Some((text, commands)) = before => {
                if mem::take(&mut lacks) {
                    rendered.text.truncate(text);
                    rendered.commands.truncate(commands);
                }
                before = before.filter(|_| sign == "|");
            }
            "`" => match command.take() {
                None => {
                    let (place, after) = rest.split_once(' ').unwrap_or((rest, ""));
                    rest = after;
                    command = Some((
                        rendered.text.len(),
                        CommandPlace::of_name(place).unwrap_or(CommandPlace::Superuser),
                    ));
                }
                Some((begin, place)) => rendered.commands.push(RemedyCommand {
                    command: rendered.text[begin.min(rendered.text.len())..].to_owned(),
                    place: place.shown(),
                    role: place.role(),
                }),
            },
            other => rendered.text.push_str(other),
        }
    }
    rendered.text.push_str(rest);
    rendered
}

/// The command that gives a setting a value. `given`: `name` has the new value, or `name=value`; `?` is a variable of
/// psql, for what only people know. `*name` has the name of the setting.
///
/// `alter` changes it where it is set. `set` gives it to the destination, if that has a server. `own` does so for the
/// destination of the settings, too, if others take their value from there.
fn setting(given: &str, style: &str, value: ValueLookup, identifier: &dyn Fn(&str) -> String) -> Option<String> {
    let (name, new) = given
        .split_once('=')
        .map_or((given, None), |(name, new)| (name, Some(new)));
    let name = match name.strip_prefix('*') {
        Some(named) => value(named)?,
        None => name.into(),
    };
    let name = name.strip_prefix("outbox.").unwrap_or(&name);
    let new = match new {
        Some("?") => format!(":'{name}'"),
        Some(new) => literal(new),
        None => literal(&value(name)?),
    };
    let count = |name: &str| value(name).map_or(0, |count| count.parse().unwrap_or(0));
    let has_option = value(&format!("o_{name}")).is_some();
    let of_database = value("database_settings").unwrap_or_default();
    Some(match value("server") {
        Some(_) if style != "alter" || has_option => {
            let verb = if has_option { "SET" } else { "ADD" };
            let (server, option) = (identifier(&value("destination")?), identifier(name));
            format!("ALTER SERVER {server} OPTIONS ({verb} {option} {new})")
        }
        None if style == "own" && count("others") > count(&format!("others_{name}")) => {
            let (server, wrapper) = (identifier(&value("destination")?), identifier(&value("wrapper")?));
            format!(
                "CREATE SERVER {server} FOREIGN DATA WRAPPER {wrapper} OPTIONS ({} {new})",
                identifier(name)
            )
        }
        _ if of_database.split(',').any(|set| set == name) => {
            let database = identifier(&value("database")?);
            format!("ALTER DATABASE {database} SET outbox.{name} = {new}")
        }
        _ => format!("ALTER SYSTEM SET outbox.{name} = {new}; SELECT pg_reload_conf()"),
    })
}

/// A text as a literal of SQL, whatever `standard_conforming_strings` is.
pub fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    match text.contains('\\') {
        true => format!("E'{}'", quoted.replace('\\', r"\\")),
        false => format!("'{quoted}'"),
    }
}

/// A word as a shell reads it, whatever characters it has.
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// What is wrong with a table of words, for the test of each table: a sign without its partner, a place or a style that
/// does not exist, a code twice.
pub fn check_table(table: &[Words]) -> Result<(), String> {
    for (n, row) in table.iter().enumerate() {
        if table[..n].iter().any(|other| other.code == row.code) {
            return Err(format!("{} is there twice", row.code));
        }
        for template in [row.problem, row.remedy] {
            check(template).map_err(|why| format!("{}: {why}: {template}", row.code))?;
        }
    }
    Ok(())
}

fn check(template: &str) -> Result<(), &'static str> {
    let plain = template.replace("{{", "").replace("}}", "");
    let (mut in_command, mut in_choice) = (false, false);
    let mut rest = plain.as_str();
    while let Some(at) = rest.find(['{', '}', '[', ']', '`']) {
        let (sign, after) = rest[at..].split_at(1);
        rest = after;
        match sign {
            "{" => {
                let (name, after) = after.split_once('}').ok_or("a brace is open")?;
                let style = name.rsplit_once(':').map_or("", |(_, style)| style);
                if !["", "I", "L", "S", "?", "set", "alter", "own"].contains(&style) {
                    return Err("there is no such style");
                }
                rest = after;
            }
            "}" => return Err("a brace is closed"),
            "[" | "]" if in_choice == (sign == "[") => return Err("a bracket has no partner"),
            "[" | "]" => in_choice = !in_choice,
            _ if in_command => in_command = false,
            _ => {
                let (place, after) = after.split_once(' ').ok_or("a command has no place")?;
                CommandPlace::of_name(place).ok_or("there is no such place")?;
                (in_command, rest) = (true, after);
            }
        }
    }
    match in_command || in_choice {
        true => Err("a command or a choice is open"),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rendered(template: &str, values: &[(&str, &str)]) -> Rendered {
        let find = |name: &str| values.iter().find(|(known, _)| *known == name);
        render(
            template,
            &|name| find(name).map(|(_, value)| (*value).into()),
            &|name| format!("\"{}\"", name.replace('"', "\"\"")),
        )
    }

    fn commands(template: &str, values: &[(&str, &str)]) -> Vec<String> {
        let commands = rendered(template, values).commands.into_iter();
        commands.map(|command| command.command).collect()
    }

    #[test]
    fn a_value_stands_in_the_style_of_its_place() {
        let values = [("name", "it's \"a\" \\ `b` [c] {d}")];
        assert_eq!(
            rendered("{name}, {{x}}", &values).text,
            "it's \"a\" \\ `b` [c] {d}, {x}"
        );
        assert_eq!(rendered("{name:I}", &values).text, "\"it's \"\"a\"\" \\ `b` [c] {d}\"");
        assert_eq!(rendered("{name:L}", &values).text, "E'it''s \"a\" \\\\ `b` [c] {d}'");
        assert_eq!(rendered("{name:S}", &values).text, r#"'it'\''s "a" \ `b` [c] {d}'"#);
    }

    #[test]
    fn a_choice_needs_all_its_values() {
        let template = "x[: {a}, {b}| or `admin select {a:L}`], y";
        assert_eq!(rendered(template, &[("a", "1"), ("b", "2")]).text, "x: 1, 2, y");
        assert_eq!(commands(template, &[("a", "1"), ("b", "2")]), [""; 0]);
        assert_eq!(rendered(template, &[("a", "1")]).text, "x or select '1', y");
        assert_eq!(commands(template, &[("a", "1")]), ["select '1'"]);
        assert_eq!(rendered("x[ {a}]", &[]).text, "x");
        assert_eq!(rendered("[`admin drop {a}`|{b}]!", &[("b", "2")]), rendered("2!", &[]));
        assert_eq!(rendered("[{a:?}yes|no]", &[("a", "")]).text, "yes");
        assert_eq!(rendered("[{a:?}yes|no]", &[]).text, "no");
    }

    #[test]
    fn no_value_begins_or_ends_a_command() {
        let gid = "x`, or `superuser select evil()`";
        let template = "`superuser COMMIT PREPARED {gid:L}`, or `superuser ROLLBACK PREPARED {gid:L}`";
        let quoted = literal(gid);
        assert_eq!(
            commands(template, &[("gid", gid)]),
            [
                format!("COMMIT PREPARED {quoted}"),
                format!("ROLLBACK PREPARED {quoted}")
            ]
        );
    }

    #[test]
    fn no_character_of_a_word_is_read_by_the_shell() {
        assert_eq!(shell_word("audit-2.eu"), "audit-2.eu");
        assert_eq!(shell_word("/"), "/");
        assert_eq!(shell_word("it's $(x)"), r"'it'\''s $(x)'");
        assert_eq!(shell_word(""), "''");
    }

    #[test]
    fn a_table_with_a_mistake_is_refused() {
        for wrong in ["{a", "a}", "[a", "a]", "[[a]]", "`admin x", "`nobody x`", "{a:X}"] {
            assert!(check_table(&[words("x", wrong, "")]).is_err(), "{wrong}");
        }
        assert!(check_table(&[words("x", "", ""), words("x", "", "")]).is_err());
    }

    proptest! {
        #[test]
        fn no_template_makes_it_panic(template in "[\\[\\]{}|` a-c:?ILSé]{0,40}") {
            rendered(&template, &[("a", "é"), ("b", "`")]);
        }
    }
}
