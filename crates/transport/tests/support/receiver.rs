//! A hand-written HTTP receiver that can misbehave: it answers each request with the bytes that a test gives.
#![allow(dead_code, reason = "each test file uses a part")]

use super::{DEADLINE, SlowReader, publication};
use outbox_transport::{AllowList, HttpConfig, Publication};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A request as it arrived.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Counted over connections, from 0.
    pub connection: usize,
    /// Counted within its connection, from 0.
    pub index: usize,
    pub line: String,
    /// Header names as they were sent.
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(String::as_str).unwrap_or_default()
    }

    /// The message's id.
    pub fn id(&self) -> &str {
        self.header("webhook-id")
    }
}

/// What the receiver does with a request.
pub enum Reply {
    /// Sends these bytes, then waits for the next request.
    Bytes(Vec<u8>),
    /// Sends these bytes and closes the connection.
    Close(Vec<u8>),
}

/// An answer without a body.
pub fn status(code: u16) -> Reply {
    with(code, "", "")
}

/// An answer with a body. `headers` are lines, each with its line break.
pub fn with(code: u16, headers: &str, body: &str) -> Reply {
    let length = body.len();
    Reply::Bytes(format!("HTTP/1.1 {code} x\r\n{headers}content-length: {length}\r\n\r\n{body}").into_bytes())
}

pub struct Receiver {
    pub port: u16,
    seen: Arc<Mutex<Vec<Request>>>,
    connections: Arc<AtomicUsize>,
}

impl Receiver {
    pub fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::reading(Ok, answer)
    }

    /// A receiver that reads slowly.
    pub fn start_slow(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::reading(SlowReader::new, answer)
    }

    fn reading<R: Read + 'static>(
        reader: fn(TcpStream) -> io::Result<R>,
        answer: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::play(move |mut stream, connection, seen| {
            let mut reader = BufReader::new(reader(stream.try_clone()?)?);
            for index in 0.. {
                let mut request = read_request(&mut reader)?;
                (request.connection, request.index) = (connection, index);
                seen.lock().unwrap().push(request.clone());
                match answer(&request) {
                    Reply::Bytes(bytes) => stream.write_all(&bytes)?,
                    Reply::Close(bytes) => {
                        stream.write_all(&bytes)?;
                        return stream.shutdown(Shutdown::Both);
                    }
                }
            }
            Ok(())
        })
    }

    /// Runs a script other than HTTP on each connection.
    pub fn play(
        play: impl Fn(TcpStream, usize, &Mutex<Vec<Request>>) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let receiver = Self {
            port: listener.local_addr().unwrap().port(),
            seen: Arc::default(),
            connections: Arc::default(),
        };
        let (seen, connections, play) = (receiver.seen.clone(), receiver.connections.clone(), Arc::new(play));
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                stream.set_read_timeout(Some(DEADLINE)).unwrap();
                stream.set_write_timeout(Some(DEADLINE)).unwrap();
                stream.set_nodelay(true).unwrap();
                let connection = connections.fetch_add(1, Ordering::SeqCst);
                let (play, seen) = (play.clone(), seen.clone());
                std::thread::spawn(move || play(stream, connection, &seen));
            }
        });
        receiver
    }

    pub fn requests(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    /// The ids of the messages, in the order of their requests.
    pub fn ids(&self) -> Vec<String> {
        self.requests().iter().map(|request| request.id().to_owned()).collect()
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// A configuration with short pauses that allows loopback addresses.
    pub fn config(&self) -> HttpConfig {
        config(&format!("http://127.0.0.1:{}/hook?a=b", self.port))
    }
}

pub fn config(url: &str) -> HttpConfig {
    HttpConfig {
        allow: AllowList::parse("127.0.0.0/8").unwrap(),
        timeout: Duration::from_secs(20),
        connect_timeout: DEADLINE,
        backoff_min: Duration::from_millis(5),
        backoff_max: Duration::from_millis(40),
        ..HttpConfig::new(outbox_transport::parse_http_url(url).unwrap())
    }
}

pub fn read_request(reader: &mut impl BufRead) -> io::Result<Request> {
    let mut request = Request::default();
    if reader.read_line(&mut request.line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        let twice = request.headers.insert(name.to_owned(), value.trim().to_owned());
        assert_eq!(twice, None, "{name} came twice");
    }
    let length = request.header("content-length").parse().unwrap_or(0);
    request.body = vec![0; length];
    reader.read_exact(&mut request.body)?;
    Ok(request)
}

/// A message with a key.
pub fn of_key(handle: u64, key: &str) -> Publication {
    Publication {
        key: Some(key.into()),
        ..message(handle)
    }
}

/// A message without a key.
pub fn message(handle: u64) -> Publication {
    publication(handle, "", format!("body {handle}").into_bytes())
}
