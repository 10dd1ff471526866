//! The statements of a session, each planned once per backend, and the tables that they use. Runs in a user's backend.

use crate::error::{UserError, internal};
use crate::pg::spi::{OwnedPreparedStatement, SpiResult};
use crate::pg::trigger::Call;
use crate::pg::{catalog, xact};
use crate::session::store::subscription_conditions::Subscribed;
use crate::shared::sessions;
use crate::store::source::Source;
use pgrx::spi::quote_identifier;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

/// The statements of one schema, planned once per backend.
pub struct Statements {
    /// Every transaction that enqueues locks it before it uses a table: so DROP EXTENSION waits for the transaction,
    /// without a deadlock.
    extension: u32,
    /// outbox_configure() and outbox_source_set() hold it against all others.
    pub settings: u32,
    pub schema: String,
    /// The owner of the tables. The function belongs to another role: see 90_privileges.sql.
    pub owner: u32,
    pub event_table: u32,
    pub outbox_table: u32,
    pub waiting_table: u32,
    pub dead_table: u32,
    pub subscription_table: u32,
    /// By whether they may take the fast path, and whether there is only one.
    pub insert_events: [[Prepared; 2]; 2],
    /// Of an event whose id may exist, by whether it may take the fast path.
    pub insert_event_once: [Prepared; 2],
    pub read_seq: Prepared,
    /// By whether they may take the fast path.
    pub read_events: [Prepared; 2],
    /// Reads whole events, for the conditions of subscriptions.
    pub read_whole_events: Prepared,
    pub subscribed: RefCell<Option<KeptSubscriptions>>,
    pub read_source: Prepared,
    /// The source that was read last, and `table::changes` then.
    pub source: RefCell<Option<(u64, Rc<Source>)>>,
    /// By whether they are scheduled, and whether there is only one.
    pub insert_messages: [[Prepared; 2]; 2],
}

/// The subscriptions of destinations that exist, as they were read last.
pub struct KeptSubscriptions {
    /// `table::changes` then.
    pub changes: u64,
    /// The transaction whose snapshot they are of, if that is older than they are.
    pub transaction: Option<u32>,
    pub subscribed: Option<Rc<Subscribed>>,
}

#[derive(Default)]
pub struct Prepared(OnceCell<OwnedPreparedStatement>);

impl Prepared {
    pub fn get_or(
        &self,
        prepare: impl FnOnce() -> SpiResult<OwnedPreparedStatement>,
    ) -> Result<&OwnedPreparedStatement, UserError> {
        if let Some(statement) = self.0.get() {
            return Ok(statement);
        }
        let prepared = prepare().map_err(internal)?;
        Ok(self.0.get_or_init(|| prepared))
    }
}

thread_local! {
    /// By the function that was called: after DROP and CREATE EXTENSION it has another OID. All functions of an
    /// extension share one, so that a session plans a statement once.
    static STATEMENTS: RefCell<HashMap<u32, &'static Statements>> = RefCell::new(HashMap::new());
}

/// They are never freed: the server must not be called while an error unwinds, nor when the process ends.
pub fn statements(fcinfo: Call) -> &'static Statements {
    of_function(catalog::called_function(fcinfo))
}

/// Those of a function of the extension.
pub fn of_function(function: u32) -> &'static Statements {
    STATEMENTS.with_borrow_mut(|known| {
        if let Some(statements) = known.get(&function) {
            return *statements;
        }
        // Not the schema of the function, which may be outbox_internal.
        let extension = catalog::extension(c"outbox");
        known.retain(|_, statements| statements.extension == extension.oid);
        let make = || {
            let table = |name| catalog::table_in(extension.schema, name);
            let settings = table(c"outbox_settings");
            &*Box::leak(Box::new(Statements {
                extension: extension.oid,
                settings,
                schema: quote_identifier(catalog::schema_name(extension.schema)),
                owner: catalog::owner_of_table(settings),
                event_table: table(c"outbox_events"),
                outbox_table: table(c"outbox"),
                waiting_table: table(c"outbox_waiting"),
                dead_table: table(c"outbox_dead"),
                subscription_table: table(c"outbox_subscriptions"),
                insert_events: Default::default(),
                insert_event_once: Default::default(),
                read_seq: Default::default(),
                read_events: Default::default(),
                read_whole_events: Default::default(),
                subscribed: Default::default(),
                read_source: Default::default(),
                source: Default::default(),
                insert_messages: Default::default(),
            }))
        };
        let shared = known.values().next().copied();
        let statements = shared.unwrap_or_else(make);
        known.insert(function, statements);
        statements
    })
}

impl Statements {
    /// Locks all that a call writes, in the order that sql/src/10_tables.sql has. So nothing that is read afterwards
    /// changes while it waits. It also keeps the extension from being dropped, and its partitions and its source from
    /// being changed, before this transaction ends.
    pub fn lock(&self, writes_waiting: bool) {
        xact::refuse_if_read_only();
        sessions::begin_to_own(); // here, as its error says what to do, and that of the next statement does not
        catalog::lock_extension_with(self.extension);
        catalog::lock_to_write(self.event_table);
        catalog::lock_table(self.settings);
        catalog::lock_to_write(self.outbox_table);
        if writes_waiting {
            catalog::lock_to_write(self.waiting_table);
        }
    }
}
