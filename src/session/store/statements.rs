//! The statements of a session, each planned once per backend, and the tables that they use. Runs in a user's backend.

use crate::pg::spi::OwnedPreparedStatement;
use crate::pg::trigger::Call;
use crate::pg::{catalog, xact};
use pgrx::spi::quote_identifier;
use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;

/// The statements of one schema, planned once per backend.
pub struct Statements {
    /// Every transaction that enqueues locks it before it uses a table: so DROP EXTENSION waits for the transaction,
    /// without a deadlock.
    extension: u32,
    /// Locked next, before any other table: outbox_configure() locks it first, too.
    pub settings: u32,
    pub schema: String,
    /// The owner of the tables. The function belongs to another role: see 90_privileges.sql.
    pub owner: u32,
    pub event_table: u32,
    pub outbox_table: u32,
    pub waiting_table: u32,
    pub dead_table: u32,
    /// By whether the message is scheduled, and whether it is the only one.
    pub insert: [[OnceCell<OwnedPreparedStatement>; 2]; 2],
    pub aggregates: OnceCell<OwnedPreparedStatement>,
    /// By whether it returns the event.
    pub event: [OnceCell<OwnedPreparedStatement>; 2],
    pub events: OnceCell<OwnedPreparedStatement>,
    pub fast_path: OnceCell<OwnedPreparedStatement>,
    /// The partition count of this database, as far as this session knows. The statement that inserts reports a
    /// different one.
    pub partitioner: RefCell<Option<Partitioner>>,
}

/// A function that gives the partition of a key, and the partition count that it gets as an argument.
#[derive(Clone, PartialEq)]
pub struct Partitioner {
    pub name: String,
    pub count: i16,
}

thread_local! {
    /// By the function that was called: after DROP and CREATE EXTENSION it has another OID.
    static STATEMENTS: RefCell<HashMap<u32, &'static Statements>> = RefCell::new(HashMap::new());
}

/// They are never freed: the server must not be called while an error unwinds, nor when the process ends.
pub fn statements(fcinfo: Call) -> &'static Statements {
    let function = catalog::called_function(fcinfo);
    STATEMENTS.with_borrow_mut(|known| {
        let make = || {
            // Not the schema of the function, which may be outbox_internal.
            let extension = catalog::extension(c"outbox");
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
                insert: Default::default(),
                aggregates: OnceCell::new(),
                event: Default::default(),
                events: OnceCell::new(),
                fast_path: OnceCell::new(),
                partitioner: RefCell::default(),
            }))
        };
        *known.entry(function).or_insert_with(make)
    })
}

impl Statements {
    /// Keeps the extension from being dropped, and its partitions from being changed, before this transaction ends.
    pub fn hold(&self) {
        xact::refuse_if_read_only();
        catalog::hold_extension_with(self.extension);
        catalog::hold_table(self.settings);
    }
}
