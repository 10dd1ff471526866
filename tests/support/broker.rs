//! What a test can do with a shared broker: declare, bind, publish, count. Called by tests and the demo.
//!
//! A broker takes seconds to start, so tests share one and use distinct names ([`fresh_names`]). A test that stops or
//! disturbs its broker starts a [`PrivateBroker`]; [`Broker`] has no such methods.

use std::cell::RefCell;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use amqprs::BasicProperties;
use amqprs::channel::{
    BasicGetArguments, BasicNackArguments, BasicPublishArguments, BasicRejectArguments, ExchangeDeclareArguments,
    ExchangeDeleteArguments, QueueBindArguments, QueueDeclareArguments, QueueDeleteArguments, QueueUnbindArguments,
};
use serde_json::Value;

use crate::amqp::{self, Address};
use crate::certificate::Certificate;
use crate::network::Host;
use crate::private_broker::{PrivateBroker, Size, TlsListener};

/// How a consumer returns a message that it has not processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// basic.reject, with requeue
    Reject,
    /// basic.nack, with requeue
    Nack,
    /// The connection ends.
    Leave,
}

/// A RabbitMQ server that listens on loopback or on a host of the test's network.
#[derive(Clone, Debug)]
pub struct Broker {
    address: Address,
    /// Whether the queues and exchanges of a test are deleted after it. Others end with their broker.
    deletes: bool,
}

impl Broker {
    /// The broker at this address, with the login of the default user.
    pub(crate) fn at(host: Ipv4Addr, port: u16) -> Self {
        Self {
            address: Address {
                host,
                port,
                user: "guest".into(),
                password: "guest".into(),
            },
            deletes: false,
        }
    }

    /// The broker that all tests share: the one at OUTBOX_BROKER_PORT if that is set (see bin/run_tests.rs).
    /// Otherwise the first call starts a broker that ends with this process.
    pub fn shared() -> &'static Self {
        static GIVEN: OnceLock<Option<Broker>> = OnceLock::new();
        let given = GIVEN.get_or_init(|| {
            let port = std::env::var("OUTBOX_BROKER_PORT").ok()?;
            let port = port.parse();
            let broker = Self::at(Ipv4Addr::LOCALHOST, port.expect("a port in OUTBOX_BROKER_PORT"));
            Some(Self {
                deletes: true,
                ..broker
            })
        });
        given.as_ref().unwrap_or_else(|| PrivateBroker::of_this_process())
    }

    /// Starts a private broker, or takes one that another test has left: use distinct names ([`fresh_names`]).
    pub fn start() -> PrivateBroker {
        PrivateBroker::start()
    }

    /// Starts a private broker of the given size. No other test has used it, so any name may be used.
    pub fn start_sized(size: Size) -> PrivateBroker {
        PrivateBroker::start_with(size, None)
    }

    /// Starts a private broker on a host, with further lines of rabbitmq.conf. Its node is `rabbit@` with the address
    /// of the host.
    pub fn start_on(host: &Host, conf: &[&str]) -> PrivateBroker {
        PrivateBroker::start_on(host, conf)
    }

    /// Starts a private broker that also listens for TLS and presents `certificate`. `clients_of` is an authority in
    /// PEM. If it is given, the broker accepts only clients with a certificate of that authority, and a client may
    /// log in with its certificate.
    pub fn start_tls(certificate: &Certificate, clients_of: Option<&str>) -> PrivateBroker {
        PrivateBroker::start_with(
            Size::default(),
            Some(TlsListener {
                certificate,
                clients_of,
            }),
        )
    }

    /// Its version, such as (3, 10).
    pub fn version(&self) -> (u32, u32) {
        let asked = amqp::runtime().block_on(async {
            let connection = amqp::connect(&self.address).await?;
            let version = connection.server_properties().version().to_owned();
            connection.close().await?;
            Ok::<_, amqprs::error::Error>(version)
        });
        let version = asked.expect("ask the broker for its version");
        let mut numbers = version.split('.').map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
            _ => panic!("the version of the broker is {version:?}"),
        }
    }

    pub fn port(&self) -> u16 {
        self.address.port
    }

    /// The AMQP URL, without user and password: those have separate settings.
    pub fn url(&self) -> String {
        format!("amqp://{}:{}", self.address.host, self.port())
    }

    pub fn user(&self) -> &str {
        &self.address.user
    }

    pub fn password(&self) -> &str {
        &self.address.password
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Declares an exchange. `kind` is "direct", "fanout", "topic" or "headers".
    pub fn declare_exchange(&self, exchange: &str, kind: &str, durable: bool) {
        self.own(Thing::Exchange(exchange.to_owned()));
        let args = ExchangeDeclareArguments::new(exchange, kind).durable(durable).finish();
        amqp::operate(
            &self.address,
            &format!("declare exchange {exchange}"),
            |channel| async move { channel.exchange_declare(args).await },
        );
    }

    pub fn delete_exchange(&self, exchange: &str) {
        amqp::operate(
            &self.address,
            &format!("delete exchange {exchange}"),
            |channel| async move { channel.exchange_delete(ExchangeDeleteArguments::new(exchange)).await },
        );
    }

    /// Declares a durable queue. `args` is a JSON object, such as `json!({"x-queue-type": "quorum"})`, or null.
    pub fn declare_queue(&self, queue: &str, args: Value) {
        self.own(Thing::Queue(queue.to_owned()));
        let args = durable_queue(queue, args);
        amqp::operate(&self.address, &format!("declare queue {queue}"), |channel| async move {
            channel.queue_declare(args).await
        });
    }

    pub fn delete_queue(&self, queue: &str) {
        amqp::operate(&self.address, &format!("delete queue {queue}"), |channel| async move {
            channel.queue_delete(QueueDeleteArguments::new(queue)).await
        });
    }

    pub fn bind(&self, queue: &str, exchange: &str, routing_key: &str) {
        amqp::operate(
            &self.address,
            &format!("bind {queue} to {exchange}"),
            |channel| async move {
                channel
                    .queue_bind(QueueBindArguments::new(queue, exchange, routing_key))
                    .await
            },
        );
    }

    pub fn unbind(&self, queue: &str, exchange: &str, routing_key: &str) {
        amqp::operate(
            &self.address,
            &format!("unbind {queue} from {exchange}"),
            |channel| async move {
                channel
                    .queue_unbind(QueueUnbindArguments::new(queue, exchange, routing_key))
                    .await
            },
        );
    }

    /// Declares a durable topic exchange, and a durable queue that gets all its messages.
    pub fn declare_bound(&self, exchange: &str, queue: &str, args: Value) {
        self.own(Thing::Exchange(exchange.to_owned()));
        self.own(Thing::Queue(queue.to_owned()));
        let what = format!("declare exchange {exchange} and queue {queue}");
        let of_exchange = ExchangeDeclareArguments::new(exchange, "topic").durable(true).finish();
        let of_queue = durable_queue(queue, args);
        let binding = QueueBindArguments::new(queue, exchange, "#");
        amqp::operate(&self.address, &what, |channel| async move {
            channel.exchange_declare(of_exchange).await?;
            channel.queue_declare(of_queue).await?;
            channel.queue_bind(binding).await
        });
    }

    /// The number of ready messages. Unacknowledged messages do not count.
    pub fn queue_len(&self, queue: &str) -> u32 {
        let args = QueueDeclareArguments::durable_client_named(queue)
            .passive(true)
            .finish();
        let declared = amqp::operate(&self.address, &format!("count queue {queue}"), |channel| async move {
            channel.queue_declare(args).await
        });
        declared.expect("an answer, since the declaration is not no-wait").1
    }

    /// Takes one message and returns it to the queue, as a consumer that fails. False if there is no message. The
    /// message may be back in the queue a moment later.
    pub fn take_and_return(&self, queue: &str, how: Return) -> bool {
        let args = BasicGetArguments::new(queue);
        amqp::operate(
            &self.address,
            &format!("return to queue {queue}"),
            |channel| async move {
                let Some((got, ..)) = channel.basic_get(args).await? else {
                    return Ok(false);
                };
                let tag = got.delivery_tag();
                match how {
                    Return::Reject => channel.basic_reject(BasicRejectArguments::new(tag, true)).await?,
                    Return::Nack => channel.basic_nack(BasicNackArguments::new(tag, false, true)).await?,
                    Return::Leave => {}
                }
                Ok(true)
            },
        )
    }

    /// Publishes one persistent message, for tests of consumers and the demo.
    pub fn publish(&self, exchange: &str, routing_key: &str, body: &[u8]) {
        self.publish_with(
            exchange,
            routing_key,
            BasicProperties::default().with_persistence(true).finish(),
            body,
        );
    }

    /// Publishes one message with the given properties.
    pub fn publish_with(&self, exchange: &str, routing_key: &str, properties: BasicProperties, body: &[u8]) {
        let args = BasicPublishArguments::new(exchange, routing_key);
        amqp::operate(&self.address, &format!("publish to {exchange}"), |channel| async move {
            channel.basic_publish(properties, body.to_vec(), args).await
        });
    }
}

fn durable_queue(queue: &str, args: Value) -> QueueDeclareArguments {
    let args = match args {
        Value::Null => amqprs::FieldTable::new(),
        Value::Object(object) => amqp::table_from_json(&object),
        other => panic!("the arguments of a queue are a JSON object, not {other}"),
    };
    QueueDeclareArguments::durable_client_named(queue)
        .arguments(args)
        .finish()
}

/// What a test declares on a shared broker.
enum Thing {
    Exchange(String),
    Queue(String),
}

impl Broker {
    /// Deletes it when the calling thread ends, which is the thread of a test.
    fn own(&self, thing: Thing) {
        if self.deletes {
            DECLARED.with_borrow_mut(|declared| declared.0.push((self.clone(), thing)));
        }
    }
}

thread_local! {
    static DECLARED: RefCell<Declared> = const { RefCell::new(Declared(Vec::new())) };
}

struct Declared(Vec<(Broker, Thing)>);

impl Drop for Declared {
    fn drop(&mut self) {
        static CLEANER: OnceLock<Mutex<mpsc::Sender<(Broker, Thing)>>> = OnceLock::new();
        // A thread that ends cannot run an operation: the runtime needs thread-locals that may be gone.
        let cleaner = CLEANER.get_or_init(|| {
            let (orders, inbox) = mpsc::channel();
            std::thread::spawn(move || inbox.into_iter().for_each(|(broker, thing)| delete(&broker, thing)));
            Mutex::new(orders)
        });
        let cleaner = cleaner.lock().unwrap_or_else(PoisonError::into_inner);
        for thing in self.0.drain(..) {
            let _ = cleaner.send(thing);
        }
    }
}

fn delete(broker: &Broker, thing: Thing) {
    // An error leaves it to the end of the broker.
    let _ = amqp::try_operate(&broker.address, Duration::from_secs(20), |channel| async move {
        match thing {
            Thing::Exchange(name) => channel.exchange_delete(ExchangeDeleteArguments::new(&name)).await,
            Thing::Queue(name) => channel.queue_delete(QueueDeleteArguments::new(&name)).await.map(drop),
        }
    });
}

/// Names of an exchange and a queue that no other test uses, in this process or another.
pub fn fresh_names() -> (String, String) {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    static RUN: OnceLock<String> = OnceLock::new();
    let run = RUN.get_or_init(|| {
        // A shared broker may outlive this process, and the pid may be used again. So the time is part of the name.
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis();
        format!("{}.{now}", std::process::id())
    });
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    (
        format!("test.{run}.{number}.exchange"),
        format!("test.{run}.{number}.queue"),
    )
}
