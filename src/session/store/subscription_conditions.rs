//! The subscriptions as a session reads them, and their conditions: user code, which runs as a role without rights,
//! restricted, in the sessions of all roles. Runs in a user's backend.

use crate::error::{UserError, internal};
use crate::pg::spi::types::TEXTOID;
use crate::pg::spi::{Param, Spi};
use crate::pg::{catalog, guc, security, text, txn};
use crate::store::statement::SavedStatement;
use outbox_core::event::{COLUMNS, ColumnKind, Event};
use outbox_core::event_filter::{EventFilter, EventFilters};
use outbox_core::session_settings::{SessionSetting, TEXTS};
use outbox_transport::kind::Kind;
use outbox_worker::DEFAULT_DESTINATION;
use pgrx::PgSqlErrorCode;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::ffi::CStr;

/// A role without any rights: conditions run in the sessions of all roles.
const READER: &CStr = c"outbox_policy";

/// A condition is planned once.
const SETTINGS: [SessionSetting; 2] = [(c"plan_cache_mode", c"force_generic_plan"), (c"jit", c"off")];

/// The subscriptions as they were read. The default destination is among them: without a subscription of its own it
/// gets every event.
pub struct Subscribed {
    filters: EventFilters,
    subscribers: Vec<Subscriber>,
}

pub struct Subscriber {
    pub destination: String,
    condition: Option<SubscriptionCondition>,
}

struct SubscriptionCondition {
    when: String,
    prepared: OnceCell<SavedStatement>,
}

impl Subscriber {
    pub fn new(destination: String, when: Option<String>) -> Self {
        let condition = when.map(|when| SubscriptionCondition {
            when,
            prepared: OnceCell::new(),
        });
        Self { destination, condition }
    }
}

impl Subscribed {
    /// A subscription outlives DROP SERVER. outbox_health reports it; no publish fails.
    pub fn new(mut all: Vec<(EventFilter, Subscriber)>) -> Self {
        all.retain(|(_, subscriber)| exists(&subscriber.destination));
        if !all
            .iter()
            .any(|(_, subscriber)| subscriber.destination == DEFAULT_DESTINATION)
        {
            all.push((
                EventFilter::default(),
                Subscriber::new(DEFAULT_DESTINATION.to_owned(), None),
            ));
        }
        all.sort_by(|(_, a), (_, b)| a.destination.cmp(&b.destination));
        let (filters, subscribers) = all.into_iter().unzip();
        Self {
            filters: EventFilters::new(filters),
            subscribers,
        }
    }

    /// Whether it takes each whole event to know its destinations.
    pub fn reads_each_event(&self) -> bool {
        let mut of_each = self.filters.of_each_event().iter();
        self.filters.read_headers() || of_each.any(|position| self.subscribers[*position].condition.is_some())
    }

    /// The destinations that an event goes to. `event` is called if it takes more than its types to know them.
    pub fn destinations<'e>(
        &self,
        (kind, aggregate_type): (&str, Option<&str>),
        event: impl Fn() -> Result<Cow<'e, Event>, UserError>,
    ) -> Result<Vec<&str>, UserError> {
        let read = self.filters.read_headers().then(&event).transpose()?;
        let headers = read.as_ref().and_then(|event| event.headers.as_deref());
        let chosen = self.filters.met(kind, aggregate_type, headers);
        let chosen: Vec<&Subscriber> = chosen.into_iter().map(|position| &self.subscribers[position]).collect();
        let mut is_met = vec![true; chosen.len()];
        if chosen.iter().any(|subscriber| subscriber.condition.is_some()) {
            let event = read.map_or_else(&event, Ok)?;
            as_reader(|| {
                for (is_met, subscriber) in is_met.iter_mut().zip(&chosen) {
                    let Subscriber { destination, condition } = subscriber;
                    if let Some(condition) = condition {
                        let when = &condition.when;
                        let detail = || format!("The condition of the subscription of \"{destination}\" is {when}.");
                        *is_met = txn::with_detail(detail, || condition.is_met(&event))?;
                    }
                }
                Ok(())
            })?;
        }
        let met = chosen.into_iter().zip(is_met).filter(|(_, is_met)| *is_met);
        Ok(met.map(|(subscriber, _)| subscriber.destination.as_str()).collect())
    }
}

fn exists(destination: &str) -> bool {
    destination == DEFAULT_DESTINATION
        || catalog::foreign_server(destination).is_some_and(|server| Kind::of_wrapper(&server.wrapper).is_some())
}

impl SubscriptionCondition {
    fn is_met(&self, event: &Event) -> Result<bool, UserError> {
        Spi::connect_mut(|client| {
            let statement = match self.prepared.get() {
                Some(statement) => statement,
                None => {
                    let sql = condition_sql(&self.when, |number| format!("${number}"));
                    let prepared = client.prepare_mut(&sql, &[TEXTOID; COLUMNS.len()])?;
                    self.prepared.get_or_init(|| prepared.into())
                }
            };
            let args = event.texts().map(Param::from);
            Ok(!client.update(&**statement, Some(1), &args)?.is_empty())
        })
        .map_err(internal)
    }
}

/// The statement that has one row if the condition holds. The line feed ends a comment in it.
fn condition_sql(when: &str, parameter: impl Fn(usize) -> String) -> String {
    let columns = COLUMNS.iter().zip(1..).map(|(column, number)| {
        let json = if column.kind == ColumnKind::Json {
            "::pg_catalog.jsonb"
        } else {
            ""
        };
        format!("{}{json} as {}", parameter(number), column.name)
    });
    let columns: Vec<String> = columns.collect();
    format!("select 1 from (select {}) event where ({when}\n)", columns.join(", "))
}

/// Runs `body` as the role that conditions run as.
fn as_reader<T>(body: impl FnOnce() -> Result<T, UserError>) -> Result<T, UserError> {
    let reader = reader()?;
    let settings = [TEXTS, &SETTINGS].concat();
    guc::with(&settings, || security::run_restricted_as(reader, body))
}

/// The role that conditions run as.
pub fn reader() -> Result<u32, UserError> {
    match catalog::role_oid(READER) {
        0 => {
            let name = text::of_c_str(READER);
            Err(UserError::new(
                PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
                format!("role \"{name}\" does not exist"),
                format!("CREATE ROLE {name} NOLOGIN; it needs no rights."),
            ))
        }
        role => Ok(role),
    }
}

/// What is wrong with a condition.
pub fn problem(when: &str) -> Option<String> {
    // Not constants: they would be folded, and a function that may not be called would not be noticed.
    let sql = condition_sql(when, |_| "(select null::pg_catalog.text)".to_owned());
    let explain = || {
        let run = || Spi::run_with_args(&format!("explain {sql}"), &[]).map_err(internal);
        as_reader(run).map_err(|error| error.message)
    };
    txn::attempt(explain).err()
}
