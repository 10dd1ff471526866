//! The [`PublishChannel`] of AMQP, over a channel of lapin: publishes, confirms, returns and events.
//!
//! Runs on the publisher thread; lapin's thread wakes it.

use super::config::AmqpConfig;
use super::connect::{self, Link, REPLY_SUCCESS, confirming_channel, within};
use super::findings::EXCHANGE_MISMATCH;
use super::guard::SocketHandle;
use super::returns::{ConfirmAnswer, ReturnedMessage, Returns};
use super::sendable::Sendable;
use crate::connected::{
    Attempts, Broken, ChannelEvent, Connection, Limit, PublishChannel, Taken, Wait, Wire, WriteProgress,
};
use crate::down::{DownReason, Fault};
use crate::{Outcome, Publication};
use futures_util::{Stream, StreamExt};
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation, Event as LapinEvent, PublisherConfirm};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

/// The reply code of `basic.return` for a message that was routed to no queue.
const NO_ROUTE: u16 = 312;
/// The most messages that may be in lapin's buffer and not yet in the socket's. After a stop request or a lost lease,
/// no more than these still go out. This keeps the socket busy: 1,000 is not measurably faster.
const UNWRITTEN_MAX: usize = 64;
/// If the worker lets confirms wait, this number of writes and confirms wakes the thread. It is below UNWRITTEN_MAX, so
/// that the socket stays busy.
const WAKES: usize = 32;
/// The time after which the thread looks for fewer.
const CHECK_AFTER: Duration = Duration::from_millis(2);

/// The result that lapin has for the message with this number.
type LapinAnswer = (u64, lapin::Result<Confirmation>);

pub(crate) struct LapinChannel<'a, W> {
    link: &'a Link,
    config: &'a AmqpConfig,
    /// Writes a message: [`write`], whose future has no name.
    write: fn(&'a Channel, Sendable) -> W,
    /// Messages without an answer.
    attempts: Attempts<W, PublisherConfirm>,
    answers: Vec<LapinAnswer>,
    returns: Returns,
    /// Empty between takes: only its memory is kept.
    confirms: Vec<ConfirmAnswer>,
    events: RefCell<Pin<Box<dyn Stream<Item = LapinEvent> + 'a>>>,
    probe: RefCell<Option<Probe<'a>>>,
    check: RefCell<Check>,
    /// Whether the last timed check found nothing. The next answer then wakes the thread: more checks would be in vain.
    is_silent: Cell<bool>,
}

/// A request on the channel of the messages, to check that the broker answers. Turning on confirms a second time
/// changes nothing. A channel handles its frames in order, so an answer means that the broker has received all earlier
/// messages.
type Probe<'a> = Pin<Box<dyn Future<Output = lapin::Result<()>> + 'a>>;

/// The timed check for fewer answers than [`WAKES`].
struct Check {
    timer: Pin<Box<Sleep>>,
    is_armed: bool,
}

impl Check {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self.is_armed {
            true => self.timer.as_mut().poll(cx),
            false => Poll::Pending,
        }
    }
}

impl Connection for Link {
    type Wire = SocketHandle;

    fn channel(&self) -> impl PublishChannel {
        LapinChannel::new(self, write)
    }

    /// Replaces the channel that messages are published on. The old channel is closed first: the broker then drops what
    /// it still held back (for a quorum queue whose leader is away), and does not publish it later.
    async fn renew(&mut self, limit: Duration) -> Result<(), Fault> {
        let close = self.channel.close(REPLY_SUCCESS, "OK".into());
        within(Limit::new(limit), "channel.close", close).await?;
        self.channel = confirming_channel(Limit::new(limit), &self.connection).await?;
        Ok(())
    }

    /// A close is sent after the messages that lapin still buffers. lapin never resolves it if its I/O thread ends first.
    async fn close(&self, wire: &mut SocketHandle, limit: Duration) {
        let status = self.connection.status();
        if !status.connected() || status.blocked() {
            return;
        }
        tokio::select! {
            _ = self.connection.close(REPLY_SUCCESS, "OK".into()) => {}
            () = wire.ended() => {}
            () = tokio::time::sleep(limit) => {}
        }
    }
}

impl<'a, W: Future<Output = lapin::Result<PublisherConfirm>>> LapinChannel<'a, W> {
    fn new(link: &'a Link, write: fn(&'a Channel, Sendable) -> W) -> Self {
        Self {
            link,
            config: &link.config,
            write,
            attempts: Attempts::default(),
            answers: Vec::new(),
            returns: Returns::default(),
            confirms: Vec::new(),
            events: RefCell::new(Box::pin(link.connection.events_listener())),
            probe: RefCell::default(),
            check: RefCell::new(Check {
                timer: Box::pin(sleep_until(Instant::now())),
                is_armed: false,
            }),
            is_silent: Cell::new(false),
        }
    }

    /// The number of writes and confirms for which this thread is woken.
    fn wakes(&self, wait: Wait) -> usize {
        match wait {
            Wait::Not => 0,
            Wait::Some if !self.is_silent.get() => WAKES.min(self.config.window / 8).max(1),
            Wait::One | Wait::Some => 1,
        }
    }

    fn poll_event(&self, cx: &mut Context<'_>) -> Poll<ChannelEvent> {
        while let Poll::Ready(Some(event)) = self.events.borrow_mut().poll_next_unpin(cx) {
            return Poll::Ready(match event {
                LapinEvent::ConnectionBlocked(reason) => ChannelEvent::Blocked(reason),
                LapinEvent::ConnectionUnblocked => ChannelEvent::Unblocked,
                LapinEvent::Error(error) => ChannelEvent::Broken(broken(&error)),
                _ => continue,
            });
        }
        let mut probe = self.probe.borrow_mut();
        let answered = probe.as_mut().map_or(Poll::Pending, |probe| probe.as_mut().poll(cx));
        match answered {
            Poll::Ready(answered) => {
                *probe = None;
                answered.map_or(Poll::Pending, |()| Poll::Ready(ChannelEvent::Alive))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<W: Future<Output = lapin::Result<PublisherConfirm>>> PublishChannel for LapinChannel<'_, W> {
    /// Its first poll, right here, puts the frames into lapin's buffer, which keeps the order. Awaiting each write instead
    /// would take four times the CPU, because each message would need a thread round trip (lapin's
    /// `send_method_frame_with_body`).
    fn send(&mut self, number: u64, message: Publication) -> Result<(), String> {
        let message_id = message.properties.message_id.clone();
        let sendable = Sendable::build(message, self.config, self.link.frame_bytes_max)?;
        self.returns.sent(number, message_id);
        let result = self.attempts.add(number, (self.write)(&self.link.channel, sendable));
        self.answers.extend(result.map(|result| (number, result)));
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.attempts.unwritten() < UNWRITTEN_MAX && self.answers.is_empty()
    }

    /// Takes every answer that lapin has resolved so far: the complete drain that `returns` requires.
    fn take(&mut self, outcomes: &mut Vec<(u64, Outcome)>) -> Taken {
        if self.attempts.take_ready(&mut self.answers) {
            self.is_silent.set(false);
        }
        let mut worst: Option<Broken> = None;
        let mut answers = std::mem::take(&mut self.answers);
        for (number, result) in answers.drain(..) {
            let error = match result {
                Ok(Confirmation::Ack(carried)) => {
                    self.confirms.push(answer(number, true, carried));
                    continue;
                }
                Ok(Confirmation::Nack(carried)) => {
                    self.confirms.push(answer(number, false, carried));
                    continue;
                }
                Ok(Confirmation::NotRequested) => Broken {
                    rank: 0,
                    fault: Fault::new(DownReason::PROTOCOL, "no confirms"),
                },
                Err(error) => broken(&error),
            };
            if worst.as_ref().is_none_or(|worst| error.rank > worst.rank) {
                worst = Some(error);
            }
        }
        self.answers = answers; // its memory is used again
        let at = self.link.last_bytes.at();
        if !self.confirms.is_empty() {
            self.returns.drained(&mut self.confirms, outcomes);
        }
        Taken { at, broken: worst }
    }

    async fn answers(&self, wait: Wait) {
        let wakes = self.wakes(wait);
        if wakes > 1 && !self.check.borrow().is_armed && !self.attempts.is_empty() {
            let mut check = self.check.borrow_mut();
            check.timer.as_mut().reset(Instant::now() + CHECK_AFTER);
            check.is_armed = true;
        }
        let mut woken = pin!(self.attempts.woken(wakes));
        poll_fn(|cx| {
            let mut check = self.check.borrow_mut();
            if check.poll(cx).is_ready() {
                check.is_armed = false;
                self.is_silent.set(!self.attempts.are_woken());
                return Poll::Ready(());
            }
            woken.as_mut().poll(cx)
        })
        .await;
    }

    async fn event(&self) -> ChannelEvent {
        poll_fn(|cx| self.poll_event(cx)).await
    }

    fn is_blocked(&self) -> bool {
        self.link.connection.status().blocked()
    }

    fn progress(&self) -> WriteProgress {
        WriteProgress {
            written: self.link.sent_bytes.written(),
            taken: self.link.sent_bytes.taken(),
            unwritten: self.attempts.unwritten(),
        }
    }

    fn probe(&mut self) {
        let probe = self.probe.get_mut();
        if probe.is_none() {
            let request = self.link.channel.confirm_select(ConfirmSelectOptions::default());
            *probe = Some(Box::pin(request));
        }
    }

    fn refusal(&self, detail: &str, routing_key: &str, body_bytes: usize) -> Option<String> {
        refusal(detail, &self.config.exchange, routing_key, body_bytes)
    }
}

/// Publishes one message. The first poll puts it into lapin's buffer; the future completes when it is written.
async fn write(channel: &Channel, message: Sendable) -> lapin::Result<PublisherConfirm> {
    // Mandatory: an unroutable message is returned instead of vanishing behind an ack.
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    let Sendable {
        exchange,
        routing_key,
        properties,
        body,
    } = message;
    channel
        .basic_publish(exchange, routing_key, options, &body, properties)
        .await
}

/// After a publish, 406 concerns the message and not the exchange.
fn broken(error: &lapin::Error) -> Broken {
    let mut fault = connect::fault(error);
    if fault.reason == EXCHANGE_MISMATCH {
        fault.reason = DownReason::CLOSED;
    }
    Broken {
        rank: connect::specificity(error),
        fault,
    }
}

fn answer(seq: u64, acked: bool, carried: Option<BasicReturnMessage>) -> ConfirmAnswer {
    let carried = carried.map(|message| {
        let message_id = message.properties.message_id().as_ref();
        Box::new(ReturnedMessage {
            message_id: message_id.map(ToString::to_string).unwrap_or_default(),
            code: message.reply_code,
            reason: return_reason(&message),
        })
    });
    ConfirmAnswer { seq, acked, carried }
}

/// Why RabbitMQ returned a message, for the user: which exchange had no queue for which routing key.
fn return_reason(message: &BasicReturnMessage) -> String {
    let delivery = &message.delivery;
    let cause = match (message.reply_code, delivery.exchange.as_str()) {
        (NO_ROUTE, "") => format!("there is no queue \"{}\"", delivery.routing_key),
        (NO_ROUTE, exchange) => format!(
            "no queue is bound to exchange \"{exchange}\" for routing key \"{}\"",
            delivery.routing_key
        ),
        _ => "the broker returned it".to_owned(),
    };
    format!("{cause} ({} {})", message.reply_code, message.reply_text)
}

/// Why this message can never be sent, if the broker closed the channel because of it, which fails everything
/// outstanding. Some error texts identify the message.
fn refusal(detail: &str, exchange: &str, routing_key: &str, body_bytes: usize) -> Option<String> {
    // rabbit_channel:check_msg_size/3: "message size 134217729 is larger than configured max size 134217728". The size
    // is that of the body.
    let too_large = bytes_after(detail, "message size ").zip(bytes_after(detail, "max size "));
    if let Some((size, limit)) = too_large
        && size > limit
        && body_bytes > limit
    {
        return Some(format!(
            "the body has {body_bytes} bytes; max_message_size of the broker is {limit}"
        ));
    }
    // rabbit_channel:check_topic_authorisation: "access to topic 'k' in exchange 'x' in vhost '/' refused for user
    // 'u'".
    let topic = format!("access to topic '{routing_key}' in exchange '{exchange}' in vhost");
    detail.contains(&topic).then(|| detail.to_owned())
}

fn bytes_after(text: &str, label: &str) -> Option<usize> {
    let rest = &text[text.find(label)? + label.len()..];
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    fn refusal(body_bytes: usize, detail: &str) -> Option<String> {
        super::refusal(detail, "x", "k", body_bytes)
    }

    #[test]
    fn the_brokers_text_identifies_the_message_that_was_too_large() {
        for text in [
            "PRECONDITION_FAILED - message size 2000 is larger than configured max size 1000",
            "PRECONDITION_FAILED - message size 2000 is larger than max size 1000",
        ] {
            let refused = |bytes| {
                Some(format!(
                    "the body has {bytes} bytes; max_message_size of the broker is 1000"
                ))
            };
            assert_eq!(refusal(2000, text), refused(2000));
            assert_eq!(refusal(1001, text), refused(1001));
            assert_eq!(refusal(1000, text), None);
        }
        for other in [
            "PRECONDITION_FAILED - something else",
            "message size x is larger than max size ",
            // The next connect checks the exchange.
            "NOT_FOUND - no exchange 'x' in vhost '/'",
            "ACCESS_REFUSED - cannot publish to internal exchange 'x' in vhost '/'",
        ] {
            assert_eq!(refusal(2000, other), None);
        }
    }

    #[test]
    fn a_forbidden_topic_is_the_fault_of_the_messages_with_it() {
        for (topic, is_refused) in [("k", true), ("another", false)] {
            let text = format!("access to topic '{topic}' in exchange 'x' in vhost '/' refused for user 'u'");
            assert_eq!(refusal(1, &text).is_some(), is_refused, "{text}");
        }
    }
}
