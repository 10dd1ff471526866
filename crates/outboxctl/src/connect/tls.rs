//! TLS to the server as libpq's sslmode asks for it, by rustls with ring.
//!
//! The trap: libpq checks a certificate's issuer wherever there is a file of trusted ones, be it the default file and be the mode
//! `require`; the name only with `verify-full`.

use super::target::{Roots, SslMode, TlsWanted};
use crate::failure::{Code, Failure};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where Linux distributions keep the certificates of public authorities, in one file.
const SYSTEM_ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// A configuration for one connection; `begun` is set once the server has shown its certificate.
pub fn config(wanted: &TlsWanted, begun: Arc<AtomicBool>) -> Result<ClientConfig, Failure> {
    // Named and not the process' default: that one panics when no crate or more than one has set it.
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut versions = Vec::new();
    if wanted.versions.tls12 {
        versions.push(&rustls::version::TLS12);
    }
    if wanted.versions.tls13 {
        versions.push(&rustls::version::TLS13);
    }
    let verifier = Verifier {
        trusted: trusted(&wanted.roots, &provider)?,
        check_name: wanted.mode == SslMode::VerifyFull,
        provider: Arc::clone(&provider),
        begun,
    };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&versions)
        .map_err(|error| Failure::new(Code::CannotConnect, format!("TLS cannot be set up: {error}")))?
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

fn trusted(roots: &Roots, provider: &Arc<CryptoProvider>) -> Result<Option<Arc<WebPkiServerVerifier>>, Failure> {
    let path = match roots {
        Roots::None => return Ok(None),
        Roots::File(path) => path.clone(),
        Roots::System => system_roots()?,
    };
    let mut store = RootCertStore::empty();
    let (added, _) = store.add_parsable_certificates(certificates(&path)?);
    if added == 0 {
        return Err(unusable(&path, "none of its certificates can be read"));
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), Arc::clone(provider)).build();
    match verifier {
        Ok(verifier) => Ok(Some(verifier)),
        Err(error) => Err(unusable(&path, &error.to_string())),
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
        Ok(_) => Err(unusable(path, "it holds no certificate in PEM")),
        Err(error) => Err(unusable(path, &error.to_string())),
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, Failure> {
    let metadata = std::fs::metadata(path).map_err(|error| unusable(path, &error.to_string()))?;
    if !is_private(&metadata) {
        return Err(
            unusable(path, "others than its owner may read the key").hint("chmod 0600, or 0640 if root owns it.")
        );
    }
    PrivateKeyDer::from_pem_file(path)
        .map_err(|_| unusable(path, "it holds no private key in PEM, or one that is encrypted"))
}

/// The rule of libpq: nobody else, but a group if root owns the file.
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

/// Checks of a server's certificate what the mode asks for.
#[derive(Debug)]
struct Verifier {
    trusted: Option<Arc<WebPkiServerVerifier>>,
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
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.begun.store(true, Ordering::Relaxed);
        let Some(trusted) = &self.trusted else {
            return Ok(ServerCertVerified::assertion());
        };
        match trusted.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is looked at last: whoever gets that far has a certificate of a trusted issuer.
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.check_name => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
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

/// What to do about a handshake that failed.
pub fn hint(problem: &str) -> Option<&'static str> {
    let hints = [
        (
            "UnknownIssuer",
            "sslrootcert must name the certificate of the authority that issued the server's.",
        ),
        (
            "not valid for name",
            "Connect by a name that the certificate is for (its subjectAltName), or use sslmode=verify-ca.",
        ),
        (
            "NotValidForName",
            "Connect by a name that the certificate is for (its subjectAltName), or use sslmode=verify-ca.",
        ),
        (
            "CaUsedAsEndEntity",
            "The server's certificate is that of an authority itself; give the server one that an authority issued.",
        ),
        (
            "does not support TLS",
            "The server has ssl = off; sslmode=prefer connects without TLS.",
        ),
        ("expired", "The server's certificate has run out."),
    ];
    hints
        .iter()
        .find(|(text, _)| problem.contains(text))
        .map(|(_, hint)| *hint)
}
