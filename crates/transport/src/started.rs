//! Starts a publisher from the description of its destination. Called by a worker, in the server or outside of it, on
//! its main thread.

use crate::down::limit_of;
use crate::secret_file::{SecretFileError, read_secret_file};
use crate::target::{Amqp, Certificates, Credential, Http, NamedFile, Protocol, Target};
use crate::{
    AmqpConfig, ClientCertificate, Deadline, HttpConfig, Publisher, Publishers, Secret, Tls, TlsError, TlsPart, Waker,
};
use std::io;

/// A publisher and what was read for it from files.
pub struct Started {
    pub publisher: Publisher,
    read: FromFiles,
    certificates: Certificates,
}

#[derive(Default)]
struct FromFiles {
    /// None = the password is not in a file.
    password: Option<(NamedFile, Secret)>,
    /// None = no TLS.
    tls: Option<Tls>,
}

/// Why a publisher cannot start.
pub enum NotStarted {
    /// The destination cannot be used as it is described.
    Unusable(String),
    /// The worker's process has reached a limit.
    ProcessLimit(String),
}

impl From<String> for NotStarted {
    fn from(detail: String) -> Self {
        Self::Unusable(detail)
    }
}

/// Starts the publishers of a worker.
pub struct Starter {
    publishers: Publishers,
    /// Until when the publishers may publish: no longer than the leases of the worker last.
    pub deadline: Deadline,
}

impl Starter {
    /// `waker` is set when a publisher has events for the worker.
    pub fn new(waker: Waker, deadline: Deadline) -> Self {
        let publishers = Publishers::new(waker);
        Self { publishers, deadline }
    }

    pub fn waker(&self) -> &Waker {
        self.publishers.waker()
    }

    /// Starts a publisher. `connection_name` is shown to its peer.
    pub fn start(&self, target: &Target, connection_name: &str) -> Result<Started, NotStarted> {
        let (publisher, read) = match &target.transport {
            Protocol::Amqp(amqp) => {
                let (config, read) = self.amqp(target, amqp, connection_name)?;
                (self.publishers.start(config), read)
            }
            Protocol::Http(http) => {
                let config = self.http(target, http, connection_name)?;
                (self.publishers.start(config), FromFiles::default())
            }
        };
        let certificates = &target.certificates;
        let publisher = publisher.map_err(|error| start_failure(&error, certificates))?;
        Ok(Started {
            publisher,
            read,
            certificates: certificates.clone(),
        })
    }

    fn amqp(&self, target: &Target, amqp: &Amqp, name: &str) -> Result<(AmqpConfig, FromFiles), String> {
        let address = amqp.address()?;
        let mut read = FromFiles::default();
        let password = match &amqp.password {
            None => Secret::new("guest"), // the protocol's default, as is the user
            Some(Credential::Given(password)) => password.clone(),
            Some(Credential::File(file)) => {
                let password = read_password(file)?;
                read.password = Some((file.clone(), password.clone()));
                password
            }
        };
        if address.tls {
            read.tls = Some(read_tls(&target.certificates)?);
        }
        let config = AmqpConfig {
            allow: target.allow.clone(),
            exchange: amqp.exchange.to_string(),
            exchange_type: amqp.exchange_type.clone(),
            window: amqp.max_in_flight,
            connect_timeout: target.connect_timeout,
            confirm_timeout: target.confirm_timeout,
            min_send_rate: target.min_send_rate,
            connection_name: name.to_owned(),
            deadline: self.deadline.clone(),
            tls: read.tls.clone(),
            ..AmqpConfig::new(address, password)
        };
        Ok((config, read))
    }

    fn http(&self, target: &Target, http: &Http, name: &str) -> Result<HttpConfig, String> {
        Ok(HttpConfig {
            auth: http.auth(),
            signing_secrets: http.signing_secrets.clone(),
            secret_headers: http.secret_headers.clone(),
            tls: read_tls(&target.certificates)?,
            allow: target.allow.clone(),
            connect_timeout: target.connect_timeout,
            timeout: target.confirm_timeout,
            min_send_rate: target.min_send_rate,
            concurrency: http.concurrency,
            retry_after_max: http.retry_after_max,
            connection_name: name.to_owned(),
            deadline: self.deadline.clone(),
            ..HttpConfig::new(http.address()?)
        })
    }
}

impl Started {
    /// Whether the certificate files have changed since the publisher read them. A file that cannot be read now does
    /// not count: the working connection is kept.
    pub fn has_new_certificates(&self) -> bool {
        self.read.tls.is_some() && read_tls(&self.certificates).is_ok_and(|now| self.read.tls != Some(now))
    }

    /// Whether the password file has changed since the publisher read it. A file that cannot be read now does not
    /// count.
    pub fn has_new_password(&self) -> bool {
        (self.read.password.as_ref()).is_some_and(|(file, before)| read_password(file).is_ok_and(|now| now != *before))
    }
}

/// Returns the first line of the password file.
fn read_password(file: &NamedFile) -> Result<Secret, String> {
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
fn read_tls(certificates: &Certificates) -> Result<Tls, String> {
    let client = match (&certificates.cert, &certificates.key) {
        (None, None) => None,
        (None, Some(key)) => return Err(format!("{} is set without its certificate", key.called("tls_key"))),
        (Some(cert), None) => return Err(format!("{} is set without its key", cert.called("tls_cert"))),
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

fn read_pem(pem: &Credential, read: impl FnOnce(&NamedFile) -> Result<Vec<u8>, String>) -> Result<Vec<u8>, String> {
    match pem {
        Credential::File(file) => read(file),
        Credential::Given(text) => Ok(text.as_bytes().to_vec()),
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

/// The error text, with the file or option that caused it. The transport does not know these names.
fn start_failure(error: &io::Error, certificates: &Certificates) -> NotStarted {
    if let Some(limit) = limit_of(error) {
        return NotStarted::ProcessLimit(format!("{limit}: {error}"));
    }
    NotStarted::Unusable(
        match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>()) {
            Some(tls) => tls_failure(tls, certificates),
            None => format!("the publisher cannot start: {error}"),
        },
    )
}

fn tls_failure(tls: &TlsError, certificates: &Certificates) -> String {
    let (name, pem) = match tls.part {
        TlsPart::Ca => ("tls_ca", &certificates.ca),
        TlsPart::Certificate => ("tls_cert", &certificates.cert),
        TlsPart::Key => ("tls_key", &certificates.key),
        TlsPart::ServerName => return format!("the host of the URL {}", tls.problem),
    };
    match pem {
        Some(Credential::File(file)) => format!("{} {} {}", file.named_by, file.path, tls.problem),
        Some(given) => format!("{} {}", given.called(name), tls.problem),
        None => format!("the CAs of the system: {}", tls.problem),
    }
}
