//! Checks the W3C trace context. `cloudevents` calls it before a header of the user becomes an attribute. As a header
//! it is sent in any case, because receivers must ignore an invalid one.

/// A longer `tracestate` is not made an attribute; the recommendation asks to pass on at least 512.
const TRACESTATE_MAX_BYTES: usize = 1024;

/// `00-<trace id, 32>-<parent id, 16>-<flags, 2>`, in lower-case hex. A version above 00 may continue after another `-`
/// (https://www.w3.org/TR/trace-context/#versioning-of-traceparent).
pub(crate) fn is_traceparent(text: &str) -> bool {
    let bytes = text.as_bytes();
    let Some((known, more)) = bytes.split_at_checked(55) else {
        return false;
    };
    let field = |from: usize, to: usize| &known[from..to];
    let is_hex = |field: &[u8]| field.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let (version, trace, parent, flags) = (field(0, 2), field(3, 35), field(36, 52), field(53, 55));
    [2, 35, 52].into_iter().all(|at| known[at] == b'-')
        && [version, trace, parent, flags].into_iter().all(is_hex)
        && version != b"ff"
        && trace.iter().any(|byte| *byte != b'0')
        && parent.iter().any(|byte| *byte != b'0')
        && (more.is_empty() || (version != b"00" && more[0] == b'-'))
}

/// Only checks that a header can hold it: the members belong to the vendors.
pub(crate) fn is_tracestate(text: &str) -> bool {
    text.contains('=') && text.len() <= TRACESTATE_MAX_BYTES && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_trace_parent_has_its_form_and_no_zero_id() {
        assert!(is_traceparent(VALID));
        assert!(is_traceparent(&format!("cc{}-what-the-future-brings", &VALID[2..])));
        for invalid in [
            "",
            "00-ab-cd-01",
            &VALID[..54],
            &format!("{VALID}-more"),
            &format!("{VALID}0"),
            &format!("ff{}", &VALID[2..]),
            &format!("cc{}more", &VALID[2..]),
            &VALID.to_uppercase(),
            &VALID.replace('-', "_"),
            &VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            &VALID.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &VALID.replace("4b", "é"),
        ] {
            assert!(!is_traceparent(invalid), "{invalid}");
        }
    }

    #[test]
    fn a_trace_state_is_a_list_in_ascii() {
        assert!(is_tracestate("rojo=00f067aa0ba902b7, congo=t61rcWkgMzE"));
        assert!(!is_tracestate(""));
        assert!(!is_tracestate("rojo=ü"));
        assert!(!is_tracestate("rojo=1\n"));
        assert!(!is_tracestate(&format!("rojo={}", "1".repeat(1024))));
    }

    proptest! {
        #[test]
        fn every_text_of_the_form_is_valid_and_no_text_panics(
            version in "[0-9a-e]{2}", trace in "[1-9a-f]{32}", parent in "[1-9a-f]{16}", flags in "[0-9a-f]{2}",
            other in "\\PC{0,60}",
        ) {
            let valid = format!("{version}-{trace}-{parent}-{flags}");
            prop_assert!(is_traceparent(&valid), "{}", valid);
            prop_assert!(!is_traceparent(&other));
        }
    }
}
