//! Tests of what options mean, which options are refused, and that no refusal reveals a secret.

use super::*;
use crate::options::NamedFile;
use outbox_core::settle::{RetryPolicy, Rules};

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = pairs.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    owned.collect()
}

fn file(path: &str) -> OptionValue {
    OptionValue::File(NamedFile {
        named_by: "outbox.a_file",
        path: path.into(),
    })
}

fn amqp() -> &'static Kind {
    Kind::of_settings()
}

fn http() -> &'static Kind {
    Kind::of_wrapper("outbox_http").expect("a kind")
}

/// As the settings describe it; `allow` is what they list.
fn default_with(allow: AllowList) -> Target {
    let known = |name: &str| match name {
        "on_dead" => "block".to_owned(),
        "max_attempts" => "15".to_owned(),
        "max_in_flight" | "retry_backoff" => "1000".to_owned(),
        "retry_backoff_max" => "600000".to_owned(),
        "confirm_timeout" => "30000".to_owned(),
        _ => "0".to_owned(),
    };
    let server = |name: &str, value: &str| (Level::Server, name.to_owned(), OptionValue::text(value));
    let options = vec![
        server("url", "amqp://main@broker"),
        server("exchange", "outbox"),
        server("exchange_type", "topic"),
        server("routing_key", "{type}"),
        (Level::Server, "tls_ca".to_owned(), file("/etc/ca")),
        (Level::UserMapping, "password".to_owned(), file("/etc/secret")),
        (Level::UserMapping, "tls_cert".to_owned(), file("/etc/cert")),
        (Level::UserMapping, "tls_key".to_owned(), file("/etc/key")),
    ];
    Target::of_settings(known, options, allow).expect("good settings")
}

fn default() -> Target {
    default_with(AllowList::default())
}

fn described_by(kind: &'static Kind, server: &[(&str, &str)], mapping: &[(&str, &str)]) -> Result<Target, Refused> {
    described(kind, &default(), &pairs(server), &pairs(mapping))
}

#[test]
fn the_settings_describe_the_default_destination() {
    let target = default();
    let rules = Rules {
        one_by_one: false,
        retry: RetryPolicy {
            max_attempts: 15,
            base_ms: 1000,
            max_ms: 600_000,
            discards_unroutable: false,
        },
        dead_blocks: true,
        ordering: Ordering::Key,
    };
    assert_eq!((target.rules, target.max_in_flight), (rules, 1_000));
    assert_eq!(target.connect_timeout, Duration::from_secs(10));
    assert_eq!(target.peer().endpoints()[0].to_string(), "broker:5672");
    let ca = Certificates {
        ca: Some(file("/etc/ca")),
        cert: Some(file("/etc/cert")),
        key: Some(file("/etc/key")),
    };
    assert_eq!(target.certificates, ca);
}

#[test]
fn omitted_options_are_as_in_the_default() {
    let anywhere = Target {
        allow: AllowList::any(),
        ..default()
    };
    assert_eq!(described_by(amqp(), &[], &[]).unwrap(), anywhere);
    let other = described_by(amqp(), &[("exchange", "audit"), ("on_dead", "skip")], &[]).unwrap();
    assert_eq!(other.own.server.text("exchange"), Some("audit"));
    assert_eq!(other.own.mapping.value("password"), Some(&file("/etc/secret")));
    assert!(!other.rules.dead_blocks);
    assert_eq!(other.rules.retry, default().rules.retry);
}

#[test]
fn a_broker_of_the_settings_may_be_anywhere_and_another_one_where_the_list_or_a_private_network_is() {
    let default = default_with(AllowList::parse("10.0.0.0/8").unwrap());
    let of = |kind, url: &str| {
        let server = pairs(&[("url", url)]);
        let server = if url.is_empty() { &[][..] } else { &server };
        described(kind, &default, server, &[]).unwrap().allow
    };
    assert_eq!(of(amqp(), ""), AllowList::any());
    assert_eq!(of(amqp(), "amqp://other@broker:5672/vhost"), AllowList::any());
    let listed = default.allow.clone();
    for url in ["amqp://elsewhere", "amqp://broker:5673", "amqp://broker,elsewhere"] {
        assert_eq!(of(amqp(), url), listed.clone().and_private(), "{url}");
    }
    assert_eq!(of(http(), ""), listed);
    assert_eq!(of(http(), "http://broker:5672/"), listed);
}

#[test]
fn the_password_of_the_default_is_sent_to_no_other_address() {
    let elsewhere = [("url", "amqp://elsewhere")];
    let other = described_by(amqp(), &elsewhere, &[]).unwrap();
    assert!(!other.own.mapping.has("password"));
    assert_eq!((&other.certificates.cert, &other.certificates.key), (&None, &None));
    assert_eq!(other.certificates.ca, default().certificates.ca);
    let known = described_by(amqp(), &elsewhere, &[("user", "u"), ("password", "p")]).unwrap();
    assert_eq!(known.own.mapping.value("password"), Some(&OptionValue::text("p")));
    assert!(!format!("{:?}", described_by(amqp(), &[], &[("password", "hunter2")])).contains("hunter2"));
}

#[test]
fn an_option_names_no_file() {
    let mapping = [("password", "/etc/secret"), ("user", "u")];
    let known = described_by(amqp(), &[], &mapping).unwrap();
    assert_eq!(
        known.own.mapping.value("password"),
        Some(&OptionValue::text("/etc/secret"))
    );
}

#[test]
fn durations_may_have_units() {
    let ms = |text: &str| Given { name: "t", text }.millis(1..=DAY_MS);
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
        ("expiration", "50d"),
    ] {
        let refused = check(amqp(), Level::Server, &pairs(&[(name, value)])).unwrap_err();
        assert!(refused.why.is_some() && refused.name == name, "{refused:?}");
        assert!(!refused.hint.is_empty(), "{refused:?}");
        let reveals = name != "routing_key" && format!("{refused:?}").contains("hunter2");
        assert!(!reveals, "{refused:?}");
    }
    let unknown = check(amqp(), Level::Server, &pairs(&[("password", "x")])).unwrap_err();
    assert!(
        unknown.why.is_none() && unknown.hint.contains("exchange"),
        "{unknown:?}"
    );
    assert!(check(amqp(), Level::UserMapping, &pairs(&[("password", "")])).is_err());
    assert!(check(amqp(), Level::UserMapping, &pairs(&[("password", "x")])).is_ok());
}

#[test]
fn every_listed_option_takes_effect() {
    let certificate = "-----BEGIN CERTIFICATE-----";
    let of_amqp = [
        ("url", "amqp://elsewhere"),
        ("exchange", "other"),
        ("exchange_type", "fanout"),
        ("routing_key", "{key}"),
        ("expiration", "1d"),
        ("priority", "3"),
        ("on_unroutable", "discard"),
        ("max_in_flight", "10"),
        ("confirm_timeout", "2s"),
    ];
    let of_http = [
        ("url", "https://elsewhere"),
        ("concurrency", "2"),
        ("timeout", "2s"),
        ("retry_after_max", "1h"),
    ];
    let of_all = [
        ("format", "cloudevents"),
        ("headers", r#"{"tenant": "{header:tenant|none}"}"#),
        ("content_type", "text/plain"),
        ("app_id", "shop"),
        ("source", "/shop"),
        ("ordering", "none"),
        ("on_dead", "skip"),
        ("dead_letters_to", "default"), // SQL reads it
        ("max_attempts", "3"),
        ("max_pending", "1000"),
        ("max_rate", "500"),
        ("retry_backoff", "5s"),
        ("retry_backoff_max", "7s"),
        ("connect_timeout", "1s"),
        ("min_send_rate", "500"),
        ("tls_ca", certificate),
    ];
    for (kind, own) in [(amqp(), &of_amqp[..]), (http(), &of_http)] {
        let values: Vec<_> = own.iter().chain(&of_all).copied().collect();
        let listed: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        assert_eq!(listed, names(kind, Level::Server));
        for pair in values.into_iter().filter(|(name, _)| *name != "dead_letters_to") {
            let mut given = vec![pair];
            if pair.0 == "content_type" {
                given.insert(0, ("format", "payload"));
            }
            let without = described_by(kind, &given[1..], &[]).unwrap_or_else(|_| default());
            assert_ne!(described_by(kind, &given, &[]).unwrap(), without, "{pair:?}");
        }
    }
}

#[test]
fn an_http_destination_inherits_rules_but_no_credentials() {
    let server = [
        ("url", "https://example.com/hook"),
        ("concurrency", "3"),
        ("timeout", "2s"),
        ("retry_after_max", "1h"),
    ];
    let target = described_by(http(), &server, &[]).unwrap();
    let rules = Rules {
        one_by_one: true,
        ..default().rules
    };
    assert_eq!(target.rules, rules);
    assert_eq!(target.own.mapping, Options::default());
    assert_eq!(target.certificates, Certificates::default());
    assert_eq!(target.answer_timeout, Duration::from_secs(2));
    let without = described_by(http(), &server[..1], &[]).unwrap();
    assert_eq!(
        without.answer_timeout,
        Duration::from_secs(30),
        "outbox.confirm_timeout"
    );
    let two = "whsec_bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3 whsec_b2xkb2xkb2xkb2xkb2xkb2xkb2xkb2xk";
    assert!(described_by(http(), &server, &[("signing_secret", two), ("bearer_token", "t")]).is_ok());
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
        &[("headers", r#"{"hunter2 x": "y"}"#)],
        &[("headers", r#"{"ce-id": "hunter2"}"#)],
    ] {
        let refused = check(http(), Level::UserMapping, &pairs(bad)).expect_err(bad[0].1);
        assert!(refused.name == bad[0].0 || bad[0].0 == "password", "{refused:?}");
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
        let refused = check(http(), Level::Server, &pairs(&[bad])).unwrap_err();
        assert!(!format!("{refused:?}").contains("hunter2"), "{refused:?}");
    }
    let unknown = check(http(), Level::Server, &pairs(&[("exchange", "x")])).unwrap_err();
    assert_eq!(unknown.why, None);
}

#[test]
fn a_setting_is_refused_as_its_option_is_or_if_it_is_no_absolute_path() {
    let check = |name: &str, value: &str| {
        let all = amqp().settings.iter().chain(SETTINGS);
        let mut named = all.filter(|setting| setting.name.to_str() == Ok(name));
        named.next().expect("a setting").check(amqp(), value)
    };
    for name in [
        "outbox.url",
        "outbox.exchange",
        "outbox.password_file",
        "outbox.tls_ca_file",
    ] {
        assert_eq!(check(name, ""), Ok(()), "{name}");
    }
    assert!(check("outbox.url", "amqp://u:hunter2@h").is_err_and(|(why, hint)| !(why + &hint).contains("hunter2")));
    assert!(check("outbox.exchange", &"x".repeat(256)).is_err());
    assert!(check("outbox.password_file", "secret").is_err());
    assert_eq!(check("outbox.password_file", "/etc/secret"), Ok(()));
}
