//! The settings of a worker outside the server. Most are the settings of the server that every role may read. The
//! address of the broker and the secrets come from the command line. The worker reads no secret of the server.

use super::args::WorkArgs;
use super::session::Refreshed;
use outbox_core::message::Text;
use outbox_core::route::{Format, Statics, Template};
use outbox_core::settle::{Ordering, RetryPolicy, Rules};
use outbox_core::standbys::{self, Standbys};
use outbox_transport::target::{
    Amqp, CONNECT_TIMEOUT_MAX, Certificates, Credential, Limits, NamedFile, Protocol, Target,
};
use outbox_transport::{AllowList, ExchangeType, MIN_SEND_RATE};
use outbox_worker::WorkerSettings;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

/// The settings of the worker, from those of the server and the options.
pub fn read(refreshed: &Refreshed, args: &WorkArgs) -> WorkerSettings {
    let known = KnownSettings(&refreshed.settings);
    let lease_ttl_s: u64 = known.number("lease_ttl", 15);
    let (rules, limits) = (rules(&known), limits(&known));
    WorkerSettings {
        enabled: known.text("enabled") != "off",
        target: default_target(&known, args, rules, limits),
        rules,
        limits,
        standbys: (known.text("publish_after") == "standby").then(|| {
            let timeout_ms: i64 = known.number("standby_timeout", -1);
            Standbys::new(
                standbys::names(known.text("standby_names")).unwrap_or_default(),
                known.number("standby_quorum", 0),
                u64::try_from(timeout_ms).ok().map(Duration::from_millis),
            )
        }),
        lease_renew: Duration::from_millis((known.number::<u64>("lease_renew", 6) * 1000).min(lease_ttl_s * 500)),
        batch_size: known.number("batch_size", 1000),
        idle_backoff_ms: known.number("idle_backoff", 1000),
    }
}

/// The settings of the server by name without prefix, in the units of pg_settings.
struct KnownSettings<'a>(&'a HashMap<String, String>);

impl KnownSettings<'_> {
    fn text(&self, name: &str) -> &str {
        self.0.get(&format!("outbox.{name}")).map_or("", String::as_str)
    }

    fn number<T: FromStr>(&self, name: &str, default: T) -> T {
        self.text(name).parse().unwrap_or(default)
    }

    fn millis(&self, name: &str, default: u64) -> Duration {
        Duration::from_millis(self.number(name, default))
    }
}

fn rules(known: &KnownSettings) -> Rules {
    let retry_ms = known.number("retry_backoff", 1000);
    Rules {
        retry: RetryPolicy {
            max_attempts: known.number("max_attempts", 15),
            base_ms: retry_ms,
            max_ms: known.number("retry_backoff_max", 600_000).max(retry_ms),
            discards_unroutable: false,
        },
        dead_blocks: known.text("on_dead") != "skip",
        ordering: Ordering::Key,
        one_by_one: false,
    }
}

fn limits(known: &KnownSettings) -> Limits {
    Limits {
        max_pending: known.number("max_pending", 0),
        max_rate: known.number("max_rate", 0),
    }
}

fn default_target(known: &KnownSettings, args: &WorkArgs, rules: Rules, limits: Limits) -> Result<Target, String> {
    Ok(Target {
        transport: Protocol::Amqp(Amqp {
            url: args.url.clone().unwrap_or_else(|| known.text("url").to_owned()),
            user: None,
            password: (args.password_file.as_deref()).map(|path| Credential::File(file(path, "--password-file"))),
            exchange: Text::shared(known.text("exchange")),
            exchange_type: ExchangeType::parse(known.text("exchange_type")).unwrap_or_default(),
            routing_key: Template::parse(known.text("routing_key")).map_err(|error| error.to_string())?,
            max_in_flight: known.number("max_in_flight", 1000),
        }),
        certificates: Certificates {
            ca: pem(&args.tls_ca, "--tls-ca"),
            cert: pem(&args.tls_cert, "--tls-cert"),
            key: pem(&args.tls_key, "--tls-key"),
        },
        allow: AllowList::parse(known.text("http_allow")).map_err(|error| error.to_string())?,
        format: Format::default(),
        statics: Statics::default(),
        rules,
        limits,
        connect_timeout: CONNECT_TIMEOUT_MAX.min(known.millis("confirm_timeout", 30_000)),
        confirm_timeout: known.millis("confirm_timeout", 30_000),
        min_send_rate: MIN_SEND_RATE,
    })
}

fn pem(path: &Option<PathBuf>, named_by: &'static str) -> Option<Credential> {
    path.as_deref().map(|path| Credential::File(file(path, named_by)))
}

fn file(path: &Path, named_by: &'static str) -> NamedFile {
    let path = path.display().to_string();
    NamedFile { named_by, path }
}
