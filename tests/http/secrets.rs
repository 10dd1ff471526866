//! Signatures and credentials: correct, rotated without a gap, and visible to no other role. Invalid options are
//! refused.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use postgres::error::SqlState;
use sha2::Sha256;
use support::{Receiver, Reply, Request, wait_for, wait_until};

use super::*;
use support::*;

const OLD: &str = "whsec_b2xkIGhvcnNlIG9sZCBob3JzZSBvbGQgaG9yc2U=";
const NEW: &str = "whsec_bmV3IGJhdHRlcnkgbmV3IGJhdHRlcnkgbmV3IQ==";

/// The signature as standardwebhooks.com defines it, implemented independently of the extension.
fn signature(secret: &str, request: &Request) -> String {
    let key = STANDARD.decode(&secret["whsec_".len()..]).expect("base64");
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("a key");
    mac.update(
        format!(
            "{}.{}.",
            request.header("webhook-id"),
            request.header("webhook-timestamp")
        )
        .as_bytes(),
    );
    mac.update(&request.body);
    format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
}

#[test]
fn each_message_is_signed_and_a_secret_is_rotated_without_a_gap() {
    let receiver = willing();
    let cluster = http_cluster(&[]);
    let mapping = "user mapping for outbox_worker server hook options";
    // In one transaction, so that no message is sent before it can be signed.
    cluster.exec(
        DB,
        &format!(
            "create server hook foreign data wrapper outbox_http options (url '{url}');
             create {mapping} (signing_secret '{OLD}')",
            url = receiver.url("/")
        ),
    );
    for (secrets, n) in [(vec![OLD], 1), (vec![NEW, OLD], 2), (vec![NEW], 3)] {
        if n > 1 {
            let text = secrets.join(" ");
            cluster.exec(DB, &format!("alter {mapping} (set signing_secret '{text}')"));
        }
        wait_for(&format!("a message signed by {n}"), LONG, || {
            let before = receiver.requests().len();
            cluster.publish_run("hook", "k", 1);
            wait_for_requests(&receiver, before + 1);
            let last = receiver.requests().pop().expect("a request");
            let wanted: Vec<String> = secrets.iter().map(|secret| signature(secret, &last)).collect();
            (last.header("webhook-signature") == wanted.join(" ")).then_some(())
        });
    }
    // A holder of either secret can verify each message, and the signed time is current.
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .expect("after 1970")
        .as_secs();
    for request in receiver.requests() {
        let signatures = request.header("webhook-signature").to_owned();
        assert!(
            [OLD, NEW]
                .iter()
                .any(|secret| signatures.contains(&signature(secret, &request))),
            "{request:?}"
        );
        let at: u64 = request.header("webhook-timestamp").parse().expect("seconds");
        assert!(at <= now && now - at < 300, "{at}, now {now}");
    }
}

#[test]
fn refused_credentials_are_reported_until_new_ones_are_set() {
    let receiver = Receiver::start(|request| {
        let good = ["Bearer right-token", "Basic Y291cmllcjpyaWdodCBwYXNz"]; // courier:right pass
        Reply::status(if good.contains(&request.header("authorization")) {
            200
        } else {
            401
        })
    });
    let cluster = http_cluster(&[]);
    destination(&cluster, "hook", &receiver.url("/"), "");
    cluster.publish_run("hook", "k", 1);
    let problem = wait_for_problem(&cluster, "broker");
    assert_eq!(
        problem,
        "hook: the receiver refuses the credentials: HTTP 401 Unauthorized"
    );
    assert!(remedy(&cluster, "broker").contains("CREATE USER MAPPING FOR outbox_worker SERVER hook"));
    let mapping = "user mapping for outbox_worker server hook options";
    cluster.exec(DB, &format!("create {mapping} (bearer_token 'wrong-token')"));
    wait_until("the wrong token to be sent", LONG, || {
        receiver
            .requests()
            .iter()
            .any(|request| request.header("authorization") == "Bearer wrong-token")
    });
    assert!(!health(&cluster, "broker").0);
    cluster.exec(DB, &format!("alter {mapping} (set bearer_token 'right-token')"));
    wait_published(&cluster, 1);
    wait_healthy(&cluster, "broker");
    cluster.exec(
        DB,
        &format!("alter {mapping} (drop bearer_token, add user 'courier', add password 'right pass')"),
    );
    wait_until("basic authentication", LONG, || {
        let before = receiver.requests().len();
        cluster.publish_run("hook", "k", 1);
        wait_for_requests(&receiver, before + 1);
        receiver
            .requests()
            .iter()
            .any(|request| request.header("authorization").starts_with("Basic "))
    });
    wait_drained(&cluster);
    assert_eq!(
        cluster.query_one::<i64>(DB, "select count(*) from outbox_history where attempts <> 1"),
        0
    );
}

#[test]
fn no_secret_that_a_receiver_sends_back_is_in_a_view_a_table_or_the_log() {
    let canary = OLD.trim_start_matches("whsec_");
    let answer = |request: &Request| Reply::Answer {
        status: if request.path == "/" { 422 } else { 401 },
        headers: String::new(),
        body: format!(
            "{} {OLD} {} {}",
            request.header("authorization"),
            request.header("x-api-key"),
            request.path
        ),
    };
    let receiver = Receiver::start(answer);
    let cluster = http_cluster(&["log_min_messages = debug1"]);
    for (name, path, options) in [("down", "/path-with-a-token", ""), ("dead", "/", ", on_dead 'skip'")] {
        // In one transaction, so that the receiver gets only the new credentials.
        cluster.exec(
            DB,
            &format!(
                r#"create server {name} foreign data wrapper outbox_http options (url '{url}'{options});
                 create user mapping for outbox_worker server {name}
                 options (bearer_token 'hunter2-token', signing_secret '{OLD}', headers '{{"X-Api-Key": "hunter2-key"}}')"#,
                url = receiver.url(path)
            ),
        );
        cluster.publish_run(name, "k", 2);
    }
    wait_for_reason(&cluster, "down", "auth_refused");
    wait_true(&cluster, "dead letters", "select count(*) = 2 from outbox_dead");
    // A reader with all rights below a superuser.
    let mut reader = cluster.connect(DB);
    reader.run("create role reader in role outbox_admin, outbox_monitor; set role reader");
    let relations = reader
        .query(
            "select oid::regclass::text from pg_class
              where (relname like 'outbox%' or relnamespace = 'outbox_internal'::regnamespace) and relkind in ('r', 'v', 'p')
                and has_table_privilege(oid, 'select')
             union select 'pg_user_mappings' union select 'pg_stat_activity'",
            &[],
        )
        .expect("relations");
    assert!(relations.len() > 10, "{} relations", relations.len());
    let mut visible = cluster.log();
    for relation in &relations {
        let relation: &str = relation.get(0);
        let rows = reader.query(&format!("select x::text from {relation} x"), &[]);
        for row in rows.unwrap_or_else(|error| panic!("{relation}: {error:?}")) {
            visible.push_str(row.get::<_, Option<&str>>(0).unwrap_or_default());
        }
    }
    assert!(
        visible.contains("HTTP 422 Unprocessable Entity: Bearer …") && visible.contains("… … /"),
        "the answers must be shown"
    );
    for secret in ["hunter2", canary, "path-with-a-token"] {
        let around = visible
            .find(secret)
            .map(|at| visible[at.saturating_sub(200)..at].to_owned());
        assert_eq!(around, None, "{secret} can be seen");
    }
}

#[test]
fn secret_headers_go_out_with_each_message_and_replace_those_of_server_and_event() {
    let receiver = Receiver::start(|request| {
        let is_known = request.header("authorization") == "ApiKey {hunter2}" && request.header("x-api-key") == "a-key";
        Reply::status(if is_known { 200 } else { 401 })
    });
    let cluster = http_cluster(&[]);
    destination(
        &cluster,
        "hook",
        &receiver.url("/"),
        r#"headers '{"x-api-key": "{type}", "x-team": "{type}"}'"#,
    );
    cluster.exec(
        DB,
        r#"create user mapping for outbox_worker server hook
             options (headers '{"Authorization": "ApiKey {hunter2}", "X-Api-Key": "wrong"}');
           select outbox_publish('T', '{}', headers => '{"X-API-KEY": "of the event"}', destination => 'hook')"#,
    );
    wait_for_problem(&cluster, "broker");
    let remedy = remedy(&cluster, "broker");
    assert!(
        remedy.contains("ALTER USER MAPPING FOR outbox_worker SERVER hook OPTIONS (SET headers :'headers')"),
        "{remedy}"
    );
    cluster.exec(
        DB,
        r#"alter user mapping for outbox_worker server hook
             options (set headers '{"Authorization": "ApiKey {hunter2}", "X-Api-Key": "a-key"}')"#,
    );
    wait_published(&cluster, 1);
    let sent = receiver.requests().pop().expect("a request");
    assert_eq!(sent.header("x-team"), "T");
}

/// A dump of a role that may not read secrets creates the mapping without options.
#[test]
fn nothing_is_posted_for_an_empty_user_mapping_until_it_is_filled_or_dropped() {
    let receiver = willing();
    let cluster = http_cluster(&[]);
    for role in ["outbox_worker", "public"] {
        let name = format!("hook_{role}");
        cluster.exec(
            DB,
            &format!(
                "create server {name} foreign data wrapper outbox_http options (url '{}');
                 create user mapping for {role} server {name}",
                receiver.url("/")
            ),
        );
    }
    for name in ["hook_outbox_worker", "hook_public"] {
        cluster.publish_run(name, "k", 1);
    }
    let empty = r#"select count(*) from outbox_health where not ok and "check" = 'destination'
                   and problem like 'the user mapping for % is empty' and remedy like '%ALTER USER MAPPING FOR %'"#;
    wait_until("both to be named", LONG, || cluster.query_one::<i64>(DB, empty) == 2);
    let step = "select format('%s %s', ok, detail) from outbox_check('hook_outbox_worker') where step = 'mapping'";
    let step: String = cluster.query_one(DB, step);
    assert!(
        step.starts_with("f the user mapping for outbox_worker is empty: fill it"),
        "{step}"
    );
    wait_true(
        &cluster,
        "the worker to refuse both",
        "select count(*) = 2 from outbox_destination_status where destination like 'hook%' and state = 'unconfigured'",
    );
    assert_eq!(receiver.requests().len(), 0);
    let remedy_of = |name: &str| Remedy::wait(&cluster, &format!("destination = '{name}'"));
    type_sql(&cluster, &remedy_of("hook_outbox_worker").filled(OLD));
    wait_published(&cluster, 1);
    let sent = receiver.requests().pop().expect("a request");
    assert_eq!(sent.header("webhook-signature"), signature(OLD, &sent));
    type_sql(&cluster, &remedy_of("hook_public").commands[1]);
    wait_published(&cluster, 2);
    wait_healthy(&cluster, "destination");
}

#[test]
fn bad_options_are_refused_when_they_are_written() {
    let cluster = http_cluster(&[]);
    let server = "create server s foreign data wrapper outbox_http options";
    for options in [
        "url 'amqp://h'",
        "url 'https://u:hunter2@h'",
        "url 'nonsense'",
        "concurrency '0'",
        "concurrency '65'",
        "concurrency 'hunter2'",
        "timeout '1ms'",
        "format 'xml'",
        "content_type 'text/plain'",
        r#"headers '{"authorization": "hunter2"}'"#,
        "ordering 'hunter2'",
        "tls_ca 'hunter2'",
    ] {
        let error = refused(&cluster, &format!("{server} ({options})"));
        assert_eq!(error.code(), &SqlState::INVALID_PARAMETER_VALUE, "{options}: {error:?}");
        assert!(
            error.hint().is_some() && !format!("{error:?}").contains("hunter2"),
            "{options}: {error:?}"
        );
    }
    // All roles can read the options of a server, so secrets are not among them. HTTP servers take no options of AMQP
    // servers.
    for option in ["bearer_token", "signing_secret", "password", "exchange", "routing_key"] {
        let error = refused(&cluster, &format!("{server} ({option} 'x')"));
        assert_eq!(error.code().code(), "HV00D", "{option}: {error:?}");
        assert!(
            error.hint().is_some_and(|hint| hint.contains("concurrency")),
            "{error:?}"
        );
    }
    cluster.exec(DB, &format!("{server} (url 'https://h/hook')"));
    let mapping = "create user mapping for outbox_worker server s options";
    for options in [
        "user 'hunter2'",
        "user 'u', password 'p', bearer_token 'hunter2'",
        "bearer_token 'hunter2 '",
        "signing_secret 'hunter2'",
        "signing_secret 'whsec_aHVudGVyMg=='",
        "signing_secret ' '",
        "tls_key 'hunter2'",
        "headers 'hunter2'",
        "headers '{}'",
        r#"headers '{"x-api-key": 7}'"#,
        r#"headers '{"x-api-key": ""}'"#,
        r#"headers '{"x-api-key": "hunter2\r\nhost: evil"}'"#,
        r#"headers '{"x-api-key: hunter2": "x"}'"#,
        r#"headers '{"webhook-id": "hunter2"}'"#,
        r#"headers '{"outbox-hunter2": "x"}'"#,
        r#"headers '{"content-type": "hunter2"}'"#,
        r#"headers '{"X-Key": "hunter2", "x-key": "hunter2"}'"#,
        r#"headers '{"Authorization": "hunter2"}', bearer_token 'hunter2'"#,
        r#"headers '{"authorization": "hunter2"}', user 'u', password 'hunter2'"#,
        &format!(r#"headers '{{"x-key": "{}"}}'"#, "k".repeat(4096)),
    ] {
        let error = refused(&cluster, &format!("{mapping} ({options})"));
        assert_eq!(error.code(), &SqlState::INVALID_PARAMETER_VALUE, "{options}: {error:?}");
        assert!(
            error.hint().is_some() && !format!("{error:?}").contains("hunter2"),
            "{options}: {error:?}"
        );
    }
    let error = refused(&cluster, &format!("{mapping} (url 'https://h')"));
    assert_eq!(error.code().code(), "HV00D");
    // A required option that is missing is reported by health, not at the statement.
    cluster.exec(DB, "create server nowhere foreign data wrapper outbox_http");
    wait_until("the missing url to be named", LONG, || {
        health(&cluster, "destination")
            .1
            .contains("nowhere: the option url is missing")
    });
}
