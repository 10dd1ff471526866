//! A broker that speaks AMQP and treats messages as a rule demands.

use crate::exercise::{Act, Exercised, Peer};
use crate::support::SlowReader;
use crate::support::peer::{self, CONNECTION, short};
use outbox_transport::{AllowList, AmqpConfig, Deadline, Endpoint};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

pub struct Amqp(AmqpConfig);

impl Exercised for Amqp {
    fn start(peer: &Arc<Peer>) -> Self {
        let peer = Arc::clone(peer);
        let port = peer::broker_of_many(move |broker| {
            broker.connect()?;
            if peer.is_slow {
                broker.stream = Box::new(SlowReader::new(broker.tcp.try_clone()?)?);
            }
            loop {
                let got = broker.next_message_answering(|_, _| {})?;
                let act = peer.takes(&got.body);
                match act {
                    Act::Confirm => broker.ack(got.tag, false)?,
                    Act::Refuse => broker.nack(got.tag)?,
                    Act::Garble => broker.frame(1, 0xffff, &[0xff; 64])?,
                    Act::HangUp => return broker.tcp.shutdown(Shutdown::Both),
                    Act::Hold | Act::Block => {
                        if let Act::Block = act {
                            broker.method(0, CONNECTION, 60, &short("it takes nothing"))?;
                        }
                        let mut later = peer::Peer::new(broker.tcp.try_clone()?, Box::new(broker.tcp.try_clone()?));
                        later.publish_channel = broker.publish_channel;
                        let peer = Arc::clone(&peer);
                        std::thread::spawn(move || {
                            peer.until_released();
                            if let Act::Block = act {
                                later.method(0, CONNECTION, 61, &[])?;
                            }
                            later.ack(got.tag, false)
                        });
                    }
                }
            }
        });
        Self::at(port)
    }

    fn at(port: u16) -> Self {
        Self(AmqpConfig {
            backoff_max: Duration::from_millis(40),
            ..peer::config(port)
        })
    }

    fn port(&self) -> u16 {
        self.0.endpoints[0].port
    }

    fn deadline(&self) -> Deadline {
        self.0.deadline.clone()
    }

    fn named(&self, host: &str, patience: Duration, life: Duration) -> impl outbox_transport::Transport {
        let (host, port) = (host.to_owned(), self.port());
        AmqpConfig {
            endpoints: vec![Endpoint { host, port }],
            connect_timeout: patience,
            connection_life: life,
            ..self.0.clone()
        }
    }

    fn config(&self) -> impl outbox_transport::Transport {
        self.0.clone()
    }

    fn of_window(&self, window: usize) -> impl outbox_transport::Transport {
        AmqpConfig {
            window,
            ..self.0.clone()
        }
    }

    fn confined(&self) -> impl outbox_transport::Transport {
        AmqpConfig {
            allow: AllowList::default(),
            ..self.0.clone()
        }
    }

    fn of_limits(&self, timeout: Duration, min_send_rate: u32) -> impl outbox_transport::Transport {
        AmqpConfig {
            confirm_timeout: timeout,
            min_send_rate,
            ..self.0.clone()
        }
    }
}
