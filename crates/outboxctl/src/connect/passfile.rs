//! Finds the password for a connection in a password file, in the format of libpq's .pgpass. No I/O.

/// The password of the first line that matches host, port, database and user. A line is
/// `host:port:database:user:password`. A field `*` matches any value, and a backslash escapes the next character.
pub fn password(text: &str, wanted: [&str; 4]) -> Option<String> {
    let lines = text.lines().map(|line| line.trim_end_matches('\r'));
    lines.filter(|line| !line.starts_with('#')).find_map(|line| {
        let fields = fields(line);
        let (password, given) = fields.get(..5)?.split_last()?;
        let mut pairs = given.iter().zip(wanted);
        let matches = pairs.all(|(given, wanted)| *given == "*" || unescaped(given) == wanted);
        matches.then(|| unescaped(password))
    })
}

/// The fields, still escaped: `\*` does not match any value.
fn fields(line: &str) -> Vec<&str> {
    let mut is_escaped = false;
    let is_end = |c: char| {
        let is_end = c == ':' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end
    };
    line.split(is_end).collect()
}

fn unescaped(field: &str) -> String {
    let mut value = String::new();
    let mut chars = field.chars();
    while let Some(c) = chars.next() {
        value.push(if c == '\\' { chars.next().unwrap_or(c) } else { c });
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, host: &str, user: &str) -> Option<String> {
        password(text, [host, "5433", "shop", user])
    }

    #[test]
    fn the_first_line_that_matches_has_the_password() {
        let text = "# comment\nh:5433:shop:other:no\nh:5432:shop:me:no\nh:5433:x:me:no\nh:5433:shop:me:first\nh:5433:shop:me:second\n";
        assert_eq!(of(text, "h", "me").as_deref(), Some("first"));
        assert_eq!(of(text, "h", "you"), None);
    }

    #[test]
    fn a_star_matches_any_value_and_a_backslash_escapes_the_next_character() {
        assert_eq!(of("*:*:*:me:pw", "anything", "me").as_deref(), Some("pw"));
        assert_eq!(
            of(r"\*:*:*:*:pw", "h", "me"),
            None,
            "an escaped star matches only a star"
        );
        assert_eq!(of(r"\*:*:*:*:pw", "*", "me").as_deref(), Some("pw"));
        assert_eq!(of(r"\:\:1:*:*:*:a\:b\\c", "::1", "me").as_deref(), Some(r"a:b\c"));
        // libpq ends the password at a colon that is not escaped.
        assert_eq!(of("*:*:*:*:a:b", "h", "me").as_deref(), Some("a"));
    }

    #[test]
    fn malformed_lines_are_ignored() {
        assert_eq!(
            of("nonsense\n*:*:*\n\n*:*:*:*:pw\r\n", "h", "me").as_deref(),
            Some("pw")
        );
        assert_eq!(of("", "h", "me"), None);
        assert_eq!(of("*:*:*:*:", "h", "me").as_deref(), Some(""));
    }
}
