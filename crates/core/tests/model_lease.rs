//! Model check of lease, claim, publish and settle: two workers, one partition, one key, messages that commit one after
//! the other, and faults at any point.
//!
//! | in the model | in the server |
//! |---|---|
//! | [`Lease`] | the row of `outbox_partitions`; each acquisition raises the epoch |
//! | [`Row`] | a row of `outbox`, its claim token standing for the epoch of the claim; published: in the history |
//! | [`Worker::chosen`] | the rows that the first half of a claim read; its second half, the statement that marks, is an own step |
//! | [`Worker::mine`] | what a worker believes of the rows it claimed |
//! | [`Worker::wire`] | what its publisher handed over to the connection and the broker has not taken yet |
//! | [`Worker::stale_wire`] | the same of a connection that it closed: the broker may still take it, or not |
//!
//! A worker that hangs past its lease is a zombie. It does not know, and still tries to claim and to settle. The broker
//! takes the messages that it had handed over. Its publisher knows the deadline and hands over no more.
//!
//! The statement that marks checks the lease again. The model leaves that out, so what holds here does not need it.
//!
//! A pass settles before it claims, so a worker claims only when its lost messages are settled. A broker that nacks is
//! not modelled: docs/guarantees.md has the order after that.
//!
//! Each [`Mistake`] removes one rule, and the checker must find the failure.

use stateright::{Model, Property};

const WORKERS: usize = 2;
const ROWS: usize = 3;
/// The most rows that a worker has handed over and not settled.
const WINDOW: usize = 2;

type Epoch = u8;

const NOTHING_LOST: &str = "I1: what is published was delivered";
const IN_ORDER: &str = "I3: first deliveries are in order";
const NO_DUPLICATE: &str = "I4: a fault doubles no more than was in flight";
const OWNER_ONLY: &str = "I5: only the holder of the current epoch changes a row";
const FINAL: &str = "I5: published is final";
const NOT_STUCK: &str = "I6: once faults end all is published";
const ALL_PUBLISHED: &str = "all can be published";
const ZOMBIE_DOUBLES: &str = "a zombie can double a message";

// ---- the configuration ----------------------------------------------------------------------------------------------

/// A rule that is left out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    TakeoverClaimsOnlyUnclaimed,
    MarkIgnoresToken,
    SettleWithoutFence,
    PublisherWithoutDeadline,
    RenewalWithoutFence,
}

/// One configuration to check.
struct Leasing {
    faults: u8,
    epochs: Epoch,
    mistake: Option<Mistake>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Row {
    Uncommitted,
    Pending,
    Claimed(Epoch),
    Published,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Lease {
    owner: Option<usize>,
    /// Has not expired.
    live: bool,
    epoch: Epoch,
}

/// What a worker believes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mine {
    No,
    /// Claimed, and not handed over.
    Waiting,
    HandedOver,
    Confirmed,
    /// Came back without an answer: to be released.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Worker {
    alive: bool,
    /// The epoch of the lease that it believes to hold.
    epoch: Option<Epoch>,
    past_deadline: bool,
    /// What it saw of the rows that it is about to mark.
    chosen: [Option<Row>; ROWS],
    mine: [Mine; ROWS],
    /// The broker takes the first of them next.
    wire: [bool; ROWS],
    stale_wire: [bool; ROWS],
    /// Taken by the broker, whose confirm is on its way.
    confirm: [bool; ROWS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    rows: [Row; ROWS],
    lease: Lease,
    workers: [Worker; WORKERS],
    /// How often the broker got each.
    delivered: [u8; ROWS],
    faults: u8,
    /// Rows that were in flight at a fault: as many may be doubled.
    in_flight_at_faults: u8,
    /// A worker without the lease changed a row.
    intruded: bool,
    /// A published row was changed.
    undone: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Commit,
    Acquire(usize),
    /// Under the same epoch, also if the lease ran out and no other worker has taken it.
    Renew(usize),
    /// In order, with nothing in flight.
    Release(usize),
    Choose(usize),
    Mark(usize),
    HandOver(usize),
    Deliver(usize),
    DeliverStale(usize),
    /// Messages on the wire of a lost connection are lost with it.
    StaleVanishes(usize),
    Confirm(usize),
    Settle(usize),
    Restart(usize),
    /// The lease of a dead worker expires.
    Expire,
    /// A worker hangs until its lease has expired.
    Hang,
    Crash(usize),
    /// Not a separate fault if the publisher drops the connection because the deadline has passed.
    ConnectionLost(usize),
}

impl Worker {
    const STOPPED: Self = Self {
        alive: false,
        epoch: None,
        past_deadline: false,
        chosen: [None; ROWS],
        mine: [Mine::No; ROWS],
        wire: [false; ROWS],
        stale_wire: [false; ROWS],
        confirm: [false; ROWS],
    };

    fn first(&self, mine: Mine) -> Option<usize> {
        self.mine.iter().position(|it| *it == mine)
    }

    /// Between the two halves of a claim.
    fn is_claiming(&self) -> bool {
        self.chosen.iter().any(Option::is_some)
    }

    /// Handed over and not settled.
    fn in_flight(&self) -> usize {
        let in_flight = |it: &&Mine| !matches!(it, Mine::No | Mine::Waiting);
        self.mine.iter().filter(in_flight).count()
    }

    fn give_up_connection(&mut self) {
        for row in 0..ROWS {
            self.stale_wire[row] |= self.wire[row];
        }
        self.wire = [false; ROWS];
        self.confirm = [false; ROWS];
    }

    fn lose_connection(&mut self) {
        self.give_up_connection();
        for mine in &mut self.mine {
            if matches!(mine, Mine::Waiting | Mine::HandedOver) {
                *mine = Mine::Lost;
            }
        }
    }

    /// Remembers nothing; the messages that it sent are still on the wire.
    fn forget(&mut self) {
        self.give_up_connection();
        let Self { alive, stale_wire, .. } = *self;
        *self = Self {
            alive,
            stale_wire,
            ..Self::STOPPED
        };
    }
}

fn take_first(wire: &mut [bool; ROWS]) -> Option<usize> {
    let row = wire.iter().position(|on_it| *on_it)?;
    wire[row] = false;
    Some(row)
}

// ---- the protocol ---------------------------------------------------------------------------------------------------

impl Leasing {
    fn made(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }

    /// The lease is free, has expired, or is in the name of a worker that does not know it.
    fn acquire(&self, state: &mut State, w: usize) -> Option<()> {
        let Lease { owner, live, epoch } = state.lease;
        let is_mine = owner == Some(w);
        let free = match is_mine {
            true => state.workers[w].epoch != Some(epoch),
            false => owner.is_none() || !live,
        };
        if !state.workers[w].alive || !free {
            return None;
        }
        state.lease = Lease {
            owner: Some(w),
            live: true,
            epoch: epoch + 1,
        };
        state.workers[w].forget();
        state.workers[w].epoch = Some(epoch + 1);
        Some(())
    }

    /// If the deadline is over the publisher gives up its connection first, and the messages that it did not send.
    fn renew(&self, state: &mut State, w: usize) -> Option<()> {
        state.workers[w].epoch.filter(|_| !state.workers[w].is_claiming())?;
        if self.made(Mistake::RenewalWithoutFence) {
            state.lease.owner = Some(w);
            state.workers[w].epoch = Some(state.lease.epoch);
        }
        if !state.workers[w].alive || !holds(state, w) {
            return None;
        }
        state.lease.live = true;
        if state.workers[w].past_deadline {
            state.workers[w].past_deadline = false;
            state.workers[w].lose_connection();
        }
        Some(())
    }

    fn release(&self, state: &mut State, w: usize) -> Option<()> {
        let worker = &mut state.workers[w];
        if worker.epoch.is_none() || worker.in_flight() > 0 || worker.is_claiming() {
            return None;
        }
        if state.lease.owner == Some(w) && worker.epoch == Some(state.lease.epoch) {
            state.lease.owner = None;
        }
        worker.forget();
        Some(())
    }

    /// Reads every unsettled row, whatever worker claimed it, and its lease. A worker that does not hold it drops it.
    fn choose(&self, state: &mut State, w: usize) -> Option<()> {
        let epoch = state.workers[w].epoch?;
        if state.workers[w].first(Mine::Lost).is_some() || state.workers[w].is_claiming() {
            return None;
        }
        if !holds(state, w) {
            state.workers[w].forget();
            return Some(());
        }
        let claimable = |row: Row| match row {
            Row::Pending => true,
            Row::Claimed(other) => other != epoch && !self.made(Mistake::TakeoverClaimsOnlyUnclaimed),
            Row::Uncommitted | Row::Published => false,
        };
        let chosen = state.rows.map(|row| claimable(row).then_some(row));
        state.workers[w].chosen = chosen;
        state.workers[w].is_claiming().then_some(())
    }

    /// Marks the chosen rows whose token nobody has changed since. If one has, the worker has missed a row, so it holds
    /// back the later ones: they go again. So it does if its connection was lost meanwhile, with earlier rows on it.
    fn mark(&self, state: &mut State, w: usize) -> Option<()> {
        let epoch = state.workers[w].epoch?;
        if !state.workers[w].is_claiming() {
            return None;
        }
        let mut missed = state.workers[w].first(Mine::Lost).is_some();
        for row in 0..ROWS {
            let Some(seen) = state.workers[w].chosen[row].take() else {
                continue;
            };
            let is_there = state.rows[row] != Row::Published;
            if state.rows[row] == seen || is_there && self.made(Mistake::MarkIgnoresToken) {
                state.rows[row] = Row::Claimed(epoch);
                state.workers[w].mine[row] = if missed { Mine::Lost } else { Mine::Waiting };
            } else {
                missed = true;
            }
        }
        Some(())
    }

    fn hand_over(&self, state: &mut State, w: usize) -> Option<()> {
        let worker = &mut state.workers[w];
        let row = worker.first(Mine::Waiting)?;
        let too_late = worker.past_deadline && !self.made(Mistake::PublisherWithoutDeadline);
        if too_late || worker.in_flight() >= WINDOW {
            return None;
        }
        worker.mine[row] = Mine::HandedOver;
        worker.wire[row] = true;
        Some(())
    }

    /// One statement: confirmed rows are published, lost ones released, if their token is the worker's epoch. If none
    /// was, the worker no longer holds the lease.
    fn settle(&self, state: &mut State, w: usize) -> Option<()> {
        let epoch = state.workers[w].epoch.filter(|_| !state.workers[w].is_claiming())?;
        let fenced = !self.made(Mistake::SettleWithoutFence);
        let mut given = false;
        let mut refused = false;
        for row in 0..ROWS {
            let to = match state.workers[w].mine[row] {
                Mine::Confirmed => Row::Published,
                Mine::Lost => Row::Pending,
                Mine::No | Mine::Waiting | Mine::HandedOver => continue,
            };
            given = true;
            state.workers[w].mine[row] = Mine::No;
            if fenced && (!holds(state, w) || state.rows[row] != Row::Claimed(epoch)) {
                refused = true;
                continue;
            }
            state.undone |= state.rows[row] == Row::Published && to != Row::Published;
            state.intruded |= !holds(state, w);
            state.rows[row] = to;
        }
        if refused {
            state.workers[w].forget();
        }
        given.then_some(())
    }
}

/// In the view of the fence. An expired lease belongs to its owner until another worker takes it.
fn holds(state: &State, w: usize) -> bool {
    state.lease.owner == Some(w) && state.workers[w].epoch == Some(state.lease.epoch)
}

// ---- the broker and faults ------------------------------------------------------------------------------------------

fn deliver(state: &mut State, w: usize) -> Option<()> {
    let row = take_first(&mut state.workers[w].wire)?;
    state.delivered[row] += 1;
    state.workers[w].confirm[row] = true;
    Some(())
}

fn deliver_stale(state: &mut State, w: usize) -> Option<()> {
    let row = take_first(&mut state.workers[w].stale_wire)?;
    state.delivered[row] += 1;
    Some(())
}

fn confirm(state: &mut State, w: usize) -> Option<()> {
    let row = take_first(&mut state.workers[w].confirm)?;
    state.workers[w].mine[row] = Mine::Confirmed;
    Some(())
}

fn expire(state: &mut State) -> Option<()> {
    let owner = state.lease.owner.filter(|_| state.lease.live)?;
    if state.workers[owner].alive {
        return None;
    }
    state.lease.live = false;
    Some(())
}

impl Leasing {
    fn fault_strikes(&self, state: &mut State, action: Action) -> Option<()> {
        let w = match action {
            Action::Hang => state.lease.owner.filter(|_| state.lease.live)?,
            Action::Crash(w) | Action::ConnectionLost(w) => w,
            _ => unreachable!("{action:?} is not a fault"),
        };
        let worker = &mut state.workers[w];
        if !worker.alive {
            return None;
        }
        let dropped_at_deadline = worker.past_deadline && matches!(action, Action::ConnectionLost(_));
        if !dropped_at_deadline {
            if state.faults == self.faults {
                return None;
            }
            state.faults += 1;
            state.in_flight_at_faults += u8::try_from(worker.in_flight()).expect("few rows");
        }
        match action {
            Action::Crash(_) => {
                worker.forget();
                worker.alive = false;
            }
            Action::ConnectionLost(_) => worker.lose_connection(),
            _ => {
                worker.past_deadline = true;
                state.lease.live = false;
            }
        }
        Some(())
    }

    /// Whether all that is committed gets published if no fault strikes any more, by one order of steps.
    fn recovers(&self, state: &State) -> bool {
        let mut state = *state;
        loop {
            let steps = (0..WORKERS).flat_map(|w| {
                [
                    Action::Restart(w),
                    Action::Confirm(w),
                    Action::Settle(w),
                    Action::Deliver(w),
                    Action::HandOver(w),
                    Action::Mark(w),
                    Action::Choose(w),
                    Action::Renew(w),
                    Action::Acquire(w),
                ]
            });
            let mut nexts = steps.chain([Action::Expire]).map(|step| self.step(&state, step));
            match nexts.find_map(|next| next) {
                Some(next) => state = next,
                None => {
                    return state.rows.iter().all(|row| *row == Row::Published);
                }
            }
        }
    }

    /// None where the action changes nothing.
    fn step(&self, state: &State, action: Action) -> Option<State> {
        let mut next = *state;
        match action {
            Action::Commit => {
                let row = next.rows.iter().position(|row| *row == Row::Uncommitted)?;
                next.rows[row] = Row::Pending;
            }
            Action::Acquire(w) => self.acquire(&mut next, w)?,
            Action::Renew(w) => self.renew(&mut next, w)?,
            Action::Release(w) => self.release(&mut next, w)?,
            Action::Choose(w) => self.choose(&mut next, w)?,
            Action::Mark(w) => self.mark(&mut next, w)?,
            Action::HandOver(w) => self.hand_over(&mut next, w)?,
            Action::Deliver(w) => deliver(&mut next, w)?,
            Action::DeliverStale(w) => deliver_stale(&mut next, w)?,
            Action::StaleVanishes(w) => next.workers[w].stale_wire = [false; ROWS],
            Action::Confirm(w) => confirm(&mut next, w)?,
            Action::Settle(w) => self.settle(&mut next, w)?,
            Action::Restart(w) => next.workers[w].alive = true,
            Action::Expire => expire(&mut next)?,
            Action::Hang | Action::Crash(_) | Action::ConnectionLost(_) => self.fault_strikes(&mut next, action)?,
        }
        (next != *state).then_some(next)
    }
}

impl Model for Leasing {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let worker = Worker {
            alive: true,
            ..Worker::STOPPED
        };
        vec![State {
            rows: [Row::Uncommitted; ROWS],
            lease: Lease {
                owner: None,
                live: true,
                epoch: 0,
            },
            workers: [worker; WORKERS],
            delivered: [0; ROWS],
            faults: 0,
            in_flight_at_faults: 0,
            intruded: false,
            undone: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.extend([Action::Commit, Action::Expire, Action::Hang]);
        for w in 0..WORKERS {
            // It does not matter which worker acquires first.
            if state.lease.epoch < self.epochs && (w == 0 || state.lease.epoch > 0) {
                actions.push(Action::Acquire(w));
            }
            actions.extend([
                Action::Renew(w),
                Action::Release(w),
                Action::Choose(w),
                Action::Mark(w),
                Action::HandOver(w),
                Action::Deliver(w),
                Action::DeliverStale(w),
                Action::StaleVanishes(w),
                Action::Confirm(w),
                Action::Settle(w),
                Action::Restart(w),
                Action::Crash(w),
                Action::ConnectionLost(w),
            ]);
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        self.step(state, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(NOTHING_LOST, |_, state: &State| {
                let mut rows = state.rows.iter().zip(state.delivered);
                rows.all(|(row, times)| *row != Row::Published || times > 0)
            }),
            Property::always(IN_ORDER, |_, state: &State| {
                state
                    .delivered
                    .is_sorted_by(|earlier, later| *earlier > 0 || *later == 0)
            }),
            Property::always(NO_DUPLICATE, |_, state: &State| {
                let doubled: u8 = state.delivered.iter().map(|times| times.saturating_sub(1)).sum();
                doubled <= state.in_flight_at_faults
            }),
            Property::always(OWNER_ONLY, |_, state: &State| !state.intruded),
            Property::always(FINAL, |_, state: &State| !state.undone),
            Property::always(NOT_STUCK, |model: &Self, state: &State| {
                state.rows.contains(&Row::Uncommitted) || model.recovers(state)
            }),
            Property::sometimes(ALL_PUBLISHED, |_, state: &State| {
                state.rows.iter().all(|row| *row == Row::Published)
            }),
            Property::sometimes(ZOMBIE_DOUBLES, |_, state: &State| {
                let doubled = state.delivered.iter().any(|times| *times > 1);
                doubled && state.workers.iter().any(|worker| worker.past_deadline)
            }),
        ]
    }
}

// ---- the checks -----------------------------------------------------------------------------------------------------

/// The checker finds that `mistake` breaks `property`, with one fault.
#[track_caller]
fn assert_breaks(property: &'static str, mistake: Mistake) {
    let model = Leasing {
        faults: 1,
        epochs: 2,
        mistake: Some(mistake),
    };
    crate::checking::assert_breaks(property, model);
}

#[test]
fn two_workers_keep_their_promises_through_two_faults() {
    let model = Leasing {
        faults: 2,
        epochs: 3,
        mistake: None,
    };
    crate::checking::assert_holds(model);
}

#[test]
fn a_takeover_that_claims_only_unclaimed_rows_breaks_order() {
    assert_breaks(IN_ORDER, Mistake::TakeoverClaimsOnlyUnclaimed);
}

#[test]
fn a_takeover_that_claims_only_unclaimed_rows_leaves_some_stuck() {
    assert_breaks(NOT_STUCK, Mistake::TakeoverClaimsOnlyUnclaimed);
}

#[test]
fn a_mark_that_ignores_the_token_takes_what_another_worker_sends() {
    assert_breaks(NO_DUPLICATE, Mistake::MarkIgnoresToken);
}

#[test]
fn a_settle_without_the_fence_undoes_what_is_published() {
    assert_breaks(FINAL, Mistake::SettleWithoutFence);
}

#[test]
fn a_settle_without_the_fence_changes_what_another_holds() {
    assert_breaks(OWNER_ONLY, Mistake::SettleWithoutFence);
}

#[test]
fn a_renewal_without_the_fence_breaks_order() {
    assert_breaks(IN_ORDER, Mistake::RenewalWithoutFence);
}

#[test]
fn a_publisher_without_a_deadline_doubles_more_than_was_in_flight() {
    assert_breaks(NO_DUPLICATE, Mistake::PublisherWithoutDeadline);
}
