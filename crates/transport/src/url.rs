//! What the URLs of all kinds have in common: hosts with ports, a user, and why a URL is refused. Pure; called when an
//! option or a setting is set or read, on any thread.
//!
//! A URL never carries the password. Core logs and echoes settings (`SHOW`, `log_statement`, error DETAIL), so a
//! password in a URL ends up in the log. For the same reason no error here repeats any part of the URL.

use std::fmt;
use std::net::Ipv6Addr;

/// One of the servers that are the same broker, such as a node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Name or address; an IPv6 address has no brackets.
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Why a URL was refused. No text repeats the URL: it may contain a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrlError(pub(crate) &'static str);

pub(crate) const CARRIES_PASSWORD: UrlError =
    UrlError("the URL must not carry a password; put it where only the server reads it");
pub(crate) const BAD_USER: UrlError = UrlError("the user name in the URL is empty or not valid percent-encoded UTF-8");
pub(crate) const EMPTY_HOST: UrlError = UrlError("the URL contains no host");
pub(crate) const BAD_HOST: UrlError =
    UrlError("the host in the URL is not a host name, an IPv4 address or an IPv6 address in brackets");
pub(crate) const BAD_PORT: UrlError = UrlError("the port in the URL is not a number from 1 to 65535");

impl fmt::Display for UrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for UrlError {}

/// Whether the scheme is the one that means TLS, and the rest of the URL. None: it is another one.
pub(crate) fn strip_scheme<'a>(url: &'a str, plain: &str, secure: &str) -> Option<(bool, &'a str)> {
    let (scheme, rest) = url.split_once("://")?;
    let tls = scheme.eq_ignore_ascii_case(secure);
    (tls || scheme.eq_ignore_ascii_case(plain)).then_some((tls, rest))
}

/// Parses `[user@]host[:port][,host[:port]…]`: the user, and at least one server.
pub(crate) fn parse_authority(authority: &str, default_port: u16) -> Result<(Option<String>, Vec<Endpoint>), UrlError> {
    let (userinfo, hosts) = authority
        .rsplit_once('@')
        .map_or((None, authority), |(user, hosts)| (Some(user), hosts));
    let user = userinfo.map(parse_user).transpose()?;
    let endpoints = hosts.split(',').map(|hostport| {
        let (host, port) = parse_host_and_port(hostport)?;
        let port = port.unwrap_or(default_port);
        Ok(Endpoint { host, port })
    });
    Ok((user, endpoints.collect::<Result<_, _>>()?))
}

fn parse_user(userinfo: &str) -> Result<String, UrlError> {
    // This includes "user:@host": an empty password is one that the user meant to fill in.
    if userinfo.contains(':') {
        return Err(CARRIES_PASSWORD);
    }
    let user = percent_decode(userinfo).ok_or(BAD_USER)?;
    // NUL separates the fields of SASL PLAIN: a NUL in the name would shift the password.
    if user.is_empty() || user.contains('\0') {
        return Err(BAD_USER);
    }
    Ok(user)
}

pub(crate) fn parse_host_and_port(hostport: &str) -> Result<(String, Option<u16>), UrlError> {
    let (host, port) = if let Some(rest) = hostport.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or(BAD_HOST)?;
        host.parse::<Ipv6Addr>().map_err(|_| BAD_HOST)?;
        let port = match after {
            "" => None,
            _ => Some(after.strip_prefix(':').ok_or(BAD_HOST)?),
        };
        (host, port)
    } else {
        hostport.split_once(':').map_or((hostport, None), |(h, p)| (h, Some(p)))
    };
    if host.is_empty() {
        return Err(EMPTY_HOST);
    }
    let legal = |c: char| c.is_alphanumeric() || matches!(c, '-' | '.' | '_' | ':' | '%');
    if !host.chars().all(legal) {
        return Err(BAD_HOST);
    }
    Ok((host.to_owned(), port.map(parse_port).transpose()?))
}

fn parse_port(port: &str) -> Result<u16, UrlError> {
    // u16::from_str accepts "+5672"; a URL does not.
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return Err(BAD_PORT);
    }
    port.parse().ok().filter(|p| *p != 0).ok_or(BAD_PORT)
}

pub(crate) fn percent_decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => hex(bytes.next()?)? << 4 | hex(bytes.next()?)?,
            other => other,
        });
    }
    String::from_utf8(decoded).ok()
}

fn hex(digit: u8) -> Option<u8> {
    (digit as char).to_digit(16).map(|d| d as u8)
}
