//! A listener of the toy that treats messages as a rule demands.

use crate::exercise::{Act, Exercised, Peer};
use crate::support::{DEADLINE, NEVER, SlowReader, accepting};
use outbox_transport::{AllowList, Deadline, Endpoint, MIN_SEND_RATE, Terms, ToyConfig};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

pub struct Toy(Terms);

fn listen(mut stream: TcpStream, peer: &Arc<Peer>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let input: Box<dyn Read> = match peer.is_slow {
        true => Box::new(SlowReader::new(stream.try_clone()?)?),
        false => Box::new(stream.try_clone()?),
    };
    let mut input = BufReader::new(input);
    loop {
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let [number, bytes] = match words[..] {
            ["?"] => {
                stream.write_all(b"!\n")?;
                continue;
            }
            [number, bytes] | [number, _, bytes] => [number.to_owned(), bytes.to_owned()],
            _ => panic!("{line:?}"),
        };
        let mut body = vec![0; bytes.parse().expect("a number")];
        input.read_exact(&mut body)?;
        let act = peer.takes(&body);
        match act {
            Act::Confirm => stream.write_all(format!("ok {number}\n").as_bytes())?,
            Act::Refuse => stream.write_all(format!("no {number} it is refused\n").as_bytes())?,
            Act::Garble => stream.write_all(&[0xff, b'\n'])?,
            Act::HangUp => return stream.shutdown(Shutdown::Both),
            Act::Hold | Act::Block => {
                let is_blocked = matches!(act, Act::Block);
                if is_blocked {
                    stream.write_all(b"stop it takes nothing\n")?;
                }
                let (mut later, peer) = (stream.try_clone()?, Arc::clone(peer));
                std::thread::spawn(move || {
                    peer.until_released();
                    let go = if is_blocked { "go\n" } else { "" };
                    later.write_all(format!("{go}ok {number}\n").as_bytes())
                });
            }
        }
    }
}

impl Toy {
    fn with(&self, change: impl FnOnce(&mut Terms)) -> ToyConfig {
        let mut terms = self.0.clone();
        change(&mut terms);
        ToyConfig(terms)
    }
}

impl Exercised for Toy {
    fn start(peer: &Arc<Peer>) -> Self {
        let peer = Arc::clone(peer);
        Self::at(accepting(move |stream| {
            let peer = Arc::clone(&peer);
            std::thread::spawn(move || listen(stream, &peer));
        }))
    }

    fn at(port: u16) -> Self {
        let host = "127.0.0.1".to_owned();
        Self(Terms {
            endpoints: vec![Endpoint { host, port }],
            allow: AllowList::any(),
            connect_timeout: DEADLINE,
            connection_life: NEVER,
            answer_timeout: Duration::from_secs(30),
            min_send_rate: MIN_SEND_RATE,
            patience: DEADLINE,
            window: 1_000,
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(40),
            deadline: Deadline::default(),
        })
    }

    fn port(&self) -> u16 {
        self.0.endpoints[0].port
    }

    fn deadline(&self) -> Deadline {
        self.0.deadline.clone()
    }

    fn named(&self, host: &str, patience: Duration, life: Duration) -> impl outbox_transport::Transport {
        self.with(|terms| {
            terms.endpoints[0].host = host.to_owned();
            terms.connect_timeout = patience;
            terms.connection_life = life;
        })
    }

    fn config(&self) -> impl outbox_transport::Transport {
        self.with(|_| {})
    }

    fn of_window(&self, window: usize) -> impl outbox_transport::Transport {
        self.with(|terms| terms.window = window)
    }

    fn of_limits(&self, timeout: Duration, min_send_rate: u32) -> impl outbox_transport::Transport {
        self.with(|terms| (terms.answer_timeout, terms.min_send_rate) = (timeout, min_send_rate))
    }

    fn confined(&self) -> impl outbox_transport::Transport {
        self.with(|terms| terms.allow = AllowList::default())
    }
}
