//! A simulated broker that follows the script of a test, over a plain or a TLS socket.

use super::{DEADLINE, Desk, publication, threads, threads_named};
use outbox_transport::{AmqpConfig, DownReason, Outcome};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub const CONNECTION: u16 = 10;
pub const CHANNEL: u16 = 20;
pub const EXCHANGE: u16 = 40;
pub const BASIC: u16 = 60;
pub const CONFIRM: u16 = 85;
const PUBLISH: [u8; 4] = [0, BASIC as u8, 0, 40];

/// Short, for peers whose silence must be found soon. The publisher uses the lower of both sides' values.
pub const HEARTBEAT_S: u16 = 1;

/// Serialises tests that count the threads of the process.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// For peers that answer: no step of connecting takes this long, even on a busy machine.
pub fn config(port: u16) -> AmqpConfig {
    AmqpConfig {
        connect_timeout: DEADLINE,
        ..super::config(port)
    }
}

/// For peers that fall silent: finds that soon. A step that a busy machine delays counts as silence, too.
pub fn hasty(config: AmqpConfig) -> AmqpConfig {
    AmqpConfig {
        connect_timeout: Duration::from_millis(300),
        ..config
    }
}

/// Runs the script on every connection, one after the other, until the test ends.
pub fn broker(play: impl Fn(&mut Peer) -> std::io::Result<()> + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::Builder::new()
        .name("fake-broker".into())
        .spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                stream.set_read_timeout(Some(DEADLINE)).unwrap();
                let _ = play(&mut Peer::new(stream.try_clone().unwrap(), Box::new(stream)));
            }
        })
        .unwrap();
    port
}

/// Runs the script on every connection, on all at a time, until the test ends.
pub fn broker_of_many(play: impl Fn(&mut Peer) -> std::io::Result<()> + Send + Sync + 'static) -> u16 {
    let play = Arc::new(play);
    broker(move |peer| {
        let mut peer = Peer::new(peer.tcp.try_clone()?, Box::new(peer.tcp.try_clone()?));
        let play = Arc::clone(&play);
        std::thread::spawn(move || play(&mut peer));
        Ok(())
    })
}

pub struct Peer {
    /// The TCP socket of `stream`, which may be TLS over it.
    pub tcp: TcpStream,
    pub stream: Box<dyn ReadWrite>,
    pub publish_channel: u16,
    pub next_tag: u64,
    /// The heartbeat that the peer proposes. It sends none itself, so after twice this time it counts as dead.
    pub heartbeat_s: u16,
}

/// A message that the publisher sent.
pub struct Got {
    pub tag: u64,
    pub exchange: String,
    pub routing_key: String,
    /// The payload of the content header, to be sent back in a return.
    pub header: Vec<u8>,
    pub body: Vec<u8>,
}

pub fn short(text: &str) -> Vec<u8> {
    [&[text.len() as u8][..], text.as_bytes()].concat()
}

pub fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

pub trait ReadWrite: Read + Write + Send {}

impl<T: Read + Write + Send> ReadWrite for T {}

impl Peer {
    pub fn new(tcp: TcpStream, stream: Box<dyn ReadWrite>) -> Self {
        Self {
            tcp,
            stream,
            publish_channel: 0,
            next_tag: 1,
            heartbeat_s: 60,
        }
    }

    pub fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) -> std::io::Result<()> {
        let head = [
            &[kind][..],
            &channel.to_be_bytes(),
            &(payload.len() as u32).to_be_bytes(),
        ]
        .concat();
        self.stream.write_all(&[&head, payload, &[0xce]].concat())
    }

    pub fn method(&mut self, channel: u16, class: u16, method: u16, arguments: &[u8]) -> std::io::Result<()> {
        self.frame(
            1,
            channel,
            &[&class.to_be_bytes()[..], &method.to_be_bytes(), arguments].concat(),
        )
    }

    /// Returns type, channel and payload of the next frame; heartbeats are skipped.
    pub fn read(&mut self) -> std::io::Result<(u8, u16, Vec<u8>)> {
        loop {
            let mut head = [0; 7];
            self.stream.read_exact(&mut head)?;
            let mut payload = vec![0; u32::from_be_bytes(head[3..].try_into().unwrap()) as usize + 1];
            self.stream.read_exact(&mut payload)?;
            payload.pop();
            if head[0] != 8 {
                return Ok((head[0], u16::from_be_bytes([head[1], head[2]]), payload));
            }
        }
    }

    pub fn header(&mut self) -> std::io::Result<()> {
        self.stream.read_exact(&mut [0; 8])
    }

    pub fn start(&mut self, properties: &[u8]) -> std::io::Result<()> {
        let arguments = [
            &[0, 9][..],
            &long(properties),
            &long(b"PLAIN AMQPLAIN"),
            &long(b"en_US"),
        ]
        .concat();
        self.method(0, CONNECTION, 10, &arguments)
    }

    pub fn tune(&mut self, frame_max: u32, heartbeat: u16) -> std::io::Result<()> {
        let arguments = [
            &2047u16.to_be_bytes()[..],
            &frame_max.to_be_bytes(),
            &heartbeat.to_be_bytes(),
        ]
        .concat();
        self.method(0, CONNECTION, 30, &arguments)
    }

    /// Answers one request. Returns the channel if the request turned on confirms, which is the last step of
    /// connecting.
    pub fn answer_one(&mut self, frame_max: u32) -> std::io::Result<Option<u16>> {
        let (_, channel, payload) = self.read()?;
        self.answer(channel, &payload, frame_max)
    }

    fn answer(&mut self, channel: u16, payload: &[u8], frame_max: u32) -> std::io::Result<Option<u16>> {
        let class = u16::from_be_bytes([payload[0], payload[1]]);
        let method = u16::from_be_bytes([payload[2], payload[3]]);
        match (class, method) {
            (CONNECTION, 11) => self.tune(frame_max, self.heartbeat_s)?,
            (CONNECTION, 40) => self.method(0, CONNECTION, 41, &short(""))?,
            (CONNECTION, 50) => self.method(0, CONNECTION, 51, &[])?,
            (CHANNEL, 10) => self.method(channel, CHANNEL, 11, &long(b""))?,
            (CHANNEL, 40) => self.method(channel, CHANNEL, 41, &[])?,
            (EXCHANGE, 10) => self.method(channel, EXCHANGE, 11, &[])?,
            (CONFIRM, 10) => {
                self.method(channel, CONFIRM, 11, &[])?;
                return Ok(Some(channel));
            }
            _ => {}
        }
        Ok(None)
    }

    /// Answers every step up to confirm mode correctly.
    pub fn connect(&mut self) -> std::io::Result<()> {
        self.connect_with(131_072)
    }

    pub fn connect_with(&mut self, frame_max: u32) -> std::io::Result<()> {
        self.header()?;
        self.start(&[])?;
        loop {
            if let Some(channel) = self.answer_one(frame_max)? {
                self.publish_channel = channel;
                return Ok(());
            }
        }
    }

    pub fn next_message(&mut self) -> std::io::Result<Got> {
        let (_, channel, publish) = self.read()?;
        if publish[..4] != PUBLISH {
            // A connection.close, most likely.
            self.method(channel, CONNECTION, 51, &[])?;
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        }
        self.rest_of_message(&publish)
    }

    /// Waits for a message and answers other requests meanwhile. `record` gets their channel and class. Once a channel
    /// turns on confirms, messages are expected on it.
    pub fn next_message_answering(&mut self, mut record: impl FnMut(u16, u16)) -> std::io::Result<Got> {
        loop {
            let (_, channel, payload) = self.read()?;
            if payload[..4] == PUBLISH {
                return self.rest_of_message(&payload);
            }
            record(channel, u16::from_be_bytes([payload[0], payload[1]]));
            if let Some(channel) = self.answer(channel, &payload, 131_072)?
                && channel != self.publish_channel
            {
                (self.publish_channel, self.next_tag) = (channel, 1);
            }
        }
    }

    fn rest_of_message(&mut self, publish: &[u8]) -> std::io::Result<Got> {
        let text = |at: usize| {
            let end = at + 1 + publish[at] as usize;
            (String::from_utf8(publish[at + 1..end].to_vec()).unwrap(), end)
        };
        let (exchange, at) = text(6);
        let (routing_key, _) = text(at);
        let (_, _, header) = self.read()?;
        let size = u64::from_be_bytes(header[4..12].try_into().unwrap()) as usize;
        let mut body = Vec::new();
        while body.len() < size {
            body.extend(self.read()?.2);
        }
        self.next_tag += 1;
        Ok(Got {
            tag: self.next_tag - 1,
            exchange,
            routing_key,
            header,
            body,
        })
    }

    pub fn ack(&mut self, tag: u64, multiple: bool) -> std::io::Result<()> {
        self.method(
            self.publish_channel,
            BASIC,
            80,
            &[&tag.to_be_bytes()[..], &[multiple as u8]].concat(),
        )
    }

    pub fn nack(&mut self, tag: u64) -> std::io::Result<()> {
        self.method(
            self.publish_channel,
            BASIC,
            120,
            &[&tag.to_be_bytes()[..], &[0]].concat(),
        )
    }

    pub fn give_back(&mut self, got: &Got) -> std::io::Result<()> {
        let names = [short("NO_ROUTE"), short(&got.exchange), short(&got.routing_key)].concat();
        let channel = self.publish_channel;
        self.method(channel, BASIC, 50, &[&312u16.to_be_bytes()[..], &names].concat())?;
        self.frame(2, channel, &got.header)?;
        if got.body.is_empty() {
            Ok(())
        } else {
            self.frame(3, channel, &got.body)
        }
    }

    /// Asserts that nothing has come before the answer to a request that the peer sends now: to go on, which changes
    /// nothing.
    pub fn assert_next_is_fence(&mut self) -> std::io::Result<()> {
        self.method(self.publish_channel, CHANNEL, 20, &[1])?;
        let (_, _, payload) = self.read()?;
        assert_eq!(payload[..4], [0, CHANNEL as u8, 0, 21], "not the answer");
        Ok(())
    }

    pub fn close_channel(&mut self, code: u16, text: &str) -> std::io::Result<()> {
        let arguments = [&code.to_be_bytes()[..], &short(text), &[0; 4]].concat();
        self.method(self.publish_channel, CHANNEL, 40, &arguments)
    }

    /// Reads until the publisher closes the connection.
    pub fn until_closed(&mut self) -> std::io::Result<()> {
        while self.stream.read(&mut [0; 4096])? > 0 {}
        Ok(())
    }
}

pub fn messages(handles: std::ops::Range<u64>) -> Vec<outbox_transport::Publication> {
    handles
        .map(|h| publication(h, "k", format!("body {h}").into_bytes()))
        .collect()
}

/// Waits until a message that a peer does not confirm has timed out. Its time begins now.
pub fn until_one_times_out(confirm_timeout: Duration) {
    let port = broker(|peer| {
        peer.connect()?;
        peer.until_closed()
    });
    let mut desk = Desk::start(AmqpConfig {
        confirm_timeout,
        ..config(port)
    });
    desk.until_connected();
    desk.publish(messages(0..1));
    desk.until_answered(1);
    assert!(
        matches!(&desk.outcomes[&0], Outcome::Unanswered { .. }),
        "{:?}",
        desk.outcomes
    );
    desk.stop();
}

pub fn until_no_lapin_thread_is_left() {
    let deadline = Instant::now() + DEADLINE;
    while threads_named("lapin-io-loop") > 0 {
        assert!(Instant::now() < deadline, "{:?}", threads());
        std::thread::yield_now();
    }
}

/// Starts a publisher, waits for the first `Down`, and stops it. No thread may be left then.
pub fn down_reason(config: AmqpConfig) -> (DownReason, String) {
    let mut desk = Desk::start(config);
    let down = desk.until_down();
    desk.publish(messages(0..3));
    desk.until_answered(3);
    assert!(
        desk.outcomes
            .values()
            .all(|o| matches!(o, Outcome::Lost { .. } | Outcome::Unanswered { .. })),
        "{:?}",
        desk.outcomes
    );
    desk.stop();
    until_no_lapin_thread_is_left();
    down
}

/// Answers this number of steps of connecting correctly, then no more. Six lead to `Connected`.
pub fn play_honestly(peer: &mut Peer, steps: usize) -> std::io::Result<()> {
    if steps > 0 {
        peer.header()?;
        peer.start(&[])?;
    }
    for _ in 1..steps {
        peer.answer_one(131_072)?;
    }
    Ok(())
}

/// A table with nested arrays.
pub fn nested_table(levels: usize) -> Vec<u8> {
    // Built from the outside in: the quadratic copying of 800,000 levels would take minutes.
    let mut table = short("x");
    for level in (0..levels).rev() {
        table.push(b'A');
        table.extend((level as u32 * 5 + 1).to_be_bytes());
    }
    table.push(b'V');
    table
}
