//! What the rest of the house knows of a destination by HTTP: a URL that messages are posted to, with its options and the
//! form of its messages. Pure.

use super::config::{HttpAuth, HttpConfig, RETRY_AFTER_MAX};
use super::form::FORM;
use super::request::check_credentials;
use super::url::{HttpAddress, parse_http_url};
use crate::kind::{Kind, Peer, Target};
use crate::options::{Options, Refused, refused};
use crate::start::Start;
use crate::url::Endpoint;
use crate::{Publisher, Secret, Text};
use outbox_core::envelope::Refusal;
use outbox_core::finding::Finding;
use outbox_core::route::{Format, Template};
use std::io;
use std::sync::Arc;
use std::time::Duration;

pub static KIND: Kind = Kind {
    wrapper: "outbox_http",
    protocol: "HTTP",
    about: "Destinations of outbox that are URLs to which messages are posted. Secrets belong in a user mapping for the role \
            of the workers.",
    peer: "receiver",
    connects_first: false,
    place: None,
    without_mapping: "no secret is used",
    one_by_one: true,
    may_be_private: false,
    form: FORM,
    address: None,
    of_server: &["url", "concurrency", "timeout", "retry_after_max"],
    of_mapping: &["user", "password", "bearer_token", "signing_secret", "headers"],
    settings: &[],
    reasons: super::findings::REASONS,
    words: super::findings::WORDS,
    read,
};

/// A URL, with the secrets of its receiver.
struct Receiver {
    url: Option<(String, HttpAddress)>,
    secrets: Secrets,
    /// The most requests at a time.
    concurrency: usize,
    /// The longest pause that an answer can ask for.
    retry_after_max: Duration,
    address: Template,
}

struct Secrets {
    auth: HttpAuth,
    /// The current one first, then the older ones that it replaces.
    signing: Vec<Secret>,
    /// Headers of each request, by their names in lower case.
    headers: Vec<(String, Secret)>,
}

fn read(server: &Options, mapping: &Options) -> Result<Arc<dyn Peer>, Refused> {
    let concurrency = server.read("concurrency", |given| given.number(1..=64))?;
    Ok(Arc::new(Receiver {
        url: server.read("url", |given| {
            let address = given.parsed(parse_http_url(given.text), "Example: https://example.com/hooks")?;
            Ok((given.text.to_owned(), address))
        })?,
        secrets: secrets(mapping)?,
        concurrency: concurrency.map_or(8, |requests| requests as usize),
        retry_after_max: server
            .read("retry_after_max", |given| given.duration(0..=86_400_000))?
            .unwrap_or(RETRY_AFTER_MAX),
        address: Template::default(),
    }))
}

fn secrets(mapping: &Options) -> Result<Secrets, Refused> {
    let secret = |name| mapping.text(name).map(Secret::new);
    let auth = match (mapping.text("user"), secret("password"), secret("bearer_token")) {
        (Some(user), Some(password), None) => HttpAuth::Basic {
            user: user.to_owned(),
            password,
        },
        (None, None, Some(token)) => HttpAuth::Bearer(token),
        (None, None, None) => HttpAuth::None,
        _ => {
            let hint = "Give user and password, or bearer_token.";
            return Err(refused("user", "it does not fit the other options", hint));
        }
    };
    let signing = mapping.text("signing_secret").unwrap_or_default().split_whitespace();
    let signing: Vec<Secret> = signing.map(Secret::new).collect();
    if mapping.has("signing_secret") && signing.is_empty() {
        return Err(refused("signing_secret", "it is empty", "Leave it out instead."));
    }
    const HEADERS: &str = r#"{"x-api-key": "the key"}"#;
    let headers = mapping.read("headers", |given| secret_headers(given.texts(HEADERS)?))?;
    let headers = headers.unwrap_or_default();
    check_credentials(&auth, &signing, &headers).map_err(|(name, why)| {
        let hint = match name {
            "signing_secret" => {
                "Use whsec_ followed by 24 to 64 bytes in base64. To rotate it, give the new secret, a space and the old one."
                    .to_owned()
            }
            "headers" => format!("Example: {HEADERS}"),
            _ => "See docs/destinations.md.".to_owned(),
        };
        refused(name, why, hint)
    })?;
    Ok(Secrets { auth, signing, headers })
}

/// The option `headers` of a user mapping. Its values are no templates: a key may have any characters. No error repeats
/// a name, which may be a secret by mistake.
fn secret_headers(texts: impl IntoIterator<Item = (String, String)>) -> Result<Vec<(String, Secret)>, Refused> {
    let mut headers: Vec<(String, Secret)> = Vec::new();
    for (header, secret) in texts {
        let known = secret_name(&header)
            .map_err(|refusal| refused("headers", "one of its names cannot be set", refusal.hint))?;
        if headers.iter().any(|(other, _)| *other == *known) {
            let hint = "Leave one of them out.";
            return Err(refused("headers", "it has a name twice, in upper or lower case", hint));
        }
        headers.push((known.to_string(), Secret::new(secret)));
    }
    match headers.is_empty() {
        true => Err(refused("headers", "it is empty", "Leave it out instead.")),
        false => Ok(headers),
    }
}

/// Checks the name of a header whose value is a secret of the destination. The rule is that of all formats, because the
/// format may change; `Authorization` is allowed, as the option is for credentials.
fn secret_name(name: &str) -> Result<Text, Refusal> {
    match name.eq_ignore_ascii_case("authorization") {
        true => Ok("authorization".into()),
        false => FORM.static_name(Format::CloudEvents, name),
    }
}

impl Peer for Receiver {
    fn endpoints(&self) -> Vec<Endpoint> {
        let endpoint = self.url.iter().map(|(_, address)| Endpoint {
            host: address.host.clone(),
            port: address.port,
        });
        endpoint.collect()
    }

    fn address(&self) -> &Template {
        &self.address
    }

    fn facts(&self, _address: &str) -> Vec<(&'static str, String)> {
        self.url.iter().map(|(url, _)| ("Posted to", url.clone())).collect()
    }

    fn start(&self, target: &Target, start: &mut Start<'_>) -> Result<io::Result<Publisher>, Finding> {
        let (_, address) = self
            .url
            .as_ref()
            .ok_or("the option url is missing: there is no URL to post to")?;
        let tls = start.tls(&target.certificates)?;
        Ok(start.publisher(HttpConfig {
            auth: self.secrets.auth.clone(),
            signing_secrets: self.secrets.signing.clone(),
            secret_headers: self.secrets.headers.clone(),
            tls,
            allow: target.allow.clone(),
            connect_timeout: target.connect_timeout,
            timeout: target.answer_timeout,
            min_send_rate: target.min_send_rate,
            concurrency: self.concurrency,
            retry_after_max: self.retry_after_max,
            connection_name: start.connection_name.to_owned(),
            deadline: start.deadline.clone(),
            ..HttpConfig::new(address.clone())
        }))
    }
}
