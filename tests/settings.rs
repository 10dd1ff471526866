//! Tests that every setting documents its values, refuses others, and then keeps its value. The settings come from
//! pg_settings, so a new one cannot be forgotten here.

use postgres::Client;
use postgres::error::{DbError, SqlState};
use support::Cluster;
use support::{DB, Session, wait_true};

/// A server with the extension and without a reachable destination.
fn server() -> Cluster {
    Cluster::builder().conf("outbox.workers = 0").extension().start()
}

struct Setting {
    name: String,
    kind: String,
    /// Whether the setting belongs to the whole server; otherwise it may be set per database.
    server_wide: bool,
    /// Whether any role may set it, for its own session.
    is_a_sessions_own: bool,
    min: Option<i64>,
    max: Option<i64>,
    shown: String,
}

fn settings(client: &mut Client) -> Vec<Setting> {
    let sql = "select name, vartype, context, min_val::bigint, max_val::bigint, current_setting(name)
               from pg_settings where name like 'outbox.%' and context <> 'internal' order by name collate \"C\"";
    let rows = client.query(sql, &[]).expect("pg_settings");
    assert!(rows.len() > 15, "{} settings found", rows.len());
    let rows = rows.into_iter().map(|row| Setting {
        name: row.get(0),
        kind: row.get(1),
        server_wide: match row.get(2) {
            "sighup" => true,
            "superuser" | "user" => false,
            other => panic!("{} has context {other}", row.get::<_, String>(0)),
        },
        is_a_sessions_own: row.get::<_, &str>(2) == "user",
        min: row.get(3),
        max: row.get(4),
        shown: row.get(5),
    });
    rows.collect()
}

/// Values that no setting of this kind may accept.
fn bad_values(setting: &Setting) -> Vec<String> {
    let long = |n: usize| "x".repeat(n);
    let fixed: Vec<String> = match (setting.kind.as_str(), setting.name.as_str()) {
        ("bool", _) => ["maybe", "2", ""].map(Into::into).into(),
        ("integer", _) => {
            let mut values: Vec<String> = ["many", "", "1 parsec", "NaN", "99999999999999999999"]
                .map(Into::into)
                .into();
            values.extend(setting.min.map(|min| (min - 1).to_string()));
            values.extend(setting.max.map(|max| (max + 1).to_string()));
            values
        }
        (_, "outbox.url") => [
            "localhost",
            "http://h",
            "amqp://",
            "amqp://h:0",
            "amqp://h:port",
            "amqp://h?x=1",
            "amqps://u:pw@h",
            "amqp://h?auth_mechanism=external",
            "amqp://u:pw@h",
            "amqp://h h",
        ]
        .map(Into::into)
        .into(),
        (_, "outbox.password_file" | "outbox.tls_ca_file" | "outbox.tls_cert_file" | "outbox.tls_key_file") => {
            ["relative/path", "~/password"].map(Into::into).into()
        }
        (_, "outbox.exchange") => vec![long(256)],
        (_, "outbox.exchange_type") => ["bogus", "Topic", "x"].map(Into::into).into(),
        (_, "outbox.routing_key") => vec![
            "{tenant}".into(),
            "a.{".into(),
            "a}".into(),
            "{type:upper}".into(),
            long(256),
        ],
        (_, "outbox.http_allow") => ["10.0.0.0/33", "10.1", "a host!", "hooks.internal, /8"]
            .map(Into::into)
            .into(),
        (_, "outbox.worker_role") => vec![String::new(), long(64)],
        (_, "outbox.on_dead") => ["", "stop"].map(Into::into).into(),
        (_, "outbox.publish_after") => ["", "remote", "standbys"].map(Into::into).into(),
        (_, "outbox.standby_names") => ["a,", ",a", "a, b, a"].map(Into::into).into(),
        (_, "outbox.databases") => Vec::new(), // any text may be the name of a database
        (_, "outbox.identity") => Vec::new(),  // of a server
        (_, "outbox.actor") => Vec::new(),     // or of a user
        (_, "outbox.correlation_id") => vec![long(256)],
        (_, "outbox.metadata") => ["x", "[]", "1", "null", "{", r#"{"a": "\u0000"}"#]
            .map(Into::into)
            .into(),
        (_, "outbox.headers") => vec![
            "x".into(),
            "[]".into(),
            r#"{"CC": "a"}"#.into(),
            format!(r#"{{"{}": 1}}"#, long(256)),
            format!(r#"{{"a": "{}"}}"#, long(70_000)),
        ],
        (kind, name) => panic!("{name} is of kind {kind}: list here what it must refuse"),
    };
    fixed
}

fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', "''"))
}

/// Every statement that could give `setting` this value.
fn ways_to_set(setting: &Setting, value: &str) -> Vec<String> {
    let (name, value) = (&setting.name, quoted(value));
    let mut ways = vec![format!("alter system set {name} = {value}")];
    if !setting.server_wide {
        ways.extend([
            format!("set {name} = {value}"),
            format!("select set_config('{name}', {value}, true)"),
            format!("alter database {DB} set {name} = {value}"),
            format!("alter role postgres set {name} = {value}"),
        ]);
    }
    ways
}

fn refusal(client: &mut Client, statement: &str) -> DbError {
    match client.batch_execute(statement) {
        Ok(()) => panic!("{statement} was accepted"),
        Err(error) => error
            .as_db_error()
            .unwrap_or_else(|| panic!("{statement}: {error:?}"))
            .clone(),
    }
}

fn show(client: &mut Client, name: &str) -> String {
    client.value(&format!("show {name}"))
}

#[test]
fn a_bad_value_is_refused_with_a_hint_and_the_old_one_stays() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    for setting in settings(&mut client) {
        for value in bad_values(&setting) {
            for statement in ways_to_set(&setting, &value) {
                let error = refusal(&mut client, &statement);
                assert_eq!(
                    error.code(),
                    &SqlState::INVALID_PARAMETER_VALUE,
                    "{statement}: {error:?}"
                );
                assert!(error.message().contains(&setting.name), "{statement}: {error:?}");
                let in_our_words = setting.kind == "string";
                assert!(
                    !in_our_words || error.hint().is_some(),
                    "{statement}: no hint in {error:?}"
                );
                assert_eq!(show(&mut client, &setting.name), setting.shown, "{statement}");
            }
        }
    }
    let kept: i64 = cluster.query_one(DB, "select count(*) from pg_db_role_setting");
    assert_eq!(kept, 0, "a refused value was kept for the next session");
    let auto = std::fs::read_to_string(cluster.data_dir().join("postgresql.auto.conf")).expect("the file");
    assert!(
        !auto.contains("outbox."),
        "a refused value was kept for the next start: {auto}"
    );
}

#[test]
fn a_bad_value_in_the_configuration_file_is_logged_and_the_workers_keep_running() {
    let cluster = Cluster::builder().extension().start();
    let worker = "select coalesce(min(pid), 0) from pg_stat_activity where backend_type = 'outbox worker'";
    wait_true(&cluster, "a worker", &format!("select ({worker}) > 0"));
    let pid: i32 = cluster.query_one(DB, worker);
    let offset = cluster.log_offset();
    for (name, value, kept) in [
        ("outbox.batch_size", "0", "1000"),
        ("outbox.routing_key", "{tenant}", "{aggregate_type}.{operation}"),
        ("outbox.exchange_type", "bogus", ""),
        ("outbox.no_such_setting", "1", ""),
    ] {
        cluster.set_conf(name, value);
        cluster.wait_for_log(name, offset);
        if !name.ends_with("no_such_setting") {
            assert_eq!(show(&mut cluster.connect(DB), name), kept, "{name}");
        }
    }
    // A worker reads the file with a delay; once it accepts a good value from the file, it has read the file.
    cluster.set_conf("outbox.url", "amqp://127.0.0.1:1");
    wait_true(
        &cluster,
        "the worker to try the new url",
        "select exists (select from outbox_worker_status where state = 'down')",
    );
    assert_eq!(cluster.query_one::<i32>(DB, worker), pid, "the worker ended");
}

#[test]
fn a_url_with_a_password_is_refused_and_never_repeated() {
    const CANARY: &str = "c4nary-8d1f";
    // Postgres logs the failed statement itself; that is switched off here, to see the rest. Other logging is at its
    // most verbose.
    let cluster = Cluster::builder()
        .conf("outbox.workers = 0")
        .conf("log_min_error_statement = panic")
        .conf("log_min_messages = debug5")
        .extension()
        .start();
    let mut client = cluster.connect(DB);
    let url = settings(&mut client)
        .into_iter()
        .find(|setting| setting.name == "outbox.url")
        .expect("outbox.url");
    for value in [
        format!("amqp://user:{CANARY}@host"),
        format!("amqp://:{CANARY}@host:5672/vhost"),
        format!("amqp://user:half/{CANARY}@host"),
        format!("AMQP://user:{CANARY}@host"),
        format!("http://user:{CANARY}@host"),
        format!("user:{CANARY}@host"),
        format!("amqp://user:{CANARY}@host?x"),
    ] {
        for statement in ways_to_set(&url, &value) {
            let error = refusal(&mut client, &statement);
            assert!(!format!("{error:?}").contains(CANARY), "{error:?}");
        }
        let offset = cluster.log_offset();
        cluster.set_conf("outbox.url", &value);
        cluster.wait_for_log("outbox.url is refused", offset);
    }
    let options = format!(
        "{} options='-c outbox.url=amqp://u:{CANARY}@h'",
        cluster.conn_string(DB)
    );
    let error = Client::connect(&options, postgres::NoTls)
        .err()
        .expect("a connection with such a url");
    assert!(!format!("{error:?}").contains(CANARY), "{error:?}");

    let echoes: Vec<String> = cluster
        .log()
        .lines()
        .filter(|line| line.contains(CANARY))
        .map(str::to_owned)
        .collect();
    assert!(echoes.is_empty(), "the log repeats it:\n{}", echoes.join("\n"));
    assert_eq!(show(&mut client, "outbox.url"), "");
}

/// Only Postgres itself still logs it: as a statement that failed, unless log_min_error_statement prevents that. The
/// docs say so.
#[test]
fn a_url_with_a_password_is_logged_only_in_the_statement_that_postgres_logs() {
    let cluster = server();
    let error = refusal(
        &mut cluster.connect(DB),
        "alter system set outbox.url = 'amqp://user:c4nary@host'",
    );
    let hint = error.hint().unwrap_or_default();
    assert!(hint.contains("outbox.password_file"), "{hint}");
    cluster.wait_for_log("c4nary", 0);
    let log = cluster.log();
    let ours = log.lines().filter(|line| line.contains("c4nary"));
    assert_eq!(ours.filter(|line| !line.contains(" STATEMENT: ")).count(), 0, "{log}");
}

#[test]
fn an_unknown_setting_is_refused() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    for statement in [
        "set outbox.foo = 1",
        "alter system set outbox.foo = 1",
        "select set_config('outbox.foo', '1', false)",
    ] {
        let error = refusal(&mut client, statement);
        assert!(error.message().contains("outbox.foo"), "{error:?}");
    }
}

#[test]
fn no_role_sets_the_version_of_the_library() {
    // Also where the library is loaded later, by the first call of a function.
    for preload in [true, false] {
        let cluster = Cluster::builder().preload(preload).start();
        let mut client = cluster.connect(DB);
        let set = "set outbox.library_version = '9.9.9'";
        match preload {
            true => _ = refusal(&mut client, set),
            false => client
                .batch_execute(set)
                .expect("a name that Postgres does not know yet"),
        }
        client.run("create extension outbox");
        assert_eq!(show(&mut client, "outbox.library_version"), env!("CARGO_PKG_VERSION"));
        let error = refusal(&mut client, set);
        assert_eq!(error.code(), &SqlState::CANT_CHANGE_RUNTIME_PARAM, "{error:?}");
    }
}

#[test]
fn only_a_superuser_sets_what_affects_other_sessions() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    let settings = settings(&mut client);
    client.run("create role someone; set role someone");
    for setting in settings {
        let statement = format!("set {} = default", setting.name);
        if setting.is_a_sessions_own {
            client.run(&statement);
            continue;
        }
        let error = refusal(&mut client, &statement);
        let expected = match setting.server_wide {
            true => SqlState::CANT_CHANGE_RUNTIME_PARAM,
            false => SqlState::INSUFFICIENT_PRIVILEGE,
        };
        assert_eq!(error.code(), &expected, "{}: {error:?}", setting.name);
    }
}

#[test]
fn every_setting_except_those_of_the_server_can_be_set_per_database() {
    let cluster = server();
    let mut client = cluster.connect(DB);
    // One setting is for sessions only; replay.rs tests it.
    let of_databases = |setting: &Setting| setting.name != "outbox.replaying";
    for setting in settings(&mut client).into_iter().filter(of_databases) {
        let other = match setting.kind.as_str() {
            "bool" if setting.shown == "on" => "off".to_owned(),
            "bool" => "on".to_owned(),
            // The default of this setting is its maximum.
            "integer" if setting.name == "outbox.idle_backoff" => setting.min.expect("a range").to_string(),
            "integer" => setting.max.expect("a range").to_string(),
            _ => match setting.name.as_str() {
                "outbox.url" => "amqp://h".into(),
                "outbox.password_file" | "outbox.tls_ca_file" | "outbox.tls_cert_file" | "outbox.tls_key_file" => {
                    "/p".into()
                }
                "outbox.exchange_type" => "topic".into(),
                "outbox.on_dead" => "skip".into(),
                "outbox.publish_after" => "standby".into(),
                "outbox.metadata" | "outbox.headers" => "{}".into(),
                _ => "x".into(),
            },
        };
        let statement = format!("alter database {DB} set {} = {}", setting.name, quoted(&other));
        if setting.server_wide {
            let error = refusal(&mut client, &statement);
            assert_eq!(error.code(), &SqlState::CANT_CHANGE_RUNTIME_PARAM, "{error:?}");
        } else {
            client.run(&statement);
            let shown = show(&mut cluster.connect(DB), &setting.name);
            assert_ne!(shown, setting.shown, "{statement}");
        }
    }
}

/// pg_settings shows the default with its unit, the range, and whether a setting may be set per database.
#[test]
fn defaults_ranges_and_units_are_as_documented() {
    let cluster = server();
    let found: Vec<String> = cluster
        .connect(DB)
        .query(
            "select name || ' = ' || coalesce(nullif(boot_val, ''), '''''') || coalesce(' ' || unit, '')
                    || coalesce(' (' || min_val || '..' || max_val || ')', '') || ' ' || context
             from pg_settings where name like 'outbox.%' order by name collate \"C\"",
            &[],
        )
        .expect("pg_settings")
        .iter()
        .map(|row| row.get(0))
        .collect();
    let expected = EXPECTED.replace("VERSION", env!("CARGO_PKG_VERSION"));
    assert_eq!(found.join("\n"), expected.trim());

    let mut client = cluster.connect(DB);
    for (name, shown) in [
        ("outbox.lease_ttl", "15s"),
        ("outbox.claim_ttl", "1min"),
        ("outbox.retry_backoff", "1s"),
        ("outbox.retry_backoff_max", "10min"),
        ("outbox.idle_backoff", "1s"),
        ("outbox.retention", "30d"),
    ] {
        assert_eq!(show(&mut client, name), shown, "{name}");
    }
    client.run("set outbox.retry_backoff = '2 min'");
    assert_eq!(show(&mut client, "outbox.retry_backoff"), "2min");
}

const EXPECTED: &str = "
outbox.actor = '' user
outbox.batch_size = 1000 (1..10000) superuser
outbox.claim_ttl = 60 s (1..86400) superuser
outbox.confirm_timeout = 30000 ms (100..3600000) superuser
outbox.correlation_id = '' user
outbox.databases = '' sighup
outbox.dead_retention = -1 s (-1..2147483647) superuser
outbox.enabled = on superuser
outbox.events_retention = -2 s (-2..2147483647) superuser
outbox.exchange = outbox superuser
outbox.exchange_type = '' superuser
outbox.fast_path = on sighup
outbox.headers = '' user
outbox.heartbeat_ttl = 20 s (2..3600) superuser
outbox.http_allow = '' superuser
outbox.identity = '' sighup
outbox.idle_backoff = 1000 ms (10..1000) superuser
outbox.inbox_retention = 604800 s (-1..2147483647) superuser
outbox.lease_renew = 6 s (1..1800) superuser
outbox.lease_ttl = 15 s (2..3600) superuser
outbox.leasing = on superuser
outbox.library_version = VERSION internal
outbox.max_attempts = 15 (1..2147483647) superuser
outbox.max_in_flight = 1000 (1..2000) superuser
outbox.max_pending = 0 (0..2147483647) superuser
outbox.max_rate = 0 (0..2147483647) superuser
outbox.metadata = '' user
outbox.on_dead = block superuser
outbox.partition_count = 16 (1..1024) superuser
outbox.password_file = '' superuser
outbox.publish_after = local superuser
outbox.replaying = off superuser
outbox.retention = 2592000 s (-1..2147483647) superuser
outbox.retry_backoff = 1000 ms (1..86400000) superuser
outbox.retry_backoff_max = 600000 ms (1..86400000) superuser
outbox.routing_key = {aggregate_type}.{operation} superuser
outbox.standby_names = '' superuser
outbox.standby_quorum = 0 (0..1000) superuser
outbox.standby_timeout = -1 ms (-1..2147483647) superuser
outbox.tls_ca_file = '' superuser
outbox.tls_cert_file = '' superuser
outbox.tls_key_file = '' superuser
outbox.url = '' superuser
outbox.worker_role = outbox_worker sighup
outbox.worker_time_slice = 10000 ms (100..3600000) sighup
outbox.workers = 1 (0..16) sighup
";

#[test]
fn the_docs_and_the_server_know_the_same_settings() {
    let cluster = server();
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/settings.md");
    let docs = std::fs::read_to_string(docs).expect("docs/settings.md");
    let known: Vec<String> = settings(&mut cluster.connect(DB))
        .into_iter()
        .map(|setting| setting.name)
        .chain(["outbox.library_version".to_owned()])
        .collect();
    for name in &known {
        assert!(docs.contains(&format!("`{name}`")), "{name} is not in docs/settings.md");
    }
    for quoted in docs.split('`').skip(1).step_by(2) {
        let is_name =
            quoted.starts_with("outbox.") && quoted.chars().all(|c| c.is_ascii_lowercase() || "._".contains(c));
        assert!(
            !is_name || known.iter().any(|name| name == quoted),
            "docs/settings.md names {quoted}, which the server does not know"
        );
    }
}
