//! A made-up snapshot for the tests. It has destinations in several states, and errors and a log with escape sequences
//! and wide characters. Some of its partitions are counted, and one is not.

use super::state::State;
use crate::queries::model::ErrorGroup;
use crate::screen::theme::Theme;
use crate::screen::trial::{HOSTILE, samples};
use crate::work::pass::{PassReport, Passes};
use crate::work::snapshot::{Depth, DestinationSnapshot, LogLine, Phase, Sharing, Snapshot, Waiting, Who};
use outbox_core::settle::Ended;
use outbox_transport::DownReason;
use outbox_worker::{Reason, State as WorkerState};

pub fn state() -> State {
    let mut state = State::new(snapshot(), Theme { has_colour: true });
    state.session.per_s = samples();
    state
}

pub fn snapshot() -> Snapshot {
    Snapshot {
        clock: "16:40:05".into(),
        up_s: 4_210.0,
        phase: Phase::Works,
        who: Who {
            worker_id: "work-mover-7".into(),
            server: "10.0.0.12:5432".into(),
            database: "shop".into(),
            user: "courier".into(),
        },
        sharing: Sharing::Leases,
        workers: 2,
        waiting: (0..8).map(|n| waiting(n * 2)).collect(),
        desired: 8,
        uncounted: None,
        obstacle: None,
        destinations: destinations(),
        claimed: 1_218_450,
        ended: Ended {
            published: 1_218_304,
            retried: 96,
            dead: 2,
            expired: 1,
            released: 0,
        },
        heartbeat_age_s: Some(2.4),
        passes: Some(Passes {
            last: PassReport {
                claimed: 212,
                duration_ms: 14.21,
                leased_count: 1,
                ..PassReport::default()
            },
            sum: PassReport {
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
            refresh_s: Some(6.2),
        }),
        errors: vec![
            error("default", "unroutable", "unroutable: # NO_ROUTE", 27, 4.0),
            error("audit", "refused", HOSTILE, 3, 95.0),
            error(
                "einkauf-größe-ß",
                "failed",
                "HTTP 503: 注文が見つかりません",
                1,
                1_320.0,
            ),
        ],
        log: log(),
    }
}

fn waiting(n: i64) -> Waiting {
    Waiting {
        label: format!("p{n:02}"),
        epoch: 5_811_204_771 + n * 3,
        depth: match n {
            4 => Some(Depth {
                pending: 2_500,
                is_all: false,
            }),
            6 => None,
            n => Some(Depth {
                pending: n * 11,
                is_all: true,
            }),
        },
    }
}

fn destinations() -> Vec<DestinationSnapshot> {
    let destination = |name: &str, state: WorkerState, since_s: f64| DestinationSnapshot {
        name: name.into(),
        state,
        since_s,
        window: 2_000,
        ..DestinationSnapshot::default()
    };
    vec![
        DestinationSnapshot {
            reason: Some(Reason::Down(DownReason::Unreachable)),
            detail: Some("audit.internal:5671: connection refused".into()),
            ..destination("audit", WorkerState::Down, 93.0)
        },
        DestinationSnapshot {
            in_flight: 146,
            ended: Ended {
                published: 1_218_000,
                retried: 90,
                dead: 2,
                expired: 1,
                released: 0,
            },
            ..destination("default", WorkerState::Connected, 4_209.0)
        },
        DestinationSnapshot {
            detail: Some(HOSTILE.into()),
            ended: Ended {
                published: 304,
                retried: 6,
                ..Ended::default()
            },
            ..destination("einkauf-größe-ß", WorkerState::Paused, 12.0)
        },
    ]
}

fn error(destination: &str, kind: &str, message: &str, count: i64, last_age_s: f64) -> ErrorGroup {
    ErrorGroup {
        destination: destination.into(),
        kind: kind.into(),
        message: message.into(),
        count,
        first_at: 1_700_000_000.0 - last_age_s * 4.0,
        last_at: 1_700_000_000.0 - last_age_s,
        first_age_s: last_age_s * 4.0,
        last_age_s,
        last_seq: Some(5_210_000 + count),
    }
}

fn log() -> Vec<LogLine> {
    let line = |clock: &str, text: &str| LogLine {
        clock: clock.into(),
        text: text.into(),
    };
    let mut log = vec![
        line("15:29:55", "connected"),
        line("15:29:55", "destination einkauf-größe-ß: connected"),
        line("15:29:56", "destination audit: connected"),
    ];
    log.extend((0..20).map(|n| {
        let text = format!("message {} is a dead letter: unroutable: 312 NO_ROUTE", 5_210_000 + n);
        line(&format!("16:1{}:0{}", n / 10, n % 10), &text)
    }));
    log.push(line(
        "16:38:32",
        "destination audit: down unreachable audit.internal:5671: connection refused",
    ));
    log.push(line("16:39:53", HOSTILE));
    log
}
