//! Tests that each remedy of outbox_health ends the fault that it is for, and breaks nothing else. A test makes the fault
//! on a server with two destinations, the default one and `audit`, which takes what it can from the settings. It types
//! the remedy as it is shown, and fills in only what the remedy leaves open: a password, a URL, old patterns. Then all
//! checks are ok, and both destinations deliver. Faults with tests of their own: tests/copies.rs (partitions, sequence),
//! tests/privileges.rs (role), tests/overloads (schema), tests/operating/hung.rs (a stopped worker), tests/slots.rs.

use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use support::clock::cluster_with_clock;
use support::private_broker::PrivateBroker;
use support::*;

/// What begins a command in a remedy, and what ends it.
const BEGINS: [&str; 7] = [
    "rabbitmqctl set_",
    "rabbitmqctl add_",
    "ALTER ",
    "CREATE ",
    "COMMIT PREPARED",
    "kill ",
    "select ",
];
const ENDS: [&str; 6] = [
    ", or ",
    "; or ",
    "; then ",
    " with the old",
    " at the shell",
    "; correct the cause",
];

/// The first command of a remedy.
fn command(remedy: &str) -> &str {
    let begin = BEGINS.iter().filter_map(|word| remedy.find(word)).min();
    let command = &remedy[begin.unwrap_or_else(|| panic!("no command: {remedy}"))..];
    let end = ENDS.iter().filter_map(|word| command.find(word)).min();
    &command[..end.unwrap_or(command.len())]
}

/// Waits until the check fails for the destination with these words in its problem, and returns the remedy.
fn remedy(cluster: &Cluster, check: &str, destination: Option<&str>, words: &str) -> String {
    let sql = r#"select remedy from outbox_health
                 where not ok and "check" = $1 and destination is not distinct from $2 and strpos(problem, $3) > 0"#;
    wait_for(&format!("{check}: {words}"), LONG, || {
        let rows = cluster.connect(DB).query(sql, &[&check, &destination, &words]);
        Some(rows.expect("outbox_health").first()?.get(0))
    })
}

/// Types statements one after the other, as psql does.
fn type_sql(cluster: &Cluster, command: &str) {
    let mut client = cluster.connect(DB);
    command.split("; ").for_each(|statement| client.run(statement));
}

/// A server whose default destination is the exchange `events`, and `audit` the exchange of this name.
struct Site {
    broker: PrivateBroker,
    /// rabbitmqctl of the broker.
    ctl: PathBuf,
    cluster: Cluster,
    password: PathBuf,
    url: String,
}

impl Site {
    fn new() -> Self {
        let broker = Broker::start_sized(Size::default());
        broker.add_user("relay", "right");
        broker.ctl(&["set_permissions", "relay", "^(events|audit)$", "^(events|audit)$", "^$"]);
        for name in ["events", "audit"] {
            broker.declare_bound(name, name, Value::Null);
        }
        let url = format!("amqp://relay@127.0.0.1:{}", broker.port());
        let conf = [
            "outbox.retry_backoff = '100ms'",
            "outbox.retry_backoff_max = '1s'",
            "outbox.lease_ttl = '2s'",
            "outbox.lease_renew = '1s'",
        ];
        let cluster = unconnected_cluster(&url, "events", &conf);
        let password = server_file(&cluster, "password", "right\n", 0o600);
        cluster.set_conf("outbox.password_file", &password.to_string_lossy());
        cluster.exec(
            DB,
            "create server audit foreign data wrapper outbox_amqp options (exchange 'audit')",
        );
        let site = Self {
            ctl: broker.ctl_script(),
            broker,
            cluster,
            password,
            url,
        };
        site.works("a start");
        site
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
        for (queue, to) in [("events", "default"), ("audit", "audit")] {
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

    fn disconnect(&self) {
        self.broker.ctl(&["close_all_connections", "a test"]);
    }

    /// Types a command at a shell on the host of the broker.
    fn shell(&self, command: &str) {
        let typed = command.replace("rabbitmqctl", &self.ctl.to_string_lossy());
        let output = Command::new("sh").args(["-c", &typed]).output().expect("sh");
        assert!(output.status.success(), "{command}: {output:?}");
    }

    fn broker_remedy(&self, destination: &str, words: &str) -> String {
        remedy(&self.cluster, "broker", Some(destination), words)
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
    let site = Site::new();
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
            .replace("user '...'", "user 'relay'")
            .replace("'...'", "'right'");
        type_sql(&site.cluster, &filled);
        site.works(fault);
        site.cluster.exec(DB, undo);
        site.works(undo);
    }
}

#[test]
fn a_refusal_of_the_broker_ends_with_its_command() {
    let site = Site::new();
    site.broker
        .ctl(&["set_permissions", "relay", "^audit$", "^(audit|more)$", "^$"]);
    site.disconnect(); // a channel remembers a permission
    site.waits("default");
    let text = site.broker_remedy("default", "lacks a permission");
    let old = [("CONFIGURE", "^audit$"), ("WRITE", "^(audit|more)$"), ("READ", "^$")];
    site.shell(
        &old.iter()
            .fold(command(&text).to_owned(), |text, (word, old)| text.replace(word, old)),
    );
    site.works("a permission");
    let now = site.broker.ctl(&["list_user_permissions", "relay"]);
    assert!(
        now.contains("^audit$|^events$") && now.contains("^(audit|more)$|^events$"),
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
        site.shell(command(&text));
        site.works(set);
    }

    site.cluster.set_conf("outbox.url", &format!("{}/new", site.url));
    site.shell(command(&site.broker_remedy("default", "not found")));
    site.shell(command(&site.broker_remedy("default", "access to vhost")));
    site.broker_remedy("default", "no exchange");
    // The patterns for one exchange do not hold for the other.
    let text = site.broker_remedy("audit", "no exchange");
    assert!(
        text.contains("ALTER SERVER audit OPTIONS (ADD exchange_type 'topic')"),
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
    let (_, list) = text.split_once("see which queue is full: ").expect("a command");
    site.shell(list.split_once(';').expect("its end").0);
    assert_eq!(labels(&all_of(&site.broker, "audit")), ["fills"]);
    wait_drained(&site.cluster);
    assert_eq!(labels(&all_of(&site.broker, "audit")), ["audit waits"]);
    site.works("a full queue");
}

#[test]
fn an_exchange_is_declared_or_only_checked_and_that_of_another_destination_is_left_alone() {
    let site = Site::new();
    // The exchange of audit is not of the type that the remedy names, and audit has no option exchange_type.
    site.replace_exchange("audit", "fanout", true);
    site.broker.delete_exchange("events");
    site.waits("default");
    type_sql(&site.cluster, command(&site.broker_remedy("default", "does not exist")));
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
    type_sql(&site.cluster, command(&site.broker_remedy("audit", "does not exist")));
    wait_stats(&site.cluster, "audit", "state = 'connected'");
    site.broker.bind("audit", "audit", "#");
    site.works("a missing exchange of a server");

    // An exchange that is not durable, and one of another type.
    site.replace_exchange("audit", "topic", false);
    site.waits("audit");
    type_sql(&site.cluster, command(&site.broker_remedy("audit", "its property")));
    site.works("an exchange that is not durable");
    site.cluster.exec(DB, "alter server audit options (drop exchange_type)");
    site.replace_exchange("audit", "topic", true);
    site.cluster.set_conf("outbox.exchange_type", "topic");
    site.works("a type in the settings");
    site.replace_exchange("events", "fanout", true);
    site.waits("default");
    type_sql(&site.cluster, command(&site.broker_remedy("default", "its property")));
    site.works("an exchange of another type");
    // Without another destination the settings are changed.
    site.cluster.exec(
        DB,
        "drop server \"default\"; alter server audit options (add exchange_type 'topic')",
    );
    site.waits("default");
    let text = site.broker_remedy("default", "its property");
    assert!(text.contains("ALTER SYSTEM SET outbox.exchange_type"), "{text}");
    type_sql(&site.cluster, command(&text));
    site.works("another type in the settings");
}

#[test]
fn a_setting_is_changed_where_it_is_set() {
    let site = Site::new();
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
        type_sql(cluster, command(&text));
        wait_healthy(cluster, "room");
        let text = remedy(cluster, "paused", Some("audit"), "paused by");
        type_sql(cluster, command(&text));
        site.works(&format!("outbox.max_pending by {level}"));
        cluster.exec(DB, "alter server audit options (drop max_pending)");
    }
    for (setting, value, words) in [
        ("outbox.workers", "0", "outbox.workers is 0"),
        ("outbox.databases", "elsewhere", "outbox.databases does not name it"),
    ] {
        alter("system", setting, value);
        site.waits("default");
        type_sql(cluster, command(&remedy(cluster, "workers", None, words)));
        site.works(setting);
    }
    cluster.exec(DB, "alter role outbox_worker rename to renamed");
    site.waits("default");
    type_sql(cluster, command(&remedy(cluster, "role", None, "does not exist")));
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
    let site = Site::new();
    let cluster = &site.cluster;
    for discards in [false, true] {
        cluster.exec(DB, "select outbox_pause('audit')");
        wait_paused(cluster, "audit");
        site.waits("audit");
        cluster.exec(DB, "drop server audit; select outbox_resume('audit')");
        let text = remedy(cluster, "destination", Some("audit"), "does not exist");
        let (_, discard) = text.split_once("discard them: ").expect("a command");
        let create = command(&text).replace("'...'", "'audit'");
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
}

#[test]
fn a_message_that_fails_is_retried_by_the_command_of_each_check() {
    let site = Site::new();
    let cluster = &site.cluster;
    let lose = |options: &str| {
        cluster.exec(DB, &format!("alter server audit options ({options})"));
        site.broker.unbind("audit", "audit", "#");
        site.waits("audit");
    };
    lose("add retry_backoff '1ms', add retry_backoff_max '10ms'");
    let text = remedy(cluster, "retrying", None, "unroutable");
    cluster.exec(DB, command(&text));
    site.broker.bind("audit", "audit", "#");
    cluster.exec(
        DB,
        "select outbox_retry(seq, destination) from outbox_messages where status = 'retrying'",
    );
    site.works("retries");

    lose("add max_attempts '1'");
    let text = remedy(cluster, "keys", None, "item:a");
    cluster.exec(DB, command(&remedy(cluster, "dead letters", None, "unroutable")));
    site.broker.bind("audit", "audit", "#");
    type_sql(cluster, command(&text));
    site.works("a dead letter");
}

#[test]
fn the_sequence_is_not_set_back_by_a_remedy_that_is_typed_late() {
    let site = Site::new();
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
    type_sql(cluster, command(&text));
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
    type_sql(&cluster, command(&text));
    wait_healthy(&cluster, "transactions");
    wait_drained(&cluster);
    assert_eq!(labels(&all_of(broker, &queue)), ["prepared"]);

    let mut holder = cluster.connect(DB);
    holder.run("begin; select from outbox_partitions for update");
    let text = remedy(&cluster, "locks", None, "has had rows of outbox_partitions locked");
    let (_, end) = text.split_once("else ").expect("a second command");
    type_sql(&cluster, end);
    wait_healthy(&cluster, "locks");
}
