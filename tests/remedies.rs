//! Tests that each remedy of outbox_health ends the fault that it is for, and breaks nothing else. A test makes the
//! fault on a server with two destinations, the default one and `audit`, which takes what it can from the settings. It
//! types the remedy as it is shown, and fills in only what the remedy leaves open: a password, a URL, old patterns.
//! Where the remedy is no command, the test does what it says. Then all checks are ok, and both destinations deliver.
//! Faults with tests of their own: tests/copies.rs (partitions, sequence), tests/privileges.rs (role), tests/overloads
//! (schema), tests/operating/hung.rs (a stopped worker), tests/slots.rs.

use postgres::error::SqlState;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::{Duration, Instant};
use support::clock::cluster_with_clock;
use support::wait::pass_time_until;
use support::*;

/// The first command of a remedy.
fn command(remedy: &Remedy) -> &str {
    remedy.command()
}

/// Types the first command of a remedy as the role that it names: a member of outbox_admin, or a superuser where it names
/// another role.
fn as_told(cluster: &Cluster, remedy: &Remedy) {
    as_told_with(cluster, remedy, command(remedy));
}

/// `filled`: the command without what it leaves open.
fn as_told_with(cluster: &Cluster, remedy: &Remedy, filled: &str) {
    let has_operator = "select exists (select from pg_roles where rolname = 'operator')";
    if !cluster.query_one::<bool>(DB, has_operator) {
        cluster.exec(DB, "create role operator; grant outbox_admin to operator");
    }
    let mut operator = cluster.connect(DB);
    operator.run("set role operator");
    for statement in filled.split("; ") {
        let typed = operator.batch_execute(statement);
        let Err(error) = typed else { continue };
        let is_refused = error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE);
        assert!(is_refused, "{statement}: {error:?}");
        assert_ne!(remedy.roles[0], "a member of outbox_admin", "{statement}");
        cluster.connect(DB).run(statement);
    }
}

/// Waits until the check fails for the destination with these words in its problem, and returns the remedy.
fn remedy(cluster: &Cluster, check: &str, destination: Option<&str>, words: &str) -> Remedy {
    let destination = destination.map_or("is null".to_owned(), |name| format!("= '{name}'"));
    let words = words.replace('\'', "''");
    Remedy::wait(
        cluster,
        &format!(r#""check" = '{check}' and destination {destination} and strpos(problem, '{words}') > 0"#),
    )
}

/// A server with the destinations `default` and `audit`, each with an exchange and a queue of the same name.
struct Site {
    broker: Broker,
    /// The exchanges of `default` and `audit`.
    names: [String; 2],
    cluster: Cluster,
}

const CONF: [&str; 4] = [
    "outbox.retry_backoff = '100ms'",
    "outbox.retry_backoff_max = '1s'",
    "outbox.lease_ttl = '2s'",
    "outbox.lease_renew = '1s'",
];

impl Site {
    /// A site of the shared broker, for faults that are not of the broker.
    fn shared(conf: &[&str]) -> Self {
        let names = [fresh_names().0, fresh_names().0];
        let builder = |url: &str| unconnected_builder(url, &names[0], &[&CONF[..], conf].concat());
        let site = Self::new(Broker::shared(), builder(&Broker::shared().url()).start(), names);
        site.works("a start");
        site
    }

    fn new(broker: &Broker, cluster: Cluster, names: [String; 2]) -> Self {
        names
            .iter()
            .for_each(|name| broker.declare_bound(name, name, Value::Null));
        let audit = &names[1];
        cluster.exec(
            DB,
            &format!("create server audit foreign data wrapper outbox_amqp options (exchange '{audit}')"),
        );
        Self {
            broker: broker.clone(),
            names,
            cluster,
        }
    }

    /// All checks are ok, what waits arrives, and both destinations deliver.
    fn works(&self, after: &str) {
        let problems =
            r#"select string_agg(concat_ws(' ', "check", destination, problem), '; ') from outbox_health where not ok"#;
        wait_until(&format!("all checks to be ok after {after}"), LONG, || {
            let found: Option<String> = self.cluster.query_one(DB, problems);
            found.is_none()
        });
        for to in ["default", "audit"] {
            self.cluster.publish(Event::new(format!("{to} after {after}")).to(to));
        }
        wait_drained(&self.cluster);
        for (queue, to) in self.names.iter().zip(["default", "audit"]) {
            let labels = labels(&all_of(&self.broker, queue));
            assert_eq!(labels.last(), Some(&format!("{to} after {after}")), "{labels:?}");
            let waited = labels.iter().any(|label| label == &format!("{to} waits"));
            assert_eq!(waited, labels.len() > 1, "{after}: {labels:?}");
        }
    }

    /// A message that waits for the end of the fault.
    fn waits(&self, to: &str) {
        self.cluster.publish(Event::new(format!("{to} waits")).to(to));
    }

    /// A message of `audit` that has waited for an hour. The destination is paused.
    fn waits_for_long(&self) {
        self.cluster.exec(DB, "select outbox_pause('audit')");
        wait_paused(&self.cluster, "audit");
        self.waits("audit");
        self.cluster
            .exec(DB, "update outbox set enqueued_at = now() - interval '1 hour'");
    }

    fn broker_remedy(&self, destination: &str, words: &str) -> Remedy {
        remedy(&self.cluster, "broker", Some(destination), words)
    }

    /// Waits until a check fails, types the command of its remedy, and waits until all is well.
    fn obeys(&self, check: &str, destination: Option<&str>, words: &str, fill: impl Fn(&str) -> String) {
        let text = remedy(&self.cluster, check, destination, words);
        as_told_with(&self.cluster, &text, &fill(command(&text)));
        self.works(words);
    }
}

/// The command with a client certificate and its key filled in.
fn with_certificate(command: &str, client: &Certificate) -> String {
    command
        .replace(":'tls_cert'", &format!("'{}'", client.cert_pem))
        .replace(":'tls_key'", &format!("'{}'", client.key_pem))
}

/// A site with a broker that is disturbed. The exchanges are `events` and `audit`.
struct Private {
    site: Site,
    broker: PrivateBroker,
    password: PathBuf,
    url: String,
}

impl std::ops::Deref for Private {
    type Target = Site;

    fn deref(&self) -> &Site {
        &self.site
    }
}

impl Private {
    fn new() -> Self {
        Self::of(Broker::start_sized(Size::default()), &[])
    }

    fn of(broker: PrivateBroker, conf: &[&str]) -> Self {
        broker.add_user("relay", "right");
        broker.ctl(&["set_permissions", "relay", "^(events|audit)$", "^(events|audit)$", "^$"]);
        let url = format!("amqp://relay@127.0.0.1:{}", broker.port());
        let cluster = unconnected_cluster(&url, "events", &[&CONF[..], conf].concat());
        let password = server_file(&cluster, "password", "right\n", 0o600);
        cluster.set_conf("outbox.password_file", &password.to_string_lossy());
        let private = Self {
            site: Site::new(&broker, cluster, ["events", "audit"].map(str::to_owned)),
            broker,
            password,
            url,
        };
        private.works("a start");
        private
    }

    fn disconnect(&self) {
        self.broker.ctl(&["close_all_connections", "a test"]);
    }

    /// Another exchange of the same name. A worker checks an exchange when it connects.
    fn replace_exchange(&self, name: &str, kind: &str, durable: bool) {
        self.broker.delete_exchange(name);
        self.broker.declare_exchange(name, kind, durable);
        self.broker.bind(name, name, "#");
        self.disconnect();
    }
}

#[test]
fn a_password_is_corrected_where_the_destination_has_it() {
    let site = Private::new();
    // With the settings; audit takes it from there.
    std::fs::write(&site.password, "wrong").expect("write the file");
    site.disconnect();
    ["default", "audit"].iter().for_each(|to| site.waits(to));
    let [first, second] = ["default", "audit"].map(|to| site.broker_remedy(to, "refuses the user or password"));
    assert_eq!(first, second);
    assert!(
        first.contains(&format!("the password in {};", site.password.display())),
        "{first}"
    );
    std::fs::write(&site.password, "right\n").expect("write the file");
    site.works("a password in its file");

    // In a user mapping, in that of PUBLIC, and in none.
    let url = format!("alter server audit options (add url '{}')", site.url);
    for (fault, undo) in [
        (
            "create user mapping for outbox_worker server audit options (user 'relay', password 'wrong')",
            "drop user mapping for outbox_worker server audit",
        ),
        (
            "create user mapping for public server audit options (user 'relay', password 'wrong')",
            "drop user mapping for public server audit",
        ),
        (
            url.as_str(),
            "drop user mapping for outbox_worker server audit; alter server audit options (drop url)",
        ),
    ] {
        site.cluster.exec(DB, fault);
        site.waits("audit");
        let text = site.broker_remedy("audit", "refuses the user or password");
        let filled = command(&text)
            .replace(":'user'", "'relay'")
            .replace(":'password'", "'right'");
        type_sql(&site.cluster, &filled);
        site.works(fault);
        site.cluster.exec(DB, undo);
        site.works(undo);
    }
}

#[test]
fn a_refusal_of_the_broker_ends_with_its_command() {
    let site = Private::new();
    site.broker
        .ctl(&["set_permissions", "relay", "^audit$", "^(audit|more)$", ""]);
    site.disconnect(); // a channel remembers a permission
    site.waits("default");
    let text = site.broker_remedy("default", "lacks a permission");
    site.broker.shell(command(&text));
    site.works("a permission");
    let now = site.broker.ctl(&["list_user_permissions", "relay"]);
    assert!(
        now.contains("^audit$|^(audit|events)$\t^(audit|more)$|^(audit|events)$\t^$"),
        "{now}"
    );

    for (set, name) in [("set_user_limits", "relay"), ("set_vhost_limits", "/")] {
        let mut arguments = vec![set, name];
        if set == "set_vhost_limits" {
            arguments.insert(1, "-p");
        }
        site.broker
            .ctl(&[&arguments[..], &[r#"{"max-connections": 0}"#]].concat());
        site.disconnect();
        site.waits("default");
        let text = site.broker_remedy("default", "takes no more connections");
        site.broker.shell(command(&text));
        site.works(set);
    }

    site.cluster.set_conf("outbox.url", &format!("{}/new", site.url));
    site.broker.shell(command(&site.broker_remedy("default", "not found")));
    site.broker
        .shell(command(&site.broker_remedy("default", "access to vhost")));
    site.broker_remedy("default", "no exchange");
    // The patterns for one exchange do not hold for the other.
    // RabbitMQ 4.3 checks the permission before it looks for the exchange.
    let text = site.broker_remedy("audit", "exchange 'audit' in vhost 'new'");
    assert!(
        text.contains("ALTER SERVER audit OPTIONS (ADD exchange_type 'topic')")
            || text.contains("rabbitmqctl set_permissions -p new relay \"$(old 2)|\"'^(audit|events)$'"),
        "{text}"
    );
    site.cluster.set_conf("outbox.url", &site.url);
    site.works("a virtual host");

    site.broker.delete_queue("audit");
    let bounded = json!({"x-max-length": 1, "x-overflow": "reject-publish"});
    site.broker.declare_bound("audit", "audit", bounded);
    site.cluster.publish(Event::new("fills").to("audit"));
    wait_drained(&site.cluster);
    site.waits("audit");
    let text = site.broker_remedy("audit", "refuses the messages");
    site.broker.shell(command(&text));
    assert_eq!(labels(&all_of(&site.broker, "audit")), ["fills"]);
    wait_drained(&site.cluster);
    assert_eq!(labels(&all_of(&site.broker, "audit")), ["audit waits"]);
    site.works("a full queue");
}

#[test]
fn an_exchange_is_declared_or_only_checked_and_that_of_another_destination_is_left_alone() {
    let site = Private::new();
    // The exchange of audit is not of the type that the remedy names, and audit has no option exchange_type.
    site.replace_exchange("audit", "fanout", true);
    site.broker.delete_exchange("events");
    site.waits("default");
    as_told(&site.cluster, &site.broker_remedy("default", "does not exist"));
    wait_true(
        &site.cluster,
        "the exchange to be declared",
        "select state = 'connected' from outbox_destination_status where destination = 'default'",
    );
    site.broker.bind("events", "events", "#");
    site.works("a missing exchange");
    site.cluster.exec(DB, "drop server \"default\"");
    site.works("the settings");

    site.broker.delete_exchange("audit");
    site.waits("audit");
    as_told(&site.cluster, &site.broker_remedy("audit", "does not exist"));
    wait_stats(&site.cluster, "audit", "state = 'connected'");
    site.broker.bind("audit", "audit", "#");
    site.works("a missing exchange of a server");

    // An exchange that is not durable, and one of another type.
    site.replace_exchange("audit", "topic", false);
    site.waits("audit");
    as_told(&site.cluster, &site.broker_remedy("audit", "its property"));
    site.works("an exchange that is not durable");
    site.cluster.exec(DB, "alter server audit options (drop exchange_type)");
    site.replace_exchange("audit", "topic", true);
    site.cluster.set_conf("outbox.exchange_type", "topic");
    site.works("a type in the settings");
    site.replace_exchange("events", "fanout", true);
    site.waits("default");
    as_told(&site.cluster, &site.broker_remedy("default", "its property"));
    site.works("an exchange of another type");
    // Without another destination the settings are changed.
    site.cluster.exec(
        DB,
        "drop server \"default\"; alter server audit options (add exchange_type 'topic')",
    );
    site.waits("default");
    let text = site.broker_remedy("default", "its property");
    assert!(text.contains("ALTER SYSTEM SET outbox.exchange_type"), "{text}");
    as_told(&site.cluster, &text);
    site.works("another type in the settings");
    // A type of a plugin that is not enabled, and one that no plugin has.
    let of_type = |name| format!("alter server audit options (set exchange_type '{name}')");
    site.cluster.exec(DB, &of_type("x-random"));
    site.waits("audit");
    let text = site.broker_remedy("audit", "unknown exchange type 'x-random'");
    assert!(
        text.contains("rabbitmq-plugins enable rabbitmq_random_exchange"),
        "{text}"
    );
    site.cluster.exec(DB, &of_type("x-unheard-of"));
    let text = site.broker_remedy("audit", "unknown exchange type 'x-unheard-of'");
    as_told(&site.cluster, &text);
    site.works("a type that the broker does not know");
}

#[test]
fn a_setting_is_changed_where_it_is_set() {
    let site = Private::new();
    let cluster = &site.cluster;
    let alter = |level: &str, setting: &str, value: &str| {
        type_sql(
            cluster,
            &format!("alter {level} set {setting} = '{value}'; select pg_reload_conf()"),
        );
    };
    for level in ["system", "database postgres"] {
        alter(level, "outbox.enabled", "off");
        wait_workers_paused(cluster);
        site.waits("default");
        type_sql(
            cluster,
            command(&remedy(cluster, "enabled", None, "outbox.enabled is off")),
        );
        site.works(&format!("outbox.enabled by {level}"));

        alter(level, "outbox.url", "");
        ["default", "audit"].iter().for_each(|to| site.waits(to));
        let text = remedy(cluster, "destination", Some("default"), "outbox.url");
        type_sql(cluster, &command(&text).replace("amqp://localhost", &site.url));
        site.works(&format!("outbox.url by {level}"));

        alter(level, "outbox.max_pending", "2");
        cluster.exec(DB, "select outbox_pause('audit')");
        wait_paused(cluster, "audit");
        ["audit", "audit"].iter().for_each(|to| site.waits(to));
        let text = remedy(cluster, "room", Some("audit"), "the queue is full");
        as_told(cluster, &text);
        wait_healthy(cluster, "room");
        let text = remedy(cluster, "paused", Some("audit"), "paused by");
        as_told(cluster, &text);
        site.works(&format!("outbox.max_pending by {level}"));
        cluster.exec(DB, "alter server audit options (drop max_pending)");
    }
    for (setting, value, words) in [
        ("outbox.workers", "0", "outbox.workers is 0"),
        ("outbox.databases", "elsewhere", "outbox.databases does not name it"),
    ] {
        alter("system", setting, value);
        site.waits("default");
        as_told(cluster, &remedy(cluster, "workers", None, words));
        site.works(setting);
    }
    cluster.exec(DB, "alter role outbox_worker rename to renamed");
    site.waits("default");
    as_told(cluster, &remedy(cluster, "role", None, "does not exist"));
    site.works("a role");
    cluster.exec(DB, "alter role renamed rename to outbox_worker");
    type_sql(
        cluster,
        "alter system reset outbox.worker_role; select pg_reload_conf()",
    );
    site.works("a role with its old name");
    // A command of the shell.
    std::fs::set_permissions(&site.password, std::os::unix::fs::PermissionsExt::from_mode(0o644)).expect("chmod");
    site.disconnect();
    cluster.exec(DB, "alter server audit options (add url 'amqp://localhost')");
    cluster.exec(DB, "alter server audit options (drop url)");
    type_sql(
        cluster,
        "alter system set outbox.max_in_flight = 10; select pg_reload_conf()",
    );
    remedy(cluster, "destination", Some("default"), "password_file");
    std::fs::set_permissions(&site.password, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("chmod");
    site.works("a file that others could read");
}

#[test]
fn messages_that_wait_for_a_dropped_server_are_sent_or_discarded() {
    let site = Site::shared(&[]);
    let cluster = &site.cluster;
    for discards in [false, true] {
        cluster.exec(DB, "select outbox_pause('audit')");
        wait_paused(cluster, "audit");
        site.waits("audit");
        cluster.exec(DB, "drop server audit; select outbox_resume('audit')");
        let text = remedy(cluster, "destination", Some("audit"), "does not exist");
        let discard = &text.commands[1];
        let create = command(&text).to_owned();
        if discards {
            cluster.exec(DB, discard);
            wait_healthy(cluster, "destination");
            assert_eq!(
                cluster.query_one::<i64>(DB, "select count(*) from outbox_history where discarded"),
                1
            );
        }
        type_sql(cluster, &create);
        site.works(&format!("a dropped server, {discards}"));
    }

    // The remedy has the wrapper and all options of the one that was dropped.
    let options = "select array_to_string(srvoptions, ' ') from pg_foreign_server where srvname = 'hook'";
    let create =
        "CREATE SERVER hook FOREIGN DATA WRAPPER outbox_http OPTIONS (url 'https://a.example/', concurrency '4')";
    cluster.exec(DB, create);
    cluster.exec(
        DB,
        "alter server hook options (add timeout '7s'); select outbox_pause('hook')",
    );
    let before: String = cluster.query_one(DB, options);
    cluster.publish(Event::new("waits").to("hook"));
    cluster.exec(DB, "drop server hook");
    let text = remedy(cluster, "destination", Some("hook"), "does not exist");
    assert!(
        text.starts_with("create it again as role postgres: CREATE SERVER hook"),
        "{text}"
    );
    cluster.exec(DB, command(&text));
    assert_eq!(cluster.query_one::<String>(DB, options), before);
}

#[test]
fn a_message_that_fails_is_retried_by_the_command_of_each_check() {
    let site = Site::shared(&[]);
    let cluster = &site.cluster;
    let lose = |options: &str| {
        cluster.exec(DB, &format!("alter server audit options ({options})"));
        site.broker.unbind(&site.names[1], &site.names[1], "#");
        site.waits("audit");
    };
    lose("add max_attempts '2147483647', add retry_backoff '1ms', add retry_backoff_max '10ms'");
    let text = remedy(cluster, "retrying", None, "unroutable");
    let exchange = &site.names[1];
    assert!(
        text.starts_with(&format!("bind a queue to exchange \"{exchange}\" for routing key \"")),
        "{text:?}"
    );
    cluster.exec(DB, command(&text));
    site.broker.bind(&site.names[1], &site.names[1], "#");
    cluster.exec(
        DB,
        "select outbox_retry(seq, destination) from outbox_messages where status = 'retrying'",
    );
    site.works("retries");

    lose("set max_attempts '1'");
    let text = remedy(cluster, "keys", None, "item:a");
    cluster.exec(DB, command(&remedy(cluster, "dead letters", None, "unroutable")));
    site.broker.bind(&site.names[1], &site.names[1], "#");
    as_told(cluster, &text);
    site.works("a dead letter");
}

#[test]
fn the_sequence_is_not_set_back_by_a_remedy_that_is_typed_late() {
    let site = Site::shared(&[]);
    let cluster = &site.cluster;
    let copied = "insert into outbox_events (seq, id, type, payload) select max(seq) + 3, gen_random_uuid(), 'T', '{}' from outbox_events";
    cluster.exec(
        DB,
        &format!(
            "alter table outbox_events disable trigger user; {copied}; alter table outbox_events enable trigger user"
        ),
    );
    let text = remedy(cluster, "sequence", None, "has not given it out");
    for _ in 0..6 {
        cluster.exec(DB, "select nextval('outbox_events_seq_seq')");
    }
    let before: i64 = cluster.query_one(DB, "select last_value from outbox_events_seq_seq");
    as_told(cluster, &text);
    assert!(
        cluster.query_one::<i64>(DB, "select last_value from outbox_events_seq_seq") >= before,
        "{text}"
    );
    site.works("a copy");
}

#[test]
fn a_process_that_locks_leases_and_a_prepared_transaction_end_by_their_commands() {
    let broker = Broker::shared();
    let (exchange, queue) = exchange_and_queue(broker);
    let conf = [
        "max_prepared_transactions = 2",
        "outbox.lease_ttl = '2s'",
        "outbox.lease_renew = '1s'",
    ];
    let (cluster, clock) = cluster_with_clock(broker, &exchange, &conf);
    cluster.exec(
        DB,
        "begin; select outbox_publish('T', '{\"label\": \"prepared\"}'); prepare transaction 'it''s one'",
    );
    clock.set(120, 0);
    let text = remedy(&cluster, "transactions", None, "has been prepared");
    as_told(&cluster, &text);
    wait_healthy(&cluster, "transactions");
    wait_drained(&cluster);
    assert_eq!(labels(&all_of(broker, &queue)), ["prepared"]);

    let mut holder = cluster.connect(DB);
    holder.run("begin; select from outbox_partitions for update");
    let text = remedy(&cluster, "locks", None, "has had rows of outbox_partitions locked");
    type_sql(&cluster, &text.commands[1]);
    wait_healthy(&cluster, "locks");
}

#[test]
fn a_fault_of_the_broker_itself_ends_as_the_remedy_says() {
    let site = Private::of(Broker::start_sized(Size::default()), &["outbox.confirm_timeout = '1s'"]);
    for (alarm, words) in [
        (["set_vm_memory_high_watermark", "0"], "memory"),
        (["set_disk_free_limit", "9999GB"], "disk"),
    ] {
        site.broker.ctl(&alarm);
        ["default", "audit"].iter().for_each(|to| site.waits(to));
        let text = remedy(&site.cluster, "blocked", Some("audit"), words);
        site.broker.shell(command(&text));
        site.works(words);
    }

    // It is reported while the destination is connected, or when the time of a message is over.
    site.cluster
        .exec(DB, "alter server audit options (add confirm_timeout '1min')");
    site.broker.stop_confirming("audit");
    site.waits("audit");
    let text = site.broker_remedy("audit", "does not confirm");
    site.cluster
        .exec(DB, "alter server audit options (drop confirm_timeout)");
    let same = site.broker_remedy("audit", "no confirm within 1s");
    assert_eq!(command(&same), command(&text));
    let listed = site.broker.shell(command(&text));
    assert!(listed.lines().any(|line| line == "audit"), "{listed}");
    site.broker.confirm_again("audit");
    site.works("a queue that did not confirm");

    site.broker.suspend();
    site.waits("default");
    let text = site.broker_remedy("default", "does not answer");
    assert!(
        text.starts_with("check the network and the load of the broker"),
        "{text}"
    );
    site.broker.resume();
    site.works("a broker that hung");

    let elsewhere = format!("amqp://relay@127.0.0.1:{}", dead_port());
    for (place, fault) in [
        (
            "default",
            format!("alter system set outbox.url = '{elsewhere}'; select pg_reload_conf()"),
        ),
        (
            "audit",
            format!(
                "create user mapping for outbox_worker server audit options (password 'right'); alter server audit options (add url '{elsewhere}')"
            ),
        ),
    ] {
        type_sql(&site.cluster, &fault);
        site.waits(place);
        let text = site.broker_remedy(place, "cannot be reached");
        assert!(text.starts_with("start the broker, or "), "{text}");
        type_sql(&site.cluster, &text.filled(&site.url));
        site.works(&fault);
    }
}

#[test]
fn tls_works_when_the_certificates_are_given_as_the_remedy_says() {
    let (authority, clients) = (Authority::new("CA"), Authority::new("CA of clients"));
    let site = Private::of(
        Broker::start_tls(&authority.issue("127.0.0.1"), Some(&clients.cert_pem)),
        &[],
    );
    let client = clients.issue("relay");
    let file = |name: &str, text: &str| {
        server_file(&site.cluster, name, text, 0o600)
            .to_string_lossy()
            .into_owned()
    };
    let ca = file("ca.pem", &authority.cert_pem);
    let (cert, key) = (file("cert.pem", &client.cert_pem), file("key.pem", &client.key_pem));
    let url = site.broker.tls_url().replace("//", "//relay@");

    // Both have it from the settings.
    let by_name = url.replace("127.0.0.1", "localhost");
    type_sql(
        &site.cluster,
        &format!("alter system set outbox.url = '{by_name}'; select pg_reload_conf()"),
    );
    ["default", "audit"].iter().for_each(|to| site.waits(to));
    let [first, second] = ["default", "audit"].map(|to| site.broker_remedy(to, "a CA that is not trusted"));
    assert_eq!(first, second);
    type_sql(
        &site.cluster,
        &command(&first).replace("/etc/postgresql/outbox-ca.pem", &ca),
    );
    let text = site.broker_remedy("audit", "is for 127.0.0.1, not for localhost");
    type_sql(&site.cluster, &text.filled(&url));
    site.obeys("broker", Some("audit"), "client certificate", |command| {
        command
            .replace("/etc/postgresql/outbox.pem", &cert)
            .replace("/etc/postgresql/outbox.key", &key)
    });

    // A file that cannot be used. A worker reads it when it connects.
    type_sql(
        &site.cluster,
        "alter system set outbox.tls_ca_file = '/nowhere/ca.pem'; select pg_reload_conf()",
    );
    site.disconnect();
    ["default", "audit"].iter().for_each(|to| site.waits(to));
    site.obeys("destination", Some("audit"), "tls_ca_file", |command| {
        filled(command, &ca)
    });

    // In the options of a server and of its user mapping.
    let other = Authority::new("another CA").cert_pem;
    site.cluster
        .exec(DB, &format!("alter server audit options (add tls_ca '{other}')"));
    site.waits("audit");
    site.obeys("broker", Some("audit"), "a CA that is not trusted", |command| {
        filled(command, &authority.cert_pem)
    });
    site.cluster
        .exec(DB, &format!("alter server audit options (add url '{url}')"));
    site.waits("audit");
    for mapping in [
        "",
        "create user mapping for public server audit options (user 'relay', password 'right')",
    ] {
        site.cluster.exec(DB, mapping);
        let text = site.broker_remedy("audit", "client certificate");
        type_sql(&site.cluster, &with_certificate(command(&text), &client));
        if mapping.is_empty() {
            let text = site.broker_remedy("audit", "refuses the user or password");
            type_sql(&site.cluster, &text.filled("right"));
        }
        site.works("a client certificate in a user mapping");
        site.cluster
            .exec(DB, "drop user mapping if exists for outbox_worker server audit");
        site.disconnect();
        site.waits("audit");
    }
}

/// The status that a receiver gives next, and whether it takes its time.
#[derive(Default)]
struct Mood {
    status: AtomicU16,
    is_slow: AtomicBool,
}

#[test]
fn a_receiver_gets_its_messages_when_the_remedy_is_done() {
    let site = Site::shared(&[]);
    let mood = Arc::new(Mood::default());
    let answers = |request: &Request, mood: &Mood| {
        if mood.is_slow.load(Ordering::Acquire) {
            pass_time_until(Instant::now() + Duration::from_millis(600));
        }
        match mood.status.load(Ordering::Acquire) {
            0 if request.path != "/right" => Reply::status(404),
            0 => Reply::status(200),
            401 if request.header("authorization") == "Bearer right" => Reply::status(200),
            1 => Reply::Close,
            status => Reply::status(status),
        }
    };
    let authority = Authority::new("CA");
    let clients = Authority::new("CA of clients");
    let (seen, also) = (Arc::clone(&mood), Arc::clone(&mood));
    let plain = Receiver::start(move |request| answers(request, &seen));
    let tls = Receiver::start_tls(&authority.issue("127.0.0.1"), Some(&clients), move |request| {
        answers(request, &also)
    });
    // Each fault has a destination of its own: a worker takes a message that fails after others have arrived for the
    // cause.
    let begins = |name: &str, options: &str, words: &str| {
        let sql = format!("create server {name} foreign data wrapper outbox_http options ({options})");
        site.cluster.exec(DB, &sql);
        site.waits(name);
        site.broker_remedy(name, words)
    };
    let arrives = |receiver: &Receiver, name: &str| {
        site.works(name);
        assert_eq!(receiver.labels().pop(), Some(format!("{name} waits")));
    };
    let types = |command: &str, value: &str| type_sql(&site.cluster, &filled(command, value));
    let at = |path: &str| format!("url '{}'", plain.url(path));
    let is_well = |name: &str| {
        mood.status.store(0, Ordering::Release);
        arrives(&plain, name);
    };

    let dead = format!("url 'http://127.0.0.1:{}/'", dead_port());
    let text = begins("down", &dead, "cannot be reached");
    assert!(text.starts_with("start the receiver, or "), "{text}");
    types(command(&text), &plain.url("/right"));
    is_well("down");
    types(
        command(&begins("moved", &at("/wrong"), "does not accept messages")),
        &plain.url("/right"),
    );
    is_well("moved");

    mood.status.store(401, Ordering::Release);
    types(
        command(&begins("token", &at("/right"), "refuses the credentials")),
        "right",
    );
    arrives(&plain, "token");
    for (name, mapping, command) in [
        ("by_token", "bearer_token 'wrong'", "SET bearer_token"),
        ("by_password", "user 'u', password 'wrong'", "SET password"),
        (
            "by_signature",
            "signing_secret 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw'",
            "ADD bearer_token",
        ),
    ] {
        mood.status.store(401, Ordering::Release);
        begins(name, &at("/right"), "refuses the credentials");
        let sql = format!("create user mapping for outbox_worker server {name} options ({mapping})");
        site.cluster.exec(DB, &sql);
        let text = wait_for("the remedy for a mapping", LONG, || {
            let text = site.broker_remedy(name, "refuses the credentials");
            text.contains(command).then_some(text)
        });
        types(self::command(&text), "right");
        match command {
            "SET password" => is_well(name),
            _ => arrives(&plain, name),
        }
    }

    for (name, status, words, says) in [
        ("busy", 429, "asks for fewer requests", "nothing: delivery resumes"),
        ("away", 503, "is not available", "nothing here: delivery resumes"),
        ("closes", 1, "failed: ", "see the log of the receiver"),
    ] {
        mood.status.store(status, Ordering::Release);
        let text = begins(name, &at("/right"), words);
        assert!(text.starts_with(says), "{text}");
        is_well(name);
    }

    mood.status.store(0, Ordering::Release);
    mood.is_slow.store(true, Ordering::Release);
    let slow = format!("{}, timeout '300ms'", at("/right"));
    types(command(&begins("slow", &slow, "does not answer")), "");
    arrives(&plain, "slow");
    mood.is_slow.store(false, Ordering::Release);

    for (name, level) in [("private", "system"), ("privately", "database postgres")] {
        let set = format!("alter {level} set outbox.http_allow = '10.0.0.0/8'; select pg_reload_conf()");
        type_sql(&site.cluster, &set);
        let is_set = "select current_setting('outbox.http_allow') = '10.0.0.0/8'";
        wait_true(&site.cluster, "the setting", is_set);
        let text = begins(name, &at("/right"), "is not public");
        assert!(text.contains("'10.0.0.0/8, 127.0.0.1'"), "{text}");
        types(command(&text), "");
        is_well(name);
    }

    let url = format!("url '{}'", tls.url("/right"));
    types(
        command(&begins("secure", &url, "a CA that is not trusted")),
        &authority.cert_pem,
    );
    let text = site.broker_remedy("secure", "client certificate");
    type_sql(
        &site.cluster,
        &with_certificate(command(&text), &clients.issue("relay")),
    );
    arrives(&tls, "secure");
}

#[test]
fn a_message_that_waits_long_has_the_remedy_of_its_cause() {
    let site = Site::shared(&["max_prepared_transactions = 2"]);
    let cluster = &site.cluster;
    // A session, and a prepared transaction, that have its row locked.
    for (end, cause) in [
        ("", "keeps the workers waiting by its locks"),
        ("prepare transaction 'held'", "a prepared transaction has it locked"),
    ] {
        site.waits_for_long();
        let mut holder = cluster.connect(DB);
        holder.run(&format!(
            "begin; select from outbox where destination = 'audit' for update; {end}"
        ));
        cluster.exec(DB, "select outbox_resume('audit')");
        site.obeys("lag", Some("audit"), cause, str::to_owned);
    }
    // A session that has a table locked which the workers write.
    site.waits_for_long();
    let mut holder = cluster.connect(DB);
    holder.run("begin; lock outbox_history in share mode");
    cluster.exec(DB, "select outbox_resume('audit')");
    site.obeys(
        "lag",
        Some("audit"),
        "keeps the workers waiting by its locks",
        str::to_owned,
    );

    // A limit of the rate, in the options of the server and in the settings.
    cluster.publish_run("audit", "fast", 100);
    wait_drained(cluster); // more than 54 in a minute, as one a second will be
    assert_eq!(all_of(&site.broker, &site.names[1]).len(), 100);
    for limit in [
        "alter server audit options (add max_rate '1')",
        "alter server audit options (drop max_rate); alter system set outbox.max_rate = 1; select pg_reload_conf()",
    ] {
        site.waits_for_long();
        (0..300).for_each(|_| site.waits("audit"));
        cluster.exec(DB, "update outbox set enqueued_at = now() - interval '1 hour'");
        type_sql(cluster, &format!("{limit}; select outbox_resume('audit')"));
        site.obeys("lag", Some("audit"), "may take at most 1 a second", |command| {
            assert!(command.contains("'2'"), "{command}");
            command.replace("'2'", "'1000'")
        });
    }
    type_sql(cluster, "alter system reset outbox.max_rate; select pg_reload_conf()");
    wait_true(cluster, "no limit", "select current_setting('outbox.max_rate') = '0'");

    // None of these.
    site.waits_for_long();
    let worker = cluster.query_one::<i32>(DB, "select pid from outbox_workers") as u32;
    process::signal(worker, libc::SIGSTOP);
    cluster.exec(DB, "select outbox_resume('audit')");
    site.obeys("lag", Some("audit"), "has waited for", |command| {
        assert_eq!(
            command,
            "ALTER SYSTEM SET outbox.workers = '2'; SELECT pg_reload_conf()"
        );
        process::signal(worker, libc::SIGCONT);
        command.to_owned()
    });
}

#[test]
fn changes_of_tables_that_stop_the_workers_are_undone_one_by_one() {
    let site = Site::shared(&[]);
    pause(&site.cluster); // an owner that is no worker role can publish nothing
    ["default", "audit"].iter().for_each(|to| site.waits(to));
    site.cluster.exec(
        DB,
        "alter table outbox enable row level security; alter table outbox force row level security;
         alter table outbox_events owner to postgres;
         create function fails() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;
         create trigger fails before insert or delete on outbox_history for each row execute function fails()",
    );
    site.cluster.set_conf("outbox.enabled", "on");
    let fails = "a statement of a worker fails";
    for (problem, command) in [
        (
            "public.outbox_events must belong to outbox_worker",
            "ALTER TABLE public.outbox_events OWNER TO outbox_worker",
        ),
        (fails, "ALTER TABLE public.outbox NO FORCE ROW LEVEL SECURITY"),
        (fails, "ALTER TABLE public.outbox_history DISABLE TRIGGER fails"),
    ] {
        let text = remedy(&site.cluster, "database", None, problem);
        assert_eq!(self::command(&text), command);
        site.cluster.exec(DB, command);
    }
    site.works("changes of tables");
}

/// Each table and each function that runs as its owner. One after the other they would be found only as they fail.
#[test]
fn one_remedy_gives_all_that_belongs_to_another_role_back_to_the_workers() {
    let site = Site::shared(&[]);
    let cluster = &site.cluster;
    cluster.exec(DB, "create role other; reassign owned by outbox_worker to other");
    let text = remedy(cluster, "database", None, " more must belong to outbox_worker");
    cluster.exec(DB, &text);
    site.works("REASSIGN OWNED");
    cluster.exec(DB, "drop role other");

    // The workers do not read it, so none of their statements fails.
    cluster.exec(DB, "alter table outbox_settings owner to postgres");
    let text = remedy(
        cluster,
        "database",
        None,
        "public.outbox_settings must belong to outbox_worker",
    );
    assert_eq!(&*text, "ALTER TABLE public.outbox_settings OWNER TO outbox_worker");
    cluster.exec(DB, &text);
    site.works("another owner of the settings");
}

#[test]
fn a_database_or_a_role_that_lets_no_worker_in_is_named_until_its_remedy_is_typed() {
    const ELSEWHERE: &str = "template1";
    let site = Site::shared(&[]);
    // Opened before the faults: one of them closes the database.
    let mut reader = site.cluster.connect(DB);
    let sql = r#"select commands -> 0 ->> 'command' from outbox_health where "check" = 'workers' and strpos(problem, $1) > 0"#;
    let database = format!("alter database {DB}");
    let mut faults = vec![
        (format!("{database} is_template true"), "it is a template"),
        (
            format!("{database} allow_connections false"),
            "it is closed to connections",
        ),
        (
            format!("revoke connect on database {DB} from public, outbox_worker"),
            "role outbox_worker may not connect to it",
        ),
    ];
    let version: i32 = site
        .cluster
        .query_one(DB, "select current_setting('server_version_num')::integer");
    if version < 170_000 {
        faults.push((
            "alter role outbox_worker nologin".to_owned(),
            "role outbox_worker may not log in",
        ));
    }
    for (fault, words) in faults {
        site.cluster.exec(ELSEWHERE, &fault);
        let workers = "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'outbox worker'";
        site.cluster.exec(ELSEWHERE, workers);
        let command: String = wait_for(words, LONG, || {
            let found = reader.query_opt(sql, &[&words]).expect("outbox_health");
            found.map(|row| row.get(0))
        });
        site.cluster.exec(ELSEWHERE, &command);
        site.works(words);
    }
}

#[test]
fn a_copy_and_a_source_deliver_after_their_remedies() {
    let site = Site::shared(&[]);
    let cluster = &site.cluster;
    type_sql(
        cluster,
        "alter system set outbox.identity = 'another'; select pg_reload_conf()",
    );
    remedy(cluster, "identity", None, "outbox.identity is 'another'");
    ["default", "audit"].iter().for_each(|to| site.waits(to));
    site.obeys("identity", None, "outbox.identity is 'another'", str::to_owned);

    cluster.exec(
        DB,
        "create role keeper; create schema shop authorization keeper; set role keeper;
         create table shop.events (id bigint generated always as identity, kind text, at timestamptz default now(), data jsonb);
         insert into shop.events (kind, data) values ('T', '{\"label\": \"default waits\"}'), ('T', '{\"label\": \"audit waits\"}');
         reset role;
         select outbox_source_set('shop.events', seq => 'id', type => 'kind', created_at => 'at', payload => 'data')",
    );
    for (fault, typed) in [
        ("alter table shop.events rename kind to type", None),
        (
            "alter table shop.events rename to gone",
            Some("alter table shop.gone rename to events"),
        ),
    ] {
        cluster.exec(DB, fault);
        cluster.exec(
            DB,
            "select outbox_enqueue(1, 'a'), outbox_enqueue(2, 'b', destination => 'audit')",
        );
        let text = remedy(cluster, "source", None, "shop.events");
        match typed {
            Some(typed) => cluster.exec(DB, typed), // the remedy leaves it to the reader
            None => cluster.exec(DB, &command(&text).replace("'kind'", "'type'")),
        }
        wait_drained(cluster);
        wait_healthy(cluster, "source");
        for (queue, to) in site.names.iter().zip(["default", "audit"]) {
            assert_eq!(labels(&all_of(&site.broker, queue)), [format!("{to} waits")]);
        }
    }
    cluster.exec(DB, "select outbox_source_reset()");
    site.works("a source");
}

#[test]
fn a_server_without_the_library_delivers_after_its_remedy() {
    let broker = Broker::shared();
    let names = [fresh_names().0, fresh_names().0];
    let cluster = unconnected_builder(&broker.url(), &names[0], &["shared_preload_libraries = 'auto_explain'"])
        .preload(false)
        .start();
    let site = Site::new(broker, cluster, names);
    ["default", "audit"].iter().for_each(|to| site.waits(to));
    let text = remedy(&site.cluster, "preload", None, "no worker runs");
    let typed = command(&text);
    assert_eq!(
        typed,
        "ALTER SYSTEM SET shared_preload_libraries = 'auto_explain', 'outbox'"
    );
    // A role that may not see the setting has a remedy, too.
    let mut monitor = site.cluster.connect(DB);
    monitor.run("create role looker in role outbox_monitor; set role looker");
    let shown = r#"select remedy from outbox_health where "check" = 'preload'"#;
    assert_eq!(
        monitor.value::<String>(shown),
        "add outbox to shared_preload_libraries and restart the server"
    );
    type_sql(&site.cluster, typed);
    site.cluster.restart();
    site.works("a restart");
}

#[test]
fn a_trigger_or_a_rule_that_undoes_changes_of_messages_is_named_until_it_is_gone() {
    let site = Site::shared(&[]);
    site.cluster.exec(
        DB,
        "create function nothing() returns trigger language plpgsql as $$ begin return null; end $$",
    );
    for (fault, named) in [
        (
            "create trigger keep before delete on outbox for each row execute function nothing()",
            "trigger keep of public.outbox",
        ),
        (
            "create trigger lose before insert on outbox_waiting for each row execute function nothing()",
            "trigger lose of public.outbox_waiting",
        ),
        (
            "create rule keep as on delete to outbox do instead nothing",
            "rule keep of public.outbox",
        ),
    ] {
        site.cluster.exec(DB, fault);
        site.waits("default");
        let text = remedy(&site.cluster, "triggers", None, named);
        as_told(&site.cluster, &text);
        type_sql(&site.cluster, &text.commands[1]);
        site.works(named);
    }
    // What only looks on, or changes events, is left alone.
    site.cluster.exec(
        DB,
        "create trigger look after insert on outbox for each row execute function nothing();
         create trigger stamp before update on outbox_events for each row execute function nothing()",
    );
    assert!(health(&site.cluster, "triggers").0);
}

#[test]
fn each_altered_function_of_the_extension_is_restored_by_its_remedy() {
    let cluster = quiet_cluster();
    let mut client = cluster.connect(DB);
    let names = "select name from outbox_internal.installed_functions";
    let names: Vec<String> = client
        .query(names, &[])
        .expect("names")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert!(names.len() > 30, "{names:?}");
    for name in &names {
        client.run(&format!(
            "do $$ begin execute (select format('alter function %s security invoker set work_mem = 1024', p.oid::regprocedure)
             from pg_proc p where p.proname = '{name}' and p.prosecdef); end $$"
        ));
        let text = remedy(
            &cluster,
            "schema",
            None,
            &format!("function {name} of the extension was altered"),
        );
        client.run(command(&text));
        assert!(health(&cluster, "schema").0, "{name}: {:?}", health(&cluster, "schema"));
    }
    // Its owner and its grants stay, and it is no way to create another function.
    cluster.exec(
        DB,
        "create role app in role outbox_writer; set role app; select outbox_publish('T', '{}')",
    );
    for name in ["nothing", "settle"] {
        refused(&cluster, &format!("select outbox_internal.restore_function('{name}')"));
    }
    refused(
        &cluster,
        "set role outbox_worker; select outbox_internal.restore_function('outbox_retry')",
    );
}
