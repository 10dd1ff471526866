//! A kind of destination, and a destination of it: all that the rest of the house knows of a broker. Each kind is a folder
//! here, and one line in [`crate::kinds`].

use crate::Publisher;
use crate::connected::{BACKOFF_MAX, BACKOFF_MIN, PATIENCE, Terms};
use crate::deadline::Deadline;
use crate::down::{DownReason, Fault};
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

/// A kind of destination, as data and a few functions. Each kind is one `static`, with a line in [`crate::kinds`]. Two
/// kinds are equal if their wrappers are.
pub struct Kind {
    /// The name of its foreign data wrapper: `outbox_` and a word, such as `outbox_http`. CREATE EXTENSION makes the
    /// wrapper, with a validator that is called `outbox_http_validator`.
    pub wrapper: &'static str,
    /// The name of its protocol on screens, such as `HTTP`.
    pub protocol: &'static str,
    /// The comment of the wrapper, in sentences: what a destination of this kind is, and where its secrets belong.
    pub about: &'static str,
    /// The noun for the program at the other end, in logs and findings, such as `broker`. It stands behind "the".
    pub peer: &'static str,
    /// Whether there is a connection before the first message: "connected" then proves that the peer can be reached,
    /// and a recheck makes another one. false = the first message connects.
    pub connects_first: bool,
    /// The noun for the object at the peer that messages are sent to, such as `exchange`, if connecting checks that it
    /// exists. The names of the `reasons` that are about it begin with this noun and `_`: outbox_check() finds them by
    /// that. None = nothing is checked.
    pub place: Option<&'static str>,
    /// What a destination with a URL in its server logs in with if it has no user mapping, as the detail of a step of
    /// outbox_check(), such as `no secret is used`.
    pub without_mapping: &'static str,
    /// Whether the transport sends a message of a key only when the one before it was answered. A claim then takes
    /// fewer messages of a key. false = they follow each other within the window.
    pub one_by_one: bool,
    /// Whether a destination whose URL is not that of the settings may be in a private network without
    /// outbox.http_allow, although its creator need not be a superuser.
    pub may_be_private: bool,
    /// What its messages look like.
    pub form: Form,
    /// The option of a server that is the template of the address of each message, such as `routing_key`. It is also
    /// one of `of_server`. None = the URL is the whole address, and messages have an empty one.
    pub address: Option<&'static str>,
    /// The names of the options of its servers. Those that every kind has (`OF_SERVER` in `described`) are not listed.
    /// `max_in_flight`, `on_unroutable`, and one of `confirm_timeout` and `timeout` are listed if the kind has them;
    /// `described` reads them.
    pub of_server: &'static [&'static str],
    /// The names of the options of its user mappings: secrets, and what belongs to them. `tls_cert` and `tls_key`,
    /// which every kind has, are not listed.
    pub of_mapping: &'static [&'static str],
    /// The settings of the server, each with the option for which it stands. Only those of the first kind in
    /// [`crate::kinds::KINDS`] exist, because the default destination is of that kind.
    pub settings: &'static [Setting],
    /// Why a connection of this kind may be down, in addition to [`DownReason::ALL`].
    pub reasons: &'static [DownReason],
    /// The words of its findings. They count before those of all kinds for the same code. Each of `reasons` needs a
    /// row here or there.
    pub words: &'static [Words],
    /// Reads the options of a destination.
    pub read: ReadOptions,
}

/// Reads the options of a server and of its user mapping. It gets those that `described` has not read, by the names in
/// `of_server` and `of_mapping`, with those of the settings where they are inherited. It ignores names that it does
/// not know: another version may have stored them.
///
/// It must accept missing options, also no options at all: validators check each object by itself, and a setting is
/// checked alone. What a destination lacks is an error of [`Peer::start`].
///
/// # Errors
/// The first option with a bad value. The error must not repeat the value, which may be a secret.
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

/// The peer of one destination, as its options describe it. [`Kind::read`] makes it. It is data: only `start` opens
/// anything.
pub trait Peer: Any + Send + Sync {
    /// The servers that its URL names, with their ports; none if it has no URL.
    fn endpoints(&self) -> Vec<Endpoint>;

    /// The template of the address of each message; an empty one if the kind has no option for it.
    fn address(&self) -> &Template;

    /// Where a message with this address goes, for the page of a message: labels and values. Without secrets.
    fn facts(&self, address: &str) -> Vec<(&'static str, String)>;

    /// Starts its publisher, which connects on the publisher thread. Called on the worker's main thread: it reads files,
    /// and waits for nothing else.
    ///
    /// # Errors
    /// A finding: the destination cannot be used as it is described, for example without a URL, or because a file cannot
    /// be read. The inner error is that of `Start::publisher`.
    fn start(&self, target: &Target, start: &mut Start<'_>) -> Result<io::Result<Publisher>, Finding>;

    /// What is wrong with its connection, if the words of the peer say more than the fault. `all`: the destinations of
    /// the worker.
    fn explain(&self, fault: Fault, _all: &[Target]) -> Finding {
        fault.finding
    }

    /// What is wrong with a peer that takes no messages for now. `detail`: its words, which the transport reported with
    /// the state.
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
    #[cfg_attr(not(feature = "toy"), allow(dead_code))] // only the toy asks for them yet
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
