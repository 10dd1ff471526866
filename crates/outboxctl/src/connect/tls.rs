//! The TLS configuration for libpq's sslmode, with rustls and ring.
//!
//! The trap: libpq checks the issuer of a certificate whenever a file of trusted certificates exists. That includes the
//! default file and the mode `require`. It checks the name only with `verify-full`.

use super::target::{Roots, SslMode, TlsWanted};
use crate::failure::{Code, Failure};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The files in which Linux distributions keep the certificates of public authorities.
const SYSTEM_ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The configuration for one connection. The verifier sets `begun` when the server has sent its certificate.
pub fn config(wanted: &TlsWanted, begun: Arc<AtomicBool>) -> Result<ClientConfig, Failure> {
    // The default provider of the process panics if no crate or more than one has set it, so the provider is named
    // here.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut versions = Vec::new();
    if wanted.versions.tls12 {
        versions.push(&rustls::version::TLS12);
    }
    if wanted.versions.tls13 {
        versions.push(&rustls::version::TLS13);
    }
    let verifier = Verifier {
        trusted: Trusted::read(&wanted.roots, &provider)?,
        check_name: wanted.mode == SslMode::VerifyFull,
        provider: Arc::clone(&provider),
        begun,
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)
        .map_err(|error| Failure::new(Code::CannotConnect, format!("could not set up TLS: {error}")))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match &wanted.certificate {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
            .map_err(|error| unusable(certificate, &error.to_string()))?,
    };
    config.enable_sni = wanted.sni;
    Ok(config)
}

/// The trusted certificates, and the verifier that uses them.
#[derive(Debug)]
struct Trusted {
    verifier: Arc<WebPkiServerVerifier>,
    certificates: Vec<CertificateDer<'static>>,
}

impl Trusted {
    fn read(roots: &Roots, provider: &Arc<CryptoProvider>) -> Result<Option<Self>, Failure> {
        let path = match roots {
            Roots::None => return Ok(None),
            Roots::File(path) => path.clone(),
            Roots::System => system_roots()?,
        };
        let certificates = certificates(&path)?;
        let mut store = RootCertStore::empty();
        let (added, _) = store.add_parsable_certificates(certificates.iter().cloned());
        if added == 0 {
            return Err(unusable(&path, "none of its certificates is readable"));
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider)).build();
        Ok(Some(Self {
            verifier: verifier.map_err(|error| unusable(&path, &error.to_string()))?,
            certificates,
        }))
    }

    /// Verifies a certificate, including its name.
    fn verify(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), Error> {
        let verdict = self
            .verifier
            .verify_server_cert(end_entity, intermediates, server_name, &[], now);
        match verdict {
            Ok(_) => Ok(()),
            // The server uses the certificate of an authority as its own. webpki refuses that, but OpenSSL accepts it
            // if that certificate itself is trusted. Because webpki checks the expiry first, only the name is left to
            // check here.
            Err(Error::InvalidCertificate(CertificateError::Other(problem)))
                if format!("{problem:?}").contains("CaUsedAsEndEntity")
                    && self
                        .certificates
                        .iter()
                        .any(|trusted| trusted.as_ref() == end_entity.as_ref()) =>
            {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)
            }
            Err(error) => Err(error),
        }
    }
}

fn system_roots() -> Result<PathBuf, Failure> {
    let named = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let known = SYSTEM_ROOTS.iter().map(PathBuf::from);
    named
        .into_iter()
        .chain(known)
        .find(|path| path.is_file())
        .ok_or_else(|| {
            Failure::new(Code::CannotConnect, "this system has no file of trusted certificates")
                .hint("Install the package ca-certificates, or name a file with sslrootcert.")
        })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(unusable(path, "it contains no certificate in PEM format")),
        Err(error) => Err(unusable(path, &error.to_string())),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Failure> {
    let metadata = std::fs::metadata(path).map_err(|error| unusable(path, &error.to_string()))?;
    if !is_private(&metadata) {
        return Err(unusable(path, "users other than its owner can read the key")
            .hint("Set its permissions to 0600, or to 0640 if root owns it."));
    }
    PrivateKeyDer::from_pem_file(path)
        .map_err(|_| unusable(path, "it contains no private key in PEM format, or an encrypted one"))
}

/// Whether the key file is private by the rule of libpq: only its owner can read it, or also its group if root owns it.
fn is_private(metadata: &Metadata) -> bool {
    let forbidden = if metadata.uid() == 0 { 0o037 } else { 0o077 };
    metadata.is_file() && metadata.mode() & forbidden == 0
}

fn unusable(path: &Path, problem: &str) -> Failure {
    Failure::new(
        Code::CannotConnect,
        format!("{} cannot be used for TLS: {problem}", path.display()),
    )
}

/// Verifies a server's certificate as sslmode requires.
#[derive(Debug)]
struct Verifier {
    trusted: Option<Trusted>,
    check_name: bool,
    provider: Arc<CryptoProvider>,
    begun: Arc<AtomicBool>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.begun.store(true, Ordering::Relaxed);
        let Some(trusted) = &self.trusted else {
            return Ok(ServerCertVerified::assertion());
        };
        match trusted.verify(end_entity, intermediates, server_name, now) {
            // The name is checked last, so at this point the issuer is trusted.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.check_name => Ok(ServerCertVerified::assertion()),
            verdict => verdict.map(|()| ServerCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// The hint for a failed handshake.
pub fn hint(problem: &str) -> Option<&'static str> {
    let hints = [
        (
            "UnknownIssuer",
            "Set sslrootcert to the certificate of the authority that issued the server's certificate.",
        ),
        (
            "not valid for name",
            "Connect with a host name that the certificate has as subjectAltName, or use sslmode=verify-ca.",
        ),
        (
            "NotValidForName",
            "Connect with a host name that the certificate has as subjectAltName, or use sslmode=verify-ca.",
        ),
        (
            "does not support TLS",
            "The server has ssl = off. Use sslmode=prefer to connect without TLS.",
        ),
        ("expired", "Renew the certificate of the server: it has expired."),
    ];
    hints
        .iter()
        .find(|(text, _)| problem.contains(text))
        .map(|(_, hint)| *hint)
}
