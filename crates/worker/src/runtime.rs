//! The traits that the process around a worker implements: shared memory, connections, clocks, settings, leases, log
//! and statistics. The worker calls them on its own thread. They take `&self`: a runtime keeps in cells what it must
//! change.

use crate::report::{PassCounts, PassEnd};
use crate::rewinds::{RewindGroup, Rewound};
use crate::settings::{Described, WorkerSettings};
use crate::status::ConnectionStatus;
use outbox_core::engine::{Arrived, Bounds, HeldLease, Memory, Request, Tables};
use outbox_core::lease::Lease;
use outbox_core::message::{Pointer, Publication};
use outbox_core::partition::Partition;
use outbox_core::settle::Ended;
use outbox_core::standbys::Replication;
use outbox_transport::kind::{Limits, Target};
use outbox_transport::{NotStarted, PublisherEvent, Started};
use std::fmt::Arguments;
use std::time::{Duration, Instant};

/// The process that a worker runs in, with the memory that it shares with sessions.
pub trait Runtime: Memory {
    type Tables: Tables<Error = Self::Error>;
    type Publisher: DestinationPublisher;
    /// Whether sessions hand messages over in shared memory. If so, the worker splits long steps into parts and
    /// receives messages between them.
    const HAS_FAST_PATH: bool;
    /// The most destinations that have read all else and read their lanes for rewinds that they share. If there are more, a
    /// statement finds those that have messages.
    const READERS_UNASKED: usize = 4;
    /// How often the worker removes the dead workers of the database; None = another process removes them.
    const PURGE_EVERY: Option<Duration>;

    /// How much the worker claims, keeps and settles at once.
    fn bounds(&self) -> Bounds {
        Bounds::USUAL
    }
    /// The name of this worker, as the owner of leases.
    fn id(&self) -> &str;
    fn tables(&self) -> &Self::Tables;

    // ---- clocks -----------------------------------------------------------------------------------------------------

    fn now(&self) -> Instant;
    /// The clock of the server, in µs since 1970.
    fn now_us(&self) -> i64;
    /// The clock of the publishers' deadline, in ns. It goes on while the machine is suspended.
    fn boottime_ns(&self) -> u64;

    // ---- control ----------------------------------------------------------------------------------------------------

    /// Called before the pass reads anything. A wake that comes later may be for something that this pass does not see,
    /// so it must end the next wait.
    fn begin_pass(&self);
    fn end_pass(&self, end: PassEnd);
    fn orders(&self) -> Orders;
    /// Whether the process was asked to end. If so, the worker begins nothing that takes long.
    fn is_ending(&self) -> bool;
    /// Reports the progress of a request; `done`: it is complete.
    fn answer(&self, request_id: u32, report: &PassCounts, done: bool);
    /// True only if the runtime knows that no message is pending in this database.
    fn nothing_waits(&self) -> bool {
        false
    }

    // ---- settings ---------------------------------------------------------------------------------------------------

    /// Checks whether settings or destinations changed. The runtime skips a check that comes too soon after the last
    /// one, unless `immediately`.
    fn refresh(&self, immediately: bool) -> Result<Refresh, Self::Error>;
    /// Whether an operator changed something that `refresh` has not read yet. Matters only for the fast path.
    fn is_stale(&self) -> bool {
        false
    }

    // ---- leases -----------------------------------------------------------------------------------------------------

    /// Writes the heartbeat. Then renews, releases and takes leases by `plan`, which is called with the live workers
    /// and all leases. One transaction, where the runtime can do that. With leasing off `plan` is not called.
    /// `is_idle`: the last pass claimed nothing.
    fn tend(
        &self,
        is_idle: bool,
        plan: &mut dyn FnMut(&[String], &[Lease]) -> LeaseChanges,
    ) -> Result<Tended, Self::Error>;
    /// Sets until when the publishers may publish: a time of `boottime_ns`, and a duration from then. None = without
    /// end.
    fn set_deadline(&self, deadline: Option<(u64, Duration)>);
    /// A number that changes when a worker starts or ends, or partitions are released.
    fn worker_changes(&self) -> u64;
    /// Makes the other workers check the leases immediately.
    fn call_others(&self);
    /// Removes dead workers from the database. Returns their number.
    fn purge(&self) -> Result<i64, Self::Error>;
    /// Releases all leases of this worker, as it ends.
    fn leave(&self) -> Result<(), Self::Error>;

    // ---- standbys ---------------------------------------------------------------------------------------------------

    /// Writes WAL to disk up to a position behind all commits that are visible now. Returns that position, and the
    /// standbys that are connected to this server.
    fn replication(&self) -> Result<Replication, Self::Error>;

    // ---- shared memory, in addition to what the engine reads of it
    // ------------------------------------------------------------

    /// The group that a destination shares its rewinds with.
    fn rewind_group(&self, destination: &str) -> RewindGroup {
        RewindGroup::of(destination)
    }
    /// Takes the rewinds of the lanes of these groups in these partitions: the lowest seq that was committed in each
    /// since the last call, also by prepared transactions; and those of [`RewindLane::UNBLOCKED`]. Called once in each
    /// pass. Err: some may be lost.
    ///
    /// [`RewindLane::UNBLOCKED`]: crate::rewinds::RewindLane::UNBLOCKED
    fn take_rewinds(&self, groups: &[RewindGroup], leases: &[HeldLease]) -> Result<Vec<Rewound>, Self::Error>;
    /// A counter that grows when a message is scheduled, or changed by hand.
    fn schedules(&self) -> u32;
    /// Takes all ready messages of the lanes that this worker owns. Each keeps its slot until `free_slot` or `give_up`.
    fn take_ready(&self) -> Vec<Arrived> {
        Vec::new()
    }

    // ---- a destination ----------------------------------------------------------------------------------------------

    /// From now on the worker serves these destinations, and no others.
    fn serves(&self, _destinations: &[&str]) {}
    /// Takes over the limits of a destination whose description has changed.
    fn limit(&self, _destination: &str, _limits: &Limits) {}
    /// Starts a publisher, which gives its connection this name at the peer.
    fn start(&self, target: &Target, connection: &str) -> Result<Self::Publisher, NotStarted>;
    /// Records that the broker confirmed a message. `at_us`: when, in µs since 1970 by the server's clock.
    fn confirmed(&self, pointer: &Pointer, at_us: i64);
    /// Records what a settle ended.
    fn settled(&self, destination: &str, ended: &Ended);
    /// Records the number of messages in flight. Called often: only a runtime where that costs nothing implements it.
    fn record_in_flight(&self, _destination: &str, _count: usize) {}
    /// Reports the number of messages in flight. Called once in each pass, before `report`.
    fn report_in_flight(&self, _destination: &str, _count: usize) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Whether a session requested a recheck of any connection since the last call.
    fn are_rechecks_requested(&self) -> bool {
        false
    }
    /// Whether a session requested a recheck of this connection since the last call.
    fn take_recheck_request(&self, _destination: &str) -> bool {
        false
    }
    /// Reports the state of the connection; None: the destination was dropped. `requested_at_us`: when the worker
    /// received a session's request for a recheck, in µs since 1970, if this report answers one.
    fn report(
        &self,
        destination: &str,
        status: Option<&ConnectionStatus>,
        requested_at_us: Option<i64>,
    ) -> Result<(), Self::Error>;
    /// Records a failure of the connection.
    fn record_error(&self, _destination: &str, _reason: &'static str, _detail: &str) {}

    // ---- log --------------------------------------------------------------------------------------------------------

    /// Logs a line about a destination; None: about the worker.
    fn log(&self, destination: Option<&str>, text: Arguments);
    /// Logs a failure of a step that will be tried again. Returns how long to wait, in ms. Err: the pass must end.
    fn failed(&self, error: Self::Error) -> Result<u32, Self::Error>;
}

/// Publishes the messages of one destination, on separate threads.
pub trait DestinationPublisher {
    /// Hands a batch over to the publisher's threads. Err: no room; the batch comes back.
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>>;
    /// Whether `drain` would return any event. Called often.
    fn has_events(&self) -> bool;
    /// Takes the events since the last call. After `stop` it returns the last ones.
    fn drain(&mut self) -> Vec<PublisherEvent>;
    /// Sets how many undrained confirms wake the worker. Any other event wakes it immediately.
    fn wake_after(&self, confirms: usize);
    /// Makes the publisher send nothing more and end within `limit`. Its last event says that it has.
    fn request_stop(&self, limit: Duration);
    /// The same, and waits until it has ended, no longer than `limit`.
    fn stop(&mut self, limit: Duration);
    /// Whether a certificate file has changed since the publisher started.
    fn has_new_certificates(&self) -> bool;
    /// Whether the password file has changed since the publisher started.
    fn has_new_password(&self) -> bool;
}

impl DestinationPublisher for Started {
    fn publish(&self, batch: Vec<Publication>) -> Result<(), Vec<Publication>> {
        self.publisher.try_publish(batch)
    }

    fn has_events(&self) -> bool {
        self.publisher.has_events()
    }

    fn drain(&mut self) -> Vec<PublisherEvent> {
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
    /// The runtime checked nothing.
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
    pub settings: Option<WorkerSettings>,
    /// All destinations; None = unchanged.
    pub described: Option<Vec<Described>>,
}

/// Which leases to renew, to release and to take.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LeaseChanges {
    pub renew: Vec<HeldLease>,
    pub release: Vec<HeldLease>,
    pub take: Vec<Partition>,
}

/// The workers and leases after `Runtime::tend`.
#[derive(Debug)]
pub struct Tended {
    /// The live workers, this one among them.
    pub workers: Vec<String>,
    /// The leases that this worker holds now, in order, and how long they last; None with leasing off.
    pub leased: Option<(Vec<HeldLease>, Duration)>,
}
