//! Builds the request for a message, and removes secrets from texts about its answer. Pure; created once from the
//! settings, called by the request threads for each message.

use super::answer;
use super::config::{HttpAuth, HttpConfig};
use super::form::is_reserved;
use super::signature::Signer;
use crate::{HeaderValue as Value, Publication, Secret};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ureq::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue, USER_AGENT};
use ureq::http::{HeaderMap, Request, Uri};

/// The limit of all encoded headers of a message, in bytes. More than any server accepts, and less than ureq can write.
const HEADERS_BYTES_MAX: usize = 96 * 1024;
/// The limit of the headers in a user mapping. Many servers take no more than 8 KiB in all; the rest is for those of
/// messages.
const SECRET_HEADERS_BYTES_MAX: usize = 4 * 1024;
/// A shorter text is not treated as a secret, because it is common in other texts.
const SECRET_BYTES_MIN: usize = 4;
/// A path of this length or longer may contain a token.
const PATH_BYTES_MIN: usize = 12;
/// The most characters of an answer's body that are repeated.
const EXCERPT_CHARS: usize = 120;

/// The data of a destination that all its requests share.
pub(crate) struct RequestBuilder {
    uri: Uri,
    /// The headers that are the same for each message.
    fixed: HeaderMap,
    signer: Signer,
    /// The secrets that no text may repeat, the longest first.
    secrets: Vec<String>,
}

impl RequestBuilder {
    /// Checks and prepares a destination. `Err` describes the problem without repeating a secret.
    pub(crate) fn new(config: &HttpConfig) -> Result<Self, String> {
        let mut fixed = HeaderMap::new();
        let mut secrets = Vec::new();
        for secret in &config.signing_secrets {
            secrets.push(secret.reveal().trim_start_matches("whsec_").to_owned());
        }
        if let Some((credentials, parts)) = credentials(&config.auth)? {
            let value = HeaderValue::try_from(&credentials);
            let mut value = value.map_err(|_| "the token must be visible ASCII".to_owned())?;
            value.set_sensitive(true);
            fixed.insert(AUTHORIZATION, value);
            secrets.extend(parts);
        }
        for (name, secret) in &config.secret_headers {
            let (name, text) = (header_name(name)?, secret.reveal());
            let mut value =
                header_value(text).ok_or_else(|| format!("the value of {name} cannot be put into a header"))?;
            value.set_sensitive(true);
            fixed.insert(name, value);
            // A receiver may repeat the key without the scheme before it.
            secrets.extend(text.split_once(' ').map(|(_, key)| key.trim().to_owned()));
            secrets.push(text.to_owned());
        }
        fixed.insert(USER_AGENT, user_agent(&config.connection_name));
        if config.address.path.len() >= PATH_BYTES_MIN {
            secrets.push(config.address.path.clone());
        }
        secrets.retain(|secret| secret.len() >= SECRET_BYTES_MIN);
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Ok(Self {
            uri: uri(config)?,
            fixed,
            signer: Signer::new(&config.signing_secrets)?,
            secrets,
        })
    }

    /// Builds a request. `Err` is the reason why the message can never be sent unchanged.
    pub(crate) fn request<'a>(&self, message: &'a Publication, now_s: u64) -> Result<Request<&'a [u8]>, String> {
        let properties = &message.properties;
        let mut headers = self.fixed.clone();
        let mut bytes = 0;
        let mut add = |name: HeaderName, text: &str| {
            bytes += name.as_str().len() + text.len() + 4;
            let value = header_value(text).ok_or_else(|| format!("the value of {name} cannot be put into a header"))?;
            if bytes > HEADERS_BYTES_MAX || headers.contains_key(&name) {
                let fixed = self.fixed.contains_key(&name);
                return match bytes > HEADERS_BYTES_MAX {
                    true => Err(format!("the headers take more than {HEADERS_BYTES_MAX} bytes")),
                    false if fixed => Ok(()), // the settings take precedence
                    false => Err(format!("two headers have the name {name}, in upper or lower case")),
                };
            }
            let added = headers.try_insert(name, value);
            added.map(drop).map_err(|_| "there are too many headers".to_owned())
        };
        let id = &properties.message_id;
        if id.is_empty() {
            return Err("the message has no id".to_owned());
        }
        add(HeaderName::from_static("idempotency-key"), id)?;
        add(HeaderName::from_static("webhook-id"), id)?;
        if !properties.content_type.is_empty() {
            add(CONTENT_TYPE, &properties.content_type)?;
        }
        if !self.signer.is_empty() {
            // The standard forbids it: a full stop would move the border between id, time and body in the signed text.
            if id.contains('.') {
                return Err("an id with a full stop cannot be signed".to_owned());
            }
            add(HeaderName::from_static("webhook-timestamp"), &now_s.to_string())?;
            let signature = self.signer.sign(id, now_s, &message.body);
            add(HeaderName::from_static("webhook-signature"), &signature)?;
        }
        for (name, value) in &properties.headers {
            let name = header_name(name)?;
            if !is_reserved(name.as_str()) {
                add(name, &text_of(value))?;
            }
        }
        let mut request = Request::new(message.body.as_slice());
        *request.method_mut() = ureq::http::Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// The start of a body, without secrets and control characters.
    pub(crate) fn excerpt(&self, body: &[u8]) -> String {
        let text = self.without_secrets(&String::from_utf8_lossy(body));
        let cut: String = text.trim().chars().take(EXCERPT_CHARS).collect();
        answer::clean(&cut).trim().to_owned()
    }

    /// Removes secrets from a text, because a peer may send back what it received.
    pub(crate) fn without_secrets(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for secret in &self.secrets {
            if text.contains(secret) {
                text = text.replace(secret, "…");
            }
        }
        text
    }
}

fn uri(config: &HttpConfig) -> Result<Uri, String> {
    let address = &config.address;
    let scheme = if address.tls { "https" } else { "http" };
    let (open, close) = if address.host.contains(':') {
        ("[", "]")
    } else {
        ("", "")
    };
    // Omits the default port: some receivers compare the Host header with their name.
    let port = match (address.tls, address.port) {
        (true, 443) | (false, 80) => String::new(),
        (_, port) => format!(":{port}"),
    };
    let uri = format!("{scheme}://{open}{}{close}{port}{}", address.host, address.path).parse();
    uri.map_err(|_| "the URL cannot be used".to_owned())
}

/// The value of `Authorization`, and those parts of it that are secret.
fn credentials(auth: &HttpAuth) -> Result<Option<(String, Vec<String>)>, String> {
    match auth {
        HttpAuth::None => Ok(None),
        HttpAuth::Bearer(token) => {
            let token = token.reveal();
            if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
                return Err("the token must be visible ASCII".to_owned());
            }
            Ok(Some((format!("Bearer {token}"), vec![token.to_owned()])))
        }
        HttpAuth::Basic { user, password } => {
            // RFC 7617, section 2: the first colon ends the user.
            if user.contains(':') || user.chars().chain(password.reveal().chars()).any(char::is_control) {
                return Err(
                    "the user must not contain a colon, and user and password must not contain control characters"
                        .to_owned(),
                );
            }
            let coded = STANDARD.encode(format!("{user}:{}", password.reveal()));
            Ok(Some((
                format!("Basic {coded}"),
                vec![coded, password.reveal().to_owned()],
            )))
        }
    }
}

/// Refuses credentials that could never be sent, and returns the option at fault. No text repeats a secret, nor the
/// name of a header, which may be one by mistake.
pub(crate) fn check_credentials(
    auth: &HttpAuth,
    signing_secrets: &[Secret],
    headers: &[(String, Secret)],
) -> Result<(), (&'static str, String)> {
    let name = match auth {
        HttpAuth::Basic { .. } => "user",
        _ => "bearer_token",
    };
    credentials(auth).map_err(|why| (name, why))?;
    Signer::new(signing_secrets).map_err(|why| ("signing_secret", why))?;
    let refused = |why: String| Err(("headers", why));
    let is_bad = |secret: &Secret| secret.reveal().trim().is_empty() || header_value(secret.reveal()).is_none();
    if headers.iter().any(|(_, secret)| is_bad(secret)) {
        return refused("a value is empty, or has a line break or another control character".to_owned());
    }
    let bytes: usize = headers
        .iter()
        .map(|(name, secret)| name.len() + secret.reveal().len() + 4)
        .sum();
    if bytes > SECRET_HEADERS_BYTES_MAX {
        return refused(format!(
            "they take {bytes} bytes; the limit is {SECRET_HEADERS_BYTES_MAX}"
        ));
    }
    match auth {
        HttpAuth::None => Ok(()),
        _ if headers.iter().all(|(name, _)| name != AUTHORIZATION.as_str()) => Ok(()),
        _ => refused("Authorization is also made of the other options".to_owned()),
    }
}

fn user_agent(connection_name: &str) -> HeaderValue {
    let name: String = connection_name
        .chars()
        .filter(|c| (c.is_ascii_graphic() && !matches!(c, '(' | ')' | '\\')) || *c == ' ')
        .take(100)
        .collect();
    let product = concat!("outbox/", env!("CARGO_PKG_VERSION"));
    let text = if name.is_empty() {
        product.to_owned()
    } else {
        format!("{product} ({name})")
    };
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("outbox"))
}

/// The name in lower case: HTTP ignores the case of header names.
fn header_name(name: &str) -> Result<HeaderName, String> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| {
        let shown: String = name.chars().take(50).collect();
        format!("\"{}\" is not a valid header name", answer::clean(&shown))
    })
}

/// UTF-8 text without control characters, and so without line breaks.
fn header_value(text: &str) -> Option<HeaderValue> {
    HeaderValue::from_bytes(text.as_bytes()).ok()
}

fn text_of(value: &Value) -> String {
    match value {
        Value::Text(text) => text.to_string(),
        Value::Int(int) => int.to_string(),
        Value::Float(float) => float.to_string(),
        Value::Bool(bool) => bool.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Properties, Secret};
    use proptest::prelude::*;

    fn config() -> HttpConfig {
        HttpConfig::new(crate::parse_http_url("http://h:81/a?b").unwrap())
    }

    fn message(headers: Vec<(&str, Value)>) -> Publication {
        Publication {
            handle: 1,
            address: crate::Text::default(),
            key: None,
            properties: Properties {
                message_id: "id-1".into(),
                content_type: "application/json".into(),
                headers: headers
                    .into_iter()
                    .map(|(name, value)| (name.to_owned().into(), value))
                    .collect(),
                ..Properties::default()
            },
            body: b"body".to_vec(),
        }
    }

    fn built(config: &HttpConfig, message: &Publication) -> Result<Vec<(String, String)>, String> {
        let endpoint = RequestBuilder::new(config)?;
        let request = endpoint.request(message, 1_700_000_000)?;
        assert_eq!(
            (request.method().as_str(), *request.body()),
            ("POST", &message.body[..])
        );
        let text = |value: &HeaderValue| String::from_utf8(value.as_bytes().to_vec()).unwrap();
        let headers = request.headers().iter();
        let mut headers: Vec<_> = headers.map(|(name, value)| (name.to_string(), text(value))).collect();
        headers.sort();
        Ok(headers)
    }

    fn text(text: &str) -> Value {
        Value::Text(text.to_owned().into())
    }

    #[test]
    fn a_message_becomes_a_request_with_its_headers() {
        let config = HttpConfig {
            connection_name: "outbox: server-1 (x)\r\n".into(),
            auth: HttpAuth::Basic {
                user: "Aladdin".into(),
                password: Secret::new("open sesame"),
            },
            ..config()
        };
        let message = message(vec![
            ("Seq", Value::Int(-5)),
            ("ratio", Value::Float(0.5)),
            ("Flag", Value::Bool(true)),
            ("name", text("Zoë\t1")),
            ("Authorization", text("forged")),
            ("webhook-id", text("forged")),
            ("Transfer-Encoding", text("chunked")),
            ("content-length", Value::Int(0)),
            ("Host", text("evil")),
            ("Expect", text("100-continue")),
        ]);
        let agent = concat!("outbox/", env!("CARGO_PKG_VERSION"), " (outbox: server-1 x)");
        let expected = [
            ("authorization", "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="), // RFC 7617
            ("content-type", "application/json"),
            ("flag", "true"),
            ("idempotency-key", "id-1"),
            ("name", "Zoë\t1"),
            ("ratio", "0.5"),
            ("seq", "-5"),
            ("user-agent", agent),
            ("webhook-id", "id-1"),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(built(&config, &message).unwrap(), expected);
    }

    #[test]
    fn a_signed_message_carries_the_time_and_every_signature() {
        let secret = |byte| Secret::new(format!("whsec_{}", STANDARD.encode([byte; 24])));
        let config = HttpConfig {
            signing_secrets: vec![secret(1), secret(2)],
            ..config()
        };
        let headers = built(&config, &message(Vec::new())).unwrap();
        let value = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
        assert_eq!(value("webhook-timestamp"), Some("1700000000"));
        let signer = Signer::new(&config.signing_secrets).unwrap();
        let expected = signer.sign("id-1", 1_700_000_000, b"body");
        assert_eq!(value("webhook-signature"), Some(expected.as_str()));
        let mut dotted = message(Vec::new());
        dotted.properties.message_id = "a.1".into();
        assert!(built(&config, &dotted).unwrap_err().contains("full stop"));
        assert!(
            built(&super::tests::config(), &dotted).is_ok(),
            "an unsigned message may have any id"
        );
    }

    #[test]
    fn the_error_names_the_header_that_cannot_be_sent() {
        let many = (0..33_000).map(|n| (format!("{n:x}"), text(""))).collect::<Vec<_>>();
        let many: Vec<_> = many
            .iter()
            .map(|(name, value)| (name.as_str(), value.clone()))
            .collect();
        for (headers, expected) in [
            (vec![("a b", text("v"))], "\"a b\""),
            (vec![("", text("v"))], "\"\""),
            (vec![("ü", text("v"))], "\"ü\""),
            (vec![("x\r\ny", text("v"))], "\"x  y\""),
            (vec![("x", text("v\r\nhost: evil"))], "value of x"),
            (vec![("x", text("v\0"))], "value of x"),
            (vec![("x", text("v\u{7f}"))], "value of x"),
            (vec![("a", text("v")), ("A", text("v"))], "two headers"),
            (vec![("x", text(&"v".repeat(HEADERS_BYTES_MAX)))], "bytes"),
            (many, "headers"),
        ] {
            let error = built(&config(), &message(headers)).unwrap_err();
            assert!(error.contains(expected) && error.len() < 200, "{error}");
        }
        let mut nameless = message(Vec::new());
        nameless.properties.message_id.clear();
        assert!(built(&config(), &nameless).unwrap_err().contains("no id"));
    }

    #[test]
    fn an_excerpt_shows_no_secret_and_no_control_character() {
        let config = HttpConfig {
            address: crate::parse_http_url("http://h/services/T00/B00/XYZ").unwrap(),
            auth: HttpAuth::Basic {
                user: "u".into(),
                password: Secret::new("hunter2"),
            },
            signing_secrets: vec![Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")],
            ..config()
        };
        let endpoint = RequestBuilder::new(&config).unwrap();
        let echo = b"\x1b[31mBasic dTpodW50ZXIy\nhunter2\xff /services/T00/B00/XYZ MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw!";
        assert_eq!(endpoint.excerpt(echo), "[31mBasic … …\u{fffd} … …!");
        assert_eq!(endpoint.excerpt(&[b'x'; 1000]).len(), EXCERPT_CHARS);
    }

    proptest! {
        #[test]
        fn no_message_can_add_a_line_to_the_headers(name in "[\\s\\S]{0,8}", value in "[\\s\\S]{0,20}", id in "[\\s\\S]{0,8}", kind in "[\\s\\S]{0,8}") {
            let mut message = message(vec![(&name, text(&value))]);
            message.properties.message_id = id;
            message.properties.content_type = kind.into();
            if let Ok(headers) = built(&config(), &message) {
                for (name, value) in headers {
                    prop_assert!(name.bytes().all(|b| b.is_ascii_graphic() && !b.is_ascii_uppercase() && b != b':'));
                    prop_assert!(!value.bytes().any(|b| b < 0x20 && b != b'\t'));
                }
            }
        }
    }
}
