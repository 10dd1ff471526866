//! Decides where and how to connect, like libpq, from the options, the service file, the environment and the defaults.
//! The environment is a trait, so that tests need no real one.

use super::args::ConnectArgs;
use super::conninfo::{self, KEYWORDS, Params};
use super::passfile::Wanted;
use super::service;
use crate::failure::{Code, Failure};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio_postgres::config::ChannelBinding;

/// The directories of the socket: the default of Debian's libpq, and that of the Postgres project.
const SOCKET_DIRECTORIES: [&str; 2] = ["/var/run/postgresql", "/tmp"];
const PORT: u16 = 5432;
/// The directory of pg_service.conf in Debian's libpq.
const SYSTEM_CONFIGURATION: &str = "/etc/postgresql-common";

/// The environment of the process: its variables, files and user.
pub trait Surroundings {
    fn variable(&self, name: &str) -> Option<String>;
    fn read(&self, path: &Path) -> io::Result<String>;
    fn exists(&self, path: &Path) -> bool;
    fn home(&self) -> Option<PathBuf>;
    fn os_user(&self) -> Result<String, String>;
}

/// The hosts to try, and the parameters that are the same for all of them.
#[derive(Clone, Debug)]
pub struct Target {
    pub hosts: Vec<Host>,
    pub user: String,
    pub dbname: String,
    pub password: Option<Secret>,
    pub passfile: Option<PathBuf>,
    pub application_name: String,
    pub options: Option<String>,
    pub connect_timeout: Option<Duration>,
    pub keepalives: Keepalives,
    pub session: SessionWanted,
    pub channel_binding: ChannelBinding,
    pub tls: TlsWanted,
    /// `PGTZ`, which libpq sets as the time zone of the session.
    pub time_zone: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub endpoint: Endpoint,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Socket(PathBuf),
    /// The certificate must be valid for the name. If the address is given, the name is not looked up.
    Network {
        name: String,
        address: Option<IpAddr>,
    },
}

/// A secret that no format string may show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

#[derive(Clone, Debug)]
pub struct TlsWanted {
    pub mode: SslMode,
    pub roots: Roots,
    /// The files of the client certificate and its key. The key may be in the same directory as the default
    /// certificate.
    pub certificate: Option<(PathBuf, PathBuf)>,
    pub sni: bool,
    pub versions: Versions,
}

impl TlsWanted {
    /// The TLS parameters for a session without TLS.
    pub fn nothing() -> Self {
        Self {
            mode: SslMode::Disable,
            roots: Roots::None,
            certificate: None,
            sni: false,
            versions: Versions {
                tls12: true,
                tls13: true,
            },
        }
    }
}

/// The certificates of the authorities that may issue the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Roots {
    None,
    System,
    File(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    pub tls12: bool,
    pub tls13: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Keepalives {
    pub off: bool,
    pub idle: Option<Duration>,
    pub interval: Option<Duration>,
    pub count: Option<u32>,
    pub user_timeout: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionWanted {
    Any,
    ReadWrite,
    ReadOnly,
    Primary,
    Standby,
    PreferStandby,
}

impl Host {
    /// The connection as a line of a password file names it.
    pub fn wanted<'a>(&'a self, dbname: &'a str, user: &'a str) -> Wanted<'a> {
        let host = match &self.endpoint {
            Endpoint::Socket(path) if SOCKET_DIRECTORIES.iter().any(|default| path == Path::new(default)) => {
                "localhost"
            }
            Endpoint::Socket(path) => path.to_str().unwrap_or_default(),
            Endpoint::Network { name, .. } => name,
        };
        Wanted {
            host,
            port: self.port,
            dbname,
            user,
        }
    }
}

fn usage<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(Code::Usage, message))
}

/// Decides where and how to connect. As in psql, a connection string overrides the options. Both override the service
/// file, which overrides the environment.
pub fn target(args: &ConnectArgs, around: &dyn Surroundings) -> Result<Target, Failure> {
    let params = params(args, around)?;
    refuse_unsupported(&params)?;
    let user = match params.get("user") {
        Some(user) => user.to_owned(),
        None => around
            .os_user()
            .or_else(|problem| usage(format!("could not determine your user name: {problem}; set it with -U")))?,
    };
    let home = around.home();
    let in_home = |name: &str| home.as_ref().map(|home| home.join(name));
    Ok(Target {
        hosts: hosts(&params, around)?,
        dbname: params.get("dbname").unwrap_or(&user).to_owned(),
        user,
        password: params.get("password").map(|password| Secret(password.to_owned())),
        passfile: params.get("passfile").map(PathBuf::from).or_else(|| in_home(".pgpass")),
        application_name: ["application_name", "fallback_application_name"]
            .iter()
            .find_map(|keyword| params.get(keyword))
            .unwrap_or("outboxctl")
            .to_owned(),
        options: params.get("options").map(str::to_owned),
        // 0 or less means no timeout.
        connect_timeout: match number::<i64>(&params, "connect_timeout")? {
            Some(seconds @ 1..) => Some(Duration::from_secs(seconds.unsigned_abs())),
            _ => None,
        },
        keepalives: keepalives(&params)?,
        session: match params.get("target_session_attrs") {
            None | Some("any") => SessionWanted::Any,
            Some("read-write") => SessionWanted::ReadWrite,
            Some("read-only") => SessionWanted::ReadOnly,
            Some("primary") => SessionWanted::Primary,
            Some("standby") => SessionWanted::Standby,
            Some("prefer-standby") => SessionWanted::PreferStandby,
            Some(other) => return usage(format!("unknown target_session_attrs {other:?}")),
        },
        channel_binding: match params.get("channel_binding") {
            None | Some("prefer") => ChannelBinding::Prefer,
            Some("disable") => ChannelBinding::Disable,
            Some("require") => ChannelBinding::Require,
            Some(other) => return usage(format!("unknown channel_binding {other:?}")),
        },
        tls: tls(&params, around, &in_home)?,
        time_zone: around.variable("PGTZ").filter(|zone| !zone.is_empty()),
    })
}

fn params(args: &ConnectArgs, around: &dyn Surroundings) -> Result<Params, Failure> {
    let mut params = Params::default();
    let options = [("host", &args.host), ("port", &args.port), ("user", &args.user)];
    for (keyword, value) in options {
        if let Some(value) = value.as_deref().filter(|value| !value.is_empty()) {
            params.set(keyword, value);
        }
    }
    match args.dbname.as_deref() {
        Some(text) if conninfo::is_connection_string(text) => {
            params.override_with(conninfo::parse(text).or_else(usage)?);
        }
        Some(name) if !name.is_empty() => {
            params.set("dbname", name);
        }
        _ => {}
    }
    let service = match params.get("service") {
        Some(name) => Some(name.to_owned()),
        None => around.variable("PGSERVICE").filter(|name| !name.is_empty()),
    };
    if let Some(service) = service {
        let mut found = service_section(&service, around)?;
        found.override_with(params);
        params = found;
    }
    for (keyword, variable) in KEYWORDS.iter().filter(|(_, variable)| !variable.is_empty()) {
        if let Some(value) = around.variable(variable)
            && !params.has(keyword)
        {
            params.set(keyword, value);
        }
    }
    if !params.has("sslmode")
        && around
            .variable("PGREQUIRESSL")
            .is_some_and(|value| value.starts_with('1'))
    {
        params.set("sslmode", "require");
    }
    Ok(params)
}

/// Finds a service in the user's service file, then in the system's.
fn service_section(service: &str, around: &dyn Surroundings) -> Result<Params, Failure> {
    let set = |name: &str| around.variable(name).filter(|value| !value.is_empty());
    let named = set("PGSERVICEFILE").map(PathBuf::from);
    let users = named
        .clone()
        .or_else(|| around.home().map(|home| home.join(".pg_service.conf")));
    let system = set("PGSYSCONFDIR").unwrap_or_else(|| SYSTEM_CONFIGURATION.into());
    for path in users.into_iter().chain([Path::new(&system).join("pg_service.conf")]) {
        match around.read(&path) {
            Ok(text) => match service::section(&text, service) {
                Ok(Some(params)) => return Ok(params),
                Ok(None) => {}
                Err(problem) => return usage(format!("service file {}: {problem}", path.display())),
            },
            Err(error) if Some(&path) == named.as_ref() => {
                return usage(format!("could not read service file {}: {error}", path.display()));
            }
            Err(_) => {}
        }
    }
    usage(format!("no service {service:?} in the service files"))
}

/// Refuses parameters that this program does not support and that would make the session safer: to ignore them would be
/// a risk.
fn refuse_unsupported(params: &Params) -> Result<(), Failure> {
    let supported: &[(&str, &[&str])] = &[
        ("gssencmode", &["disable", "prefer"]),
        ("load_balance_hosts", &["disable"]),
        ("replication", &["false", "off", "no", "0"]),
        ("require_auth", &[]),
        ("requirepeer", &[]),
        ("sslcrl", &[]),
        ("sslcrldir", &[]),
        ("sslnegotiation", &["postgres"]),
        ("sslpassword", &[]),
    ];
    for (keyword, values) in supported {
        if let Some(value) = params.get(keyword)
            && !values.contains(&value)
        {
            return usage(format!(
                "{keyword} is not supported by this program, except {}",
                match values.is_empty() {
                    true => "empty".into(),
                    false => values.join(", "),
                }
            ));
        }
    }
    Ok(())
}

fn number<T: std::str::FromStr>(params: &Params, keyword: &str) -> Result<Option<T>, Failure> {
    let Some(text) = params.get(keyword) else {
        return Ok(None);
    };
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => usage(format!("{keyword} {text:?} is not a number")),
    }
}

fn keepalives(params: &Params) -> Result<Keepalives, Failure> {
    // 0 means the default of the system.
    let seconds = |keyword| -> Result<Option<Duration>, Failure> {
        let given = number::<u64>(params, keyword)?.filter(|seconds| *seconds > 0);
        Ok(given.map(Duration::from_secs))
    };
    Ok(Keepalives {
        off: number::<i32>(params, "keepalives")? == Some(0),
        idle: seconds("keepalives_idle")?,
        interval: seconds("keepalives_interval")?,
        count: number::<u32>(params, "keepalives_count")?.filter(|count| *count > 0),
        user_timeout: number::<u64>(params, "tcp_user_timeout")?
            .filter(|ms| *ms > 0)
            .map(Duration::from_millis),
    })
}

/// The hosts from the lists in `host`, `hostaddr` and `port`, separated by commas. A single port applies to all hosts.
fn hosts(params: &Params, around: &dyn Surroundings) -> Result<Vec<Host>, Failure> {
    let list = |keyword: &str| -> Vec<String> {
        params
            .get(keyword)
            .map(|text| text.split(',').map(|one| one.trim().to_owned()).collect())
            .unwrap_or_default()
    };
    let (names, addresses, ports) = (list("host"), list("hostaddr"), list("port"));
    let count = if addresses.is_empty() {
        names.len().max(1)
    } else {
        addresses.len()
    };
    if !addresses.is_empty() && !names.is_empty() && names.len() != count {
        return usage(format!("host has {} entries, but hostaddr has {count}", names.len()));
    }
    if ports.len() > 1 && ports.len() != count {
        return usage(format!("there are {count} hosts, but {} ports", ports.len()));
    }
    let of = |list: &[String], index: usize| list.get(index).filter(|text| !text.is_empty()).cloned();
    (0..count)
        .map(|index| {
            let port = match of(&ports, if ports.len() == 1 { 0 } else { index }) {
                None => PORT,
                Some(text) => match text.parse() {
                    Ok(port @ 1..) => port,
                    _ => return usage(format!("port {text:?} is not a number from 1 to 65535")),
                },
            };
            let endpoint = endpoint(of(&names, index), of(&addresses, index), port, around)?;
            Ok(Host { endpoint, port })
        })
        .collect()
}

fn endpoint(
    name: Option<String>,
    address: Option<String>,
    port: u16,
    around: &dyn Surroundings,
) -> Result<Endpoint, Failure> {
    if let Some(text) = address {
        let Ok(address) = text.parse() else {
            return usage(format!("hostaddr {text:?} is not an IP address"));
        };
        return Ok(Endpoint::Network {
            name: name.unwrap_or(text),
            address: Some(address),
        });
    }
    match name {
        Some(path) if path.starts_with('/') => Ok(Endpoint::Socket(path.into())),
        Some(path) if path.starts_with('@') => {
            usage("sockets in the abstract namespace (@…) are not supported by this program")
        }
        Some(name) => Ok(Endpoint::Network { name, address: None }),
        None => {
            let has_socket = |dir: &&&str| around.exists(&Path::new(**dir).join(format!(".s.PGSQL.{port}")));
            let found = SOCKET_DIRECTORIES.iter().find(has_socket);
            Ok(Endpoint::Socket(found.unwrap_or(&SOCKET_DIRECTORIES[0]).into()))
        }
    }
}

fn tls(
    params: &Params,
    around: &dyn Surroundings,
    in_home: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<TlsWanted, Failure> {
    let system = params.get("sslrootcert") == Some("system");
    let mode = match params.get("sslmode") {
        // Like libpq: a client that trusts every public authority must check the name.
        None if system => SslMode::VerifyFull,
        None | Some("prefer") => SslMode::Prefer,
        Some("disable") => SslMode::Disable,
        Some("allow") => SslMode::Allow,
        Some("require") => SslMode::Require,
        Some("verify-ca") => SslMode::VerifyCa,
        Some("verify-full") => SslMode::VerifyFull,
        Some(other) => {
            return Err(Failure::new(Code::Usage, format!("unknown sslmode {other:?}"))
                .hint("Valid values: disable, allow, prefer, require, verify-ca, verify-full."));
        }
    };
    if system && mode != SslMode::VerifyFull {
        return usage(
            "sslrootcert=system requires sslmode=verify-full: any server can have a certificate of a public authority",
        );
    }
    let existing = |keyword: &str, default: &str| -> Option<PathBuf> {
        params
            .get(keyword)
            .map(PathBuf::from)
            .or_else(|| in_home(default).filter(|path| around.exists(path)))
    };
    let roots = match existing("sslrootcert", ".postgresql/root.crt") {
        _ if system => Roots::System,
        Some(path) => Roots::File(path),
        None => Roots::None,
    };
    if roots == Roots::None && matches!(mode, SslMode::VerifyCa | SslMode::VerifyFull) {
        return Err(Failure::new(
            Code::CannotConnect,
            "no file of trusted certificates to verify the server certificate",
        )
        .hint("Set sslrootcert (PGSSLROOTCERT) to a file, create ~/.postgresql/root.crt, or set sslrootcert=system."));
    }
    let certificate = match params.get("sslcertmode") {
        Some("disable") => None,
        None | Some("allow") => existing("sslcert", ".postgresql/postgresql.crt"),
        Some(other) => {
            return usage(format!(
                "sslcertmode {other:?} is not supported by this program: use disable or allow"
            ));
        }
    };
    let certificate = match certificate {
        None => None,
        Some(certificate) => match params
            .get("sslkey")
            .map(PathBuf::from)
            .or_else(|| in_home(".postgresql/postgresql.key"))
        {
            Some(key) => Some((certificate, key)),
            None => return usage("there is a certificate (sslcert), but no key (sslkey)"),
        },
    };
    Ok(TlsWanted {
        mode,
        roots,
        certificate,
        sni: params.get("sslsni") != Some("0"),
        versions: versions(params)?,
    })
}

fn versions(params: &Params) -> Result<Versions, Failure> {
    let rank = |keyword: &str, default: u8| match params.get(keyword) {
        None => Ok(default),
        Some("TLSv1" | "TLSv1.1") => Ok(1),
        Some("TLSv1.2") => Ok(2),
        Some("TLSv1.3") => Ok(3),
        Some(other) => usage(format!("unknown {keyword} {other:?}")),
    };
    let (least, most) = (
        rank("ssl_min_protocol_version", 2)?,
        rank("ssl_max_protocol_version", 3)?,
    );
    let versions = Versions {
        tls12: least <= 2 && most >= 2,
        tls13: least <= 3 && most >= 3,
    };
    match versions.tls12 || versions.tls13 {
        true => Ok(versions),
        false => usage("ssl_min_protocol_version and ssl_max_protocol_version allow neither TLS 1.2 nor TLS 1.3"),
    }
}

#[cfg(test)]
#[path = "target_tests.rs"]
mod tests;
