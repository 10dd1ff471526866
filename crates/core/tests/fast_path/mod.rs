//! The model of the fast path: state, properties, and the owner of the lane; the protocols are in `session.rs` and
//! `worker.rs`. `model_fast_path.rs` explains it and has the checks.

mod lane;
mod session;
mod worker;

pub use session::Session;
use stateright::{Model, Property};
use worker::At;
pub use worker::Worker;

/// Drawn from one sequence, from 1 on; 0 means none.
pub type Seq = u8;
/// A set of seqs: bit `seq`.
pub type Seqs = u8;

pub const SESSIONS: usize = 3;
pub const WORKERS: usize = 2;
/// The most messages of a session.
pub const MESSAGES: usize = 2;
/// Each message has a separate slot.
pub const SLOTS: usize = SESSIONS * MESSAGES;
const NONE: Seq = 0;
/// The cursor of a lane that was read to its end, and the value that is read if there is none.
pub const END: Seq = Seq::MAX;

pub const NOTHING_LOST: &str = "nothing committed is lost";
pub const IN_ORDER: &str = "messages of a key are sent in order of seq";
pub const ONCE: &str = "nothing goes twice unless the worker that had it died or lost the lane";
pub const NO_LEAK: &str = "when all is over every place is free";
pub const AS_COMMITTED: &str = "an event is sent as it was committed";
const NOTHING_UNCOMMITTED: &str = "nothing uncommitted is sent";
const ALL_SENT: &str = "every message can be sent";
const NO_CLAIM: &str = "a message can be sent and settled without a claim";

// ---- the configuration ----------------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Key {
    A,
    B,
}

/// How a message goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    FastPath,
    /// By the fast path, without its event: the worker reads that, and may fail to.
    Pointer,
    /// It is too large, or it makes no handoff.
    Table,
    /// By the fast path, unless there is no room.
    Either,
}

/// The script of a session's transaction. It may also abort wherever it is open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Script {
    pub key: Key,
    pub ways: &'static [Way],
    /// It commits in one indivisible step: a bystander.
    pub at_once: bool,
    /// It changes its events after it has enqueued them.
    pub edits: bool,
}

/// A rule that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// A message is copied into its slot only after COMMIT.
    CopiedAfterCommit,
    /// A session makes its message ready without checking whether its lane has another reader now.
    ReaderNotRechecked,
    LeftBeforeReady,
    RegistryReadBeforeTaking,
    /// (d) reads only the rewind of the table.
    ReadyNotPeeked,
    /// (d) reads the ready messages last.
    ReadyPeekedLast,
    TakenAboveCursor,
    ClaimedNotRevoked,
    ClaimedNotRecognised,
    /// The rewind of revoked ready messages is published afterwards.
    RecordedAfterWithdrawn,
    LaneBegunWithoutWithdrawing,
    EndedWithoutWithdrawing,
    /// The session hands over the event of a pointer, too, as it was when it was enqueued.
    EventHandedOver,
    /// A message whose event could not be read is not given up.
    UnreadForgotten,
    /// A relay checks for messages in flight, and takes its snapshot only then.
    RelayAsksFirst,
}

/// One configuration to check.
#[derive(Clone, Copy)]
pub struct FastPath {
    pub scripts: [Script; SESSIONS],
    /// The most rows of one claim, and the most messages that one pass takes from slots.
    pub limit: usize,
    /// How often another worker may take the lane over, in order.
    pub moves: u8,
    /// How often the lease may expire under a worker that continues.
    pub expiries: u8,
    pub deaths: u8,
    /// How often a message in flight may be claimed because it takes long.
    pub late_claims: u8,
    /// How often a relay tries to claim a message.
    pub relays: u8,
    /// How often a row is removed without a check of its slot: it expires.
    pub expires: u8,
    pub mistake: Option<Mistake>,
}

// ---- state ----------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotState {
    Free,
    Filled,
    Ready,
    Taken,
    Revoked,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    pub state: SlotState,
    pub seq: Seq,
    /// The reader of the lane when the slot was filled.
    pub owner: u8,
}

/// The progress of a process that revokes or withdraws a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Withdraw {
    Peek,
    /// It is ready, and the rewind is published.
    Recorded,
    /// It is revoked and no rewind is published: only by mistake.
    Untold,
    Free,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    pub rewind: Option<Seq>,
    /// The worker that reads it, as shared memory has it.
    pub owner: u8,
    /// The worker that has the lease, as the table has it.
    pub lease: Option<u8>,
    pub epoch: u8,
    pub taking: Option<Taking>,
}

/// A transaction that takes the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Taking {
    pub worker: u8,
    /// The next slot to check.
    pub slot: u8,
    pub withdraw: Withdraw,
}

/// Claims rows that no worker has in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Relay {
    Rests,
    /// Has seen an unclaimed row, or is about to check.
    Asks {
        seq: Seq,
        withdraw: Withdraw,
    },
    /// May claim it, if it is unchanged.
    Found {
        seq: Seq,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub sessions: [Session; SESSIONS],
    pub last_drawn: Seq,
    /// The low bound of the seqs of each session.
    pub registry: [Option<Seq>; SESSIONS],
    pub slots: [Slot; SLOTS],
    pub lane: Lane,
    pub workers: [Worker; WORKERS],
    pub relay: Relay,
    /// The epoch under which each row is claimed, by seq; 0 = it is not.
    pub tokens: [u8; 5],
    /// Rows that are gone: settled, claimed by a relay for good, or expired.
    pub gone: Seqs,
    /// Rows that ended without a worker.
    pub elsewhere: Seqs,
    pub sent: Seqs,
    /// The worker that had sent it died, or lost the lane.
    pub excused: Seqs,
    /// Sent without a claim.
    pub unclaimed: bool,
    /// Sent with an event that was changed before COMMIT.
    pub outdated: bool,
    pub overtaken: bool,
    pub doubled: bool,
    pub moves: u8,
    pub expiries: u8,
    pub deaths: u8,
    pub late_claims: u8,
    pub relays: u8,
    pub expires: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// The next step of a session.
    Session(usize),
    /// There is no room for its message.
    NoRoom(usize),
    Abort(usize),
    /// The next access of a worker.
    Worker(usize),
    /// It makes no claim now: it is about to settle.
    ClaimsNothing(usize),
    /// The transaction of its claim fails.
    ClaimFails(usize),
    /// The events of the pointers that it has taken cannot be read.
    ReadFails(usize),
    /// Its sent messages are answered and settled.
    Settle(usize),
    /// Its messages in flight take long: it will claim them.
    LateClaim(usize),
    /// In order, with no message under way.
    GiveBack(usize),
    /// It begins to take the lease: the lane has no owner, or its worker is dead, or late.
    TakeOver(usize),
    /// The next step of the worker that takes it.
    Taking,
    /// It learns that it lost the lease.
    Learn(usize),
    Die(usize),
    Restart(usize),
    RelayPeeks(Seq),
    Relay,
    RelayRollsBack,
    Expires(Seq),
}

impl State {
    pub fn rewind(&mut self, seq: Seq) {
        self.lane.rewind = Some(self.lane.rewind.map_or(seq, |rewind| rewind.min(seq)));
    }

    /// The worker that reads the lane, if it is alive.
    pub fn reader(&self) -> Option<u8> {
        let owner = self.lane.owner;
        self.workers[usize::from(owner)].is_alive().then_some(owner)
    }

    pub fn free(&mut self, slot: usize) {
        self.slots[slot] = FREE;
    }

    /// Seqs that a snapshot sees, including those that are gone.
    pub fn visible(&self) -> Seqs {
        let visible = self.sessions.iter().filter(|session| session.is_visible());
        visible.flat_map(Session::seqs).fold(0, |set, seq| set | bit(seq))
    }

    fn writer(&self, seq: Seq) -> Option<usize> {
        self.sessions
            .iter()
            .position(|session| session.seqs().any(|own| own == seq))
    }

    /// The slot of a message, filled or not.
    pub fn slot_of(&self, seq: Seq) -> Option<usize> {
        let writer = self.writer(seq)?;
        let message = self.sessions[writer].seqs.iter().position(|own| *own == seq)?;
        Some(writer * MESSAGES + message)
    }

    pub fn is_taken(&self, slot: usize) -> bool {
        self.slots[slot].state == SlotState::Taken
    }
}

const FREE: Slot = Slot {
    state: SlotState::Free,
    seq: NONE,
    owner: 0,
};

pub fn bit(seq: Seq) -> Seqs {
    1 << seq
}

pub fn members(set: Seqs) -> impl Iterator<Item = Seq> {
    (0..8).filter(move |seq| set & bit(*seq) != 0)
}

impl FastPath {
    pub fn with(self, mistake: Mistake) -> Self {
        let mistake = Some(mistake);
        Self { mistake, ..self }
    }

    pub fn made(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    pub fn key_of(&self, state: &State, seq: Seq) -> Option<Key> {
        state.writer(seq).map(|session| self.scripts[session].key)
    }

    /// One access of a process that revokes or withdraws a slot. None: it is done.
    pub fn withdraw(&self, state: &mut State, slot: usize, at: Withdraw) -> Option<Withdraw> {
        let entry = &mut state.slots[slot];
        let seq = entry.seq;
        match (at, entry.state) {
            (Withdraw::Peek, SlotState::Filled) => {
                entry.state = SlotState::Revoked;
                None
            }
            (Withdraw::Peek, SlotState::Ready) if self.made(Mistake::RecordedAfterWithdrawn) => {
                entry.state = SlotState::Revoked;
                Some(Withdraw::Untold)
            }
            (Withdraw::Peek, SlotState::Ready) => {
                state.rewind(seq);
                Some(Withdraw::Recorded)
            }
            (Withdraw::Peek, _) => None,
            (Withdraw::Recorded, SlotState::Ready) => {
                entry.state = SlotState::Revoked;
                Some(Withdraw::Free)
            }
            (Withdraw::Recorded, _) => Some(Withdraw::Peek),
            (Withdraw::Untold, _) => {
                state.rewind(seq);
                Some(Withdraw::Free)
            }
            (Withdraw::Free, _) => {
                state.free(slot);
                None
            }
        }
    }
}

// ---- a relay, and expiry --------------------------------------------------------------------------------------------

impl FastPath {
    fn relay_actions(&self, state: &State, actions: &mut Vec<Action>) {
        let rows = state.visible() & !state.gone;
        match state.relay {
            Relay::Rests if state.relays < self.relays => actions.extend(
                (1..=state.last_drawn)
                    .filter(|seq| {
                        rows & bit(*seq) != 0 || (self.made(Mistake::RelayAsksFirst) && state.writer(*seq).is_some())
                    })
                    .filter(|seq| state.tokens[usize::from(*seq)] == 0)
                    .map(Action::RelayPeeks),
            ),
            Relay::Rests => {}
            Relay::Asks { .. } => actions.push(Action::Relay),
            Relay::Found { .. } => actions.extend([Action::Relay, Action::RelayRollsBack]),
        }
        if state.expires < self.expires {
            let unclaimed = members(rows).filter(|seq| state.tokens[usize::from(*seq)] == 0);
            actions.extend(unclaimed.map(Action::Expires));
        }
    }

    fn relay_acts(&self, state: &mut State) {
        match state.relay {
            Relay::Asks { seq, withdraw } => {
                let slot = state.slot_of(seq);
                let next = slot.and_then(|slot| self.withdraw(state, slot, withdraw));
                state.relay = match next {
                    Some(withdraw) => Relay::Asks { seq, withdraw },
                    None if slot.is_some_and(|slot| state.is_taken(slot)) => Relay::Rests,
                    None => Relay::Found { seq },
                };
            }
            Relay::Found { seq } => {
                state.relay = Relay::Rests;
                // A row that has changed since is left alone.
                let row = bit(seq) & state.visible() & !state.gone;
                if row != 0 && state.tokens[usize::from(seq)] == 0 {
                    state.doubled |= row & state.sent & !state.excused != 0;
                    state.gone |= row;
                    state.elsewhere |= row;
                    state.sent |= row;
                }
            }
            Relay::Rests => {}
        }
    }

    fn alone(&self, state: &State) -> Option<State> {
        let quiet = state.sessions.iter().all(Session::is_at_rest)
            && state.relay == Relay::Rests
            && state.lane.taking.is_none()
            && (state.workers.iter()).all(|worker| matches!(worker.at, At::Rest | At::Dead));
        let lease = usize::from(state.lane.lease?);
        let holder = &state.workers[lease];
        (quiet && holder.is_alive() && !holder.is_late && holder.epoch == state.lane.epoch)
            .then(|| self.workers_alone(state, lease))
    }

    fn is_done(&self, state: &State, seq: Seq) -> bool {
        (state.sent | state.elsewhere) & bit(seq) != 0
    }
}

impl Model for FastPath {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut workers = [Worker::STARTED; WORKERS];
        workers[0].epoch = 1;
        vec![State {
            sessions: [Session::NEW; SESSIONS],
            last_drawn: 0,
            registry: [None; SESSIONS],
            slots: [FREE; SLOTS],
            lane: Lane {
                rewind: None,
                owner: 0,
                lease: Some(0),
                epoch: 1,
                taking: None,
            },
            workers,
            relay: Relay::Rests,
            tokens: [0; 5],
            gone: 0,
            elsewhere: 0,
            sent: 0,
            excused: 0,
            unclaimed: false,
            outdated: false,
            overtaken: false,
            doubled: false,
            moves: 0,
            expiries: 0,
            deaths: 0,
            late_claims: 0,
            relays: 0,
            expires: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for session in 0..SESSIONS {
            self.session_actions(state, session, actions);
        }
        for worker in 0..WORKERS {
            self.worker_actions(state, worker, actions);
            self.lane_actions(state, worker, actions);
        }
        if state.lane.taking.is_some() {
            actions.push(Action::Taking);
        }
        self.relay_actions(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = *state;
        match action {
            Action::Session(session) => self.session_acts(&mut next, session, true),
            Action::NoRoom(session) => self.session_acts(&mut next, session, false),
            Action::Abort(session) => self.abort(&mut next, session),
            Action::Worker(worker) => self.worker_acts(&mut next, worker),
            Action::ClaimsNothing(worker) | Action::ClaimFails(worker) => next.workers[worker].leave_claim(),
            Action::ReadFails(worker) => self.read_fails(&mut next, worker),
            Action::Settle(worker) => self.settle(&mut next, worker),
            Action::LateClaim(worker) => {
                next.late_claims += 1;
                next.workers[worker].claim_late();
            }
            Action::RelayPeeks(seq) => {
                next.relays += 1;
                let withdraw = Withdraw::Peek;
                next.relay = Relay::Asks { seq, withdraw };
            }
            Action::Relay => self.relay_acts(&mut next),
            Action::RelayRollsBack => next.relay = Relay::Rests,
            Action::Expires(seq) => {
                next.expires += 1;
                next.gone |= bit(seq);
                next.elsewhere |= bit(seq);
            }
            _ => self.lane_acts(&mut next, action),
        }
        self.hasten(&mut next);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(NOTHING_LOST, |model: &Self, state: &State| {
                let after = model.alone(state);
                after.is_none_or(|after| members(after.visible()).all(|seq| model.is_done(&after, seq)))
            }),
            Property::always(NO_LEAK, |model: &Self, state: &State| {
                let after = model.alone(state);
                after.is_none_or(|after| after.slots.iter().all(|slot| slot.state == SlotState::Free))
            }),
            Property::always(IN_ORDER, |_, state: &State| !state.overtaken),
            Property::always(ONCE, |_, state: &State| !state.doubled),
            Property::always(AS_COMMITTED, |_, state: &State| !state.outdated),
            Property::always(NOTHING_UNCOMMITTED, |_, state: &State| {
                state.sent & !state.visible() == 0
            }),
            Property::sometimes(ALL_SENT, |model: &Self, state: &State| {
                let messages: usize = model.scripts.iter().map(|script| script.ways.len()).sum();
                members(state.sent).count() == messages
            }),
            Property::sometimes(NO_CLAIM, |_, state: &State| state.unclaimed),
        ]
    }
}
