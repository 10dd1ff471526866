//! The publisher of HTTP destinations over TLS: which servers it trusts, and how it authenticates itself.

mod support;

use outbox_transport::{AllowList, ClientCertificate, DownReason, HttpConfig, Outcome, Tls, Waker, parse_http_url};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use std::io::{BufReader, Write};
use std::sync::Arc;
use std::time::Duration;
use support::receiver::{self, Receiver, message, read_request};
use support::{Desk, resolver, useless};

/// A CA that signs certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// Certificate and key of `name`.
    fn signed(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        roots
    }
}

/// A server named `localhost`. With `clients` it requires client certificates of that CA.
fn server(authority: &Authority, clients: Option<&Authority>) -> Receiver {
    closing_server(authority, clients, usize::MAX)
}

/// A server that closes each connection when a request comes after `answers` answers, as one that gives up an idle
/// connection just then.
fn closing_server(authority: &Authority, clients: Option<&Authority>, answers: usize) -> Receiver {
    let (certificate, key) = authority.signed("localhost");
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(clients) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(clients.roots()), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let config = Arc::new(builder.with_single_cert(chain, key).unwrap());
    Receiver::play(move |stream, connection, seen| {
        let session = ServerConnection::new(config.clone()).map_err(std::io::Error::other)?;
        let mut stream = BufReader::new(StreamOwned::new(session, stream));
        for index in 0.. {
            let mut request = read_request(&mut stream)?;
            request.connection = connection;
            seen.lock().unwrap().push(request);
            if index >= answers {
                stream.get_mut().conn.send_close_notify();
                stream.get_mut().flush()?;
                break;
            }
            stream
                .get_mut()
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")?;
        }
        Ok(())
    })
}

fn trusting(authority: &Authority) -> Tls {
    Tls {
        ca_pem: Some(authority.pem().into_bytes()),
        ..Tls::default()
    }
}

fn config(server: &Receiver, authority: &Authority) -> HttpConfig {
    HttpConfig {
        tls: trusting(authority),
        allow: AllowList::parse("localhost").unwrap(),
        ..receiver::config(&format!("https://localhost:{}/hook", server.port))
    }
}

fn refused(config: HttpConfig) {
    let mut desk = Desk::start(config);
    desk.publish(vec![message(1)]);
    let (reason, detail) = desk.until_down();
    assert_eq!(reason, DownReason::TLS_FAILED, "{detail}");
    desk.until_answered(1);
    assert!(matches!(
        desk.outcomes[&1],
        Outcome::Lost { .. } | Outcome::Unanswered { .. }
    ));
    desk.stop();
}

#[test]
fn a_connection_closed_while_idle_costs_no_message() {
    let authority = Authority::new();
    let server = closing_server(&authority, None, 1);
    let mut desk = Desk::start(config(&server, &authority));
    for handle in 0..5 {
        desk.publish(vec![message(handle)]);
        desk.until_answered(handle as usize + 1);
    }
    assert!(
        desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed),
        "{:?} {:?}",
        desk.outcomes,
        desk.states
    );
    desk.stop();
    assert_eq!(server.requests().len(), 9);
}

#[test]
fn a_server_with_a_certificate_of_the_given_ca_is_trusted_and_its_connection_kept() {
    let authority = Authority::new();
    let server = server(&authority, None);
    let mut desk = Desk::start(config(&server, &authority));
    for handle in 0..10 {
        let mut message = message(handle);
        message.body = vec![b'x'; 300_000];
        desk.publish(vec![message]);
        desk.until_answered(handle as usize + 1);
    }
    assert!(
        desk.outcomes.values().all(|outcome| *outcome == Outcome::Confirmed),
        "{:?}",
        desk.states
    );
    desk.stop();
    assert_eq!(server.connections(), 1);
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request.body == vec![b'x'; 300_000])
    );
}

#[test]
fn an_untrusted_server_gets_no_message() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = server(&authority, None);
    let good = config(&server, &authority);
    refused(HttpConfig {
        tls: trusting(&other),
        ..good.clone()
    });
    refused(HttpConfig {
        tls: Tls::default(),
        ..good.clone()
    }); // no CA that browsers trust has signed its certificate
    refused(HttpConfig {
        address: parse_http_url(&format!("https://127.0.0.1:{}/", server.port)).unwrap(), // not in the certificate
        allow: AllowList::parse("127.0.0.1").unwrap(),
        ..good
    });
    assert!(server.requests().is_empty());
    // The peer does not speak TLS.
    let plain = Receiver::start(|_| receiver::status(200));
    refused(config(&plain, &authority));
    assert!(plain.requests().is_empty());
}

#[test]
fn a_server_that_requests_a_client_certificate_gets_it() {
    let (authority, clients, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let server = server(&authority, Some(&clients));
    let with = |issuer: &Authority| {
        let (certificate, key) = issuer.signed("outbox");
        let mut config = config(&server, &authority);
        config.tls.client = Some(ClientCertificate {
            cert_pem: certificate.into_bytes(),
            key_pem: key.into_bytes(),
        });
        config
    };
    let mut desk = Desk::start(with(&clients));
    desk.publish(vec![message(1)]);
    desk.until_answered(1);
    assert_eq!(desk.outcomes[&1], Outcome::Confirmed, "{:?}", desk.states);
    desk.stop();
    refused(config(&server, &authority));
    refused(with(&strangers));
    assert_eq!(server.requests().len(), 1);
    // A key that belongs to another certificate.
    let (mut mixed, other) = (with(&clients), with(&clients));
    if let (Some(client), Some(other)) = (&mut mixed.tls.client, other.tls.client) {
        client.key_pem = other.key_pem;
    }
    let error = outbox_transport::Publisher::start(mixed, Waker::new().unwrap())
        .err()
        .expect("it is refused");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn an_address_that_does_not_answer_the_handshake_is_left_for_the_next() {
    for (what, port) in useless() {
        let authority = Authority::new();
        let server = server(&authority, None);
        let ports = vec![port, server.port];
        let config = HttpConfig {
            connect_timeout: Duration::from_secs(4),
            ..config(&server, &authority)
        };
        let mut desk = Desk::resolving(config, resolver(move |_| ports.clone()));
        desk.publish(vec![message(1)]);
        desk.until_answered(1);
        desk.stop();
        assert_eq!(
            desk.outcomes[&1],
            Outcome::Confirmed,
            "after a peer that {what}: {:?}",
            desk.states
        );
    }
}
