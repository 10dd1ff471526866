//! A kind of destination, and a destination of it: all that the rest of the house knows of a broker. Each kind is a folder
//! here, and one line in [`crate::kinds`].

use crate::Publisher;
#[cfg(feature = "toy")]
use crate::connected::{BACKOFF_MAX, BACKOFF_MIN, PATIENCE, Terms};
#[cfg(feature = "toy")]
use crate::deadline::Deadline;
use crate::down::{DownReason, Fault};
#[cfg(feature = "toy")]
use crate::lookup::CONNECTION_LIFE;
use crate::options::{Certificates, Options, Refused, Setting};
use crate::ssrf::AllowList;
use crate::start::Start;
use crate::url::Endpoint;
use outbox_core::finding::{Finding, Words};
use outbox_core::form::Form;
use outbox_core::route::{Format, Route, Statics, Template};
use outbox_core::settle::Rules;
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A kind of destination, as data and a few functions.
pub struct Kind {
    /// Its foreign data wrapper: `outbox_` and a word.
    pub wrapper: &'static str,
    /// Its protocol, for people.
    pub protocol: &'static str,
    /// What a destination of this kind is, and where its secrets belong.
    pub about: &'static str,
    /// The word for what is at the other end.
    pub peer: &'static str,
    /// Whether there is a connection before the first message: "connected" then proves that the peer can be reached, and a
    /// recheck makes another one.
    pub connects_first: bool,
    /// What it connects to, if that is checked then: its reasons begin with this word.
    pub place: Option<&'static str>,
    /// What it logs in with, if there is no user mapping and it has a URL of its own.
    pub without_mapping: &'static str,
    /// Whether the messages of a key go one after the other, each when the last one was answered.
    pub one_by_one: bool,
    /// Whether a destination that anyone describes may be in a private network.
    pub may_be_private: bool,
    /// What its messages look like.
    pub form: Form,
    /// The option that is the template of the address of each message. None = the destination is the whole address.
    pub address: Option<&'static str>,
    /// The options of its servers, in addition to those of all kinds.
    pub of_server: &'static [&'static str],
    /// The options of its user mappings, in addition to those of all kinds.
    pub of_mapping: &'static [&'static str],
    /// The settings of the server that are options of its default destination.
    pub settings: &'static [Setting],
    /// Why a connection of this kind may be down, in addition to what all kinds have.
    pub reasons: &'static [DownReason],
    /// The words of its findings, in addition to those of all kinds.
    pub words: &'static [Words],
    /// Reads the options that only this kind has.
    pub read: ReadOptions,
}

/// Reads the options of a server and of its user mapping.
pub type ReadOptions = fn(server: &Options, mapping: &Options) -> Result<Arc<dyn Peer>, Refused>;

impl PartialEq for Kind {
    fn eq(&self, other: &Self) -> bool {
        self.wrapper == other.wrapper
    }
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.wrapper)
    }
}

/// The peer of one destination, as its options describe it.
pub trait Peer: Any + Send + Sync {
    /// The servers that its URL names; none if it has no URL.
    fn endpoints(&self) -> Vec<Endpoint>;

    /// The template of the address of each message.
    fn address(&self) -> &Template;

    /// Where a message with this address goes, for people: names and values.
    fn facts(&self, address: &str) -> Vec<(&'static str, String)>;

    /// Starts its publisher. Err: why the destination cannot be used as it is described.
    fn start(&self, target: &Target, start: &mut Start<'_>) -> Result<io::Result<Publisher>, Finding>;

    /// What is wrong with its connection, from the words of the peer. `all`: the destinations of the worker.
    fn explain(&self, fault: Fault, _all: &[Target]) -> Finding {
        fault.finding
    }

    /// What is wrong with a peer that takes no messages, from its words.
    fn blocked(&self, detail: String) -> Finding {
        Finding::new("blocked", detail)
    }
}

/// All that a worker needs to know about a destination; see [`Target::connection`].
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub kind: &'static Kind,
    pub(crate) own: Own,
    pub certificates: Certificates,
    /// Hosts and networks that may be reached although they are not public. As a default, those of the destinations
    /// with a URL of their own.
    pub allow: AllowList,
    pub format: Format,
    /// Headers and properties that each message carries, whatever the event.
    pub statics: Statics,
    pub rules: Rules,
    pub limits: Limits,
    /// The most messages without an answer.
    pub max_in_flight: usize,
    pub connect_timeout: Duration,
    pub answer_timeout: Duration,
    /// The lowest rate at which the bytes of a message extend `answer_timeout`, in bytes a second.
    pub min_send_rate: u32,
}

/// What only its kind understands. Equal options make equal peers.
#[derive(Clone)]
pub(crate) struct Own {
    pub(crate) server: Options,
    pub(crate) mapping: Options,
    pub(crate) peer: Arc<dyn Peer>,
}

impl PartialEq for Own {
    fn eq(&self, other: &Self) -> bool {
        (&self.server, &self.mapping) == (&other.server, &other.mapping)
    }
}

impl fmt::Debug for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.server, self.mapping)
    }
}

/// The limits of a destination; 0 = no limit. The connection does not use them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// The most messages that may be pending.
    pub max_pending: u32,
    /// The most messages per second, over all workers.
    pub max_rate: u32,
}

impl Target {
    pub fn peer(&self) -> &dyn Peer {
        &*self.own.peer
    }

    /// The route of its messages.
    pub fn route(&self) -> Route<'_> {
        Route {
            form: &self.kind.form,
            format: self.format,
            address: self.own.peer.address(),
            statics: &self.statics,
        }
    }

    /// Why no message can be sent, if that follows from the hosts in the URL and the list of what may be reached: the
    /// host, and the reason.
    pub fn refused_host(&self) -> Option<(String, String)> {
        let endpoints = self.own.peer.endpoints().into_iter();
        let refused = endpoints.map(|at| self.allow.refusal_of(&at.host).map(|why| (at.host, why)));
        refused.collect::<Option<Vec<_>>>()?.pop()
    }

    /// The terms of its connections to these endpoints.
    #[cfg(feature = "toy")]
    pub(crate) fn terms(&self, endpoints: Vec<Endpoint>, deadline: &Deadline) -> Terms {
        Terms {
            endpoints,
            allow: self.allow.clone(),
            connect_timeout: self.connect_timeout,
            connection_life: CONNECTION_LIFE,
            answer_timeout: self.answer_timeout,
            min_send_rate: self.min_send_rate,
            patience: PATIENCE,
            window: self.max_in_flight,
            backoff_min: BACKOFF_MIN,
            backoff_max: BACKOFF_MAX,
            deadline: deadline.clone(),
        }
    }

    /// The part whose change needs another connection: all but the limits and what becomes of a message that fails. The
    /// order and what a message looks like are in it: no message that was made before may go out after the change.
    #[must_use]
    pub fn connection(self) -> Self {
        let ordering = self.rules.ordering;
        Self {
            limits: Limits::default(),
            rules: Rules {
                ordering,
                ..Rules::default()
            },
            ..self
        }
    }
}
