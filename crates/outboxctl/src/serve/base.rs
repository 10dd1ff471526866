//! The path under which a proxy shows this monitor, such as `/ops/outbox`. The pages write their own paths from `/` on;
//! the base path is inserted into links as the answer is sent.

use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderValue, Request, header};
use axum::middleware::Next;
use axum::response::Response;

/// Attributes with links. Quotes in text and in values are escaped, so text from elsewhere cannot look like one.
const LEADING: [&str; 3] = [" href=\"", " src=\"", " action=\""];
/// The first words of our own paths, with which no base path may begin.
const OWN: &str =
    "act app.js audit destinations events icon.svg login logout message messages metrics partitions style.css workers";

/// Empty, or `/` and words between slashes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BasePath(String);

impl BasePath {
    pub fn parse(text: &str) -> Result<Self, String> {
        let path = text.trim_end_matches('/');
        if path.is_empty() {
            return Ok(Self::default());
        }
        let is_plain = |word: &str| {
            !matches!(word, "" | "." | "..") && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~".contains(&b))
        };
        let Some(rest) = path.strip_prefix('/').filter(|rest| rest.split('/').all(is_plain)) else {
            return Err("give a path such as /ops/outbox, of letters, digits and - . _ ~".to_owned());
        };
        match rest.split('/').next() {
            Some(first) if OWN.split(' ').any(|own| own == first) => {
                Err(format!("/{first} is a page of the monitor itself"))
            }
            _ => Ok(Self(path.to_owned())),
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The base path of what is at `/db/WORD` below this one.
    pub fn of_database(&self, word: &str) -> Self {
        Self(format!("{}/db/{word}", self.0))
    }

    /// The markup with links below the base path.
    pub fn in_markup(&self, markup: &str) -> String {
        LEADING.iter().fold(markup.to_owned(), |markup, leading| {
            markup.replace(&format!("{leading}/"), &format!("{leading}{}/", self.0))
        })
    }

    fn in_location(&self, to: &str) -> String {
        let is_below = to.strip_prefix(&self.0).is_some_and(|rest| rest.starts_with('/'));
        match to.starts_with('/') && !is_below {
            true => format!("{}{to}", self.0),
            false => to.to_owned(),
        }
    }

    /// The request with its path from `/` on, for a proxy that passes paths on unchanged. Another proxy strips the base
    /// path.
    pub fn strip<B>(&self, mut request: Request<B>) -> Request<B> {
        let path = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
        let below = path
            .strip_prefix(&self.0)
            .filter(|rest| rest.is_empty() || rest.starts_with(['/', '?']));
        let below = below.map(|rest| format!("/{}", rest.strip_prefix('/').unwrap_or(rest)));
        if let Some(Ok(uri)) = below.map(|path| path.parse()) {
            *request.uri_mut() = uri;
        }
        request
    }
}

/// Inserts the base path into the links of an answer.
pub async fn rebased(Extension(base): Extension<BasePath>, request: Request<Body>, next: Next) -> Response {
    let (mut head, body) = next.run(request).await.into_parts();
    let text = |value: &HeaderValue| value.to_str().map(str::to_owned).ok();
    if let Some(to) = head.headers.get(header::LOCATION).and_then(text)
        && let Ok(to) = HeaderValue::from_str(&base.in_location(&to))
    {
        head.headers.insert(header::LOCATION, to);
    }
    let kind = head.headers.get(header::CONTENT_TYPE).and_then(text);
    if !kind.is_some_and(|kind| kind.starts_with("text/html")) {
        return Response::from_parts(head, body); // the parts of the event stream are made with their links
    }
    head.headers.remove(header::CONTENT_LENGTH);
    let markup = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let markup = base.in_markup(&String::from_utf8_lossy(&markup));
    Response::from_parts(head, Body::from(markup))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> BasePath {
        BasePath::parse("/ops/outbox/").unwrap()
    }

    #[test]
    fn a_base_path_is_plain_and_not_a_path_of_the_monitor() {
        assert_eq!(BasePath::parse(""), Ok(BasePath::default()));
        assert_eq!(BasePath::parse("/"), Ok(BasePath::default()));
        assert_eq!(base().as_str(), "/ops/outbox");
        for text in [
            "ops",
            "//ops",
            "/ops//x",
            "/../x",
            "/a b",
            "/\"",
            "/{x}",
            "/login",
            "/message/x",
        ] {
            assert!(BasePath::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_path_is_read_with_and_without_the_base_path() {
        for (path, wanted) in [
            ("/ops/outbox", "/"),
            ("/ops/outbox?a=b", "/?a=b"),
            ("/ops/outbox/message/1?a=b", "/message/1?a=b"),
            ("/ops/outboxes", "/ops/outboxes"),
            ("/message/1", "/message/1"),
        ] {
            let request = Request::builder().uri(path).body(()).unwrap();
            assert_eq!(base().strip(request).uri(), wanted);
        }
    }

    #[test]
    fn only_links_are_changed() {
        let markup = r#"<a href="/messages?tab=dead" title="/x"><form action="/act/bulk"><input value="/to"><b> href=&quot;/</b><a href="//x">"#;
        let changed = r#"<a href="/ops/outbox/messages?tab=dead" title="/x"><form action="/ops/outbox/act/bulk"><input value="/to"><b> href=&quot;/</b><a href="/ops/outbox//x">"#;
        assert_eq!(base().in_markup(markup), changed);
        assert_eq!(BasePath::default().in_markup(markup), markup);
        for (to, wanted) in [
            ("/", "/ops/outbox/"),
            ("/login?to=%2F", "/ops/outbox/login?to=%2F"),
            ("/ops/outbox/", "/ops/outbox/"),
            ("/ops/outboxes", "/ops/outbox/ops/outboxes"),
            ("https://elsewhere/", "https://elsewhere/"),
        ] {
            assert_eq!(base().in_location(to), wanted);
        }
    }
}
