//! Tests that messages reach the broker over TLS, and reach no other broker than the intended one. On a RabbitMQ with
//! certificates that the tests create. crates/transport/tests/tls.rs tests hostile peers during the handshake.
//!
//! The consumers read over the broker's plain port, only to see what arrived.

use support::faults::{Faults, messages};
use support::load::{Load, Plan};
use support::oracle::judge;
use support::wait::try_wait_for;
use support::workdir::ServerDir;
use support::*;
use support::{Authority, Broker, Certificate, Cluster, PrivateBroker, wait_until};

const HOST: &str = "127.0.0.1";

/// A server whose broker is at `url`, with files for these TLS settings.
fn tls_cluster(url: &str, exchange: &str, files: &[(&str, &str)]) -> Cluster {
    let cluster = unconnected_cluster("", exchange, &[]);
    for (setting, text) in files {
        write(&cluster, setting, text);
    }
    cluster.set_conf("outbox.url", url);
    cluster
}

/// Writes `text` into a file for the setting, and sets the setting to its path. An existing file is replaced.
fn write(cluster: &Cluster, setting: &str, text: &str) {
    let path = server_file(cluster, setting, text, 0o600);
    cluster.set_conf(setting, path.to_str().expect("UTF-8"));
}

fn write_client(cluster: &Cluster, certificate: &Certificate) {
    write(cluster, "outbox.tls_cert_file", &certificate.cert_pem);
    write(cluster, "outbox.tls_key_file", &certificate.key_pem);
}

fn failing_checks(cluster: &Cluster) -> String {
    cluster.query_one(
        DB,
        r#"select coalesce(string_agg("check", ', '), '') from outbox_health where not ok"#,
    )
}

/// Waits until the problem of `check` in outbox_health contains each of `words`.
fn wait_for_words(cluster: &Cluster, check: &str, words: &[&str]) {
    let mut last = String::new();
    let found = try_wait_for(LONG, || {
        let (ok, problem) = health(cluster, check);
        let found = !ok && words.iter().all(|word| problem.contains(word));
        last = problem;
        found.then_some(())
    });
    assert!(
        found.is_some(),
        "{check:?} of outbox_health is {last:?}, without {words:?}"
    );
}

fn publish(cluster: &Cluster, n: usize) {
    cluster.exec(
        DB,
        &format!("select outbox_publish('T', '{n}', 'thing', '{n}') from generate_series(1, {n})"),
    );
}

/// The broker's list of the connections of workers, a line each.
fn relays(broker: &PrivateBroker, columns: &str) -> Vec<String> {
    let arguments: Vec<&str> = ["list_connections", "--silent", "client_properties"]
        .into_iter()
        .chain(columns.split(' '))
        .collect();
    let lines = broker.ctl(&arguments);
    let relays = lines.lines().filter(|line| line.contains("outbox: server-"));
    relays
        .filter_map(|line| Some(line.rsplit_once("]\t")?.1.to_owned()))
        .collect()
}

#[test]
fn committed_messages_reach_the_consumer_over_tls_through_broken_connections() {
    let authority = Authority::new("CA");
    let broker = Broker::start_tls(&authority.issue(HOST), None);
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = tls_cluster(
        &broker.tls_url(),
        &exchange,
        &[("outbox.tls_ca_file", &authority.cert_pem)],
    );
    wait_connected(&cluster);
    assert_eq!(failing_checks(&cluster), "");
    assert_eq!(relays(&broker, "ssl ssl_protocol"), ["true\ttlsv1.3"]);

    let load = Load::start(&cluster, &Plan::default());
    load.wait_for_more(200);
    let mut faults = Faults::default();
    faults.during(1, || {
        let before = relays(&broker, "pid");
        broker.ctl(&["close_all_connections", "a test"]);
        wait_until("another connection", LONG, || {
            let now = relays(&broker, "pid");
            !now.is_empty() && now.iter().all(|pid| !before.contains(pid))
        });
        wait_connected(&cluster);
    });
    load.wait_for_more(200);
    let sent = load.stop();
    wait_drained(&cluster);
    let arrived = arrived(&all_of(&broker, &queue));
    faults.assert_explain(&judge(&sent, &arrived), &messages(&cluster));
}

#[test]
fn a_broker_with_the_wrong_certificate_gets_nothing_and_health_reports_why() {
    let authority = Authority::new("CA");
    let broker = Broker::start_tls(&authority.issue(HOST), None);
    let (exchange, queue) = exchange_and_queue(&broker);
    let cluster = tls_cluster(
        &broker.tls_url(),
        &exchange,
        &[("outbox.tls_ca_file", &Authority::new("another CA").cert_pem)],
    );
    publish(&cluster, 1);
    wait_for_words(
        &cluster,
        "broker",
        &["TLS with the broker failed", "a CA that is not trusted"],
    );
    assert_eq!(failing_checks(&cluster), "broker");

    // The url comes first: with the right authority the old certificate would be valid.
    cluster.set_conf("outbox.url", &format!("amqps://localhost:{}", broker.tls_port()));
    write(&cluster, "outbox.tls_ca_file", &authority.cert_pem);
    wait_for_words(&cluster, "broker", &["is for 127.0.0.1, not for localhost"]);

    cluster.set_conf("outbox.url", &format!("amqps://127.0.0.1:{}", broker.port()));
    wait_for_words(&cluster, "broker", &["does not speak TLS"]);

    cluster.set_conf("outbox.url", &format!("amqp://127.0.0.1:{}", broker.tls_port()));
    wait_for_words(&cluster, "broker", &["the peer speaks TLS", "amqps://"]);
    let wrong_until: String = cluster.query_one(DB, "select clock_timestamp()::text");
    cluster.set_conf("outbox.url", &broker.tls_url());
    wait_published(&cluster, 1);
    let was_sent_later = format!("select min(published_at) > '{wrong_until}' from outbox_history");
    assert!(cluster.query_one::<bool>(DB, &was_sent_later));
    assert_eq!(all_of(&broker, &queue).len(), 1);
    assert_eq!(failing_checks(&cluster), "");
}

#[test]
fn a_renewed_certificate_of_the_broker_is_accepted_and_an_expired_one_is_refused() {
    let authority = Authority::new("CA");
    let broker = Broker::start_tls(&authority.issue(HOST), None);
    let (exchange, _queue) = exchange_and_queue(&broker);
    let cluster = tls_cluster(
        &broker.tls_url(),
        &exchange,
        &[("outbox.tls_ca_file", &authority.cert_pem)],
    );
    wait_connected(&cluster);

    broker.stop();
    broker.set_certificate(&authority.issue_expired(HOST));
    broker.start_again();
    publish(&cluster, 1);
    wait_for_words(&cluster, "broker", &["expired on 29 Feb 2020"]);

    broker.stop();
    broker.set_certificate(&authority.issue(HOST));
    broker.start_again();
    wait_published(&cluster, 1);
    assert_eq!(failing_checks(&cluster), "");
}

#[test]
fn the_worker_presents_its_client_certificate_and_each_renewed_one() {
    let authority = Authority::new("CA");
    let clients = Authority::new("CA of clients");
    let broker = Broker::start_tls(&authority.issue(HOST), Some(&clients.cert_pem));
    let (exchange, _queue) = exchange_and_queue(&broker);
    let cluster = tls_cluster(
        &broker.tls_url(),
        &exchange,
        &[("outbox.tls_ca_file", &authority.cert_pem)],
    );
    publish(&cluster, 1);
    wait_for_words(&cluster, "broker", &["asked for a client certificate and none is set"]);

    write_client(&cluster, &Authority::new("CA of others").issue("relay"));
    wait_for_words(&cluster, "broker", &["our client certificate"]);

    // While the broker refuses the certificate, a better one is used without a reload.
    let first = clients.issue("first");
    server_file(&cluster, "outbox.tls_cert_file", &first.cert_pem, 0o600);
    server_file(&cluster, "outbox.tls_key_file", &first.key_pem, 0o600);
    wait_published(&cluster, 1);
    assert_eq!(failing_checks(&cluster), "");
    assert_eq!(relays(&broker, "peer_cert_subject"), ["CN=first"]);

    // While it is connected, a new one is used at a reload.
    let second = clients.issue("second");
    server_file(&cluster, "outbox.tls_cert_file", &second.cert_pem, 0o600);
    server_file(&cluster, "outbox.tls_key_file", &second.key_pem, 0o600);
    cluster.reload();
    wait_until("the renewed certificate to be shown", LONG, || {
        relays(&broker, "peer_cert_subject") == ["CN=second"]
    });
    publish(&cluster, 10);
    wait_published(&cluster, 11);

    // A reload with the same files, or with unreadable files, leaves the connection alone.
    let before = relays(&broker, "pid");
    server_file(&cluster, "outbox.tls_key_file", "", 0o644);
    cluster.set_conf("outbox.batch_size", "10");
    publish(&cluster, 10);
    wait_published(&cluster, 21);
    assert_eq!(relays(&broker, "pid"), before);
}

#[test]
fn a_client_certificate_is_the_login_when_the_url_asks_for_external() {
    let authority = Authority::new("CA");
    let broker = Broker::start_tls(&authority.issue(HOST), Some(&authority.cert_pem));
    let (exchange, _queue) = exchange_and_queue(&broker);
    let url = format!("{}?auth_mechanism=external", broker.tls_url());
    let cluster = tls_cluster(&url, &exchange, &[("outbox.tls_ca_file", &authority.cert_pem)]);
    wait_for_words(
        &cluster,
        "destination",
        &["auth_mechanism=external", "client certificate"],
    );

    write_client(&cluster, &authority.issue("relay"));
    wait_for_words(&cluster, "broker", &["refuses the user"]);

    broker.add_user("relay", "an unused password");
    publish(&cluster, 1);
    wait_published(&cluster, 1);
    // RabbitMQ keeps a refused connection for some seconds.
    wait_until("one connection, by EXTERNAL", LONG, || {
        relays(&broker, "user auth_mechanism") == ["relay\tEXTERNAL"]
    });
}

/// This test needs no broker: the worker contacts none.
#[test]
fn health_names_an_unusable_certificate_file_and_its_problem() {
    let authority = Authority::new("CA");
    let (ours, other) = (authority.issue("relay"), authority.issue("relay"));
    let cluster = tls_cluster("amqps://127.0.0.1:1", "x", &[("outbox.tls_ca_file", "no PEM")]);
    let wait_for_problem = |words: &[&str]| wait_for_words(&cluster, "destination", words);
    wait_for_problem(&["outbox.tls_ca_file /", "holds no certificate in PEM"]);
    cluster.set_conf("outbox.tls_ca_file", "/nowhere/ca.pem");
    wait_for_problem(&["cannot read outbox.tls_ca_file /nowhere/ca.pem", "No such file"]);
    write(&cluster, "outbox.tls_ca_file", &authority.cert_pem);

    write(&cluster, "outbox.tls_cert_file", &ours.cert_pem);
    wait_for_problem(&["outbox.tls_cert_file is set without its key"]);
    write(&cluster, "outbox.tls_key_file", &other.key_pem);
    wait_for_problem(&["outbox.tls_key_file /", "does not belong to the certificate"]);
    server_file(&cluster, "outbox.tls_key_file", &ours.key_pem, 0o640);
    wait_for_problem(&["outbox.tls_key_file /", "chmod 600"]);
    assert_eq!(failing_checks(&cluster), "destination");
    let remedy: String = cluster.query_one(DB, r#"select remedy from outbox_health where "check" = 'destination'"#);
    assert!(remedy.contains("PEM"), "{remedy}");

    // With a correct file the worker tries again by itself; then only the broker is missing.
    server_file(&cluster, "outbox.tls_key_file", &ours.key_pem, 0o600);
    wait_for_words(&cluster, "broker", &["cannot be reached"]);
    assert_eq!(failing_checks(&cluster), "broker");
    let key_line = ours.key_pem.lines().nth(1).expect("a line of base64");
    assert!(!cluster.log().contains(key_line), "the key is in the log");
}

/// The commands of docs/operate/install.md, as a user copies them, except for the host.
#[test]
fn the_documented_commands_make_certificates_that_broker_and_worker_accept() {
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operate/install.md");
    let docs = std::fs::read_to_string(docs).expect("docs/operate/install.md");
    let section = docs
        .split("\n## ")
        .find(|s| s.starts_with("TLS\n"))
        .expect("a section TLS");
    let commands: Vec<String> = section
        .lines()
        .filter(|line| line.starts_with("openssl ") || line.starts_with("echo "))
        .map(|line| line.replace("DNS:broker.example", &format!("IP:{HOST}")))
        .collect();
    let dir = ServerDir::create("documented");
    let done = std::process::Command::new("sh")
        .args(["-ec", &commands.join("\n")])
        .current_dir(dir.path())
        .output()
        .expect("run sh");
    assert!(
        done.status.success(),
        "{commands:#?}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    let text = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
    let pair = |name: &str| Certificate {
        cert_pem: text(&format!("{name}.pem")),
        key_pem: text(&format!("{name}.key")),
    };

    let ca = text("ca.pem");
    let broker = Broker::start_tls(&pair("broker"), Some(&ca));
    let (exchange, _queue) = exchange_and_queue(&broker);
    let cluster = tls_cluster(&broker.tls_url(), &exchange, &[("outbox.tls_ca_file", &ca)]);
    write_client(&cluster, &pair("relay"));
    publish(&cluster, 1);
    wait_published(&cluster, 1);
    assert_eq!(relays(&broker, "peer_cert_subject"), ["CN=relay"]);
    dir.finish();
}
