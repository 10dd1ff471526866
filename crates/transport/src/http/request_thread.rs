//! Posts messages, for whichever destination has one, each over a connection that its destination keeps open.
//!
//! ======== From here on: request thread. No Postgres, no signal, no panic that gets out. ========
//!
//! Run by `pool`. It may block on the network: the publisher thread can cut the `line` of the connection.

use super::answer::{self, Trouble, Verdict};
use super::config::HttpConfig;
use super::line::{ACKNOWLEDGED_WITHIN, CompletionMark, Dialer, Line, NoResolver, is_end};
use super::request::RequestBuilder;
use crate::down::{DownReason, Fault, NO_ANSWER};
use crate::pool::IDLE_MAX;
use crate::publisher_thread::panic_text;
use crate::tls;
use crate::{Outcome, Publication};
use std::io::{self, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use ureq::http::{HeaderName, HeaderValue, Request, Response, header};
use ureq::unversioned::transport::{Connector, RustlsConnector};
use ureq::{Agent, Body, Error, Timeout};

/// The most bytes of an answer's body that are read. A longer body costs the connection.
const BODY_BYTES_MAX: u64 = 64 * 1024;
/// The time limit for the body. The status has arrived by then, so a slow body is not worth a longer wait.
const BODY_LIMIT: Duration = Duration::from_secs(2);
const ANSWER_HEADER_BYTES_MAX: usize = 32 * 1024;
/// The buffers of a connection. ureq fills them with zeros, so they take memory, hundreds of times if receivers hang. The input
/// buffer is larger than the header of an answer, the output buffer larger than a line of the header of a request.
const INPUT_BUFFER_BYTES: usize = 40 * 1024;
const OUTPUT_BUFFER_BYTES: usize = 16 * 1024;
/// The output buffer for a message with longer lines: larger than the limit of all headers together.
const LARGE_OUTPUT_BUFFER_BYTES: usize = 128 * 1024;
/// The time within which a closed connection shows. A request that fails later than this is not sent twice.
const STALE_WITHIN: Duration = Duration::from_secs(1);

/// What all requests of a publisher share.
pub(crate) struct PostContext {
    pub(crate) config: HttpConfig,
    pub(crate) endpoint: RequestBuilder,
}

/// A connection: ureq's agent, which keeps it open, and the means to cut it.
pub(crate) struct HttpConnection {
    pub(crate) agent: Option<Agent>,
    pub(crate) line: Arc<Line>,
}

/// The result of a request.
pub(crate) struct PostResult {
    /// The handle of the message.
    pub(crate) handle: u64,
    pub(crate) verdict: Verdict,
    pub(crate) at: Instant,
    pub(crate) connection: HttpConnection,
}

impl PostResult {
    /// Makes the request for a message. Runs on a thread of the pool.
    pub(crate) fn of(message: &Publication, shared: &PostContext, mut connection: HttpConnection) -> Self {
        let verdict = caught(|| post(shared, &mut connection, message)).unwrap_or_else(|verdict| {
            connection.agent = None; // the agent may be in an inconsistent state
            verdict
        });
        Self {
            handle: message.handle,
            verdict,
            at: Instant::now(),
            connection,
        }
    }
}

/// Runs `post` and turns a panic into `Err`. The panic is charged to the message. Otherwise the message would cause it
/// again forever, and keep all others from being sent.
fn caught(post: impl FnOnce() -> Verdict) -> Result<Verdict, Verdict> {
    catch_unwind(AssertUnwindSafe(post)).map_err(|panic| {
        let reason = answer::clean(&format!("the request thread panicked: {}", panic_text(&*panic)));
        Verdict::Message(Outcome::Failed { reason })
    })
}

fn post(shared: &PostContext, connection: &mut HttpConnection, message: &Publication) -> Verdict {
    let HttpConnection { agent, line } = connection;
    let now = SystemTime::now();
    let now_s = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let request = match shared.endpoint.request(message, now_s) {
        Ok(request) => request,
        Err(reason) => return Verdict::Unsendable(reason),
    };
    let output_bytes = output_buffer_bytes(&request);
    let agent = match agent.take_if(|agent| agent.config().output_buffer_size() >= output_bytes) {
        Some(known) => agent.insert(known),
        None => match new_agent(&shared.config, line, output_bytes) {
            Ok(new) => agent.insert(new),
            Err(text) => {
                return Verdict::Destination(Trouble::unsent(Fault::new(DownReason::TLS_FAILED, text)));
            }
        },
    };
    match run(agent, line, request) {
        Ok(answer) => {
            line.record_answer(true);
            read(&shared.endpoint, answer, now)
        }
        // The status decides, also if ureq refuses what follows it, or if that does not arrive.
        Err(error) => match line.status() {
            Some(status) => {
                line.record_answer(true);
                Verdict::of_status(status, "the rest of the answer cannot be read", None)
            }
            None => {
                if !line.is_cut() && !shared.config.deadline.has_passed() {
                    line.record_answer(false);
                }
                verdict_of(error, shared, line)
            }
        },
    }
}

/// Sends the request. Sends it once more if the connection was idle and turns out to be closed.
fn run(agent: &Agent, line: &Line, request: Request<&[u8]>) -> Result<Response<Body>, Error> {
    let started = Instant::now();
    line.begin_request();
    let first = agent.run(request.clone());
    match first {
        Err(Error::Io(error))
            if is_end(&error) && line.may_have_been_stale() && !line.is_cut() && started.elapsed() < STALE_WITHIN =>
        {
            line.begin_request();
            agent.run(request)
        }
        other => other,
    }
}

/// Reads an answer. The status decides. The body is read so that the connection can be reused, and for an excerpt in
/// the error.
fn read(endpoint: &RequestBuilder, mut answer: Response<Body>, now: SystemTime) -> Verdict {
    let status = answer.status();
    let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
    let retry_after = header(header::RETRY_AFTER).and_then(|value| answer::retry_after(value, now));
    let to = header(header::LOCATION)
        .filter(|_| status.is_redirection())
        .map(str::to_owned);
    let kind = header(header::CONTENT_TYPE).unwrap_or_default().to_ascii_lowercase();
    let is_readable =
        header(header::CONTENT_ENCODING).is_none() && (kind.starts_with("text/plain") || kind.contains("json"));
    let mut body = Vec::new();
    let reader = answer.body_mut().as_reader();
    // An error here does not matter: the bytes read so far are enough.
    let _ = reader.take(BODY_BYTES_MAX + 1).read_to_end(&mut body);
    let excerpt = match to {
        Some(to) => endpoint.excerpt(format!("to {to}").as_bytes()),
        None if is_readable && !status.is_success() => endpoint.excerpt(&body),
        None => String::new(),
    };
    Verdict::of_status(status, &excerpt, retry_after)
}

/// The size of the output buffer that the request needs.
fn output_buffer_bytes(request: &Request<&[u8]>) -> usize {
    let line = |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len() + 4;
    let longest = request.headers().iter().map(line).max().unwrap_or_default();
    let first = request.uri().path_and_query().map_or(0, |path| path.as_str().len()) + 32;
    match longest.max(first) <= OUTPUT_BUFFER_BYTES {
        true => OUTPUT_BUFFER_BYTES,
        false => LARGE_OUTPUT_BUFFER_BYTES,
    }
}

fn new_agent(config: &HttpConfig, line: &Arc<Line>, output_bytes: usize) -> Result<Agent, String> {
    let dialer = Dialer {
        line: Arc::clone(line),
        tls: RustlsConnector::default(),
        connection_life: config.connection_life,
        deadline: config.deadline.clone(),
        limits: config.transfer_limits(),
    };
    let config = Agent::config_builder()
        .proxy(None) // otherwise read from the environment
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent("") // the fixed headers have one
        .accept("")
        .accept_encoding("identity") // compressed bodies could grow when unpacked
        .max_response_header_size(ANSWER_HEADER_BYTES_MAX)
        .input_buffer_size(INPUT_BUFFER_BYTES)
        .output_buffer_size(output_bytes)
        .max_idle_connections(1)
        .max_idle_connections_per_host(1)
        .max_idle_age(IDLE_MAX)
        .timeout_connect(Some(config.connect_timeout.min(config.timeout)))
        .timeout_recv_body(Some(BODY_LIMIT))
        .tls_config(config.tls_config().map_err(|error| error.to_string())?)
        .build();
    let connector = dialer.chain(CompletionMark(Arc::clone(line)));
    Ok(Agent::with_parts(config, connector, NoResolver))
}

/// The verdict for an error of ureq. Leaves out every text of ureq that could contain the URL.
fn verdict_of(error: Error, shared: &PostContext, line: &Line) -> Verdict {
    let config = &shared.config;
    let mut is_answer = !line.is_half_made() && !line.is_cut() && !config.deadline.has_passed();
    let fault = match error {
        Error::Other(error) => match error.downcast::<Fault>() {
            Ok(fault) => *fault,
            Err(error) => Fault::new(DownReason::PROTOCOL, error.to_string()),
        },
        Error::Timeout(Timeout::Connect | Timeout::Resolve) => Fault::new(
            DownReason::TIMEOUT,
            format!("no connection within {:?}", config.connect_timeout.min(config.timeout)),
        ),
        Error::Timeout(_) => {
            let late = (line.transfer()).lateness(config.transfer_limits(), "answer", Instant::now());
            Fault::coded(DownReason::TIMEOUT, NO_ANSWER, late)
        }
        Error::Io(error) => match tls::error_in(&error) {
            Some(error) => tls::fault(error),
            None if error.kind() == io::ErrorKind::TimedOut => {
                is_answer = false; // nothing shows that the request has arrived
                let text = format!("the peer did not acknowledge the request within {ACKNOWLEDGED_WITHIN:?}");
                Fault::new(DownReason::TIMEOUT, text)
            }
            None if is_end(&error) => Fault::new(
                DownReason::CLOSED,
                "the peer closed the connection before it answered".to_owned(),
            ),
            None => Fault::new(DownReason::CLOSED, error.to_string()),
        },
        Error::Rustls(error) => tls::fault(&error),
        Error::Tls(text) => Fault::new(DownReason::TLS_FAILED, text),
        Error::Protocol(error) => Fault::new(DownReason::PROTOCOL, error.to_string()),
        Error::LargeResponseHeader(_, limit) => Fault::new(
            DownReason::PROTOCOL,
            format!("the header of the answer exceeds the limit of {limit} bytes"),
        ),
        _ => Fault::new(DownReason::PROTOCOL, "the answer could not be read"),
    };
    Verdict::Destination(Trouble {
        fault: fault.detailed(|text| answer::clean(&shared.endpoint.without_secrets(text))),
        retry_after: None,
        is_answer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_charged_to_its_message() {
        assert!(matches!(caught(|| Verdict::Confirmed), Ok(Verdict::Confirmed)));
        let panicked = caught(|| panic!("a literal\nof two lines"));
        let Err(Verdict::Message(Outcome::Failed { reason })) = panicked else {
            panic!("{panicked:?}")
        };
        assert_eq!(reason, "the request thread panicked: a literal of two lines");
    }
}
