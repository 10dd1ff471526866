//! The official CloudEvents SDK for Python reads what the core makes, in both formats and for both transports, and
//! finds each attribute as it was stored. The test needs no server. Its first run needs PyPI: the SDK is kept in a
//! virtual environment under target/.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use outbox_core::envelope::publication;
use outbox_core::message::{Event, HeaderValue, Pointer, Publication, Text};
use outbox_core::partition::{Partition, PartitionCount};
use outbox_core::route::{Format, Route, Statics, Template};
use outbox_transport::kind::Kind;
use outbox_transport::kinds::KINDS;
use serde_json::{Map, Value, json};

const PACKAGES: [&str; 2] = ["cloudevents==2.2.0", "jsonschema==4.26.0"];
const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const FORMATS: [Format; 2] = [Format::CloudEvents, Format::CloudEventsBinary];

/// The kinds for whose protocol the SDK has a binding: not the kind of the tests.
fn bound() -> impl Iterator<Item = &'static Kind> {
    KINDS
        .iter()
        .copied()
        .filter(|kind| ["AMQP", "HTTP"].contains(&kind.protocol))
}

#[test]
fn the_sdk_reads_every_event_in_both_formats_for_both_transports() {
    let mut messages = Vec::new();
    let mut expected = Vec::new();
    for (pointer, event) in events() {
        for kind in bound() {
            for format in FORMATS {
                messages.push(written(kind, &made(&pointer, &event, kind, format)));
                expected.push(json!({"attributes": attributes(&pointer, &event), "data": data(&event)}));
            }
        }
    }
    assert!(messages.len() > 400, "only {} messages", messages.len());
    let read = read(&messages);
    for ((message, read), expected) in messages.iter().zip(&read).zip(&expected) {
        assert_eq!(read, expected, "{message}");
    }
}

#[test]
fn the_sdk_refuses_a_message_that_is_not_a_cloudevent() {
    let (pointer, event) = events().next().expect("an event");
    let mut messages = Vec::new();
    for kind in bound() {
        let mut binary = written(kind, &made(&pointer, &event, kind, Format::CloudEventsBinary));
        binary["headers"].as_object_mut().expect("headers").remove("ce-source");
        messages.push(binary);
        let whole = made(&pointer, &event, kind, Format::CloudEvents);
        let with = |name: &str, value: &str| {
            let mut message = written(kind, &whole);
            let mut body: Value = serde_json::from_slice(&whole.body).expect("JSON");
            body[name] = value.into();
            message["body"] = body.to_string().into();
            message
        };
        messages.extend([with("subject", ""), with("Camel", "x"), with("source", "a b")]);
    }
    for (message, answer) in messages.iter().zip(read(&messages)) {
        assert!(answer["error"].is_string(), "{message} is read as {answer}");
    }
}

// ---- what is sent ---------------------------------------------------------------------------------------------------

fn events() -> impl Iterator<Item = (Pointer, Event)> {
    // Each field cycles through the values, so that each value occurs together with many others.
    const TEXTS: [&str; 7] = [
        "OrderPlaced",
        "Grüße, 世界 🦀",
        "a b\"c\"%41%",
        "x/y?z=1&ä#;,:@",
        "\\ ' ` ~ | { } < >",
        " spaces around ",
        "%",
    ];
    const PAYLOADS: [&str; 6] = [
        r#"{"order": "A-42", "total": 99.5, "lines": [1, 2, {"x": null}]}"#,
        "null",
        r#""text""#,
        "[]",
        "-17",
        r#"{"ünï": "\u0000\n 🦀", "deep": [[[[]]]]}"#,
    ];
    (0..120_usize).map(|n| {
        let text = |step: usize| TEXTS[(n + step) % TEXTS.len()].to_owned();
        let sometimes = |step: usize| (!(n / 2 + step).is_multiple_of(4)).then(|| text(step));
        let headers = match n % 4 {
            0 => None,
            1 => Some(json!({"traceparent": TRACEPARENT, "tracestate": "rojo=1,congo=2", "tenant": "acme"})),
            2 => Some(json!({"traceparent": TRACEPARENT})),
            _ => Some(json!({"traceparent": "00-invalid", "tracestate": "rojo=1"})),
        };
        let event = Event {
            id: format!("01a1fc85-047b-72cc-b926-{n:012x}"),
            seq: (n as i64).pow(5),
            kind: text(0),
            aggregate_type: sometimes(1),
            aggregate_id: sometimes(2),
            operation: sometimes(3),
            payload: PAYLOADS[n % PAYLOADS.len()].into(),
            previous_payload: Some("{}".into()),
            metadata: Some("{}".into()),
            headers: headers.map(|headers| headers.to_string()),
            actor: sometimes(4),
            correlation_id: sometimes(5),
            created_at: format!("2026-11-21T05:12:18.{n:06}Z"),
            created_at_s: 1_795_237_938,
        };
        let key = sometimes(6);
        let pointer = Pointer {
            seq: event.seq,
            destination: "default".into(),
            partition: Partition::of_key(
                key.as_deref().unwrap_or_default(),
                PartitionCount::new(16).expect("a count"),
            ),
            key,
            attempts: 0,
            crashes: 0,
            lease_epoch: 1,
            replayed: false,
            enqueued_at_us: 0,
            expires_at_us: None,
        };
        (pointer, event)
    })
}

fn made(pointer: &Pointer, event: &Event, kind: &'static Kind, format: Format) -> Publication {
    let route = Route {
        form: &kind.form,
        format,
        address: &Template::parse("k").expect("a template"),
        statics: &Statics {
            source: Template::parse_text("https://example.com/{destination}").expect("a template"),
            ..Statics::default()
        },
    };
    publication(1, pointer, event.clone(), &route).unwrap_or_else(|refusal| panic!("{refusal}: {event:?}"))
}

/// A message in the JSON form that read.py reads.
fn written(kind: &'static Kind, publication: &Publication) -> Value {
    let header = |(name, value): &(Text, HeaderValue)| {
        let value = match value {
            HeaderValue::Int(int) if kind.form.has_properties => (*int).into(),
            other => other.to_string().into(),
        };
        (name.to_string(), value)
    };
    let headers: Map<String, Value> = publication.properties.headers.iter().map(header).collect();
    json!({
        "transport": kind.protocol.to_lowercase(),
        "content_type": publication.properties.content_type.as_str(),
        "headers": headers,
        "body": std::str::from_utf8(&publication.body).expect("UTF-8"),
    })
}

// ---- what is to be read ---------------------------------------------------------------------------------------------

fn attributes(pointer: &Pointer, event: &Event) -> Value {
    let headers: Value = serde_json::from_str(event.headers.as_deref().unwrap_or("{}")).expect("JSON");
    let is_traced = headers["traceparent"] == TRACEPARENT;
    let all = [
        ("specversion", Some("1.0")),
        ("id", Some(event.id.as_str())),
        ("source", Some("https://example.com/default")),
        ("type", Some(event.kind.as_str())),
        ("subject", event.aggregate_id.as_deref().or(pointer.key.as_deref())),
        ("time", Some(event.created_at.as_str())),
        ("datacontenttype", Some("application/json")),
        ("partitionkey", pointer.key.as_deref()),
        ("sequence", Some(&*format!("{:019}", event.seq))),
        ("aggregatetype", event.aggregate_type.as_deref()),
        ("operation", event.operation.as_deref()),
        ("correlationid", event.correlation_id.as_deref()),
        ("actor", event.actor.as_deref()),
        ("traceparent", is_traced.then_some(TRACEPARENT)),
        ("tracestate", headers["tracestate"].as_str().filter(|_| is_traced)),
    ]
    .map(|(name, value)| value.map(|value| (name.to_owned(), Value::from(value))));
    Value::Object(all.into_iter().flatten().collect())
}

fn data(event: &Event) -> Value {
    serde_json::from_str(&event.payload).expect("JSON")
}

// ---- the SDK --------------------------------------------------------------------------------------------------------

/// The result of the SDK for each message: `attributes` and `data`, or `error`.
fn read(messages: &[Value]) -> Vec<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cloudevents/read.py");
    let mut child = Command::new(python())
        .arg(script)
        .env("PYTHONIOENCODING", "utf-8")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start python");
    let lines: String = messages.iter().map(|message| format!("{message}\n")).collect();
    let mut stdin = child.stdin.take().expect("a pipe");
    let writer = std::thread::spawn(move || stdin.write_all(lines.as_bytes()));
    let output = child.wait_with_output().expect("wait for python");
    writer.join().expect("no panic").expect("write to python");
    assert!(output.status.success(), "python: {}", output.status);
    let answers: Vec<Value> = String::from_utf8(output.stdout)
        .expect("UTF-8")
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(answers.len(), messages.len());
    answers
}

/// The interpreter of a virtual environment with the packages. The first call makes the environment.
fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv/cloudevents");
        let (python, ready) = (dir.join("bin/python"), dir.join("ready"));
        let wanted = PACKAGES.join("\n");
        if std::fs::read_to_string(&ready).is_ok_and(|made| made == wanted) {
            return python;
        }
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&dir));
        run(Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
            .args(PACKAGES));
        std::fs::write(ready, wanted).expect("write target/venv/cloudevents/ready");
        python
    })
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}
