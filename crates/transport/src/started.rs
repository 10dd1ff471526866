//! Starts a publisher from the description of its destination. Called by a worker, in the server or outside of it, on
//! its main thread.

use crate::target::{Amqp, Certificates, Http, Password, Pem, Target, Transport};
use crate::{AmqpConfig, ClientCertificate, Deadline, HttpConfig, Publisher, Secret, Tls, TlsError, TlsPart, Waker};
use std::io;
use std::os::unix::fs::MetadataExt;

/// A publisher and the configuration that it was started with.
pub struct Started {
    pub publisher: Publisher,
    /// None = no TLS.
    tls: Option<Tls>,
    certificates: Certificates,
}

/// What all publishers of a worker share.
#[derive(Clone)]
pub struct Starter {
    /// Set when a publisher has events for the worker.
    pub waker: Waker,
    /// Until when the publishers may publish: no longer than the leases of the worker last.
    pub deadline: Deadline,
}

impl Starter {
    /// Starts a publisher. `connection_name` is shown to its peer. Returns an error text if the publisher cannot start.
    pub fn start(&self, target: &Target, connection_name: &str) -> Result<Started, String> {
        let (publisher, tls) = match &target.transport {
            Transport::Amqp(amqp) => {
                let (config, tls) = self.amqp(target, amqp, connection_name)?;
                (Publisher::start(config, self.waker.clone()), tls)
            }
            Transport::Http(http) => {
                let config = self.http(target, http, connection_name)?;
                (Publisher::start(config, self.waker.clone()), None)
            }
        };
        let certificates = &target.certificates;
        let publisher = publisher.map_err(|error| start_failure(&error, certificates))?;
        Ok(Started {
            publisher,
            tls,
            certificates: certificates.clone(),
        })
    }

    fn amqp(&self, target: &Target, amqp: &Amqp, name: &str) -> Result<(AmqpConfig, Option<Tls>), String> {
        let address = amqp.address()?;
        let password = match &amqp.password {
            Password::Default => Secret::new("guest"), // the protocol's default, as is the user
            Password::Known(password) => password.clone(),
            Password::File(path) => Secret::new(read_password(path)?),
        };
        let tls = match address.tls {
            true => Some(read_tls(&target.certificates)?),
            false => None,
        };
        let config = AmqpConfig {
            exchange: amqp.exchange.to_string(),
            exchange_type: amqp.exchange_type.clone(),
            window: amqp.max_in_flight,
            connect_timeout: target.connect_timeout,
            confirm_timeout: target.confirm_timeout,
            connection_name: name.to_owned(),
            deadline: self.deadline.clone(),
            tls: tls.clone(),
            ..AmqpConfig::new(address, password)
        };
        Ok((config, tls))
    }

    fn http(&self, target: &Target, http: &Http, name: &str) -> Result<HttpConfig, String> {
        let text = |pem: &Option<Pem>| match pem {
            Some(Pem::Given(text)) => Some(text.clone()),
            _ => None, // only the default destination has files, which settings name
        };
        let plain = |pem| text(pem).map(|text| String::from_utf8_lossy(text.as_bytes()).into_owned());
        Ok(HttpConfig {
            auth: http.auth(),
            signing_secrets: http.signing_secrets.clone(),
            ca_pem: plain(&target.certificates.ca),
            client_cert_pem: plain(&target.certificates.cert),
            client_key_pem: text(&target.certificates.key),
            allow: target.http_allow.clone(),
            connect_timeout: target.connect_timeout,
            timeout: target.confirm_timeout,
            concurrency: http.concurrency,
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
        self.tls.is_some() && read_tls(&self.certificates).is_ok_and(|read| self.tls != Some(read))
    }
}

/// Returns the first line of the password file.
fn read_password(path: &str) -> Result<String, String> {
    const SETTING: &str = "outbox.password_file";
    let content = read_secret(SETTING, path)?;
    let text = String::from_utf8(content).map_err(|_| format!("{SETTING} {path} is not UTF-8"))?;
    match text.lines().next().map(str::trim_end) {
        Some(password) if !password.is_empty() => Ok(password.to_string()),
        _ => Err(format!("{SETTING} {path} is empty")),
    }
}

/// Reads the certificates that the description names. `Publisher::start` checks whether they can be used.
fn read_tls(certificates: &Certificates) -> Result<Tls, String> {
    let client = match (&certificates.cert, &certificates.key) {
        (None, None) => None,
        (None, Some(key)) => {
            return Err(format!(
                "{} is set and {} is not",
                key.called("tls_key"),
                key.called("tls_cert")
            ));
        }
        (Some(cert), None) => {
            return Err(format!(
                "{} is set and {} is not",
                cert.called("tls_cert"),
                cert.called("tls_key")
            ));
        }
        (Some(cert), Some(key)) => Some(ClientCertificate {
            cert_pem: read_pem(cert, "tls_cert", read)?,
            key_pem: read_pem(key, "tls_key", read_secret)?,
        }),
    };
    Ok(Tls {
        ca_pem: (certificates.ca.as_ref())
            .map(|ca| read_pem(ca, "tls_ca", read))
            .transpose()?,
        client,
        server_name: None,
    })
}

fn read_pem(
    pem: &Pem,
    name: &str,
    read: impl FnOnce(&str, &str) -> Result<Vec<u8>, String>,
) -> Result<Vec<u8>, String> {
    match pem {
        Pem::File(path) => read(&pem.called(name), path),
        Pem::Given(text) => Ok(text.as_bytes().to_vec()),
    }
}

fn read(setting: &str, path: &str) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("cannot read {setting} {path}: {error}"))
}

/// Reads a file that only its owner may access, as core requires for a server key.
fn read_secret(setting: &str, path: &str) -> Result<Vec<u8>, String> {
    let meta = std::fs::metadata(path).map_err(|error| format!("cannot read {setting} {path}: {error}"))?;
    if meta.mode() & 0o077 != 0 {
        return Err(format!("{setting} {path} is open to group or others: chmod 600 it"));
    }
    read(setting, path)
}

/// The error text, with the file or option that caused it. The transport does not know these names.
fn start_failure(error: &io::Error, certificates: &Certificates) -> String {
    let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>()) else {
        return format!("the publisher cannot start: {error}");
    };
    let (name, pem) = match tls.part {
        TlsPart::Ca => ("tls_ca", &certificates.ca),
        TlsPart::Certificate => ("tls_cert", &certificates.cert),
        TlsPart::Key => ("tls_key", &certificates.key),
        TlsPart::ServerName => return format!("the host of the URL {}", tls.problem),
    };
    match pem {
        Some(file @ Pem::File(path)) => format!("{} {path} {}", file.called(name), tls.problem),
        Some(given) => format!("{} {}", given.called(name), tls.problem),
        None => format!("the CAs of the system: {}", tls.problem),
    }
}
