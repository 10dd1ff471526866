//! The examples in docs/formats.md are what the code makes: each follows a comment with the transport and the format.
//! OUTBOX_ACCEPT=1 writes the output into the docs; read the diff before you commit it.

use std::fmt::Write;
use std::path::PathBuf;

use outbox_core::envelope::publication;
use outbox_core::message::{Event, Pointer, Publication};
use outbox_core::partition::{Partition, PartitionCount};
use outbox_core::route::{Format, Route, Statics, Template};
use outbox_transport::kind::Kind;

/// The event of the examples, as the SQL in the docs publishes it.
fn event() -> Event {
    Event {
        id: "01a1fc85-047b-72cc-b926-c7a014466422".into(),
        seq: 42,
        kind: "OrderPlaced".into(),
        aggregate_type: Some("Order".into()),
        aggregate_id: Some("A-42".into()),
        operation: Some("Placed".into()),
        payload: r#"{"order": "A-42", "total": 99.90}"#.into(),
        previous_payload: None,
        metadata: Some(r#"{"ip": "10.0.0.7"}"#.into()),
        headers: Some(
            r#"{"tenant": "acme", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}"#.into(),
        ),
        actor: Some("Änne".into()),
        correlation_id: Some("checkout-7".into()),
        created_at: "2026-11-21T05:12:18.297537Z".into(),
        created_at_s: 1_795_237_938,
    }
}

fn made(kind: &'static Kind, format: Format) -> Publication {
    let key = "Order:A-42";
    let pointer = Pointer {
        seq: 42,
        destination: "default".into(),
        partition: Partition::of_key(key, PartitionCount::new(16).expect("a count")),
        key: Some(key.into()),
        attempts: 0,
        crashes: 0,
        lease_epoch: 7,
        replayed: false,
        enqueued_at_us: 0,
        expires_at_us: None,
    };
    let mut statics = Statics {
        source: Template::fixed("/outbox/shop"),
        ..Statics::default()
    };
    statics
        .headers
        .add(&kind.form, format, "team", "orders-{header:tenant|none}")
        .expect("a header");
    statics.check(format).expect("a description");
    let route = Route {
        form: &kind.form,
        format,
        address: &Template::parse("{aggregate_type}.{operation}").expect("a template"),
        statics: &statics,
    };
    publication(1, &pointer, event(), &route).expect("a message")
}

/// As a person would write it: properties, headers, an empty line, the body.
fn shown(kind: &'static Kind, publication: &Publication) -> String {
    let mut lines = String::new();
    let given = &publication.properties;
    let indent = match kind.form.has_properties {
        true => {
            let _ = writeln!(
                lines,
                "exchange events, {} {}\n\ncontent_type: {}\nmessage_id: {}\ntype: {}\ncorrelation_id: {}\n\
                 timestamp: {}\napp_id: {}\ndelivery_mode: 2\nheaders:",
                kind.form.address,
                publication.address,
                given.content_type,
                given.message_id,
                given.kind.as_deref().unwrap_or_default(),
                given.correlation_id.as_deref().unwrap_or_default(),
                given.timestamp_s.unwrap_or_default(),
                given.app_id,
            );
            "  "
        }
        false => {
            let _ = writeln!(lines, "content-type: {}", given.content_type);
            ""
        }
    };
    for (name, value) in &given.headers {
        let _ = writeln!(lines, "{indent}{name}: {value}");
    }
    let _ = writeln!(lines, "\n{}", String::from_utf8_lossy(&publication.body));
    lines
}

/// The text with each example replaced by the output; and the number of examples.
fn with_examples(text: &str) -> (String, usize) {
    let mut parts = text.split("<!-- example: ");
    let mut written = parts.next().unwrap_or_default().to_owned();
    let mut count = 0;
    for part in parts {
        let (name, rest) = part.split_once(" -->\n").expect("a comment");
        let (kind, format) = name.split_once(' ').expect("kind and format");
        let kind = Kind::of_wrapper(&format!("outbox_{kind}")).unwrap_or_else(|| panic!("no kind {kind}"));
        let format = Format::parse(format).unwrap_or_else(|refusal| panic!("{refusal}"));
        let (_, rest) = rest
            .strip_prefix("```\n")
            .and_then(|rest| rest.split_once("```\n"))
            .unwrap_or_else(|| panic!("no block behind {name}"));
        let example = shown(kind, &made(kind, format));
        let _ = write!(written, "<!-- example: {name} -->\n```\n{example}```\n{rest}");
        count += 1;
    }
    (written, count)
}

#[test]
fn the_examples_in_the_docs_are_the_messages_that_are_sent() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats.md");
    let text = std::fs::read_to_string(&path).expect("docs/formats.md");
    let (made, count) = with_examples(&text);
    assert_eq!(count, 7, "examples in docs/formats.md");
    if std::env::var_os("OUTBOX_ACCEPT").is_some_and(|value| value == "1") {
        std::fs::write(&path, made).expect("write docs/formats.md");
        return;
    }
    for (line, (made, written)) in made.lines().zip(text.lines()).enumerate() {
        assert_eq!(made, written, "docs/formats.md, line {}", line + 1);
    }
    assert_eq!(made, text);
}
