//! The URL that messages are posted to. Pure; see [`crate::url`].

use crate::url::{BAD_HOST, UrlError, parse_host_and_port, strip_scheme};
use std::fmt;

const HTTP_PORT: u16 = 80;
const HTTPS_PORT: u16 = 443;

const NOT_HTTP: UrlError = UrlError("the URL must start with https:// or http://");
const CARRIES_USER: UrlError =
    UrlError("the URL must not carry a user or a password; put them where only the server reads them");
const BAD_PATH: UrlError = UrlError(
    "the path in the URL must be printable ASCII without a fragment (#); percent-encode other characters, and write @ as %40",
);

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

/// Parses `http[s]://host[:port][/path][?query]`. Path and query stay as they are.
pub fn parse_http_url(url: &str) -> Result<HttpAddress, UrlError> {
    let (tls, rest) = strip_scheme(url, "http", "https").ok_or(NOT_HTTP)?;
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if authority.contains('@') {
        return Err(CARRIES_USER);
    }
    let (host, port) = parse_host_and_port(authority)?;
    if !host.is_ascii() || host.contains('%') {
        return Err(BAD_HOST);
    }
    // A raw @ may be the end of a password that contains a slash.
    let legal = |b: u8| b.is_ascii_graphic() && !b"@#\"<>\\^`{|}".contains(&b);
    if !path.bytes().all(legal) {
        return Err(BAD_PATH);
    }
    let slash = if path.starts_with('/') { "" } else { "/" };
    Ok(HttpAddress {
        tls,
        host,
        port: port.unwrap_or(if tls { HTTPS_PORT } else { HTTP_PORT }),
        path: format!("{slash}{path}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::{BAD_PORT, EMPTY_HOST};
    use proptest::prelude::*;

    #[test]
    fn a_url_has_one_host() {
        assert_eq!(parse_http_url("http://a,b/"), Err(BAD_HOST));
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
            ("", NOT_HTTP),
            ("h/x", NOT_HTTP),
            ("amqp://h", NOT_HTTP),
            ("ftp://h", NOT_HTTP),
            ("http://", EMPTY_HOST),
            ("http:///x", EMPTY_HOST),
            ("http://u@h", CARRIES_USER),
            ("http://u:hunter2@h/x", CARRIES_USER),
            ("http://u:1/hunter2@h/x", BAD_PATH),
            ("http://h h/", BAD_HOST),
            ("http://fe80::1%25eth0/", BAD_PORT),
            ("http://[fe80::1%25eth0]/", BAD_HOST),
            ("http://bücher.example/", BAD_HOST),
            ("http://h:0/", BAD_PORT),
            ("http://h/#x", BAD_PATH),
            ("http://h#x", BAD_PATH),
            ("http://h/a b", BAD_PATH),
            ("http://h/ü", BAD_PATH),
            ("http://h/\r\nx: y", BAD_PATH),
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
        fn no_url_panics_and_no_error_repeats_it(scheme in "(https?|x)://", secret in "[a-z0-9]{6,12}", rest in "\\PC{0,20}") {
            for url in [format!("{scheme}u:zq{secret}@{rest}"), format!("{scheme}{rest}zq{secret}"), format!("zq{secret}{rest}")] {
                if let Err(error) = parse_http_url(&url) {
                    let shown = format!("{error} {error:?}");
                    let token = format!("zq{secret}");
                    prop_assert!(!shown.contains(&token));
                }
            }
        }
    }
}
