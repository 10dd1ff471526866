//! Parses an `amqp://`, `amqps://`, `http://` or `https://` URL. Pure; called by the worker when `outbox.url` is set or
//! read, on any thread.
//!
//! A URL never carries the password. Core logs and echoes settings (`SHOW`, `log_statement`, error DETAIL), so a
//! password in a URL ends up in the log. For the same reason no error here repeats any part of the URL.

use outbox_core::words::Word;
use std::fmt;
use std::net::Ipv6Addr;

const DEFAULT_PORT: u16 = 5672;
const DEFAULT_PORT_TLS: u16 = 5671;
/// The only query that is accepted, as RabbitMQ's URI specification writes it.
const EXTERNAL: &str = "auth_mechanism=external";
const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;
/// The limit of an AMQP short string. The protocol cannot carry a longer vhost, and lapin panics on one.
const VHOST_BYTES_MAX: usize = 255;

/// The address of a broker, from a URL. A part that the URL leaves out is `None` or the protocol's default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmqpAddress {
    /// At least one, in the order of the URL.
    pub endpoints: Vec<Endpoint>,
    /// `/` when absent, and for a bare trailing slash: a vhost with an empty name is never meant.
    pub vhost: String,
    pub user: Option<String>,
    /// `amqps`.
    pub tls: bool,
    /// Whether the client certificate is the login (SASL EXTERNAL).
    pub external: bool,
}

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

/// The address that messages are posted to, from a URL.
#[derive(Clone, PartialEq, Eq)]
pub struct HttpAddress {
    pub tls: bool,
    /// Name or address; an IPv6 address has no brackets.
    pub host: String,
    pub port: u16,
    /// Path and query; `/` when absent.
    pub path: String,
}

/// Leaves out the path, which is a secret with some receivers.
impl fmt::Debug for HttpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "HttpAddress({scheme}://{}:{}/…)", self.host, self.port)
    }
}

outbox_core::words! {
    /// Why a URL was refused. No text repeats the URL: it may contain a password.
    pub enum UrlError {
        UnknownScheme = "the URL must start with amqp:// or amqps://",
        ExternalWithoutTls = "auth_mechanism=external needs amqps://: the client certificate is the login",
        CarriesPassword = "the URL must not carry a password; put it where only the server reads it",
        BadUser = "the user name in the URL is empty or not valid percent-encoded UTF-8",
        EmptyHost = "the URL contains no host",
        BadHost = "the host in the URL is not a host name, an IPv4 address or an IPv6 address in brackets",
        BadPort = "the port in the URL is not a number from 1 to 65535",
        BadVhost = "the virtual host in the URL must be at most 255 bytes of percent-encoded UTF-8, with / written as %2f and @ as %40",
        TrailingPart = "the URL must not have a fragment (#), or a query (?) other than auth_mechanism=external",
        NotHttp = "the URL must start with https:// or http://",
        CarriesUser = "the URL must not carry a user or a password; put them where only the server reads them",
        BadPath = "the path in the URL must be printable ASCII without a fragment (#); percent-encode other characters, and write @ as %40",
    }
}

impl fmt::Display for UrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::error::Error for UrlError {}

/// Parses `amqp[s]://[user@]host[:port][,host[:port]…][/vhost][?auth_mechanism=external]`. Percent-escapes are decoded
/// in user and vhost.
pub fn parse_url(url: &str) -> Result<AmqpAddress, UrlError> {
    let (tls, rest) = strip_scheme(url, "amqp", "amqps").ok_or(UrlError::UnknownScheme)?;
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(r, q)| (r, Some(q)));
    let external = query == Some(EXTERNAL);
    if rest.contains('#') || (query.is_some() && !external) {
        return Err(UrlError::TrailingPart);
    }
    if external && !tls {
        return Err(UrlError::ExternalWithoutTls);
    }
    let (authority, path) = rest.split_once('/').map_or((rest, None), |(a, p)| (a, Some(p)));
    // A raw @ after the first slash means a password that contains a slash. Never let its first half pass as a port.
    if path.is_some_and(|p| p.contains('@')) {
        return Err(if authority.contains(':') {
            UrlError::CarriesPassword
        } else {
            UrlError::BadVhost
        });
    }
    let (userinfo, hosts) = authority
        .rsplit_once('@')
        .map_or((None, authority), |(u, h)| (Some(u), h));
    let user = userinfo.map(parse_user).transpose()?;
    let default_port = if tls { DEFAULT_PORT_TLS } else { DEFAULT_PORT };
    let endpoints = hosts.split(',').map(|hostport| {
        let (host, port) = parse_host_and_port(hostport)?;
        Ok(Endpoint {
            host,
            port: port.unwrap_or(default_port),
        })
    });
    Ok(AmqpAddress {
        endpoints: endpoints.collect::<Result<_, _>>()?,
        vhost: parse_vhost(path.unwrap_or_default())?,
        user,
        tls,
        external,
    })
}

/// Parses `http[s]://host[:port][/path][?query]`. Path and query stay as they are.
pub fn parse_http_url(url: &str) -> Result<HttpAddress, UrlError> {
    let (tls, rest) = strip_scheme(url, "http", "https").ok_or(UrlError::NotHttp)?;
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if authority.contains('@') {
        return Err(UrlError::CarriesUser);
    }
    let (host, port) = parse_host_and_port(authority)?;
    if !host.is_ascii() || host.contains('%') {
        return Err(UrlError::BadHost);
    }
    // A raw @ may be the end of a password that contains a slash.
    let legal = |b: u8| b.is_ascii_graphic() && !b"@#\"<>\\^`{|}".contains(&b);
    if !path.bytes().all(legal) {
        return Err(UrlError::BadPath);
    }
    let slash = if path.starts_with('/') { "" } else { "/" };
    Ok(HttpAddress {
        tls,
        host,
        port: port.unwrap_or(if tls { HTTPS_PORT } else { HTTP_PORT }),
        path: format!("{slash}{path}"),
    })
}

/// Whether the scheme is the one that means TLS, and the rest of the URL. None: it is another one.
fn strip_scheme<'a>(url: &'a str, plain: &str, secure: &str) -> Option<(bool, &'a str)> {
    let (scheme, rest) = url.split_once("://")?;
    let tls = scheme.eq_ignore_ascii_case(secure);
    (tls || scheme.eq_ignore_ascii_case(plain)).then_some((tls, rest))
}

fn parse_user(userinfo: &str) -> Result<String, UrlError> {
    // This includes "user:@host": an empty password is one that the user meant to fill in.
    if userinfo.contains(':') {
        return Err(UrlError::CarriesPassword);
    }
    let user = percent_decode(userinfo).ok_or(UrlError::BadUser)?;
    // NUL separates the fields of SASL PLAIN: a NUL in the name would shift the password.
    if user.is_empty() || user.contains('\0') {
        return Err(UrlError::BadUser);
    }
    Ok(user)
}

fn parse_host_and_port(hostport: &str) -> Result<(String, Option<u16>), UrlError> {
    let (host, port) = if let Some(rest) = hostport.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or(UrlError::BadHost)?;
        host.parse::<Ipv6Addr>().map_err(|_| UrlError::BadHost)?;
        let port = match after {
            "" => None,
            _ => Some(after.strip_prefix(':').ok_or(UrlError::BadHost)?),
        };
        (host, port)
    } else {
        hostport.split_once(':').map_or((hostport, None), |(h, p)| (h, Some(p)))
    };
    if host.is_empty() {
        return Err(UrlError::EmptyHost);
    }
    let legal = |c: char| c.is_alphanumeric() || matches!(c, '-' | '.' | '_' | ':' | '%');
    if !host.chars().all(legal) {
        return Err(UrlError::BadHost);
    }
    Ok((host.to_owned(), port.map(parse_port).transpose()?))
}

fn parse_port(port: &str) -> Result<u16, UrlError> {
    // u16::from_str accepts "+5672"; a URL does not.
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return Err(UrlError::BadPort);
    }
    port.parse().ok().filter(|p| *p != 0).ok_or(UrlError::BadPort)
}

fn parse_vhost(path: &str) -> Result<String, UrlError> {
    if path.contains('/') {
        return Err(UrlError::BadVhost);
    }
    let vhost = percent_decode(path)
        .filter(|v| v.len() <= VHOST_BYTES_MAX)
        .ok_or(UrlError::BadVhost)?;
    Ok(if vhost.is_empty() { "/".to_owned() } else { vhost })
}

fn percent_decode(text: &str) -> Option<String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(host: &str, port: u16, vhost: &str, user: Option<&str>) -> AmqpAddress {
        let host = host.to_owned();
        AmqpAddress {
            endpoints: vec![Endpoint { host, port }],
            vhost: vhost.into(),
            user: user.map(Into::into),
            tls: false,
            external: false,
        }
    }

    #[test]
    fn missing_parts_take_the_protocols_defaults() {
        assert_eq!(parse_url("amqp://h"), Ok(address("h", 5672, "/", None)));
        assert_eq!(parse_url("amqp://h/"), Ok(address("h", 5672, "/", None)));
        assert_eq!(parse_url("AMQP://h:1"), Ok(address("h", 1, "/", None)));
    }

    #[test]
    fn amqps_has_its_own_port_and_allows_login_by_certificate() {
        let tls = |address: AmqpAddress, external| AmqpAddress {
            tls: true,
            external,
            ..address
        };
        assert_eq!(parse_url("amqps://h"), Ok(tls(address("h", 5671, "/", None), false)));
        assert_eq!(parse_url("AMQPS://h:1/v"), Ok(tls(address("h", 1, "v", None), false)));
        for url in [
            "amqps://h?auth_mechanism=external",
            "amqps://h/?auth_mechanism=external",
        ] {
            assert_eq!(parse_url(url), Ok(tls(address("h", 5671, "/", None), true)), "{url}");
        }
    }

    #[test]
    fn user_and_vhost_are_percent_decoded() {
        assert_eq!(
            parse_url("amqp://a%40b@10.0.0.1:5673/my%2fhost%20%C3%A9"),
            Ok(address("10.0.0.1", 5673, "my/host é", Some("a@b")))
        );
        assert_eq!(parse_url("amqp://h/%2F"), Ok(address("h", 5672, "/", None)));
    }

    #[test]
    fn several_hosts_keep_their_order_and_each_may_have_a_port() {
        let shown = |url| {
            let address = parse_url(url).unwrap();
            let endpoints: Vec<String> = address.endpoints.iter().map(Endpoint::to_string).collect();
            (endpoints.join(" "), address.user, address.vhost)
        };
        assert_eq!(
            shown("amqp://u@b:1,a,[::1]:2,[::2]/v"),
            ("b:1 a:5672 [::1]:2 [::2]:5672".into(), Some("u".into()), "v".into())
        );
        assert_eq!(shown("amqps://b,a:1").0, "b:5671 a:1");
        for bad in ["amqp://a,", "amqp://,a", "amqp://a,,b", "amqp://a,:1"] {
            assert_eq!(parse_url(bad), Err(UrlError::EmptyHost), "{bad}");
        }
        assert_eq!(parse_url("amqp://a,b:x"), Err(UrlError::BadPort));
        assert_eq!(parse_url("amqp://a, b"), Err(UrlError::BadHost));
        // A user belongs to all hosts.
        assert_eq!(parse_url("amqp://a,u@b"), Ok(address("b", 5672, "/", Some("a,u"))));
        assert_eq!(parse_http_url("http://a,b/"), Err(UrlError::BadHost));
    }

    #[test]
    fn an_ipv6_address_is_written_in_brackets() {
        assert_eq!(parse_url("amqp://[::1]"), Ok(address("::1", 5672, "/", None)));
        assert_eq!(
            parse_url("amqp://u@[fe80::1]:5673/v"),
            Ok(address("fe80::1", 5673, "v", Some("u")))
        );
        for bad in ["amqp://[::1", "amqp://[x]", "amqp://[::1]5672", "amqp://[]"] {
            assert_eq!(parse_url(bad), Err(UrlError::BadHost), "{bad}");
        }
    }

    #[test]
    fn each_mistake_has_its_own_error() {
        for (url, error) in [
            ("", UrlError::UnknownScheme),
            ("h:5672", UrlError::UnknownScheme),
            ("http://h", UrlError::UnknownScheme),
            ("amqp://h?auth_mechanism=external", UrlError::ExternalWithoutTls),
            ("amqps://h?auth_mechanism=plain", UrlError::TrailingPart),
            ("amqps://h?auth_mechanism=external&verify=none", UrlError::TrailingPart),
            ("amqps://h#x", UrlError::TrailingPart),
            ("amqp://", UrlError::EmptyHost),
            ("amqp:///v", UrlError::EmptyHost),
            ("amqp://:5672", UrlError::EmptyHost),
            ("amqp://u@", UrlError::EmptyHost),
            ("amqp://@h", UrlError::BadUser),
            ("amqp://%zz@h", UrlError::BadUser),
            ("amqp://a%00b@h", UrlError::BadUser),
            ("amqp://h h", UrlError::BadHost),
            ("amqp://h:", UrlError::BadPort),
            ("amqp://h:0", UrlError::BadPort),
            ("amqp://h:65536", UrlError::BadPort),
            ("amqp://h:+1", UrlError::BadPort),
            ("amqp://::1", UrlError::EmptyHost),
            ("amqp://h/%ff", UrlError::BadVhost),
            ("amqp://h/a/b", UrlError::BadVhost),
            ("amqp://h/a@b", UrlError::BadVhost),
            ("amqp://h/v?heartbeat=1", UrlError::TrailingPart),
            ("amqp://h/v?frame_max=4096", UrlError::TrailingPart),
        ] {
            assert_eq!(parse_url(url), Err(error), "{url}");
        }
        assert_eq!(
            parse_url(&format!("amqp://h/{}", "v".repeat(256))),
            Err(UrlError::BadVhost)
        );
    }

    #[test]
    fn a_password_is_refused_wherever_it_appears() {
        for url in [
            "amqp://u:hunter2@h",
            "amqp://u:@h",
            "amqp://:hunter2@h",
            "amqp://u:hun@ter2@h/v",
            "amqp://u:hun/ter2@h/v",
            "amqp://u:12/ter2@h/v",
        ] {
            assert_eq!(parse_url(url), Err(UrlError::CarriesPassword), "{url}");
        }
    }

    #[test]
    fn an_http_url_is_parsed_and_its_path_stays_unchanged() {
        for (url, tls, host, port, path) in [
            ("http://h", false, "h", 80, "/"),
            ("HTTPS://h.example/", true, "h.example", 443, "/"),
            (
                "https://[::1]:8443/a%2fb?c=d&e=%20",
                true,
                "::1",
                8443,
                "/a%2fb?c=d&e=%20",
            ),
            ("http://10.0.0.1:8080?x", false, "10.0.0.1", 8080, "/?x"),
        ] {
            let (host, path) = (host.to_owned(), path.to_owned());
            assert_eq!(parse_http_url(url), Ok(HttpAddress { tls, host, port, path }), "{url}");
        }
        let shown = format!("{:?}", parse_http_url("https://h/T00/secret").unwrap());
        assert_eq!(shown, "HttpAddress(https://h:443/…)");
    }

    #[test]
    fn each_mistake_in_an_http_url_has_its_own_error() {
        for (url, error) in [
            ("", UrlError::NotHttp),
            ("h/x", UrlError::NotHttp),
            ("amqp://h", UrlError::NotHttp),
            ("ftp://h", UrlError::NotHttp),
            ("http://", UrlError::EmptyHost),
            ("http:///x", UrlError::EmptyHost),
            ("http://u@h", UrlError::CarriesUser),
            ("http://u:hunter2@h/x", UrlError::CarriesUser),
            ("http://u:1/hunter2@h/x", UrlError::BadPath),
            ("http://h h/", UrlError::BadHost),
            ("http://fe80::1%25eth0/", UrlError::BadPort),
            ("http://[fe80::1%25eth0]/", UrlError::BadHost),
            ("http://bücher.example/", UrlError::BadHost),
            ("http://h:0/", UrlError::BadPort),
            ("http://h/#x", UrlError::BadPath),
            ("http://h#x", UrlError::BadPath),
            ("http://h/a b", UrlError::BadPath),
            ("http://h/ü", UrlError::BadPath),
            ("http://h/\r\nx: y", UrlError::BadPath),
        ] {
            assert_eq!(parse_http_url(url), Err(error), "{url}");
        }
    }

    proptest! {
        #[test]
        fn every_accepted_http_url_is_valid(rest in "\\PC{0,30}") {
            if let Ok(address) = parse_http_url(&format!("http://{rest}")) {
                let host = if address.host.contains(':') { format!("[{}]", address.host) } else { address.host };
                let uri = format!("http://{host}:{}{}", address.port, address.path).parse::<ureq::http::Uri>();
                prop_assert!(uri.is_ok(), "{rest:?}: {uri:?}");
            }
        }

        #[test]
        fn no_url_panics_and_no_error_repeats_it(scheme in "(amqps?|http|x)://", secret in "[a-z0-9]{6,12}", rest in "\\PC{0,20}") {
            for url in [format!("{scheme}u:zq{secret}@{rest}"), format!("{scheme}{rest}zq{secret}"), format!("zq{secret}{rest}")] {
                for error in [parse_url(&url).err(), parse_http_url(&url).err()].into_iter().flatten() {
                    let token = format!("zq{secret}");
                    let shown = format!("{error} {error:?}");
                    prop_assert!(!shown.contains(&token));
                }
            }
        }
    }
}
