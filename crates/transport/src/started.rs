//! Starts a publisher from the description of its destination. Called by a worker, in the server or outside of it, on
//! its main thread.

use crate::down::limit_of;
use crate::kind::Target;
use crate::options::{Certificates, OptionValue};
use crate::start::{FromFiles, Start, certificate_file, read_password, read_tls};
use crate::{Deadline, Publisher, Publishers, TlsError, TlsPart, Waker};
use outbox_core::finding::Finding;
use std::io;

/// A publisher and what was read for it from files.
pub struct Started {
    pub publisher: Publisher,
    read: FromFiles,
    certificates: Certificates,
}

/// Why a publisher cannot start.
pub enum NotStarted {
    /// The destination cannot be used as it is described.
    Unusable(Finding),
    /// The worker's process has reached a limit.
    ProcessLimit(String),
}

impl From<Finding> for NotStarted {
    fn from(finding: Finding) -> Self {
        Self::Unusable(finding)
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
        let mut start = Start::new(&self.publishers, connection_name, &self.deadline);
        let publisher = target.peer().start(target, &mut start)?;
        let certificates = target.certificates.clone();
        Ok(Started {
            publisher: publisher.map_err(|error| start_failure(&error, &certificates))?,
            read: start.read,
            certificates,
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

/// The error text, with the file or option that caused it. The transport does not know these names.
fn start_failure(error: &io::Error, certificates: &Certificates) -> NotStarted {
    if let Some(limit) = limit_of(error) {
        return NotStarted::ProcessLimit(format!("{limit}: {error}"));
    }
    NotStarted::Unusable(
        match error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>()) {
            Some(tls) => tls_failure(tls, certificates),
            None => format!("the publisher cannot start: {error}").into(),
        },
    )
}

fn tls_failure(tls: &TlsError, certificates: &Certificates) -> Finding {
    let (name, pem) = match tls.part {
        TlsPart::Ca => ("tls_ca", &certificates.ca),
        TlsPart::Certificate => ("tls_cert", &certificates.cert),
        TlsPart::Key => ("tls_key", &certificates.key),
        TlsPart::ServerName => return format!("the host of the URL {}", tls.problem).into(),
    };
    match pem {
        Some(given @ OptionValue::File(file)) => {
            certificate_file(given, format!("{} {} {}", file.named_by, file.path, tls.problem))
        }
        Some(given) => format!("{} {}", given.called(name), tls.problem).into(),
        None => format!("the CAs of the system: {}", tls.problem).into(),
    }
}
