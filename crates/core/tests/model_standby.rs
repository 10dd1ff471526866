//! Model check of `outbox.publish_after = standby`: a promoted standby has every event that was published, whatever
//! commits, replicates and is promoted when.
//!
//! | in the model | in the server |
//! |---|---|
//! | `wal` | the primary's WAL: the number of commits in it |
//! | `flushed` | for each standby, how much of that WAL it has on disk |
//! | `known` | what the worker last read of it, from pg_stat_replication; None = the standby was not connected |
//! | `At` | a worker: it claims what is visible, then reads the position that the standbys must have, then sends |
//! | `away` | the standbys that are not connected; they may come back, or be promoted |
//! | `promoted` | the primary is lost, and this standby becomes the primary |
//!
//! A message is its position: the commit that made it visible. The promise: whichever standby is promoted that has as
//! much WAL as a quorum has, it has the commit of each message that was sent. Each `Mistake` removes one rule, and the
//! checker must find the failure.

use crate::checking::{assert_breaks, assert_holds};
use outbox_core::standbys::{Progress, Standby, Standbys};
use stateright::{Model, Property};

const COMMITS: u8 = 3;
const NAMES: [&str; 3] = ["s1", "s2", "s3"];
const PATTERN: &str = "s*";
const KNOWN: &str = "a promoted standby knows what was published";
const SENT: &str = "messages are sent";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mistake {
    /// A message is sent once it is on the primary's disk.
    WaitsForNone,
    /// The worker reads the position first, and claims then.
    ReadsPositionFirst,
    /// A standby is promoted that has less WAL than another.
    PromotesAny,
    /// With a pattern and without a number, all standbys that are connected must have a commit.
    CountsConnected,
}

/// What the worker has, and has not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Idle,
    /// It has read the position too early.
    Positioned(u8),
    /// It has claimed all messages up to `claimed`.
    Claimed(u8),
    Waits {
        claimed: u8,
        needs: u8,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    wal: u8,
    flushed: Vec<u8>,
    known: Vec<Option<u8>>,
    away: Vec<bool>,
    worker: At,
    /// All messages up to this one were sent.
    sent: u8,
    promoted: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Commit,
    Flush(usize),
    /// The worker reads how much WAL a standby has.
    Read(usize),
    Leave(usize),
    Return(usize),
    Work,
    Promote(usize),
}

struct Replication {
    standbys: usize,
    quorum: usize,
    /// Whether the list has a pattern instead of the names.
    pattern: bool,
    mistake: Option<Mistake>,
}

impl Replication {
    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn rule(&self, connected: usize) -> Standbys {
        let names = match self.pattern {
            true => vec![PATTERN.to_owned()],
            false => NAMES[..self.standbys].iter().map(ToString::to_string).collect(),
        };
        let quorum = match self.is(Mistake::CountsConnected) {
            true => connected,
            false => self.quorum,
        };
        Standbys::new(names, quorum, None)
    }

    /// Whether the rule of the server lets messages go that need this position.
    fn may_send(&self, known: &[Option<u8>], needs: u8) -> bool {
        let connected = NAMES.iter().zip(known).filter_map(|(name, flushed)| {
            Some(Standby {
                name: (*name).to_owned(),
                flushed: u64::from((*flushed)?),
            })
        });
        let connected: Vec<Standby> = connected.collect();
        let mut progress = Progress::default();
        progress.checked(&self.rule(connected.len()), &connected, u64::from(needs), 0);
        progress.may_send(u64::from(needs))
    }
}

impl Model for Replication {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            wal: 0,
            flushed: vec![0; self.standbys],
            known: vec![None; self.standbys],
            away: vec![false; self.standbys],
            worker: At::Idle,
            sent: 0,
            promoted: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.promoted.is_some() {
            return;
        }
        if state.wal < COMMITS {
            actions.push(Action::Commit);
        }
        for standby in 0..self.standbys {
            actions.push(Action::Read(standby));
            match state.away[standby] {
                true => actions.push(Action::Return(standby)),
                false => actions.push(Action::Flush(standby)),
            }
            // Of a list of names, one that is away counts like one that has nothing.
            if self.pattern && !state.away[standby] {
                actions.push(Action::Leave(standby));
            }
            // An operator, or Patroni, promotes a standby only if fewer than a quorum have more WAL.
            let ahead = state
                .flushed
                .iter()
                .filter(|other| **other > state.flushed[standby])
                .count();
            let quorum = if self.quorum == 0 { self.standbys } else { self.quorum };
            if ahead < quorum || self.is(Mistake::PromotesAny) {
                actions.push(Action::Promote(standby));
            }
        }
        actions.push(Action::Work);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Commit => next.wal += 1,
            Action::Flush(standby) => next.flushed[standby] = (next.flushed[standby] + 1).min(next.wal),
            Action::Read(standby) => {
                next.known[standby] = (!next.away[standby]).then_some(next.flushed[standby]);
            }
            Action::Leave(standby) => next.away[standby] = true,
            Action::Return(standby) => next.away[standby] = false,
            Action::Promote(standby) => next.promoted = Some(standby),
            Action::Work => {
                next.worker = match next.worker {
                    At::Idle if self.is(Mistake::ReadsPositionFirst) => At::Positioned(next.wal),
                    At::Idle => At::Claimed(next.wal),
                    At::Positioned(needs) => At::Waits {
                        claimed: next.wal,
                        needs,
                    },
                    At::Claimed(claimed) => At::Waits {
                        claimed,
                        needs: next.wal,
                    },
                    At::Waits { claimed, needs } => {
                        if !self.may_send(&next.known, needs) && !self.is(Mistake::WaitsForNone) {
                            return None;
                        }
                        next.sent = next.sent.max(claimed);
                        At::Idle
                    }
                };
            }
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(KNOWN, |_, state: &State| {
                state
                    .promoted
                    .is_none_or(|standby| state.sent <= state.flushed[standby])
            }),
            Property::sometimes(SENT, |_, state: &State| state.sent == COMMITS),
        ]
    }
}

fn with(standbys: usize, quorum: usize, mistake: Option<Mistake>) -> Replication {
    Replication {
        standbys,
        quorum,
        pattern: false,
        mistake,
    }
}

fn with_pattern(standbys: usize, quorum: usize, mistake: Option<Mistake>) -> Replication {
    Replication {
        pattern: true,
        ..with(standbys, quorum, mistake)
    }
}

#[test]
fn a_promoted_standby_has_every_published_event() {
    for (standbys, quorum) in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 2)] {
        assert_holds(with(standbys, quorum, None));
    }
}

#[test]
fn a_promoted_standby_of_a_pattern_has_every_published_event() {
    for (standbys, quorum) in [(1, 1), (2, 1), (2, 2)] {
        assert_holds(with_pattern(standbys, quorum, None));
    }
}

#[test]
fn if_all_of_a_pattern_were_those_that_are_connected_one_that_was_away_would_have_to_know_more() {
    assert_breaks(KNOWN, with_pattern(2, 0, Some(Mistake::CountsConnected)));
}

#[test]
fn a_message_that_waits_for_no_standby_is_forgotten() {
    assert_breaks(KNOWN, with(1, 0, Some(Mistake::WaitsForNone)));
}

#[test]
fn a_position_that_is_read_before_the_claim_is_too_low() {
    assert_breaks(KNOWN, with(1, 0, Some(Mistake::ReadsPositionFirst)));
}

#[test]
fn with_a_quorum_of_one_of_two_the_standby_further_behind_must_not_be_promoted() {
    assert_breaks(KNOWN, with(2, 1, Some(Mistake::PromotesAny)));
}
