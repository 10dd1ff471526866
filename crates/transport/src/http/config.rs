//! The configuration of a publisher for an HTTP destination, as plain data. The worker's main thread writes it; the
//! publisher's threads read it.

use super::url::HttpAddress;
use crate::lookup::CONNECTION_LIFE;
use crate::ssrf::AllowList;
use crate::tls::{self, Tls, TlsError, TlsPart};
use crate::transfer::{MIN_SEND_RATE, TransferLimits};
use crate::{Deadline, Secret};
use std::io;
use std::time::Duration;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};

/// The limit of requests at a time. Each takes a thread, and more threads than this are too many for one destination.
const CONCURRENCY_MAX: usize = 64;

/// The credentials of a request.
#[derive(Clone, Debug, Default)]
pub enum HttpAuth {
    #[default]
    None,
    /// `Authorization: Bearer …`
    Bearer(Secret),
    /// `Authorization: Basic …`
    Basic { user: String, password: Secret },
}

/// The longest pause that an answer can ask for, unless a destination has another one.
pub(super) const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// The URL of one destination. Never changed in place: stop the publisher and start another (see
/// [`crate::Publisher::start`]).
#[derive(Clone, Debug)]
pub struct HttpConfig {
    pub address: HttpAddress,
    pub auth: HttpAuth,
    /// Secrets as in Standard Webhooks (`whsec_…`): each signs each message. The current secret first, then those that
    /// it replaces.
    pub signing_secrets: Vec<Secret>,
    /// Headers of each request whose values are secret.
    pub secret_headers: Vec<(String, Secret)>,
    /// Without a CA, those that browsers trust.
    pub tls: Tls,
    /// Hosts and networks that may be reached although they are not public.
    pub allow: AllowList,
    /// The time limit for name lookup, TCP and TLS. The addresses of the host share it.
    pub connect_timeout: Duration,
    /// After this time a connection to a host with a name is not used again.
    pub connection_life: Duration,
    /// The time limit for the answer once the receiver has taken the request, and before that for the next bytes of the
    /// request. Connecting counts, too.
    pub timeout: Duration,
    /// The lowest rate at which bytes extend it, in bytes a second.
    pub min_send_rate: u32,
    /// The longest pause that an answer can ask for.
    pub retry_after_max: Duration,
    /// The most requests at a time, and so the most threads. They are for different keys, and never more than the
    /// window.
    pub concurrency: usize,
    /// The most messages that may be taken and not answered yet, at least 1.
    pub window: usize,
    /// Part of the user agent.
    pub connection_name: String,
    /// The pause after the first failure of the destination; it doubles up to `backoff_max`. `Retry-After` can make it
    /// longer.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
    /// No byte is sent after it.
    pub deadline: Deadline,
}

/// A configuration that could never work.
pub(crate) fn invalid(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

impl HttpConfig {
    /// A configuration for `address` with the defaults of all other fields.
    pub fn new(address: HttpAddress) -> Self {
        Self {
            address,
            auth: HttpAuth::None,
            signing_secrets: Vec::new(),
            secret_headers: Vec::new(),
            tls: Tls::default(),
            allow: AllowList::default(),
            connect_timeout: Duration::from_secs(5),
            connection_life: CONNECTION_LIFE,
            timeout: Duration::from_secs(30),
            min_send_rate: MIN_SEND_RATE,
            retry_after_max: RETRY_AFTER_MAX,
            concurrency: 8,
            window: 1000,
            connection_name: String::new(),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            deadline: Deadline::default(),
        }
    }

    /// Refuses what ureq would panic on or what could never work, before a thread exists. No error repeats a secret.
    pub(crate) fn validate(&self) -> io::Result<()> {
        let times = [self.timeout, self.connect_timeout, self.backoff_min];
        if self.window == 0 || self.min_send_rate == 0 || times.iter().any(Duration::is_zero) {
            return Err(invalid(
                "window, timeouts, backoff and min_send_rate must be above zero",
            ));
        }
        if !(1..=CONCURRENCY_MAX).contains(&self.concurrency) {
            return Err(invalid(format!("concurrency must be from 1 to {CONCURRENCY_MAX}")));
        }
        // ureq ignores a CA that it cannot read, and panics on a key that does not match its certificate.
        self.tls.check().map_err(invalid)
    }

    pub(crate) fn transfer_limits(&self) -> TransferLimits {
        TransferLimits {
            timeout: self.timeout,
            min_rate: self.min_send_rate,
        }
    }

    /// The certificates as ureq takes them: the CAs that browsers trust unless others are given.
    pub(crate) fn tls_config(&self) -> Result<TlsConfig, TlsError> {
        let mut builder = TlsConfig::builder();
        let all = |part, pem: &[u8]| -> Result<Vec<Certificate<'static>>, TlsError> {
            let found = tls::certificates(part, pem)?;
            Ok(found.iter().map(|der| Certificate::from_der(der).to_owned()).collect())
        };
        if let Some(pem) = &self.tls.ca_pem {
            builder = builder.root_certs(RootCerts::from(all(TlsPart::Ca, pem)?));
        }
        if let Some(client) = &self.tls.client {
            let key = PrivateKey::from_pem(&client.key_pem).or_else(|_| tls::wrong(TlsPart::Key, "cannot be read"))?;
            let chain = all(TlsPart::Certificate, &client.cert_pem)?;
            builder = builder.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
        }
        Ok(builder.build())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Transport;

    fn good() -> HttpConfig {
        HttpConfig::new(crate::parse_http_url("https://h/path-that-is-secret").unwrap())
    }

    fn tls(ca: Option<&str>, client: Option<(&str, &str)>) -> HttpConfig {
        let client = client.map(|(cert, key)| crate::ClientCertificate {
            cert_pem: cert.into(),
            key_pem: key.into(),
        });
        HttpConfig {
            tls: Tls {
                ca_pem: ca.map(Into::into),
                client,
                server_name: None,
            },
            ..good()
        }
    }

    #[test]
    fn no_format_string_shows_a_secret() {
        let config = HttpConfig {
            auth: HttpAuth::Basic {
                user: "u".into(),
                password: Secret::new("hunter2"),
            },
            signing_secrets: vec![Secret::new("whsec_hunter2")],
            tls: tls(None, Some(("hunter2", "hunter2"))).tls,
            ..good()
        };
        let shown = format!("{config:?} {config:#?} {:?}", HttpAuth::Bearer(Secret::new("hunter2")));
        assert!(
            !shown.contains("hunter2") && !shown.contains("path-that-is-secret"),
            "{shown}"
        );
    }

    #[test]
    fn a_configuration_that_could_never_work_is_refused_before_a_thread_starts() {
        let pem = "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n";
        let key = "-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n";
        let bearer = |token: &str| HttpConfig {
            auth: HttpAuth::Bearer(Secret::new(token)),
            ..good()
        };
        assert!(good().check().is_ok());
        for (bad, expected) in [
            (HttpConfig { window: 0, ..good() }, "window"),
            (
                HttpConfig {
                    timeout: Duration::ZERO,
                    ..good()
                },
                "timeouts",
            ),
            (
                HttpConfig {
                    min_send_rate: 0,
                    ..good()
                },
                "min_send_rate",
            ),
            (
                HttpConfig {
                    concurrency: 0,
                    ..good()
                },
                "concurrency",
            ),
            (
                HttpConfig {
                    concurrency: 65,
                    ..good()
                },
                "concurrency",
            ),
            (
                HttpConfig {
                    signing_secrets: vec![Secret::new("hunter2")],
                    ..good()
                },
                "whsec_",
            ),
            (bearer("hunter2\r\nx: y"), "token"),
            (bearer(""), "token"),
            (tls(Some("no PEM"), None), "the CA file holds no certificate in PEM"),
            (tls(Some(pem), None), "the CA file holds a broken certificate"),
            (
                tls(None, Some(("no PEM", key))),
                "the certificate file holds no certificate in PEM",
            ),
            (
                tls(None, Some((pem, "hunter2"))),
                "the key file holds no private key in PEM",
            ),
            (
                tls(None, Some((pem, key))),
                "the key file holds a key of a type that is not supported",
            ),
        ] {
            let error = bad.check().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            let text = error.to_string();
            assert!(
                text.contains(expected) && !text.contains("hunter2"),
                "{text}, not {expected}"
            );
        }
    }
}
