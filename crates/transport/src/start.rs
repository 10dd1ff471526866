//! What a kind starts a publisher with: secrets and certificates, some of them from files. Called by `started`, on the
//! worker's main thread.

use crate::options::{Certificates, NamedFile, OptionValue};
use crate::secret_file::{SecretFileError, read_secret_file};
use crate::transport::Transport;
use crate::{ClientCertificate, Deadline, Publisher, Publishers, Secret, Tls};
use outbox_core::finding::Finding;
use std::io;

/// What was read from files. The worker compares it with the files later, and replaces the publisher when they differ.
#[derive(Default)]
pub(crate) struct FromFiles {
    /// None = the password is not in a file, or the kind has none.
    pub(crate) password: Option<(NamedFile, Secret)>,
    /// Also those that are not in files. None = no TLS.
    pub(crate) tls: Option<Tls>,
}

/// What [`Peer::start`](crate::kind::Peer::start) starts a publisher with. Secrets and certificates are read through it,
/// so that the worker notices when their files change.
pub struct Start<'a> {
    publishers: &'a Publishers,
    /// The name of the connection, for lists that the peer shows: the worker and the destination.
    pub connection_name: &'a str,
    /// Until when messages may be sent: the transport takes a clone, and sends none after it.
    pub deadline: &'a Deadline,
    pub(crate) read: FromFiles,
}

impl<'a> Start<'a> {
    pub(crate) fn new(publishers: &'a Publishers, connection_name: &'a str, deadline: &'a Deadline) -> Self {
        Self {
            publishers,
            connection_name,
            deadline,
            read: FromFiles::default(),
        }
    }

    /// Starts the publisher of this transport on the publisher thread of the worker.
    ///
    /// # Errors
    /// That of [`Transport::check`], or of the system if there is no thread or descriptor for it.
    pub fn publisher(&self, transport: impl Transport) -> io::Result<Publisher> {
        self.publishers.start(transport)
    }

    /// The password: the value itself, or the first line of its file, without white space at its end.
    ///
    /// # Errors
    /// A finding `password_file`: the file cannot be read, is not private, is empty or is not UTF-8.
    pub fn password(&mut self, password: &OptionValue) -> Result<Secret, Finding> {
        match password {
            OptionValue::Text(password) => Ok(password.clone()),
            OptionValue::File(file) => {
                let password = read_password(file).map_err(|why| Finding::new("password_file", why))?;
                self.read.password = Some((file.clone(), password.clone()));
                Ok(password)
            }
        }
    }

    /// The certificates in PEM, of which some may be in files. Only a kind whose URL asks for TLS calls
    /// this. The name that the certificate of the peer must have is the host of the URL (`server_name` is None).
    /// [`Transport::check`] refuses what is no certificate.
    ///
    /// # Errors
    /// A finding, `certificate_file` if it is about a file: one that cannot be read, a key that is not private, or a
    /// certificate without its key.
    pub fn tls(&mut self, certificates: &Certificates) -> Result<Tls, Finding> {
        let tls = read_tls(certificates)?;
        self.read.tls = Some(tls.clone());
        Ok(tls)
    }
}

/// Returns the first line of the password file.
pub(crate) fn read_password(file: &NamedFile) -> Result<Secret, String> {
    let NamedFile { named_by, path } = file;
    let content = read_secret(file)?;
    let text = String::from_utf8(content).map_err(|_| format!("{named_by} {path} is not UTF-8"))?;
    // Some editors begin a file with a byte order mark.
    match text.trim_start_matches('\u{feff}').lines().next().map(str::trim_end) {
        Some(password) if !password.is_empty() => Ok(Secret::new(password)),
        _ => Err(format!("{named_by} {path} is empty")),
    }
}

/// Reads the certificates that the description names. `Publisher::start` checks whether they can be used.
pub(crate) fn read_tls(certificates: &Certificates) -> Result<Tls, Finding> {
    let client = match (&certificates.cert, &certificates.key) {
        (None, None) => None,
        (None, Some(key)) => {
            return Err(certificate_file(
                key,
                format!("{} is set without its certificate", key.called("tls_key")),
            ));
        }
        (Some(cert), None) => {
            return Err(certificate_file(
                cert,
                format!("{} is set without its key", cert.called("tls_cert")),
            ));
        }
        (Some(cert), Some(key)) => Some(ClientCertificate {
            cert_pem: read_pem(cert, read)?,
            key_pem: read_pem(key, read_secret)?,
        }),
    };
    Ok(Tls {
        ca_pem: certificates.ca.as_ref().map(|ca| read_pem(ca, read)).transpose()?,
        client,
        server_name: None,
    })
}

/// What is wrong with a certificate or a key, with the setting that names its file.
pub(crate) fn certificate_file(pem: &OptionValue, why: String) -> Finding {
    match pem {
        OptionValue::File(file) => Finding::new("certificate_file", why).with("setting", file.named_by),
        OptionValue::Text(_) => why.into(),
    }
}

fn read_pem(pem: &OptionValue, read: impl FnOnce(&NamedFile) -> Result<Vec<u8>, String>) -> Result<Vec<u8>, Finding> {
    match pem {
        OptionValue::File(file) => read(file).map_err(|why| certificate_file(pem, why)),
        OptionValue::Text(text) => Ok(text.as_bytes().to_vec()),
    }
}

fn read(file: &NamedFile) -> Result<Vec<u8>, String> {
    std::fs::read(&file.path).map_err(|error| cannot_read(file, &error))
}

fn read_secret(file: &NamedFile) -> Result<Vec<u8>, String> {
    let NamedFile { named_by, path } = file;
    read_secret_file(path.as_ref()).map_err(|error| match error {
        SecretFileError::Unreadable(error) => cannot_read(file, &error),
        SecretFileError::Exposed { why, remedy } => format!("{named_by} {path} {why}: {remedy} it"),
    })
}

fn cannot_read(file: &NamedFile, error: &io::Error) -> String {
    format!("cannot read {} {}: {error}", file.named_by, file.path)
}
