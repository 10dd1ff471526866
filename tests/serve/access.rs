//! Tests of logins and of permission to act: the program refuses, and where it does not, the database does.

use std::fs::Permissions;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::monitor::{Monitor, refused};
use super::quiet_cluster;
use support::Cluster;
use support::{DB, LONG};

pub const SECRET: &str = "a secret of more than sixteen bytes";

pub fn file(name: &str, text: &str, mode: u32) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    std::fs::write(&path, text).expect("write a file");
    std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
    path
}

/// Makes message 1 a dead letter.
pub fn dead_letter(cluster: &Cluster, database: &str) {
    cluster.exec(
        database,
        "select outbox_publish('T', '{\"card\": \"4242\"}', 'order', '1');
         insert into outbox_dead (seq, enqueued_at, attempts, partition, destination, key, reason)
           select seq, enqueued_at, 15, partition, destination, key, 'refused' from outbox;
         delete from outbox",
    );
}

pub fn dead(cluster: &Cluster, database: &str) -> i64 {
    cluster.query_one(database, "select count(*) from outbox_dead")
}

const RETRY: [(&str, &str); 3] = [("verb", "retry"), ("seq", "1"), ("destination", "default")];

pub fn retry_with(token: &str) -> Vec<(&str, &str)> {
    RETRY.into_iter().chain([("form_token", token)]).collect()
}

#[test]
fn an_insecure_or_invalid_configuration_is_refused_at_start() {
    let cluster = quiet_cluster();
    let open = file("open", SECRET, 0o644);
    let short = file("short", "short\n", 0o600);
    let open = open.to_str().expect("UTF-8");
    let short = short.to_str().expect("UTF-8");
    for (arguments, code, problem) in [
        (&["--listen", "0.0.0.0:0"][..], 5, "Give --token-file"),
        (&["--token-file", open], 5, "chmod 6"),
        (&["--token-file", short], 2, "openssl rand -hex 32"),
        (&["--listen", "nowhere"], 2, "127.0.0.1:8080"),
        (&["--dbname", "template1"], 4, "CREATE EXTENSION outbox"),
    ] {
        let output = refused(&cluster, arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(
            error.contains(problem) && !error.contains(SECRET),
            "{arguments:?}: {error}"
        );
    }
}

#[test]
fn a_token_lets_in_browsers_and_programs() {
    let cluster = quiet_cluster();
    let token = file("token", &format!("{SECRET}\n"), 0o600);
    let monitor = Monitor::start(
        &cluster,
        &["--listen", "0.0.0.0:0", "--token-file", token.to_str().expect("UTF-8")],
    );
    for path in [
        "/",
        "/messages",
        "/message/1",
        "/message/1/payload",
        "/audit",
        "/events?page=overview",
        "/metrics",
        "/act/done?verb=retry&n=1",
    ] {
        let answer = monitor.follow(path);
        assert_eq!(answer.status, 401, "{path}");
        assert!(!answer.body.contains("Overview"), "{path}: {}", answer.body);
    }
    let led = monitor.get_with("/messages?tab=dead", &[("Accept", "text/html")]);
    assert_eq!(
        (led.status, led.header("location")),
        (303, Some("/login?to=%2Fmessages%3Ftab%3Ddead"))
    );
    let bearer = |secret: &str| {
        monitor
            .get_with("/metrics", &[("Authorization", &format!("Bearer {secret}"))])
            .status
    };
    assert_eq!(bearer(SECRET), 200);
    assert_eq!(bearer("a secret of more than sixteen bytez"), 401);
    let refused = monitor.post("/login", &[], &[("secret", "wrong")]);
    assert_eq!(refused.status, 401);
    assert!(
        refused.body.contains("Wrong password.") && refused.body.contains(">Password</label>"),
        "one word for it: {}",
        refused.body
    );
    let login = monitor.post("/login", &[], &[("secret", SECRET), ("to", "//evil.example")]);
    assert_eq!((login.status, login.header("location")), (303, Some("/")));
    let cookie = login.header("set-cookie").expect("a cookie");
    assert!(cookie.contains("; HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().expect("a pair");
    let page = monitor.get_with("/", &[("Cookie", cookie)]);
    assert_eq!(page.status, 200);
    let form_token = Monitor::form_token(&page.body);
    let mut stream = TcpStream::connect(("127.0.0.1", monitor.port)).expect("connect to the monitor");
    let request = format!("GET /events?page=overview HTTP/1.0\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("ask for the stream");
    let mut first = [0; 12];
    stream.read_exact(&mut first).expect("the stream");
    assert_eq!(&first, b"HTTP/1.0 200");
    let logout = monitor.post("/logout", &[("Cookie", cookie)], &[("form_token", &form_token)]);
    assert_eq!(logout.status, 303);
    stream.set_read_timeout(Some(LONG)).expect("a timeout");
    stream
        .read_to_end(&mut Vec::new())
        .expect("the stream ends with the session");
    assert_eq!(monitor.get_with("/", &[("Cookie", cookie)]).status, 401);
}

pub const USER: &str = "X-Remote-User";

#[test]
fn a_user_whom_a_proxy_names_may_act_and_is_in_the_audit() {
    let cluster = quiet_cluster();
    dead_letter(&cluster, DB);
    let monitor = Monitor::start(&cluster, &["--allow-actions", "--trusted-user-header", USER]);
    let own = monitor.get_with("/message/1", &[(USER, "lee")]).body;
    assert!(own.contains(">lee</span>") && !own.contains("Log out"), "{own}");
    let token = Monitor::form_token(&own);
    let act_as = |headers: &[(&str, &str)]| monitor.post("/act/message", headers, &retry_with(&token)).status;
    assert_eq!(act_as(&[]), 403, "the form without the user");
    assert_eq!(act_as(&[(USER, "mallory")]), 403, "the form of another user");
    assert_eq!(dead(&cluster, DB), 1);
    assert_eq!(act_as(&[(USER, "lee")]), 303);
    assert_eq!(dead(&cluster, DB), 0);

    let longest = "k".repeat(46);
    let asked = [(USER, &*longest), ("Sec-Fetch-Site", "same-origin")];
    let token = Monitor::form_token(&monitor.get_with("/act/pause?destination=default", &asked).body);
    let pause = [("destination", "default"), ("form_token", &*token)];
    assert_eq!(monitor.post("/act/pause", &[(USER, &longest)], &pause).status, 303);
    let who: String = cluster.query_one(
        DB,
        "select string_agg(application_name, ', ' order by at) from outbox_audit",
    );
    assert_eq!(who, format!("outboxctl serve: lee, outboxctl serve: {longest}"));
}

#[test]
fn a_header_that_does_not_come_from_the_proxy_or_names_no_one_user_is_refused() {
    let cluster = quiet_cluster();
    let token = file("sso-token", &format!("{SECRET}\n"), 0o600);
    let token = token.to_str().expect("UTF-8");
    let bearer = ("Authorization", &*format!("Bearer {SECRET}"));
    let header = ["--trusted-user-header", USER];

    // The proxy is elsewhere: this client is not the proxy, whatever else it sends.
    let elsewhere = [
        "--trusted-proxy",
        "10.0.0.0/8",
        "--trusted-proxy",
        "fd00::/8",
        "--token-file",
        token,
    ];
    let monitor = Monitor::start(&cluster, &[&header[..], &elsewhere].concat());
    let status = |path: &str, headers: &[(&str, &str)]| monitor.get_with(path, headers).status;
    let forwarded = ("X-Forwarded-For", "10.0.0.1");
    for path in ["/", "/metrics", "/login", "/app.js"] {
        assert_eq!(status(path, &[(USER, "kim")]), 403, "{path}");
        assert_eq!(
            status(path, &[("x-remote-user", "kim"), bearer, forwarded]),
            403,
            "{path} with a token"
        );
    }
    assert_eq!(status("/metrics", &[bearer]), 200, "a program with the token");
    assert_eq!(status("/", &[]), 401);

    let monitor = Monitor::start(&cluster, &header);
    let status = |headers: &[(&str, &str)]| monitor.get_with("/", headers).status;
    assert_eq!(status(&[(USER, "kim")]), 200);
    assert_eq!(
        status(&[(USER, "kim"), ("Authorization", "Bearer of another service")]),
        200
    );
    for headers in [
        &[][..],
        &[bearer],
        &[(USER, "kim"), (USER, "lee")],
        &[(USER, "kim"), (USER, "kim")],
        &[(USER, "")],
        &[(USER, " ")],
        &[(USER, &"k".repeat(47))],
        &[(USER, &"k".repeat(8000))],
        &[(USER, "kim\tlee")],
        &[(USER, "größe")],
    ] {
        assert_eq!(status(headers), 403, "{headers:?}");
    }
    for control in ["kim\0", "kim\u{1b}[31m"] {
        assert_eq!(status(&[(USER, control)]), 400, "{control:?}");
    }

    for (arguments, problem) in [
        (&["--trusted-proxy", "10.0.0.0/8"][..], "--trusted-user-header"),
        (
            &["--trusted-user-header", USER, "--trusted-proxy", "proxy.example"],
            "10.1.0.0/16",
        ),
        (&["--trusted-user-header", "Cookie"], "send cookie themselves"),
        (
            &["--trusted-user-header", USER, "--listen", "0.0.0.0:0"],
            "Give --token-file",
        ),
    ] {
        let output = refused(&cluster, arguments);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && error.contains(problem),
            "{arguments:?}: {error}"
        );
    }
}

/// For health checks, which have no token and come by any name.
#[test]
fn everyone_may_ask_whether_the_process_lives_and_learns_nothing_else() {
    let cluster = quiet_cluster();
    let token = file("health-token", SECRET, 0o600);
    let arguments = [
        "--token-file",
        token.to_str().expect("UTF-8"),
        "--base-path",
        "/ops/outbox",
    ];
    let monitor = Monitor::start(&cluster, &arguments);
    for (path, host) in [("/healthz", "any.example"), ("/ops/outbox/healthz", "127.0.0.1")] {
        let answer = monitor.get_with(path, &[("Host", host)]);
        assert_eq!((answer.status, answer.body.trim()), (200, "ok"), "{path}");
        assert_eq!(answer.header("set-cookie"), None);
    }
    assert_eq!(
        support::http::ask(monitor.port, "HEAD", "/healthz", &[], "").status,
        200
    );
    assert_eq!(monitor.post("/healthz", &[], &[]).status, 405);
}

#[test]
fn only_a_form_of_the_server_itself_can_act() {
    let cluster = quiet_cluster();
    dead_letter(&cluster, DB);
    let monitor = Monitor::start(&cluster, &["--allow-actions", "--allow-host", "monitor.example"]);
    let token = Monitor::form_token(&monitor.page("/message/1"));
    let status =
        |headers: &[(&str, &str)], token: &str| monitor.post("/act/message", headers, &retry_with(token)).status;
    assert_eq!(status(&[("Origin", "http://evil.example")], &token), 403);
    assert_eq!(status(&[("Origin", "null")], &token), 403);
    assert_eq!(status(&[("Sec-Fetch-Site", "cross-site")], &token), 403);
    assert_eq!(status(&[], "guessed"), 403);
    // A host name that was made to resolve to this server (DNS rebinding).
    assert_eq!(
        status(&[("Host", "evil.example"), ("Origin", "http://evil.example")], &token),
        421
    );
    assert_eq!(monitor.get_with("/", &[("Host", "evil.example")]).status, 421);
    assert_eq!(monitor.get_with("/", &[("Host", "monitor.example")]).status, 200);
    assert_eq!(dead(&cluster, DB), 1);
    assert_eq!(status(&[], &token), 303);
    assert_eq!(dead(&cluster, DB), 0);
    // A proxy with TLS on the usual port. It may name the port or not, and so may the browser.
    for (host, origin) in [
        ("monitor.example:443", "https://monitor.example"),
        ("monitor.example", "https://monitor.example:443"),
    ] {
        let headers = [("Host", host), ("Origin", origin)];
        assert_ne!(status(&headers, &token), 403, "{host} {origin}");
        assert_eq!(status(&headers, "guessed"), 403, "{host} {origin}");
    }
}

const LINK: [(&str, &str); 3] = [
    ("Sec-Fetch-Site", "cross-site"),
    ("Sec-Fetch-Mode", "navigate"),
    ("Sec-Fetch-Dest", "document"),
];

/// A hostile page in the browser of an operator, also one that another port of this host serves.
#[test]
fn another_site_can_link_to_a_page_and_start_nothing() {
    let cluster = quiet_cluster();
    dead_letter(&cluster, DB);
    cluster.set_conf("log_statement", "all");
    let from = cluster.log_offset();
    let monitor = Monitor::start(&cluster, &["--allow-actions", "--base-path", "/ops/outbox"]);
    let status = |path: &str, headers: &[(&str, &str)]| monitor.get_with(path, headers).status;
    let image = [("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "image")];
    let in_advance = [&LINK[..], &[("Sec-Purpose", "prefetch;prerender")]].concat();
    let frame = [LINK[0], LINK[1], ("Sec-Fetch-Dest", "iframe")];
    for path in [
        "/act/bulk?verb=retry",
        "/ops/outbox/act/bulk?verb=retry",
        "/act/message?verb=retry&m=1+default",
        "/act/message?verb=discard&seq=1&destination=default",
        "/act/pause?destination=default",
        "/message/1/payload",
        "/events?page=overview",
        "/metrics",
    ] {
        assert_eq!(status(path, &LINK), 403, "{path}");
        assert_eq!(status(path, &[("Origin", "http://evil.example")]), 403, "{path}");
    }
    for path in [
        "/",
        "/ops/outbox/",
        "/messages",
        "/message/1",
        "/audit",
        "/act/bulk?verb=retry",
    ] {
        for site in ["cross-site", "same-site"] {
            let headers = [&image[..], &[("Sec-Fetch-Site", site)]].concat();
            assert_eq!(status(path, &headers), 403, "{path} as an image, {site}");
        }
        assert_eq!(status(path, &frame), 403, "{path} in a frame");
        assert_eq!(status(path, &in_advance), 403, "{path} in advance");
    }
    // A browser that does not tell, over HTTP to another machine, sends nothing with an image.
    assert_eq!(status("/act/bulk?verb=retry", &[]), 403);
    let log = cluster.log();
    let log = &log[from.min(log.len())..];
    assert!(log.contains("set role outbox_monitor"), "the log has no statements");
    assert!(
        !log.contains("set role outbox_admin"),
        "a request of another site opened a session"
    );

    for path in ["/", "/ops/outbox/", "/messages", "/ops/outbox/message/1", "/audit"] {
        assert_eq!(status(path, &LINK), 200, "a link to {path}");
    }
    let own = monitor.url() + "/messages?tab=dead";
    for own in [
        ("Sec-Fetch-Site", "same-origin"),
        ("Sec-Fetch-Site", "none"),
        ("Referer", &own),
    ] {
        assert_eq!(status("/act/bulk?verb=retry", &[own]), 200, "{own:?}");
    }
}

#[test]
fn wrong_secrets_are_checked_in_turn_and_a_right_one_gets_its_turn() {
    let cluster = quiet_cluster();
    let token = file("turns", &format!("{SECRET}\n"), 0o600);
    let monitor = Monitor::start(&cluster, &["--token-file", token.to_str().expect("UTF-8")]);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for n in 0..40 {
            let monitor = &monitor;
            scope.spawn(move || {
                let status = match n % 2 {
                    0 => monitor.post("/login", &[], &[("secret", "wrong")]).status,
                    _ => {
                        monitor
                            .get_with("/metrics", &[("Authorization", "Bearer wrong")])
                            .status
                    }
                };
                assert_eq!(status, 401);
            });
        }
        assert_eq!(monitor.post("/login", &[], &[("secret", SECRET)]).status, 303);
    });
    let took = began.elapsed();
    assert!(took >= 40 * Duration::from_millis(50), "forty guesses in {took:?}");
}

#[test]
fn no_action_is_possible_without_allow_actions() {
    let cluster = quiet_cluster();
    dead_letter(&cluster, DB);
    let monitor = Monitor::start(&cluster, &[]);
    let page = monitor.page("/message/1");
    assert!(!page.contains("Retry now") && !page.contains("may-act"), "{page}");
    for path in [
        "/act/bulk?verb=retry",
        "/act/message?verb=discard&seq=1&destination=default",
        "/act/pause?destination=default",
    ] {
        let answer = monitor.follow(path);
        assert_eq!(answer.status, 403, "{path}");
        assert!(answer.body.contains("read-only"), "{path}: {}", answer.body);
    }
    assert_eq!(monitor.post("/act/message", &[], &retry_with("any")).status, 403);
    let bulk = [
        ("verb", "discard"),
        ("q", ""),
        ("count", "1"),
        ("typed", "discard 1"),
        ("form_token", "any"),
    ];
    assert_eq!(monitor.post("/act/bulk", &[], &bulk).status, 403);
    assert_eq!(
        monitor
            .post("/act/pause", &[], &[("destination", "default"), ("form_token", "any")])
            .status,
        403
    );
    assert_eq!(dead(&cluster, DB), 1);
    assert_eq!(cluster.query_one::<i64>(DB, "select count(*) from outbox_paused"), 0);
}

#[test]
fn the_database_refuses_what_the_login_may_not() {
    let cluster = quiet_cluster();
    dead_letter(&cluster, DB);
    cluster.exec(
        DB,
        "create role looker login; grant outbox_monitor to looker; create role stranger login",
    );
    let monitor = Monitor::start(&cluster, &["--username", "looker", "--allow-actions"]);
    let page = monitor.page("/message/1");
    assert!(!page.contains("4242") && page.contains("may not read events"), "{page}");
    assert!(
        monitor
            .page("/messages?tab=dead&q=type%3AT")
            .contains("cannot filter messages by their events")
    );
    let answer = monitor.post("/act/message", &[], &retry_with(&Monitor::form_token(&page)));
    assert_eq!(answer.status, 422);
    assert!(answer.body.contains("GRANT outbox_admin TO looker"), "{}", answer.body);
    assert_eq!(dead(&cluster, DB), 1);
    let output = refused(&cluster, &["--username", "stranger"]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(5) && error.contains("GRANT outbox_monitor TO stranger"),
        "{error}"
    );
}

/// An attacker who injects SQL into a query of the monitor gets a session that cannot write.
#[test]
fn sessions_of_viewers_are_read_only_with_the_least_role() {
    let cluster = quiet_cluster();
    cluster.set_conf("log_statement", "all");
    let from = cluster.log_offset();
    let monitor = Monitor::start(&cluster, &["--allow-actions"]);
    monitor.page("/messages");
    let log = cluster.log();
    let log = &log[from.min(log.len())..];
    for line in [
        "set default_transaction_read_only = on",
        "set role outbox_monitor",
        "set role outbox_admin",
    ] {
        assert!(log.contains(line), "{line}");
    }
    assert!(
        !log.contains("set default_transaction_read_only = off"),
        "a session may write without an action"
    );
}
