//! Access control: the listen address, the Host header, the site that a request comes from, secrets and sessions. Every
//! request but that of /healthz passes `guard` before any handler.

use super::base::BasePath;
use super::connections::CLIENT_PATIENCE;
use super::proxy::{PeerAddress, TrustedProxy};
use crate::failure::{Code, Failure};
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};
use lru::LruCache;
use outbox_transport::{SecretFileError, read_secret_file};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;
use tokio::time::{sleep, timeout};

/// A shorter secret could be guessed.
const SECRET_MIN_BYTES: usize = 16;
/// The next secret is checked this long after a wrong one, from whichever address: twenty guesses a second. Requests
/// with a secret take turns, so that one with a right secret waits a few seconds at most.
const WRONG_SECRET_PAUSE: Duration = Duration::from_millis(50);
const SESSION_IDLE_MAX: Duration = Duration::from_secs(12 * 3600);
/// The session that was not used for the longest time ends if there are more.
const SESSIONS_MAX: NonZeroUsize = NonZeroUsize::new(1000).expect("not zero");

/// No resources from other origins, and nothing inline: a payload or an error can never become script or style.
/// The links of a page are relative to its `base` element, which is of this origin.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
     connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'self'";

/// The longest form: the most messages that can be selected.
const FORM_MAX_BYTES: usize = 128 * 1024;

/// Paths without a login: what the login page itself needs.
const PUBLIC: [&str; 4] = ["/login", "/style.css", "/app.js", "/icon.svg"];

/// The authenticated viewer. Every handler behind `guard` gets it.
#[derive(Clone, Debug)]
pub struct Viewer {
    /// The user whom the proxy names. `None` = the token, or no access control.
    pub name: Option<String>,
    /// Whether there is a session to log out of.
    pub logged_in: bool,
    pub may_act: bool,
    /// The token that a form with an action must contain.
    pub form_token: String,
}

impl Viewer {
    /// Refuses an action of a viewer who may not act, and a form that is not of this viewer's session.
    pub fn check(&self, form_token: Option<&str>) -> Result<(), Failure> {
        if !self.may_act {
            let read_only = Failure::new(Code::Refused, "this monitor is read-only");
            return Err(read_only.hint("Start it with --allow-actions"));
        }
        let is_own = |token: &str| bool::from(token.as_bytes().ct_eq(self.form_token.as_bytes()));
        if !form_token.is_none_or(is_own) {
            let foreign = Failure::new(Code::Refused, "the form is from another session");
            return Err(foreign.hint("Open the page again and resend it"));
        }
        Ok(())
    }
}

pub struct Access {
    /// None: every client that reaches the port may look, as on loopback.
    token: Option<String>,
    /// The proxy that signs users in.
    proxy: Option<TrustedProxy>,
    allow_actions: bool,
    hosts: Vec<String>,
    cookie: String,
    cookie_path: String,
    open_form_token: String,
    /// The token of the forms of each user of the proxy.
    proxy_form_tokens: Mutex<LruCache<String, String>>,
    /// The sessions of viewers and when each was last seen, by the value of the cookie.
    sessions: Mutex<LruCache<String, (Viewer, Instant)>>,
    /// Held by the request whose secret is checked.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Access {
    pub fn new(
        token_file: Option<&Path>,
        proxy: Option<TrustedProxy>,
        listen: SocketAddr,
        allow_actions: bool,
        hosts: &[String],
        base: &BasePath,
    ) -> Result<Self, Failure> {
        let token = token_file.map(read_token).transpose()?;
        if token.is_none() && !listen.ip().is_loopback() {
            let open = Failure::new(Code::Refused, format!("{listen} can be reached from other machines"));
            return Err(open.hint("Give --token-file, or listen at 127.0.0.1."));
        }
        Ok(Self {
            token,
            proxy,
            allow_actions,
            hosts: hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
            // Cookies do not distinguish ports: two monitors on one host must not log each other out.
            cookie: format!("outbox_session_{}", listen.port()),
            // Nor two at different paths of one proxy.
            cookie_path: match base.as_str() {
                "" => "/".to_owned(),
                base => base.to_owned(),
            },
            open_form_token: random_token(),
            proxy_form_tokens: Mutex::new(LruCache::new(SESSIONS_MAX)),
            sessions: Mutex::new(LruCache::new(SESSIONS_MAX)),
            turn: Arc::default(),
        })
    }

    pub fn asks_for_secret(&self) -> bool {
        self.token.is_some()
    }

    /// A new session for the token: the value of the Set-Cookie header.
    pub async fn login(&self, secret: &str, headers: &HeaderMap) -> Option<String> {
        if !self.is_token(secret).await {
            return None;
        }
        let id = random_token();
        let viewer = self.viewer_of_token(self.allow_actions);
        self.sessions().put(id.clone(), (viewer, Instant::now()));
        // Behind a proxy with TLS only the browser knows that the connection is secure.
        let is_tls = text(headers, &header::ORIGIN).is_some_and(|origin| origin.starts_with("https://"));
        let secure = if is_tls { "; Secure" } else { "" };
        let (name, path) = (&self.cookie, &self.cookie_path);
        Some(format!("{name}={id}; Path={path}; HttpOnly; SameSite=Strict{secure}"))
    }

    /// Ends the session: the value of the Set-Cookie header.
    pub fn logout(&self, headers: &HeaderMap) -> String {
        if let Some(id) = self.session_id(headers) {
            self.sessions().pop(id);
        }
        let (name, path) = (&self.cookie, &self.cookie_path);
        format!("{name}=; Path={path}; HttpOnly; SameSite=Strict; Max-Age=0")
    }

    /// The user whom the proxy names. The name counts more than a token or a session. Err: why the request is refused.
    fn viewer_of_proxy(&self, headers: &HeaderMap, peer: Option<PeerAddress>) -> Result<Option<Viewer>, &'static str> {
        let named = self.proxy.as_ref().map(|proxy| proxy.user(headers, peer)).transpose()?;
        let Some(name) = named.flatten() else {
            return Ok(None);
        };
        let mut tokens = self.proxy_form_tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let form_token = tokens.get_or_insert(name.to_owned(), random_token).clone();
        Ok(Some(Viewer {
            name: Some(name.to_owned()),
            logged_in: false,
            may_act: self.allow_actions,
            form_token,
        }))
    }

    async fn viewer(&self, headers: &HeaderMap) -> Option<Viewer> {
        if self.token.is_none() {
            return self.proxy.is_none().then(|| Viewer {
                name: None,
                logged_in: false,
                may_act: self.allow_actions,
                form_token: self.open_form_token.clone(),
            });
        }
        let authorization = text(headers, &header::AUTHORIZATION).and_then(|value| value.split_once(' '));
        if let Some((_, secret)) = authorization.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer")) {
            // For programs. They need no form token, because they do not submit forms.
            return self.is_token(secret.trim()).await.then(|| self.viewer_of_token(false));
        }
        self.viewer_of_session(self.session_id(headers)?)
    }

    /// The viewer of a session that goes on; this is a use of it.
    pub fn viewer_of_session(&self, id: &str) -> Option<Viewer> {
        let mut sessions = self.sessions();
        let (viewer, seen) = sessions.get_mut(id)?;
        if seen.elapsed() >= SESSION_IDLE_MAX {
            return None;
        }
        *seen = Instant::now();
        Some(viewer.clone())
    }

    /// The session of a request, if it has one that goes on.
    pub fn session(&self, headers: &HeaderMap) -> Option<String> {
        let id = self.session_id(headers)?;
        self.viewer_of_session(id).map(|_| id.to_owned())
    }

    fn viewer_of_token(&self, may_act: bool) -> Viewer {
        Viewer {
            name: None,
            logged_in: true,
            may_act,
            form_token: random_token(),
        }
    }

    async fn is_token(&self, secret: &str) -> bool {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let token = self.token.as_deref();
        let is_right = token.is_some_and(|token| bool::from(token.as_bytes().ct_eq(secret.as_bytes())));
        if !is_right {
            // A task: a client that leaves does not shorten the pause.
            let pause = tokio::spawn(async move {
                sleep(WRONG_SECRET_PAUSE).await;
                drop(turn);
            });
            _ = pause.await;
        }
        is_right
    }

    fn session_id<'a>(&self, headers: &'a HeaderMap) -> Option<&'a str> {
        let cookies = headers.get_all(header::COOKIE).iter();
        cookies
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(';'))
            .filter_map(|pair| pair.trim().split_once('='))
            .find(|(name, _)| *name == self.cookie)
            .map(|(_, id)| id)
    }

    fn sessions(&self) -> MutexGuard<'_, LruCache<String, (Viewer, Instant)>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A page of another site may resolve its own name to our address (DNS rebinding). It cannot do that with a numeric
    /// address, nor with localhost.
    fn knows_host(&self, host: &str) -> bool {
        let name = name_and_port(host).0.to_ascii_lowercase();
        name == "localhost" || name.parse::<IpAddr>().is_ok() || self.hosts.contains(&name)
    }
}

/// Before every handler: checks the host, the site that the request comes from and the viewer, and reads the form.
/// After it: adds the headers that protect a browser.
pub async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let answer = match admit(&access, &parts).await {
        Err(refusal) => refusal,
        Ok(viewer) => match timeout(CLIENT_PATIENCE, to_bytes(body, FORM_MAX_BYTES)).await {
            Err(_) => (StatusCode::REQUEST_TIMEOUT, "The form did not arrive in time.\n").into_response(),
            Ok(Err(_)) => (StatusCode::PAYLOAD_TOO_LARGE, "The form is too large.\n").into_response(),
            Ok(Ok(form)) => {
                if let Some(viewer) = viewer {
                    parts.extensions.insert(viewer);
                }
                next.run(Request::from_parts(parts, Body::from(form))).await
            }
        },
    };
    with_safe_headers(answer)
}

#[allow(clippy::result_large_err)] // made once for each request, and only if it is refused
async fn admit(access: &Access, request: &Parts) -> Result<Option<Viewer>, Response> {
    let (headers, path) = (&request.headers, request.uri.path());
    let host = text(headers, &header::HOST).unwrap_or_default();
    if !access.knows_host(host) {
        let said = "This monitor does not serve that host name. To allow it, start the monitor with --allow-host.\n";
        return Err((StatusCode::MISDIRECTED_REQUEST, said).into_response());
    }
    let changes = !matches!(request.method, Method::GET | Method::HEAD);
    let may_come = match RequestOrigin::of(headers, host) {
        RequestOrigin::Own => true,
        RequestOrigin::User => !changes,
        // Of a program, or of a browser that does not tell. Actions and counts are for forms of this monitor only.
        RequestOrigin::Unknown => !changes && !path.starts_with("/act/"),
        RequestOrigin::OtherSite => !changes && is_page(path) && is_followed_link(headers),
    };
    if !may_come {
        let said = "The request comes from another site. Open the page in this monitor.\n";
        return Err((StatusCode::FORBIDDEN, said).into_response());
    }
    let peer = request.extensions.get().copied();
    let of_proxy = access.viewer_of_proxy(headers, peer);
    let viewer = match of_proxy.map_err(|why| (StatusCode::FORBIDDEN, why).into_response())? {
        None => access.viewer(headers).await,
        named => named,
    };
    if viewer.is_none() && !PUBLIC.contains(&path) {
        if !access.asks_for_secret() {
            let said = "This monitor knows users by the proxy that signs them in: open it there.\n";
            return Err((StatusCode::FORBIDDEN, said).into_response());
        }
        let wants_page = text(headers, &header::ACCEPT).is_some_and(|accept| accept.contains("text/html"));
        return Err(if wants_page && !changes {
            let to = request.uri.path_and_query().map_or("/", |to| to.as_str());
            let base = request.extensions.get::<BasePath>().cloned().unwrap_or_default();
            Redirect::to(&base.to(&format!("login?to={}", super::format::encode(to)))).into_response()
        } else {
            let ask = [(header::WWW_AUTHENTICATE, "Bearer realm=\"outbox\"")];
            (StatusCode::UNAUTHORIZED, ask, "Log in, or send the token as Bearer.\n").into_response()
        });
    }
    Ok(viewer)
}

fn with_safe_headers(mut answer: Response) -> Response {
    let headers = answer.headers_mut();
    let mut set = |name: HeaderName, value: &'static str| {
        headers.insert(name, HeaderValue::from_static(value));
    };
    set(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY);
    set(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(header::X_FRAME_OPTIONS, "DENY");
    // Not no-referrer: with that a browser sends Origin: null with a form, and RequestOrigin::of() would call that
    // another site.
    set(header::REFERRER_POLICY, "same-origin");
    set(HeaderName::from_static("cross-origin-opener-policy"), "same-origin");
    set(HeaderName::from_static("cross-origin-resource-policy"), "same-origin");
    headers
        .entry(header::CACHE_CONTROL)
        .or_insert(HeaderValue::from_static("no-store"));
    answer
}

/// Where a request comes from, as its browser says.
#[derive(Debug, PartialEq, Eq)]
enum RequestOrigin {
    /// A page of this monitor.
    Own,
    /// The address bar, a bookmark, another program of the user.
    User,
    /// Also the page of another port of this host.
    OtherSite,
    Unknown,
}

impl RequestOrigin {
    /// Browsers send Sec-Fetch-Site over HTTPS and to loopback, and Origin with a form. A page of this monitor sends
    /// its Referer too. Another site can suppress only the Referer.
    fn of(headers: &HeaderMap, host: &str) -> Self {
        let fetch_site = text(headers, &HeaderName::from_static("sec-fetch-site"));
        let is_own = |header: &HeaderName| {
            let (scheme, rest) = text(headers, header)?.split_once("://").unwrap_or_default();
            let (name, port) = name_and_port(rest.split('/').next().unwrap_or_default());
            let (own_name, own_port) = name_and_port(host);
            let default = if scheme == "https" { "443" } else { "80" };
            let port_of = |port| if str::is_empty(port) { default } else { port };
            // Some proxies leave out a port that the browser has. Then only the browser can tell other ports of this host.
            let is_left_out = own_port.is_empty() && fetch_site == Some("same-origin");
            Some(name.eq_ignore_ascii_case(own_name) && (is_left_out || port_of(port) == port_of(own_port)))
        };
        match (fetch_site, is_own(&header::ORIGIN)) {
            (_, Some(false)) => Self::OtherSite,
            (Some("same-origin"), _) | (None, Some(true)) => Self::Own,
            (Some("none"), _) => Self::User,
            (Some(_), _) => Self::OtherSite,
            (None, None) if is_own(&header::REFERER) == Some(true) => Self::Own,
            (None, None) => Self::Unknown,
        }
    }
}

/// The pages to which another site may link, such as a ticket or a runbook. They show, and their cost is bounded.
fn is_page(path: &str) -> bool {
    let of_message = path.strip_prefix("/message/").is_some_and(|seq| !seq.contains('/'));
    of_message
        || matches!(
            path,
            "/" | "/audit" | "/destinations" | "/login" | "/messages" | "/partitions" | "/workers"
        )
}

/// Whether the browser goes to another page, which ends the page of the other site: one request at a time. Images,
/// frames, scripts and loading in advance can be many.
fn is_followed_link(headers: &HeaderMap) -> bool {
    let is = |name: &'static str, value: &str| text(headers, &HeaderName::from_static(name)) == Some(value);
    is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document") && !headers.contains_key("sec-purpose")
}

/// The address to listen at; a name is resolved once.
pub fn listen_address(text: &str) -> Result<SocketAddr, Failure> {
    let found = text.to_socket_addrs().ok().and_then(|mut found| found.next());
    found.ok_or_else(|| {
        Failure::new(Code::Usage, format!("cannot listen at \"{text}\""))
            .hint("Give an address and a port, such as 127.0.0.1:8080.")
    })
}

/// An address of IPv6 without its brackets. No port is an empty text.
fn name_and_port(host: &str) -> (&str, &str) {
    let (name, port) = host
        .rsplit_once(':')
        .filter(|(_, port)| !port.ends_with(']'))
        .unwrap_or((host, ""));
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    (address.unwrap_or(name), port)
}

/// The first line of a file that is private.
fn read_token(path: &Path) -> Result<String, Failure> {
    let shown = path.display();
    let content = read_secret_file(path).map_err(|error| match error {
        SecretFileError::Unreadable(error) => Failure::new(Code::Usage, format!("cannot read {shown}: {error}")),
        SecretFileError::Exposed { why, remedy } => {
            Failure::new(Code::Refused, format!("{shown} {why}")).hint(format!("{remedy} {shown}"))
        }
    })?;
    let text = String::from_utf8(content)
        .map_err(|_| Failure::new(Code::Usage, format!("the token in {shown} is not UTF-8")))?;
    let token = text.lines().next().unwrap_or_default().trim();
    if token.len() < SECRET_MIN_BYTES {
        let short = format!("the token in {shown} has fewer than {SECRET_MIN_BYTES} bytes");
        return Err(Failure::new(Code::Usage, short).hint("Make one with: openssl rand -hex 32"));
    }
    Ok(token.to_owned())
}

/// 256 random bits.
fn random_token() -> String {
    let mut bytes = [0; 32];
    let random = rustls::crypto::ring::default_provider().secure_random;
    random.fill(&mut bytes).expect("the kernel gives random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| {
                let name: HeaderName = name.parse().unwrap();
                (name, HeaderValue::from_str(value).unwrap())
            })
            .collect()
    }

    fn local() -> SocketAddr {
        "127.0.0.1:8080".parse().unwrap()
    }

    #[test]
    fn only_loopback_goes_without_a_secret() {
        let open = |listen: &str| Access::new(None, None, listen.parse().unwrap(), false, &[], &BasePath::default());
        assert!(open("127.0.0.1:0").is_ok());
        assert!(open("[::1]:0").is_ok());
        for listen in ["0.0.0.0:8080", "[::]:8080", "10.0.0.5:8080"] {
            assert_eq!(open(listen).err().unwrap().code, Code::Refused, "{listen}");
        }
    }

    #[test]
    fn a_host_is_numbers_localhost_or_named() {
        let access = Access::new(
            None,
            None,
            local(),
            false,
            &["Monitor.example".into()],
            &BasePath::default(),
        )
        .unwrap();
        for host in [
            "127.0.0.1:8080",
            "localhost",
            "[::1]:8080",
            "10.0.0.5",
            "monitor.EXAMPLE:80",
        ] {
            assert!(access.knows_host(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example:8080",
            "127.0.0.1.evil.example",
            "[evil]",
        ] {
            assert!(!access.knows_host(host), "{host}");
        }
    }

    #[test]
    fn a_request_comes_from_where_its_browser_says() {
        let source = |pairs: &[(&str, &str)]| RequestOrigin::of(&headers(pairs), "localhost:8080");
        let (own, fetch_site) = (("origin", "http://localhost:8080"), "sec-fetch-site");
        assert_eq!(source(&[own]), RequestOrigin::Own);
        assert_eq!(
            source(&[("origin", "https://localhost:8080"), (fetch_site, "same-origin")]),
            RequestOrigin::Own
        );
        assert_eq!(
            source(&[("referer", "http://localhost:8080/messages?q=a")]),
            RequestOrigin::Own
        );
        assert_eq!(source(&[(fetch_site, "none")]), RequestOrigin::User);
        assert_eq!(source(&[]), RequestOrigin::Unknown);
        assert_eq!(source(&[("referer", "http://wiki.example/")]), RequestOrigin::Unknown);
        for other in [
            &[("origin", "null")][..],
            &[("origin", "http://localhost:8081")],
            &[("origin", "http://evil.example")],
            &[("origin", "http://evil.example"), (fetch_site, "same-origin")],
            &[own, (fetch_site, "same-site")],
            &[own, (fetch_site, "cross-site")],
            &[("referer", "http://localhost:8080/"), (fetch_site, "cross-site")],
        ] {
            assert_eq!(source(other), RequestOrigin::OtherSite, "{other:?}");
        }
    }

    #[test]
    fn a_port_that_a_proxy_or_a_browser_leaves_out_is_that_of_the_scheme() {
        let source = |host: &str, origin: &str, more: &[(&str, &str)]| {
            RequestOrigin::of(&headers(&[&[("origin", origin)], more].concat()), host)
        };
        let same = &[("sec-fetch-site", "same-origin")][..];
        for (host, origin, more) in [
            ("monitor.example:443", "https://monitor.example", &[][..]),
            ("monitor.example", "https://monitor.example:443", &[]),
            ("monitor.example:80", "http://monitor.example", &[]),
            ("[::1]", "http://[::1]:80", &[]),
            ("monitor.example", "https://monitor.example:8443", same),
        ] {
            assert_eq!(source(host, origin, more), RequestOrigin::Own, "{host} {origin}");
        }
        for (host, origin, more) in [
            ("monitor.example", "http://monitor.example:8081", &[][..]),
            ("monitor.example", "https://monitor.example:80", &[]),
            ("monitor.example:80", "https://monitor.example", same),
            ("monitor.example:8080", "http://monitor.example:8081", same),
            ("monitor.example", "https://evil.example", same),
            ("monitor.example", "https://evil.example:8443", same),
            (
                "monitor.example",
                "https://monitor.example:8443",
                &[("sec-fetch-site", "same-site")],
            ),
        ] {
            assert_eq!(source(host, origin, more), RequestOrigin::OtherSite, "{host} {origin}");
        }
    }

    const TOKEN: &str = "fedcba9876543210";

    fn with_token(base: &BasePath) -> Access {
        let access = Access::new(None, None, local(), true, &[], base).unwrap();
        Access {
            token: Some(TOKEN.to_owned()),
            ..access
        }
    }

    #[tokio::test]
    async fn a_session_lasts_from_login_to_logout() {
        let access = with_token(&BasePath::default());
        let none = HeaderMap::new();
        assert!(access.viewer(&none).await.is_none());
        assert!(access.login("fedcba987654321", &none).await.is_none());
        let cookie = access.login(TOKEN, &none).await.unwrap();
        assert!(
            cookie.contains("; Path=/; HttpOnly; SameSite=Strict") && !cookie.contains("Secure"),
            "{cookie}"
        );
        // Another monitor behind the same proxy has a cookie of its own.
        let base = BasePath::parse("/ops/outbox").unwrap();
        let below = with_token(&base);
        let cookie_below = below.login(TOKEN, &none).await.unwrap();
        assert!(cookie_below.contains("; Path=/ops/outbox; "), "{cookie_below}");
        assert!(below.logout(&none).contains("; Path=/ops/outbox; "));
        let sent = headers(&[("cookie", cookie.split(';').next().unwrap())]);
        assert!(access.viewer(&sent).await.unwrap().may_act);
        for scheme in ["Bearer", "bearer", "BEARER"] {
            let program = headers(&[("authorization", &format!("{scheme} {TOKEN}"))]);
            assert!(!access.viewer(&program).await.unwrap().may_act, "{scheme}");
        }
        access.logout(&sent);
        assert!(access.viewer(&sent).await.is_none());
        let tls = headers(&[("origin", "https://monitor.example")]);
        assert!(access.login(TOKEN, &tls).await.unwrap().ends_with("; Secure"));
    }

    /// Otherwise a client could leave after each guess that is not answered in time.
    #[tokio::test]
    async fn the_pause_after_a_wrong_secret_lasts_although_its_client_leaves() {
        let access = with_token(&BasePath::default());
        let none = HeaderMap::new();
        let began = Instant::now();
        let left = timeout(Duration::ZERO, access.login("fedcba9876543211", &none)).await;
        assert!(left.is_err());
        assert!(access.login(TOKEN, &none).await.is_some());
        assert!(began.elapsed() >= WRONG_SECRET_PAUSE);
    }
}
