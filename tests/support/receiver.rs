//! An HTTP server on loopback, plain or over TLS, for tests of HTTP destinations. It answers each request as the test
//! decides, or not at all. It shares no code with the client under test.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use crate::certificate::{Authority, Certificate};
use crate::consumer::label;
use crate::wait::{LONG, patient};

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Request {
    pub at: Instant,
    /// The request target, as in `POST /hook HTTP/1.1`.
    pub path: String,
    /// Header names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: Vec<u8>,
}

impl Request {
    /// The value of a header, or an empty text.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("the body is not JSON: {error}"))
    }

    /// The label in the payload of the event.
    pub fn label(&self) -> String {
        label(&self.json())
    }
}

/// How the receiver answers a request.
pub enum Reply {
    Answer {
        status: u16,
        /// Lines, each with its line break.
        headers: String,
        body: String,
    },
    /// Ends the connection without an answer.
    Close,
    /// Sends nothing until the peer gives up.
    Hang,
}

impl Reply {
    pub fn status(status: u16) -> Self {
        Self::Answer {
            status,
            headers: String::new(),
            body: String::new(),
        }
    }
}

/// A receiver of HTTP requests. Dropping it ends its listener; connections end with their peers.
pub struct Receiver {
    port: u16,
    tls: bool,
    seen: Arc<Mutex<Vec<Request>>>,
    ended: Arc<AtomicBool>,
}

impl Receiver {
    pub fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        Self::listen(None, answer)
    }

    /// Starts a receiver with TLS and this certificate. With `clients`, it requires a client certificate of that
    /// authority.
    pub fn start_tls(
        certificate: &Certificate,
        clients: Option<&Authority>,
        answer: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::listen(Some(Arc::new(server_config(certificate, clients))), answer)
    }

    fn listen(tls: Option<Arc<ServerConfig>>, answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let receiver = Self {
            port: listener.local_addr().expect("an address").port(),
            tls: tls.is_some(),
            seen: Arc::default(),
            ended: Arc::default(),
        };
        let (seen, ended, answer) = (receiver.seen.clone(), receiver.ended.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if ended.load(Ordering::Acquire) {
                    return;
                }
                let (seen, answer, tls) = (seen.clone(), answer.clone(), tls.clone());
                // The result is dropped: the peer decides how a connection ends.
                std::thread::spawn(move || {
                    stream.set_read_timeout(Some(patient(LONG)))?;
                    stream.set_nodelay(true)?;
                    match tls {
                        None => serve(stream, &seen, &*answer),
                        Some(config) => {
                            let session = ServerConnection::new(config).map_err(io::Error::other)?;
                            serve(StreamOwned::new(session, stream), &seen, &*answer)
                        }
                    }
                });
            }
        });
        receiver
    }

    pub fn url(&self, path: &str) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}{path}", self.port)
    }

    /// All requests so far, with any answer.
    pub fn requests(&self) -> Vec<Request> {
        self.seen.lock().expect("no panic").clone()
    }

    /// All requests since the last call, which are then forgotten.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.seen.lock().expect("no panic"))
    }

    /// The labels of all requests, in order of arrival.
    pub fn labels(&self) -> Vec<String> {
        self.requests().iter().map(Request::label).collect()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let _ = TcpStream::connect(("127.0.0.1", self.port)); // wakes the listener
    }
}

fn serve(stream: impl Read + Write, seen: &Mutex<Vec<Request>>, answer: &impl Fn(&Request) -> Reply) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let request = read_request(&mut stream)?;
        seen.lock().expect("no panic").push(request.clone());
        match answer(&request) {
            Reply::Answer { status, headers, body } => {
                let length = body.len();
                let kind = if body.is_empty() {
                    ""
                } else {
                    "content-type: text/plain\r\n"
                };
                let text = format!("HTTP/1.1 {status} x\r\n{headers}{kind}content-length: {length}\r\n\r\n{body}");
                stream.get_mut().write_all(text.as_bytes())?;
                stream.get_mut().flush()?;
            }
            Reply::Close => return Ok(()),
            Reply::Hang => return io::copy(&mut stream, &mut io::sink()).map(drop),
        }
    }
}

fn read_request(stream: &mut impl BufRead) -> io::Result<Request> {
    let mut line = String::new();
    if stream.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line)?;
        let Some((name, value)) = line.split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|text| text.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body)?;
    Ok(Request {
        at: Instant::now(),
        path,
        headers,
        body,
    })
}

fn server_config(certificate: &Certificate, clients: Option<&Authority>) -> ServerConfig {
    let chain = vec![CertificateDer::from_pem_slice(certificate.cert_pem.as_bytes()).expect("a certificate")];
    let key = PrivateKeyDer::from_pem_slice(certificate.key_pem.as_bytes()).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .expect("TLS 1.2 and 1.3");
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(clients) => {
            let mut roots = RootCertStore::empty();
            let root = CertificateDer::from_pem_slice(clients.cert_pem.as_bytes()).expect("a certificate");
            roots.add(root).expect("an authority");
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().expect("a verifier"))
        }
    };
    builder.with_single_cert(chain, key).expect("a certificate and its key")
}
