//! A receiver by HTTP that treats messages as a rule demands.

use crate::exercise::{Act, Exercised, Peer};
use crate::support::receiver::{self, Receiver, Reply, Request, status, with};
use outbox_transport::{AllowList, Deadline, HttpConfig};
use std::sync::Arc;
use std::time::Duration;

pub struct Http(HttpConfig);

impl Exercised for Http {
    fn start(peer: &Arc<Peer>) -> Self {
        let peer = Arc::clone(peer);
        let is_slow = peer.is_slow;
        let answer = move |request: &Request| match peer.takes(&request.body) {
            Act::Confirm => status(200),
            Act::Refuse => status(422),
            Act::Garble => Reply::Close(vec![0xff; 64]),
            Act::HangUp => Reply::Close(Vec::new()),
            Act::Block => with(503, "retry-after: 3\r\n", ""),
            Act::Hold => {
                peer.until_released();
                status(200)
            }
        };
        let receiver = match is_slow {
            true => Receiver::start_slow(answer),
            false => Receiver::start(answer),
        };
        Self::at(receiver.port)
    }

    fn at(port: u16) -> Self {
        Self(receiver::config(&format!("http://127.0.0.1:{port}/hook")))
    }

    fn port(&self) -> u16 {
        self.0.address.port
    }

    fn deadline(&self) -> Deadline {
        self.0.deadline.clone()
    }

    fn named(&self, host: &str, patience: Duration, life: Duration) -> impl outbox_transport::Transport {
        HttpConfig {
            connect_timeout: patience,
            timeout: patience,
            connection_life: life,
            ..receiver::config(&format!("http://{host}:{}/hook", self.port()))
        }
    }

    fn config(&self) -> impl outbox_transport::Transport {
        self.0.clone()
    }

    fn of_window(&self, window: usize) -> impl outbox_transport::Transport {
        HttpConfig {
            window,
            ..self.0.clone()
        }
    }

    fn confined(&self) -> impl outbox_transport::Transport {
        HttpConfig {
            allow: AllowList::default(),
            ..self.0.clone()
        }
    }

    fn of_limits(&self, timeout: Duration, min_send_rate: u32) -> impl outbox_transport::Transport {
        HttpConfig {
            timeout,
            min_send_rate,
            ..self.0.clone()
        }
    }
}
