//! The number of bytes in the name of a server as the user wrote it. The server truncates a longer name with only a
//! notice, before any hook sees the statement. Called by the hook of utility statements, in a user's session.

/// The server truncates at 63 bytes, in front of a character of at most 4 bytes: a shorter name is whole.
const TRUNCATED_BYTES_MIN: usize = 60;

/// The bytes of the name in the text of the statement, if the server has truncated it to `name`: there the name goes
/// on. None if it does not, or if the text has the name in another form, with `""` or as `U&"…"`. All encodings of a
/// database are supersets of ASCII.
pub fn bytes_of_truncated(name: &[u8], statement: &[u8]) -> Option<usize> {
    if name.len() < TRUNCATED_BYTES_MIN {
        return None;
    }
    let at = (statement.windows(name.len())).position(|part| part.eq_ignore_ascii_case(name))?;
    let is_quoted = statement[..at].ends_with(b"\"");
    let belongs = |byte: &&u8| match (is_quoted, **byte) {
        (true, byte) => byte != b'"',
        (false, byte) => byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | 0x80..),
    };
    let more = statement[at + name.len()..].iter().take_while(belongs).count();
    (more > 0).then_some(name.len() + more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_server_is_measured_before_it_is_truncated() {
        let (a63, e31) = ("a".repeat(63), "é".repeat(31));
        let long = "A".repeat(64);
        for (name, statement, bytes) in [
            (
                &a63,
                format!("create server {a63} foreign data wrapper outbox_amqp"),
                None,
            ),
            (&a63, format!("create server {long} foreign"), Some(64)),
            (&a63, format!("CREATE SERVER IF NOT EXISTS -- y\n {long}_$9;"), Some(67)),
            (&a63, format!("alter server old rename to {long}"), Some(64)),
            (&a63, format!("create server \"{a63} b\" foreign"), Some(65)),
            (&a63, format!("create server \"{a63}\" foreign"), None),
            (&e31, format!("create server \"{e31}é\" foreign"), Some(64)),
            (&e31, format!("create server {e31} foreign"), None),
            (&"a".to_owned(), "create server ab".to_owned(), None),
            (&a63, "create server other".to_owned(), None),
            (&a63, String::new(), None),
        ] {
            assert_eq!(
                bytes_of_truncated(name.as_bytes(), statement.as_bytes()),
                bytes,
                "{statement}"
            );
        }
    }
}
