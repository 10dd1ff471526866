//! Every setting: its unit, range, default and one sentence. docs/settings.md explains them at length.
//!
//! SUSET settings can be set for each database (ALTER DATABASE … SET). SIGHUP settings belong to the whole server.
//! USERSET settings are what a session adds to its events.

mod checks;

use crate::pg::guc::{self, define_session_flag, reserve_prefix};
use crate::pg::text;
use checks::*;
use outbox_core::route::Template;
use outbox_core::standbys::Standbys;
use outbox_transport::described::SETTINGS;
use outbox_transport::kind::Kind;
use outbox_transport::kind::Target;
use outbox_transport::options::{Level, OptionValue, Setting};
use outbox_worker::{KnownSettings, WorkerSettings, awaited_standbys};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};
use std::ffi::{CStr, CString};

use GucContext::{Internal, Sighup as Server, Suset as Database, Userset as Session};

const COUNT: GucFlags = GucFlags::empty();
const MS: GucFlags = GucFlags::UNIT_MS;
const S: GucFlags = GucFlags::UNIT_S;

type TextSetting = GucSetting<Option<CString>>;

/// Values of outbox.on_dead.
#[derive(Clone, Copy, PartialEq, Debug, PostgresGucEnum)]
#[allow(non_camel_case_types)] // as they are written
enum OnDead {
    block,
    skip,
}

/// Values of outbox.publish_after.
#[derive(Clone, Copy, PartialEq, Debug, PostgresGucEnum)]
#[allow(non_camel_case_types)] // as they are written
enum PublishAfter {
    local,
    standby,
}

/// A value of outbox.events_retention: the same as outbox.retention.
const AS_HISTORY: i32 = -2;
/// How long the audit is kept.
const AUDIT_RETENTION_S: i32 = 365 * 86_400;

const OWN_VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no zero byte"),
};

/// Declares each setting, and the function that defines them all.
macro_rules! settings {
    ($($kind:ident $setting:ident $(: $type:ty)? = $default:expr, $($more:expr),+;)*) => {
        $(declare! { $kind $setting $(: $type)? = $default })*

        /// Defines every setting. Called by `_PG_init`.
        pub fn define() {
            $(register! { $kind $setting, $($more),+ })*
            define_options();
            reserve_prefix(c"outbox");
        }
    };
}

macro_rules! declare {
    (number $setting:ident = $default:expr) => {
        static $setting: GucSetting<i32> = GucSetting::<i32>::new($default);
    };
    (text $setting:ident = $default:expr) => {
        static $setting: TextSetting = TextSetting::new(Some($default));
    };
    (choice $setting:ident: $type:ty = $default:expr) => {
        static $setting: GucSetting<$type> = GucSetting::<$type>::new($default);
    };
    ($flag:ident $setting:ident = $default:expr) => {
        static $setting: GucSetting<bool> = GucSetting::<bool>::new($default);
    };
}

macro_rules! register {
    (number $setting:ident, $range:expr, $unit:expr, $context:expr, $name:expr, $about:expr) => {
        let range = $range;
        GucRegistry::define_int_guc(
            $name,
            $about,
            c"",
            &$setting,
            *range.start(),
            *range.end(),
            $context,
            $unit,
        );
    };
    (text $setting:ident, $check:expr, $context:expr, $name:expr, $about:expr) => {
        // SAFETY: the hooks come from check_hook!, which guards them.
        unsafe {
            GucRegistry::define_string_guc_with_hooks(
                $name, $about, c"", &$setting, $context, COUNT, $check, None, None,
            );
        }
    };
    (choice $setting:ident, $context:expr, $name:expr, $about:expr) => {
        GucRegistry::define_enum_guc($name, $about, c"", &$setting, $context, COUNT);
    };
    (flag $setting:ident, $context:expr, $name:expr, $about:expr) => {
        GucRegistry::define_bool_guc($name, $about, c"", &$setting, $context, COUNT);
    };
    (session_flag $setting:ident, $context:expr, $name:expr, $about:expr) => {
        define_session_flag($name, $about, &$setting, $context);
    };
}

// Name, default, what is allowed, who may set it, and one sentence.
settings! {
    // SQL compares it with the version of the extension. A setting, because SQL that calls a function which an older
    // library lacks would fail.
    text LIBRARY_VERSION = OWN_VERSION, None, Internal, c"outbox.library_version",
        c"The version of the library that this server runs.";
    flag ENABLED = true, Database, c"outbox.enabled",
        c"Delivers messages. Off stops delivery only; enqueue goes on.";
    flag FAST_PATH = true, Server, c"outbox.fast_path",
        c"Hands enqueued messages to the worker in shared memory at COMMIT, before they are claimed. Off: through the table only.";
    text HTTP_ALLOW = c"", Some(http_allow_hook), Database, c"outbox.http_allow",
        c"Hosts and networks that destinations may reach although they are not public: names, addresses, 10.1.0.0/16.";
    number WORKERS = 1, 0..=16, COUNT, Server, c"outbox.workers",
        c"Workers for each database that has the extension.";
    number TIME_SLICE = 10_000, 100..=3_600_000, MS, Server, c"outbox.worker_time_slice",
        c"With more databases than worker slots: how long one with messages is served before another's turn.";
    number PARTITION_COUNT = 16, 1..=1024, COUNT, Database, c"outbox.partition_count",
        c"Partitions of a database; taken over at CREATE EXTENSION.";
    flag LEASING = true, Database, c"outbox.leasing",
        c"Workers share partitions by leases and keep order per key; taken over at CREATE EXTENSION.";
    number LEASE_TTL = 15, 2..=3600, S, Database, c"outbox.lease_ttl",
        c"How long a lease lasts unless renewed.";
    number LEASE_RENEW = 6, 1..=1800, S, Database, c"outbox.lease_renew",
        c"How often leases are renewed; at most half of lease_ttl is used.";
    number HEARTBEAT_TTL = 20, 2..=3600, S, Database, c"outbox.heartbeat_ttl",
        c"How long a worker counts as alive after its last heartbeat.";
    choice PUBLISH_AFTER: PublishAfter = PublishAfter::local, Database, c"outbox.publish_after",
        c"local: a message is sent once its commit is on this server's disk. standby: once standbys have it too.";
    text STANDBY_NAMES = c"", Some(standby_names_hook), Database, c"outbox.standby_names",
        c"With publish_after = standby: the application_names of the standbys, or patterns such as db-*, separated by commas.";
    number STANDBY_QUORUM = 0, 0..=1000, COUNT, Database, c"outbox.standby_quorum",
        c"With publish_after = standby: how many of standby_names must have a commit. 0 = all, if no name is a pattern.";
    number STANDBY_TIMEOUT = -1, -1..=i32::MAX, MS, Database, c"outbox.standby_timeout",
        c"With publish_after = standby: how long messages wait for standbys that are behind. -1 = without a limit.";
    number BATCH_SIZE = 1000, 1..=10_000, COUNT, Database, c"outbox.batch_size",
        c"Messages claimed at once, at most.";
    number IDLE_BACKOFF = 1000, 10..=1000, MS, Database, c"outbox.idle_backoff",
        c"Longest wait of a worker that is not woken.";
    number CLAIM_TTL = 60, 1..=86_400, S, Database, c"outbox.claim_ttl",
        c"With leasing off: how long a claim holds a message at least. Workers renew their claims.";
    number RETRY_BACKOFF = 1000, 1..=86_400_000, MS, Database, c"outbox.retry_backoff",
        c"Delay before the second attempt; doubles with each further one.";
    number RETRY_BACKOFF_MAX = 600_000, 1..=86_400_000, MS, Database, c"outbox.retry_backoff_max",
        c"Longest delay between attempts.";
    number MAX_ATTEMPTS = 15, 1..=i32::MAX, COUNT, Database, c"outbox.max_attempts",
        c"Attempts before a message is a dead letter.";
    number MAX_PENDING = 0, 0..=i32::MAX, COUNT, Database, c"outbox.max_pending",
        c"Most pending messages of a destination; enqueue refuses more. 0 = no limit.";
    number MAX_RATE = 0, 0..=i32::MAX, COUNT, Database, c"outbox.max_rate",
        c"Most messages a second to a destination, of all workers together. 0 = no limit.";
    number MAX_IN_FLIGHT = 1000, 1..=2_000, COUNT, Database, c"outbox.max_in_flight",
        c"Most unconfirmed messages of a worker at a broker.";
    choice ON_DEAD: OnDead = OnDead::block, Database, c"outbox.on_dead",
        c"After a dead letter, its key waits (block) or continues (skip).";
    number RETENTION = 30 * 86_400, -1..=i32::MAX, S, Database, c"outbox.retention",
        c"How long ended messages are kept in the history; -1 = forever.";
    number EVENTS_RETENTION = AS_HISTORY, AS_HISTORY..=i32::MAX, S, Database, c"outbox.events_retention",
        c"How long events without waiting or dead messages are kept, from created_at; -1 = forever, -2 = as outbox.retention.";
    number DEAD_RETENTION = -1, -1..=i32::MAX, S, Database, c"outbox.dead_retention",
        c"How long dead letters are kept before they are discarded; -1 = forever.";
    number INBOX_RETENTION = 7 * 86_400, -1..=i32::MAX, S, Database, c"outbox.inbox_retention",
        c"How long the ids of received messages are remembered; -1 = forever.";
    // A database alone may not set it: all of its events would be lost without a notice.
    session_flag REPLAYING = false, Database, c"outbox.replaying",
        c"This session replays old data: it publishes and enqueues nothing.";
    number CONFIRM_TIMEOUT = 30_000, 100..=3_600_000, MS, Database, c"outbox.confirm_timeout",
        c"Longest wait for a publisher confirm; then the connection is closed.";
    text WORKER_ROLE = c"outbox_worker", Some(worker_role_hook), Server, c"outbox.worker_role",
        c"The role the workers run as; never a superuser.";
    text DATABASES = c"", None, Server, c"outbox.databases",
        c"Databases to serve, separated by commas. Empty = all that have the extension.";
    text IDENTITY = c"", None, Server, c"outbox.identity",
        c"Name of this server; a database that was adopted under another name is not delivered.";
    text ACTOR = c"", Some(actor_hook), Session, c"outbox.actor",
        c"The actor of events without one.";
    text CORRELATION_ID = c"", Some(correlation_id_hook), Session, c"outbox.correlation_id",
        c"The correlation id of events without one.";
    text METADATA = c"", Some(metadata_hook), Session, c"outbox.metadata",
        c"The metadata of events without any: a JSON object.";
    text HEADERS = c"", Some(headers_hook), Session, c"outbox.headers",
        c"The headers of events without any: a JSON object.";
}

/// The settings that are options of the default destination.
fn options() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().chain(Kind::of_settings().settings)
}

fn define_options() {
    for (setting, hook) in options().zip(OPTION_HOOKS) {
        let value: &TextSetting = Box::leak(Box::new(TextSetting::new(Some(setting.default))));
        // SAFETY: the hooks come from check_hook!, which guards them.
        unsafe {
            GucRegistry::define_string_guc_with_hooks(
                setting.name,
                setting.about,
                c"",
                value,
                Database,
                COUNT,
                *hook,
                None,
                None,
            );
        }
    }
}

/// The settings as the server has them now.
struct CurrentSettings;

impl KnownSettings for CurrentSettings {
    fn text(&self, name: &str) -> String {
        guc::value(&format!("outbox.{name}"))
    }
}

/// The settings of a worker in the server, read at one moment.
pub struct Settings {
    /// The settings of every worker.
    pub worker: WorkerSettings,
    pub lease_ttl_s: i32,
    pub heartbeat_ttl_s: i32,
    pub claim_ttl_s: i32,
    pub retention: Retention,
}

/// How long ended messages are kept, in seconds; None = forever.
#[derive(Clone, PartialEq, Debug)]
pub struct Retention {
    pub history: Option<i32>,
    pub events: Option<i32>,
    pub dead: Option<i32>,
    pub audit: Option<i32>,
    pub inbox: Option<i32>,
}

impl Settings {
    pub fn snapshot() -> Self {
        let lease_ttl_s = LEASE_TTL.get();
        Self {
            worker: checked(WorkerSettings::read(&CurrentSettings, own_options())),
            lease_ttl_s,
            heartbeat_ttl_s: HEARTBEAT_TTL.get().max(lease_ttl_s),
            claim_ttl_s: CLAIM_TTL.get(),
            retention: Retention::snapshot(),
        }
    }
}

impl Retention {
    fn snapshot() -> Self {
        let finite = |seconds: i32| (seconds >= 0).then_some(seconds);
        let history = finite(RETENTION.get());
        Self {
            history,
            events: match EVENTS_RETENTION.get() {
                AS_HISTORY => history,
                seconds => finite(seconds),
            },
            dead: finite(DEAD_RETENTION.get()),
            audit: Some(AUDIT_RETENTION_S),
            inbox: finite(INBOX_RETENTION.get()),
        }
    }
}

/// The options of the default destination that only its kind has, and its certificates.
fn own_options() -> Vec<(Level, String, OptionValue)> {
    let text = |setting: &Setting| guc::value(setting.name.to_str().unwrap_or_default());
    options().filter_map(|setting| setting.value(text(setting))).collect()
}

fn checked<T>(read: Result<T, String>) -> T {
    read.expect("the check hooks let nothing else pass")
}

/// The standbys that must have a commit before its message is sent; None = the primary alone.
pub fn standbys() -> Option<Standbys> {
    checked(awaited_standbys(&CurrentSettings))
}

/// The default destination, and the defaults of other destinations.
pub fn default_target() -> Target {
    checked(outbox_worker::default_target(&CurrentSettings, own_options()))
}

/// Enqueued messages may reach their worker through shared memory.
pub fn fast_path() -> bool {
    FAST_PATH.get()
}

/// This session publishes and enqueues nothing.
pub fn replaying() -> bool {
    REPLAYING.get()
}

/// The template of the address of messages to the default destination, as it is set now.
pub fn address_template() -> Template {
    let kind = Kind::of_settings();
    let mut settings = kind.settings.iter();
    let setting = settings.find(|setting| Some(setting.option) == kind.address);
    setting.map_or_else(Template::default, |setting| {
        let text = guc::value(setting.name.to_str().unwrap_or_default());
        Template::parse(&text).expect("the check hook let nothing else pass")
    })
}

/// What a session adds to all its events; a value in the event itself wins.
pub struct Context {
    pub actor: Option<String>,
    pub correlation_id: Option<String>,
    pub metadata: Option<String>,
    pub headers: Option<String>,
}

impl Context {
    pub fn snapshot() -> Self {
        // Text that goes into a message is refused here if it cannot be converted: no character is replaced.
        let said = |setting: &TextSetting| {
            let value = setting.get().filter(|value| !value.is_empty())?;
            Some(text::from_server(value.to_bytes()).unwrap_or_else(|why| why.raise()))
        };
        Self {
            actor: said(&ACTOR),
            correlation_id: said(&CORRELATION_ID),
            metadata: said(&METADATA),
            headers: said(&HEADERS),
        }
    }
}

/// The settings of the launcher.
pub struct ServerSettings {
    pub workers: u32,
    pub slice_ms: u64,
    pub worker_role: String,
    databases: String,
}

impl ServerSettings {
    pub fn snapshot() -> Self {
        Self {
            workers: WORKERS.get() as u32,
            slice_ms: TIME_SLICE.get() as u64,
            worker_role: string(&WORKER_ROLE),
            databases: string(&DATABASES),
        }
    }

    pub fn serves(&self, database: &str) -> bool {
        let mut names = self
            .databases
            .split(',')
            .map(|name| name.trim().trim_matches('"'))
            .filter(|n| !n.is_empty())
            .peekable();
        names.peek().is_none() || names.any(|name| name == database)
    }
}

/// Settings that a session may set without any effect, in addition to those that are options: only workers read them.
const OF_WORKERS: [&str; 14] = [
    "outbox.enabled",
    "outbox.http_allow",
    "outbox.confirm_timeout",
    "outbox.lease_ttl",
    "outbox.lease_renew",
    "outbox.heartbeat_ttl",
    "outbox.batch_size",
    "outbox.idle_backoff",
    "outbox.max_in_flight",
    "outbox.max_rate",
    "outbox.publish_after",
    "outbox.standby_names",
    "outbox.standby_quorum",
    "outbox.standby_timeout",
];

/// Whether a SET of this setting has no effect. `name` is in lower case.
pub fn is_read_by_workers_only(name: &str) -> bool {
    OF_WORKERS.contains(&name) || options().any(|setting| setting.name.to_bytes() == name.as_bytes())
}

// ---- plumbing -------------------------------------------------------------------------------------------------------

fn string(setting: &TextSetting) -> String {
    setting.get().map(|value| text::of_c_str(&value)).unwrap_or_default()
}
