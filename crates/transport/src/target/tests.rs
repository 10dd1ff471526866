//! Tests of what options mean, which options are refused, and that no refusal reveals a secret.

use super::options::duration;
use super::*;
use outbox_core::settle::{Ordering, RetryPolicy};

fn options(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect()
}

fn file(path: &str) -> NamedFile {
    NamedFile {
        named_by: "outbox.a_file",
        path: path.into(),
    }
}

fn default() -> Target {
    Target {
        transport: Protocol::Amqp(Amqp {
            url: "amqp://main@broker".into(),
            user: None,
            password: Some(Credential::File(file("/etc/secret"))),
            exchange: Text::shared("outbox"),
            exchange_type: ExchangeType::parse("topic").unwrap(),
            routing_key: Template::parse("{type}").unwrap(),
            max_in_flight: 1_000,
        }),
        certificates: Certificates {
            ca: Some(Credential::File(file("/etc/ca"))),
            cert: Some(Credential::File(file("/etc/cert"))),
            key: Some(Credential::File(file("/etc/key"))),
        },
        allow: AllowList::default(),
        format: Format::default(),
        statics: Statics::default(),
        rules: Rules {
            one_by_one: false,
            retry: RetryPolicy {
                max_attempts: 15,
                base_ms: 1000,
                max_ms: 600_000,
                discards_unroutable: false,
            },
            dead_blocks: true,
            ordering: Ordering::Key,
        },
        limits: Limits::default(),
        connect_timeout: Duration::from_secs(10),
        confirm_timeout: Duration::from_secs(30),
        min_send_rate: crate::MIN_SEND_RATE,
    }
}

fn amqp(target: &Target) -> &Amqp {
    let Protocol::Amqp(amqp) = &target.transport else {
        panic!("AMQP")
    };
    amqp
}

#[test]
fn omitted_options_are_as_in_the_default() {
    let anywhere = Target {
        allow: AllowList::any(),
        ..default()
    };
    assert_eq!(described(Kind::Amqp, &default(), &[], &[]).unwrap(), anywhere);
    let other = described(
        Kind::Amqp,
        &default(),
        &options(&[("exchange", "audit"), ("on_dead", "skip")]),
        &[],
    )
    .unwrap();
    assert_eq!(&*amqp(&other).exchange, "audit");
    assert_eq!(amqp(&other).password, Some(Credential::File(file("/etc/secret"))));
    assert!(!other.rules.dead_blocks);
    assert_eq!(other.rules.retry, default().rules.retry);
}

#[test]
fn a_broker_of_the_settings_may_be_anywhere_and_another_one_where_the_list_or_a_private_network_is() {
    let default = Target {
        allow: AllowList::parse("10.0.0.0/8").unwrap(),
        ..default()
    };
    let of = |kind, url: &str| {
        let server = options(&[("url", url)]);
        let server = if url.is_empty() { &[][..] } else { &server };
        described(kind, &default, server, &[]).unwrap().allow
    };
    assert_eq!(of(Kind::Amqp, ""), AllowList::any());
    assert_eq!(of(Kind::Amqp, "amqp://other@broker:5672/vhost"), AllowList::any());
    let listed = default.allow.clone();
    for url in ["amqp://elsewhere", "amqp://broker:5673", "amqp://broker,elsewhere"] {
        assert_eq!(of(Kind::Amqp, url), listed.clone().and_private(), "{url}");
    }
    assert_eq!(of(Kind::Http, ""), listed);
}

#[test]
fn the_password_of_the_default_is_sent_to_no_other_address() {
    let other = described(Kind::Amqp, &default(), &options(&[("url", "amqp://elsewhere")]), &[]).unwrap();
    assert_eq!(amqp(&other).password, None);
    assert_eq!((&other.certificates.cert, &other.certificates.key), (&None, &None));
    assert_eq!(other.certificates.ca, default().certificates.ca);
    let mapping = options(&[("user", "u"), ("password", "p")]);
    let known = described(
        Kind::Amqp,
        &default(),
        &options(&[("url", "amqp://elsewhere")]),
        &mapping,
    )
    .unwrap();
    assert_eq!(amqp(&known).password, Some(Credential::Given(Secret::new("p"))));
    assert_eq!(amqp(&known).address().unwrap().user.as_deref(), Some("u"));
}

#[test]
fn durations_may_have_units() {
    let ms = |text: &str| duration("t", text, 1..=86_400_000);
    assert_eq!(ms("250").unwrap(), 250);
    assert_eq!(ms("250ms").unwrap(), 250);
    assert_eq!(ms("30 s").unwrap(), 30_000);
    assert_eq!(ms("1d").unwrap(), 86_400_000);
    for bad in ["", "s", "-1", "1.5s", "2d", "1 week", "99999999999999999999", "0"] {
        assert!(ms(bad).is_err(), "{bad}");
    }
}

#[test]
fn bad_options_are_refused_with_a_hint_and_without_the_value() {
    for (name, value) in [
        ("url", "amqp://u:hunter2@h"),
        ("exchange_type", "hunter2"),
        ("routing_key", "{hunter2}"),
        ("ordering", "hunter2"),
        ("on_dead", "hunter2"),
        ("max_attempts", "0"),
        ("max_pending", "-1"),
        ("max_rate", "2147483648"),
        ("max_in_flight", "0"),
        ("max_attempts", "hunter2"),
        ("retry_backoff", "hunter2"),
        ("confirm_timeout", "1ms"),
        ("min_send_rate", "0"),
        ("exchange", &"hunter2".repeat(60)),
    ] {
        let refused = check(Kind::Amqp, Level::Server, &options(&[(name, value)])).unwrap_err();
        assert!(!refused.unknown, "{name}");
        assert!(
            refused.message.contains(name) && !refused.hint.is_empty(),
            "{refused:?}"
        );
        let reveals = name != "routing_key" && format!("{refused:?}").contains("hunter2");
        assert!(!reveals, "{refused:?}");
    }
    let unknown = check(Kind::Amqp, Level::Server, &options(&[("password", "x")])).unwrap_err();
    assert!(unknown.unknown && unknown.hint.contains("exchange"), "{unknown:?}");
    assert!(check(Kind::Amqp, Level::UserMapping, &options(&[("password", "")])).is_err());
    assert!(check(Kind::Amqp, Level::UserMapping, &options(&[("password", "x")])).is_ok());
}

#[test]
fn every_listed_option_takes_effect() {
    let values = [
        ("url", "amqp://elsewhere"),
        ("exchange", "other"),
        ("exchange_type", "fanout"),
        ("routing_key", "{key}"),
        ("format", "cloudevents"),
        ("headers", r#"{"tenant": "{header:tenant|none}"}"#),
        ("content_type", "text/plain"),
        ("app_id", "shop"),
        ("source", "/shop"),
        ("expiration", "1d"),
        ("priority", "3"),
        ("ordering", "none"),
        ("on_dead", "skip"),
        ("on_unroutable", "discard"),
        ("max_attempts", "3"),
        ("max_pending", "1000"),
        ("max_rate", "500"),
        ("max_in_flight", "10"),
        ("retry_backoff", "5s"),
        ("retry_backoff_max", "7s"),
        ("connect_timeout", "1s"),
        ("confirm_timeout", "2s"),
        ("min_send_rate", "500"),
        ("tls_ca", "-----BEGIN CERTIFICATE-----"),
    ];
    let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
    let listed = Kind::Amqp.names(Level::Server);
    assert_eq!(names.join(", "), listed.replace("dead_letters_to, ", "")); // SQL reads that one
    for pair in values {
        let mut pairs = vec![pair];
        if pair.0 == "content_type" {
            pairs.insert(0, ("format", "payload"));
        }
        assert_ne!(
            described(Kind::Amqp, &default(), &options(&pairs), &[]).unwrap(),
            described(Kind::Amqp, &default(), &options(&pairs[1..]), &[]).unwrap_or_else(|_| default()),
            "{pair:?}"
        );
    }
}

#[test]
fn an_http_destination_inherits_rules_but_no_credentials() {
    let server = options(&[
        ("url", "https://example.com/hook"),
        ("concurrency", "3"),
        ("timeout", "2s"),
        ("retry_after_max", "1h"),
    ]);
    let target = described(Kind::Http, &default(), &server, &[]).unwrap();
    let Protocol::Http(http) = &target.transport else {
        panic!("HTTP")
    };
    assert_eq!((http.concurrency, &http.secret), (3, &None));
    assert_eq!(http.retry_after_max, Duration::from_secs(3_600));
    let rules = Rules {
        one_by_one: true,
        ..default().rules
    };
    assert_eq!(target.rules, rules);
    assert_eq!(target.certificates, Certificates::default());
    assert_eq!(target.confirm_timeout, Duration::from_secs(2));
    let mapping = options(&[
        (
            "signing_secret",
            "whsec_bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3 whsec_b2xkb2xkb2xkb2xkb2xkb2xkb2xkb2xk",
        ),
        ("bearer_token", "t"),
    ]);
    let Protocol::Http(http) = described(Kind::Http, &default(), &server, &mapping).unwrap().transport else {
        panic!("HTTP")
    };
    assert_eq!(http.signing_secrets.len(), 2);
    assert!(matches!(http.auth(), HttpAuth::Bearer(_)));
    for bad in [
        &[("user", "u")][..],
        &[("password", "p")],
        &[("user", "u"), ("password", "p"), ("bearer_token", "t")],
        &[("user", "hunter2:x"), ("password", "hunter2")],
        &[("bearer_token", "hunter2 x")],
        &[("signing_secret", "hunter2")],
        &[("signing_secret", "whsec_aHVudGVyMg==")],
        &[("signing_secret", "whsec_bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3 hunter2")],
        &[("signing_secret", " ")],
    ] {
        let refused = check(Kind::Http, Level::UserMapping, &options(bad)).expect_err(bad[0].1);
        assert!(
            refused.message.contains(bad[0].0) || bad[0].0 == "password",
            "{refused:?}"
        );
        assert!(
            !refused.hint.is_empty() && !format!("{refused:?}").contains("hunter2"),
            "{refused:?}"
        );
    }
    for bad in [
        ("url", "amqp://h"),
        ("url", "https://u:hunter2@h"),
        ("concurrency", "65"),
        ("retry_after_max", "2d"),
    ] {
        let refused = check(Kind::Http, Level::Server, &options(&[bad])).unwrap_err();
        assert!(!format!("{refused:?}").contains("hunter2"), "{refused:?}");
    }
    assert!(
        check(Kind::Http, Level::Server, &options(&[("exchange", "x")]))
            .unwrap_err()
            .unknown
    );
}
