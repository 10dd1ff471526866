//! The URL of a broker: `amqp://` or `amqps://`. Pure; see [`crate::url`].

use crate::url::{CARRIES_PASSWORD, Endpoint, UrlError, parse_authority, percent_decode, strip_scheme};

const DEFAULT_PORT: u16 = 5672;
const DEFAULT_PORT_TLS: u16 = 5671;
/// The only query that is accepted, as RabbitMQ's URI specification writes it.
const EXTERNAL: &str = "auth_mechanism=external";
/// The limit of an AMQP short string. The protocol cannot carry a longer vhost, and lapin panics on one.
const VHOST_BYTES_MAX: usize = 255;

const UNKNOWN_SCHEME: UrlError = UrlError("the URL must start with amqp:// or amqps://");
const EXTERNAL_WITHOUT_TLS: UrlError =
    UrlError("auth_mechanism=external needs amqps://: the client certificate is the login");
const BAD_VHOST: UrlError = UrlError(
    "the virtual host in the URL must be at most 255 bytes of percent-encoded UTF-8, with / written as %2f and @ as %40",
);
const TRAILING_PART: UrlError =
    UrlError("the URL must not have a fragment (#), or a query (?) other than auth_mechanism=external");

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

/// Parses `amqp[s]://[user@]host[:port][,host[:port]…][/vhost][?auth_mechanism=external]`. Percent-escapes are decoded
/// in user and vhost.
pub fn parse_url(url: &str) -> Result<AmqpAddress, UrlError> {
    let (tls, rest) = strip_scheme(url, "amqp", "amqps").ok_or(UNKNOWN_SCHEME)?;
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(r, q)| (r, Some(q)));
    let external = query == Some(EXTERNAL);
    if rest.contains('#') || (query.is_some() && !external) {
        return Err(TRAILING_PART);
    }
    if external && !tls {
        return Err(EXTERNAL_WITHOUT_TLS);
    }
    let (authority, path) = rest.split_once('/').map_or((rest, None), |(a, p)| (a, Some(p)));
    // A raw @ after the first slash means a password that contains a slash. Never let its first half pass as a port.
    if path.is_some_and(|p| p.contains('@')) {
        return Err(if authority.contains(':') {
            CARRIES_PASSWORD
        } else {
            BAD_VHOST
        });
    }
    let default_port = if tls { DEFAULT_PORT_TLS } else { DEFAULT_PORT };
    let (user, endpoints) = parse_authority(authority, default_port)?;
    Ok(AmqpAddress {
        endpoints,
        vhost: parse_vhost(path.unwrap_or_default())?,
        user,
        tls,
        external,
    })
}

fn parse_vhost(path: &str) -> Result<String, UrlError> {
    if path.contains('/') {
        return Err(BAD_VHOST);
    }
    let vhost = percent_decode(path)
        .filter(|v| v.len() <= VHOST_BYTES_MAX)
        .ok_or(BAD_VHOST)?;
    Ok(if vhost.is_empty() { "/".to_owned() } else { vhost })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::{BAD_HOST, BAD_PORT, BAD_USER, EMPTY_HOST};
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
            assert_eq!(parse_url(bad), Err(EMPTY_HOST), "{bad}");
        }
        assert_eq!(parse_url("amqp://a,b:x"), Err(BAD_PORT));
        assert_eq!(parse_url("amqp://a, b"), Err(BAD_HOST));
        // A user belongs to all hosts.
        assert_eq!(parse_url("amqp://a,u@b"), Ok(address("b", 5672, "/", Some("a,u"))));
    }

    #[test]
    fn an_ipv6_address_is_written_in_brackets() {
        assert_eq!(parse_url("amqp://[::1]"), Ok(address("::1", 5672, "/", None)));
        assert_eq!(
            parse_url("amqp://u@[fe80::1]:5673/v"),
            Ok(address("fe80::1", 5673, "v", Some("u")))
        );
        for bad in ["amqp://[::1", "amqp://[x]", "amqp://[::1]5672", "amqp://[]"] {
            assert_eq!(parse_url(bad), Err(BAD_HOST), "{bad}");
        }
    }

    #[test]
    fn each_mistake_has_its_own_error() {
        for (url, error) in [
            ("", UNKNOWN_SCHEME),
            ("h:5672", UNKNOWN_SCHEME),
            ("http://h", UNKNOWN_SCHEME),
            ("amqp://h?auth_mechanism=external", EXTERNAL_WITHOUT_TLS),
            ("amqps://h?auth_mechanism=plain", TRAILING_PART),
            ("amqps://h?auth_mechanism=external&verify=none", TRAILING_PART),
            ("amqps://h#x", TRAILING_PART),
            ("amqp://", EMPTY_HOST),
            ("amqp:///v", EMPTY_HOST),
            ("amqp://:5672", EMPTY_HOST),
            ("amqp://u@", EMPTY_HOST),
            ("amqp://@h", BAD_USER),
            ("amqp://%zz@h", BAD_USER),
            ("amqp://a%00b@h", BAD_USER),
            ("amqp://h h", BAD_HOST),
            ("amqp://h:", BAD_PORT),
            ("amqp://h:0", BAD_PORT),
            ("amqp://h:65536", BAD_PORT),
            ("amqp://h:+1", BAD_PORT),
            ("amqp://::1", EMPTY_HOST),
            ("amqp://h/%ff", BAD_VHOST),
            ("amqp://h/a/b", BAD_VHOST),
            ("amqp://h/a@b", BAD_VHOST),
            ("amqp://h/v?heartbeat=1", TRAILING_PART),
            ("amqp://h/v?frame_max=4096", TRAILING_PART),
        ] {
            assert_eq!(parse_url(url), Err(error), "{url}");
        }
        assert_eq!(parse_url(&format!("amqp://h/{}", "v".repeat(256))), Err(BAD_VHOST));
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
            assert_eq!(parse_url(url), Err(CARRIES_PASSWORD), "{url}");
        }
    }

    proptest! {
        #[test]
        fn no_url_panics_and_no_error_repeats_it(scheme in "(amqps?|x)://", secret in "[a-z0-9]{6,12}", rest in "\\PC{0,20}") {
            for url in [format!("{scheme}u:zq{secret}@{rest}"), format!("{scheme}{rest}zq{secret}"), format!("zq{secret}{rest}")] {
                if let Err(error) = parse_url(&url) {
                    let shown = format!("{error} {error:?}");
                    let token = format!("zq{secret}");
                    prop_assert!(!shown.contains(&token));
                }
            }
        }
    }
}
