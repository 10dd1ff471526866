//! The model of the cursor: state, faults, properties; the protocol is in `producer.rs` and `worker.rs`.
//! `model_cursor.rs` explains it and has the checks.

mod producer;
mod worker;

use stateright::{Model, Property};

/// Drawn from one sequence, from 1 on; 0 means none.
pub type Seq = u8;
/// A set of seqs: bit `seq`.
type Seqs = u8;

pub const PRODUCERS: usize = 3;
const NONE: Seq = 0;
const STRAY: Seq = 7;
/// The cursor of a partition that was read to its end, and the value that is peeked if no row became visible.
const END: Seq = Seq::MAX;

pub const NOTHING_LOST: &str = "nothing committed is lost";
pub const IN_ORDER: &str = "messages of a key are sent in order of seq";
const NOTHING_UNCOMMITTED: &str = "nothing uncommitted is sent";
const ONLY_OWN_KEY: &str = "an open transaction holds up its own key only";
const ALL_SENT: &str = "every message can be sent";
const SOME_PARKED: &str = "a message can be parked";
const SOME_REWOUND: &str = "the cursor can be lowered";

// ---- the configuration ----------------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Key {
    A,
    B,
}

/// The script of a producer's transaction. It may also abort wherever it is open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Script {
    pub key: Key,
    /// None: this producer does not exist.
    pub messages: usize,
    pub may: May,
    pub draws: Draws,
}

/// How a transaction may end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum May {
    /// COMMIT or ROLLBACK, each step separately.
    End,
    /// COMMIT, ROLLBACK or PREPARE TRANSACTION, each step separately.
    Prepare,
    /// COMMIT, in two indivisible steps: it begins and enqueues; it commits and leaves. For a bystander.
    EndAtOnce,
}

/// Where the seqs of the messages come from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Draws {
    /// The extension draws it, so the transaction registers first.
    ByUs,
    /// Like `ByUs`, but a trigger publishes another message meanwhile: both are drawn, the inner one is recorded first.
    Nested,
    /// The application draws it, before it calls the extension.
    ByApplication,
    /// Like `ByApplication`, and it serialises the transactions of a key in the order of their seqs: the next one calls
    /// when the previous one is visible.
    ByApplicationInTurn,
    /// The first is from elsewhere, higher than the sequence will ever be, and has no order relative to others. Then
    /// the extension draws.
    StrayFirst,
}

/// A rule that is left out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    RegisteredAfterDrawing,
    /// A registered transaction draws again and leaves its low bound unchanged.
    LowKeptWhileDrawing,
    /// The low bound is raised before all drawn seqs are recorded.
    LowRaisedWhileDrawing,
    LeftBeforeRewindLowered,
    PreparedWithoutSlot,
    SlotFreedBeforeRewindLowered,
    /// A process that saw that the transaction of a slot is over frees the slot, whatever transaction has it by then.
    SlotFreedWhosever,
    RewindTakenAfterSnapshot,
    RegistryReadBeforeSnapshot,
    SlotsReadBeforeSessions,
    PeekedBeforeRegistryRead,
    NotPeeked,
    ParkedReleasedAboveCursor,
    /// A claim counts the rows it got, not those it found.
    RowsGotCounted,
    /// An earlier owner of the partition takes the rewind of the present one.
    RewindTakenByAnyone,
    /// A worker makes itself the owner of `rewind` some time after it got the lease.
    OwnedAfterLease,
    /// Adopting prepared transactions ignores those that ended just before.
    AdoptedWithoutRewind,
}

/// The accesses of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    TakeRewind,
    /// The snapshot: rows past the cursor, in order of seq, up to the limit.
    Claim,
    /// If the transaction of the slot is over: lowers `rewind` ..
    SeeSlotEnded,
    /// .. and frees the slot.
    FreeSlot,
    ReadEntry(usize),
    ReadSlot,
    /// Reads `rewind` without taking it.
    Peek,
}

/// One configuration to check.
#[derive(Clone, Copy)]
pub struct LowCursor {
    pub scripts: [Script; PRODUCERS],
    /// The most rows of one claim.
    pub limit: usize,
    pub takeovers: u8,
    pub database_crashes: u8,
    /// Another session may take a row away while a claim is about to take it.
    pub discards: bool,
    pub mistake: Option<Mistake>,
}

// ---- state ----------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// No transaction yet.
    Outside,
    /// Has a seq and is not registered: only if the application draws, or by mistake.
    DrewUnregistered,
    /// About to draw; its low bound is 0.
    Registered,
    Drew,
    /// The inner of two seqs is in its entry.
    RecordedInner,
    /// Its seqs are in its entry.
    Recorded,
    /// Committed as far as snapshots show.
    Visible,
    /// Has lowered `rewind`, is still registered.
    Rewinds,
    /// Has left the registry and not lowered `rewind`: only by mistake.
    LeftEarly,
    /// Its entry is copied to the slot, PREPARE is not done.
    CopiedToSlot,
    Prepared,
    PreparedAndLeft,
    Committed,
    Aborted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Producer {
    step: Step,
    /// The seqs of its messages that are drawn.
    seqs: [Seq; 2],
    /// Was prepared when the database crashed: its key is unknown, so order is not promised.
    outlived_crash: bool,
}

/// Room for one prepared transaction; there are never more at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Stands for the xid.
    producer: usize,
    low: Seq,
    /// None after a crash.
    keys: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Worker {
    /// The number of the next access of its pass; 0 is between passes.
    at: usize,
    cursor: Seq,
    /// Rows claimed in this pass.
    claimed: Seqs,
    /// Rows claimed and not sent.
    parked: Seqs,
    /// Read in this pass: low bounds of open transactions; their keys are in the scripts.
    held: [Option<Seq>; PRODUCERS],
    /// Read in this pass.
    peeked: Seq,
    /// The slot that it is about to free.
    frees: Option<Slot>,
}

/// After a crash a worker adopts the prepared transactions, while the others are at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Adoption {
    Due,
    /// Has listed what is prepared.
    Listed(Option<usize>),
    /// Has filled the slot.
    Filled,
    Done,
}

/// The previous owner of the partition, which does not know that it lost it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EarlierOwner {
    None,
    Fenced,
    /// By mistake it owns `rewind`.
    Owning,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub producers: [Producer; PRODUCERS],
    pub last_drawn: Seq,
    pub rewind: Option<Seq>,
    pub registry: [Option<Seq>; PRODUCERS],
    pub slot: Option<Slot>,
    pub worker: Worker,
    /// The slot that another process, of another partition or about to prepare, is about to free.
    pub other_frees: Option<Slot>,
    pub adoption: Adoption,
    pub earlier_owner: EarlierOwner,
    pub sent: Seqs,
    pub discarded: Seqs,
    /// The first message that was sent although a later one of its key had been.
    pub overtaken: Option<Seq>,
    pub takeovers: u8,
    pub database_crashes: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Draw(usize),
    Register(usize),
    Record(usize),
    Abort(usize),
    Commit(usize),
    LowerRewind(usize),
    Leave(usize),
    CopyToSlot(usize),
    Prepare(usize),
    LeavePrepared(usize),
    CommitPrepared(usize),
    RollbackPrepared(usize),
    /// The next access of the worker.
    Worker,
    /// Its claim's transaction fails: the pass ends, what it claimed before stays.
    ClaimFails,
    /// The first row that its claim finds is gone before it takes it.
    ClaimMissesRow,
    /// It will read the partition from its start.
    Sweep,
    /// Another worker takes the partition over, and owns `rewind` from then on. Shared memory stays.
    TakeOver,
    EarlierOwns,
    EarlierTakesRewind,
    DatabaseCrashes,
    Adopt,
    OtherSeesSlotEnded,
    OtherFreesSlot,
}

impl Producer {
    fn seqs(&self) -> impl Iterator<Item = Seq> {
        self.seqs.into_iter().filter(|seq| *seq != NONE)
    }

    fn lowest(&self) -> Seq {
        self.seqs().min().unwrap_or(NONE)
    }

    fn visible(&self) -> bool {
        matches!(
            self.step,
            Step::Visible | Step::Rewinds | Step::LeftEarly | Step::Committed
        )
    }

    /// The server's answer about its xid.
    fn in_progress(&self) -> bool {
        self.open() || self.prepared()
    }

    /// Ends with its backend.
    fn open(&self) -> bool {
        matches!(
            self.step,
            Step::DrewUnregistered
                | Step::Registered
                | Step::Drew
                | Step::RecordedInner
                | Step::Recorded
                | Step::CopiedToSlot
        )
    }

    fn prepared(&self) -> bool {
        matches!(self.step, Step::Prepared | Step::PreparedAndLeft)
    }

    /// Its transaction needs no further step.
    fn at_rest(&self) -> bool {
        matches!(self.step, Step::Outside | Step::Committed | Step::Aborted)
    }

    fn abort(&mut self) {
        self.step = Step::Aborted;
        self.seqs = [NONE; 2]; // they are never seen, so states that differ in them are the same
    }
}

impl Worker {
    const STARTED: Self = Self {
        at: 0,
        cursor: 0,
        claimed: 0,
        parked: 0,
        held: [None; PRODUCERS],
        peeked: END,
        frees: None,
    };

    fn between_passes(&self) -> bool {
        self.at == 0
    }

    fn end_pass(&mut self) {
        let Self { cursor, parked, .. } = *self;
        *self = Self {
            cursor,
            parked,
            ..Self::STARTED
        };
    }
}

impl State {
    fn lower_rewind(&mut self, seq: Seq) {
        self.rewind = Some(self.rewind.map_or(seq, |rewind| rewind.min(seq)));
    }

    /// Seqs that a snapshot sees, including sent ones, ascending.
    fn visible(&self) -> impl Iterator<Item = Seq> {
        let visible = self.producers.iter().filter(|producer| producer.visible());
        let set = visible.flat_map(Producer::seqs).fold(0, |set, seq| set | bit(seq));
        members(set)
    }

    fn writer(&self, seq: Seq) -> Option<usize> {
        self.producers.iter().position(|producer| producer.seqs.contains(&seq))
    }

    fn ended_slot(&self) -> Option<Slot> {
        self.slot.filter(|slot| !self.producers[slot.producer].in_progress())
    }

    /// Only the worker and the producers have steps left.
    fn others_at_rest(&self) -> bool {
        self.other_frees.is_none() && self.adoption == Adoption::Done
    }
}

fn bit(seq: Seq) -> Seqs {
    1 << seq
}

fn members(set: Seqs) -> impl Iterator<Item = Seq> {
    (1..=STRAY).filter(move |seq| set & bit(*seq) != 0)
}

// ---- other processes, and faults ------------------------------------------------------------------------------------

impl LowCursor {
    pub fn with(self, mistake: Mistake) -> Self {
        let mistake = Some(mistake);
        Self { mistake, ..self }
    }

    fn made(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn other_actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.other_frees.is_some() {
            actions.push(Action::OtherFreesSlot);
        } else if state.ended_slot().is_some() {
            actions.push(Action::OtherSeesSlotEnded);
        }
        if state.adoption != Adoption::Done {
            actions.push(Action::Adopt);
        }
        if state.takeovers < self.takeovers {
            actions.push(Action::TakeOver);
        }
        match state.earlier_owner {
            EarlierOwner::Fenced if self.made(Mistake::OwnedAfterLease) => actions.push(Action::EarlierOwns),
            EarlierOwner::Fenced if self.made(Mistake::RewindTakenByAnyone) => {
                actions.push(Action::EarlierTakesRewind);
            }
            EarlierOwner::Owning => actions.push(Action::EarlierTakesRewind),
            _ => {}
        }
        if state.database_crashes < self.database_crashes {
            actions.push(Action::DatabaseCrashes);
        }
    }

    fn other_acts(&self, state: &mut State, action: Action) {
        match action {
            Action::OtherSeesSlotEnded => state.other_frees = self.see_slot_ended(state),
            Action::OtherFreesSlot => {
                let slot = state.other_frees.take().expect("a slot to free");
                self.free_slot(state, slot);
            }
            Action::Adopt => self.adopt(state),
            Action::TakeOver => {
                state.takeovers += 1;
                state.worker = Worker::STARTED;
                state.earlier_owner = EarlierOwner::Fenced;
            }
            Action::EarlierOwns => state.earlier_owner = EarlierOwner::Owning,
            Action::EarlierTakesRewind => state.rewind = None,
            Action::DatabaseCrashes => {
                state.database_crashes += 1;
                state.rewind = None;
                state.registry = [None; PRODUCERS];
                state.slot = None;
                state.other_frees = None;
                state.earlier_owner = EarlierOwner::None;
                state.adoption = Adoption::Due;
                state.worker = Worker::STARTED;
                for producer in &mut state.producers {
                    if producer.open() {
                        producer.abort();
                    } else if producer.visible() {
                        producer.step = Step::Committed;
                    } else if producer.prepared() {
                        producer.step = Step::PreparedAndLeft;
                        producer.outlived_crash = true;
                    }
                }
            }
            _ => unreachable!("{action:?} is not another's"),
        }
    }

    fn adopt(&self, state: &mut State) {
        state.adoption = match state.adoption {
            Adoption::Due => {
                let outlived = |producer: &Producer| producer.prepared() && producer.outlived_crash;
                Adoption::Listed(state.producers.iter().position(outlived))
            }
            Adoption::Listed(found) => {
                if let Some(producer) = found {
                    let (low, keys) = (1, false);
                    // Occupied by now: then the one that was found is over.
                    state.slot = state.slot.or(Some(Slot { producer, low, keys }));
                }
                Adoption::Filled
            }
            Adoption::Filled | Adoption::Done => {
                if !self.made(Mistake::AdoptedWithoutRewind) {
                    state.lower_rewind(1);
                }
                Adoption::Done
            }
        };
    }

    /// Sent, or held for a reason: a transaction of the same key that began before is not over.
    fn sent_or_held(&self, state: &State, seq: Seq) -> bool {
        let holds = |p: usize| {
            let slot = state.slot.filter(|slot| slot.producer == p && slot.keys);
            let low = state.registry[p].or(slot.map(|slot| slot.low));
            Some(self.scripts[p].key) == self.key_of(state, seq) && low.is_some_and(|low| low <= seq)
        };
        (state.sent | state.discarded) & bit(seq) != 0 || (0..PRODUCERS).any(holds)
    }
}

impl Model for LowCursor {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let producer = Producer {
            step: Step::Outside,
            seqs: [NONE; 2],
            outlived_crash: false,
        };
        vec![State {
            producers: [producer; PRODUCERS],
            last_drawn: 0,
            rewind: None,
            registry: [None; PRODUCERS],
            slot: None,
            worker: Worker::STARTED,
            other_frees: None,
            adoption: Adoption::Done,
            earlier_owner: EarlierOwner::None,
            sent: 0,
            discarded: 0,
            overtaken: None,
            takeovers: 0,
            database_crashes: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for p in 0..PRODUCERS {
            self.producer_actions(state, p, actions);
        }
        actions.push(Action::Worker);
        if self.pass()[state.worker.at] == Access::Claim {
            actions.push(Action::ClaimFails);
            if self.discards {
                actions.push(Action::ClaimMissesRow);
            }
        }
        if state.worker.between_passes() {
            actions.push(Action::Sweep);
        }
        self.other_actions(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        use Action::*;
        let mut next = *state;
        match action {
            Worker => self.worker_acts(&mut next),
            ClaimFails => next.worker.end_pass(),
            ClaimMissesRow => {
                self.claim(&mut next, true);
                next.worker.at += 1;
            }
            Sweep => next.worker.cursor = 0,
            OtherSeesSlotEnded | OtherFreesSlot | Adopt | TakeOver | EarlierOwns | EarlierTakesRewind
            | DatabaseCrashes => self.other_acts(&mut next, action),
            _ => self.producer_acts(&mut next, action),
        }
        self.hasten(&mut next);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(NOTHING_LOST, |model: &Self, state: &State| {
                let over = state.producers.iter().all(Producer::at_rest) && state.others_at_rest();
                if !over || !state.worker.between_passes() {
                    return true;
                }
                let after = model.worker_alone(state);
                after
                    .visible()
                    .all(|seq| (after.sent | after.discarded) & bit(seq) != 0)
            }),
            Property::always(IN_ORDER, |_, state: &State| state.overtaken.is_none()),
            Property::always(NOTHING_UNCOMMITTED, |_, state: &State| {
                let visible = state.visible().fold(0, |set, seq| set | bit(seq));
                (state.sent | state.worker.claimed | state.worker.parked) & !visible == 0
            }),
            Property::always(ONLY_OWN_KEY, |model: &Self, state: &State| {
                if !state.worker.between_passes() || !state.others_at_rest() {
                    return true;
                }
                let after = model.worker_alone(state);
                after.visible().all(|seq| model.sent_or_held(&after, seq))
            }),
            Property::sometimes(ALL_SENT, |model: &Self, state: &State| {
                let messages: usize = model.scripts.iter().map(|script| script.messages).sum();
                members(state.sent).count() == messages
            }),
            Property::sometimes(SOME_PARKED, |_, state: &State| state.worker.parked != 0),
            Property::sometimes(SOME_REWOUND, |_, state: &State| {
                state.rewind.is_some_and(|seq| seq <= state.worker.cursor)
            }),
        ]
    }
}
