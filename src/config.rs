//! Every setting: its unit, range, default and one sentence. docs/settings.md explains them at length.
//!
//! SUSET settings can be set for each database (ALTER DATABASE … SET). SIGHUP settings belong to the whole server.
//! USERSET settings are what a session adds to its events.

mod checks;

use crate::pg::guc::{define_session_flag, reserve_prefix};
use crate::pg::text;
use checks::*;
use outbox_core::route::{Format, Statics, Template};
use outbox_core::settle::{Ordering, RetryPolicy, Rules};
use outbox_core::standbys::{self, Standbys};
use outbox_transport::target::{
    Amqp, CONNECT_TIMEOUT_MAX, Certificates, Credential, Limits, NamedFile, Protocol, Target,
};
use outbox_transport::{AllowList, ExchangeType};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting, PostgresGucEnum};
use std::ffi::{CStr, CString};
use std::time::Duration;

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

static ENABLED: GucSetting<bool> = GucSetting::<bool>::new(true);
static FAST_PATH: GucSetting<bool> = GucSetting::<bool>::new(true);
static URL: TextSetting = TextSetting::new(Some(c""));
static PASSWORD_FILE: TextSetting = TextSetting::new(Some(c""));
static TLS_CA_FILE: TextSetting = TextSetting::new(Some(c""));
static TLS_CERT_FILE: TextSetting = TextSetting::new(Some(c""));
static TLS_KEY_FILE: TextSetting = TextSetting::new(Some(c""));
static HTTP_ALLOW: TextSetting = TextSetting::new(Some(c""));
static EXCHANGE: TextSetting = TextSetting::new(Some(c"outbox"));
static EXCHANGE_TYPE: TextSetting = TextSetting::new(Some(c""));
static ROUTING_KEY: TextSetting = TextSetting::new(Some(c"{aggregate_type}.{operation}"));
static WORKERS: GucSetting<i32> = GucSetting::<i32>::new(1);
static TIME_SLICE: GucSetting<i32> = GucSetting::<i32>::new(10_000);
static PARTITION_COUNT: GucSetting<i32> = GucSetting::<i32>::new(16);
static LEASING: GucSetting<bool> = GucSetting::<bool>::new(true);
static LEASE_TTL: GucSetting<i32> = GucSetting::<i32>::new(15);
static LEASE_RENEW: GucSetting<i32> = GucSetting::<i32>::new(6);
static HEARTBEAT_TTL: GucSetting<i32> = GucSetting::<i32>::new(20);
static BATCH_SIZE: GucSetting<i32> = GucSetting::<i32>::new(1000);
static IDLE_BACKOFF: GucSetting<i32> = GucSetting::<i32>::new(1000);
static CLAIM_TTL: GucSetting<i32> = GucSetting::<i32>::new(60);
static RETRY_BACKOFF: GucSetting<i32> = GucSetting::<i32>::new(1000);
static RETRY_BACKOFF_MAX: GucSetting<i32> = GucSetting::<i32>::new(600_000);
static MAX_ATTEMPTS: GucSetting<i32> = GucSetting::<i32>::new(15);
static MAX_RATE: GucSetting<i32> = GucSetting::<i32>::new(0);
static MAX_IN_FLIGHT: GucSetting<i32> = GucSetting::<i32>::new(1000);
static MAX_PENDING: GucSetting<i32> = GucSetting::<i32>::new(0);
static ON_DEAD: GucSetting<OnDead> = GucSetting::<OnDead>::new(OnDead::block);
static RETENTION: GucSetting<i32> = GucSetting::<i32>::new(30 * 86_400);
static EVENTS_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(AS_HISTORY);
static DEAD_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(-1);
static INBOX_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(7 * 86_400);
static REPLAYING: GucSetting<bool> = GucSetting::<bool>::new(false);
static CONFIRM_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(30_000);
static WORKER_ROLE: TextSetting = TextSetting::new(Some(c"outbox_worker"));
static IDENTITY: TextSetting = TextSetting::new(Some(c""));
static DATABASES: TextSetting = TextSetting::new(Some(c""));
static PUBLISH_AFTER: GucSetting<PublishAfter> = GucSetting::<PublishAfter>::new(PublishAfter::local);
static STANDBY_NAMES: TextSetting = TextSetting::new(Some(c""));
static STANDBY_QUORUM: GucSetting<i32> = GucSetting::<i32>::new(0);
static STANDBY_TIMEOUT: GucSetting<i32> = GucSetting::<i32>::new(-1);
static LIBRARY_VERSION: TextSetting = TextSetting::new(Some(OWN_VERSION));
static ACTOR: TextSetting = TextSetting::new(Some(c""));
static CORRELATION_ID: TextSetting = TextSetting::new(Some(c""));
static METADATA: TextSetting = TextSetting::new(Some(c""));
static HEADERS: TextSetting = TextSetting::new(Some(c""));

/// A value of outbox.events_retention: the same as outbox.retention.
const AS_HISTORY: i32 = -2;
/// How long the audit is kept.
const AUDIT_RETENTION_S: i32 = 365 * 86_400;

const OWN_VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no zero byte"),
};

/// Defines every setting. Called by `_PG_init`.
pub fn define() {
    use GucContext::{Sighup as Server, Suset as Database, Userset as Session};
    // SQL compares it with the version of the extension. A setting, because SQL that calls a function which an older
    // library lacks would fail.
    text(
        c"outbox.library_version",
        c"The version of the library that this server runs.",
        &LIBRARY_VERSION,
        GucContext::Internal,
        None,
    );
    flag(
        c"outbox.enabled",
        c"Delivers messages. Off stops delivery only; enqueue goes on.",
        &ENABLED,
        Database,
    );
    flag(
        c"outbox.fast_path",
        c"Hands enqueued messages to the worker in shared memory at COMMIT, before they are claimed. Off: through the table only.",
        &FAST_PATH,
        Server,
    );
    text(
        c"outbox.url",
        c"The broker: amqp://[user@]host[:port][,host[:port]...][/vhost], or amqps:// for TLS. Carries no password.",
        &URL,
        Database,
        Some(url_hook),
    );
    text(
        c"outbox.password_file",
        c"File that holds the broker's password: absolute path, mode 0600, owned by the server's user.",
        &PASSWORD_FILE,
        Database,
        Some(password_file_hook),
    );
    text(
        c"outbox.tls_ca_file",
        c"With amqps: PEM file of the CAs that may have issued the broker's certificate. Empty: the system's.",
        &TLS_CA_FILE,
        Database,
        Some(tls_ca_file_hook),
    );
    text(
        c"outbox.tls_cert_file",
        c"With amqps: PEM file of the client certificate that the broker is shown, with its chain.",
        &TLS_CERT_FILE,
        Database,
        Some(tls_cert_file_hook),
    );
    text(
        c"outbox.tls_key_file",
        c"PEM file of the client certificate's key: mode 0600, owned by the server's user, not encrypted.",
        &TLS_KEY_FILE,
        Database,
        Some(tls_key_file_hook),
    );
    text(
        c"outbox.http_allow",
        c"Hosts and networks that destinations may reach although they are not public: names, addresses, 10.1.0.0/16.",
        &HTTP_ALLOW,
        Database,
        Some(http_allow_hook),
    );
    text(
        c"outbox.exchange",
        c"The exchange that messages are published to.",
        &EXCHANGE,
        Database,
        Some(exchange_hook),
    );
    text(c"outbox.exchange_type", c"direct, fanout, topic or headers: declare the exchange durable of that type. Empty: only check that it exists.", &EXCHANGE_TYPE, Database, Some(exchange_type_hook));
    text(
        c"outbox.routing_key",
        c"Template of the routing key: {aggregate_type} {operation} (lower case), {type} {aggregate_id} {key} {partition} {header:NAME}, {key|fallback}.",
        &ROUTING_KEY,
        Database,
        Some(routing_key_hook),
    );
    number(
        c"outbox.workers",
        c"Workers for each database that has the extension.",
        &WORKERS,
        0..=16,
        Server,
        GucFlags::empty(),
    );
    number(
        c"outbox.worker_time_slice",
        c"With more databases than worker slots: how long one with messages is served before another's turn.",
        &TIME_SLICE,
        100..=3_600_000,
        Server,
        GucFlags::UNIT_MS,
    );
    number(
        c"outbox.partition_count",
        c"Partitions of a database; taken over at CREATE EXTENSION.",
        &PARTITION_COUNT,
        1..=1024,
        Database,
        GucFlags::empty(),
    );
    flag(
        c"outbox.leasing",
        c"Workers share partitions by leases and keep order per key; taken over at CREATE EXTENSION.",
        &LEASING,
        Database,
    );
    number(
        c"outbox.lease_ttl",
        c"How long a lease lasts unless renewed.",
        &LEASE_TTL,
        2..=3600,
        Database,
        GucFlags::UNIT_S,
    );
    number(
        c"outbox.lease_renew",
        c"How often leases are renewed; at most half of lease_ttl is used.",
        &LEASE_RENEW,
        1..=1800,
        Database,
        GucFlags::UNIT_S,
    );
    number(
        c"outbox.heartbeat_ttl",
        c"How long a worker counts as alive after its last heartbeat.",
        &HEARTBEAT_TTL,
        2..=3600,
        Database,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_enum_guc(
        c"outbox.publish_after",
        c"local: a message is sent once its commit is on this server's disk. standby: once standbys have it too.",
        c"",
        &PUBLISH_AFTER,
        Database,
        GucFlags::empty(),
    );
    text(
        c"outbox.standby_names",
        c"With publish_after = standby: the application_names of the standbys, separated by commas.",
        &STANDBY_NAMES,
        Database,
        Some(standby_names_hook),
    );
    number(
        c"outbox.standby_quorum",
        c"With publish_after = standby: how many of standby_names must have a commit. 0 = all.",
        &STANDBY_QUORUM,
        0..=1000,
        Database,
        GucFlags::empty(),
    );
    number(
        c"outbox.standby_timeout",
        c"With publish_after = standby: how long messages wait for standbys that are behind. -1 = without a limit.",
        &STANDBY_TIMEOUT,
        -1..=i32::MAX,
        Database,
        GucFlags::UNIT_MS,
    );
    number(
        c"outbox.batch_size",
        c"Messages claimed at once, at most.",
        &BATCH_SIZE,
        1..=10_000,
        Database,
        GucFlags::empty(),
    );
    number(
        c"outbox.idle_backoff",
        c"Longest wait of a worker that is not woken.",
        &IDLE_BACKOFF,
        10..=1000,
        Database,
        GucFlags::UNIT_MS,
    );
    number(
        c"outbox.claim_ttl",
        c"With leasing off: how long a claim holds a message at least. Workers renew their claims.",
        &CLAIM_TTL,
        1..=86_400,
        Database,
        GucFlags::UNIT_S,
    );
    number(
        c"outbox.retry_backoff",
        c"Delay before the second attempt; doubles with each further one.",
        &RETRY_BACKOFF,
        1..=86_400_000,
        Database,
        GucFlags::UNIT_MS,
    );
    number(
        c"outbox.retry_backoff_max",
        c"Longest delay between attempts.",
        &RETRY_BACKOFF_MAX,
        1..=86_400_000,
        Database,
        GucFlags::UNIT_MS,
    );
    number(
        c"outbox.max_attempts",
        c"Attempts before a message is a dead letter.",
        &MAX_ATTEMPTS,
        1..=i32::MAX,
        Database,
        GucFlags::empty(),
    );
    number(
        c"outbox.max_pending",
        c"Most pending messages of a destination; enqueue refuses more. 0 = no limit.",
        &MAX_PENDING,
        0..=i32::MAX,
        Database,
        GucFlags::empty(),
    );
    number(
        c"outbox.max_rate",
        c"Most messages a second to a destination, of all workers together. 0 = no limit.",
        &MAX_RATE,
        0..=i32::MAX,
        Database,
        GucFlags::empty(),
    );
    number(
        c"outbox.max_in_flight",
        c"Most unconfirmed messages of a worker at a broker.",
        &MAX_IN_FLIGHT,
        1..=2_000,
        Database,
        GucFlags::empty(),
    );
    GucRegistry::define_enum_guc(
        c"outbox.on_dead",
        c"After a dead letter, its key waits (block) or continues (skip).",
        c"",
        &ON_DEAD,
        Database,
        GucFlags::empty(),
    );
    number(
        c"outbox.retention",
        c"How long ended messages are kept in the history; -1 = forever.",
        &RETENTION,
        -1..=i32::MAX,
        Database,
        GucFlags::UNIT_S,
    );
    number(
        c"outbox.events_retention",
        c"How long events are kept after their last message ended; -1 = forever, -2 = as outbox.retention.",
        &EVENTS_RETENTION,
        AS_HISTORY..=i32::MAX,
        Database,
        GucFlags::UNIT_S,
    );
    number(
        c"outbox.dead_retention",
        c"How long dead letters are kept before they are discarded; -1 = forever.",
        &DEAD_RETENTION,
        -1..=i32::MAX,
        Database,
        GucFlags::UNIT_S,
    );
    number(
        c"outbox.inbox_retention",
        c"How long the ids of received messages are remembered; -1 = forever.",
        &INBOX_RETENTION,
        -1..=i32::MAX,
        Database,
        GucFlags::UNIT_S,
    );
    // A database alone may not set it: all of its events would be lost without a notice.
    define_session_flag(
        c"outbox.replaying",
        c"This session replays old data: it publishes and enqueues nothing.",
        &REPLAYING,
        Database,
    );
    number(
        c"outbox.confirm_timeout",
        c"Longest wait for a publisher confirm; then the connection is closed.",
        &CONFIRM_TIMEOUT,
        100..=3_600_000,
        Database,
        GucFlags::UNIT_MS,
    );
    text(
        c"outbox.worker_role",
        c"The role the workers run as; never a superuser.",
        &WORKER_ROLE,
        Server,
        Some(worker_role_hook),
    );
    text(
        c"outbox.databases",
        c"Databases to serve, separated by commas. Empty = all that have the extension.",
        &DATABASES,
        Server,
        None,
    );
    text(
        c"outbox.identity",
        c"Name of this server; a database that was adopted under another name is not delivered.",
        &IDENTITY,
        Server,
        None,
    );
    text(
        c"outbox.actor",
        c"The actor of events without one.",
        &ACTOR,
        Session,
        Some(actor_hook),
    );
    text(
        c"outbox.correlation_id",
        c"The correlation id of events without one.",
        &CORRELATION_ID,
        Session,
        Some(correlation_id_hook),
    );
    text(
        c"outbox.metadata",
        c"The metadata of events without any: a JSON object.",
        &METADATA,
        Session,
        Some(metadata_hook),
    );
    text(
        c"outbox.headers",
        c"The headers of events without any: a JSON object.",
        &HEADERS,
        Session,
        Some(headers_hook),
    );
    reserve_prefix(c"outbox");
}

/// The settings of a worker in the server, read at one moment.
pub struct Settings {
    /// The settings of every worker.
    pub worker: outbox_worker::WorkerSettings,
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
        let (lease_ttl_s, target) = (LEASE_TTL.get(), default_target());
        Self {
            worker: outbox_worker::WorkerSettings {
                enabled: ENABLED.get(),
                rules: target.rules,
                limits: target.limits,
                target: Ok(target),
                standbys: standbys(),
                lease_renew: Duration::from_millis((LEASE_RENEW.get() as u64 * 1000).min(lease_ttl_s as u64 * 500)),
                batch_size: BATCH_SIZE.get() as u32,
                idle_backoff_ms: IDLE_BACKOFF.get() as u32,
            },
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

/// The file at the path in `setting`, which is called `named_by`; None = the setting is empty.
fn file(setting: &TextSetting, named_by: &'static str) -> Option<NamedFile> {
    let path = string(setting);
    (!path.is_empty()).then_some(NamedFile { named_by, path })
}

/// The standbys that must have a commit before its message is sent; None = the primary alone.
pub fn standbys() -> Option<Standbys> {
    (PUBLISH_AFTER.get() == PublishAfter::standby).then(|| {
        Standbys::new(
            standbys::names(&string(&STANDBY_NAMES)).expect("the check hook let nothing else pass"),
            STANDBY_QUORUM.get() as usize,
            u64::try_from(STANDBY_TIMEOUT.get()).ok().map(Duration::from_millis),
        )
    })
}

/// The default destination, and the defaults of other destinations.
pub fn default_target() -> Target {
    Target {
        transport: Protocol::Amqp(Amqp {
            url: string(&URL),
            user: None,
            password: file(&PASSWORD_FILE, "outbox.password_file").map(Credential::File),
            exchange: outbox_core::message::Text::shared(&string(&EXCHANGE)),
            exchange_type: ExchangeType::parse(&string(&EXCHANGE_TYPE)).expect("the check hook let nothing else pass"),
            routing_key: routing_template(),
            max_in_flight: MAX_IN_FLIGHT.get() as usize,
        }),
        certificates: Certificates {
            ca: file(&TLS_CA_FILE, "outbox.tls_ca_file").map(Credential::File),
            cert: file(&TLS_CERT_FILE, "outbox.tls_cert_file").map(Credential::File),
            key: file(&TLS_KEY_FILE, "outbox.tls_key_file").map(Credential::File),
        },
        allow: AllowList::parse(&string(&HTTP_ALLOW)).expect("the check hook let nothing else pass"),
        format: Format::default(),
        body: None,
        statics: Statics::default(),
        rules: Rules {
            retry: RetryPolicy {
                max_attempts: MAX_ATTEMPTS.get() as u32,
                base_ms: RETRY_BACKOFF.get() as u64,
                max_ms: RETRY_BACKOFF_MAX.get().max(RETRY_BACKOFF.get()) as u64,
            },
            dead_blocks: ON_DEAD.get() == OnDead::block,
            ordering: Ordering::Key,
        },
        limits: Limits {
            max_pending: MAX_PENDING.get() as u32,
            max_rate: MAX_RATE.get() as u32,
        },
        connect_timeout: CONNECT_TIMEOUT_MAX.min(millis(&CONFIRM_TIMEOUT)),
        confirm_timeout: millis(&CONFIRM_TIMEOUT),
    }
}

/// Enqueued messages may reach their worker through shared memory.
pub fn fast_path() -> bool {
    FAST_PATH.get()
}

/// This session publishes and enqueues nothing.
pub fn replaying() -> bool {
    REPLAYING.get()
}

/// The template of the routing key as it is set now.
pub fn routing_template() -> Template {
    Template::parse(&string(&ROUTING_KEY)).expect("the check hook let nothing else pass")
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

/// Settings that a session may set without any effect: only workers read them.
const OF_WORKERS: [&str; 22] = [
    "outbox.enabled",
    "outbox.url",
    "outbox.password_file",
    "outbox.tls_ca_file",
    "outbox.tls_cert_file",
    "outbox.tls_key_file",
    "outbox.http_allow",
    "outbox.exchange",
    "outbox.exchange_type",
    "outbox.routing_key",
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
    OF_WORKERS.contains(&name)
}

// ---- plumbing -------------------------------------------------------------------------------------------------------

fn string(setting: &TextSetting) -> String {
    setting.get().map(|value| text::of_c_str(&value)).unwrap_or_default()
}

fn millis(setting: &GucSetting<i32>) -> Duration {
    Duration::from_millis(setting.get() as u64)
}

fn flag(name: &'static CStr, about: &'static CStr, setting: &'static GucSetting<bool>, context: GucContext) {
    GucRegistry::define_bool_guc(name, about, c"", setting, context, GucFlags::empty());
}

fn number(
    name: &'static CStr,
    about: &'static CStr,
    setting: &'static GucSetting<i32>,
    range: std::ops::RangeInclusive<i32>,
    context: GucContext,
    unit: GucFlags,
) {
    GucRegistry::define_int_guc(name, about, c"", setting, *range.start(), *range.end(), context, unit);
}

fn text(
    name: &'static CStr,
    about: &'static CStr,
    setting: &'static TextSetting,
    context: GucContext,
    check: pgrx::pg_sys::GucStringCheckHook,
) {
    // SAFETY: the hooks come from check_hook!, which guards them.
    unsafe {
        GucRegistry::define_string_guc_with_hooks(
            name,
            about,
            c"",
            setting,
            context,
            GucFlags::empty(),
            check,
            None,
            None,
        );
    }
}
