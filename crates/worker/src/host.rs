//! The traits that the process around a worker implements: tables, shared memory, connections, clocks, settings, log
//! and statistics. The worker calls them on its own thread. They take `&self`: a host keeps in cells what it must
//! change.

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
use outbox_core::standbys::Replication;
use outbox_transport::target::{Limits, Target};
use outbox_transport::{Event, NotStarted, Started};
use std::fmt::Arguments;
use std::time::{Duration, Instant};

/// The process that a worker runs in.
pub trait Host {
    /// Why a call to the database failed.
    type Error;
    type Port: Port<Error = Self::Error>;
    type Publisher: Publisher;
    /// Whether sessions hand messages over in shared memory. If so, the worker splits long steps into parts and
    /// receives messages between them.
    const HAS_FAST_PATH: bool;
    /// How often the worker removes the dead workers of the database; None = another process removes them.
    const PURGE_EVERY: Option<Duration>;

    /// How much the worker claims, keeps and settles at once.
    fn bounds(&self) -> Bounds {
        Bounds::USUAL
    }
    /// The name of this worker, as the owner of leases.
    fn id(&self) -> &str;

    // ---- clocks -----------------------------------------------------------------------------------------------------

    fn now(&self) -> Instant;
    /// The clock of the server, in µs since 1970.
    fn now_us(&self) -> i64;
    /// The clock of the publishers' deadline, in ns. It goes on while the machine is suspended.
    fn boottime_ns(&self) -> u64;

    // ---- a destination ----------------------------------------------------------------------------------------------

    fn port(&self, destination: &str) -> Self::Port;
    /// Starts a publisher, which gives its connection this name at the peer.
    fn start(&self, target: &Target, connection: &str) -> Result<Self::Publisher, NotStarted>;
    /// From now on the worker serves these destinations, and no others.
    fn serves(&self, destinations: &[&str]);

    // ---- control ----------------------------------------------------------------------------------------------------

    /// Called before the pass reads anything. A wake that comes later may be for something that this pass does not see,
    /// so it must end the next wait.
    fn begin_pass(&self);
    fn end_pass(&self, end: PassEnd);
    fn orders(&self) -> Orders;
    /// Whether the process was asked to end. If so, the worker begins nothing that takes long.
    fn is_ending(&self) -> bool;
    /// Reports the progress of a request; `done`: it is complete.
    fn answer(&self, request_id: u32, report: &Report, done: bool);
    /// Whether a fast-path slot is ready for this worker.
    fn is_something_ready(&self) -> bool;
    /// True only if the host knows that no message is pending in this database.
    fn nothing_waits(&self) -> bool;

    // ---- settings ---------------------------------------------------------------------------------------------------

    /// Checks whether settings or destinations changed. The host skips a check that comes too soon after the last one,
    /// unless `at_once`.
    fn refresh(&self, at_once: bool) -> Result<Refresh, Self::Error>;
    /// Whether a person changed something that `refresh` has not read yet.
    fn is_stale(&self) -> bool;

    // ---- leases -----------------------------------------------------------------------------------------------------

    /// Writes the heartbeat. Then renews, releases and takes leases by `plan`, which is called with the live workers
    /// and all leases. One transaction, where the host can do that. With leasing off `plan` is not called. `is_idle`:
    /// the last pass claimed nothing.
    fn tend(&self, is_idle: bool, plan: &mut dyn FnMut(&[String], &[Lease]) -> Plan) -> Result<Tended, Self::Error>;
    /// Sets until when the publishers may publish: a time of `boottime_ns`, and a duration from then. None = without
    /// end.
    fn set_deadline(&self, deadline: Option<(u64, Duration)>);
    /// A number that changes when a worker starts or ends, or partitions are released.
    fn worker_changes(&self) -> u64;
    /// Makes the other workers check the leases at once.
    fn call_others(&self);
    /// Removes dead workers from the database. Returns their number.
    fn purge(&self) -> Result<i64, Self::Error>;
    /// Releases all leases of this worker, as it ends.
    fn leave(&self) -> Result<(), Self::Error>;

    // ---- standbys ---------------------------------------------------------------------------------------------------

    /// Writes WAL to disk up to a position behind all commits that are visible now. Returns that position, and the
    /// standbys that are connected to this server.
    fn replication(&self) -> Result<Replication, Self::Error>;

    // ---- log --------------------------------------------------------------------------------------------------------

    /// Logs a line about a destination; None: about the worker.
    fn log(&self, destination: Option<&str>, text: Arguments);
    /// Logs a failure of a step that will be tried again. Returns how long to wait, in ms. Err: the pass must end.
    fn failed(&self, error: Self::Error) -> Result<u32, Self::Error>;
}

/// One destination: its tables, its lanes in shared memory, and its statistics.
pub trait Port {
    type RowId: Clone;
    type Error;

    /// Takes over a changed description of the destination. Err: why it cannot be used.
    fn describe(&self, target: Result<&Target, &str>, limits: &Limits);

    // ---- tables: each call is a separate transaction ----------------------------------------------------------------

    /// Writes the dispositions of claimed messages. A dead letter blocks what `dead_blocks` says. Returns the number of
    /// changed rows.
    fn settle(
        &self,
        batch: &[Settlement<Self::RowId>],
        dead_blocks: Blocks,
        patience: Patience,
    ) -> Result<usize, Self::Error>;
    /// Claims rows of leased lanes, which all have the same read limit. Unless `is_patient`, it hardly waits for a
    /// locked row. The batch says if the destination is paused: the worker may not know that yet, and would
    /// consider the lanes read.
    fn claim(&self, lanes: &[Lane], is_patient: bool) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims up to `limit` rows of any lane, with leasing off.
    fn claim_unleased(&self, limit: u32) -> Result<Batch<Self::RowId>, Self::Error>;
    /// Claims the first rows of a key that wait behind an earlier message. The flag: more such rows are there.
    fn claim_waiting(
        &self,
        key: &OrderedKey,
        epoch: i64,
        read_limit: i64,
        limit: u32,
    ) -> Result<(Batch<Self::RowId>, bool), Self::Error>;
    /// Moves due messages from `outbox_waiting` back to `outbox`, for all destinations. Only those of `leases`; None =
    /// of all partitions.
    fn bring_due(&self, leases: Option<&[Held]>) -> Result<Brought, Self::Error>;
    /// The keys, of all destinations, that are blocked or have messages that wait behind an earlier one.
    fn blocked_keys(&self, partitions: &[Partition]) -> Result<Vec<Found>, Self::Error>;
    /// Whether the error says that another session has locked rows.
    fn is_locked(error: &Self::Error) -> bool;

    /// Called after each claim, even if it failed. A message must not be sent while a crash of the server could still
    /// undo its claim.
    fn make_durable(&self) {}
    /// The time until the function that makes the bodies may be called again, in ms; None = now.
    fn body_rests_ms(&self) -> Option<u32> {
        None
    }
    /// Whether the function that makes the bodies cannot be used at all.
    fn is_body_unusable(&self) -> bool {
        false
    }

    // ---- shared memory ----------------------------------------------------------------------------------------------

    /// Called before `take_rewind`: after it, `take_rewind` also returns rewinds that must be fetched first, such as
    /// those of prepared transactions that have ended.
    fn refresh(&self) -> Result<(), Self::Error>;
    /// The open transactions: each has announced keys and is not finished.
    fn open_transactions(&self) -> Result<Vec<OpenTransaction>, Self::Error>;
    /// The lowest seq that was committed in a partition since the last call. Several destinations can share one rewind,
    /// so the caller reports it to the others.
    fn take_rewind(&self, partition: Partition) -> Option<i64>;
    /// Returns the rewind of a partition without taking it, as of the last call of `open_transactions` or later.
    fn peek_rewind(&self, partition: Partition) -> Option<i64>;
    /// Whether this destination shares its rewinds with that one.
    fn shares_rewind_with(&self, destination: &str) -> bool;
    /// A number that grows when a message is scheduled.
    fn schedules(&self) -> u32;
    /// A number that grows when waiting messages may have been unblocked, by a person for example.
    fn unblocks(&self) -> u32;

    // ---- fast path: a host without one keeps these defaults ---------------------------------------------------------

    /// Takes the ready messages of this destination in the lanes that this worker owns. Each keeps its slot until
    /// `let_go` or `give_up`. See [`outbox_core::engine::FastPath`].
    fn take_ready(&self) -> Vec<(SlotId, Claimed<Self::RowId>)> {
        Vec::new()
    }
    /// The lowest seq of a partition that is in a ready slot.
    fn lowest_ready(&self, _partition: Partition) -> Option<i64> {
        None
    }
    /// Withdraws claimed messages from their slots, so that no worker takes them by the fast path.
    fn revoke(&self, _claimed: &[(Partition, i64)]) {}
    /// Frees the slot of a message that is settled or claimed.
    fn let_go(&self, _slot: SlotId) {}
    /// Frees the slot of a message that was not taken, and rewinds its lane, so that the message is read from the
    /// table.
    fn give_up(&self, _slot: SlotId, _partition: Partition, _seq: i64) {}

    // ---- statistics -------------------------------------------------------------------------------------------------

    /// Records that the broker confirmed a message. `at_us`: when, in µs since 1970 by the server's clock.
    fn confirmed(&self, pointer: &Pointer, at_us: i64);
    /// Records that these messages were settled.
    fn settled(&self, batch: &[Settlement<Self::RowId>]);
    /// Records the number of messages in flight. Called often: only a host where that costs nothing implements it.
    fn record_in_flight(&self, _count: usize) {}
    /// Reports the number of messages in flight. Called once in each pass, before `report`.
    fn report_in_flight(&self, _count: usize) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Whether a session requested a recheck of the connection since the last call.
    fn take_recheck_request(&self) -> bool {
        false
    }
    /// Reports the state of the connection; None: the destination was dropped. `requested_at_us`: when the worker
    /// received a session's request for a recheck, in µs since 1970, if this report answers one.
    fn report(&self, status: Option<&Status>, requested_at_us: Option<i64>) -> Result<(), Self::Error>;
    /// Records a failure of the connection.
    fn record_error(&self, _reason: &'static str, _detail: &str) {}
}

/// Publishes the messages of one destination, on separate threads.
pub trait Publisher {
    /// Hands a batch over to the publisher's threads. Err: no room; the batch comes back.
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>>;
    /// Takes the events since the last call. After `stop` it returns the last ones.
    fn drain(&mut self) -> Vec<Event>;
    /// Sets how many undrained confirms wake the worker. Any other event wakes it at once.
    fn wake_after(&self, confirms: usize);
    /// Makes the publisher send nothing more and begin to end. The caller calls `stop` later.
    fn request_stop(&self, limit: Duration);
    /// Sends nothing more and ends the publisher. Returns within `limit`.
    fn stop(&mut self, limit: Duration);
    /// Whether a certificate file has changed since the publisher started.
    fn has_new_certificates(&self) -> bool;
    /// Whether the password file has changed since the publisher started.
    fn has_new_password(&self) -> bool;
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

    fn has_new_certificates(&self) -> bool {
        Self::has_new_certificates(self)
    }

    fn has_new_password(&self) -> bool {
        Self::has_new_password(self)
    }
}

/// The orders of the process to its worker at this moment.
#[derive(Default)]
pub struct Orders {
    /// The worker gives its slot to another database: it claims nothing more, and leaves within this time.
    pub leave: Option<Duration>,
    /// The worker claims nothing.
    pub rests: bool,
    /// The worker claims nothing for this reason, and its destinations show the reason.
    pub held: Option<&'static str>,
    /// The worker claims for the request alone.
    pub once: bool,
    /// The worker claims nothing until it has its share of the partitions, or until this time.
    pub share_by: Option<Instant>,
    /// The request of a session, with its request id.
    pub request: Option<(u32, Request)>,
}

/// What a check of the settings found.
pub enum Refresh {
    /// The host checked nothing.
    Skipped,
    /// What was read, changed or not.
    Changed(Box<Changes>),
    /// A new session would start with other defaults than this session has.
    NewSession,
}

pub struct Changes {
    /// Why nothing is delivered from this database; None = the database is adopted.
    pub not_adopted: Option<String>,
    /// None = unchanged.
    pub settings: Option<Settings>,
    /// All destinations; None = unchanged.
    pub described: Option<Vec<Described>>,
}

/// The messages that were brought back, as destination, partition and seq; and in how many ms the next one is due.
pub type Brought = (Vec<(String, Partition, i64)>, Option<u64>);

/// Which leases to renew, to release and to take.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub renew: Vec<Held>,
    pub release: Vec<Held>,
    pub take: Vec<Partition>,
}

/// The workers and leases after `Host::tend`.
#[derive(Debug)]
pub struct Tended {
    /// The live workers, this one among them.
    pub workers: Vec<String>,
    /// The leases that this worker holds now, in order, and how long they last; None with leasing off.
    pub leased: Option<(Vec<Held>, Duration)>,
}

/// How long a settle may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// As long as any other statement.
    Usual,
    /// Only briefly: the process ends, or other destinations wait.
    Little,
}
