//! How to connect to the broker, what to check before the first publish, and what lapin's errors mean.
//!
//! Runs on the publisher thread. Every wait has a timeout here: lapin has none, and its connect has hung in several
//! releases.

use super::config::AmqpConfig;
use super::guard::{self, FRAME_BYTES_MAX, GuardedStream, Kit, LastBytes, Socket, SocketHandle, ThreadMark};
use crate::addresses::share_of;
use crate::down::{DownReason, Fault, limit_of, lookup_fault};
use crate::tls::{self, CertificateRequested, Tls};
use lapin::options::{ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::types::{FieldTable, ShortString};
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo, SASLMechanism};
use lapin::{AsyncTcpStream, Channel, Connection, ConnectionProperties, ErrorKind, ExchangeKind};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsConnector;

/// lapin declares a peer dead after twice this time without data, and checks every half of it: at most 20 s.
const HEARTBEAT_S: u16 = 8;
/// One channel to publish on, one for checks, and spares: lapin frees the number of a closed channel late.
const CHANNELS_MAX: u16 = 8;
/// The time limit for closing a connection that was opened only as a probe.
const ASIDE_LIMIT: Duration = Duration::from_secs(1);
/// How long to wait for lapin to report the cause as well, after a channel or connection broke.
pub(crate) const CAUSE_LIMIT: Duration = Duration::from_millis(100);
const REPLY_SUCCESS: u16 = 200;
const HUNG_UP: &str = "the peer closed the connection";

/// A checked connection with a channel in confirm mode.
pub(crate) struct Link {
    pub(crate) connection: Connection,
    pub(crate) channel: Channel,
    pub(crate) frame_bytes_max: usize,
    pub(crate) last_bytes: LastBytes,
}

/// Connects and checks. `wire` is set as soon as there is a socket, so that the caller can cut it in any case: also if
/// this future is dropped before it ends.
pub(crate) async fn connect(config: &AmqpConfig, wire: &mut Option<SocketHandle>) -> Result<Link, Fault> {
    let tcp = dial(config).await?;
    let requested = CertificateRequested::default();
    let socket = match &config.tls {
        None => Socket::Plain(tcp),
        Some(tls) => secure(config, tls, &requested, tcp).await?,
    };
    let (new_wire, stream, mark) = SocketHandle::new(socket)
        .map_err(|e| Fault::of_call(DownReason::Unreachable, &e, "cannot share the socket"))?;
    let wire = wire.insert(new_wire);
    let mut set_up = pin!(set_up(config, &requested, stream, mark));
    tokio::select! {
        biased;
        link = &mut set_up => return link,
        () = wire.thread_ended() => {}
    }
    // lapin can lose its thread and leave its caller waiting: a peer that closes after connection.tune causes it. lapin
    // may also be about to report the cause.
    let unexplained = || {
        Err(blame_certificate(
            config,
            &requested,
            Fault::new(DownReason::Closed, HUNG_UP),
        ))
    };
    timeout(CAUSE_LIMIT, set_up).await.unwrap_or_else(|_| unexplained())
}

async fn set_up(
    config: &AmqpConfig,
    requested: &CertificateRequested,
    stream: GuardedStream,
    mark: ThreadMark,
) -> Result<Link, Fault> {
    let limit = config.connect_timeout;
    let last_bytes = stream.last_bytes();
    let connection = within(limit, "the AMQP handshake", handshake(config, stream, mark))
        .await
        .map_err(|fault| blame_certificate(config, requested, fault))?;
    within(limit, "the exchange check", check_exchange(config, &connection)).await?;
    let channel = confirming_channel(config, &connection).await?;
    let frame_bytes_max = connection.configuration().frame_max() as usize;
    Ok(Link {
        connection,
        channel,
        frame_bytes_max,
        last_bytes,
    })
}

async fn confirming_channel(config: &AmqpConfig, connection: &Connection) -> Result<Channel, Fault> {
    let limit = config.connect_timeout;
    let channel = within(limit, "channel.open", connection.create_channel()).await?;
    let confirm = channel.confirm_select(ConfirmSelectOptions::default());
    within(limit, "confirm.select", confirm).await?;
    Ok(channel)
}

/// Replaces the channel that messages are published on. The old channel is closed first: the broker then drops what it
/// still held back (for a quorum queue whose leader is away), and does not publish it later.
pub(crate) async fn renew_channel(config: &AmqpConfig, link: &mut Link) -> Result<(), Fault> {
    let close = link.channel.close(REPLY_SUCCESS, "OK".into());
    within(config.connect_timeout, "channel.close", close).await?;
    link.channel = confirming_channel(config, &link.connection).await?;
    Ok(())
}

/// Whether the broker answers on another connection, which is opened for this and closed again. Tries the other
/// endpoints first: the silent one may have lost its network.
pub(crate) async fn answers_elsewhere(config: &AmqpConfig) -> bool {
    let mut config = config.clone();
    for _ in 0..config.endpoints.len() {
        config.endpoints.rotate_left(1);
        if answers(&config).await {
            return true;
        }
    }
    false
}

async fn answers(config: &AmqpConfig) -> bool {
    let mut wire = None;
    let answered = match connect(config, &mut wire).await {
        Ok(link) => {
            close(&link.connection, wire.as_mut(), ASIDE_LIMIT).await;
            true
        }
        Err(_) => false,
    };
    if let Some(wire) = wire {
        wire.cut(ASIDE_LIMIT).await;
    }
    answered
}

/// Closes the connection as the protocol demands, within `limit`. lapin never resolves a close if its I/O thread ends
/// first. The caller cuts the wire afterwards in any case.
pub(crate) async fn close(connection: &Connection, wire: Option<&mut SocketHandle>, limit: Duration) {
    tokio::select! {
        _ = connection.close(REPLY_SUCCESS, "OK".into()) => {}
        () = guard::thread_ended(wire) => {}
        () = tokio::time::sleep(limit) => {}
    }
}

async fn dial(config: &AmqpConfig) -> Result<TcpStream, Fault> {
    let endpoint = config.endpoint();
    let until = Instant::now() + config.connect_timeout;
    // A thread of tokio's pool resolves the name; it inherits the blocked signals of this thread.
    let found = timeout_at(until, lookup_host((endpoint.host.as_str(), endpoint.port))).await;
    let addresses: Vec<SocketAddr> = match found {
        Ok(found) => found.map_err(|error| lookup_fault(&error))?.collect(),
        Err(_) => return Err(Fault::new(DownReason::Unreachable, "resolving the host takes too long")),
    };
    let addresses = config.allow.permitted(&endpoint.host, addresses)?;
    dial_one_of(&addresses, until).await
}

/// Connects to the first address that answers. Err names the last one.
async fn dial_one_of(addresses: &[SocketAddr], until: Instant) -> Result<TcpStream, Fault> {
    let mut why = Fault::new(DownReason::Unreachable, "the host has no address");
    for (index, address) in addresses.iter().enumerate() {
        let limit = share_of(until.saturating_duration_since(Instant::now()), addresses.len() - index);
        match timeout(limit, TcpStream::connect(address)).await {
            // A publish is one write. Nagle's algorithm would delay the next small one until the broker's TCP ack.
            Ok(Ok(stream)) => match stream.set_nodelay(true) {
                Ok(()) => return Ok(stream),
                Err(error) => why = Fault::of_connect(DownReason::Unreachable, &error, *address),
            },
            Ok(Err(error)) => why = Fault::of_connect(DownReason::Unreachable, &error, *address),
            Err(_) => {
                let text = format!("{address}: no answer to the TCP connect within {limit:.1?}");
                why = Fault::new(DownReason::Unreachable, text);
            }
        }
    }
    Err(why)
}

/// The TLS handshake. Dropping this future closes the socket; no thread of lapin exists yet.
async fn secure(
    config: &AmqpConfig,
    tls: &Tls,
    requested: &CertificateRequested,
    tcp: TcpStream,
) -> Result<Socket, Fault> {
    let failed = |text: String| Fault::new(DownReason::TlsFailed, text);
    let client_config = tls.client_config().map_err(|e| failed(e.to_string()))?;
    let name = tls
        .server_name(&config.endpoint().host)
        .map_err(|e| failed(e.to_string()))?;
    let handshake = TlsConnector::from(requested.record_in(&client_config)).connect(name, tcp);
    match timeout(config.connect_timeout, handshake).await {
        Ok(Ok(stream)) => Ok(Socket::Tls(Box::new(stream))),
        Ok(Err(error)) => {
            let by_peer = |text| blame_certificate(config, requested, failed(text));
            Err(match tls::error_in(&error) {
                Some(alert @ rustls::Error::AlertReceived(_)) => by_peer(tls::explain(alert)),
                Some(ours) => failed(tls::explain(ours)),
                None => by_peer(format!("{HUNG_UP} during the TLS handshake: {error}")),
            })
        }
        Err(_) => Err(Fault::new(
            DownReason::Timeout,
            format!(
                "no answer to the TLS handshake within {:?}; does the peer speak TLS?",
                config.connect_timeout
            ),
        )),
    }
}

/// When the peer closed the connection without an error, its request for a client certificate is the best explanation.
fn blame_certificate(config: &AmqpConfig, requested: &CertificateRequested, fault: Fault) -> Fault {
    let with_certificate = config.tls.as_ref().is_some_and(|tls| tls.client.is_some());
    match fault.reason {
        DownReason::Closed | DownReason::TlsFailed if requested.is_set() && !with_certificate => Fault::new(
            DownReason::TlsFailed,
            format!(
                "the peer asked for a client certificate and none is set ({})",
                fault.detail
            ),
        ),
        // The peer may have had another reason to close.
        DownReason::Closed if requested.is_set() => Fault::new(
            DownReason::Closed,
            format!("{}, perhaps because of our client certificate", fault.detail),
        ),
        _ => fault,
    }
}

async fn handshake(config: &AmqpConfig, stream: GuardedStream, mark: ThreadMark) -> lapin::Result<Connection> {
    // lapin calls this once, because its own retries are off. It keeps the closure, and `mark` in it, while its thread
    // runs.
    let stream = Mutex::new(Some(stream));
    let connect = async move |_: AMQPUri, _: async_rs::Runtime<Kit>| {
        let _mark = &mark;
        let taken = stream.lock().ok().and_then(|mut slot| slot.take());
        taken
            .map(AsyncTcpStream::Plain)
            .ok_or_else(|| lapin::Error::from(io::Error::from(io::ErrorKind::NotConnected)))
    };
    Connection::connector(uri(config), Kit::runtime(), connect, properties(config)).await
}

/// Built from parts, never from text: no text that contains the password exists.
fn uri(config: &AmqpConfig) -> AMQPUri {
    AMQPUri {
        scheme: AMQPScheme::AMQP,
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo {
                username: config.user.clone(),
                password: config.password.reveal().to_owned(),
            },
            host: config.endpoint().host.clone(),
            port: config.endpoint().port,
        },
        vhost: config.vhost.clone(),
        query: AMQPQueryString {
            // Never leave this unset: to "no limit" from the broker (0) lapin then answers u32::MAX. It allocates 32
            // times that, 137 GB, which aborts the process.
            frame_max: Some(FRAME_BYTES_MAX),
            channel_max: Some(CHANNELS_MAX),
            heartbeat: Some(HEARTBEAT_S),
            auth_mechanism: config.external.then_some(SASLMechanism::External),
            ..AMQPQueryString::default()
        },
    }
}

fn properties(config: &AmqpConfig) -> ConnectionProperties {
    ConnectionProperties::default()
        .with_connection_name(config.connection_name.as_str().into())
        // lapin overwrites the product unless product and version are both set.
        .with_client_property("product".into(), "outbox".into())
        .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into())
        // This thread reconnects itself: a retry inside lapin would sleep on lapin's thread and be invisible here.
        .configure_backoff(|backoff| backoff.with_max_times(0))
}

/// Checks the exchange on a separate channel, which an error closes. A publish to a missing exchange would close the
/// publishing channel and fail every outstanding confirm, though many of those messages arrived.
async fn check_exchange(config: &AmqpConfig, connection: &Connection) -> lapin::Result<()> {
    if config.exchange.is_empty() {
        return Ok(());
    }
    // Predefined exchanges can be checked but not declared.
    let name = config
        .exchange_type
        .name()
        .filter(|_| !config.exchange.starts_with("amq."));
    let kind = name.map(|name| ExchangeKind::Custom(name.to_owned())); // sent as it is, also a predefined one
    let options = ExchangeDeclareOptions {
        passive: kind.is_none(),
        durable: true,
        ..Default::default()
    };
    let name = ShortString::from(config.exchange.as_str()); // at most 255 bytes: AmqpConfig::validate
    let channel = connection.create_channel().await?;
    channel
        .exchange_declare(name, kind.unwrap_or_default(), options, FieldTable::default())
        .await?;
    channel.close(REPLY_SUCCESS, "OK".into()).await
}

async fn within<T>(limit: Duration, step: &str, work: impl Future<Output = lapin::Result<T>>) -> Result<T, Fault> {
    match timeout(limit, work).await {
        Ok(done) => done.map_err(|e| fault(&e)),
        Err(_) => Err(Fault::new(
            DownReason::Timeout,
            format!("no answer to {step} within {limit:?}"),
        )),
    }
}

/// Translates an error of lapin for readers of the health view.
pub(crate) fn fault(error: &lapin::Error) -> Fault {
    let (reason, detail) = match error.kind() {
        ErrorKind::ProtocolError(e) => (protocol_reason(e), e.get_message().to_string()),
        ErrorKind::MissingHeartbeatError => (DownReason::Timeout, "the broker sends no heartbeats".to_owned()),
        ErrorKind::IOError(e) => io_fault(e),
        ErrorKind::ParsingError(_) | ErrorKind::InvalidProtocolVersion(_) | ErrorKind::AuthProviderError(_) => {
            (DownReason::Protocol, error.to_string())
        }
        _ => (DownReason::Closed, error.to_string()),
    };
    Fault { reason, detail }
}

fn io_fault(error: &io::Error) -> (DownReason, String) {
    match (tls::error_in(error), error.kind()) {
        (Some(error), _) => (DownReason::TlsFailed, tls::explain(error)),
        // lapin could not start its thread.
        (None, _) if let Some(limit) = limit_of(error) => (DownReason::ProcessLimit, format!("{limit}: {error}")),
        // An error of `guard`. Every other I/O error is a connection that ended.
        (None, io::ErrorKind::InvalidData) => (DownReason::Protocol, error.to_string()),
        // For a peer that closed without a close_notify, rustls has a long text with a link.
        (None, io::ErrorKind::UnexpectedEof) => (DownReason::Closed, HUNG_UP.to_owned()),
        (None, _) => (DownReason::Closed, error.to_string()),
    }
}

fn protocol_reason(error: &AMQPError) -> DownReason {
    let says = |words: &str| error.get_message().as_str().contains(words);
    match error.kind() {
        // RabbitMQ answers 403 to a wrong password, and to what a user may not do.
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) if says("Login was refused") => DownReason::AuthRefused,
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => DownReason::PermissionDenied,
        AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => DownReason::ExchangeMissing,
        // For a publish 406 can also mean "too large"; `session` reads the text.
        AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED) => DownReason::ExchangeMismatch,
        // 530: RabbitMQ reports this for a vhost that does not exist or that the user may not access, and for limits.
        AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) if says("connection limit") => DownReason::ConnectionLimit,
        AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => DownReason::VhostRefused,
        AMQPErrorKind::Hard(AMQPHardError::CONNECTIONFORCED) => DownReason::Closed,
        AMQPErrorKind::Hard(AMQPHardError::INVALIDPATH) => DownReason::VhostRefused,
        _ => DownReason::Protocol,
    }
}

/// How much an error reveals about the cause; higher is better. lapin reports several errors for one broken connection.
pub(crate) fn specificity(error: &lapin::Error) -> u8 {
    match error.kind() {
        ErrorKind::ProtocolError(_) => 3,
        ErrorKind::MissingHeartbeatError | ErrorKind::ParsingError(_) => 2,
        ErrorKind::IOError(_) => 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};
    use std::net::TcpListener;

    #[test]
    fn the_reason_of_a_refusal_follows_from_its_words() {
        let soft = |words: &str| AMQPError::new(AMQPSoftError::ACCESSREFUSED.into(), words.into());
        let hard = |words: &str| AMQPError::new(AMQPHardError::NOTALLOWED.into(), words.into());
        for (error, reason) in [
            (
                soft("ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN."),
                DownReason::AuthRefused,
            ),
            (
                soft("ACCESS_REFUSED - write access to exchange 'x' in vhost '/' refused for user 'u'"),
                DownReason::PermissionDenied,
            ),
            (
                soft("ACCESS_REFUSED - cannot publish to internal exchange 'x' in vhost '/'"),
                DownReason::PermissionDenied,
            ),
            (hard("NOT_ALLOWED - vhost / not found"), DownReason::VhostRefused),
            (
                hard("NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (1) is reached"),
                DownReason::ConnectionLimit,
            ),
            (
                hard("NOT_ALLOWED - connection refused for user 'u': user connection limit (1) is reached"),
                DownReason::ConnectionLimit,
            ),
        ] {
            assert_eq!(protocol_reason(&error), reason, "{error:?}");
        }
    }

    /// An address that answers no connect: its queue of connections is full.
    fn silent() -> (SocketAddr, Vec<Socket>) {
        let any: SocketAddr = ([127, 0, 0, 1], 0).into();
        let new = || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let listener = new();
        listener.bind(&any.into()).unwrap();
        listener.listen(0).unwrap();
        let address = listener.local_addr().unwrap().as_socket().unwrap();
        let mut sockets = vec![listener];
        for _ in 0..4 {
            let client = new();
            client.set_nonblocking(true).unwrap();
            let _ = client.connect(&address.into());
            sockets.push(client);
        }
        (address, sockets)
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next_one() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let ((silent, _sockets), listener) = (silent(), TcpListener::bind("127.0.0.1:0").unwrap());
        let good = listener.local_addr().unwrap();
        let dial = |addresses: &[SocketAddr], ms| {
            runtime.block_on(dial_one_of(addresses, Instant::now() + Duration::from_millis(ms)))
        };
        let connected = dial(&[silent, good], 4_000).unwrap();
        assert_eq!(connected.peer_addr().unwrap(), good);
        let why = dial(&[silent], 100).unwrap_err().detail;
        assert!(why.starts_with(&format!("{silent}: no answer")), "{why}");
        drop(listener);
        let why = dial(&[good], 20_000).unwrap_err().detail;
        assert!(why.starts_with(&format!("{good}: Connection refused")), "{why}");
    }
}
