//! A worker in the server, for one database: the loop around the passes of crates/worker, its start and its end. Runs
//! on the main thread of a background worker; the publisher threads are in crates/transport.

use super::context::WorkerContext;
use super::runtime::{DEADLINE, ServerRuntime, store_session_defaults};
use super::store::Store;
use super::transaction::{self, in_transaction, remember_table};
use crate::config::Settings;
use crate::pg::bgworker;
use crate::pg::latch::WaitSet;
use crate::pg::txn::{self, Durability};
use crate::pg::{catalog, signals, text};
use crate::shared::workers::{self, NoEntry, id_of};
use crate::shared::{databases, launcher, lifecycle, sessions, transactions};
use outbox_core::engine::Sharing;
use outbox_core::session_settings;
use outbox_transport::{Waker, give_way};
use outbox_worker::{Described, FinishTimeouts, Pass, Worker};
use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

/// The limits of a worker's end: a fast shutdown must be complete within 2 s, whatever the broker does.
const LAST: FinishTimeouts = FinishTimeouts {
    outcomes: Duration::from_millis(700),
    close: Duration::from_millis(200),
    settles: Duration::from_millis(300),
    settles_before_close: false,
};
const LAST_MS: i32 = 1_700;

pub fn main(database: u32, number: u32) -> ! {
    // Read before the session begins: the session then has these settings or newer ones.
    let known_defaults = databases::database(database).map_or(0, |database| database.session_defaults.load(SeqCst));
    let slot = enter(database, number);
    give_way();
    let mut worker = start(number, slot, known_defaults);
    let waits = WaitSet::new(worker.runtime().waker().fd());
    bgworker::on_exit(stop_publishing);
    signals::end_in_order();
    loop {
        let wait_ms = match worker.pass() {
            Ok(Pass::Wait(wait_ms)) => wait_ms,
            Ok(Pass::NewSession | Pass::Left) => finish(&mut worker, &waits, 0),
            Err(failure) => {
                transaction::show(&failure);
                pgrx::warning!("outbox {}: {}", id_of(number), failure.message);
                0
            }
        };
        if !signals::is_shutdown_requested() {
            let wait_ms = worker.arm_wake(wait_ms, None);
            waits.wait(i64::from(wait_ms));
        }
        if signals::is_shutdown_requested() {
            finish(&mut worker, &waits, 1);
        }
        signals::check_for_interrupts();
        if signals::reload_if_requested() {
            let settings = worker.runtime().reload();
            worker.take_settings(settings);
        }
    }
}

/// The first steps of a process that serves a database: it takes an entry, then connects. The process ends if it gets
/// no entry.
pub fn enter(database: u32, number: u32) -> &'static workers::WorkerEntry {
    signals::install();
    let slot = match lifecycle::worker_starts(database, number) {
        Ok(slot) => slot,
        Err(NoEntry::Taken(pid)) => {
            pgrx::log!(
                "outbox {}: already runs as process {pid}; this process ends",
                id_of(number)
            );
            signals::exit(0)
        }
        Err(NoEntry::Full) => signals::exit(0), // the launcher logs this
    };
    if sessions::is_vacated(database) {
        signals::exit(0);
    }
    bgworker::connect(database.into(), launcher::worker_role().into());
    session_settings::settings()
        .chain(session_settings::IN_THE_SERVER.iter().copied())
        .for_each(txn::set_for_session);
    slot
}

/// What a worker reads before its first pass.
struct OpenedDatabase {
    store: Store,
    sharing: Sharing,
    /// As of now, and whether the session may have begun with others.
    session_defaults: String,
    may_have_changed: bool,
    described: Vec<Described>,
    not_adopted: Option<String>,
}

fn start(number: u32, slot: &'static workers::WorkerEntry, known_defaults: u64) -> Worker<ServerRuntime> {
    let id = id_of(number);
    let is_first = known_defaults == 0;
    let opened = in_transaction(c"outbox: start", Durability::Relaxed, || {
        text::prepare();
        let store = Store::open(&id)?;
        let sharing = store.sharing()?;
        remember_table(store.settings_table_oid()?);
        let session_defaults = store.session_defaults()?;
        let may_have_changed = is_first && !catalog::settings_are_unchanged();
        let described = store.destinations()?;
        store.refresh_source()?;
        if let Some(database) = databases::my_database()
            && !database.adopted.is_set()
        {
            transactions::adopt(&store.prepared_transactions()?);
            database.adopted.set();
            // A transaction may have been committed before it was found, while another worker was already reading.
            databases::rewind_all(catalog::my_database(), 1);
        }
        let not_adopted = store.not_adopted()?;
        Ok(OpenedDatabase {
            store,
            sharing,
            session_defaults,
            may_have_changed,
            described,
            not_adopted,
        })
    });
    let opened = opened
        .inspect_err(transaction::show)
        .map_err(|failure| failure.message)
        .and_then(|opened| Ok((opened, Waker::new().map_err(|error| error.to_string())?)));
    let (opened, waker) = match opened {
        Ok(opened) => opened,
        Err(why) => {
            pgrx::warning!("outbox {id}: cannot start: {why}");
            signals::exit(1)
        }
    };
    let hash = store_session_defaults(&opened.session_defaults);
    if opened.may_have_changed {
        // A session that begins now has these settings or newer ones.
        launcher::notify();
        signals::exit(0)
    }
    let session_defaults = (is_first || known_defaults == hash).then_some(opened.session_defaults);
    pgrx::log!("outbox {id}: started");
    let settings = Settings::snapshot();
    let for_worker = settings.worker.clone();
    let context = WorkerContext {
        id,
        store: opened.store,
        database: databases::my_database(),
        slot,
        settings: RefCell::new(settings),
        row_token: slot.new_row_token(),
        wal_position: Cell::new(0),
        destinations: RefCell::default(),
        changes_seen: Cell::new(0), // the first refresh reads the settings in any case
    };
    let runtime = ServerRuntime::new(context, opened.sharing, waker, session_defaults);
    let mut worker = Worker::new(runtime, opened.sharing, for_worker, opened.not_adopted);
    worker.describe(opened.described);
    // The launcher may now start the other workers, and maintenance, which counts the messages of the destinations
    // found here.
    if let Some(database) = databases::my_database() {
        database.set_extension(true);
        launcher::notify();
    }
    worker
}

/// The orderly end: settles what the brokers confirm within a moment, releases the rest, and gives the leases back.
fn finish(worker: &mut Worker<ServerRuntime>, waits: &WaitSet, code: i32) -> ! {
    signals::end_within(LAST_MS);
    let ended = worker.finish(&LAST, &mut |worker, left| {
        waits.wait(left.as_millis() as i64);
        worker.runtime().waker().clear();
    });
    let id = outbox_worker::Runtime::id(worker.runtime());
    match ended {
        Ok(()) => pgrx::log!("outbox {id}: ended"),
        Err(failure) => pgrx::log!(
            "outbox {id}: ended, but could not release its leases, which will expire: {}",
            failure.message
        ),
    }
    signals::exit(code)
}

/// Ends the publishing deadline before the other workers notice that this worker has ended, because its publisher
/// threads run on for a moment.
unsafe extern "C-unwind" fn stop_publishing(_code: i32, _arg: pgrx::pg_sys::Datum) {
    DEADLINE.end();
}
