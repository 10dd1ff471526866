//! `outboxctl listen`: receives the messages of a destination by HTTP, and prints each. It needs no database.

use crate::commands::CommandContext;
use crate::failure::{Code, Failure};
use crate::format::json;
use crate::output;
use crate::screen::text::fit;
use crate::screen::theme;
use crate::shutdown::Shutdown;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use clap::Args;
use outbox_transport::{Secret, Signer, read_secret_file};
use percent_encoding::percent_decode;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;
use tokio::time::sleep;

/// An event has at most 15 MiB; the rest of its message is far smaller than this.
const BODY_BYTES_MAX: usize = 32 << 20;
/// How long requests that are under way at a signal may take to end. A sender that is cut off sends the message again.
const LAST_REQUESTS: Duration = Duration::from_millis(500);
/// The clocks of sender and receiver may differ by this much, as in the libraries of Standard Webhooks.
const TOLERANCE_S: u64 = 300;

#[derive(Args)]
pub struct ListenArgs {
    /// Port to listen at
    #[arg(
        short = 'p',
        long,
        value_name = "PORT",
        default_value = "8081",
        help_heading = "Options"
    )]
    port: String,
    /// Address to listen at
    #[arg(
        short = 'h',
        long,
        value_name = "ADDRESS",
        default_value = "127.0.0.1",
        help_heading = "Options"
    )]
    host: String,
    /// Status to answer with: 503 as a receiver that is down, 422 as one that rejects the message
    #[arg(long, value_name = "STATUS", default_value_t = 200, value_parser = clap::value_parser!(u16).range(200..=599))]
    answer: u16,
    /// File with the signing secret; what is not signed with it is answered with 401
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

struct ListenState {
    answer: StatusCode,
    signer: Option<Signer>,
    json: bool,
}

/// Receives until a signal ends it.
pub async fn run(context: &CommandContext, args: &ListenArgs) -> Result<ExitCode, Failure> {
    let address = match args.host.contains(':') {
        true => format!("[{}]:{}", args.host, args.port),
        false => format!("{}:{}", args.host, args.port),
    };
    let receiver = ListenState {
        answer: StatusCode::from_u16(args.answer).expect("in the range of the argument"),
        signer: args.secret_file.as_deref().map(signer).transpose()?,
        json: context.json,
    };
    let listener = TcpListener::bind(&address).await.map_err(|error| {
        Failure::new(Code::Refused, format!("cannot listen at {address}: {error}"))
            .hint("Give another port with --port, or another address with --host.")
    })?;
    let bound = listener.local_addr().map_or(address, |bound| bound.to_string());
    let shutdown = Shutdown::on_signals()?; // before the address is printed
    let url = format!("http://{bound}/");
    match context.json {
        true => context.print_json(&BTreeMap::from([("url", &url)]))?,
        false => output::print(&format!(
            "Listening at {url}. A destination that delivers here:\n  \
             create server \"default\" foreign data wrapper outbox_http options (url '{url}');\n"
        ))?,
    }
    let router = Router::new()
        .fallback(receive)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(Arc::new(receiver));
    let ending = shutdown.clone();
    let served = axum::serve(listener, router).with_graceful_shutdown(async move { ending.requested().await });
    let ended = tokio::select! {
        ended = served => ended,
        () = async { shutdown.requested().await; sleep(LAST_REQUESTS).await } => Ok(()),
    };
    ended
        .map(|()| ExitCode::SUCCESS)
        .map_err(|error| Failure::new(Code::Refused, format!("cannot listen: {error}")))
}

/// What verifies signatures with the secrets in the file, separated by spaces or lines.
fn signer(file: &Path) -> Result<Signer, Failure> {
    let refused = |why: String| Failure::new(Code::Usage, format!("{}: {why}", file.display()));
    let content = read_secret_file(file).map_err(|error| refused(error.to_string()))?;
    let text = String::from_utf8_lossy(&content);
    let secrets: Vec<Secret> = text.split_whitespace().map(Secret::new).collect();
    match secrets.is_empty() {
        true => Err(refused("the file has no signing secret".to_owned())),
        false => Signer::new(&secrets).map_err(refused),
    }
}

async fn receive(State(receiver): State<Arc<ListenState>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let signature = receiver.signer.as_ref().map(|signer| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        verify(signer, &headers, &body, now.as_secs())
    });
    let answer = match signature {
        Some(Err(_)) => StatusCode::UNAUTHORIZED,
        _ => receiver.answer,
    };
    let received = ShownRequest::new(&headers, &body, answer, signature);
    let printed = match receiver.json {
        true => output::print(&(json(&received) + "\n")),
        false => output::print_lines([received.line()]),
    };
    match printed {
        Ok(()) => answer,
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR, // what nobody has seen is not delivered
    }
}

/// Err: what is wrong with the signature.
fn verify(signer: &Signer, headers: &HeaderMap, body: &[u8], now_s: u64) -> Result<(), &'static str> {
    let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let (Some(id), Some(time), Some(signatures)) = (
        header("webhook-id"),
        header("webhook-timestamp"),
        header("webhook-signature"),
    ) else {
        return Err("not signed");
    };
    match time.parse::<u64>() {
        Ok(time) if signer.verifies(id, time, body, signatures) => match now_s.abs_diff(time) > TOLERANCE_S {
            true => Err("signed at another time"),
            false => Ok(()),
        },
        _ => Err("signed with another secret"),
    }
}

/// A message as `--json` prints it.
#[derive(Serialize)]
struct ShownRequest<'a> {
    seq: Option<i64>,
    id: Option<Cow<'a, str>>,
    #[serde(rename = "type")]
    kind: Option<Cow<'a, str>>,
    key: Option<Cow<'a, str>>,
    attempt: Option<i64>,
    answer: u16,
    /// `valid`, or what is wrong with it; null without `--secret-file`.
    signature: Option<&'static str>,
    headers: BTreeMap<&'a str, Cow<'a, str>>,
    body: Body<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Body<'a> {
    Json(&'a RawValue),
    Text(Cow<'a, str>),
}

/// What the two formats that wrap the payload call it.
#[derive(Deserialize)]
struct Wrapped<'a> {
    #[serde(borrow, alias = "data")]
    payload: &'a RawValue,
}

impl<'a> ShownRequest<'a> {
    fn new(
        headers: &'a HeaderMap,
        body: &'a [u8],
        answer: StatusCode,
        signature: Option<Result<(), &'static str>>,
    ) -> Self {
        // The outbox sends its values percent-encoded.
        let decoded = |name| Some(percent_decode(headers.get(name)?.as_bytes()).decode_utf8_lossy());
        let number = |name| headers.get(name)?.to_str().ok()?.parse().ok();
        let sent = headers.iter();
        Self {
            seq: number("outbox-seq"),
            id: decoded("outbox-id"),
            kind: decoded("outbox-type"),
            key: decoded("outbox-key"),
            attempt: number("outbox-attempt"),
            answer: answer.as_u16(),
            signature: signature.map(|verified| verified.err().unwrap_or("valid")),
            headers: sent
                .map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes())))
                .collect(),
            body: serde_json::from_slice(body).map_or_else(|_| Body::Text(String::from_utf8_lossy(body)), Body::Json),
        }
    }

    /// `#1 OrderPlaced order:42 {"total": 99.90}`, and what is unusual.
    fn line(&self) -> Line<'static> {
        let mut line = Line::default();
        let mut add = |word: Option<String>, style: Style| {
            line.spans.extend(
                word.into_iter()
                    .flat_map(|word| [Span::styled(word, style), Span::raw(" ")]),
            );
        };
        add(self.seq.map(|seq| format!("#{seq}")), theme::DIM);
        add(self.kind.as_deref().map(str::to_owned), theme::STRONG);
        add(self.key.as_deref().map(str::to_owned), Style::new());
        let attempt = self.attempt.filter(|attempt| *attempt > 1);
        add(attempt.map(|attempt| format!("attempt {attempt}")), theme::WARNING);
        let wrong = self.signature.filter(|signature| *signature != "valid");
        add(wrong.map(str::to_owned), theme::BAD);
        let is_refused = !(200..300).contains(&self.answer);
        add(is_refused.then(|| format!("answered {}", self.answer)), theme::BAD);
        let body = match &self.body {
            Body::Json(json) => {
                serde_json::from_str::<Wrapped>(json.get()).map_or(json.get(), |wrapped| wrapped.payload.get())
            }
            Body::Text(text) => text,
        };
        let room = output::room().saturating_sub(line.width());
        line.push_span(Span::raw(fit(body, room)));
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    fn line(
        pairs: &[(&'static str, &str)],
        body: &str,
        answer: u16,
        signature: Option<Result<(), &'static str>>,
    ) -> String {
        let headers = headers(pairs);
        let answer = StatusCode::from_u16(answer).unwrap();
        ShownRequest::new(&headers, body.as_bytes(), answer, signature)
            .line()
            .to_string()
    }

    #[test]
    fn a_line_has_the_payload_of_each_format_and_what_is_unusual() {
        let usual = [
            ("outbox-seq", "7"),
            ("outbox-type", "T"),
            ("outbox-key", "order:%C3%84"),
            ("outbox-attempt", "1"),
        ];
        for body in [
            r#"{"a": 1}"#,
            r#"{"id":"x","payload":{"a": 1},"key":"k"}"#,
            r#"{"specversion":"1.0","data":{"a": 1}}"#,
        ] {
            assert_eq!(line(&usual, body, 200, None), r#"#7 T order:Ä {"a": 1}"#);
        }
        let again = [("outbox-seq", "7"), ("outbox-attempt", "2")];
        assert_eq!(
            line(&again, "<a/>", 503, Some(Ok(()))),
            "#7 attempt 2 answered 503 <a/>"
        );
        assert_eq!(line(&[], "", 401, Some(Err("not signed"))), "not signed answered 401 ");
    }

    #[test]
    fn only_a_signature_of_now_with_the_secret_is_valid() {
        let signer = |byte: u8| {
            let key = String::from_utf8(vec![byte; 32]).unwrap();
            Signer::new(&[Secret::new(format!("whsec_{key}"))]).unwrap()
        };
        let signature = signer(b'a').sign("id", 1000, b"body");
        let signed = headers(&[
            ("webhook-id", "id"),
            ("webhook-timestamp", "1000"),
            ("webhook-signature", &signature),
        ]);
        assert_eq!(verify(&signer(b'a'), &signed, b"body", 1000 + TOLERANCE_S), Ok(()));
        assert_eq!(
            verify(&signer(b'a'), &signed, b"body", 1001 + TOLERANCE_S),
            Err("signed at another time")
        );
        assert_eq!(
            verify(&signer(b'a'), &signed, b"other", 1000),
            Err("signed with another secret")
        );
        assert_eq!(
            verify(&signer(b'b'), &signed, b"body", 1000),
            Err("signed with another secret")
        );
        assert_eq!(verify(&signer(b'a'), &headers(&[]), b"body", 1000), Err("not signed"));
    }
}
