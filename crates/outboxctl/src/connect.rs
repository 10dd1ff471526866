//! Opens a session with the database as psql does: with the same options, connection strings, variables, files and
//! defaults.

mod args;
mod conninfo;
mod passfile;
mod prompt;
mod service;
mod target;
mod tls;

pub use args::ConnectArgs;

use crate::failure::{Code, Failure, with_sources};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use target::{ConnectTarget, ServerAddress, SessionWanted, SslMode, Surroundings};
use tokio::task::{AbortHandle, JoinHandle};
use tokio_postgres::config::{Host, SslMode as Negotiation};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config};
use tokio_postgres_rustls::MakeRustlsConnect;

/// What each session begins with. A pooler would give a session with these settings to the next client of the
/// application, so they are no statements: it refuses them, or the mark is missing.
///
/// Statements name the schema of the extension (`qualified()`). Calls cast their arguments: other roles may create
/// functions in that schema, and Postgres would call one that matches better. With millions of messages the planner
/// overestimates the rows: JIT compiles for 0.7 s what runs for 0.01 s.
const OPTIONS: &str = "-c search_path=pg_catalog,pg_temp -c jit=off -c outboxctl.session=on";
const NO_POOLER: &str = "outboxctl needs a session of its own: connect to the server itself, not to a pooler.";

/// A session, with the facts about its server and database.
pub struct Session {
    pub client: Client,
    pub server_version: String,
    pub database: String,
    /// The extension, if this database has it.
    pub extension: Option<InstalledExtension>,
    stop: Stop,
}

/// What the first statement of a session shows.
struct SessionFacts {
    server_version: String,
    database: String,
    extension: Option<InstalledExtension>,
}

/// The version of the extension, and the schema in which it was created.
pub struct InstalledExtension {
    pub version: String,
    pub schema: String,
}

/// Cancels the statement of a session, from another task.
#[derive(Clone)]
pub struct Stop {
    token: tokio_postgres::CancelToken,
    tls: MakeRustlsConnect,
    connection: AbortHandle,
}

impl Stop {
    /// Cancels the running statement, like Ctrl-C in psql. The result of the statement shows whether the cancel came in
    /// time.
    pub async fn now(&self) {
        let _ = self.token.cancel_query(self.tls.clone()).await;
    }

    /// Closes the connection of a session whose server does not answer.
    pub fn cut(&self) {
        self.connection.abort();
    }
}

/// Opens a session with a database that has the extension in a compatible version. Notices of the server are dropped.
pub async fn connect_session(args: &ConnectArgs) -> Result<Session, Failure> {
    checked(connect(args, None).await?)
}

/// Opens a session like [`connect_session`]. Without connect_timeout each address has `limit` to answer.
pub async fn connect_session_within(args: &ConnectArgs, limit: Duration) -> Result<Session, Failure> {
    checked(connect(args, Some(limit)).await?)
}

/// Opens a session, whether or not the database has the extension.
pub async fn connect_anywhere(args: &ConnectArgs) -> Result<Session, Failure> {
    connect(args, None).await
}

fn checked(session: Session) -> Result<Session, Failure> {
    match &session.extension {
        None => Err(Failure::new(
            Code::Incompatible,
            format!("database {:?} does not have the extension outbox", session.database),
        )
        .hint("Run CREATE EXTENSION outbox there, or choose another database with -d.")),
        Some(extension) if !is_compatible(&extension.version, env!("CARGO_PKG_VERSION")) => Err(Failure::new(
            Code::Incompatible,
            format!(
                "the extension outbox in database {:?} has version {}, but this program has version {}",
                session.database,
                extension.version,
                env!("CARGO_PKG_VERSION")
            ),
        )
        .hint("Use an outboxctl of the same version, or ALTER EXTENSION outbox UPDATE.")),
        Some(_) => Ok(session),
    }
}

/// Whether the versions have the same SQL interface. Before 1.0 each minor version may change it, afterwards each major
/// version.
fn is_compatible(extension: &str, program: &str) -> bool {
    fn series(version: &str) -> Option<(&str, Option<&str>)> {
        let mut parts = version.split('.');
        let major = parts.next()?;
        Some((major, parts.next().filter(|_| major == "0")))
    }
    series(extension) == series(program)
}

async fn connect(args: &ConnectArgs, limit: Option<Duration>) -> Result<Session, Failure> {
    let mut target = target_of(args)?;
    if let (None, Some(limit)) = (target.config.get_connect_timeout(), limit) {
        target.config.connect_timeout(limit);
    }
    // The program asks only once, and only before its first session: `serve` and `top` open more while they show
    // something else.
    static TYPED: OnceLock<String> = OnceLock::new();
    static HAS_BEGUN: AtomicBool = AtomicBool::new(false);
    let question = format!("Password for user {}: ", target.config.get_user().unwrap_or_default());
    if args.ask_password && TYPED.get().is_none() {
        let _ = TYPED.set(prompt::password(&question)?);
    }
    if let Some(typed) = TYPED.get() {
        target.config.password(typed);
    }
    let may_ask =
        !(args.no_password || HAS_BEGUN.load(Relaxed)) && target.config.get_password().is_none() && prompt::possible();
    let session = match open(&target).await {
        Err(ConnectRefusal {
            next: AfterRefusal::Password,
            ..
        }) if may_ask => {
            let typed = prompt::password(&question)?;
            target.config.password(&typed);
            let session = open(&target).await.map_err(|refusal| refusal.failure)?;
            let _ = TYPED.set(typed);
            session
        }
        opened => opened.map_err(|refusal| refusal.failure)?,
    };
    HAS_BEGUN.store(true, Relaxed);
    Ok(session)
}

/// The names of a database, as [`ConnectTarget::names`].
pub fn names(args: &ConnectArgs) -> Result<[String; 3], Failure> {
    Ok(target_of(args)?.names())
}

/// Where and how to connect, in the environment of this process.
fn target_of(args: &ConnectArgs) -> Result<ConnectTarget, Failure> {
    let around = Surroundings {
        variable: &|name| std::env::var(name).ok(),
        read: &|path| std::fs::read_to_string(path),
        exists: &|path| path.exists(),
        home: std::env::home_dir().filter(|home| !home.as_os_str().is_empty()),
        os_user: whoami::username().map_err(|error| error.to_string()),
    };
    target::target(args, &around)
}

/// Why there is no session with a host.
struct ConnectRefusal {
    failure: Failure,
    next: AfterRefusal,
    /// Whether another attempt with or without TLS may succeed: the server refused this one, or TLS failed.
    depends_on_tls: bool,
}

/// What to try after a refusal.
#[derive(PartialEq)]
enum AfterRefusal {
    Host,
    /// The server asks for a password. The user may type one.
    Password,
    /// The server refused the session. Like libpq, the program then tries no other host.
    Nothing,
}

impl From<Failure> for ConnectRefusal {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            next: AfterRefusal::Host,
            depends_on_tls: false,
        }
    }
}

/// Tries the hosts one after the other.
async fn open(target: &ConnectTarget) -> Result<Session, ConnectRefusal> {
    let passes: &[SessionWanted] = match target.session {
        SessionWanted::PreferStandby => &[SessionWanted::Standby, SessionWanted::Any],
        _ => std::slice::from_ref(&target.session),
    };
    let mut failures: Vec<Failure> = Vec::new();
    for wanted in passes {
        for host in &target.hosts {
            let addresses = match within(target, host, addresses(host)).await {
                Ok(addresses) => addresses,
                Err(refusal) => {
                    failures.push(refusal.failure);
                    continue;
                }
            };
            for address in &addresses {
                match within(target, address, open_address(target, address, *wanted)).await {
                    Err(refusal) if refusal.next == AfterRefusal::Host => failures.push(refusal.failure),
                    opened => return opened,
                }
            }
        }
    }
    let last = failures.pop();
    let mut last = last.unwrap_or_else(|| Failure::new(Code::CannotConnect, "there is no server to connect to"));
    let mut before: Vec<String> = failures.into_iter().map(|failure| failure.message).collect();
    before.dedup();
    before.retain(|message| *message != last.message);
    before.splice(0..0, last.detail.take());
    last.detail = Some(before.join("\n")).filter(|detail| !detail.is_empty());
    Err(last.into())
}

/// The addresses of a host. Like libpq, the program treats each as a host.
async fn addresses(host: &ServerAddress) -> Result<Vec<ServerAddress>, ConnectRefusal> {
    let (Host::Tcp(name), None) = (&host.host, host.address) else {
        return Ok(vec![host.clone()]);
    };
    let found = tokio::net::lookup_host((name.as_str(), host.port)).await;
    let found = found.map_err(|error| cannot_connect(host, &error.to_string()))?;
    Ok(found
        .map(|found| ServerAddress {
            address: Some(found.ip()),
            ..host.clone()
        })
        .collect())
}

/// Runs an attempt within connect_timeout. The driver limits only its TCP connect, but a server that accepts a
/// connection may say nothing more. A dropped attempt closes its connection.
async fn within<T>(
    target: &ConnectTarget,
    address: &ServerAddress,
    attempt: impl Future<Output = Result<T, ConnectRefusal>>,
) -> Result<T, ConnectRefusal> {
    let Some(limit) = target.config.get_connect_timeout() else {
        return attempt.await;
    };
    let ended = tokio::time::timeout(*limit, attempt).await;
    ended.unwrap_or_else(|_| {
        let failure = cannot_connect(address, &format!("no session within {} s", limit.as_secs()));
        Err(failure
            .hint("Check that the server answers, or raise connect_timeout (PGCONNECT_TIMEOUT).")
            .into())
    })
}

fn cannot_connect(address: &ServerAddress, why: &str) -> Failure {
    Failure::new(Code::CannotConnect, format!("{}: {why}", endpoint_in_words(address)))
}

/// Tries one address, with and without TLS as sslmode allows.
async fn open_address(
    target: &ConnectTarget,
    address: &ServerAddress,
    wanted: SessionWanted,
) -> Result<Session, ConnectRefusal> {
    let (first, second) = match (&address.host, target.tls.mode) {
        (Host::Unix(_), _) | (_, SslMode::Disable) => (Negotiation::Disable, None),
        (_, SslMode::Allow) => (Negotiation::Disable, Some(Negotiation::Require)),
        (_, SslMode::Prefer) => (Negotiation::Require, Some(Negotiation::Disable)),
        (_, SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull) => (Negotiation::Require, None),
    };
    let refusal = match open_once(target, address, first, wanted).await {
        Err(refusal) if refusal.depends_on_tls => refusal,
        opened => return opened,
    };
    let Some(second) = second else {
        return Err(refusal);
    };
    open_once(target, address, second, wanted).await.map_err(|mut last| {
        let before = refusal.failure.message;
        if before != last.failure.message && !before.contains(tls::NOT_SUPPORTED) {
            let first = if first == Negotiation::Disable {
                "without TLS"
            } else {
                "with TLS"
            };
            last.failure.detail = Some(format!("The attempt {first} failed first: {before}"));
        }
        last
    })
}

async fn open_once(
    target: &ConnectTarget,
    address: &ServerAddress,
    negotiation: Negotiation,
    wanted: SessionWanted,
) -> Result<Session, ConnectRefusal> {
    let tls = MakeRustlsConnect::new(tls::config(
        Some(&target.tls).filter(|_| negotiation != Negotiation::Disable),
    )?);
    let connected = config(target, address, negotiation).connect(tls.clone()).await;
    let (client, mut connection) = connected.map_err(|error| refusal(error, address))?;
    let begun = tokio::select! {
        begun = begin(&client, target, wanted) => begun,
        Err(error) = &mut connection => Err(error.into()),
    };
    let begun = begun.map_err(|failure| Failure {
        code: Code::CannotConnect,
        message: format!("{}: {}", endpoint_in_words(address), failure.message),
        ..failure
    })?;
    let connection = tokio::spawn(async move { _ = connection.await });
    let stop = Stop {
        token: client.cancel_token(),
        tls,
        connection: connection.abort_handle(),
    };
    remember(connection);
    Ok(Session {
        client,
        server_version: begun.server_version,
        database: begun.database,
        extension: begun.extension,
        stop,
    })
}

/// The tasks that speak with a server, until their sessions have ended.
fn connections() -> MutexGuard<'static, Vec<JoinHandle<()>>> {
    static CONNECTIONS: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());
    CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember(task: JoinHandle<()>) {
    let mut connections = connections();
    connections.retain(|task| !task.is_finished());
    connections.push(task);
}

/// Waits until the sessions that are no longer used have ended, for at most 200 ms. If the program ends first, the
/// server logs a lost connection.
pub async fn end_sessions() {
    let ending = std::mem::take(&mut *connections());
    let all = async {
        for task in ending {
            _ = task.await;
        }
    };
    _ = tokio::time::timeout(Duration::from_millis(200), all).await;
}

fn refusal(error: tokio_postgres::Error, address: &ServerAddress) -> ConnectRefusal {
    let text = with_sources(&error);
    let is_refused = error.as_db_error().is_some();
    // A server that starts, stops or recovers has not refused the session.
    let is_final = is_refused && error.code() != Some(&SqlState::CANNOT_CONNECT_NOW);
    let needs_password = !is_refused && text.contains("password missing");
    let mut failure = Failure::from(error);
    failure.code = Code::CannotConnect;
    if needs_password {
        failure.message = "the server asks for a password, but none is given".into();
        failure = failure.hint("Put it into ~/.pgpass (mode 0600), or into the file that PGPASSFILE names.");
    } else if text.contains("unsupported startup parameter") {
        failure = failure.hint(NO_POOLER);
    } else if failure.hint.is_none() {
        failure.hint = tls::hint(&text).map(str::to_owned);
    }
    failure.message = format!("{}: {}", endpoint_in_words(address), failure.message);
    let next = match is_final {
        _ if needs_password => AfterRefusal::Password,
        true => AfterRefusal::Nothing,
        false => AfterRefusal::Host,
    };
    ConnectRefusal {
        failure,
        next,
        depends_on_tls: is_refused || text.contains("TLS"),
    }
}

fn endpoint_in_words(ServerAddress { host, port, .. }: &ServerAddress) -> String {
    match host {
        Host::Unix(path) => format!("cannot connect to socket {}/.s.PGSQL.{port}", path.display()),
        Host::Tcp(name) => format!("cannot connect to {name}, port {port}"),
    }
}

fn config(target: &ConnectTarget, address: &ServerAddress, negotiation: Negotiation) -> Config {
    let mut config = target.config.clone();
    match &address.host {
        Host::Unix(path) => config.host_path(path),
        Host::Tcp(name) => config.host(name),
    };
    if let Some(address) = address.address {
        config.hostaddr(address);
    }
    config.port(address.port).ssl_mode(negotiation);
    config.options(format!("{} {OPTIONS}", target.config.get_options().unwrap_or_default()).trim());
    if config.get_password().is_none()
        && let Some(password) = password_from_file(target, address)
    {
        config.password(password);
    }
    config
}

/// The password for this host from the password file. Like libpq, it warns and ignores the file if other users can read
/// it.
fn password_from_file(target: &ConnectTarget, address: &ServerAddress) -> Option<String> {
    static WARNED: OnceLock<()> = OnceLock::new();
    let path = target.passfile.as_deref()?;
    let metadata = std::fs::metadata(path).ok()?;
    let problem = match () {
        () if !metadata.is_file() => "is not a regular file",
        () if metadata.mode() & 0o077 != 0 => "can be read by other users; set its permissions to 0600 or less",
        () => {
            let text = std::fs::read_to_string(path).ok()?;
            let (dbname, user) = (target.config.get_dbname()?, target.config.get_user()?);
            return passfile::password(
                &text,
                [address.passfile_host(), &address.port.to_string(), dbname, user],
            );
        }
    };
    if WARNED.set(()).is_ok() {
        eprintln!(
            "outboxctl: warning: password file {} is ignored: it {problem}",
            path.display()
        );
    }
    None
}

/// Prepares a session for its first statement, and checks target_session_attrs.
async fn begin(client: &Client, target: &ConnectTarget, wanted: SessionWanted) -> Result<SessionFacts, Failure> {
    // One message without a prepared statement, which a pooler may send to another session.
    let row = client
        .query_typed_one(
            "select pg_catalog.current_setting('server_version') as server_version,
                    pg_catalog.current_database()::text as database, x.extversion as version, n.nspname::text as schema,
                    pg_catalog.current_setting('transaction_read_only')::boolean as is_read_only,
                    pg_catalog.pg_is_in_recovery() as is_standby, mark.is_set as has_options,
                    case when mark.is_set and $1 is not null then pg_catalog.set_config('TimeZone', $1, false) end
             from (select coalesce(pg_catalog.current_setting('outboxctl.session', true) = 'on', false) as is_set) mark
             left join pg_catalog.pg_extension x on x.extname = 'outbox'
             left join pg_catalog.pg_namespace n on n.oid = x.extnamespace",
            &[(&target.time_zone, Type::TEXT)],
        )
        .await?;
    let (is_read_only, is_standby): (bool, bool) = (row.get("is_read_only"), row.get("is_standby"));
    if !row.get::<_, bool>("has_options") {
        let message = "a pooler did not pass the options of the session on";
        return Err(Failure::new(Code::CannotConnect, message).hint(NO_POOLER));
    }
    let missing = match wanted {
        SessionWanted::ReadWrite if is_read_only => Some("the session is read-only"),
        SessionWanted::ReadOnly if !is_read_only => Some("the session is not read-only"),
        SessionWanted::Primary if is_standby => Some("the server is in hot standby mode"),
        SessionWanted::Standby if !is_standby => Some("the server is not in hot standby mode"),
        _ => None,
    };
    if let Some(missing) = missing {
        return Err(
            Failure::new(Code::CannotConnect, missing).hint("target_session_attrs requires a different server.")
        );
    }
    let version: Option<String> = row.get("version");
    Ok(SessionFacts {
        server_version: row.get("server_version"),
        database: row.get("database"),
        extension: version.map(|version| InstalledExtension {
            version,
            schema: row.get("schema"),
        }),
    })
}

impl Session {
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_one_series_are_compatible() {
        for (extension, program, known) in [
            ("0.1.0", "0.1.0", true),
            ("0.1.7", "0.1.0", true),
            ("0.2.0", "0.1.0", false),
            ("1.0", "0.1.0", false),
            ("1.2", "1.3.4", true),
            ("2.0", "1.0", false),
            ("9", "0.9", false),
        ] {
            assert_eq!(is_compatible(extension, program), known, "{extension} {program}");
        }
    }
}
