//! What a worker outside the server prints: a line a tick, as JSON or for a person, and on stderr what went wrong. Where there
//! is a screen, it is told both, and what is printed at its end is the sum.

use super::board::Board;
use super::screen::state::Ticks;
use serde::Serialize;
use std::cell::RefCell;
use std::fmt::Arguments;
use std::io::{IsTerminal, Write, stderr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The same words are said again after so long.
const SAY_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// One tick, in the words and the order of its JSON line.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tick {
    pub claimed: u64,
    pub published: u64,
    pub failed: u64,
    pub duration_ms: f64,
    pub backoff_ms: u32,
    pub renewed_heartbeat: bool,
    pub purged_stale: i64,
    pub active_workers: usize,
    pub desired_count: usize,
    pub owned_count: usize,
    pub leased_count: usize,
    pub released_count: usize,
    /// By the clock of the server, to the second.
    pub ts: String,
}

impl Tick {
    fn is_quiet(&self) -> bool {
        self.claimed + self.published + self.failed == 0
            && self.purged_stale == 0
            && self.leased_count + self.released_count == 0
    }

    /// What `next` did counts too; how things stand is as it says.
    fn add(&mut self, next: &Tick) {
        *self = Tick {
            claimed: self.claimed + next.claimed,
            published: self.published + next.published,
            failed: self.failed + next.failed,
            duration_ms: self.duration_ms + next.duration_ms,
            renewed_heartbeat: self.renewed_heartbeat || next.renewed_heartbeat,
            purged_stale: self.purged_stale + next.purged_stale,
            leased_count: self.leased_count + next.leased_count,
            released_count: self.released_count + next.released_count,
            ..next.clone()
        };
    }
}

/// A time as JSON has it.
pub fn timestamp(us_since_1970: i64) -> String {
    let seconds = us_since_1970.div_euclid(1_000_000);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Howard Hinnant's civil_from_days: years that begin in March, eras of 400 of them.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_of_year = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_of_year + 2) / 5 + 1;
    let month = if month_of_year < 10 {
        month_of_year + 3
    } else {
        month_of_year - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Ticks that are told of together.
struct Sum {
    tick: Tick,
    ticks: u64,
    since: Instant,
}

impl Sum {
    fn new() -> Self {
        Self {
            tick: Tick::default(),
            ticks: 0,
            since: Instant::now(),
        }
    }

    fn add(&mut self, tick: &Tick) {
        self.tick.add(tick);
        self.ticks += 1;
    }

    fn line(&self) -> String {
        line(&self.tick, Some(self.ticks), self.since.elapsed())
    }
}

/// Where the ticks go.
pub struct Printer {
    silent: bool,
    json: bool,
    window: Option<Duration>,
    /// What no line has told of yet.
    sum: Sum,
    /// The screen, and all that the run did.
    screen: Option<(Arc<Board>, Sum)>,
}

impl Printer {
    pub fn new(silent: bool, json: bool, window_s: u64, screen: Option<Arc<Board>>) -> Self {
        Self {
            silent,
            json,
            window: (window_s > 0).then(|| Duration::from_secs(window_s)),
            sum: Sum::new(),
            screen: screen.map(|board| (board, Sum::new())),
        }
    }

    /// A line for each tick as JSON; for a person one for each that did something, or for each window. A screen has the
    /// windows in its log.
    pub fn tick(&mut self, tick: &Tick) {
        if self.silent {
            return;
        }
        if self.json {
            return print(&serde_json::to_string(tick).unwrap_or_default());
        }
        self.sum.add(tick);
        let is_due = match self.window {
            Some(window) => self.sum.since.elapsed() >= window,
            None => !tick.is_quiet(),
        };
        if let Some((board, all)) = &mut self.screen {
            all.add(tick);
            let sum = if self.window.is_some() { &self.sum } else { &*all };
            board.tick(Ticks {
                last: tick.clone(),
                sum: sum.tick.clone(),
                count: sum.ticks,
                refresh_s: (self.window).map(|window| window.saturating_sub(self.sum.since.elapsed()).as_secs_f64()),
            });
            if is_due {
                let sum = std::mem::replace(&mut self.sum, Sum::new());
                if self.window.is_some() {
                    board.log(&sum.line());
                }
            }
        } else if is_due {
            self.flush();
        }
    }

    /// Prints what the last line did not tell; after a screen all in one line.
    pub fn flush(&mut self) {
        if let Some((_, all)) = &self.screen {
            return print(&all.line());
        }
        let sum = std::mem::replace(&mut self.sum, Sum::new());
        if self.silent || self.json {
            return;
        }
        match self.window {
            Some(_) => print(&sum.line()),
            None if !sum.tick.is_quiet() => print(&line(&sum.tick, None, sum.since.elapsed())),
            None => {}
        }
    }
}

/// `ticks`: so many of them make the sum of a window.
fn line(tick: &Tick, ticks: Option<u64>, span: Duration) -> String {
    let took = match ticks {
        None => format!("in {:.2} ms", tick.duration_ms),
        Some(1) => format!("in 1 tick, {:.1} s", span.as_secs_f64()),
        Some(ticks) => format!("in {ticks} ticks, {:.1} s", span.as_secs_f64()),
    };
    let workers = if tick.active_workers == 1 { "worker" } else { "workers" };
    format!(
        "{} claimed {} published {} failed {} {took}; partitions {} of {}, {} {workers}",
        tick.ts, tick.claimed, tick.published, tick.failed, tick.owned_count, tick.desired_count, tick.active_workers
    )
}

/// A closed pipe is no reason to stop delivering.
fn print(line: &str) {
    _ = writeln!(std::io::stdout().lock(), "{line}");
}

/// What happens beside the ticks: on stderr, or in the log of the screen. Where stderr goes to a file, there too.
pub struct Say {
    silent: bool,
    screen: Option<Arc<Board>>,
    last: RefCell<Option<(String, Instant)>>,
}

impl Say {
    pub fn new(silent: bool, screen: Option<Arc<Board>>) -> Self {
        Self {
            silent,
            screen,
            last: RefCell::default(),
        }
    }

    pub fn line(&self, text: Arguments) {
        if self.silent {
            return;
        }
        let (text, now) = (text.to_string(), Instant::now());
        let mut last = self.last.borrow_mut();
        // What lasts is said once a minute.
        if last
            .as_ref()
            .is_some_and(|(said, at)| *said == text && now < *at + SAY_AGAIN_AFTER)
        {
            return;
        }
        let shown = self.screen.as_ref().filter(|board| board.has_begun());
        if let Some(board) = shown {
            board.log(&text);
        }
        if shown.is_none() || !stderr().is_terminal() {
            _ = writeln!(stderr().lock(), "outboxctl: {text}");
        }
        *last = Some((text, now));
    }

    /// A message failed: for the screen. Without one a person hears of its end.
    pub fn failed(&self, destination: &str, seq: i64, error: &str, is_dead: bool) {
        if let Some(board) = &self.screen {
            board.fail(destination, seq, error, is_dead);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_has_thirteen_keys_in_their_order() {
        let tick = Tick {
            claimed: 10,
            duration_ms: 3.12,
            ts: timestamp(0),
            ..Tick::default()
        };
        let line = serde_json::to_string(&tick).unwrap();
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(
            keys,
            [
                "claimed",
                "published",
                "failed",
                "duration_ms",
                "backoff_ms",
                "renewed_heartbeat",
                "purged_stale",
                "active_workers",
                "desired_count",
                "owned_count",
                "leased_count",
                "released_count",
                "ts"
            ]
        );
        assert!(line.contains("\"duration_ms\":3.12"), "{line}");
    }

    /// From Python's datetime.
    #[test]
    fn timestamps_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_762_905_600, "2025-11-12T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(timestamp(seconds * 1_000_000 + 999_999), text);
        }
    }

    #[test]
    fn what_the_ticks_of_a_window_did_is_added_up() {
        let mut sum = Tick::default();
        for owned_count in [4, 8] {
            sum.add(&Tick {
                claimed: 3,
                published: 2,
                failed: 1,
                leased_count: 4,
                owned_count,
                ..Tick::default()
            });
        }
        assert_eq!((sum.claimed, sum.published, sum.failed), (6, 4, 2));
        assert_eq!(
            (sum.leased_count, sum.owned_count),
            (8, 8),
            "how things stand is as the last one says"
        );
    }
}
