//! Model check of the floors from which views read a lane: waiting messages are shown, whatever commits and readers run
//! meanwhile.
//!
//! | in the model | in the server |
//! |---|---|
//! | `rows` | of each message of the lane, whether a new snapshot sees it |
//! | `Mover` | a transaction: it makes a row visible, or removes one, then records it; or it is rolled back |
//! | `Reader` | a view: takes a version in four accesses, then a snapshot, then raises the floor |
//! | `floor`, `generation`, `recorded` | `Floor` in crates/core/src/floor.rs: the accesses of its methods, in order |
//!
//! Each action is one atomic access. The promise: once all have finished, a reader finds the first visible row. Each
//! `Mistake` removes one rule, and the checker must find the failure.

use crate::checking::{assert_breaks, assert_holds};
use stateright::{Model, Property};

/// As a floor and as a recorded seq: none.
const NONE: u8 = u8::MAX;
const SHOWN: &str = "what waits is shown";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mistake {
    /// COMMIT records the seq before the row is visible.
    RecordsFirst,
    /// A move of a row back is not recorded.
    RecordsNothing,
    /// The snapshot of a reader is older than its version.
    OldSnapshot,
    /// The recorded seq is emptied before the floor is lowered, by a reader that then ends.
    EmptiesFirst,
    /// A floor that stays keeps its generation.
    KeepsGeneration,
    /// A session that has changed rows itself raises the floor nevertheless.
    JudgesForAll,
}

/// The steps of a transaction, in order. A row is its seq.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Appears(u8),
    Ends(u8),
    Records(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    Begin,
    Recorded(u8),
    Lowered(u8),
    Emptied,
    FloorVersion { generation: u8, floor: u8 },
    Seen { generation: u8, floor: u8, first: u8 },
    End,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    rows: [bool; 3],
    recorded: u8,
    generation: u8,
    floor: u8,
    movers: Vec<usize>,
    readers: Vec<At>,
    /// The snapshot of the first reader, if it takes it too early.
    old: Option<[bool; 3]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Move(usize),
    Read(usize),
    /// The reader's session is ended.
    Dies(usize),
}

struct Lane {
    rows: [bool; 3],
    movers: Vec<Vec<Step>>,
    readers: usize,
    /// The first reader has deleted this row itself, and will be rolled back.
    deletes: Option<u8>,
    mistake: Option<Mistake>,
}

impl Lane {
    fn is(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn first(&self, rows: &[bool; 3], from: u8, reader: usize) -> u8 {
        let own = self.deletes.filter(|_| reader == 0);
        let is_seen = |seq: &u8| *seq >= from && rows[usize::from(*seq)] && own != Some(*seq);
        (0..3).find(is_seen).unwrap_or(NONE)
    }
}

impl Model for Lane {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            rows: self.rows,
            recorded: NONE,
            generation: 0,
            floor: self.first(&self.rows, 0, usize::MAX),
            movers: vec![0; self.movers.len()],
            readers: vec![At::Begin; self.readers],
            old: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let moves = (0..self.movers.len()).filter(|n| state.movers[*n] < self.movers[*n].len());
        actions.extend(moves.map(Action::Move));
        for n in (0..self.readers).filter(|n| state.readers[*n] != At::End) {
            actions.extend([Action::Read(n), Action::Dies(n)]);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Dies(n) => next.readers[n] = At::End,
            Action::Move(n) => {
                match self.movers[n][state.movers[n]] {
                    Step::Appears(seq) => next.rows[usize::from(seq)] = true,
                    Step::Ends(seq) => next.rows[usize::from(seq)] = false,
                    Step::Records(seq) => next.recorded = next.recorded.min(seq),
                }
                next.movers[n] += 1;
            }
            Action::Read(n) => {
                let lower = |next: &mut State, recorded: u8| {
                    let stays = next.floor <= recorded;
                    next.floor = next.floor.min(recorded);
                    next.generation += u8::from(!(stays && self.is(Mistake::KeepsGeneration)));
                };
                let empty = |next: &mut State, recorded: u8| {
                    if next.recorded == recorded {
                        next.recorded = NONE;
                    }
                };
                if self.is(Mistake::OldSnapshot) && (n, state.readers[n]) == (0, At::Begin) {
                    next.old = Some(state.rows);
                }
                let snapshot = state.old.as_ref().filter(|_| n == 0).unwrap_or(&state.rows);
                next.readers[n] = match state.readers[n] {
                    At::Begin if state.recorded == NONE => At::Emptied,
                    At::Begin => At::Recorded(state.recorded),
                    At::Recorded(recorded) => {
                        match self.is(Mistake::EmptiesFirst) {
                            true => empty(&mut next, recorded),
                            false => lower(&mut next, recorded),
                        }
                        At::Lowered(recorded)
                    }
                    At::Lowered(recorded) => {
                        match self.is(Mistake::EmptiesFirst) {
                            true => lower(&mut next, recorded),
                            false => empty(&mut next, recorded),
                        }
                        At::Emptied
                    }
                    At::Emptied => At::FloorVersion {
                        generation: state.generation,
                        floor: state.floor,
                    },
                    At::FloorVersion { generation, floor } => At::Seen {
                        generation,
                        floor,
                        first: self.first(snapshot, floor, n),
                    },
                    At::Seen {
                        generation,
                        floor,
                        first,
                    } => {
                        let may_judge = self.deletes.is_none() || n != 0 || self.is(Mistake::JudgesForAll);
                        if may_judge && (generation, floor) == (state.generation, state.floor) {
                            next.floor = first;
                        }
                        At::End
                    }
                    At::End => return None,
                };
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(SHOWN, |lane: &Lane, state: &State| {
            let moved = (0..lane.movers.len()).all(|n| state.movers[n] == lane.movers[n].len());
            !moved || state.floor.min(state.recorded) <= lane.first(&state.rows, 0, usize::MAX)
        })]
    }
}

fn appears(mistake: Option<Mistake>, seq: u8) -> Vec<Step> {
    match mistake {
        Some(Mistake::RecordsFirst) => vec![Step::Records(seq), Step::Appears(seq)],
        Some(Mistake::RecordsNothing) => vec![Step::Appears(seq)],
        _ => vec![Step::Appears(seq), Step::Records(seq)],
    }
}

/// The first row ends while a lower, or a later, one appears.
fn lane(mistake: Option<Mistake>, appearing: &[u8], readers: usize) -> Lane {
    let mut movers: Vec<Vec<Step>> = appearing.iter().map(|seq| appears(mistake, *seq)).collect();
    movers.push(vec![Step::Ends(0)]);
    Lane {
        rows: [true, false, true],
        movers,
        readers,
        deletes: None,
        mistake,
    }
}

/// A row leaves and comes back under its seq, like a message that is retried.
fn comes_back(mistake: Option<Mistake>) -> Lane {
    let mut steps = vec![Step::Ends(0)];
    steps.extend(appears(mistake, 0));
    Lane {
        movers: vec![steps],
        ..lane(mistake, &[], 2)
    }
}

/// The first reader has deleted the first row, and will be rolled back.
fn rolled_back(mistake: Option<Mistake>) -> Lane {
    Lane {
        movers: vec![appears(mistake, 1)],
        deletes: Some(0),
        ..lane(mistake, &[], 2)
    }
}

#[test]
fn waiting_messages_are_shown_through_concurrent_commits_and_reads() {
    assert_holds(lane(None, &[1], 3));
    assert_holds(lane(None, &[1, 1], 2));
    assert_holds(comes_back(None));
    assert_holds(rolled_back(None));
}

#[test]
fn a_row_must_be_visible_before_it_is_recorded() {
    assert_breaks(SHOWN, lane(Some(Mistake::RecordsFirst), &[1], 2));
}

#[test]
fn a_move_of_a_row_back_must_be_recorded() {
    assert_breaks(SHOWN, comes_back(Some(Mistake::RecordsNothing)));
}

#[test]
fn the_snapshot_of_a_reader_must_be_younger_than_its_version() {
    assert_breaks(SHOWN, lane(Some(Mistake::OldSnapshot), &[1], 2));
}

#[test]
fn the_floor_must_be_lowered_before_the_recorded_seq_is_emptied() {
    assert_breaks(SHOWN, lane(Some(Mistake::EmptiesFirst), &[1], 2));
}

#[test]
fn the_generation_must_grow_even_if_the_floor_stays() {
    assert_breaks(SHOWN, lane(Some(Mistake::KeepsGeneration), &[1], 2));
}

#[test]
fn a_session_that_has_changed_rows_must_not_raise_the_floor() {
    assert_breaks(SHOWN, rolled_back(Some(Mistake::JudgesForAll)));
}
