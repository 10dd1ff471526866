//! Tests that each sslmode of outboxctl requires what it requires in psql. The server has a real certificate; psql runs
//! each case too.

use super::connection::{Way, who_may};
use super::quiet_cluster;
use serde_json::Value;
use std::process::Command;
use support::*;
use support::{Authority, Certificate, Cluster};

/// A server with TLS and a certificate for 127.0.0.1.
fn tls_cluster(test: &str, authority: &Authority) -> Option<Cluster> {
    tls_cluster_with(test, &authority.issue("127.0.0.1"), &authority.cert_pem)
}

/// None: psql is built without TLS, and `test` is skipped.
fn tls_cluster_with(test: &str, certificate: &Certificate, clients: &str) -> Option<Cluster> {
    let cluster = quiet_cluster();
    let mut psql = Command::new(cluster.installation().bin("psql"));
    let refused = psql
        .args(["-d", "host=127.0.0.1 port=1 sslmode=require"])
        .output()
        .expect("psql");
    if String::from_utf8_lossy(&refused.stderr).contains("not compiled in") {
        skip(test, "this psql is built without TLS");
        return None;
    }
    let file = |name: &str, text: &str| server_file(&cluster, name, text, 0o600).display().to_string();
    cluster.write_conf("ssl_cert_file", &file("server.pem", &certificate.cert_pem));
    cluster.write_conf("ssl_key_file", &file("server.key", &certificate.key_pem));
    cluster.write_conf("ssl_ca_file", &file("clients.pem", clients));
    cluster.set_conf("ssl", "on");
    Some(cluster)
}

fn string(cluster: &Cluster, host: &str, user: &str, rest: &str) -> String {
    format!("host={host} port={} user={user} dbname={DB} {rest}", cluster.port())
}

/// Whether the sessions of both programs are encrypted; `None` if both are refused.
fn encrypted(cluster: &Cluster, way: Way<'_>) -> Option<bool> {
    way.as_psql(cluster).map(|found| found["tls"] == Value::Bool(true))
}

#[test]
fn each_sslmode_behaves_as_in_psql() {
    let (authority, stranger) = (Authority::new("ours"), Authority::new("a stranger"));
    let Some(cluster) = tls_cluster("each sslmode", &authority) else {
        return;
    };
    let plain = quiet_cluster();
    let root = ".postgresql/root.crt";
    for (host, mode, trusted, expected) in [
        ("127.0.0.1", "disable", None, Some(false)),
        ("127.0.0.1", "allow", None, Some(false)),
        ("127.0.0.1", "prefer", None, Some(true)),
        ("127.0.0.1", "require", None, Some(true)),
        ("127.0.0.1", "verify-ca", None, None),
        ("127.0.0.1", "verify-full", None, None),
        ("127.0.0.1", "verify-ca", Some(&authority), Some(true)),
        ("127.0.0.1", "verify-full", Some(&authority), Some(true)),
        // The certificate is for another name.
        ("localhost", "verify-ca", Some(&authority), Some(true)),
        ("localhost", "verify-full", Some(&authority), None),
        // Another authority has issued it; with a file of trusted authorities, `require` checks the issuer as well.
        ("127.0.0.1", "verify-full", Some(&stranger), None),
        ("127.0.0.1", "verify-ca", Some(&stranger), None),
        ("127.0.0.1", "require", Some(&stranger), None),
        ("127.0.0.1", "prefer", Some(&stranger), Some(false)),
    ] {
        let way = Way::to(string(&cluster, host, "postgres", &format!("sslmode={mode}")));
        let way = match trusted {
            Some(authority) => way.file(root, &authority.cert_pem, 0o644),
            None => way,
        };
        assert_eq!(encrypted(&cluster, way), expected, "{host} {mode}");
    }
    for (mode, expected) in [("prefer", Some(false)), ("require", None)] {
        let way = Way::to(string(&plain, "127.0.0.1", "postgres", "")).variable("PGSSLMODE", mode);
        assert_eq!(encrypted(&plain, way), expected, "a server without TLS, {mode}");
    }
    let named = server_file(&cluster, "ca.pem", &authority.cert_pem, 0o644);
    let way = Way::to(string(&cluster, "127.0.0.1", "postgres", "sslmode=verify-full"))
        .variable("PGSSLROOTCERT", named.display());
    assert_eq!(encrypted(&cluster, way), Some(true));
}

#[test]
fn allow_and_prefer_retry_with_or_without_tls_when_the_server_refuses() {
    let Some(cluster) = tls_cluster("allow and prefer", &Authority::new("ours")) else {
        return;
    };
    cluster.exec(DB, "create role only_tls login; create role never_tls login");
    who_may(
        &cluster,
        "hostssl all only_tls all trust\nhostnossl all only_tls all reject\nhostnossl all never_tls all trust\nhostssl all never_tls all reject",
    );
    for (user, mode, expected) in [
        ("only_tls", "allow", Some(true)),
        ("only_tls", "prefer", Some(true)),
        ("only_tls", "disable", None),
        ("never_tls", "prefer", Some(false)),
        ("never_tls", "allow", Some(false)),
        ("never_tls", "require", None),
    ] {
        let way = Way::to(string(&cluster, "127.0.0.1", user, &format!("sslmode={mode}")));
        assert_eq!(encrypted(&cluster, way), expected, "{user} {mode}");
    }
}

#[test]
fn a_client_certificate_is_sent_where_psql_sends_it() {
    let authority = Authority::new("ours");
    let Some(cluster) = tls_cluster("client certificates", &authority) else {
        return;
    };
    cluster.exec(DB, "create role ann login");
    who_may(&cluster, "hostssl all ann all cert");
    let certificate = authority.issue("ann");
    let string = string(&cluster, "127.0.0.1", "ann", "sslmode=require");
    let with_key = |mode| {
        Way::to(&string)
            .file(".postgresql/postgresql.crt", &certificate.cert_pem, 0o644)
            .file(".postgresql/postgresql.key", &certificate.key_pem, mode)
    };
    assert_eq!(encrypted(&cluster, with_key(0o600)), Some(true));
    assert_eq!(encrypted(&cluster, Way::to(&string)), None, "no certificate");
    let open = with_key(0o644);
    assert!(
        open.ctl().failed(3).contains("is open to"),
        "a key that others may read"
    );
    assert_eq!(encrypted(&cluster, open), None);
}

#[test]
fn a_refused_certificate_is_reported_with_the_fix() {
    let (authority, stranger) = (Authority::new("ours"), Authority::new("a stranger"));
    let Some(cluster) = tls_cluster("a refused certificate", &authority) else {
        return;
    };
    let refusal_of = |host: &str, trusted: &Authority| {
        let way = Way::to(string(&cluster, host, "postgres", "sslmode=verify-full"));
        way.file(".postgresql/root.crt", &trusted.cert_pem, 0o644)
            .ctl()
            .failed(3)
    };
    let unknown = refusal_of("127.0.0.1", &stranger);
    assert!(
        unknown.contains("UnknownIssuer") && unknown.contains("Set sslrootcert"),
        "{unknown}"
    );
    let name = refusal_of("localhost", &authority);
    assert!(name.contains("localhost") && name.contains("subjectAltName"), "{name}");
}

/// Many servers have what `openssl req -x509` creates: one certificate for the authority and for the server.
#[test]
fn a_self_signed_certificate_is_trusted_when_it_is_the_root_certificate() {
    let own = Authority::self_signed("127.0.0.1", false);
    let Some(cluster) = tls_cluster_with("a self-signed certificate", &own, &own.cert_pem) else {
        return;
    };
    let other = Authority::self_signed("127.0.0.1", false);
    for (host, mode, trusted, expected) in [
        ("127.0.0.1", "verify-full", &own, Some(true)),
        ("127.0.0.1", "verify-ca", &own, Some(true)),
        ("localhost", "verify-ca", &own, Some(true)),
        ("localhost", "verify-full", &own, None),
        ("127.0.0.1", "verify-ca", &other, None),
    ] {
        let way = Way::to(string(&cluster, host, "postgres", &format!("sslmode={mode}")));
        let way = way.file(".postgresql/root.crt", &trusted.cert_pem, 0o644);
        assert_eq!(encrypted(&cluster, way), expected, "{host} {mode}");
    }
    let expired = Authority::self_signed("127.0.0.1", true);
    let Some(cluster) = tls_cluster_with("a self-signed certificate", &expired, &expired.cert_pem) else {
        return;
    };
    let way = Way::to(string(&cluster, "127.0.0.1", "postgres", "sslmode=verify-ca"));
    let way = way.file(".postgresql/root.crt", &expired.cert_pem, 0o644);
    assert_eq!(encrypted(&cluster, way), None, "it has run out");
}
