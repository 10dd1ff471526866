//! The channel of a kind whose protocol is its own code: over one TCP connection, without a thread. The kind says how a
//! message is written and how answers are read.
//!
//! Runs on the publisher thread.

use super::dial::dial;
use super::link::{
    Broken, ChannelEvent, Connection, Connector, Limit, PublishChannel, Taken, Wait, Wire, WriteProgress,
};
use crate::down::{DownReason, Fault};
use crate::transfer::unacknowledged;
use crate::url::Endpoint;
use crate::{Outcome, Publication};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{pending, poll_fn};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::time::timeout_at;

/// The most bytes that wait for the socket before another message is sent. After a stop request or a lost lease, no more
/// than these and one message still go out.
const OUTPUT_MAX: usize = 64 << 10;

/// How the messages of a kind are written, and its answers read. Each channel has its own clone, of one that
/// has written and read nothing: what it must remember from a message to its answer is in cells. Nothing here waits: bytes go into and come out of buffers, and `stream` has the socket.
pub(crate) trait Protocol: Clone + Send + 'static {
    /// Appends a message to the output, whole. `number`: from 0 on in a channel, in order; the answer names it. The
    /// window limits how many messages have none.
    ///
    /// # Errors
    /// Why it can never be sent, for the dead letter. The output must then be as it was; the next message has the same
    /// number.
    fn write(&self, number: u64, message: Publication, output: &mut Vec<u8>) -> Result<(), String>;

    /// Appends a request that every peer of this kind answers, after it has received all that was sent before:
    /// [`ChannelEvent::Alive`] stands for that answer. It is the first thing on a connection, where the answer shows
    /// that the peer is of this kind; later it shows that a peer without confirms is alive.
    fn write_probe(&self, output: &mut Vec<u8>);

    /// Reads the first thing in the input: its length in bytes, above 0, and what it is. None = it is not complete, and
    /// the next call gets the same bytes with more behind them. So an implementation limits how long a thing may be.
    /// Called again with the rest until it returns None.
    ///
    /// # Errors
    /// The peer violates the protocol ([`DownReason::PROTOCOL`]): the connection is given up.
    fn read(&self, input: &[u8]) -> Result<Option<(usize, Received)>, Fault>;
}

/// What a peer has sent.
pub(crate) enum Received {
    /// The outcome of the message with this number. Answers may come in any order; one for a number without an open
    /// message is ignored.
    Answer(u64, Outcome),
    /// Something about the peer, apart from messages.
    Event(ChannelEvent),
}

/// Connects to peers that speak a protocol.
#[derive(Clone)]
pub(crate) struct Streamed<P>(pub(crate) P);

impl<P: Protocol> Connector for Streamed<P> {
    type Wire = StreamWire;
    type Connection = StreamConnection<P>;

    async fn connect(
        &self,
        _to: &Endpoint,
        address: SocketAddr,
        limit: Limit,
        wire: &mut Option<StreamWire>,
    ) -> Result<StreamConnection<P>, Fault> {
        let stream = Rc::new(dial(address, limit).await?);
        *wire = Some(StreamWire(Rc::clone(&stream)));
        let connection = StreamConnection {
            protocol: self.0.clone(),
            stream,
        };
        let mut first = connection.begin();
        first.probe();
        match timeout_at(limit.until, first.event()).await {
            Ok(ChannelEvent::Broken(broken)) => Err(broken.fault),
            Ok(_) => Ok(connection),
            Err(_) => Err(Fault::new(
                DownReason::TIMEOUT,
                format!("no answer to the first request within {:.1?}", limit.whole),
            )),
        }
    }

    fn refusal() -> Fault {
        Fault::new(
            DownReason::QUEUE_REFUSED,
            "the peer refuses messages, and confirms none",
        )
    }
}

pub(crate) struct StreamWire(Rc<TcpStream>);

impl Wire for StreamWire {
    /// Its channel reads the end.
    async fn ended(&mut self) {
        pending().await
    }

    async fn cut(&mut self, _limit: Duration) -> bool {
        let _ = socket2::SockRef::from(&*self.0).shutdown(Shutdown::Both);
        true
    }
}

pub(crate) struct StreamConnection<P> {
    protocol: P,
    stream: Rc<TcpStream>,
}

impl<P: Protocol> StreamConnection<P> {
    fn begin(&self) -> StreamChannel<P> {
        StreamChannel {
            protocol: self.protocol.clone(),
            stream: Rc::clone(&self.stream),
            state: RefCell::default(),
        }
    }
}

impl<P: Protocol> Connection for StreamConnection<P> {
    type Wire = StreamWire;

    fn channel(&self) -> impl PublishChannel {
        self.begin()
    }

    async fn renew(&mut self, _limit: Duration) -> Result<(), Fault> {
        Err(Fault::new(
            DownReason::CLOSED,
            "the peer leaves messages without an answer",
        ))
    }

    async fn close(&self, _wire: &mut StreamWire, _limit: Duration) {}
}

struct StreamChannel<P> {
    protocol: P,
    stream: Rc<TcpStream>,
    state: RefCell<StreamState>,
}

#[derive(Default)]
struct StreamState {
    /// Bytes that the socket has not taken, and how many it has.
    output: Vec<u8>,
    written: u64,
    input: Vec<u8>,
    answers: Vec<(u64, Outcome)>,
    events: VecDeque<ChannelEvent>,
    is_probing: bool,
}

impl StreamState {
    /// Writes and reads what the socket takes and has. Err: it has ended, or speaks another protocol.
    fn transfer(&mut self, protocol: &impl Protocol, stream: &TcpStream) -> Result<(), Fault> {
        let closed = |error: io::Error| Fault::new(DownReason::CLOSED, error.to_string());
        let mut written = 0;
        while written < self.output.len() {
            match stream.try_write(&self.output[written..]) {
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(closed(error)),
            }
        }
        self.output.drain(..written);
        self.written += written as u64;
        let mut bytes = [0; 4096];
        let ended = loop {
            match stream.try_read(&mut bytes) {
                Ok(0) => break Err(Fault::new(DownReason::CLOSED, "the peer closed the connection")),
                Ok(read) => self.input.extend(&bytes[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(error) => break Err(closed(error)),
            }
        };
        let mut read = 0;
        while let Some((length, received)) = protocol.read(&self.input[read..])? {
            read += length;
            match received {
                Received::Answer(number, outcome) => self.answers.push((number, outcome)),
                Received::Event(event) => {
                    self.is_probing &= !matches!(event, ChannelEvent::Alive);
                    self.events.push_back(event);
                }
            }
        }
        self.input.drain(..read);
        ended
    }
}

impl<P: Protocol> StreamChannel<P> {
    /// Completes once there is an answer, or an event.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.borrow_mut();
        loop {
            if state.events.is_empty()
                && let Err(fault) = state.transfer(&self.protocol, &self.stream)
            {
                state.events.push_back(ChannelEvent::Broken(Broken { rank: 1, fault }));
            }
            if !state.events.is_empty() || !state.answers.is_empty() {
                return Poll::Ready(());
            }
            let is_readable = self.stream.poll_read_ready(cx).is_ready();
            let is_writable = !state.output.is_empty() && self.stream.poll_write_ready(cx).is_ready();
            if !is_readable && !is_writable {
                return Poll::Pending;
            }
        }
    }
}

impl<P: Protocol> PublishChannel for StreamChannel<P> {
    fn send(&mut self, number: u64, message: Publication) -> Result<(), String> {
        self.protocol.write(number, message, &mut self.state.get_mut().output)
    }

    fn has_room(&self) -> bool {
        self.state.borrow().output.len() < OUTPUT_MAX
    }

    fn take(&mut self, outcomes: &mut Vec<(u64, Outcome)>) -> Taken {
        let state = self.state.get_mut();
        let broken = state.transfer(&self.protocol, &self.stream).err();
        outcomes.append(&mut state.answers);
        Taken {
            at: Instant::now(),
            broken: broken.map(|fault| Broken { rank: 1, fault }),
        }
    }

    async fn answers(&self, wait: Wait) {
        if wait != Wait::Not {
            poll_fn(|cx| self.poll(cx)).await;
        }
    }

    async fn event(&self) -> ChannelEvent {
        poll_fn(|cx| {
            let _ = self.poll(cx);
            let event = self.state.borrow_mut().events.pop_front();
            event.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    fn is_blocked(&self) -> bool {
        false
    }

    fn progress(&self) -> WriteProgress {
        let state = self.state.borrow();
        WriteProgress {
            written: state.written,
            taken: state.written.saturating_sub(unacknowledged(&*self.stream)),
            unwritten: usize::from(!state.output.is_empty()),
        }
    }

    fn probe(&mut self) {
        let state = self.state.get_mut();
        if !std::mem::replace(&mut state.is_probing, true) {
            self.protocol.write_probe(&mut state.output);
        }
    }

    fn refusal(&self, _detail: &str, _address: &str, _body_bytes: usize) -> Option<String> {
        None
    }
}
