//! The publisher over TLS, against scripted peers: with certificates that must not be accepted, with handshakes that
//! stall or break off, or without TLS. No broker is needed.
//!
//! The promise is that of peer.rs. In addition, no peer is taken for another one, and the error names the reason.

mod support;

use outbox_transport::{AmqpConfig, ClientCertificate, DownReason, Outcome, Tls};
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::{TLS12, TLS13};
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned, SupportedProtocolVersion};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use support::peer::*;
use support::{DEADLINE, Desk, publication};

const VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

struct Ca {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
struct Pair {
    cert: String,
    key: String,
}

impl Ca {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self::named(&format!("CA {}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    fn named(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self {
            pem: params.self_signed(&key).unwrap().pem(),
            issuer: Issuer::new(params, key),
        }
    }

    fn issue(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names.iter().map(|&n| n.into()).collect::<Vec<String>>()).unwrap();
        change(&mut params);
        Pair {
            cert: params.signed_by(&key, &self.issuer).unwrap().pem(),
            key: key.serialize_pem(),
        }
    }

    fn good(&self) -> Pair {
        self.issue(&["127.0.0.1"], |_| ())
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.pem.as_bytes()).unwrap())
            .unwrap();
        roots
    }
}

/// A server that shows `pair`. With `clients_of` it accepts only clients with a certificate of that CA.
fn server(pair: &Pair, versions: &[&'static SupportedProtocolVersion], clients_of: Option<&Ca>) -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)
        .unwrap();
    let builder = match clients_of {
        None => builder.with_no_client_auth(),
        Some(ca) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(ca.roots()), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };
    let chain = CertificateDer::pem_slice_iter(pair.cert.as_bytes())
        .map(Result::unwrap)
        .collect();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    Arc::new(builder.with_single_cert(chain, key).unwrap())
}

/// Like `broker`, over TLS.
fn tls_broker(server: Arc<ServerConfig>, play: impl Fn(&mut Peer) -> io::Result<()> + Send + 'static) -> u16 {
    raw_server(move |tcp| {
        let session = ServerConnection::new(server.clone()).unwrap();
        let stream = StreamOwned::new(session, tcp.try_clone()?);
        play(&mut Peer::new(tcp, Box::new(stream)))
    })
}

/// Runs a script on every connection, one after the other, below TLS.
fn raw_server(play: impl Fn(TcpStream) -> io::Result<()> + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((tcp, _)) = listener.accept() {
            tcp.set_read_timeout(Some(DEADLINE)).unwrap();
            let _ = play(tcp);
        }
    });
    port
}

fn tls_config(port: u16, ca: &Ca) -> AmqpConfig {
    AmqpConfig {
        tls: Some(Tls {
            ca_pem: Some(ca.pem.clone().into_bytes()),
            ..Tls::default()
        }),
        ..config(port)
    }
}

fn with_client(config: AmqpConfig, pair: &Pair) -> AmqpConfig {
    let client = ClientCertificate {
        cert_pem: pair.cert.clone().into_bytes(),
        key_pem: pair.key.clone().into_bytes(),
    };
    AmqpConfig {
        tls: config.tls.map(|tls| Tls {
            client: Some(client),
            ..tls
        }),
        ..config
    }
}

fn until_closed(mut tcp: TcpStream) -> io::Result<()> {
    while tcp.read(&mut [0; 4096])? > 0 {}
    Ok(())
}

#[test]
fn messages_arrive_whole_and_in_order_also_when_the_peer_reads_slowly() {
    let _alone = alone();
    let ca = Ca::new();
    for version in VERSIONS {
        let port = tls_broker(server(&ca.good(), &[version], None), |peer| {
            peer.connect()?;
            for n in 0..300u64 {
                let got = peer.next_message()?;
                assert_eq!(got.body, body(n), "message {n}");
                peer.ack(got.tag, false)?;
            }
            peer.until_closed()
        });
        // 30 MB: far more than the buffers of the socket and of TLS hold.
        let mut desk = Desk::start(tls_config(port, &ca));
        desk.until_connected();
        desk.publish((0..300).map(|n| publication(n, "k", body(n))).collect());
        desk.until_answered(300);
        assert!(desk.outcomes.values().all(|o| *o == Outcome::Confirmed));
        desk.stop();
        until_no_lapin_thread_is_left();
    }
}

fn body(n: u64) -> Vec<u8> {
    (0..100_000u64).map(|at| (n * 31 + at * 7 + at / 251) as u8).collect()
}

#[test]
fn an_invalid_certificate_is_refused_and_the_reason_reported() {
    let _alone = alone();
    let ca = Ca::new();
    let (stranger, old, renewed) = (Ca::new(), Ca::named("the CA"), Ca::named("the CA"));
    let self_signed = {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Pair {
            cert: params.self_signed(&key).unwrap().pem(),
            key: key.serialize_pem(),
        }
    };
    let as_own_ca = Ca {
        pem: self_signed.cert.clone(),
        issuer: Ca::new().issuer,
    };
    let cases: [(&str, Pair, &Ca, &[&str]); 8] = [
        (
            "expired",
            ca.issue(&["127.0.0.1"], |p| p.not_after = rcgen::date_time_ymd(2020, 2, 29)),
            &ca,
            &["expired on 29 Feb 2020"],
        ),
        (
            "not yet valid",
            ca.issue(&["127.0.0.1"], |p| {
                p.not_before = rcgen::date_time_ymd(2999, 12, 31);
            }),
            &ca,
            &["not valid before 31 Dec 2999", "clock"],
        ),
        (
            "of another host",
            ca.issue(&["rabbit.example", "10.1.2.3"], |_| ()),
            &ca,
            &["for rabbit.example, 10.1.2.3, not for 127.0.0.1"],
        ),
        (
            "without a name",
            ca.issue(&[], |_| ()),
            &ca,
            &["names no host", "127.0.0.1"],
        ),
        (
            "of an unknown CA",
            stranger.good(),
            &ca,
            &["a CA that is not trusted here"],
        ),
        (
            "of a CA that was created again with the same name",
            renewed.good(),
            &old,
            &["not signed by the CA that it names"],
        ),
        (
            "for clients",
            ca.issue(&["127.0.0.1"], |p| {
                p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            }),
            &ca,
            &["not one for servers"],
        ),
        ("that is a CA", self_signed, &as_own_ca, &["a CA certificate"]),
    ];
    for (what, pair, trusted, words) in cases {
        for version in VERSIONS {
            let port = tls_broker(server(&pair, &[version], None), |peer| {
                peer.connect()?;
                peer.until_closed()
            });
            let (reason, detail) = down_reason(tls_config(port, trusted));
            assert_eq!(reason, DownReason::TLS_FAILED, "{what}: {detail}");
            assert!(words.iter().all(|word| detail.contains(word)), "{what}: {detail}");
        }
    }
}

#[test]
fn the_server_name_is_checked_instead_of_the_host() {
    let _alone = alone();
    let ca = Ca::new();
    let pair = ca.issue(&["rabbit.example"], |_| ());
    let port = tls_broker(server(&pair, &VERSIONS, None), |peer| {
        peer.connect()?;
        peer.until_closed()
    });
    let mut config = tls_config(port, &ca);
    config.tls.as_mut().unwrap().server_name = Some("rabbit.example".into());
    let mut desk = Desk::start(config);
    desk.until_connected();
    desk.stop();
    until_no_lapin_thread_is_left();
}

#[test]
fn a_peer_that_requests_a_client_certificate_gets_it_or_the_refusal_is_reported() {
    let _alone = alone();
    let (ca, clients) = (Ca::new(), Ca::new());
    for version in VERSIONS {
        let port = tls_broker(server(&ca.good(), &[version], Some(&clients)), |peer| {
            peer.connect()?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(tls_config(port, &ca));
        assert_eq!(reason, DownReason::TLS_FAILED, "{detail}");
        assert!(
            detail.contains("asked for a client certificate and none is set"),
            "{detail}"
        );

        let (reason, detail) = down_reason(with_client(tls_config(port, &ca), &Ca::new().good()));
        assert_eq!(reason, DownReason::TLS_FAILED, "{detail}");
        assert!(detail.contains("our client certificate"), "{detail}");

        let mut desk = Desk::start(with_client(tls_config(port, &ca), &clients.good()));
        desk.until_connected();
        desk.stop();
        until_no_lapin_thread_is_left();

        // A peer that refuses the certificate without an alert.
        let port = tls_broker(server(&ca.good(), &[version], Some(&clients)), Peer::header);
        let (reason, detail) = down_reason(with_client(tls_config(port, &ca), &clients.good()));
        assert_eq!(reason, DownReason::CLOSED, "{detail}");
        assert!(detail.contains("perhaps because of our client certificate"), "{detail}");
    }
}

#[test]
fn a_requested_certificate_does_not_hide_a_bad_server_certificate() {
    let _alone = alone();
    let (ca, clients) = (Ca::new(), Ca::new());
    let elsewhere = ca.issue(&["rabbit.example"], |_| ());
    for version in VERSIONS {
        let port = tls_broker(server(&elsewhere, &[version], Some(&clients)), |peer| peer.connect());
        let (reason, detail) = down_reason(tls_config(port, &ca));
        assert_eq!(reason, DownReason::TLS_FAILED, "{detail}");
        assert!(
            detail.contains("rabbit.example") && !detail.contains("none is set"),
            "{detail}"
        );
    }
}

#[test]
fn a_peer_that_closes_or_falls_silent_inside_tls_causes_down_and_leaves_no_thread() {
    let _alone = alone();
    let ca = Ca::new();
    let server = server(&ca.good(), &VERSIONS, None);
    for steps in 0..7 {
        let port = tls_broker(server.clone(), move |peer| play_honestly(peer, steps));
        let (reason, detail) = down_reason(tls_config(port, &ca));
        // With zero steps the peer closes before its handshake.
        let expected = if steps == 0 {
            DownReason::TLS_FAILED
        } else {
            DownReason::CLOSED
        };
        assert_eq!(reason, expected, "{steps}: {detail}");
        assert!(!detail.contains("docs.rs"), "{detail}");

        let port = tls_broker(server.clone(), move |peer| {
            peer.heartbeat_s = HEARTBEAT_S;
            play_honestly(peer, steps)?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(hasty(tls_config(port, &ca)));
        assert_eq!(reason, DownReason::TIMEOUT, "{steps}: {detail}");
    }
}

/// Sends the server's answer to the client hello, cut to `bytes`.
fn answer_hello(server: &Arc<ServerConfig>, tcp: &mut TcpStream, bytes: usize) -> io::Result<()> {
    let mut session = ServerConnection::new(server.clone()).unwrap();
    session.read_tls(tcp)?;
    session.process_new_packets().map_err(io::Error::other)?;
    let mut flight = Vec::new();
    while session.wants_write() {
        session.write_tls(&mut flight)?;
    }
    assert!(flight.len() > bytes, "the flight is {} bytes", flight.len());
    tcp.write_all(&flight[..bytes])
}

#[test]
fn a_handshake_that_breaks_off_or_stalls_at_any_byte_causes_down_in_time() {
    let _alone = alone();
    let ca = Ca::new();
    for version in VERSIONS {
        let server = server(&ca.good(), &[version], None);
        for bytes in [0, 1, 4, 5, 6, 50, 150, 400] {
            let breaking = server.clone();
            let port = raw_server(move |mut tcp| answer_hello(&breaking, &mut tcp, bytes));
            let (reason, detail) = down_reason(tls_config(port, &ca));
            assert_eq!(reason, DownReason::TLS_FAILED, "{bytes}: {detail}");
            assert!(
                detail.contains("closed the connection during the TLS handshake"),
                "{bytes}: {detail}"
            );

            let stalling = server.clone();
            let port = raw_server(move |mut tcp| {
                answer_hello(&stalling, &mut tcp, bytes)?;
                until_closed(tcp)
            });
            let (reason, detail) = down_reason(hasty(tls_config(port, &ca)));
            assert_eq!(reason, DownReason::TIMEOUT, "{bytes}: {detail}");
            assert!(detail.contains("TLS handshake"), "{bytes}: {detail}");
        }
    }
}

#[test]
fn garbage_instead_of_a_handshake_causes_only_down() {
    let _alone = alone();
    let ca = Ca::new();
    let noise: Vec<u8> = (0..4000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let record =
        |kind: u8, payload: &[u8]| [&[kind, 3, 3][..], &(payload.len() as u16).to_be_bytes(), payload].concat();
    for garbage in [
        noise.clone(),
        record(0x16, &noise),                             // a handshake record without a handshake
        record(0x16, &[2, 0, 0, 4, 0, 0, 0, 0]),          // a ServerHello that is too short
        record(0x16, &[11, 0xff, 0xff, 0xff, 0]),         // announces a certificate of 16 MB
        record(0x17, &noise),                             // data before keys
        record(0x15, &[2, 40]).repeat(3),                 // alerts
        record(0x14, &[1]).repeat(100),                   // endless change_cipher_spec
        [&[0x16, 3, 3, 0xff, 0xff][..], &noise].concat(), // longer than a record may be
    ] {
        let port = raw_server(move |mut tcp| {
            tcp.read_exact(&mut [0; 5])?;
            tcp.write_all(&garbage)?;
            until_closed(tcp)
        });
        let (reason, detail) = down_reason(tls_config(port, &ca));
        assert_eq!(reason, DownReason::TLS_FAILED, "{detail}");
    }
}

#[test]
fn the_guard_also_checks_decrypted_bytes() {
    let _alone = alone();
    let ca = Ca::new();
    let server = server(&ca.good(), &VERSIONS, None);
    for levels in [2_000, 20_000, 800_000] {
        let port = tls_broker(server.clone(), move |peer| {
            peer.header()?;
            peer.start(&nested_table(levels))?;
            peer.until_closed()
        });
        let (reason, detail) = down_reason(tls_config(port, &ca));
        assert_eq!(reason, DownReason::PROTOCOL, "{levels}: {detail}");
    }
}

#[test]
fn amqps_to_a_plain_port_and_amqp_to_a_tls_port_are_reported_in_time() {
    let _alone = alone();
    let ca = Ca::new();
    let answering = raw_server(|mut tcp| {
        tcp.read_exact(&mut [0; 8])?;
        tcp.write_all(b"AMQP\0\0\x09\x01") // as RabbitMQ does before it closes
    });
    let (reason, detail) = down_reason(tls_config(answering, &ca));
    assert_eq!(reason, DownReason::TLS_FAILED, "{detail}");
    assert!(detail.contains("does not speak TLS"), "{detail}");

    let silent = raw_server(until_closed);
    let (reason, detail) = down_reason(hasty(tls_config(silent, &ca)));
    assert_eq!(reason, DownReason::TIMEOUT, "{detail}");
    assert!(detail.contains("does the peer speak TLS"), "{detail}");

    let secure = tls_broker(server(&ca.good(), &VERSIONS, None), Peer::header);
    let (reason, detail) = down_reason(config(secure));
    assert_eq!(reason, DownReason::PROTOCOL, "{detail}");
    assert!(detail.contains("amqps://"), "{detail}");
}

#[test]
fn stop_ends_in_time_whatever_a_tls_peer_does() {
    let _alone = alone();
    let ca = Ca::new();
    let server = server(&ca.good(), &VERSIONS, None);
    // Silent before its hello; in the middle of it; after the TLS handshake; never reading what is published.
    for mode in 0..4 {
        let (ready, is_ready) = mpsc::channel();
        let server = server.clone();
        let port = raw_server(move |mut tcp| {
            if mode == 1 {
                answer_hello(&server, &mut tcp, 100)?;
            }
            if mode < 2 {
                ready.send(()).unwrap();
                return until_closed(tcp);
            }
            let session = ServerConnection::new(server.clone()).unwrap();
            let stream = StreamOwned::new(session, tcp.try_clone()?);
            let mut peer = Peer::new(tcp, Box::new(stream));
            match mode {
                2 => peer.header()?,
                _ => peer.connect()?,
            }
            ready.send(()).unwrap();
            if mode == 3 {
                std::thread::park_timeout(DEADLINE);
            }
            peer.until_closed()
        });
        let mut desk = Desk::start(AmqpConfig {
            connect_timeout: Duration::from_secs(20),
            ..tls_config(port, &ca)
        });
        is_ready.recv_timeout(DEADLINE).unwrap();
        if mode == 3 {
            desk.until_connected();
            // 40 MB: far more than the buffers hold.
            desk.publish((0..400).map(|h| publication(h, "k", vec![b'x'; 100_000])).collect());
        }
        println!("mode {mode}");
        desk.stop();
        assert_eq!(desk.outcomes.len(), if mode == 3 { 400 } else { 0 }, "{mode}");
        until_no_lapin_thread_is_left();
    }
}
