//! A consumer of one queue, for tests and the demo. It runs on its own thread and hands deliveries over in order.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use amqprs::callbacks::DefaultChannelCallback;
use amqprs::channel::{BasicAckArguments, BasicCancelArguments, BasicConsumeArguments, Channel, ConsumerMessage};
use serde_json::Value;
use tokio::sync::oneshot;

use crate::amqp::{self, Address};
use crate::broker::Broker;
use crate::wait::{LONG, patient};

/// One message as the broker delivered it.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub body: Vec<u8>,
    pub exchange: String,
    pub routing_key: String,
    pub redelivered: bool,
    pub message_id: Option<String>,
    /// The property "type".
    pub kind: Option<String>,
    pub content_type: Option<String>,
    /// 2 means persistent.
    pub delivery_mode: Option<u8>,
    /// Seconds since 1970.
    pub timestamp: Option<u64>,
    pub app_id: Option<String>,
    pub priority: Option<u8>,
    pub correlation_id: Option<String>,
    pub headers: BTreeMap<String, Value>,
    pub received_at: Instant,
}

impl Delivery {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("a body of JSON: {error}: {self:?}"))
    }

    /// The label in the payload of the event.
    pub fn label(&self) -> String {
        label(&self.json())
    }

    fn new(message: ConsumerMessage) -> Self {
        const COMPLETE: &str = "amqprs delivers complete messages";
        let (deliver, properties) = (
            message.deliver.expect(COMPLETE),
            message.basic_properties.expect(COMPLETE),
        );
        Self {
            body: message.content.expect(COMPLETE),
            exchange: deliver.exchange().clone(),
            routing_key: deliver.routing_key().clone(),
            redelivered: deliver.redelivered(),
            message_id: properties.message_id().cloned(),
            kind: properties.message_type().cloned(),
            content_type: properties.content_type().cloned(),
            delivery_mode: properties.delivery_mode(),
            timestamp: properties.timestamp(),
            app_id: properties.app_id().cloned(),
            priority: properties.priority(),
            correlation_id: properties.correlation_id().cloned(),
            headers: properties.headers().map(amqp::headers_to_json).unwrap_or_default(),
            received_at: Instant::now(),
        }
    }
}

/// The label in the payload of an event.
pub(crate) fn label(body: &Value) -> String {
    match &body["payload"]["label"] {
        Value::Null => panic!("a label, not {body}"),
        Value::String(label) => label.clone(),
        label => label.to_string(),
    }
}

pub fn labels(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(Delivery::label).collect()
}

/// Takes every message of one queue as it arrives, and acknowledges it. A consumer lives as long as its connection:
/// make a new one after a restart of the broker.
pub struct Consumer {
    queue: String,
    deliveries: mpsc::Receiver<Delivery>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Consumer {
    /// Starts the consumer. Returns when the broker has registered it.
    pub fn new(broker: &Broker, queue: &str) -> Self {
        let (sender, deliveries) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = mpsc::channel();
        let (address, name) = (broker.address().clone(), queue.to_owned());
        let thread = std::thread::Builder::new().name("consumer".into());
        let thread = thread.spawn(move || amqp::runtime().block_on(consume(address, name, sender, ready, stopped)));
        let thread = thread.expect("start a consumer thread");
        match is_ready.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => panic!("consume queue {queue}: {error}; the broker's log has the reason"),
            Err(_) => panic!("consume queue {queue}: the consumer's thread panicked"),
        }
        Self {
            queue: queue.to_owned(),
            deliveries,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// The next message, or none if none arrived within `timeout`. Panics if the connection or the queue is gone, since
    /// "no message" would then be a false answer.
    pub fn recv(&self, timeout: Duration) -> Option<Delivery> {
        self.recv_until(Instant::now() + patient(timeout))
    }

    /// The next message, which must arrive.
    #[track_caller]
    pub fn next(&self) -> Delivery {
        self.recv(LONG).expect("a message")
    }

    fn recv_until(&self, deadline: Instant) -> Option<Delivery> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.deliveries.recv_timeout(left) {
            Ok(delivery) => Some(delivery),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                panic!("queue {} or the connection of its consumer is gone", self.queue)
            }
        }
    }

    /// The next `count` messages. Panics if they did not all arrive within `timeout`.
    pub fn recv_n(&self, count: usize, timeout: Duration) -> Vec<Delivery> {
        let deadline = Instant::now() + patient(timeout);
        let mut received = Vec::with_capacity(count);
        while received.len() < count {
            match self.recv_until(deadline) {
                Some(delivery) => received.push(delivery),
                None => panic!(
                    "{} of {count} messages arrived from queue {} in {timeout:?}",
                    received.len(),
                    self.queue
                ),
            }
        }
        received
    }

    /// Asserts that nothing has come before a message that the test itself puts into the queue now.
    pub fn assert_next_is_fence(&self, broker: &Broker) {
        broker.publish("", &self.queue, b"fence");
        let next = self.recv(LONG).expect("the fence");
        assert_eq!(String::from_utf8_lossy(&next.body), "fence");
    }

    /// All messages that have arrived.
    pub fn drain(&self) -> Vec<Delivery> {
        std::iter::from_fn(|| self.recv(Duration::ZERO)).collect()
    }

    /// Ends the consumer and returns the messages that it took and the test has not read. Works without a connection
    /// too.
    pub fn finish(mut self) -> Vec<Delivery> {
        self.stop_and_wait();
        self.deliveries.try_iter().collect()
    }

    fn stop_and_wait(&mut self) {
        if let Some(stop) = self.stop.take() {
            // An error means that the thread has ended already.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.stop_and_wait();
    }
}

/// The body of the consumer's thread. The test thread calls nothing from here on.
async fn consume(
    address: Address,
    queue: String,
    deliveries: mpsc::Sender<Delivery>,
    ready: mpsc::Sender<Result<(), amqprs::error::Error>>,
    mut stopped: oneshot::Receiver<()>,
) {
    let subscribed = async {
        let connection = amqp::connect(&address).await?;
        let channel = connection.open_channel(None).await?;
        // Without a callback amqprs ignores that the broker cancels a consumer whose queue is deleted.
        channel.register_callback(DefaultChannelCallback).await?;
        let args = BasicConsumeArguments::new(&queue, "").manual_ack(true).finish();
        let (tag, messages) = channel.basic_consume_rx(args).await?;
        Ok((connection, channel, tag, messages))
    };
    let (connection, channel, consumer_tag, mut messages) = match subscribed.await {
        Ok(subscribed) => subscribed,
        Err(error) => return ready.send(Err(error)).unwrap_or_default(),
    };
    ready.send(Ok(())).unwrap_or_default();
    let mut cancelled = false;
    loop {
        let message = tokio::select! {
            message = messages.recv() => message,
            // Cancel first, then read the deliveries that have arrived. RabbitMQ 3.10 loses confirmed messages of a
            // connection that is closed while the broker sends more on it.
            _ = &mut stopped, if !cancelled => {
                cancelled = channel.basic_cancel(BasicCancelArguments::new(&consumer_tag)).await.is_ok();
                if !cancelled {
                    return;
                }
                continue;
            }
        };
        // None: the consumer is cancelled, or the connection, the channel or the queue is gone. The drop of the sender
        // ends the test's wait.
        let Some(message) = message else { break };
        let mut last_tag = hand_over(message, &deliveries);
        while let Ok(message) = messages.try_recv() {
            last_tag = hand_over(message, &deliveries);
        }
        // After the handover: if the connection dies in between, the broker delivers the message again, and it is not
        // lost.
        if acknowledge_up_to(&channel, last_tag).await.is_err() {
            return;
        }
    }
    if cancelled {
        let _ = connection.close().await;
    }
}

fn hand_over(message: ConsumerMessage, deliveries: &mpsc::Sender<Delivery>) -> u64 {
    let tag = message
        .deliver
        .as_ref()
        .expect("amqprs delivers complete messages")
        .delivery_tag();
    // An error means that the test is dropping the consumer.
    let _ = deliveries.send(Delivery::new(message));
    tag
}

async fn acknowledge_up_to(channel: &Channel, tag: u64) -> Result<(), amqprs::error::Error> {
    channel.basic_ack(BasicAckArguments::new(tag, true)).await
}
