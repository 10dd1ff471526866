//! The number of bytes in the name of a server as the user wrote it. The server truncates a longer name with only a
//! notice, before any hook sees the statement. Called by the hook of utility statements, in a user's session.

/// The name in the text of one `CREATE SERVER` statement, or the new one of `ALTER SERVER … RENAME TO`: its bytes
/// before the server truncates it. None if that cannot be determined, as for `U&"…"`. All encodings of a database are
/// supersets of ASCII.
pub fn server_name_bytes(statement: &[u8]) -> Option<usize> {
    let mut rest = statement;
    let verb = next(&mut rest)?;
    next(&mut rest).filter(|word| word.is("server"))?;
    let name = next(&mut rest)?;
    if verb.is("create") {
        let mut after = rest;
        let has_condition = name.is("if") && next(&mut after).is_some_and(|word| word.is("not"));
        if !has_condition {
            return Some(name.bytes);
        }
        next(&mut after).filter(|word| word.is("exists"))?;
        return next(&mut after).map(|name| name.bytes);
    }
    next(&mut rest).filter(|word| word.is("rename"))?;
    next(&mut rest).filter(|word| word.is("to"))?;
    next(&mut rest).map(|name| name.bytes)
}

/// A word, or a name in quotes.
struct Token<'a> {
    /// Empty for a name in quotes, which is not a keyword.
    text: &'a [u8],
    /// Without the quotes.
    bytes: usize,
}

impl Token<'_> {
    fn is(&self, keyword: &str) -> bool {
        self.text.eq_ignore_ascii_case(keyword.as_bytes())
    }
}

fn next<'a>(rest: &mut &'a [u8]) -> Option<Token<'a>> {
    skip_space(rest);
    let is_start = |byte: &u8| byte.is_ascii_alphabetic() || *byte == b'_' || *byte >= 0x80;
    let (first, text) = (rest.first()?, *rest);
    if *first == b'"' {
        let mut bytes = 0;
        let mut at = 1;
        loop {
            match (text.get(at)?, text.get(at + 1)) {
                (b'"', Some(b'"')) => at += 2,
                (b'"', _) => break,
                _ => at += 1,
            }
            bytes += 1;
        }
        *rest = &text[at + 1..];
        return Some(Token { text: &[], bytes });
    }
    if !is_start(first) || (text.len() > 2 && text[..2].eq_ignore_ascii_case(b"u&") && text[2] == b'"') {
        return None;
    }
    let more = |byte: &u8| is_start(byte) || byte.is_ascii_digit() || *byte == b'$';
    let bytes = text.iter().take_while(|byte| more(byte)).count();
    *rest = &text[bytes..];
    let text = &text[..bytes];
    Some(Token { text, bytes })
}

/// Skips white space, comments to the end of a line, and nested comments.
fn skip_space(rest: &mut &[u8]) {
    loop {
        let text = *rest;
        if text
            .first()
            .is_some_and(|byte| byte.is_ascii_whitespace() || *byte == 0x0b)
        {
            *rest = &text[1..];
        } else if text.starts_with(b"--") {
            let end = text.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            *rest = &text[end.unwrap_or(text.len())..];
        } else if text.starts_with(b"/*") {
            let (mut depth, mut at) = (1, 2);
            while depth > 0 && at < text.len() {
                let step = match &text[at..] {
                    [b'/', b'*', ..] => (1, 2),
                    [b'*', b'/', ..] => (-1, 2),
                    _ => (0, 1),
                };
                (depth, at) = (depth + step.0, at + step.1);
            }
            *rest = &text[at..];
        } else {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_server_is_measured_before_it_is_truncated() {
        for (statement, bytes) in [
            ("create server abc foreign data wrapper outbox_amqp", Some(3)),
            ("CREATE  Server\n\tIf Not Exists abcd foreign", Some(4)),
            ("create server if foreign data wrapper x", Some(2)),
            ("create server if type 'x'", Some(2)),
            (
                "/* a /* b */ server x */ create -- server y\n server/**/z9$ý type",
                Some(5),
            ),
            (r#"create server "a ""b"" -- c" foreign"#, Some(10)),
            (r#"create server "if" not"#, Some(2)),
            (r#"create server if not exists "x""#, Some(1)),
            ("alter server old rename to longer", Some(6)),
            (r#"alter server "rename" rename/**/to"to""#, Some(2)),
            ("alter server old options (set host 'x')", None),
            (r#"create server U&"\0061" foreign"#, None),
            ("create server u foreign", Some(1)),
            (r#"create server "open"#, None),
            ("create table server", None),
            ("create server /* open", None),
            ("", None),
        ] {
            assert_eq!(server_name_bytes(statement.as_bytes()), bytes, "{statement}");
        }
    }
}
