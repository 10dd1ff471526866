//! Calls the user's function that makes the bodies of a destination (option `body`). A worker calls it after a claim, in the
//! same transaction. A session checks whether the function can be called.
//!
//! The function is user code: it runs as its owner, who is not a superuser, restricted and read-only. The owner of the
//! destination must have the rights of the function's owner; otherwise a role could run another role's function with that
//! role's rights. A worker limits its time. An error is a failed attempt of that message only.

use super::statement::{self, SavedStatement};
use crate::error::UserError;
use crate::limits::{BODY_MAX_BYTES, STATEMENT_TIMEOUT_MS};
use crate::pg::catalog::{self, Function};
use crate::pg::spi::{Spi, SpiError, SpiResult, SpiTupleTable};
use crate::pg::text::Unreadable;
use crate::pg::{guc, security, signals, txn};
use outbox_core::engine::Claimed;
use outbox_core::envelope::{self, Refusal};
use outbox_core::message::{Body, Outcome};
use outbox_transport::BodyFunction;
use pgrx::spi::quote_identifier;
use pgrx::{PgBuiltInOids, PgOid, PgSqlErrorCode};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CStr;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The longest time for one body.
const BODY_MS: i32 = 1_000;
/// After this time a worker continues with the bodies that it has, because other destinations wait.
const PATIENCE: Duration = Duration::from_millis(300);
/// After a body that took longer than that, the destination rests this many times as long, so that the others are served.
const REST_FACTOR: u32 = 3;
/// How long a worker waits before it tries an unusable function again.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(2);
/// The most events of one statement.
const CHUNK_ROWS: usize = 100;
const CHUNK_BYTES: usize = 1 << 20;

/// The settings for the function: those of a session of its owner, except that names need their schema. Values have the same
/// text in every session. A locked table delays the message.
const SETTINGS: [(&CStr, &CStr); 12] = [
    (c"search_path", c"pg_catalog, pg_temp"),
    (c"row_security", c"on"), // a worker's session has it off
    (c"lock_timeout", c"500ms"),
    (c"enable_seqscan", c"on"), // a worker's session has these otherwise
    (c"enable_hashjoin", c"on"),
    (c"enable_mergejoin", c"on"),
    (c"plan_cache_mode", c"auto"),
    (c"timezone", c"UTC"),
    (c"datestyle", c"ISO, MDY"),
    (c"intervalstyle", c"postgres"),
    (c"bytea_output", c"hex"),
    (c"extra_float_digits", c"1"),
];

/// A body, or the outcome of its message.
type Made = Result<Body, Outcome>;

/// The functions of a worker's destinations, each planned once.
#[derive(Default)]
pub struct Bodies {
    makers: RefCell<HashMap<String, Rc<Maker>>>,
    /// Until when a destination rests, and whether that is because its function cannot be used.
    rests: RefCell<HashMap<String, (Instant, bool)>>,
}

struct Maker {
    function: Function,
    /// The function as SQL, with its schema.
    name: String,
    statement: SavedStatement,
}

impl Bodies {
    /// The time until messages of a destination may be claimed, in ms; None = now.
    pub fn rests_ms(&self, destination: &str) -> Option<u32> {
        self.rest_of(destination).map(|(ms, _)| ms)
    }

    /// Whether no message of the destination could be claimed just now.
    pub fn is_unusable(&self, destination: &str) -> bool {
        self.rest_of(destination).is_some_and(|(_, is_unusable)| is_unusable)
    }

    fn rest_of(&self, destination: &str) -> Option<(u32, bool)> {
        let (until, is_unusable) = self.rests.borrow().get(destination).copied()?;
        let left = until.checked_duration_since(Instant::now())?;
        Some((left.as_millis() as u32 + 1, is_unusable))
    }

    fn rest(&self, destination: &str, time: Duration, is_unusable: bool) {
        let until = Instant::now() + time;
        (self.rests.borrow_mut()).insert(destination.to_owned(), (until, is_unusable));
    }

    /// Refuses a claim while the function cannot be used. Otherwise each attempt would write the claim and roll it back.
    pub fn check_before_claim(&self, destination: &str, body: &BodyFunction) -> Result<(), UserError> {
        self.maker(destination, body).map(drop)
    }

    /// Makes the bodies of claimed messages, in their order. It stops after `bytes_max`, or when its time is over, and returns
    /// the rest. Err: the function cannot be used for any event.
    pub fn give(
        &self,
        destination: &str,
        body: &BodyFunction,
        rows: &mut Vec<Claimed>,
        bytes_max: usize,
    ) -> Result<Vec<Claimed>, UserError> {
        let mut events = Vec::with_capacity(rows.len());
        for row in rows.iter_mut() {
            let Ok(event) = &row.event else { continue };
            match envelope::whole(event, row.pointer.key.as_deref()) {
                Ok(whole) => events.push(whole),
                Err(Refusal { message: reason, .. }) => row.event = Err(Outcome::Unsendable { reason }),
            }
        }
        if events.is_empty() {
            return Ok(Vec::new());
        }
        let mut made = self.make(destination, body, &events, bytes_max)?.into_iter();
        for (place, row) in rows.iter_mut().enumerate() {
            let Ok(event) = &mut row.event else { continue };
            match made.next() {
                Some(Ok(body)) => event.body = Some(body),
                Some(Err(outcome)) => row.event = Err(outcome),
                None => return Ok(rows.split_off(place)),
            }
        }
        Ok(Vec::new())
    }

    /// Makes as many bodies as the time allows; at least one.
    fn make(
        &self,
        destination: &str,
        body: &BodyFunction,
        events: &[String],
        bytes_max: usize,
    ) -> Result<Vec<Made>, UserError> {
        let maker = self.maker(destination, body)?;
        let mut making = Making {
            maker: &maker,
            bytes_left: bytes_max,
            began: Instant::now(),
            begun: Instant::now(),
            slowest: Duration::ZERO,
            made: Vec::with_capacity(events.len()),
        };
        let mut ended = Ok(());
        while ended.is_ok() && making.made.len() < events.len() && !making.is_enough() {
            ended = making.go_on(chunk(&events[making.made.len()..]));
        }
        txn::limit_statements(STATEMENT_TIMEOUT_MS);
        if making.slowest >= PATIENCE {
            self.rest(destination, making.slowest * REST_FACTOR, false);
        }
        let Making { made, .. } = making;
        ended
            .map(|()| made)
            .map_err(|why| self.unusable(destination, broken(&maker.name, &why)))
    }

    /// The function of a destination, as of now.
    fn maker(&self, destination: &str, body: &BodyFunction) -> Result<Rc<Maker>, UserError> {
        let found = function_of(destination, body).map_err(|why| self.unusable(destination, why))?;
        let known = self.makers.borrow().get(destination).map(Rc::clone);
        let name = in_sql(body);
        if let Some(known) = known.filter(|known| known.function == found && known.name == name) {
            return Ok(known);
        }
        let maker = Maker::new(found, name).map_err(|why| self.unusable(destination, why))?;
        let maker = Rc::new(maker);
        (self.makers.borrow_mut()).insert(destination.to_owned(), Rc::clone(&maker));
        Ok(maker)
    }

    /// Records that a function cannot be used, and returns the error to log. The worker tries again later.
    fn unusable(&self, destination: &str, why: UserError) -> UserError {
        self.rest(destination, TRY_AGAIN_AFTER, true);
        UserError {
            message: format!("no body for destination {destination}: {}", why.message),
            ..why
        }
    }
}

impl Maker {
    fn new(function: Function, name: String) -> Result<Self, UserError> {
        let cast = match function.returns == PgBuiltInOids::BYTEAOID.value().to_u32() {
            true => "",
            false => "::pg_catalog.text",
        };
        let sql = format!("select {name}(e.event::pg_catalog.jsonb){cast} from pg_catalog.unnest($1) e (event)");
        let prepare = || {
            Spi::connect_mut(|client| {
                let types = [PgOid::from(PgBuiltInOids::TEXTARRAYOID)];
                Ok(client.prepare_mut(sql.as_str(), &types)?.keep().into())
            })
            .map_err(|error: SpiError| error.to_string())
        };
        let prepared = txn::attempt(|| as_owner(function.owner, prepare));
        Ok(Self {
            statement: prepared.map_err(|why| broken(&name, &why))?,
            function,
            name,
        })
    }

    /// Opens a cursor for these events, and returns its name.
    fn open(&self, events: &[String]) -> Result<String, String> {
        // try_open_cursor_mut would assign a transaction id, which a standby cannot. The statement is prepared so that it takes
        // a new snapshot all the same: the function sees data that was committed with the event.
        Spi::connect(|client| {
            let cursor = client.try_open_cursor(&self.statement, &[events.to_vec().into()])?;
            Ok(cursor.detach_into_name())
        })
        .map_err(|error: SpiError| error.to_string())
    }

    /// The next body. Read in a separate SPI session, whose end frees it.
    fn next(&self, cursor: &str) -> Result<Made, String> {
        Spi::connect(|client| statement::fetch(client, cursor, 1, |row| self.body(row.first())))
            .map_err(|error: SpiError| error.to_string())
    }

    fn body(&self, row: SpiTupleTable) -> SpiResult<Made> {
        type Is = PgBuiltInOids;
        let is = |oid: Is| self.function.returns == oid.value().to_u32();
        let body = match () {
            () if is(Is::BYTEAOID) => row.get_one().map(|body| body.map(Body::Bytes)),
            () if is(Is::TEXTOID) => row.get_one().map(|body| body.map(Body::Text)),
            () => row.get_one().map(|body| body.map(Body::Json)),
        };
        let body = match body {
            Ok(body) => body,
            Err(SpiError::Unreadable { why, .. }) => {
                let reason = match why {
                    Unreadable::TooLong(bytes) => {
                        format!(
                            "{} returned {bytes} bytes, which exceeds the limit of {} MiB",
                            self.name,
                            BODY_MAX_BYTES >> 20
                        )
                    }
                    why => format!("the result of {} cannot be sent: {why}", self.name),
                };
                return Ok(Err(Outcome::Unsendable { reason }));
            }
            Err(error) => return Err(error),
        };
        let reason = match &body {
            None => format!("{} returned NULL: there is no body to send", self.name),
            Some(body) if body.as_bytes().len() as i64 > BODY_MAX_BYTES => format!(
                "{} returned {} bytes, which exceeds the limit of {} MiB",
                self.name,
                body.as_bytes().len(),
                BODY_MAX_BYTES >> 20
            ),
            Some(_) => String::new(),
        };
        Ok(body.filter(|_| reason.is_empty()).ok_or(Outcome::Unsendable { reason }))
    }
}

/// The bodies of one claim.
struct Making<'a> {
    maker: &'a Maker,
    bytes_left: usize,
    began: Instant,
    /// When the current body was begun.
    begun: Instant,
    /// The time of the slowest body.
    slowest: Duration,
    made: Vec<Made>,
}

impl Making<'_> {
    fn is_enough(&self) -> bool {
        !self.made.is_empty() && (self.bytes_left == 0 || self.began.elapsed() >= PATIENCE)
    }

    /// The next bodies, by one statement. The error of an event ends it; other errors are returned.
    fn go_on(&mut self, events: &[String]) -> Result<(), String> {
        let is_open = Cell::new(false);
        let ended = txn::attempt(|| {
            as_owner(self.maker.function.owner, || {
                txn::limit_statements(BODY_MS);
                let cursor = self.maker.open(events)?;
                is_open.set(true);
                for _ in events {
                    self.begun = Instant::now();
                    txn::limit_statements(BODY_MS);
                    let made = self.maker.next(&cursor)?;
                    self.slowest = self.slowest.max(self.begun.elapsed());
                    let bytes = made.as_ref().map_or(0, |body| body.as_bytes().len());
                    self.bytes_left = self.bytes_left.saturating_sub(bytes);
                    self.made.push(made);
                    if self.is_enough() {
                        break;
                    }
                }
                Spi::connect(|client| statement::close(client, &cursor)).map_err(|error| error.to_string())
            })
        });
        match ended {
            Err(reason) if is_open.get() && !signals::is_shutdown_requested() => {
                self.slowest = self.slowest.max(self.begun.elapsed());
                self.made.push(Err(Outcome::Failed { reason }));
                Ok(())
            }
            ended => ended,
        }
    }
}

/// The first events, as many as one statement gets.
fn chunk(events: &[String]) -> &[String] {
    let mut bytes = 0;
    let fits = |event: &&String| {
        bytes += event.len();
        bytes <= CHUNK_BYTES
    };
    let count = events.iter().take(CHUNK_ROWS).take_while(fits).count();
    &events[..count.max(1)]
}

/// Why the bodies of a destination cannot be made; None = they can.
pub fn problem(destination: &str, body: &BodyFunction) -> Option<UserError> {
    let tried = function_of(destination, body).and_then(|function| {
        let maker = Maker::new(function, in_sql(body))?;
        let begin = || {
            let cursor = maker.open(&[])?;
            Spi::connect(|client| statement::close(client, &cursor)).map_err(|error| error.to_string())
        };
        txn::attempt(|| as_owner(function.owner, begin)).map_err(|why| broken(&maker.name, &why))
    });
    tried.err()
}

fn function_of(destination: &str, body: &BodyFunction) -> Result<Function, UserError> {
    match super::server_of(destination) {
        Some(server) => check(body, server.owner),
        None => Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_OBJECT,
            "its server is gone",
            "CREATE SERVER makes it again.",
        )),
    }
}

/// The function, if a destination of this role may use it.
pub fn check(body: &BodyFunction, server_owner: u32) -> Result<Function, UserError> {
    type Is = PgBuiltInOids;
    let name = format!("{}(jsonb)", in_sql(body));
    let Some(function) = catalog::function(&body.schema, &body.name, Is::JSONBOID.value().to_u32()) else {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_UNDEFINED_FUNCTION,
            format!("function {name} does not exist"),
            "Create it with one argument, the event as jsonb; or take the option body from the server.",
        ));
    };
    if catalog::is_superuser(function.owner) {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("function {name} belongs to a superuser"),
            format!("It runs as its owner: ALTER FUNCTION {name} OWNER TO a role that may do no more than it needs."),
        ));
    }
    if !catalog::has_rights_of(server_owner, function.owner) {
        let [of_server, of_function] =
            [server_owner, function.owner].map(|role| quote_identifier(catalog::role_name(role)));
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("{of_server}, who owns the server, may not act as {of_function}, who owns function {name}"),
            format!("It runs as its owner: GRANT {of_function} TO {of_server}, or let one role own both."),
        ));
    }
    let (types, words) = match body.as_json {
        true => (&[Is::JSONBOID, Is::JSONOID][..], "jsonb or json, as its format needs"),
        false => (
            &[Is::TEXTOID, Is::JSONBOID, Is::JSONOID, Is::BYTEAOID][..],
            "text, jsonb, json or bytea",
        ),
    };
    if !function.is_plain || types.iter().all(|oid| oid.value().to_u32() != function.returns) {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH,
            format!("function {name} does not return {words}"),
            "Let it return one value of such a type.",
        ));
    }
    Ok(function)
}

fn broken(name: &str, why: &str) -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("function {name}(jsonb) cannot be called: {why}"),
        "Fix it, or grant its owner the right: the function runs as its owner.",
    )
}

fn in_sql(body: &BodyFunction) -> String {
    format!("{}.{}", quote_identifier(&body.schema), quote_identifier(&body.name))
}

/// Runs `body` with the role and the settings of the function. It can write nothing.
fn as_owner<T>(owner: u32, body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    txn::read_only(|| guc::with(&SETTINGS, || security::run_restricted_as(owner, body)))
}
