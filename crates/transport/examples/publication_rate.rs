//! Measures how many messages a second one thread makes from events: `cargo run --release -p outbox-transport --example
//! publication_rate`. The best of many short rounds counts, because other processes use the machine too.

use std::time::Instant;

use outbox_core::envelope;
use outbox_core::message::{Event, Pointer};
use outbox_core::partition::Partition;
use outbox_core::route::{Format, Route, Statics, Template};
use outbox_core::words::Word;
use outbox_transport::kinds::KINDS;

const ROUND: u32 = 2_000;
const ROUNDS: u32 = 1_500;

fn main() {
    let template = Template::parse("{aggregate_type}.{operation}").expect("a template");
    for kind in KINDS {
        for format in Format::ALL.iter().copied() {
            let route = Route {
                form: &kind.form,
                format,
                address: &template,
                statics: &Statics::default(),
            };
            for (name, event) in [("bare", bare()), ("with headers", with_headers())] {
                println!("{kind:?}, {}, {name}: {:.0}/s", format.name(), rate(&event, &route));
            }
        }
    }
}

fn rate(event: &Event, route: &Route<'_>) -> f64 {
    let pointer = Pointer {
        seq: 123_456,
        destination: "default".into(),
        partition: Partition::new(7).expect("a partition"),
        key: Some("order:000042".into()),
        attempts: 0,
        crashes: 0,
        lease_epoch: 1 << 40,
        replayed: false,
        enqueued_at_us: 0,
        expires_at_us: None,
    };
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        for handle in 0..u64::from(ROUND) {
            let made = envelope::publication(handle, &pointer, event.clone(), route).expect("a message");
            std::hint::black_box(&made);
        }
        best = best.min(began.elapsed().as_secs_f64());
    }
    f64::from(ROUND) / best
}

/// As the benchmarks of the extension publish: 300 bytes, no headers of the user.
fn bare() -> Event {
    Event {
        id: "0190a0c2-0000-7000-8000-000000000001".into(),
        seq: 123_456,
        kind: "OrderPlaced".into(),
        aggregate_type: Some("order".into()),
        aggregate_id: Some("000042".into()),
        operation: Some("placed".into()),
        payload: format!(r#"{{"note": "{}", "order": "000042", "total": 99.90}}"#, "x".repeat(50)),
        created_at: "2026-01-31T12:00:00.123456Z".into(),
        created_at_s: 1_769_860_800,
        ..Event::default()
    }
}

fn with_headers() -> Event {
    Event {
        headers: Some(
            r#"{"tenant": "acme", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "retry": 3}"#
                .into(),
        ),
        actor: Some("kim".into()),
        correlation_id: Some("c-1".into()),
        metadata: Some(r#"{"ip": "10.0.0.1"}"#.into()),
        ..bare()
    }
}
