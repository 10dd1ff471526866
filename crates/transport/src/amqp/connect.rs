//! How to connect to the broker, what to check before the first publish, and what lapin's errors mean.
//!
//! Runs on the publisher thread. Every wait has a timeout here: lapin has none, and its connect has hung in several
//! releases.

use super::config::AmqpConfig;
use super::findings::{EXCHANGE_MISMATCH, EXCHANGE_MISSING, EXCHANGE_TYPE_UNKNOWN, VHOST_REFUSED};
use super::guard::{FRAME_BYTES_MAX, GuardedStream, Kit, LastBytes, SentBytes, Socket, SocketHandle, ThreadMark};
use crate::connected::{CAUSE_LIMIT, Connector, Limit, Wire, dial};
use crate::down::{DownReason, Fault, limit_of};
use crate::tls::{self, CertificateRequested, Tls};
use crate::url::Endpoint;
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
use tokio::net::TcpStream;
use tokio::time::{timeout, timeout_at};
use tokio_rustls::TlsConnector;

/// lapin declares a peer dead after twice this time without data, and checks every half of it: at most 20 s.
const HEARTBEAT_S: u16 = 8;
/// One channel to publish on, one for checks, and spares: lapin frees the number of a closed channel late.
const CHANNELS_MAX: u16 = 8;
pub(super) const REPLY_SUCCESS: u16 = 200;
const HUNG_UP: &str = "the peer closed the connection";

/// A checked connection with a channel in confirm mode.
pub(crate) struct Link {
    pub(super) config: AmqpConfig,
    pub(super) connection: Connection,
    pub(crate) channel: Channel,
    pub(crate) frame_bytes_max: usize,
    pub(crate) last_bytes: LastBytes,
    pub(crate) sent_bytes: SentBytes,
}

impl Connector for AmqpConfig {
    type Wire = SocketHandle;
    type Connection = Link;

    async fn connect(
        &self,
        to: &Endpoint,
        address: SocketAddr,
        limit: Limit,
        wire: &mut Option<SocketHandle>,
    ) -> Result<Link, Fault> {
        connect(self, to, address, limit, wire).await
    }

    fn refusal() -> Fault {
        let text = "a queue refuses messages (basic.nack), and none is confirmed";
        Fault::new(DownReason::QUEUE_REFUSED, text)
    }
}

/// Connects to an address and checks, all within `limit`. `wire` is set as soon as there is a socket, so that the caller
/// can cut it in any case: also if this future is dropped before it ends.
async fn connect(
    config: &AmqpConfig,
    to: &Endpoint,
    address: SocketAddr,
    limit: Limit,
    wire: &mut Option<SocketHandle>,
) -> Result<Link, Fault> {
    let tcp = dial(address, limit).await?;
    let requested = CertificateRequested::default();
    let socket = match &config.tls {
        None => Socket::Plain(tcp),
        Some(tls) => secure(config, tls, &to.host, &requested, tcp, limit).await?,
    };
    let (new_wire, stream, mark) = SocketHandle::new(socket)
        .map_err(|e| Fault::of_call(DownReason::UNREACHABLE, &e, "cannot share the socket"))?;
    let wire = wire.insert(new_wire);
    let sent_bytes = wire.sent_bytes();
    let mut set_up = pin!(set_up(config, to, sent_bytes, limit, &requested, stream, mark));
    tokio::select! {
        biased;
        link = &mut set_up => return link,
        () = wire.ended() => {}
    }
    // lapin can lose its thread and leave its caller waiting: a peer that closes after connection.tune causes it. lapin
    // may also be about to report the cause.
    let unexplained = || {
        Err(blame_certificate(
            config,
            &requested,
            Fault::new(DownReason::CLOSED, HUNG_UP),
        ))
    };
    timeout(CAUSE_LIMIT, set_up).await.unwrap_or_else(|_| unexplained())
}

async fn set_up(
    config: &AmqpConfig,
    to: &Endpoint,
    sent_bytes: SentBytes,
    limit: Limit,
    requested: &CertificateRequested,
    stream: GuardedStream,
    mark: ThreadMark,
) -> Result<Link, Fault> {
    let last_bytes = stream.last_bytes();
    let connection = within(limit, "the AMQP handshake", handshake(config, to, stream, mark))
        .await
        .map_err(|fault| blame_certificate(config, requested, fault))?;
    within(limit, "the exchange check", check_exchange(config, &connection)).await?;
    let channel = confirming_channel(limit, &connection).await?;
    let frame_bytes_max = connection.configuration().frame_max() as usize;
    Ok(Link {
        config: config.clone(),
        connection,
        channel,
        frame_bytes_max,
        last_bytes,
        sent_bytes,
    })
}

pub(super) async fn confirming_channel(limit: Limit, connection: &Connection) -> Result<Channel, Fault> {
    let channel = within(limit, "channel.open", connection.create_channel()).await?;
    let confirm = channel.confirm_select(ConfirmSelectOptions::default());
    within(limit, "confirm.select", confirm).await?;
    Ok(channel)
}

/// The TLS handshake. Dropping this future closes the socket; no thread of lapin exists yet.
async fn secure(
    config: &AmqpConfig,
    tls: &Tls,
    host: &str,
    requested: &CertificateRequested,
    tcp: TcpStream,
    limit: Limit,
) -> Result<Socket, Fault> {
    let failed = |text: String| Fault::new(DownReason::TLS_FAILED, text);
    let client_config = tls.client_config().map_err(|e| failed(e.to_string()))?;
    let name = tls.server_name(host).map_err(|e| failed(e.to_string()))?;
    let handshake = TlsConnector::from(requested.record_in(&client_config)).connect(name, tcp);
    match timeout_at(limit.until, handshake).await {
        Ok(Ok(stream)) => Ok(Socket::Tls(Box::new(stream))),
        Ok(Err(error)) => {
            let by_peer = |fault| blame_certificate(config, requested, fault);
            Err(match tls::error_in(&error) {
                Some(alert @ rustls::Error::AlertReceived(_)) => by_peer(tls::fault(alert)),
                Some(ours) => tls::fault(ours),
                None => by_peer(failed(format!("{HUNG_UP} during the TLS handshake: {error}"))),
            })
        }
        Err(_) => Err(Fault::new(
            DownReason::TIMEOUT,
            format!(
                "no answer to the TLS handshake within {:.1?}; does the peer speak TLS?",
                limit.whole
            ),
        )),
    }
}

/// When the peer closed the connection without an error, its request for a client certificate is the best explanation.
fn blame_certificate(config: &AmqpConfig, requested: &CertificateRequested, fault: Fault) -> Fault {
    let with_certificate = config.tls.as_ref().is_some_and(|tls| tls.client.is_some());
    match fault.reason {
        DownReason::CLOSED | DownReason::TLS_FAILED if requested.is_set() && !with_certificate => Fault::coded(
            DownReason::TLS_FAILED,
            tls::CLIENT_CERTIFICATE,
            format!(
                "the peer asked for a client certificate and none is set ({})",
                fault.finding.detail
            ),
        ),
        // The peer may have had another reason to close.
        DownReason::CLOSED if requested.is_set() => {
            fault.detailed(|detail| format!("{detail}, perhaps because of our client certificate"))
        }
        _ => fault,
    }
}

async fn handshake(
    config: &AmqpConfig,
    to: &Endpoint,
    stream: GuardedStream,
    mark: ThreadMark,
) -> lapin::Result<Connection> {
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
    Connection::connector(uri(config, to), Kit::runtime(), connect, properties(config)).await
}

/// Built from parts, never from text: no text that contains the password exists.
fn uri(config: &AmqpConfig, to: &Endpoint) -> AMQPUri {
    AMQPUri {
        scheme: AMQPScheme::AMQP,
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo {
                username: config.user.clone(),
                password: config.password.reveal().to_owned(),
            },
            host: to.host.clone(),
            port: to.port,
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

pub(super) async fn within<T>(
    limit: Limit,
    step: &str,
    work: impl Future<Output = lapin::Result<T>>,
) -> Result<T, Fault> {
    match timeout_at(limit.until, work).await {
        Ok(done) => done.map_err(|e| fault(&e)),
        Err(_) => Err(Fault::new(
            DownReason::TIMEOUT,
            format!("no answer to {step} within {:.1?}", limit.whole),
        )),
    }
}

/// Translates an error of lapin for readers of the health view.
pub(crate) fn fault(error: &lapin::Error) -> Fault {
    let (reason, detail) = match error.kind() {
        ErrorKind::ProtocolError(e) => (protocol_reason(e), e.get_message().to_string()),
        ErrorKind::MissingHeartbeatError => (DownReason::TIMEOUT, "the broker sends no heartbeats".to_owned()),
        ErrorKind::IOError(e) => return io_fault(e),
        ErrorKind::ParsingError(_) | ErrorKind::InvalidProtocolVersion(_) | ErrorKind::AuthProviderError(_) => {
            (DownReason::PROTOCOL, error.to_string())
        }
        _ => (DownReason::CLOSED, error.to_string()),
    };
    Fault::new(reason, detail)
}

fn io_fault(error: &io::Error) -> Fault {
    let (reason, detail) = match (tls::error_in(error), error.kind()) {
        (Some(error), _) => return tls::fault(error),
        // lapin could not start its thread.
        (None, _) if let Some(limit) = limit_of(error) => (DownReason::PROCESS_LIMIT, format!("{limit}: {error}")),
        // An error of `guard`. Every other I/O error is a connection that ended.
        (None, io::ErrorKind::InvalidData) => (DownReason::PROTOCOL, error.to_string()),
        // For a peer that closed without a close_notify, rustls has a long text with a link.
        (None, io::ErrorKind::UnexpectedEof) => (DownReason::CLOSED, HUNG_UP.to_owned()),
        (None, _) => (DownReason::CLOSED, error.to_string()),
    };
    Fault::new(reason, detail)
}

fn protocol_reason(error: &AMQPError) -> DownReason {
    let says = |words: &str| error.get_message().as_str().contains(words);
    match error.kind() {
        // RabbitMQ answers 403 to a wrong password, and to what a user may not do.
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) if says("Login was refused") => DownReason::AUTH_REFUSED,
        AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => DownReason::PERMISSION_DENIED,
        AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND) => EXCHANGE_MISSING,
        // For a publish 406 can also mean "too large"; `publish_loop` reads the text.
        AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED) => EXCHANGE_MISMATCH,
        // 530: RabbitMQ reports this for a vhost that does not exist or that the user may not access, and for limits.
        AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) if says("connection limit") => DownReason::CONNECTION_LIMIT,
        AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => VHOST_REFUSED,
        // rabbit_exchange:check_type/1 closes the connection.
        AMQPErrorKind::Hard(AMQPHardError::COMMANDINVALID) if says("unknown exchange type") => EXCHANGE_TYPE_UNKNOWN,
        AMQPErrorKind::Hard(AMQPHardError::CONNECTIONFORCED) => DownReason::CLOSED,
        AMQPErrorKind::Hard(AMQPHardError::INVALIDPATH) => VHOST_REFUSED,
        // A virtual host that is stopped, or that failed to start (rabbit_reader.erl, is_vhost_alive/3).
        AMQPErrorKind::Hard(AMQPHardError::INTERNALERROR) if says("vhost") && says(" is down") => VHOST_REFUSED,
        _ => DownReason::PROTOCOL,
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

    #[test]
    fn the_reason_of_a_refusal_follows_from_its_words() {
        let soft = |words: &str| AMQPError::new(AMQPSoftError::ACCESSREFUSED.into(), words.into());
        let hard = |words: &str| AMQPError::new(AMQPHardError::NOTALLOWED.into(), words.into());
        let invalid = |words: &str| AMQPError::new(AMQPHardError::COMMANDINVALID.into(), words.into());
        for (error, reason) in [
            (
                soft("ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN."),
                DownReason::AUTH_REFUSED,
            ),
            (
                soft("ACCESS_REFUSED - write access to exchange 'x' in vhost '/' refused for user 'u'"),
                DownReason::PERMISSION_DENIED,
            ),
            (
                soft("ACCESS_REFUSED - cannot publish to internal exchange 'x' in vhost '/'"),
                DownReason::PERMISSION_DENIED,
            ),
            (hard("NOT_ALLOWED - vhost / not found"), VHOST_REFUSED),
            (
                hard("NOT_ALLOWED - access to vhost '/' refused for user 'u': connection limit (1) is reached"),
                DownReason::CONNECTION_LIMIT,
            ),
            (
                hard("NOT_ALLOWED - connection refused for user 'u': user connection limit (1) is reached"),
                DownReason::CONNECTION_LIMIT,
            ),
            (
                invalid("COMMAND_INVALID - unknown exchange type 'x-consistent-hash'"),
                EXCHANGE_TYPE_UNKNOWN,
            ),
            (
                invalid("COMMAND_INVALID - second 'channel.open' seen"),
                DownReason::PROTOCOL,
            ),
        ] {
            assert_eq!(protocol_reason(&error), reason, "{error:?}");
        }
    }
}
