//! Decides where and how to connect, like libpq, from the options, the service file, the environment and the defaults.
//! The environment is an argument, so that tests need no real one.

use super::args::ConnectArgs;
use super::conninfo::{self, KEYWORDS, Params};
use super::service;
use crate::failure::{Code, Failure, with_sources};
use outbox_core::words::Word;
use rustls::SupportedProtocolVersion;
use rustls::version::{TLS12, TLS13};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio_postgres::Config;
use tokio_postgres::config::Host;

/// The directories of the socket: the default of Debian's libpq, and that of the Postgres project.
const SOCKET_DIRECTORIES: [&str; 2] = ["/var/run/postgresql", "/tmp"];
const PORT: u16 = 5432;
/// The directory of pg_service.conf in Debian's libpq.
const SYSTEM_CONFIGURATION: &str = "/etc/postgresql-common";
/// The files in which Linux distributions keep the certificates of public authorities.
const SYSTEM_ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The environment of the process: its variables, files and user.
pub struct Surroundings<'a> {
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    pub read: &'a dyn Fn(&Path) -> io::Result<String>,
    pub exists: &'a dyn Fn(&Path) -> bool,
    pub home: Option<PathBuf>,
    pub os_user: Result<String, String>,
}

/// The hosts to try, and the parameters that are the same for all of them.
#[derive(Clone, Debug)]
pub struct ConnectTarget {
    pub hosts: Vec<ServerAddress>,
    /// Without a host, and with a password only if one was given outside the password file.
    pub config: Config,
    pub passfile: Option<PathBuf>,
    pub session: SessionWanted,
    pub tls: TlsParams,
    /// `PGTZ`, which libpq sets as the time zone of the session.
    pub time_zone: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    /// The certificate must be valid for the name.
    pub host: Host,
    /// If it is given, the name is not looked up.
    pub address: Option<IpAddr>,
    pub port: u16,
}

outbox_core::words! {
    pub enum SslMode {
        Disable = "disable",
        Allow = "allow",
        Prefer = "prefer",
        Require = "require",
        VerifyCa = "verify-ca",
        VerifyFull = "verify-full",
    }
}

#[derive(Clone, Debug)]
pub struct TlsParams {
    pub mode: SslMode,
    /// The certificates of the authorities that may issue the server's certificate.
    pub roots: Option<PathBuf>,
    /// The files of the client certificate and its key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    pub sni: bool,
    pub versions: Vec<&'static SupportedProtocolVersion>,
}

outbox_core::words! {
    /// The values of target_session_attrs.
    pub enum SessionWanted {
        Any = "any",
        ReadWrite = "read-write",
        ReadOnly = "read-only",
        Primary = "primary",
        Standby = "standby",
        PreferStandby = "prefer-standby",
    }
}

impl ServerAddress {
    /// The host as a line of a password file names it.
    pub fn passfile_host(&self) -> &str {
        match &self.host {
            Host::Unix(path) if SOCKET_DIRECTORIES.iter().any(|default| path == Path::new(default)) => "localhost",
            Host::Unix(path) => path.to_str().unwrap_or_default(),
            Host::Tcp(name) => name,
        }
    }
}

impl ConnectTarget {
    /// The names of the database, each longer than the one before it: alone, with its hosts, and with their ports.
    pub fn names(&self) -> [String; 3] {
        let name = self.config.get_dbname().unwrap_or_default();
        let hosts = self.hosts.iter().map(ServerAddress::passfile_host);
        let ends = hosts.clone().zip(&self.hosts);
        let ends: Vec<_> = ends.map(|(host, address)| format!("{host}:{}", address.port)).collect();
        let hosts: Vec<_> = hosts.collect();
        [
            name.to_owned(),
            format!("{name}@{}", hosts.join(",")),
            format!("{name}@{}", ends.join(",")),
        ]
    }
}

fn usage<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(Code::Usage, message))
}

/// Decides where and how to connect. As in psql, a connection string overrides the options. Both override the service
/// file, which overrides the environment.
pub fn target(args: &ConnectArgs, around: &Surroundings) -> Result<ConnectTarget, Failure> {
    let params = params(args, around)?;
    refuse_unsupported(&params)?;
    let user = match params.get("user") {
        Some(user) => user.to_owned(),
        None => around
            .os_user
            .clone()
            .or_else(|problem| usage(format!("could not determine your user name: {problem}; set it with -U")))?,
    };
    let in_home = |name: &str| around.home.as_ref().map(|home| home.join(name));
    Ok(ConnectTarget {
        hosts: hosts(&params, around)?,
        config: config(&params, &user)?,
        passfile: params.get("passfile").map(PathBuf::from).or_else(|| in_home(".pgpass")),
        session: word(&params, "target_session_attrs")?.unwrap_or(SessionWanted::Any),
        tls: tls(&params, around, &in_home)?,
        time_zone: (around.variable)("PGTZ").filter(|zone| !zone.is_empty()),
    })
}

/// The parameters that do not depend on the host, as the driver reads them from a connection string.
fn config(params: &Params, user: &str) -> Result<Config, Failure> {
    let name = params
        .get("application_name")
        .or_else(|| params.get("fallback_application_name"));
    let mut given = vec![
        ("user", Some(user)),
        ("dbname", params.get("dbname").or(Some(user))),
        ("application_name", name.or(Some("outboxctl"))),
        (
            "keepalives_retries",
            params.get("keepalives_count").filter(|count| *count != "0"),
        ),
    ];
    let same = ["password", "options", "channel_binding", "connect_timeout"].into_iter();
    let same = same.chain(["keepalives", "keepalives_idle", "keepalives_interval"]);
    given.extend(same.map(|keyword| (keyword, params.get(keyword))));
    let quoted = |text: &str| text.replace('\\', r"\\").replace('\'', r"\'");
    let words = given
        .into_iter()
        .filter_map(|(keyword, value)| Some(format!("{keyword}='{}' ", quoted(value?))));
    let parsed = words.collect::<String>().parse();
    let mut config: Config = parsed.or_else(|error: tokio_postgres::Error| usage(with_sources(&error)))?;
    // In milliseconds; the driver would read seconds.
    match params.get("tcp_user_timeout").map(|text| (text.trim().parse(), text)) {
        None | Some((Ok(0), _)) => {}
        Some((Ok(ms), _)) => _ = config.tcp_user_timeout(Duration::from_millis(ms)),
        Some((Err(_), text)) => return usage(format!("tcp_user_timeout {text:?} is not a number")),
    }
    Ok(config)
}

fn params(args: &ConnectArgs, around: &Surroundings) -> Result<Params, Failure> {
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
        None => (around.variable)("PGSERVICE").filter(|name| !name.is_empty()),
    };
    if let Some(service) = service {
        let mut found = service_section(&service, around)?;
        found.override_with(params);
        params = found;
    }
    for (keyword, variable) in KEYWORDS.iter().filter(|(_, variable)| !variable.is_empty()) {
        if let Some(value) = (around.variable)(variable)
            && !params.has(keyword)
        {
            params.set(keyword, value);
        }
    }
    let requires_tls = (around.variable)("PGREQUIRESSL").is_some_and(|value| value.starts_with('1'));
    if requires_tls && !params.has("sslmode") {
        params.set("sslmode", "require");
    }
    Ok(params)
}

/// Finds a service in the user's service file, then in the system's.
fn service_section(service: &str, around: &Surroundings) -> Result<Params, Failure> {
    let set = |name: &str| (around.variable)(name).filter(|value| !value.is_empty());
    let named = set("PGSERVICEFILE").map(PathBuf::from);
    let users = named
        .clone()
        .or_else(|| around.home.as_ref().map(|home| home.join(".pg_service.conf")));
    let system = set("PGSYSCONFDIR").unwrap_or_else(|| SYSTEM_CONFIGURATION.into());
    for path in users.into_iter().chain([Path::new(&system).join("pg_service.conf")]) {
        match (around.read)(&path) {
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

fn word<W: Word>(params: &Params, keyword: &str) -> Result<Option<W>, Failure> {
    let Some(text) = params.get(keyword) else {
        return Ok(None);
    };
    let known = W::ALL.iter().map(|word| word.name()).collect::<Vec<_>>().join(", ");
    let unknown = || Failure::new(Code::Usage, format!("unknown {keyword} {text:?}"));
    W::of_name(text)
        .map(Some)
        .ok_or_else(|| unknown().hint(format!("Valid values: {known}.")))
}

/// The hosts from the lists in `host`, `hostaddr` and `port`, separated by commas. A single port applies to all hosts.
fn hosts(params: &Params, around: &Surroundings) -> Result<Vec<ServerAddress>, Failure> {
    let list = |keyword: &str| -> Vec<&str> {
        let text = params.get(keyword).into_iter();
        text.flat_map(|text| text.split(',')).map(str::trim).collect()
    };
    let (names, addresses, ports) = (list("host"), list("hostaddr"), list("port"));
    let count = match addresses.len() {
        0 => names.len().max(1),
        count if names.is_empty() || names.len() == count => count,
        count => return usage(format!("host has {} entries, but hostaddr has {count}", names.len())),
    };
    if ports.len() > 1 && ports.len() != count {
        return usage(format!("there are {count} hosts, but {} ports", ports.len()));
    }
    let given = |list: &[&'_ str], index: usize| {
        list.get(index)
            .map(|text| (*text).to_owned())
            .filter(|text| !text.is_empty())
    };
    let host = |index: usize| {
        let port = match given(&ports, if ports.len() == 1 { 0 } else { index }).map(|text| (text.parse(), text)) {
            None => PORT,
            Some((Ok(port @ 1..), _)) => port,
            Some((_, text)) => return usage(format!("port {text:?} is not a number from 1 to 65535")),
        };
        let address = given(&addresses, index);
        let host = match given(&names, index).or_else(|| address.clone()) {
            Some(path) if address.is_none() && path.starts_with('/') => Host::Unix(path.into()),
            Some(path) if address.is_none() && path.starts_with('@') => {
                return usage("sockets in the abstract namespace (@…) are not supported by this program");
            }
            Some(name) => Host::Tcp(name),
            None => {
                let has_socket = |dir: &&&str| (around.exists)(&Path::new(**dir).join(format!(".s.PGSQL.{port}")));
                let found = SOCKET_DIRECTORIES.iter().find(has_socket);
                Host::Unix(found.unwrap_or(&SOCKET_DIRECTORIES[0]).into())
            }
        };
        let address = address.map(|text| (text.parse(), text));
        let address = address
            .map(|(address, text)| address.or_else(|_| usage(format!("hostaddr {text:?} is not an IP address"))));
        Ok(ServerAddress {
            host,
            address: address.transpose()?,
            port,
        })
    };
    (0..count).map(host).collect()
}

fn tls(
    params: &Params,
    around: &Surroundings,
    in_home: &dyn Fn(&str) -> Option<PathBuf>,
) -> Result<TlsParams, Failure> {
    let system = params.get("sslrootcert") == Some("system");
    // Like libpq: a client that trusts every public authority must check the name.
    let default = if system { SslMode::VerifyFull } else { SslMode::Prefer };
    let mode = word(params, "sslmode")?.unwrap_or(default);
    if system && mode != SslMode::VerifyFull {
        return usage(
            "sslrootcert=system requires sslmode=verify-full: any server can have a certificate of a public authority",
        );
    }
    let existing = |keyword: &str, default: &str| -> Option<PathBuf> {
        params
            .get(keyword)
            .map(PathBuf::from)
            .or_else(|| in_home(default).filter(|path| (around.exists)(path)))
    };
    let roots = match existing("sslrootcert", ".postgresql/root.crt") {
        _ if system => Some(system_roots(around)?),
        file => file,
    };
    if roots.is_none() && matches!(mode, SslMode::VerifyCa | SslMode::VerifyFull) {
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
    let key = params.get("sslkey").map(PathBuf::from);
    let key = key.or_else(|| in_home(".postgresql/postgresql.key"));
    if certificate.is_some() && key.is_none() {
        return usage("there is a certificate (sslcert), but no key (sslkey)");
    }
    Ok(TlsParams {
        mode,
        roots,
        certificate: certificate.zip(key),
        sni: params.get("sslsni") != Some("0"),
        versions: versions(params)?,
    })
}

fn system_roots(around: &Surroundings) -> Result<PathBuf, Failure> {
    let named = (around.variable)("SSL_CERT_FILE").map(PathBuf::from);
    let mut files = named.into_iter().chain(SYSTEM_ROOTS.map(PathBuf::from));
    files.find(|path| (around.exists)(path)).ok_or_else(|| {
        Failure::new(Code::CannotConnect, "this system has no file of trusted certificates")
            .hint("Install the package ca-certificates, or name a file with sslrootcert.")
    })
}

fn versions(params: &Params) -> Result<Vec<&'static SupportedProtocolVersion>, Failure> {
    let rank = |keyword: &str, default| {
        let name = params.get(keyword).unwrap_or(default);
        let rank = ["TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"]
            .iter()
            .position(|known| *known == name);
        rank.map_or_else(|| usage(format!("unknown {keyword} {name:?}")), Ok)
    };
    let allowed = rank("ssl_min_protocol_version", "TLSv1.2")?..=rank("ssl_max_protocol_version", "TLSv1.3")?;
    let versions = [(2, &TLS12), (3, &TLS13)]
        .into_iter()
        .filter(|(rank, _)| allowed.contains(rank));
    let versions: Vec<_> = versions.map(|(_, version)| version).collect();
    match versions.is_empty() {
        true => usage("ssl_min_protocol_version and ssl_max_protocol_version allow neither TLS 1.2 nor TLS 1.3"),
        false => Ok(versions),
    }
}

#[cfg(test)]
mod tests;
