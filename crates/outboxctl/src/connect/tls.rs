//! The TLS configuration for libpq's sslmode, with rustls and ring.
//!
//! The trap: libpq checks the issuer of a certificate whenever a file of trusted certificates exists. That includes the
//! default file and the mode `require`. It checks the name only with `verify-full`.

use super::target::{SslMode, TlsParams};
use crate::failure::{Code, Failure};
use outbox_transport::read_secret_file;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::path::Path;
use std::sync::Arc;

/// The configuration for a session with these parameters; without them, for a session without TLS. A broken certificate
/// file does not prevent that one.
pub fn config(params: Option<&TlsParams>) -> Result<ClientConfig, Failure> {
    // The default provider of the process panics if no crate or more than one has set it, so the provider is named
    // here.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = params.and_then(|params| params.roots.as_deref());
    let verifier = Verifier {
        trusted: roots.map(|roots| Trusted::read(roots, &provider)).transpose()?,
        check_name: params.is_some_and(|params| params.mode == SslMode::VerifyFull),
        provider: Arc::clone(&provider),
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(params.map_or(rustls::ALL_VERSIONS, |params| &params.versions))
        .map_err(|error| Failure::new(Code::CannotConnect, format!("could not set up TLS: {error}")))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let certificate = params.and_then(|params| params.certificate.as_ref());
    let mut config = match certificate {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => builder
            .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
            .map_err(|error| unusable(certificate, &error.to_string()))?,
    };
    config.enable_sni = params.is_some_and(|params| params.sni);
    Ok(config)
}

/// The trusted certificates, and the verifier that uses them.
#[derive(Debug)]
struct Trusted {
    verifier: Arc<WebPkiServerVerifier>,
    certificates: Vec<CertificateDer<'static>>,
}

impl Trusted {
    fn read(path: &Path, provider: &Arc<CryptoProvider>) -> Result<Self, Failure> {
        let certificates = certificates(path)?;
        let mut store = RootCertStore::empty();
        let (added, _) = store.add_parsable_certificates(certificates.iter().cloned());
        if added == 0 {
            return Err(unusable(path, "none of its certificates is readable"));
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider)).build();
        Ok(Self {
            verifier: verifier.map_err(|error| unusable(path, &error.to_string()))?,
            certificates,
        })
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

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(unusable(path, "it contains no certificate in PEM format")),
        Err(error) => Err(unusable(path, &error.to_string())),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Failure> {
    let pem = read_secret_file(path).map_err(|error| unusable(path, &error.to_string()))?;
    PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|_| unusable(path, "it contains no private key in PEM format, or an encrypted one"))
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

/// Part of the error if the server has ssl = off.
pub const NOT_SUPPORTED: &str = "does not support TLS";

/// The hint for a failed handshake.
pub fn hint(problem: &str) -> Option<&'static str> {
    let has = |text: &str| problem.contains(text);
    if has("UnknownIssuer") {
        Some("Set sslrootcert to the certificate of the authority that issued the server's certificate.")
    } else if has("not valid for name") || has("NotValidForName") {
        Some("Connect with a host name that the certificate has as subjectAltName, or use sslmode=verify-ca.")
    } else if has(NOT_SUPPORTED) {
        Some("The server has ssl = off. Use sslmode=prefer to connect without TLS.")
    } else {
        has("expired").then_some("Renew the certificate of the server: it has expired.")
    }
}
