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
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use target::{Endpoint, Host, Secret, SessionWanted, SslMode, Surroundings, Target};
use tokio::task::{AbortHandle, JoinHandle};
use tokio_postgres::config::SslMode as Negotiation;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Config, SimpleQueryMessage};
use tokio_postgres_rustls::MakeRustlsConnect;

/// What each session begins with. A pooler would give a session with these settings to the next client of the
/// application, so they are no statements: it refuses them, or the mark is missing.
///
/// qualified() adds the schema of the extension to its names. Calls cast their arguments: other roles may create functions
/// in that schema, and Postgres would call one that matches better. With millions of messages the planner overestimates
/// the rows: JIT compiles for 0.7 s what runs for 0.01 s.
const OPTIONS: &str = "-c search_path=pg_catalog,pg_temp -c jit=off -c outboxctl.session=on";
const HAS_OPTIONS: &str = "select pg_catalog.current_setting('outboxctl.session', true)";
const NO_POOLER: &str = "outboxctl needs a session of its own: connect to the server itself, not to a pooler.";

/// A session, with the facts about its server and database.
pub struct Session {
    pub client: Client,
    pub server_version: String,
    pub database: String,
    /// The extension, if this database has it.
    pub extension: Option<Extension>,
    stop: Stop,
}

/// The version of the extension, and the schema in which it was created.
pub struct Extension {
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
    let session = connect_anywhere(args).await?;
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

/// Opens a session, whether or not the database has the extension.
pub async fn connect_anywhere(args: &ConnectArgs) -> Result<Session, Failure> {
    let mut target = target::target(args, &Process)?;
    // The program asks only once, because `serve` and `top` open sessions repeatedly.
    static TYPED: OnceLock<String> = OnceLock::new();
    let question = format!("Password for user {}: ", target.user);
    if args.ask_password && TYPED.get().is_none() {
        let _ = TYPED.set(prompt::password(&question)?);
    }
    if let Some(typed) = TYPED.get() {
        target.password = Some(Secret(typed.clone()));
    }
    match open(&target).await {
        Err(Refusal::NeedsPassword(_)) if !args.no_password && target.password.is_none() && prompt::possible() => {
            let typed = prompt::password(&question)?;
            target.password = Some(Secret(typed.clone()));
            let session = open(&target).await.map_err(Refusal::failure)?;
            let _ = TYPED.set(typed);
            Ok(session)
        }
        opened => opened.map_err(Refusal::failure),
    }
}

/// Why there is no session with a host, and whether to try the next host.
enum Refusal {
    /// The server asks for a password. The user may type one.
    NeedsPassword(Failure),
    /// The server refused the session. Like libpq, the program then tries no other host.
    Decided(Failure),
    /// The next host may accept.
    TryNext(Failure),
}

impl Refusal {
    fn failure(self) -> Failure {
        match self {
            Self::NeedsPassword(failure) | Self::Decided(failure) | Self::TryNext(failure) => failure,
        }
    }

    /// This refusal, with the failure of the attempt before it as DETAIL.
    fn after(mut self, first: Failure, attempt: Negotiation) -> Self {
        let (Self::NeedsPassword(failure) | Self::Decided(failure) | Self::TryNext(failure)) = &mut self;
        if failure.message != first.message {
            let negotiation = if attempt == Negotiation::Disable {
                "without TLS"
            } else {
                "with TLS"
            };
            failure.detail = Some(format!("The attempt {negotiation} failed first: {}", first.message));
        }
        self
    }
}

/// Tries the hosts one after the other.
async fn open(target: &Target) -> Result<Session, Refusal> {
    let passes: &[SessionWanted] = match target.session {
        SessionWanted::PreferStandby => &[SessionWanted::Standby, SessionWanted::Any],
        _ => std::slice::from_ref(&target.session),
    };
    let mut refusals = Vec::new();
    for wanted in passes {
        for host in &target.hosts {
            match open_host(target, host, *wanted).await {
                Ok(session) => return Ok(session),
                Err(Refusal::TryNext(failure)) => refusals.push(failure),
                Err(refusal) => return Err(refusal),
            }
        }
    }
    let last = refusals
        .pop()
        .unwrap_or_else(|| Failure::new(Code::CannotConnect, "there is no server to connect to"));
    let mut before = refusals.into_iter().map(|failure| failure.message).collect::<Vec<_>>();
    before.dedup();
    before.retain(|message| *message != last.message);
    let detail = last
        .detail
        .clone()
        .into_iter()
        .chain(before)
        .collect::<Vec<_>>()
        .join("\n");
    Err(Refusal::TryNext(Failure {
        detail: Some(detail).filter(|detail| !detail.is_empty()),
        ..last
    }))
}

/// Tries one host, with and without TLS as sslmode allows.
async fn open_host(target: &Target, host: &Host, wanted: SessionWanted) -> Result<Session, Refusal> {
    let attempts: &[Negotiation] = match (&host.endpoint, target.tls.mode) {
        (Endpoint::Socket(_), _) | (_, SslMode::Disable) => &[Negotiation::Disable],
        (_, SslMode::Allow) => &[Negotiation::Disable, Negotiation::Require],
        (_, SslMode::Prefer) => &[Negotiation::Prefer, Negotiation::Disable],
        (_, SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull) => &[Negotiation::Require],
    };
    let mut first = None;
    for attempt in attempts {
        let tried = match open_once(target, host, *attempt, wanted).await {
            Ok(session) => return Ok(session),
            Err(tried) => tried,
        };
        match first.take() {
            None if tried.worth_another => first = Some(tried.refusal),
            None => return Err(tried.refusal),
            Some(first) => return Err(tried.refusal.after(Refusal::failure(first), attempts[0])),
        }
    }
    Err(first.unwrap_or_else(|| Refusal::TryNext(Failure::new(Code::CannotConnect, "no connection was attempted"))))
}

struct Tried {
    refusal: Refusal,
    /// Whether to try again with or without TLS: the server refused this attempt, or TLS failed.
    worth_another: bool,
}

async fn open_once(
    target: &Target,
    host: &Host,
    negotiation: Negotiation,
    wanted: SessionWanted,
) -> Result<Session, Tried> {
    let last = |failure: Failure| Tried {
        refusal: Refusal::TryNext(failure),
        worth_another: false,
    };
    let begun = Arc::new(AtomicBool::new(false));
    let tls = match negotiation {
        // A broken certificate file must not prevent a session without TLS.
        Negotiation::Disable => tls::config(&target::TlsWanted::nothing(), Arc::clone(&begun)),
        _ => tls::config(&target.tls, Arc::clone(&begun)),
    };
    let tls = MakeRustlsConnect::new(tls.map_err(last)?);
    let config = config(target, host, negotiation).map_err(last)?;
    let connected = config.connect(tls.clone()).await;
    let (client, connection) = connected.map_err(|error| {
        let failed_tls = error.to_string().contains("TLS");
        let refused = error.as_db_error().is_some();
        Tried {
            worth_another: failed_tls
                || (refused && (begun.load(Ordering::Relaxed) || negotiation == Negotiation::Disable)),
            refusal: refusal(error, host),
        }
    })?;
    let connection = tokio::spawn(async move { _ = connection.await });
    let stop = Stop {
        token: client.cancel_token(),
        tls,
        connection: connection.abort_handle(),
    };
    remember(connection);
    begin(client, stop, target, wanted).await.map_err(|mut failure| {
        failure.code = Code::CannotConnect;
        failure.message = format!("{}: {}", endpoint_in_words(host), failure.message);
        last(failure)
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

fn refusal(error: tokio_postgres::Error, host: &Host) -> Refusal {
    let text = with_sources(&error);
    let needs_password = error.as_db_error().is_none() && text.contains("password missing");
    // A server that starts, stops or recovers has not refused the session.
    let decided = error.code().is_some_and(|code| *code != SqlState::CANNOT_CONNECT_NOW);
    let mut failure = Failure::from(error);
    failure.code = Code::CannotConnect;
    if needs_password {
        failure.message = format!(
            "{}: the server asks for a password, but none is given",
            endpoint_in_words(host)
        );
        failure = failure.hint("Put it into ~/.pgpass (mode 0600), or into the file that PGPASSFILE names.");
        return Refusal::NeedsPassword(failure);
    }
    if text.contains("unsupported startup parameter") {
        failure = failure.hint(NO_POOLER);
    } else if failure.hint.is_none() {
        failure.hint = tls::hint(&text).map(str::to_owned);
    }
    failure.message = format!("{}: {}", endpoint_in_words(host), failure.message);
    match decided {
        true => Refusal::Decided(failure),
        false => Refusal::TryNext(failure),
    }
}

fn endpoint_in_words(host: &Host) -> String {
    match &host.endpoint {
        Endpoint::Socket(path) => format!("cannot connect to socket {}/.s.PGSQL.{}", path.display(), host.port),
        Endpoint::Network { name, .. } => format!("cannot connect to {name}, port {}", host.port),
    }
}

fn config(target: &Target, host: &Host, negotiation: Negotiation) -> Result<Config, Failure> {
    let mut config = Config::new();
    match &host.endpoint {
        Endpoint::Socket(path) => _ = config.host_path(path),
        Endpoint::Network { name, address } => {
            config.host(name);
            if let Some(address) = address {
                config.hostaddr(*address);
            }
        }
    }
    config
        .port(host.port)
        .user(&target.user)
        .dbname(&target.dbname)
        .application_name(&target.application_name)
        .ssl_mode(negotiation)
        .channel_binding(target.channel_binding)
        .keepalives(!target.keepalives.off);
    config.options(format!("{} {OPTIONS}", target.options.as_deref().unwrap_or_default()).trim());
    if let Some(timeout) = target.connect_timeout {
        config.connect_timeout(timeout);
    }
    if let Some(idle) = target.keepalives.idle {
        config.keepalives_idle(idle);
    }
    if let Some(interval) = target.keepalives.interval {
        config.keepalives_interval(interval);
    }
    if let Some(count) = target.keepalives.count {
        config.keepalives_retries(count);
    }
    if let Some(timeout) = target.keepalives.user_timeout {
        config.tcp_user_timeout(timeout);
    }
    let password = match &target.password {
        Some(Secret(password)) => Some(password.clone()),
        None => password_from_file(target, host),
    };
    if let Some(password) = password {
        config.password(password);
    }
    Ok(config)
}

/// The password for this host from the password file. Like libpq, it warns and ignores the file if other users can read
/// it.
fn password_from_file(target: &Target, host: &Host) -> Option<String> {
    static WARNED: OnceLock<()> = OnceLock::new();
    let path = target.passfile.as_deref()?;
    let metadata = std::fs::metadata(path).ok()?;
    let problem = match () {
        () if !metadata.is_file() => "is not a regular file",
        () if metadata.mode() & 0o077 != 0 => "can be read by other users; set its permissions to 0600 or less",
        () => {
            let text = std::fs::read_to_string(path).ok()?;
            return passfile::password(&text, &host.wanted(&target.dbname, &target.user));
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
async fn begin(client: Client, stop: Stop, target: &Target, wanted: SessionWanted) -> Result<Session, Failure> {
    let has_options = client.simple_query(HAS_OPTIONS).await?.iter().any(|message| {
        let SimpleQueryMessage::Row(row) = message else {
            return false;
        };
        row.get(0) == Some("on")
    });
    if !has_options {
        let failure = Failure::new(
            Code::CannotConnect,
            "a pooler did not pass the options of the session on",
        );
        return Err(failure.hint(NO_POOLER));
    }
    let row = client
        .query_one(
            "select pg_catalog.current_setting('server_version'), pg_catalog.current_database()::text, x.extversion,
                    n.nspname::text,
                    case when $1::text is not null then pg_catalog.set_config('TimeZone', $1, false) end,
                    pg_catalog.current_setting('transaction_read_only')::boolean, pg_catalog.pg_is_in_recovery()
             from (select) one
             left join pg_catalog.pg_extension x on x.extname = 'outbox'
             left join pg_catalog.pg_namespace n on n.oid = x.extnamespace",
            &[&target.time_zone],
        )
        .await?;
    let (read_only, standby): (bool, bool) = (row.get(5), row.get(6));
    let missing = match wanted {
        SessionWanted::ReadWrite if read_only => Some("the session is read-only"),
        SessionWanted::ReadOnly if !read_only => Some("the session is not read-only"),
        SessionWanted::Primary if standby => Some("the server is in hot standby mode"),
        SessionWanted::Standby if !standby => Some("the server is not in hot standby mode"),
        _ => None,
    };
    if let Some(missing) = missing {
        return Err(
            Failure::new(Code::CannotConnect, missing).hint("target_session_attrs requires a different server.")
        );
    }
    let version: Option<String> = row.get(2);
    Ok(Session {
        server_version: row.get(0),
        database: row.get(1),
        extension: version.map(|version| Extension {
            version,
            schema: row.get(3),
        }),
        client,
        stop,
    })
}

impl Session {
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }
}

/// The environment and the files of this process.
struct Process;

impl Surroundings for Process {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn read(&self, path: &Path) -> io::Result<String> {
        std::fs::read_to_string(path)
    }

    fn exists(&self, path: &Path) -> bool {
        path.exists()
    }

    fn home(&self) -> Option<PathBuf> {
        std::env::home_dir().filter(|home| !home.as_os_str().is_empty())
    }

    fn os_user(&self) -> Result<String, String> {
        whoami::username().map_err(|error| error.to_string())
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
