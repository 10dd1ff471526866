//! What the process around a worker brings: the tables, shared memory, connections, clocks, settings, log and statistics.
//! All of it is called on the worker's thread, and takes `&self`: a host keeps what it must change in cells.

use crate::report::{PassEnd, Report};
use crate::settings::{Described, Settings};
use crate::status::Status;
use outbox_core::engine::{Batch, Bounds, Claimed, Held, Lane, Request, Settlement, SlotId};
use outbox_core::key_order::{Found, OrderedKey};
use outbox_core::lease::Lease;
use outbox_core::message::{Pointer, Publication};
use outbox_core::open_transactions::OpenTransaction;
use outbox_core::partition::Partition;
use outbox_core::settle::Blocks;
use outbox_transport::target::{Limits, Target};
use outbox_transport::{Event, Started};
use std::fmt::Arguments;
use std::time::{Duration, Instant};

/// The process that a worker runs in.
pub trait Host {
    /// Why a call of the database failed.
    type Error;
    type Port: Port<Error = Self::Error>;
    type Publisher: Publisher;
    /// Sessions hand messages over by shared memory: so others are received between the parts of what takes long.
    const HAS_FAST_PATH: bool;
    /// How often the dead workers of the database are removed; None: somebody else does it.
    const PURGE_EVERY: Option<Duration>;

    /// How much it does at once.
    fn bounds(&self) -> Bounds {
        Bounds::USUAL
    }
    /// The name of this worker, as the owner of leases.
    fn id(&self) -> &str;

    // ---- clocks -----------------------------------------------------------------------------------------------------

    fn now(&self) -> Instant;
    /// The clock of the server, in µs since 1970.
    fn now_us(&self) -> i64;
    /// The clock that the publishers count their deadline by, in ns. It goes on while the machine is suspended.
    fn boottime_ns(&self) -> u64;

    // ---- a destination ----------------------------------------------------------------------------------------------

    fn port(&self, destination: &str) -> Self::Port;
    /// A publisher, whose connection has this name with its peer; or why there can be none.
    fn start(&self, target: &Target, connection: &str) -> Result<Self::Publisher, String>;
    /// These destinations are served from now on, and no others.
    fn serves(&self, destinations: &[&str]);

    // ---- control ----------------------------------------------------------------------------------------------------

    /// Before anything is looked at: what wakes this worker from now on is about something that the pass may not see.
    fn begin_pass(&self);
    fn end_pass(&self, end: PassEnd);
    fn orders(&self) -> Orders;
    /// Whether the process was asked to end: nothing is begun that takes long.
    fn is_ending(&self) -> bool;
    /// What became of a request so far.
    fn answer(&self, request_id: u32, report: &Report, done: bool);
    /// Whether a session has laid something ready for this worker.
    fn is_something_ready(&self) -> bool;
    /// Whether it is known that nothing waits in this database.
    fn nothing_waits(&self) -> bool;

    // ---- settings ---------------------------------------------------------------------------------------------------

    /// Looks whether anything has changed, as often as it costs nothing; with `at_once` in any case.
    fn refresh(&self, at_once: bool) -> Result<Refresh, Self::Error>;
    /// A person has changed something that `look` has not seen yet.
    fn is_stale(&self) -> bool;

    // ---- leases -----------------------------------------------------------------------------------------------------

    /// Heartbeat; then renews, gives back and takes leases as `plan` says of the workers that live and the leases that there
    /// are. One transaction, where that can be. With leasing off `plan` is not called. `is_idle`: the last pass claimed
    /// nothing.
    fn tend(&self, is_idle: bool, plan: &mut dyn FnMut(&[String], &[Lease]) -> Plan) -> Result<Tended, Self::Error>;
    /// Until when the publishers may publish: so long after `from`, by the clock of `boottime_ns`; None: without end.
    fn set_deadline(&self, deadline: Option<(u64, Duration)>);
    /// Changes when workers come or go, or partitions are given back.
    fn worker_changes(&self) -> u64;
    /// The other workers shall look at the leases.
    fn call_others(&self);
    /// Removes workers that have ended. Returns how many.
    fn purge(&self) -> Result<i64, Self::Error>;
    /// Gives back what is leased.
    fn leave(&self) -> Result<(), Self::Error>;

    // ---- log --------------------------------------------------------------------------------------------------------

    /// A line about a destination, or about the worker.
    fn log(&self, destination: Option<&str>, text: Arguments);
    /// Something failed and will be tried again. Returns how long to wait, in ms; Err: the pass must end.
    fn failed(&self, error: Self::Error) -> Result<u32, Self::Error>;
}

/// One destination: its tables, what shared memory says of its lanes, and its statistics.
pub trait Port {
    type RowId: Clone;
    type Error;

    /// The destination is described anew.
    fn describe(&self, target: Result<&Target, &str>, limits: &Limits);

    // ---- tables: each call is a transaction of its own --------------------------------------------------------------

    /// Ends claimed messages; a dead letter closes what `dead_closes` says. Returns how many rows changed.
    fn settle(
        &self,
        batch: &[Settlement<Self::RowId>],
        dead_blocks: Blocks,
        patience: Patience,
    ) -> Result<usize, Self::Error>;
    /// Claims rows of leased lanes, all of them with the same reach. Without patience it waits for no lock. Of a destination that
    /// is paused by then it says so: the worker may not have heard of that, and would take the lanes for read.
    fn claim(&self, lanes: &[Lane], is_patient: bool) -> Result<Batch<Self::RowId>, Self::Error>;
    fn claim_unleased(&self, limit: u32) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims the first rows of a key that wait behind another. The flag: more are there.
    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<Self::RowId>, bool), Self::Error>;
    /// Brings back what is due, of all destinations.
    fn bring_due(&self, leases: Option<&[Held]>) -> Result<Brought, Self::Error>;
    /// The keys of all destinations that are closed or have messages waiting behind another.
    fn blocked_keys(&self, partitions: &[Partition]) -> Result<Vec<Found>, Self::Error>;
    /// Whether the error says that somebody holds rows locked.
    fn is_locked(error: &Self::Error) -> bool;

    /// After each claim, also one that failed: what a crash of the server could still undo must not be sent.
    fn make_durable(&self) {}
    /// In how many ms the function that makes the bodies may be called again, if not now.
    fn body_rests_ms(&self) -> Option<u32> {
        None
    }
    /// Whether that is because it cannot be used.
    fn is_body_unusable(&self) -> bool {
        false
    }

    // ---- shared memory ----------------------------------------------------------------------------------------------

    /// Before `take_rewind`: what prepared transactions committed that are over by now shows there, and whatever else must be
    /// asked for.
    fn refresh(&self) -> Result<(), Self::Error>;
    /// Transactions that have enqueued and are not over.
    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Self::Error>;
    /// The lowest seq committed in a partition since the last call. One word may tell of several destinations: who takes it
    /// tells the others.
    fn take_rewind(&self, partition: Partition) -> Option<i64>;
    /// The same, left there; as of `open_transactions`, or later.
    fn peek_rewind(&self, partition: Partition) -> Option<i64>;
    /// Whether that word tells of this destination, too.
    fn shares_rewind_with(&self, destination: &str) -> bool;
    /// Grows when something was scheduled, or a person changed what waits.
    fn waiting_changes(&self) -> u32;

    // ---- fast path: a host without it leaves these as they are ------------------------------------------------------

    /// As [`outbox_core::engine::Express`].
    fn take_ready(&self) -> Vec<(SlotId, Claimed<Self::RowId>)> {
        Vec::new()
    }
    /// The lowest seq of a partition that lies ready.
    fn lowest_ready(&self, _partition: Partition) -> Option<i64> {
        None
    }
    /// These are claimed, and are not to be taken in hand any more.
    fn revoke(&self, _claimed: &[(Partition, i64)]) {}
    fn let_go(&self, _place: SlotId) {}
    fn give_up(&self, _place: SlotId, _partition: Partition, _seq: i64) {}

    // ---- statistics -------------------------------------------------------------------------------------------------

    /// The broker has confirmed a message, at this time of the server.
    fn confirmed(&self, pointer: &Pointer, at_us: i64);
    /// These were settled.
    fn settled(&self, batch: &[Settlement<Self::RowId>]);
    /// So much is in flight: said often, where that is free.
    fn record_in_flight(&self, _count: usize) {}
    /// The same, with each report.
    fn report_in_flight(&self, _count: usize) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Whether a session has asked for a fresh look at the connection since the last call.
    fn take_recheck_request(&self) -> bool {
        false
    }
    /// How the connection is; None: the destination is gone. `asked_at_us`: a session had asked for it then.
    fn report(&self, status: Option<&Status>, requested_at_us: Option<i64>) -> Result<(), Self::Error>;
    /// The connection has failed.
    fn record_error(&self, _reason: &'static str, _detail: &str) {}
}

/// What publishes the messages of one destination, on threads of its own.
pub trait Publisher {
    /// Hands a batch over; gives it back where there is no room.
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>>;
    /// What it has to say since the last call; also after `stop`.
    fn drain(&mut self) -> Vec<Event>;
    /// So many confirms that are not drained wake the worker. Whatever is not a confirm does.
    fn wake_after(&self, confirms: usize);
    /// Publishes nothing more; `stop` will be called.
    fn request_stop(&self, limit: Duration);
    /// Publishes nothing more, and returns within `limit`.
    fn stop(&mut self, limit: Duration);
    /// Whether a file that it was started with says something else by now.
    fn is_outdated(&self) -> bool;
}

impl Publisher for Started {
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        self.publisher.try_publish(batch)
    }

    fn drain(&mut self) -> Vec<Event> {
        self.publisher.drain()
    }

    fn wake_after(&self, confirms: usize) {
        self.publisher.wake_after(confirms);
    }

    fn request_stop(&self, limit: Duration) {
        self.publisher.request_stop(limit);
    }

    fn stop(&mut self, limit: Duration) {
        self.publisher.stop(limit);
    }

    fn is_outdated(&self) -> bool {
        self.has_new_certificates()
    }
}

/// What the process asks of its worker at this moment.
#[derive(Default)]
pub struct Orders {
    /// It gives its place to another: it claims nothing more, and is through within so long.
    pub leave: Option<Duration>,
    /// It claims nothing.
    pub rests: bool,
    /// Nor because of this, which its destinations report.
    pub held: Option<&'static str>,
    /// It claims for the request alone.
    pub once: bool,
    /// It claims nothing before it has its share of the partitions, or then.
    pub share_by: Option<Instant>,
    /// A session asks for something, under this ticket.
    pub request: Option<(u32, Request)>,
}

/// What a look at the settings found.
pub enum Refresh {
    /// Nothing was looked at.
    Skipped,
    Changed(Box<Changes>),
    /// What a new session would go by is not what this one does.
    NewSession,
}

pub struct Changes {
    /// Why nothing is delivered from this database; None = it is adopted.
    pub not_adopted: Option<String>,
    /// None = as they were.
    pub settings: Option<Settings>,
    pub described: Option<Vec<Described>>,
}

/// Messages that were brought back, each with its destination and partition; and in how many ms the next is due.
pub type Brought = (Vec<(String, Partition, i64)>, Option<u64>);

/// What is to become of leases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub renew: Vec<Held>,
    pub release: Vec<Held>,
    pub take: Vec<Partition>,
}

/// What became of them.
#[derive(Debug)]
pub struct Tended {
    /// The workers that live, this one among them.
    pub workers: Vec<String>,
    /// What is held now, in order, and for how long; None with leasing off.
    pub leased: Option<(Vec<Held>, Duration)>,
}

/// How long a settle may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// As long as any statement.
    Usual,
    /// The process ends, or others wait.
    Little,
}
