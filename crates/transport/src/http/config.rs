//! The configuration of a publisher for an HTTP destination, as plain data. The worker's main thread writes it; the
//! publisher's threads read it.

use crate::ssrf::AllowList;
use crate::url::HttpAddress;
use crate::{Deadline, Secret};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::io;
use std::sync::Arc;
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

/// The URL of one destination. Never changed in place: stop the publisher and start another (see
/// [`crate::Publisher::start`]).
#[derive(Clone, Debug)]
pub struct HttpConfig {
    pub address: HttpAddress,
    pub auth: HttpAuth,
    /// Sent with each message. They take precedence over a message's own headers. The values may be secrets.
    pub headers: Vec<(String, Secret)>,
    /// Secrets as in Standard Webhooks (`whsec_…`): each signs each message. The current secret first, then those that
    /// it replaces.
    pub signing_secrets: Vec<Secret>,
    /// CA certificates in PEM that replace the CAs that browsers trust.
    pub ca_pem: Option<String>,
    /// The client certificate with its chain, and its key, in PEM.
    pub client_cert_pem: Option<String>,
    pub client_key_pem: Option<Secret>,
    /// Hosts and networks that may be reached although they are not public.
    pub allow: AllowList,
    /// The time limit for name lookup, TCP and TLS.
    pub connect_timeout: Duration,
    /// The time limit from the first byte of a request to the last of its answer, including the connect.
    pub timeout: Duration,
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

impl HttpConfig {
    /// A configuration for `address` with the defaults of all other fields.
    pub fn new(address: HttpAddress) -> Self {
        Self {
            address,
            auth: HttpAuth::None,
            headers: Vec::new(),
            signing_secrets: Vec::new(),
            ca_pem: None,
            client_cert_pem: None,
            client_key_pem: None,
            allow: AllowList::default(),
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(30),
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
        let problem = if self.window == 0 || times.iter().any(Duration::is_zero) {
            Err("window, timeouts and backoff must be above zero".to_owned())
        } else if !(1..=CONCURRENCY_MAX).contains(&self.concurrency) {
            Err(format!("concurrency must be from 1 to {CONCURRENCY_MAX}"))
        } else {
            self.check_tls()
        };
        problem.map_err(|text| io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    fn certificates(pem: &str, what: &str) -> Result<Vec<CertificateDer<'static>>, String> {
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
        match found {
            Ok(found) if !found.is_empty() => Ok(found),
            _ => Err(format!("{what} holds no certificate in PEM")),
        }
    }

    fn roots(&self) -> Result<Option<Vec<CertificateDer<'static>>>, String> {
        let roots = self.ca_pem.as_ref();
        roots
            .map(|pem| Self::certificates(pem, "the CA certificate"))
            .transpose()
    }

    fn identity(&self) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>, String> {
        match (&self.client_cert_pem, &self.client_key_pem) {
            (None, None) => Ok(None),
            (Some(chain), Some(key)) => {
                let chain = Self::certificates(chain, "the client certificate")?;
                let key = PrivateKeyDer::from_pem_slice(key.reveal().as_bytes())
                    .map_err(|_| "the client key is not an unencrypted private key in PEM".to_owned())?;
                Ok(Some((chain, key)))
            }
            _ => Err("client certificate and client key must be set together".to_owned()),
        }
    }

    /// Checks the certificates. ureq ignores a CA that it cannot read, and panics on a key that does not match its
    /// certificate.
    fn check_tls(&self) -> Result<(), String> {
        let mut store = RootCertStore::empty();
        for root in self.roots()?.unwrap_or_default() {
            let added = store.add(root);
            added.map_err(|error| format!("the CA certificate cannot be used: {error}"))?;
        }
        if let Some((chain, key)) = self.identity()? {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?
                .with_root_certificates(store)
                .with_client_auth_cert(chain, key)
                .map_err(|error| format!("client certificate and key cannot be used: {error}"))?;
        }
        Ok(())
    }

    pub(crate) fn tls_config(&self) -> Result<TlsConfig, String> {
        let of_der = |der: CertificateDer<'_>| Certificate::from_der(&der).to_owned();
        let mut builder = TlsConfig::builder();
        if let Some(roots) = self.roots()? {
            let roots: Vec<_> = roots.into_iter().map(of_der).collect();
            builder = builder.root_certs(RootCerts::from(roots));
        }
        if let Some((chain, _)) = self.identity()? {
            let chain: Vec<_> = chain.into_iter().map(of_der).collect();
            let key = self.client_key_pem.as_ref().map(Secret::reveal).unwrap_or_default();
            let key = PrivateKey::from_pem(key.as_bytes()).map_err(|_| "the client key is not readable".to_owned())?;
            builder = builder.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
        }
        Ok(builder.build())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carrier::Carrier;

    fn good() -> HttpConfig {
        HttpConfig::new(crate::parse_http_url("https://h/path-that-is-secret").unwrap())
    }

    #[test]
    fn no_format_string_shows_a_secret() {
        let config = HttpConfig {
            auth: HttpAuth::Basic {
                user: "u".into(),
                password: Secret::new("hunter2"),
            },
            headers: vec![("x-api-key".into(), Secret::new("hunter2"))],
            signing_secrets: vec![Secret::new("whsec_hunter2")],
            client_key_pem: Some(Secret::new("hunter2")),
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
        let header = |name: &str, value: &str| HttpConfig {
            headers: vec![(name.into(), Secret::new(value))],
            ..good()
        };
        let bearer = |token: &str| HttpConfig {
            auth: HttpAuth::Bearer(Secret::new(token)),
            ..good()
        };
        let tls = |ca: Option<&str>, cert: Option<&str>, key: Option<&str>| HttpConfig {
            ca_pem: ca.map(Into::into),
            client_cert_pem: cert.map(Into::into),
            client_key_pem: key.map(Secret::new),
            ..good()
        };
        assert!(good().check().is_ok());
        assert!(header("X-Source", "pg").check().is_ok());
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
            (header("x y", "v"), "x y"),
            (header("Content-Length", "1"), "content-length"),
            (header("webhook-id", "1"), "webhook-id"),
            (header("x", "hunter2\n"), "header x"),
            (tls(Some("no PEM"), None, None), "CA"),
            (tls(Some(pem), None, None), "CA"),
            (tls(None, Some(pem), None), "together"),
            (tls(None, None, Some(key)), "together"),
            (tls(None, Some("no PEM"), Some(key)), "client certificate"),
            (tls(None, Some(pem), Some("hunter2")), "client key"),
            (tls(None, Some(pem), Some(key)), "cannot be used"),
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
