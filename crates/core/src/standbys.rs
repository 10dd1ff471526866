//! Which standbys must have a commit before its message is sent, if `outbox.publish_after` is `standby`. The worker
//! calls it on its main thread.
//!
//! An asynchronous failover forgets the last commits of the primary. Without this rule consumers may have received
//! their events: a message is sent when its commit is on the primary's disk. With it, a message is sent only when the
//! WAL up to its commit is on the disks of `quorum` of the standbys too. So a standby that has all WAL that the quorum
//! has is a new primary that knows all published events.
//!
//! A name that ends with `*` is a pattern: it stands for all connected standbys whose name begins so. How many there
//! are is unknown, as one may be away. "All of them" would be those that are connected, and one that was away could be
//! promoted without the events that they have. So with a pattern the quorum must be a number.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A position in WAL, in bytes since the first one.
pub type WalPosition = u64;

/// The standbys that must have a commit, and for how long a worker waits for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standbys {
    names: Vec<String>,
    /// 0 = no message is ever sent: there are no names, or a pattern without a number.
    quorum: usize,
    /// After this time messages are sent although the standbys are behind; None = the worker waits without a limit.
    timeout: Option<Duration>,
}

/// A standby that is connected to this server, as the view pg_stat_replication has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standby {
    /// Its `application_name`.
    pub name: String,
    /// The position up to which it has flushed WAL; 0 = it has not reported any.
    pub flushed: WalPosition,
}

/// What a server knows about its WAL, read at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replication {
    /// A position behind all commits that were visible before the read. WAL up to it is on the disk of this server.
    pub durable: WalPosition,
    /// The standbys that are connected to this server.
    pub connected: Vec<Standby>,
}

/// What the names begin with that a pattern stands for; None = it is a name.
fn prefix(pattern: &str) -> Option<&str> {
    pattern.strip_suffix('*')
}

/// Whether a standby of this name is one of the list's entry, a name or a pattern.
fn is_of(entry: &str, name: &str) -> bool {
    prefix(entry).map_or(entry == name, |prefix| name.starts_with(prefix))
}

/// The names and patterns of a list, separated by commas. Err: why it cannot be used.
pub fn names(list: &str) -> Result<Vec<String>, String> {
    let mut names: Vec<String> = Vec::new();
    if list.trim().is_empty() {
        return Ok(names);
    }
    for name in list.split(',').map(str::trim) {
        if name.is_empty() {
            return Err("a name is empty".into());
        }
        if name == "*" {
            return Err("\"*\" stands for programs such as pg_receivewal, too, which no one can promote".into());
        }
        if names.iter().any(|other| other == name) {
            return Err(format!("\"{name}\" is in it twice"));
        }
        let bare = |entry: &str| prefix(entry).unwrap_or(entry).to_owned();
        if let Some(other) = (names.iter()).find(|other| is_of(other, &bare(name)) || is_of(name, &bare(other))) {
            return Err(format!("\"{other}\" and \"{name}\" can stand for one standby"));
        }
        names.push(name.to_owned());
    }
    Ok(names)
}

impl Standbys {
    /// `quorum`: how many of `names` must have a commit. Without a pattern 0, or more than there are = all.
    pub fn new(names: Vec<String>, quorum: usize, timeout: Option<Duration>) -> Self {
        let quorum = match (names.iter().any(|name| prefix(name).is_some()), quorum) {
            (true, quorum) => quorum,
            (false, 0) => names.len(),
            (false, quorum) => quorum.min(names.len()),
        };
        Self { names, quorum, timeout }
    }

    /// What is missing among the connected standbys, if fewer than the quorum are connected: names, and patterns, of
    /// which there may be more. Else nothing.
    pub fn missing(&self, connected: &[Standby]) -> Vec<&str> {
        let names: BTreeSet<&str> = connected.iter().map(|standby| standby.name.as_str()).collect();
        let is_missing = |entry: &&str| prefix(entry).is_some() || !names.contains(entry);
        match self.counted(connected).count() < self.quorum {
            true => self.entries().filter(is_missing).collect(),
            false => Vec::new(),
        }
    }

    fn entries(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// The connected standbys of the list: the positions up to which they have flushed WAL. Each name counts once, also
    /// one of a pattern: several connections may be those of one standby, or any of several standbys may become the
    /// primary. So of one name the connection that is furthest behind counts.
    fn counted<'a>(&self, connected: &'a [Standby]) -> impl Iterator<Item = (&'a str, WalPosition)> {
        let mut flushed: BTreeMap<&str, WalPosition> = BTreeMap::new();
        for standby in connected {
            if self.entries().any(|entry| is_of(entry, &standby.name)) {
                let least = flushed.entry(&standby.name).or_insert(standby.flushed);
                *least = standby.flushed.min(*least);
            }
        }
        flushed.into_iter()
    }

    /// What a message waits for that needs WAL up to `position`, in words. It names the standbys that lack it.
    fn awaited(&self, connected: &[Standby], position: WalPosition) -> String {
        let (have, _): (Vec<&str>, Vec<WalPosition>) = (self.counted(connected))
            .filter(|(_, flushed)| *flushed >= position)
            .unzip();
        let behind: Vec<&str> = self.entries().filter(|entry| !have.contains(entry)).collect();
        let needed = self.quorum.saturating_sub(have.len());
        let names = behind.join(", ");
        match behind.as_slice() {
            [] => "waits for standbys, and outbox.standby_names is empty".to_owned(),
            _ if self.quorum == 0 => format!("waits for standbys {names}, and outbox.standby_quorum is 0"),
            [name] if prefix(name).is_none() => format!("waits for standby {names}"),
            all if all.len() == needed && !all.iter().any(|entry| prefix(entry).is_some()) => {
                format!("waits for standbys {names}")
            }
            _ => format!("waits for {needed} of the standbys {names}"),
        }
    }

    /// Whether no message is ever sent: no standby is named, or a pattern has no number.
    pub fn are_incomplete(&self) -> bool {
        self.quorum == 0
    }

    /// The position up to which WAL is on enough of the standbys.
    fn flushed(&self, connected: &[Standby]) -> WalPosition {
        let mut flushed: Vec<WalPosition> = self.counted(connected).map(|(_, flushed)| flushed).collect();
        flushed.sort_unstable_by(|a, b| b.cmp(a));
        // Without a quorum nothing is sent: the rule was asked for, and is not complete.
        let least = self.quorum.checked_sub(1).and_then(|index| flushed.get(index));
        least.copied().unwrap_or(0)
    }
}

/// The shortest time between two checks, in ms: about what a standby nearby takes to flush and to answer.
const CHECK_MIN_MS: u64 = 1;
/// The longest time between two checks, in ms.
const CHECK_MAX_MS: u64 = 100;

/// The wait for standbys that is worth a word to users, in ms. Replication over a slow network takes less.
const LATE_MS: u64 = 1_000;

/// What a worker knows of the standbys, for all its destinations. Times are in ms since the worker began.
#[derive(Debug, Default)]
pub struct Progress {
    /// The position that enough standbys have flushed.
    flushed: WalPosition,
    /// The position that is waited for, and since when. It stays until it is reached: positions that messages need
    /// grow all the time, and a standby is always a little behind.
    target: Option<(WalPosition, u64)>,
    /// When the standbys are to be checked again.
    check_ms: u64,
    /// Whether messages are sent although the standbys are behind.
    is_degraded: bool,
    /// What messages wait for, in words, once they have waited long. It stays until messages wait for a shorter time
    /// again, so a standby that is always late does not change it with each check.
    awaited: Option<String>,
}

impl Progress {
    /// Whether a message may be sent that needs WAL up to `position` on the standbys.
    pub fn may_send(&self, position: WalPosition) -> bool {
        self.is_degraded || position <= self.flushed
    }

    /// Whether the standbys are to be checked now, for messages that need WAL up to `needed`.
    pub fn is_check_due(&self, needed: WalPosition, now_ms: u64) -> bool {
        needed > self.flushed && now_ms >= self.check_ms
    }

    /// The time until the next check, in ms.
    pub fn checks_in_ms(&self, now_ms: u64) -> u64 {
        self.check_ms.saturating_sub(now_ms).max(CHECK_MIN_MS)
    }

    /// Takes the result of a check, for messages that need WAL up to `needed`. The longer they have waited, the later
    /// is the next check. Returns whether the worker begins or ends to send although the standbys are behind.
    pub fn checked(&mut self, standbys: &Standbys, connected: &[Standby], needed: WalPosition, now_ms: u64) -> bool {
        let was_degraded = self.is_degraded;
        self.flushed = self.flushed.max(standbys.flushed(connected));
        let mut waited_ms = self.target.map_or(0, |(_, since_ms)| now_ms.saturating_sub(since_ms));
        let is_late = waited_ms >= LATE_MS;
        if self.target.is_some_and(|(target, _)| target <= self.flushed) {
            self.target = None;
            self.is_degraded = false;
            waited_ms = 0;
        }
        if needed > self.flushed {
            self.target.get_or_insert((needed, now_ms));
            self.check_ms = now_ms + (waited_ms / 4).clamp(CHECK_MIN_MS, CHECK_MAX_MS);
            self.is_degraded |= standbys
                .timeout
                .is_some_and(|limit| u128::from(waited_ms) >= limit.as_millis());
        }
        let waits = !self.may_send(needed);
        self.awaited = (is_late && waits).then(|| standbys.awaited(connected, needed));
        self.is_degraded != was_degraded
    }

    /// What messages wait for, in words, if they have waited for over a second.
    pub fn awaited(&self) -> Option<&str> {
        self.awaited.as_deref()
    }

    pub fn is_degraded(&self) -> bool {
        self.is_degraded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standbys(list: &str, quorum: usize, timeout_ms: Option<u64>) -> Standbys {
        let names = names(list).expect("a list");
        Standbys::new(names, quorum, timeout_ms.map(Duration::from_millis))
    }

    fn connected(all: &[(&str, WalPosition)]) -> Vec<Standby> {
        let standby = |(name, flushed): &(&str, WalPosition)| Standby {
            name: (*name).to_owned(),
            flushed: *flushed,
        };
        all.iter().map(standby).collect()
    }

    #[test]
    fn a_position_counts_once_enough_of_the_named_standbys_have_it() {
        let all = connected(&[("a", 30), ("b", 20), ("c", 10), ("pg_receivewal", 99)]);
        for (list, quorum, expected) in [
            ("a", 0, 30),
            ("a,b , c", 0, 10),
            ("a, b, c", 3, 10),
            ("a, b, c", 2, 20),
            ("a, b, c", 1, 30),
            ("a, d", 1, 30),
            ("a, d", 2, 0),
            ("a, b", 3, 20),
            ("d", 0, 0),
            ("", 0, 0),
            ("", 1, 0),
        ] {
            let standbys = standbys(list, quorum, None);
            assert_eq!(standbys.flushed(&all), expected, "{list} {quorum}");
        }
    }

    #[test]
    fn of_two_standbys_with_one_name_the_one_further_behind_counts() {
        let all = connected(&[("a", 30), ("a", 5)]);
        assert_eq!(standbys("a", 0, None).flushed(&all), 5);
    }

    #[test]
    fn a_pattern_stands_for_each_connected_name_that_begins_so() {
        let all = connected(&[
            ("db-1", 30),
            ("db-2", 20),
            ("db-2", 10),
            ("db", 99),
            ("other", 5),
            ("DB-3", 99),
        ]);
        for (list, quorum, expected) in [
            ("db-*", 1, 30),
            ("db-*", 2, 10), // two connections of one name count once
            ("db-*", 3, 0),
            ("db-*", 0, 0), // all of how many?
            ("db-*, other", 2, 10),
            ("db-*, other", 3, 5),
            ("db-*, away", 3, 0),
            ("x*", 1, 0),
        ] {
            let standbys = standbys(list, quorum, None);
            assert_eq!(standbys.flushed(&all), expected, "{list} {quorum}");
            assert_eq!(standbys.are_incomplete(), quorum == 0, "{list} {quorum}");
        }
    }

    #[test]
    fn a_pattern_is_missing_until_enough_standbys_are_connected() {
        let all = connected(&[("db-1", 1), ("db-1", 1)]);
        assert!(standbys("db-*", 1, None).missing(&all).is_empty());
        assert_eq!(standbys("db-*", 2, None).missing(&all), ["db-*"]);
        assert_eq!(standbys("db-*, x, y", 3, None).missing(&all), ["db-*", "x", "y"]);
    }

    #[test]
    fn standbys_are_missing_only_while_fewer_than_the_quorum_are_connected() {
        let all = connected(&[("a", 1), ("c", 1)]);
        assert_eq!(standbys("a, b, d", 0, None).missing(&all), ["b", "d"]);
        assert_eq!(standbys("a, b, d", 2, None).missing(&all), ["b", "d"]);
        assert!(standbys("a, b, d", 1, None).missing(&all).is_empty());
        assert!(standbys("", 0, None).missing(&all).is_empty() && standbys("", 0, None).are_incomplete());
    }

    #[test]
    fn a_list_that_cannot_be_used_is_refused_with_the_reason() {
        for (list, reason) in [
            ("a,", "a name is empty"),
            (", a", "a name is empty"),
            ("a, b,a", "\"a\" is in it twice"),
            ("a*, a*", "\"a*\" is in it twice"),
            ("a1, a*", "\"a1\" and \"a*\" can stand for one standby"),
            ("ab*, a*", "\"ab*\" and \"a*\" can stand for one standby"),
            ("a*, ab", "\"a*\" and \"ab\" can stand for one standby"),
            (
                "*",
                "\"*\" stands for programs such as pg_receivewal, too, which no one can promote",
            ),
        ] {
            assert_eq!(names(list), Err(reason.to_owned()), "{list}");
        }
        assert_eq!(names(" "), Ok(Vec::new()));
        assert_eq!(names("a, a-*, b*").map(|names| names.len()), Ok(3));
    }

    #[test]
    fn a_message_is_sent_once_the_standbys_have_its_position_and_not_before() {
        let standbys = standbys("a", 0, None);
        let mut progress = Progress::default();
        assert!(!progress.may_send(10) && progress.is_check_due(10, 0));
        progress.checked(&standbys, &connected(&[("a", 9)]), 10, 0);
        assert!(!progress.may_send(10) && progress.may_send(9));
        assert!(!progress.is_check_due(10, 0) && progress.is_check_due(10, 1));
        progress.checked(&standbys, &connected(&[("a", 10)]), 10, 1);
        assert!(progress.may_send(10) && !progress.is_check_due(10, 1));
        // What a standby has flushed stays flushed, even while it is away.
        progress.checked(&standbys, &[], 11, 2);
        assert!(progress.may_send(10) && !progress.may_send(11));
    }

    #[test]
    fn what_messages_wait_for_is_said_once_they_have_waited_for_a_second() {
        let standbys = standbys("a, b, c", 2, None);
        let mut progress = Progress::default();
        let mut awaited = |all: &[(&str, WalPosition)], needed, now_ms| {
            progress.checked(&standbys, &connected(all), needed, now_ms);
            progress.awaited().map(str::to_owned)
        };
        assert_eq!(awaited(&[], 10, 0), None);
        assert_eq!(awaited(&[], 10, 999), None);
        let of_all = awaited(&[("a", 9)], 10, 1_000);
        assert_eq!(of_all.as_deref(), Some("waits for 2 of the standbys a, b, c"));
        let of_two = awaited(&[("a", 10), ("b", 9)], 10, 1_100);
        assert_eq!(of_two.as_deref(), Some("waits for 1 of the standbys b, c"));
        // What was waited for is there; what came since has not waited yet, but the standby is as late as before.
        let late = awaited(&[("a", 30), ("b", 15)], 30, 2_000);
        assert_eq!(late.as_deref(), Some("waits for 1 of the standbys b, c"));
        assert_eq!(
            awaited(&[("a", 30), ("b", 30)], 31, 2_100),
            None,
            "it is no longer late"
        );
        assert_eq!(awaited(&[("a", 31), ("b", 31)], 31, 2_101), None);
    }

    #[test]
    fn what_messages_wait_for_names_the_standbys_that_lack_wal() {
        let awaited = |list: &str, quorum, all| standbys(list, quorum, None).awaited(&connected(all), 10);
        for (list, quorum, all, expected) in [
            ("a", 0, &[][..], "waits for standby a"),
            ("a", 0, &[("a", 9)], "waits for standby a"),
            ("a, b", 0, &[("a", 10)], "waits for standby b"),
            ("a, b", 0, &[("c", 10)], "waits for standbys a, b"),
            ("a, b", 1, &[], "waits for 1 of the standbys a, b"),
            ("a*", 1, &[("a1", 9)], "waits for 1 of the standbys a*"),
            (
                "a*, b",
                2,
                &[("a1", 10), ("a2", 9)],
                "waits for 1 of the standbys a*, b",
            ),
            (
                "a*",
                0,
                &[("a1", 10)],
                "waits for standbys a*, and outbox.standby_quorum is 0",
            ),
            (
                "",
                0,
                &[("a", 10)],
                "waits for standbys, and outbox.standby_names is empty",
            ),
        ] {
            assert_eq!(awaited(list, quorum, all), expected, "{list} {quorum} {all:?}");
        }
    }

    #[test]
    fn checks_become_rarer_while_a_standby_is_away() {
        let standbys = standbys("a", 0, None);
        let (mut progress, mut now_ms, mut checks) = (Progress::default(), 0, 0);
        while now_ms < 60_000 {
            progress.checked(&standbys, &[], 1, now_ms);
            now_ms += progress.checks_in_ms(now_ms);
            checks += 1;
        }
        assert!(checks < 700, "{checks} checks in a minute");
        assert!(!progress.may_send(1), "no limit was set");
    }

    #[test]
    fn after_the_timeout_messages_are_sent_until_the_standbys_catch_up() {
        let standbys = standbys("a", 0, Some(100));
        let mut progress = Progress::default();
        assert!(!progress.checked(&standbys, &[], 10, 0));
        assert!(!progress.checked(&standbys, &[], 20, 99) && !progress.may_send(10));
        assert!(progress.checked(&standbys, &[], 20, 100), "it begins to send");
        assert!(progress.is_degraded() && progress.may_send(30));
        // A standby that comes back has the position that was waited for, and is still behind what came since.
        assert!(progress.checked(&standbys, &connected(&[("a", 15)]), 40, 5_000));
        assert!(!progress.is_degraded() && !progress.may_send(40) && progress.may_send(15));
        assert!(!progress.checked(&standbys, &connected(&[("a", 40)]), 50, 5_050));
        assert!(progress.may_send(40));
    }
}
