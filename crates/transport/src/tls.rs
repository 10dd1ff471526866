//! Which CAs a TLS connection trusts, which certificate it shows, and what its errors mean. Knows no protocol above
//! TLS, so that every transport can use it.
//!
//! The peer's certificate and name are always checked; there is no switch to turn this off. TLS 1.2 and 1.3.

use crate::down::{DownReason, Fault};
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error, InconsistentKeys, RootCertStore, SignatureScheme,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};

/// The settings of a TLS connection. The default trusts the CAs of the system and shows no client certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// The CAs that may have issued the peer's certificate, in PEM; None = those of the system.
    pub ca_pem: Option<Vec<u8>>,
    pub client: Option<ClientCertificate>,
    /// The name that the peer's certificate must have; None = the host of the connection.
    pub server_name: Option<String>,
}

/// The certificate that is shown to a peer that requests one.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The client certificate first, then the intermediate certificates up to a CA that the peer knows.
    pub cert_pem: Vec<u8>,
    pub key_pem: Vec<u8>,
}

/// Shows neither certificate nor key: the key is a secret.
impl fmt::Debug for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientCertificate(…)")
    }
}

/// Why given certificates cannot be used. `problem` continues a sentence that begins with the name of the part. It
/// never contains any part of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsError {
    pub part: TlsPart,
    pub problem: String,
}

/// The part of the TLS settings that has the problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPart {
    Ca,
    Certificate,
    Key,
    ServerName,
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = match self.part {
            TlsPart::Ca => "the CA file",
            TlsPart::Certificate => "the certificate file",
            TlsPart::Key => "the key file",
            TlsPart::ServerName => "the host",
        };
        write!(f, "{part} {}", self.problem)
    }
}

impl std::error::Error for TlsError {}

pub(crate) fn wrong<T>(part: TlsPart, problem: impl Into<String>) -> Result<T, TlsError> {
    Err(TlsError {
        part,
        problem: problem.into(),
    })
}

impl Tls {
    /// Builds the configuration of rustls. Reads the system's CAs from files if they are needed, which takes a few ms.
    pub fn client_config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        self.trusting(match &self.ca_pem {
            Some(pem) => given_roots(pem)?,
            None => system_roots()?,
        })
    }

    /// Checks the given certificates.
    pub(crate) fn check(&self) -> Result<(), TlsError> {
        let given = self.ca_pem.as_deref().map(given_roots).transpose()?;
        self.trusting(given.unwrap_or_else(RootCertStore::empty)).map(drop)
    }

    fn trusting(&self, roots: RootCertStore) -> Result<Arc<ClientConfig>, TlsError> {
        // The provider is named explicitly: the process default panics if no crate has set it, or more than one.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring can do TLS 1.2 and 1.3")
            .with_root_certificates(roots);
        let mut config = match &self.client {
            None => builder.with_no_client_auth(),
            Some(client) => builder
                .with_client_auth_cert(certificates(TlsPart::Certificate, &client.cert_pem)?, client.key()?)
                .or_else(|error| match error {
                    Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                        wrong(TlsPart::Key, "does not belong to the certificate")
                    }
                    Error::InvalidCertificate(problem) if says(&problem, VERSION_1) => wrong(
                        TlsPart::Certificate,
                        "holds a certificate of X.509 version 1; version 3 is needed",
                    ),
                    Error::InvalidCertificate(_) => wrong(TlsPart::Certificate, "holds a broken certificate"),
                    _ => wrong(
                        TlsPart::Key,
                        "holds a key of a type that is not supported (use RSA, ECDSA or Ed25519)",
                    ),
                })?,
        };
        // A resumed session keeps the result of the checks at its start. Since then the certificate may have expired,
        // or its CA may have lost its trust.
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// The name that the peer's certificate must be valid for.
    pub fn server_name(&self, host: &str) -> Result<ServerName<'static>, TlsError> {
        let name = self.server_name.as_deref().unwrap_or(host);
        ServerName::try_from(name.to_owned()).or_else(|_| {
            wrong(
                TlsPart::ServerName,
                format!("{name:?} is neither a DNS name nor an IP address, so no certificate can be for it"),
            )
        })
    }
}

impl ClientCertificate {
    fn key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        let holds = |text: &str| self.key_pem.windows(text.len()).any(|part| part == text.as_bytes());
        PrivateKeyDer::from_pem_slice(&self.key_pem).or_else(|_| {
            if holds("ENCRYPTED") {
                // PKCS #8, and the older format with a Proc-Type line.
                wrong(TlsPart::Key, "is encrypted; only keys without a password are supported")
            } else {
                wrong(TlsPart::Key, "holds no private key in PEM")
            }
        })
    }
}

fn given_roots(pem: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(TlsPart::Ca, pem)? {
        roots
            .add(certificate)
            .or_else(|_| wrong(TlsPart::Ca, "holds a broken certificate"))?;
    }
    Ok(roots)
}

/// The CAs of the system. A CA that cannot be parsed is left out, as other programs on this machine do.
fn system_roots() -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        return wrong(
            TlsPart::Ca,
            "is not set and this system has no CA certificates (package ca-certificates)",
        );
    }
    Ok(roots)
}

/// All certificates of a PEM file, at least one.
pub(crate) fn certificates(part: TlsPart, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => wrong(part, "holds no certificate in PEM"),
        Err(_) => wrong(part, "is not valid PEM"),
    }
}

/// Records whether the peer has requested a client certificate.
///
/// In TLS 1.3 the client's handshake is complete before the server has checked the client's certificate. A server that
/// gets none sends an alert and closes the connection, and the alert may be lost with it. Then this record is the only
/// evidence of the cause.
#[derive(Clone, Debug, Default)]
pub(crate) struct CertificateRequested(Arc<AtomicBool>);

impl CertificateRequested {
    /// A copy of `config` for one connection, which records the request here.
    pub(crate) fn record_in(&self, config: &ClientConfig) -> Arc<ClientConfig> {
        let mut config = config.clone();
        config.client_auth_cert_resolver = Arc::new(Recording {
            requested: self.clone(),
            resolver: config.client_auth_cert_resolver,
        });
        Arc::new(config)
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Recording {
    requested: CertificateRequested,
    resolver: Arc<dyn ResolvesClientCert>,
}

impl ResolvesClientCert for Recording {
    fn resolve(&self, issuers: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.requested.0.store(true, Ordering::Relaxed);
        self.resolver.resolve(issuers, schemes)
    }

    fn has_certs(&self) -> bool {
        self.resolver.has_certs()
    }
}

/// The TLS error inside an I/O error, if there is one.
pub(crate) fn error_in(error: &std::io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

/// The fault of a TLS connection that failed with this error.
pub(crate) fn fault(error: &Error) -> Fault {
    use AlertDescription as A;
    use CertificateError as C;
    let code = match error {
        Error::InvalidCertificate(C::UnknownIssuer | C::BadSignature) => "tls_ca",
        Error::AlertReceived(A::HandshakeFailure) => "tls_handshake",
        Error::AlertReceived(alert) if is_about_certificate(*alert) => CLIENT_CERTIFICATE,
        _ => DownReason::TLS_FAILED.name(),
    };
    Fault::coded(DownReason::TLS_FAILED, code, explain(error))
}

/// The code of a peer that refuses or lacks the client certificate.
pub(crate) const CLIENT_CERTIFICATE: &str = "tls_client_certificate";

fn is_about_certificate(alert: AlertDescription) -> bool {
    use AlertDescription as A;
    matches!(
        alert,
        A::CertificateRequired
            | A::BadCertificate
            | A::UnsupportedCertificate
            | A::CertificateRevoked
            | A::CertificateExpired
            | A::CertificateUnknown
            | A::UnknownCA
            | A::AccessDenied
            | A::DecryptError
    )
}

/// Describes a TLS error for a reader who did not create the certificates.
fn explain(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(problem) => explain_certificate(problem),
        Error::AlertReceived(alert) => explain_alert(*alert),
        Error::InvalidMessage(_) => format!("the peer does not speak TLS ({error})"),
        Error::PeerIncompatible(_) => format!("the peer supports neither TLS 1.2 nor TLS 1.3 ({error})"),
        _ => error.to_string(),
    }
}

fn explain_certificate(problem: &CertificateError) -> String {
    use CertificateError as C;
    match problem {
        C::ExpiredContext { not_after, .. } => format!("the peer's certificate expired on {}", day(*not_after)),
        C::NotValidYetContext { not_before, .. } => {
            format!(
                "the peer's certificate is not valid before {}; is the clock of this machine right?",
                day(*not_before)
            )
        }
        C::NotValidForNameContext { expected, presented } => {
            let expected = expected.to_str();
            match presented.as_slice() {
                [] => {
                    format!("the peer's certificate names no host in its subjectAltName, so it is not for {expected}")
                }
                names => format!(
                    "the peer's certificate is for {}, not for {expected}",
                    names.iter().map(|name| plain(name)).collect::<Vec<_>>().join(", ")
                ),
            }
        }
        C::UnknownIssuer => "the peer's certificate comes from a CA that is not trusted here".to_owned(),
        C::BadSignature => {
            "the peer's certificate is not signed by the CA that it names; an older CA of that name may be trusted here"
                .to_owned()
        }
        C::InvalidPurposeContext { .. } | C::InvalidPurpose => {
            "the peer's certificate is not one for servers (extendedKeyUsage)".to_owned()
        }
        other if says(other, CA_AS_SERVER) => {
            "the peer's certificate is a CA certificate, which a server must not use: make one with basicConstraints=CA:FALSE"
                .to_owned()
        }
        other if says(other, VERSION_1) => {
            "the peer's certificate is of X.509 version 1; version 3 is needed, with a subjectAltName".to_owned()
        }
        other => format!("the peer's certificate is not accepted: {other}"),
    }
}

/// Error names of webpki that rustls does not map to its own. `openssl x509 -req` makes version 1 certificates unless
/// it is given extensions.
const CA_AS_SERVER: &str = "CaUsedAsEndEntity";
const VERSION_1: &str = "UnsupportedCertVersion";

fn says(problem: &CertificateError, word: &str) -> bool {
    matches!(problem, CertificateError::Other(other) if other.0.to_string() == word)
}

/// The name inside `DnsName("a.example")`, which is how rustls shows it.
fn plain(name: &str) -> &str {
    name.split_once('(')
        .map_or(name, |(_, name)| name.trim_end_matches(')'))
        .trim_matches('"')
}

fn explain_alert(alert: AlertDescription) -> String {
    use AlertDescription as A;
    match alert {
        A::CertificateRequired => "the peer requires a client certificate".to_owned(),
        _ if is_about_certificate(alert) => format!("the peer refuses our client certificate (alert {alert:?})"),
        A::ProtocolVersion => "the peer supports neither TLS 1.2 nor TLS 1.3".to_owned(),
        A::HandshakeFailure => {
            "the peer refuses the handshake: no cipher or no type of key in common, or no client certificate".to_owned()
        }
        A::UnrecognisedName => "the peer does not know the host name in the URL".to_owned(),
        _ => format!("the peer ended the TLS connection (alert {alert:?})"),
    }
}

/// No certificate is valid for longer, and httpdate panics beyond it.
const YEAR_9999_ENDS: u64 = 253_402_300_799;

/// The date in UTC, as `31 Jan 2026`.
fn day(time: UnixTime) -> String {
    let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(time.as_secs().min(YEAR_9999_ENDS)));
    date[5..16].to_owned() // of "Sat, 31 Jan 2026 12:00:00 GMT"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authority() -> (Vec<u8>, rcgen::Issuer<'static, rcgen::KeyPair>) {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        (pem.into_bytes(), rcgen::Issuer::new(params, key))
    }

    fn client() -> ClientCertificate {
        let (_, issuer) = authority();
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        ClientCertificate {
            cert_pem: params.signed_by(&key, &issuer).unwrap().pem().into_bytes(),
            key_pem: key.serialize_pem().into_bytes(),
        }
    }

    fn refusal(ca: &[u8], client: Option<ClientCertificate>) -> String {
        let tls = Tls {
            ca_pem: Some(ca.to_vec()),
            client,
            server_name: None,
        };
        tls.client_config().unwrap_err().to_string()
    }

    #[test]
    fn given_certificates_are_used() {
        let tls = Tls {
            ca_pem: Some([authority().0, authority().0].concat()),
            client: Some(client()),
            server_name: None,
        };
        assert!(tls.client_config().is_ok());
    }

    #[test]
    fn each_file_that_cannot_be_used_is_named_with_its_problem() {
        let (ca, _) = authority();
        let good = client();
        assert_eq!(refusal(b"", None), "the CA file holds no certificate in PEM");
        assert_eq!(refusal(&good.key_pem, None), "the CA file holds no certificate in PEM");
        let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert_eq!(refusal(broken, None), "the CA file holds a broken certificate");
        assert_eq!(
            refusal(b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", None),
            "the CA file is not valid PEM"
        );
        let with = |cert: &[u8], key: &[u8]| {
            let client = ClientCertificate {
                cert_pem: cert.to_vec(),
                key_pem: key.to_vec(),
            };
            refusal(&ca, Some(client))
        };
        let (cert, key) = (good.cert_pem.as_slice(), good.key_pem.as_slice());
        assert_eq!(with(key, key), "the certificate file holds no certificate in PEM");
        assert_eq!(with(broken, key), "the certificate file holds a broken certificate");
        assert_eq!(with(cert, cert), "the key file holds no private key in PEM");
        assert_eq!(
            with(cert, &client().key_pem),
            "the key file does not belong to the certificate"
        );
        let encrypted = b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
        assert!(with(cert, encrypted).contains("is encrypted"));
        let unsupported = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        assert!(with(cert, unsupported).contains("not supported"));
    }

    #[test]
    fn a_host_that_no_certificate_can_be_for_is_refused() {
        let tls = Tls::default();
        for good in ["localhost", "10.0.0.1", "::1", "rabbit_1.example"] {
            assert!(tls.server_name(good).is_ok(), "{good}");
        }
        assert!(
            tls.server_name("fe80::1%eth0")
                .unwrap_err()
                .to_string()
                .contains("eth0")
        );
        let named = Tls {
            server_name: Some("rabbit".into()),
            ..tls
        };
        assert_eq!(named.server_name("10.0.0.1").unwrap().to_str(), "rabbit");
    }

    #[test]
    fn no_format_string_shows_the_key() {
        let client = client();
        let key = String::from_utf8(client.key_pem.clone()).unwrap();
        let tls = Tls {
            client: Some(client),
            ..Tls::default()
        };
        let shown = format!("{tls:?} {tls:#?}");
        assert!(key.lines().all(|line| !shown.contains(line)), "{shown}");
        // Nor as a list of byte values.
        assert!(!shown.contains("45, 45"), "{shown}");
    }

    #[test]
    fn a_time_is_shown_as_its_date() {
        for (seconds, date) in [
            (0, "01 Jan 1970"),
            (951_782_400, "29 Feb 2000"),
            (1_704_067_199, "31 Dec 2023"),
            (4_107_542_400, "01 Mar 2100"),
        ] {
            assert_eq!(day(UnixTime::since_unix_epoch(Duration::from_secs(seconds))), date);
        }
    }
}
