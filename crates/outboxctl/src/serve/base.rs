//! The path under which a proxy shows this monitor, such as `/ops/outbox`. The links of a page are relative to it: the
//! `base` element of its head names it.

use axum::http::Request;
use axum::http::uri::PathAndQuery;

/// The first words of our own paths, with which no base path may begin.
const OWN: &str = "act app.js audit destinations events healthz icon.svg login logout message messages metrics \
                   partitions style.css workers";

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

    /// The path of a link: `message/1` becomes `/ops/outbox/message/1`.
    pub fn to(&self, link: &str) -> String {
        format!("{}/{link}", self.0)
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
}
