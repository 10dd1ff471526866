//! Finds the password for a connection in a password file, in the format of libpq's .pgpass. No I/O.

/// The connection that a line must match.
pub struct Wanted<'a> {
    pub host: &'a str,
    pub port: u16,
    pub dbname: &'a str,
    pub user: &'a str,
}

/// The password of the first line that matches. A line is `host:port:database:user:password`. A field `*` matches any
/// value, and a backslash escapes the next character.
pub fn password(text: &str, wanted: &Wanted<'_>) -> Option<String> {
    let port = wanted.port.to_string();
    let wanted = [wanted.host, &port, wanted.dbname, wanted.user];
    let lines = text.lines().map(|line| line.trim_end_matches('\r'));
    lines.filter(|line| !line.starts_with('#')).find_map(|line| {
        let fields = fields(line);
        let (password, given) = fields.get(..5)?.split_last()?;
        let matches = given
            .iter()
            .zip(wanted)
            .all(|(given, wanted)| given.raw == "*" || given.value == wanted);
        matches.then(|| password.value.clone())
    })
}

struct Field {
    raw: String,
    value: String,
}

fn fields(line: &str) -> Vec<Field> {
    let mut fields = Vec::new();
    let (mut raw, mut value) = (String::new(), String::new());
    let mut chars = line.chars();
    loop {
        match chars.next() {
            c @ (None | Some(':')) => {
                fields.push(Field {
                    raw: std::mem::take(&mut raw),
                    value: std::mem::take(&mut value),
                });
                if c.is_none() {
                    return fields;
                }
            }
            Some('\\') => {
                raw.push('\\');
                let next = chars.next().unwrap_or('\\');
                raw.push(next);
                value.push(next);
            }
            Some(c) => {
                raw.push(c);
                value.push(c);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, host: &str, user: &str) -> Option<String> {
        let wanted = Wanted {
            host,
            port: 5433,
            dbname: "shop",
            user,
        };
        password(text, &wanted)
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
