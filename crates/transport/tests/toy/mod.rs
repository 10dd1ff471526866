//! A kind of destination for the tests, as small as one can be. It is compiled into the crate with the feature `toy`, and is
//! one line in the registry.
//!
//! | sent | answered, in any order |
//! |---|---|
//! | `NUMBER ADDRESS BYTES` as a line, then the body | `ok NUMBER`, or `no NUMBER WHY`: it can never be sent |
//! | | `stop WHY`, and later `go`: the listener takes no messages in between |
//! | `?` | `!` |

use crate::connected::{ChannelEvent, Protocol, Received, Streamed, Terms, keep_connected};
use crate::down::{DownReason, Fault};
use crate::intake::Intake;
use crate::kind::{Kind, Peer, Target};
use crate::options::{Options, Refused};
use crate::start::Start;
use crate::transport::{SharedPools, Transport};
use crate::url::{Endpoint, UrlError, parse_authority, strip_scheme};
use crate::{Outcome, Publication, Publisher};
use outbox_core::finding::Finding;
use outbox_core::form::Form;
use outbox_core::route::Template;
use std::io;
use std::sync::Arc;

pub static KIND: Kind = Kind {
    wrapper: "outbox_toy",
    protocol: "lines",
    about: "Destinations of outbox for tests: lines over TCP.",
    peer: "listener",
    connects_first: true,
    place: None,
    without_mapping: "there are no secrets",
    one_by_one: false,
    may_be_private: true,
    form: Form {
        address: "channel",
        ..Form::TEXT
    },
    address: Some("channel"),
    of_server: &["url", "channel", "max_in_flight", "timeout"],
    of_mapping: &[],
    settings: &[],
    reasons: &[],
    words: &[],
    read,
};

struct Channel {
    url: Option<(String, Vec<Endpoint>)>,
    channel: Template,
}

fn read(server: &Options, _mapping: &Options) -> Result<Arc<dyn Peer>, Refused> {
    let endpoints = |url: &str| match strip_scheme(url, "toy", "toys") {
        Some((false, hosts)) => parse_authority(hosts, 7).map(|(_, endpoints)| endpoints),
        _ => Err(UrlError("the URL must start with toy://")),
    };
    Ok(Arc::new(Channel {
        url: server.read("url", |given| {
            let endpoints = given.parsed(endpoints(given.text), "Example: toy://host:7")?;
            Ok((given.text.to_owned(), endpoints))
        })?,
        channel: server.read("channel", |given| given.address())?.unwrap_or_default(),
    }))
}

impl Peer for Channel {
    fn endpoints(&self) -> Vec<Endpoint> {
        self.url.as_ref().map_or(Vec::new(), |(_, endpoints)| endpoints.clone())
    }

    fn address(&self) -> &Template {
        &self.channel
    }

    fn facts(&self, address: &str) -> Vec<(&'static str, String)> {
        let url = self.url.iter().map(|(url, _)| ("Listener", url.clone()));
        url.chain([("Channel", address.to_owned())]).collect()
    }

    fn start(&self, target: &Target, start: &mut Start<'_>) -> Result<io::Result<Publisher>, Finding> {
        let (_, endpoints) = self
            .url
            .clone()
            .ok_or("the option url is missing: there is no listener")?;
        let terms = target.terms(endpoints, start.deadline);
        Ok(start.publisher(ToyConfig(terms)))
    }
}

/// The terms of a publisher, for the conformance suite.
pub struct ToyConfig(pub Terms);

impl Transport for ToyConfig {
    fn check(&self) -> io::Result<()> {
        Ok(())
    }

    fn window(&self) -> usize {
        self.0.window
    }

    async fn run(self, intake: &mut Intake<'_>, pools: &SharedPools) -> Result<(), String> {
        let terms = self.0;
        keep_connected(Streamed(Lines), terms, intake, pools).await
    }
}

#[derive(Clone)]
struct Lines;

impl Protocol for Lines {
    fn write(&self, number: u64, message: Publication, output: &mut Vec<u8>) -> Result<(), String> {
        if message.address.contains([' ', '\n']) {
            return Err("a channel has no blanks".to_owned());
        }
        output.extend(format!("{number} {} {}\n", message.address, message.body.len()).bytes());
        output.extend(message.body);
        Ok(())
    }

    fn write_probe(&self, output: &mut Vec<u8>) {
        output.extend(b"?\n");
    }

    fn read(&self, input: &[u8]) -> Result<Option<(usize, Received)>, Fault> {
        let Some(end) = input.iter().position(|byte| *byte == b'\n') else {
            return match input.len() {
                ..=1_000 => Ok(None),
                _ => Err(Fault::new(DownReason::PROTOCOL, "a line without an end")),
            };
        };
        let line = String::from_utf8_lossy(&input[..end]);
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let (number, why) = rest.split_once(' ').unwrap_or((rest, ""));
        let received = match (word, number.parse()) {
            ("ok", Ok(number)) => Received::Answer(number, Outcome::Confirmed),
            ("no", Ok(number)) => Received::Answer(number, Outcome::Refused { reason: why.to_owned() }),
            ("stop", _) => Received::Event(ChannelEvent::Blocked(rest.to_owned())),
            ("go", _) => Received::Event(ChannelEvent::Unblocked),
            ("!", _) => Received::Event(ChannelEvent::Alive),
            _ => {
                return Err(Fault::new(
                    DownReason::PROTOCOL,
                    "the peer does not speak in these lines",
                ));
            }
        };
        Ok(Some((end + 1, received)))
    }
}
