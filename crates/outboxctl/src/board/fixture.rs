//! An invented snapshot for the tests. It has two workers and one that ended, a destination that is down, a blocked
//! key, and errors with escape sequences and wide characters.

use super::state::{BoardState, OpenedMessage};
use crate::progress::pass::{PassReport, PassSum};
use crate::progress::{DestinationFacts, LogLine, OwnWorker, WorkerFacts, WorkerIdentity};
use crate::queries::model::{
    CommandShown, DestinationRow, ErrorGroup, Message, Minute, Now, PartitionRow, Passes, Problem, Snapshot, Status,
    WorkerRow,
};
use crate::queries::state::{DestinationState, MessageStatus};
use crate::screen::fixture::{HOSTILE, samples};
use outbox_core::engine::Sharing;
use outbox_core::finding::Finding;
use outbox_core::settle::Ended;
use outbox_transport::DownReason;
use outbox_worker::{ConnectionStatus as WorkerStatus, State as WorkerState, StatusReason};
use std::time::{Duration, Instant};

/// The error of a worker if RabbitMQ returns a message.
const NO_QUEUE: &str =
    r#"unroutable: no queue is bound to exchange "events" for routing key "order.created" (312 NO_ROUTE)"#;

pub fn state() -> BoardState {
    let mut state = BoardState::new(snapshot(), Duration::from_secs(1), false);
    (state.per_s, state.has_colour) = (samples(), true);
    state
}

/// An outage: three destinations in trouble behind ten others, four alerts, and many failed messages of few causes.
pub fn outage() -> BoardState {
    let mut state = state();
    let Snapshot {
        destinations,
        messages,
        problems,
        ..
    } = &mut state.shown;
    let destination = |name: &str, state: WorkerState| DestinationRow {
        name: name.into(),
        state: DestinationState::Reported(state).into(),
        pending: Some(0),
        in_flight: Some(0),
        published_per_s: Some(40.2),
        ..DestinationRow::default()
    };
    let healthy = (0..10).map(|n| destination(&format!("shop{n}"), WorkerState::Connected));
    let mut rows: Vec<DestinationRow> = healthy.collect();
    rows.push(DestinationRow {
        oldest_s: Some(75.0),
        ..destination("slow", WorkerState::Connected)
    });
    rows.push(DestinationRow {
        oldest_s: Some(900.0),
        paused: true,
        ..destination("paused", WorkerState::Paused)
    });
    rows.push(DestinationRow {
        reason: Some("unreachable".into()),
        detail: Some("10.0.0.7:443: connection refused".into()),
        pending: Some(1_190),
        ..destination("webhook", WorkerState::Down)
    });
    rows.push(destination("zoll", WorkerState::Connecting));
    *destinations = Ok(rows);

    let message = |status: MessageStatus, seq: i64, note: String| Message {
        status: status.into(),
        seq,
        destination: "default".into(),
        partition: format!("p{:02}", seq % 16),
        key: Some(format!("order:{seq}")),
        attempts: 15,
        age_s: 3_600.0,
        due_s: None,
        note: Some(note),
    };
    let currency = |seq| format!(r#"HTTP 422: order-{seq} has "no" currency, or it's 100% wrong"#);
    let dead = (1..=150).map(|seq| message(MessageStatus::Dead, seq, currency(seq)));
    let other = [message(MessageStatus::Dead, 151, "HTTP 410: gone for good".into())];
    let retried = (201..=230).map(|seq| message(MessageStatus::Retrying, seq, "HTTP 503: closed".into()));
    let ready = message(MessageStatus::Ready, 301, String::new());
    *messages = Ok(dead.chain(other).chain(retried).chain([ready]).collect());

    let all = problems.as_mut().expect("problems");
    let more = ["retrying", "dead letters"].map(|check| Problem {
        check: check.into(),
        ..all[1].clone()
    });
    all.extend(more);
    state
}

pub fn snapshot() -> Snapshot {
    Snapshot {
        now: Now {
            epoch_s: 1_763_738_405.0,
            clock: "16:40:05".into(),
            database: "shop".into(),
            user: "monitor".into(),
            is_standby: false,
        },
        status: Ok(Status {
            pending: Some(1_234),
            in_flight: Some(48),
            dead: 2,
            oldest_s: Some(93.0),
            published_total: Some(5_216_077),
            failed_total: Some(31),
            published_per_s: Some(112.4),
            p95_ms: Some(7.0),
            failed_per_s: Some(0.3),
        }),
        throughput: Ok(minutes()),
        partitions: Ok(partitions()),
        workers: Ok(workers()),
        passes: Ok(vec![passes("server-1", 84, 3.4), passes("server-2", 79, 2.9)]),
        destinations: Ok(destinations()),
        errors: Ok(errors()),
        messages: Ok(messages()),
        problems: Ok(vec![
            Problem {
                since: None,
                check: "broker".into(),
                destinations: vec!["audit".into()],
                code: "unreachable".into(),
                problem: "the receiver cannot be reached: connection refused".into(),
                remedy: "start the receiver, or correct host and port: ALTER SERVER audit OPTIONS (SET url :'url')"
                    .into(),
                commands: vec![psql("ALTER SERVER audit OPTIONS (SET url :'url')")],
            },
            Problem {
                since: None,
                check: "keys".into(),
                destinations: Vec::new(),
                code: "blocked".into(),
                problem: "1 key(s) are blocked by a dead letter, for example: order:42 (seq 4711)".into(),
                remedy:
                    "outbox_retry(seq) or outbox_discard(seq) unblocks the key; with outbox.on_dead = skip none blocks"
                        .into(),
                commands: Vec::new(),
            },
        ]),
    }
}

pub fn psql(command: &str) -> CommandShown {
    CommandShown {
        command: command.into(),
        place: "psql".into(),
        role: None,
    }
}

fn minutes() -> Vec<Minute> {
    let minute = |i: i64| Minute {
        clock: format!("{:02}:{:02}", 15 + (40 + i) / 60, (40 + i) % 60),
        published: if (20..24).contains(&i) {
            0
        } else {
            4_000 + (i * 811) % 3_700
        },
        retried: i64::from(i % 17 == 3),
        failed: i64::from(i == 24 || i == 25),
        p95_ms: Some(4.0 + (i % 7) as f64).filter(|_| !(20..24).contains(&i)),
        ..Minute::default()
    };
    (0..61).map(minute).collect()
}

fn partitions() -> Vec<PartitionRow> {
    let partition = |i: i64| PartitionRow {
        label: format!("p{i:02}"),
        owner: (i != 15).then(|| format!("server-{}", i % 2 + 1)),
        ttl_s: (i != 15).then_some(11.0),
        epoch: 1_000 + i,
        first_waiting_seq: (i % 5 == 2).then_some(5_217_300 + i),
        is_blocked: i == 6,
    };
    (0..16).map(partition).collect()
}

fn workers() -> Vec<WorkerRow> {
    let worker = |n: i32, state: WorkerState, is_alive: bool| WorkerRow {
        id: format!("server-{n}"),
        pid: is_alive.then_some(4_000 + n),
        state: DestinationState::Reported(state).into(),
        is_alive,
        heartbeat_s: if is_alive { 9.0 + f64::from(n) * 4.0 } else { -12.0 },
        partitions: if is_alive { 9 - i64::from(n) } else { 0 },
        age_s: 86_400.0 * 3.0,
        ..WorkerRow::default()
    };
    vec![
        worker(1, WorkerState::Connected, true),
        WorkerRow {
            reason: Some("unreachable".into()),
            detail: Some("audit: connection refused".into()),
            ..worker(2, WorkerState::Down, true)
        },
        worker(3, WorkerState::Connected, false),
    ]
}

fn passes(worker_id: &str, count: i64, mean_ms: f64) -> Passes {
    Passes {
        worker_id: worker_id.into(),
        count,
        span_s: 60.0,
        mean_ms,
        claimed: 3_402,
        published: 3_380,
        failed: 9,
        backoff_ms: 0.0,
        desired: 8,
        leased: 1,
        released: 0,
    }
}

fn destinations() -> Vec<DestinationRow> {
    let destination = |name: &str, state: WorkerState| DestinationRow {
        name: name.into(),
        described_by: Some("outbox_amqp".into()),
        state: DestinationState::Reported(state).into(),
        since_s: Some(4_000.0),
        pending: Some(12),
        max_pending: None,
        in_flight: Some(16),
        published_total: Some(812_345),
        failed_total: Some(3),
        dead_total: Some(0),
        published_per_s: Some(40.2),
        p50_ms: Some(1.2),
        p95_ms: Some(6.4),
        p99_ms: Some(21.0),
        ..DestinationRow::default()
    };
    vec![
        DestinationRow {
            reason: Some("unreachable".into()),
            detail: Some("connection refused".into()),
            oldest_s: Some(93.0),
            pending: Some(1_190),
            max_pending: Some(1_200),
            published_per_s: Some(0.0),
            dead_total: Some(2),
            ..destination("audit", WorkerState::Down)
        },
        destination("default", WorkerState::Connected),
        DestinationRow {
            paused: true,
            ..destination("einkauf-größe-ß", WorkerState::Paused)
        },
    ]
}

fn errors() -> Vec<ErrorGroup> {
    let error = |destination: &str, kind: &str, message: &str, count: i64, last_age_s: f64| ErrorGroup {
        destination: destination.into(),
        kind: kind.into(),
        message: message.into(),
        count,
        first_age_s: last_age_s + 600.0,
        last_age_s,
        last_seq: Some(5_217_000 + count),
        ..ErrorGroup::default()
    };
    vec![
        error("default", "unroutable", NO_QUEUE, 27, 4.0),
        error("audit", "failed", HOSTILE, 3, 95.0),
        error(
            "audit",
            "refused",
            "refused: 注文が見つかりません: the order was not found",
            1,
            1_300.0,
        ),
    ]
}

fn messages() -> Vec<Message> {
    let message =
        |status: MessageStatus, seq: i64, key: Option<&str>, attempts: i32, due_s: Option<f64>, note: Option<&str>| {
            Message {
                status: status.into(),
                seq,
                destination: if seq % 2 == 0 { "default" } else { "audit" }.into(),
                partition: format!("p{:02}", seq % 16),
                key: key.map(str::to_owned),
                attempts,
                age_s: 5_217_500.0 - seq as f64,
                due_s,
                note: note.map(str::to_owned),
            }
        };
    let mut messages = vec![
        message(
            MessageStatus::Dead,
            5_210_004,
            Some("order:42"),
            15,
            None,
            Some(NO_QUEUE),
        ),
        message(MessageStatus::Dead, 5_210_011, Some("客:七"), 15, None, Some(HOSTILE)),
        message(
            MessageStatus::Retrying,
            5_217_002,
            Some("order:77"),
            2,
            Some(3.2),
            Some("nacked by the broker"),
        ),
        message(MessageStatus::Scheduled, 5_217_005, None, 0, Some(5_400.0), None),
        message(
            MessageStatus::Blocked,
            5_217_006,
            Some("order:42"),
            0,
            None,
            Some("behind an earlier message of its key"),
        ),
        message(MessageStatus::InFlight, 5_217_302, Some("order:3"), 0, None, None),
    ];
    messages.extend((0..24).map(|i| message(MessageStatus::Ready, 5_217_310 + i, Some("order:9"), 0, None, None)));
    messages
}

pub fn opened() -> OpenedMessage {
    let facts = [
        ("status", "dead"),
        ("key", "order:42"),
        ("partition", "p04"),
        ("attempts", "15"),
        ("why it waits", "It was given up."),
        (
            "",
            "Fix: outboxctl retry 5210004 --destination default, or outboxctl discard 5210004 --destination default",
        ),
        (
            "attempt 15",
            "2025-11-21 16:39:00 by server-1, dead: unroutable: 312 NO_ROUTE",
        ),
        ("id", "0199d5a0-0000-7000-8000-000000000001"),
        ("type", "OrderCreated"),
        ("payload", "{\n    \"note\": \"größer\",\n    \"order\": 42\n}"),
    ];
    OpenedMessage {
        seq: 5_210_004,
        destination: "default".into(),
        facts: Ok(facts.map(|(name, text)| (name.into(), text.into())).into()),
    }
}

/// A worker in its second hour, with destinations in several states and a hostile log.
pub fn worker() -> (OwnWorker, Instant) {
    let began = Instant::now();
    let now = began + Duration::from_secs(4_210);
    let ago = |s: f64| now - Duration::from_secs_f64(s);
    let destination = |name: &str, state: WorkerState, since_s: f64| DestinationFacts {
        name: name.into(),
        status: WorkerStatus::plain(state, None),
        since: ago(since_s),
        in_flight: 0,
    };
    let destinations = vec![
        DestinationFacts {
            status: WorkerStatus {
                state: WorkerState::Down,
                reason: Some(StatusReason::Down(DownReason::UNREACHABLE)),
                finding: Some(Finding::new("unreachable", "audit.internal:5671: connection refused")),
            },
            ..destination("audit", WorkerState::Down, 93.0)
        },
        DestinationFacts {
            in_flight: 146,
            ..destination("default", WorkerState::Connected, 4_209.0)
        },
        DestinationFacts {
            status: WorkerStatus::plain(WorkerState::Paused, Some(HOSTILE.into())),
            ..destination("einkauf-größe-ß", WorkerState::Paused, 12.0)
        },
    ];
    let facts = WorkerFacts {
        who: WorkerIdentity {
            worker_id: "work-mover-7".into(),
            server: "10.0.0.12:5432".into(),
            database: "shop".into(),
            user: "courier".into(),
        },
        sharing: Sharing::Leases,
        is_alone: false,
        workers: 2,
        owned: 8,
        desired: 8,
        obstacle: None,
        claimed: 1_218_450,
        ended: Ended {
            published: 1_218_304,
            retried: 96,
            dead: 2,
            expired: 1,
            discarded: 0,
            released: 0,
        },
        destinations,
    };
    let log = |clock: &str, text: &str| (clock.to_owned(), text.to_owned());
    let mut lines = vec![
        log("16:39:53", HOSTILE),
        log(
            "16:38:32",
            "destination audit: down unreachable audit.internal:5671: connection refused",
        ),
    ];
    lines.extend((0..20).rev().map(|n| {
        let text = format!("message {} is a dead letter: unroutable: 312 NO_ROUTE", 5_210_000 + n);
        log(&format!("16:1{}:0{}", n / 10, n % 10), &text)
    }));
    lines.extend([
        log("15:29:56", "destination audit: connected"),
        log("15:29:55", "destination einkauf-größe-ß: connected"),
        log("15:29:55", "connected"),
    ]);
    let newest_first = (0..lines.len() as u64).rev().zip(lines);
    let own = OwnWorker {
        began,
        facts: Some(facts),
        lost: None,
        heartbeat_at: Some(ago(2.4)),
        last_pass: PassReport {
            claimed: 212,
            duration_ms: 14.21,
            leased_count: 1,
            ..PassReport::default()
        },
        passes: PassSum {
            pass: PassReport {
                claimed: 4_240,
                published: 4_180,
                failed: 3,
                duration_ms: 250.0,
                purged_stale: 1,
                leased_count: 8,
                released_count: 2,
                ..PassReport::default()
            },
            count: 20,
            since: ago(3.8),
        },
        window: Some(Duration::from_secs(10)),
        log: newest_first
            .map(|(number, (clock, text))| LogLine { number, clock, text })
            .collect(),
    };
    (own, now)
}

/// The board of this worker, before and after the first reading of the database.
pub fn worker_state() -> BoardState {
    let (own, now) = worker();
    let mut state = BoardState::of_worker(own.clone());
    state.take_own(own, now);
    (state.per_s, state.has_colour) = (samples(), true);
    state
}

pub fn full_worker_state() -> BoardState {
    let mut state = worker_state();
    state.take(Box::new(snapshot()));
    state
}
