//! Groups error texts: a text without the parts that differ from message to message, so that failures with one cause
//! form one group. Called for failed messages only.

/// The limit of the text of a group, in bytes, and so in characters too.
pub const TEXT_MAX_BYTES: usize = 200;
/// Stands for a number or an id.
const PLACEHOLDER: char = '#';
/// The most digits of a number that may have a meaning: a status of HTTP, a reply code of AMQP.
const STATUS_DIGITS: usize = 3;
/// From this number of hexadecimal digits on they are an id,
const HEX_ID_CHARS: usize = 8;
/// and from this number of characters on any word with a digit is one.
const ID_CHARS: usize = 16;

/// The text of the group of this error.
pub fn group(error: &str) -> String {
    let mut text = generic(error);
    text.truncate(text.floor_char_boundary(TEXT_MAX_BYTES));
    text
}

fn generic(text: &str) -> String {
    let mut generic = String::with_capacity(text.len());
    let (mut rest, mut last_word) = (text, "");
    while let Some(first) = rest.chars().next() {
        let token = head(rest, |c| c.is_ascii_alphanumeric() || c == '-');
        let word = head(rest, |c| c.is_ascii_alphanumeric());
        let taken = match word.len() {
            _ if is_hex_id(token) => {
                generic.push(PLACEHOLDER);
                token.len()
            }
            0 => {
                generic.push(first);
                first.len_utf8()
            }
            len => {
                let is_numbered = generic.ends_with([':', '-', '_'])
                    || (generic.ends_with(' ') && ["seq", "message", "id", "row"].contains(&last_word));
                push_word(&mut generic, word, is_numbered);
                last_word = word;
                len
            }
        };
        rest = &rest[taken..];
    }
    generic
}

/// The beginning of a text.
fn head(text: &str, belongs: impl Fn(char) -> bool) -> &str {
    &text[..text.find(|c| !belongs(c)).unwrap_or(text.len())]
}

fn has_digit(word: &str) -> bool {
    word.bytes().any(|byte| byte.is_ascii_digit())
}

fn is_hex_id(token: &str) -> bool {
    let is_hex = token.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    token.len() >= HEX_ID_CHARS && is_hex && has_digit(token) && !token.starts_with('-')
}

/// `is_numbered`: a number at its beginning is one of many, as in `order-42`.
fn push_word(generic: &mut String, word: &str, is_numbered: bool) {
    if word.len() >= ID_CHARS && has_digit(word) {
        return generic.push(PLACEHOLDER);
    }
    let mut rest = word;
    while !rest.is_empty() {
        let letters = head(rest, |c| c.is_ascii_alphabetic());
        let digits = head(&rest[letters.len()..], |c| c.is_ascii_digit());
        let is_first = rest.len() == word.len() && letters.is_empty();
        generic.push_str(letters);
        match digits.len() > STATUS_DIGITS || (is_first && is_numbered && !digits.is_empty()) {
            true => generic.push(PLACEHOLDER),
            false => generic.push_str(digits),
        }
        rest = &rest[letters.len() + digits.len()..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_and_ids_make_no_new_group_and_a_status_does() {
        for (error, expected) in [
            ("HTTP 500 Internal Server Error", "HTTP 500 Internal Server Error"),
            (
                "unroutable: no queue is bound to exchange \"e\" for routing key \"k.1\" (312 NO_ROUTE)",
                "unroutable: no queue is bound to exchange \"e\" for routing key \"k.1\" (312 NO_ROUTE)",
            ),
            (
                "the event store has no event with seq 7",
                "the event store has no event with seq #",
            ),
            (
                "public.journal has no row with seq 123456",
                "public.journal has no row with seq #",
            ),
            ("refused by 10.0.0.7:5672, port 80", "refused by 10.0.0.7:#, port 80"),
            (
                "event 01a1fc85-047b-72cc-b926-c7a014466422 is too large: 20971520 bytes",
                "event # is too large: # bytes",
            ),
            (
                r#"HTTP 409 Conflict: {"order":42,"trace":"c0ffee42","ref":"order-42"}"#,
                r##"HTTP 409 Conflict: {"order":#,"trace":"#","ref":"order-#"}"##,
            ),
            ("no cipher of sha256 for tls1_3", "no cipher of sha256 for tls1_#"),
            (
                "order-12345678, order-1, event-01a1fc85-047b-72cc-b926-c7a014466422",
                "order-#, order-#, event-#",
            ),
            ("ulid 01ARZ3NDEKTSV4RRFFQ69G5FAV, ORD12345", "ulid #, ORD#"),
            (
                "public.customer_accounts_v2 has no row",
                "public.customer_accounts_v2 has no row",
            ),
            ("deadbeef and facade are words", "deadbeef and facade are words"),
            ("", ""),
        ] {
            assert_eq!(group(error), expected);
        }
    }

    proptest! {
        #[test]
        fn a_group_is_short_whatever_the_text(error in "[\\s\\S]{0,300}") {
            prop_assert!(group(&error).len() <= TEXT_MAX_BYTES);
        }

        #[test]
        fn another_id_is_the_same_group(one: u32, other: u32, seq: u16) {
            let text = |id: u32, seq: u16| group(&format!("order-{id} of 127.0.0.1:{seq} failed, see {id:016x}"));
            prop_assert_eq!(text(one, seq), text(other, seq.wrapping_add(1)));
        }
    }
}
