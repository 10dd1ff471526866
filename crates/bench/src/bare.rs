//! Measures how fast lapin is alone, as the strongest plain publisher. Messages are ready in memory, persistent,
//! mandatory and confirmed, with at most 1,000 outstanding. Each publish is polled once instead of awaited, which
//! spares a thread round trip per message. Connection parameters, properties and headers are those of the extension.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use outbox_core::message::Publication;
use tokio::runtime::{Builder, Runtime};

use crate::events;
use crate::servers::EXCHANGE;

/// The most outstanding messages; the extension has the same limit.
const WINDOW: usize = 1000;

/// A message in lapin's types, ready to be sent.
#[derive(Debug, PartialEq)]
pub struct BareMessage {
    exchange: ShortString,
    routing_key: ShortString,
    properties: BasicProperties,
    body: Vec<u8>,
}

impl From<Publication> for BareMessage {
    fn from(publication: Publication) -> Self {
        Self {
            properties: events::properties(&publication),
            exchange: EXCHANGE.into(),
            routing_key: publication.address.as_str().into(),
            body: publication.body,
        }
    }
}

impl BareMessage {
    /// The same message with another body and id.
    pub fn with(&self, id: &str, body: String) -> Self {
        Self {
            exchange: self.exchange.clone(),
            routing_key: self.routing_key.clone(),
            properties: self.properties.clone().with_message_id(id.into()),
            body: body.into_bytes(),
        }
    }
}

/// Publishes one message and waits for its confirm. Panics unless the broker acked it.
pub async fn publish(channel: &Channel, message: BareMessage) {
    let options = BasicPublishOptions {
        mandatory: true,
        ..Default::default()
    };
    let sent = channel.basic_publish(
        message.exchange,
        message.routing_key,
        options,
        &message.body,
        message.properties,
    );
    let confirm = sent.await.expect("publish").await.expect("a confirm");
    assert_eq!(
        confirm,
        Confirmation::Ack(None),
        "the broker refused or returned a message"
    );
}

/// A connection as the extension opens it, except for the number of channels. All channels are in confirm mode.
pub struct BarePublisher {
    pub runtime: Runtime,
    connection: Connection,
    pub channels: Vec<Channel>,
}

impl BarePublisher {
    /// Connects with one channel. Runs on the calling thread, as in the extension; lapin has its own thread in
    /// addition.
    pub fn connect(port: u16) -> Self {
        Self::connect_with(Builder::new_current_thread(), port, 1)
    }

    /// Connects with a channel for each client. One thread serves the sockets; the clients' threads poll their own
    /// publishes.
    pub fn connect_clients(port: u16, clients: u32) -> Self {
        let mut runtime = Builder::new_multi_thread();
        runtime.worker_threads(1);
        Self::connect_with(runtime, port, clients)
    }

    fn connect_with(mut runtime: Builder, port: u16, channels: u32) -> Self {
        let runtime = runtime.enable_all().build().expect("build a runtime");
        let (connection, channels) = runtime.block_on(async {
            // The limits of crates/transport/src/amqp/connect.rs.
            let uri = format!(
                "amqp://guest:guest@127.0.0.1:{port}/%2f?frame_max=131072&channel_max={}&heartbeat=8",
                channels + 7
            );
            let properties = ConnectionProperties::default().with_connection_name("bench: bare".into());
            let connection = Connection::connect(&uri, properties).await;
            let connection = connection.unwrap_or_else(|error| panic!("connect to the broker: {error}"));
            let mut open = Vec::new();
            for _ in 0..channels {
                let channel = connection.create_channel().await.expect("open a channel");
                let confirm = channel.confirm_select(ConfirmSelectOptions::default());
                confirm.await.expect("turn on confirms");
                open.push(channel);
            }
            (connection, open)
        });
        Self {
            runtime,
            connection,
            channels,
        }
    }

    /// Publishes all messages. Returns the time from the first publish to the last confirm.
    pub fn run(&self, messages: Vec<BareMessage>, batch: usize) -> Duration {
        let started = Instant::now();
        self.runtime.block_on(publish_all(&self.channels[0], messages, batch));
        started.elapsed()
    }

    pub fn close(self) {
        let closed = self.runtime.block_on(self.connection.close(200, "OK".into()));
        closed.expect("close the connection");
    }
}

async fn publish_all(channel: &Channel, messages: Vec<BareMessage>, batch: usize) {
    let mut outstanding: VecDeque<Pin<Box<dyn Future<Output = ()> + '_>>> = VecDeque::with_capacity(WINDOW);
    for message in messages {
        if outstanding.len() == WINDOW {
            // The oldest first: confirms arrive in order, so most of the batch is confirmed when the first is.
            for attempt in outstanding.drain(..batch) {
                attempt.await;
            }
        }
        let mut attempt = Box::pin(publish(channel, message));
        // The first poll puts the frames into lapin's buffer.
        match attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(()) => {}
            Poll::Pending => outstanding.push_back(attempt),
        }
    }
    for attempt in outstanding {
        attempt.await;
    }
}
