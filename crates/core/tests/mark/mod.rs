//! The model of the low mark: state, the protocol of producers and of the worker, faults, properties. What it stands for
//! and what is checked with it says `model_mark.rs`.

use stateright::{Model, Property};

/// Drawn from one sequence, from 1 on; so 0 is none.
pub type Seq = u8;
/// A set of seqs: bit `seq`.
type Seqs = u8;

pub const PRODUCERS: usize = 3;
const NONE: Seq = 0;
const STRAY: Seq = 7;

pub const NOTHING_LOST: &str = "nothing committed is lost";
pub const IN_ORDER: &str = "messages of a key are sent in order of seq";
const NOTHING_UNCOMMITTED: &str = "nothing uncommitted is sent";
const ONLY_OWN_KEY: &str = "an open transaction holds up its own key only";
const ALL_SENT: &str = "every message can be sent";
const SOME_PARKED: &str = "a message can be parked";
const SOME_REOPENED: &str = "the mark can be lowered";

// ---- what is modelled -----------------------------------------------------------------------------------------------

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Key {
    A,
    B,
}

/// What the transaction of a producer does. It may also abort wherever it is open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Script {
    pub key: Key,
    /// None: there is no such producer.
    pub messages: usize,
    pub may: May,
    pub draws: Draws,
}

/// How a transaction may go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum May {
    /// COMMIT or ROLLBACK, each step by itself.
    End,
    /// The same, or PREPARE TRANSACTION.
    Prepare,
    /// COMMIT, in two steps that nobody can look into: it begins and enqueues; it commits and leaves. For a bystander.
    EndAtOnce,
}

/// Where the seq of a message comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Draws {
    /// We draw it, so the transaction registers first.
    ByUs,
    /// The application draws it, before it calls us. It lets the transactions of a key follow one another: the next
    /// draws when the one before is visible.
    ByApplication,
    /// The same, but the next draws earlier and waits then.
    Ahead,
    /// From elsewhere, higher than the sequence will ever be.
    Stray,
}

/// What a starting worker raises `highest` to, for a crash of the database has lost it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum HighestAtStart {
    /// The last value of the sequence.
    Sequence,
    /// The seq of the highest visible row, and again whenever it sweeps.
    Table,
}

/// A rule that is left out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    ReopenSwappedBeforeRegistryRead,
    SnapshotBeforeRegistryRead,
    SlotsReadBeforeRegistry,
    ClaimNotBoundedByCeiling,
    RegisteredAfterDrawing,
    LeftBeforeReopenLowered,
    PreparedWithoutSlot,
    SlotFreedBeforeReopenLowered,
    ParkedReleasedAboveMark,
    PreparedListedAfterHighest,
    HighestLeftAtSweep,
}

/// The accesses of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    ReadCeiling,
    ReadRegistry,
    ReadSlots,
    SwapReopen,
    /// The snapshot: rows above the mark and not above the ceiling, in order of seq, up to the limit.
    Claim,
}

/// One configuration to check.
#[derive(Clone, Copy)]
pub struct LowMark {
    pub scripts: [Script; PRODUCERS],
    /// Rows that one claim takes at most.
    pub limit: usize,
    pub worker_restarts: u8,
    pub database_crashes: u8,
    pub highest_at_start: HighestAtStart,
    pub mistake: Option<Mistake>,
}

// ---- state ----------------------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// No transaction yet.
    Outside,
    /// Has a seq and is not registered: only where the application draws, or by mistake.
    DrewUnregistered,
    Registered,
    Drew,
    /// The seq is noted in `highest` and in its entry.
    Noted,
    /// Committed as far as snapshots can tell.
    Visible,
    /// Has lowered `reopen`, is still registered.
    Reopened,
    /// Has left the registry and not lowered `reopen`: only by mistake.
    LeftEarly,
    /// Its entry is copied to a slot, PREPARE is not done.
    CopiedToSlot,
    Prepared,
    PreparedAndLeft,
    Committed,
    Aborted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Producer {
    step: Step,
    /// Of its messages, as far as drawn.
    seqs: [Seq; 2],
    /// Was prepared when the database crashed: nobody knows its key any more, so order is not promised.
    outlived_crash: bool,
}

/// Where a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum At {
    /// Is to list the prepared transactions.
    Starting,
    /// Has listed them, and is to raise `highest`.
    Half,
    /// Is to do the access of this number of its pass; 0 is between passes.
    Pass(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Worker {
    at: At,
    mark: Seq,
    /// Rows claimed and not sent; those left between passes are parked.
    claimed: Seqs,
    /// Prepared transactions that it found at its start.
    listed: [bool; PRODUCERS],
    /// Read in this pass.
    ceiling: Seq,
    /// Read in this pass: low bounds of open transactions; their keys are in the scripts.
    held: [Option<Seq>; PRODUCERS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub producers: [Producer; PRODUCERS],
    pub last_drawn: Seq,
    pub highest: Seq,
    pub reopen: Option<Seq>,
    pub registry: [Option<Seq>; PRODUCERS],
    pub slots: [Option<Seq>; PRODUCERS],
    pub worker: Worker,
    /// The slot that the owner of another partition is about to free, and its low bound.
    pub other_worker: Option<(usize, Seq)>,
    pub sent: Seqs,
    /// The first message that was sent although a later one of its key had been.
    pub overtaken: Option<Seq>,
    pub worker_restarts: u8,
    pub database_crashes: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Draw(usize),
    Register(usize),
    Note(usize),
    Abort(usize),
    Commit(usize),
    LowerReopen(usize),
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
    /// It ends and another takes over. Shared memory stays.
    WorkerRestarts,
    DatabaseCrashes,
    /// The owner of another partition finds that a prepared transaction ended.
    OtherLowersReopen(usize),
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
            Step::Visible | Step::Reopened | Step::LeftEarly | Step::Committed
        )
    }

    /// What the server answers about its xid.
    fn in_progress(&self) -> bool {
        self.open() || self.prepared()
    }

    /// Ends with its backend.
    fn open(&self) -> bool {
        matches!(
            self.step,
            Step::DrewUnregistered | Step::Registered | Step::Drew | Step::Noted | Step::CopiedToSlot
        )
    }

    fn prepared(&self) -> bool {
        matches!(self.step, Step::Prepared | Step::PreparedAndLeft)
    }

    /// Has no transaction of which anything is still to be done.
    fn at_rest(&self) -> bool {
        matches!(self.step, Step::Outside | Step::Committed | Step::Aborted)
    }

    fn abort(&mut self) {
        self.step = Step::Aborted;
        self.seqs = [NONE; 2]; // they are never seen, so states that differ in them are the same
    }
}

impl Worker {
    fn started(at: At) -> Self {
        Self {
            at,
            mark: 0,
            claimed: 0,
            listed: [false; PRODUCERS],
            ceiling: 0,
            held: [None; PRODUCERS],
        }
    }

    fn between_passes(&self) -> bool {
        self.at == At::Pass(0)
    }
}

impl State {
    fn lower_reopen(&mut self, seq: Seq) {
        self.reopen = Some(self.reopen.map_or(seq, |reopen| reopen.min(seq)));
    }

    /// Seqs that a snapshot sees, sent ones included, ascending.
    fn visible(&self) -> impl Iterator<Item = Seq> {
        let visible = self.producers.iter().filter(|producer| producer.visible());
        let set = visible.flat_map(Producer::seqs).fold(0, |set, seq| set | bit(seq));
        members(set)
    }

    fn writer(&self, seq: Seq) -> Option<usize> {
        self.producers.iter().position(|producer| producer.seqs.contains(&seq))
    }
}

fn bit(seq: Seq) -> Seqs {
    1 << seq
}

fn members(set: Seqs) -> impl Iterator<Item = Seq> {
    (1..=STRAY).filter(move |seq| set & bit(*seq) != 0)
}

// ---- the protocol of a producer -------------------------------------------------------------------------------------

impl LowMark {
    pub fn with(self, mistake: Mistake) -> Self {
        let mistake = Some(mistake);
        Self { mistake, ..self }
    }

    fn made(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    fn draws_first(&self, p: usize) -> bool {
        self.scripts[p].draws != Draws::ByUs || self.made(Mistake::RegisteredAfterDrawing)
    }

    fn producer_actions(&self, state: &State, p: usize, actions: &mut Vec<Action>) {
        let Producer { step, seqs, .. } = state.producers[p];
        let script = self.scripts[p];
        match step {
            Step::Outside if script.messages == 0 || !self.may_begin(state, p) => {}
            Step::Outside if self.draws_first(p) => actions.push(Action::Draw(p)),
            Step::Outside => actions.push(Action::Register(p)),
            Step::DrewUnregistered if script.draws == Draws::Ahead && !self.key_is_free(state, p) => {}
            Step::DrewUnregistered => actions.push(Action::Register(p)),
            Step::Registered if seqs[0] == NONE => actions.push(Action::Draw(p)),
            Step::Registered | Step::Drew => actions.push(Action::Note(p)),
            Step::Noted if seqs.iter().filter(|seq| **seq != NONE).count() < script.messages => {
                actions.push(Action::Draw(p));
            }
            Step::Noted => {
                actions.push(Action::Commit(p));
                if script.may == May::Prepare {
                    actions.push(Action::CopyToSlot(p));
                }
            }
            Step::Visible if self.made(Mistake::LeftBeforeReopenLowered) => actions.push(Action::Leave(p)),
            Step::Visible | Step::LeftEarly => actions.push(Action::LowerReopen(p)),
            Step::Reopened => actions.push(Action::Leave(p)),
            Step::CopiedToSlot => actions.push(Action::Prepare(p)),
            Step::Prepared => actions.push(Action::LeavePrepared(p)),
            Step::PreparedAndLeft => actions.extend([Action::CommitPrepared(p), Action::RollbackPrepared(p)]),
            Step::Committed | Step::Aborted => {}
        }
        if state.producers[p].open() && script.may != May::EndAtOnce {
            actions.push(Action::Abort(p));
        }
    }

    fn may_begin(&self, state: &State, p: usize) -> bool {
        // Of two that do the same, which is the first makes no difference.
        let twin = |earlier: usize| self.scripts[earlier] == self.scripts[p];
        let first = |earlier: usize| state.producers[earlier].step != Step::Outside;
        let in_turn = self.scripts[p].draws != Draws::ByApplication || self.key_is_free(state, p);
        in_turn && (0..p).all(|earlier| !twin(earlier) || first(earlier))
    }

    /// The application lets `p` go on: those of the key before it are over, as far as it can see.
    fn key_is_free(&self, state: &State, p: usize) -> bool {
        let other_key = |earlier: usize| self.scripts[earlier].key != self.scripts[p].key;
        let over = |producer: &Producer| producer.visible() || producer.step == Step::Aborted;
        (0..p).all(|earlier| other_key(earlier) || over(&state.producers[earlier]))
    }

    /// Takes the steps of a bystander that nobody can look into.
    fn hasten(&self, state: &mut State) {
        let hasty = |p: &usize| self.scripts[*p].may == May::EndAtOnce;
        for p in (0..PRODUCERS).filter(hasty) {
            while !matches!(
                state.producers[p].step,
                Step::Outside | Step::Noted | Step::Committed | Step::Aborted
            ) {
                let mut actions = Vec::new();
                self.producer_actions(state, p, &mut actions);
                self.producer_acts(state, actions[0]);
            }
        }
    }

    fn producer_acts(&self, state: &mut State, action: Action) {
        match action {
            Action::Draw(p) => {
                let seq = match self.scripts[p].draws {
                    Draws::Stray => STRAY,
                    _ => {
                        state.last_drawn += 1;
                        state.last_drawn
                    }
                };
                let producer = &mut state.producers[p];
                let free = producer.seqs.iter().position(|seq| *seq == NONE).expect("a place");
                producer.seqs[free] = seq;
                producer.step = match producer.step {
                    Step::Outside => Step::DrewUnregistered,
                    _ => Step::Drew,
                };
            }
            Action::Register(p) => {
                let known = state.producers[p].seqs().min();
                let low = state.highest + 1;
                state.registry[p] = Some(known.map_or(low, |seq| seq.min(low)));
                state.producers[p].step = Step::Registered;
            }
            Action::Note(p) => {
                let producer = &mut state.producers[p];
                producer.step = Step::Noted;
                state.registry[p] = Some(producer.lowest());
                state.highest = state.highest.max(producer.seqs[0]).max(producer.seqs[1]);
            }
            Action::Abort(p) => {
                state.producers[p].abort();
                state.registry[p] = None;
            }
            Action::Commit(p) => state.producers[p].step = Step::Visible,
            Action::LowerReopen(p) => {
                let producer = &mut state.producers[p];
                producer.step = match producer.step {
                    Step::LeftEarly => Step::Committed,
                    _ => Step::Reopened,
                };
                let lowest = producer.lowest();
                state.lower_reopen(lowest);
            }
            Action::Leave(p) => {
                let producer = &mut state.producers[p];
                producer.step = match producer.step {
                    Step::Visible => Step::LeftEarly,
                    _ => Step::Committed,
                };
                state.registry[p] = None;
            }
            Action::CopyToSlot(p) => {
                if !self.made(Mistake::PreparedWithoutSlot) {
                    state.slots[p] = state.registry[p];
                }
                state.producers[p].step = Step::CopiedToSlot;
            }
            Action::Prepare(p) => state.producers[p].step = Step::Prepared,
            Action::LeavePrepared(p) => {
                state.producers[p].step = Step::PreparedAndLeft;
                state.registry[p] = None;
            }
            Action::CommitPrepared(p) => state.producers[p].step = Step::Committed,
            Action::RollbackPrepared(p) => state.producers[p].abort(),
            _ => unreachable!("{action:?} is not a producer's"),
        }
    }
}

// ---- the protocol of a worker ---------------------------------------------------------------------------------------

impl LowMark {
    fn pass(&self) -> &'static [Access] {
        use Access::*;
        match self.mistake {
            Some(Mistake::ReopenSwappedBeforeRegistryRead) => {
                &[ReadCeiling, SwapReopen, ReadRegistry, ReadSlots, Claim]
            }
            Some(Mistake::SnapshotBeforeRegistryRead) => &[ReadCeiling, SwapReopen, Claim, ReadRegistry, ReadSlots],
            Some(Mistake::SlotsReadBeforeRegistry) => &[ReadCeiling, ReadSlots, ReadRegistry, SwapReopen, Claim],
            _ if self.scripts.iter().all(|script| script.may != May::Prepare) => {
                &[ReadCeiling, ReadRegistry, SwapReopen, Claim]
            }
            _ => &[ReadCeiling, ReadRegistry, ReadSlots, SwapReopen, Claim],
        }
    }

    fn worker_acts(&self, state: &mut State) {
        match state.worker.at {
            At::Starting => {
                match self.made(Mistake::PreparedListedAfterHighest) {
                    true => self.raise_highest(state),
                    false => self.list_prepared(state),
                }
                state.worker.at = At::Half;
            }
            At::Half => {
                match self.made(Mistake::PreparedListedAfterHighest) {
                    true => self.list_prepared(state),
                    false => self.raise_highest(state),
                }
                state.worker.at = At::Pass(0);
            }
            At::Pass(number) => {
                let pass = self.pass();
                self.access(state, pass[number]);
                state.worker.at = At::Pass((number + 1) % pass.len());
                if state.worker.between_passes() {
                    self.send(state);
                }
            }
        }
    }

    fn list_prepared(&self, state: &mut State) {
        state.worker.listed = state.producers.map(|producer| producer.prepared());
    }

    fn raise_highest(&self, state: &mut State) {
        let seen = match self.highest_at_start {
            HighestAtStart::Sequence => state.last_drawn,
            HighestAtStart::Table => state.visible().max().unwrap_or(0),
        };
        state.highest = state.highest.max(seen);
    }

    fn access(&self, state: &mut State, access: Access) {
        match access {
            Access::ReadCeiling => state.worker.ceiling = state.highest,
            Access::ReadRegistry => {
                for (held, entry) in state.worker.held.iter_mut().zip(state.registry) {
                    *held = held.or(entry);
                }
            }
            Access::ReadSlots => self.read_slots(state),
            Access::SwapReopen => {
                if let Some(seq) = state.reopen.take() {
                    state.worker.mark = state.worker.mark.min(seq - 1);
                }
            }
            Access::Claim => self.claim(state),
        }
    }

    fn read_slots(&self, state: &mut State) {
        for p in 0..PRODUCERS {
            let in_progress = state.producers[p].in_progress();
            match state.slots[p] {
                Some(low) if in_progress => state.worker.held[p] = Some(low),
                Some(low) => {
                    state.lower_reopen(low);
                    state.slots[p] = None;
                }
                None => {}
            }
            if state.worker.listed[p] && !in_progress {
                state.worker.listed[p] = false;
                state.worker.mark = 0; // a sweep: where its rows are is not known
                if !self.made(Mistake::HighestLeftAtSweep) {
                    self.raise_highest(state);
                }
            }
        }
    }

    fn claim(&self, state: &mut State) {
        let Worker { mark, ceiling, .. } = state.worker;
        let ceiling_of_claim = match self.made(Mistake::ClaimNotBoundedByCeiling) {
            true => Seq::MAX,
            false => ceiling,
        };
        let taken = state.sent | state.worker.claimed;
        let found: Vec<Seq> = state
            .visible()
            .filter(|seq| mark < *seq && *seq <= ceiling_of_claim && taken & bit(*seq) == 0)
            .take(self.limit)
            .collect();
        state.worker.claimed |= found.iter().fold(0, |set, seq| set | bit(*seq));
        state.worker.mark = match found.last() {
            Some(last) if found.len() == self.limit => *last,
            _ => ceiling,
        };
    }

    /// The end of a pass: sends what was claimed and need not be parked. What comes after a parked message of its key is
    /// parked too, without a rule of its own: the bounds that hold the one hold the other.
    fn send(&self, state: &mut State) {
        for seq in members(state.worker.claimed) {
            let Some(key) = self.key_of(state, seq) else { continue };
            if !self.must_park(state, key, seq) {
                state.worker.claimed &= !bit(seq);
                self.send_one(state, key, seq);
            }
        }
        state.worker.ceiling = 0;
        state.worker.held = [None; PRODUCERS];
    }

    fn must_park(&self, state: &State, key: Key, seq: Seq) -> bool {
        let mut held = state.worker.held.iter().zip(&self.scripts);
        let held = held.any(|(low, script)| script.key == key && low.is_some_and(|low| low < seq));
        let read_past = state.worker.mark >= seq || self.made(Mistake::ParkedReleasedAboveMark);
        held || !read_past
    }

    fn send_one(&self, state: &mut State, key: Key, seq: Seq) {
        let ordered = |seq: Seq| {
            let writer = state.writer(seq);
            writer.is_some_and(|p| self.scripts[p].key == key && !state.producers[p].outlived_crash)
        };
        let late = ordered(seq) && members(state.sent).any(|earlier| earlier > seq && ordered(earlier));
        if late {
            state.overtaken.get_or_insert(seq);
        }
        state.sent |= bit(seq);
    }

    fn key_of(&self, state: &State, seq: Seq) -> Option<Key> {
        state.writer(seq).map(|p| self.scripts[p].key)
    }

    /// What the worker makes of a state if nobody else moves: passes until one changes nothing.
    fn worker_alone(&self, state: &State) -> State {
        let mut state = *state;
        loop {
            let before = state;
            self.worker_acts(&mut state);
            while !state.worker.between_passes() {
                self.worker_acts(&mut state);
            }
            if state == before {
                return state;
            }
        }
    }
}

// ---- faults and properties ------------------------------------------------------------------------------------------

impl LowMark {
    fn fault_strikes(&self, state: &mut State, action: Action) {
        match action {
            Action::ClaimFails => {
                state.worker.at = At::Pass(0);
                state.worker.ceiling = 0;
                state.worker.held = [None; PRODUCERS];
            }
            Action::WorkerRestarts => {
                state.worker_restarts += 1;
                state.worker = Worker::started(At::Starting);
            }
            Action::DatabaseCrashes => {
                state.database_crashes += 1;
                state.highest = 0;
                state.reopen = None;
                state.registry = [None; PRODUCERS];
                state.slots = [None; PRODUCERS];
                state.other_worker = None;
                state.worker = Worker::started(At::Starting);
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
            _ => unreachable!("{action:?} is not a fault"),
        }
    }

    fn other_worker_acts(&self, state: &mut State, action: Action) {
        let freed_first = self.made(Mistake::SlotFreedBeforeReopenLowered);
        match action {
            Action::OtherLowersReopen(p) => {
                let low = state.slots[p].expect("a slot");
                match freed_first {
                    true => state.slots[p] = None,
                    false => state.lower_reopen(low),
                }
                state.other_worker = Some((p, low));
            }
            Action::OtherFreesSlot => {
                let (p, low) = state.other_worker.take().expect("a slot to free");
                match freed_first {
                    true => state.lower_reopen(low),
                    false => state.slots[p] = None, // it is of that xid still, or free already
                }
            }
            _ => unreachable!("{action:?} is not another worker's"),
        }
    }

    /// Sent, or held up for a reason: a transaction of the same key that began before is not through.
    fn sent_or_held(&self, state: &State, seq: Seq) -> bool {
        let holds = |p: usize| {
            let slot = state.slots[p].filter(|_| state.producers[p].in_progress());
            let low = state.registry[p].or(slot);
            Some(self.scripts[p].key) == self.key_of(state, seq) && low.is_some_and(|low| low <= seq)
        };
        state.sent & bit(seq) != 0 || (0..PRODUCERS).any(holds)
    }
}

impl Model for LowMark {
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
            highest: 0,
            reopen: None,
            registry: [None; PRODUCERS],
            slots: [None; PRODUCERS],
            worker: Worker::started(At::Pass(0)),
            other_worker: None,
            sent: 0,
            overtaken: None,
            worker_restarts: 0,
            database_crashes: 0,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for p in 0..PRODUCERS {
            self.producer_actions(state, p, actions);
        }
        actions.push(Action::Worker);
        if matches!(state.worker.at, At::Pass(number) if self.pass()[number] == Access::Claim) {
            actions.push(Action::ClaimFails);
        }
        if state.worker_restarts < self.worker_restarts {
            actions.push(Action::WorkerRestarts);
        }
        if state.database_crashes < self.database_crashes {
            actions.push(Action::DatabaseCrashes);
        }
        match state.other_worker {
            Some(_) => actions.push(Action::OtherFreesSlot),
            None => {
                let ended = |p: &usize| state.slots[*p].is_some() && !state.producers[*p].in_progress();
                actions.extend((0..PRODUCERS).filter(ended).map(Action::OtherLowersReopen));
            }
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = *state;
        match action {
            Action::Worker => self.worker_acts(&mut next),
            Action::ClaimFails | Action::WorkerRestarts | Action::DatabaseCrashes => {
                self.fault_strikes(&mut next, action);
            }
            Action::OtherLowersReopen(_) | Action::OtherFreesSlot => self.other_worker_acts(&mut next, action),
            _ => self.producer_acts(&mut next, action),
        }
        self.hasten(&mut next);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(NOTHING_LOST, |model: &Self, state: &State| {
                let over = state.producers.iter().all(Producer::at_rest) && state.other_worker.is_none();
                if !over || !state.worker.between_passes() {
                    return true;
                }
                let after = model.worker_alone(state);
                after.visible().all(|seq| after.sent & bit(seq) != 0)
            }),
            Property::always(IN_ORDER, |_, state: &State| state.overtaken.is_none()),
            Property::always(NOTHING_UNCOMMITTED, |_, state: &State| {
                let visible = state.visible().fold(0, |set, seq| set | bit(seq));
                (state.sent | state.worker.claimed) & !visible == 0
            }),
            Property::always(ONLY_OWN_KEY, |model: &Self, state: &State| {
                if !state.worker.between_passes() || state.other_worker.is_some() {
                    return true;
                }
                let after = model.worker_alone(state);
                after.visible().all(|seq| model.sent_or_held(&after, seq))
            }),
            Property::sometimes(ALL_SENT, |model: &Self, state: &State| {
                let messages: usize = model.scripts.iter().map(|script| script.messages).sum();
                members(state.sent).count() == messages
            }),
            Property::sometimes(SOME_PARKED, |_, state: &State| {
                state.worker.between_passes() && state.worker.claimed != 0
            }),
            Property::sometimes(SOME_REOPENED, |_, state: &State| {
                state.reopen.is_some_and(|seq| seq <= state.worker.mark)
            }),
        ]
    }
}
