//! What a kind provides so that `life` and `publish_loop` can use its connections.

use crate::Outcome;
use crate::deadline::Deadline;
use crate::down::Fault;
use crate::ssrf::AllowList;
use crate::url::Endpoint;
use outbox_core::message::Publication;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::Instant;

/// How long to wait for a better explanation, after a connection broke with an error that says little.
pub(crate) const CAUSE_LIMIT: Duration = Duration::from_millis(100);

/// The terms of a destination's connections, whatever its kind.
#[derive(Clone, Debug)]
pub struct Terms {
    /// At least one. The first is the one to connect to; after a failure the next is.
    pub endpoints: Vec<Endpoint>,
    pub allow: AllowList,
    /// The time limit for connecting to an endpoint, for all steps. Its addresses share it.
    pub connect_timeout: Duration,
    /// After this time a connection to a host with a name is replaced.
    pub connection_life: Duration,
    /// The time limit for an answer once the peer has taken the message, and before that for its next bytes.
    pub answer_timeout: Duration,
    /// The lowest rate at which bytes extend it, in bytes a second.
    pub min_send_rate: u32,
    /// A message without an answer for this time makes the publish loop ask whether the peer is alive: `unconfirmed`.
    pub patience: Duration,
    /// The most messages without an answer, at least 1.
    pub window: usize,
    pub backoff_min: Duration,
    pub backoff_max: Duration,
    /// No message is sent after it, and the connection is cut.
    pub deadline: Deadline,
}

/// What no option sets.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
pub(crate) const BACKOFF_MIN: Duration = Duration::from_millis(100);
pub(crate) const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// The time limit of several steps together.
#[derive(Clone, Copy)]
pub(crate) struct Limit {
    pub(crate) whole: Duration,
    pub(crate) until: Instant,
}

impl Limit {
    pub(crate) fn new(whole: Duration) -> Self {
        let until = Instant::now() + whole;
        Self { whole, until }
    }
}

/// Opens connections to a peer.
pub(crate) trait Connector: Clone {
    type Wire: Wire;
    type Connection: Connection<Wire = Self::Wire>;

    /// Connects to an address of an endpoint and checks what can be checked, all within `limit`. `wire` is set as soon as
    /// there is a socket, so that the caller can cut it in any case: also if this future is dropped before it ends.
    fn connect(
        &self,
        to: &Endpoint,
        address: SocketAddr,
        limit: Limit,
        wire: &mut Option<Self::Wire>,
    ) -> impl Future<Output = Result<Self::Connection, Fault>>;

    /// What is wrong if the peer refuses each message.
    fn refusal() -> Fault;
}

/// The socket of a connection. Its drop cuts it.
pub(crate) trait Wire {
    /// Completes once the connection has ended, whatever the reason.
    fn ended(&mut self) -> impl Future<Output = ()>;

    /// Cuts the connection both ways and waits for what serves it. Returns false if that still runs after `limit`.
    fn cut(&mut self, limit: Duration) -> impl Future<Output = bool>;
}

/// An open connection.
pub(crate) trait Connection {
    type Wire: Wire;

    /// The channel for messages. On each one the messages are numbered from 0 on.
    fn channel(&self) -> impl PublishChannel;

    /// Makes the peer forget the messages that it has not answered, so that another channel begins.
    fn renew(&mut self, limit: Duration) -> impl Future<Output = Result<(), Fault>>;

    /// Ends the connection as the protocol demands, if it can. The caller cuts the wire afterwards in any case.
    fn close(&self, wire: &mut Self::Wire, limit: Duration) -> impl Future<Output = ()>;
}

/// Why a connection is over, and how much that says about the cause: a higher rank replaces a lower one.
pub(crate) struct Broken {
    pub(crate) rank: u8,
    pub(crate) fault: Fault,
}

/// What a channel has taken.
pub(crate) struct Taken {
    /// When the newest answers arrived, at the latest.
    pub(crate) at: std::time::Instant,
    pub(crate) broken: Option<Broken>,
}

/// What the peer has of the bytes that were sent, in the order of sending.
pub(crate) struct WriteProgress {
    /// The bytes that were written to the connection.
    pub(crate) written: u64,
    /// Those of them that the peer has taken.
    pub(crate) taken: u64,
    /// The number of messages at the end that are not written.
    pub(crate) unwritten: usize,
}

/// Something that happened on a connection, apart from answers to messages.
pub(crate) enum ChannelEvent {
    /// The peer takes no messages for now, and says why.
    Blocked(String),
    Unblocked,
    /// The peer has answered a probe.
    Alive,
    Broken(Broken),
}

/// How long the thread may wait for answers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all: messages can be sent now.
    Not,
    /// Until the next one.
    One,
    /// Until some have come, for a moment at most.
    Some,
}

/// The messages on their way over a connection: one stream, in order.
pub(crate) trait PublishChannel {
    /// Sends a message. Its number is one above that of the one before. Err: it can never be sent, and the number is free.
    fn send(&mut self, number: u64, message: Publication) -> Result<(), String>;

    /// Whether the next message would go into the socket soon. After a stop request or a lost lease, no more than what is
    /// sent and not there yet still goes out.
    fn has_room(&self) -> bool;

    /// Takes all outcomes that are known.
    fn take(&mut self, outcomes: &mut Vec<(u64, Outcome)>) -> Taken;

    /// Completes when there may be something to take.
    fn answers(&self, wait: Wait) -> impl Future<Output = ()>;

    fn event(&self) -> impl Future<Output = ChannelEvent>;

    /// Whether the peer takes no messages for now.
    fn is_blocked(&self) -> bool;

    fn progress(&self) -> WriteProgress;

    /// Asks for a sign of life, unless that is on its way: [`ChannelEvent::Alive`] follows. The peer gives it after it has
    /// received all earlier messages.
    fn probe(&mut self);

    /// Why this message can never be sent, if the peer ended the connection because of it. Such a message could otherwise
    /// end the next connection as well.
    fn refusal(&self, detail: &str, address: &str, body_bytes: usize) -> Option<String>;
}
