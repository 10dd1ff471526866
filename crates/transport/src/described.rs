//! The destination that options describe: those of all kinds, and those that its kind reads. Pure; called on the main
//! thread by the validators of the foreign data wrappers, by the checks of settings, and by the worker.

use crate::kind::{Kind, Limits, Own, Target};
use crate::options::{Certificates, FileRule, Given, Level, OptionValue, Options, Pairs, Refused, Setting, refused};
use crate::ssrf::AllowList;
use crate::transfer::MIN_SEND_RATE;
use outbox_core::message::Text;
use outbox_core::route::{Format, Statics, Template};
use outbox_core::settle::{Ordering, Rules};
use std::time::Duration;

/// A destination without options, of the kind that the settings describe.
impl Default for Target {
    fn default() -> Self {
        let (kind, server, mapping) = (Kind::of_settings(), Options::default(), Options::default());
        let peer = (kind.read)(&server, &mapping).expect("no option is refused");
        Self {
            kind,
            own: Own { server, mapping, peer },
            certificates: Certificates::default(),
            allow: AllowList::default(),
            format: Format::default(),
            statics: Statics::default(),
            rules: Rules::default(),
            limits: Limits::default(),
            max_in_flight: 1_000,
            connect_timeout: CONNECT_TIMEOUT_MAX,
            answer_timeout: Duration::from_secs(30),
            min_send_rate: MIN_SEND_RATE,
        }
    }
}

/// The longest wait for each step of connecting, unless a destination has another one. A shorter `answer_timeout` of the
/// settings limits it too.
pub(crate) const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(10);

impl Setting {
    /// Checks a value; an empty one leaves the option out. Err: why it is refused, and a hint.
    pub fn check(&self, kind: &Kind, value: &str) -> Result<(), (String, String)> {
        match self.file {
            _ if value.is_empty() => Ok(()),
            // A worker's working directory is the data directory; that of the operator who sets it is another.
            Some(_) if value.starts_with('/') => Ok(()),
            Some(rule) => Err((
                "it is not an absolute path".to_owned(),
                match rule {
                    FileRule::Secret => "Name a file of mode 0600 that belongs to the server's user.",
                    FileRule::Pem => "Name a file in PEM that the server's user can read.",
                }
                .to_owned(),
            )),
            None => {
                let options = Options(vec![(self.option.to_owned(), OptionValue::text(value))]);
                let refused = (kind.read)(&options, &Options::default()).err();
                refused.map_or(Ok(()), |refused| Err((refused.why.unwrap_or_default(), refused.hint)))
            }
        }
    }
}

/// The settings that are options of the default destination whatever its kind.
pub static SETTINGS: &[Setting] = &[
    Setting::text(c"outbox.tls_ca_file", "tls_ca", c"", c"With TLS: PEM file of the CAs that may have issued the certificate of the default destination. Empty: the system's.")
        .of_file(FileRule::Pem),
    Setting::text(c"outbox.tls_cert_file", "tls_cert", c"", c"With TLS: PEM file of the client certificate that the default destination is shown, with its chain.")
        .of_file(FileRule::Pem)
        .of_mapping(),
    Setting::text(c"outbox.tls_key_file", "tls_key", c"", c"PEM file of the client certificate's key: mode 0600, owned by the server's user, not encrypted.")
        .of_file(FileRule::Secret)
        .of_mapping(),
];

/// The settings that have the name of the option for which they are the default, after `outbox.`.
pub const DEFAULTS: [&str; 8] = [
    "confirm_timeout",
    "max_attempts",
    "max_in_flight",
    "max_pending",
    "max_rate",
    "on_dead",
    "retry_backoff",
    "retry_backoff_max",
];

/// The highest limit: the settings are signed 32-bit numbers.
const LIMIT_MAX: u64 = i32::MAX as u64;
/// The highest `max_in_flight`: the most messages that a worker claims at once.
const IN_FLIGHT_MAX: u64 = 2_000;
const DAY_MS: u64 = 86_400_000;

/// The options of the servers of every kind.
const OF_SERVER: &[&str] = &[
    "format",
    "headers",
    "content_type",
    "app_id",
    "source",
    "ordering",
    "on_dead",
    "dead_letters_to",
    "max_attempts",
    "max_pending",
    "max_rate",
    "retry_backoff",
    "retry_backoff_max",
    "connect_timeout",
    "min_send_rate",
    "tls_ca",
];
/// The options of the user mappings of every kind.
const OF_MAPPING: &[&str] = &["tls_cert", "tls_key"];

/// Takes over an option that means the same for every kind that has it. Returns whether it is one.
fn take_common(target: &mut Target, given: Given<'_>) -> Result<bool, Refused> {
    match given.name {
        "format" => target.format = given.core(Format::parse(given.text))?,
        "content_type" => target.statics.content_type = Some(Text::shared(given.text)),
        "app_id" => target.statics.app_id = Text::shared(given.text),
        "source" => target.statics.source = given.core(Template::parse_text(given.text))?,
        "headers" => {
            for (header, template) in &given.texts(r#"{"tenant": "{header:tenant}"}"#)? {
                let form = &target.kind.form;
                given.core(target.statics.headers.add(form, target.format, header, template))?;
            }
        }
        "ordering" => {
            target.rules.ordering = given.choice(&[
                ("key", Ordering::Key),
                ("partition", Ordering::Partition),
                ("none", Ordering::None),
            ])?;
        }
        "on_dead" => target.rules.dead_blocks = given.choice(&[("block", true), ("skip", false)])?,
        "on_unroutable" => {
            target.rules.retry.discards_unroutable = given.choice(&[("retry", false), ("discard", true)])?;
        }
        // Read by SQL where a message becomes a dead letter.
        "dead_letters_to" if given.text.is_empty() => {
            return given.refuse("it is empty", "Name another destination, or default.");
        }
        "dead_letters_to" => {}
        "max_attempts" => target.rules.retry.max_attempts = given.number(1..=LIMIT_MAX)? as u32,
        "max_pending" => target.limits.max_pending = given.number(0..=LIMIT_MAX)? as u32,
        "max_rate" => target.limits.max_rate = given.number(0..=LIMIT_MAX)? as u32,
        "max_in_flight" => target.max_in_flight = given.number(1..=IN_FLIGHT_MAX)? as usize,
        "retry_backoff" => target.rules.retry.base_ms = given.millis(1..=DAY_MS)?,
        "retry_backoff_max" => target.rules.retry.max_ms = given.millis(1..=DAY_MS)?,
        "connect_timeout" => target.connect_timeout = given.duration(100..=300_000)?,
        // Kinds name it as their users do.
        "confirm_timeout" | "timeout" => target.answer_timeout = given.duration(100..=3_600_000)?,
        "min_send_rate" => target.min_send_rate = given.number(1..=LIMIT_MAX)? as u32,
        _ => return Ok(false),
    }
    Ok(true)
}

/// The names of the options, as a list in words.
pub(crate) fn names(kind: &Kind, level: Level) -> Vec<&'static str> {
    let (own, common) = match level {
        Level::Server => (kind.of_server, OF_SERVER),
        Level::UserMapping => (kind.of_mapping, OF_MAPPING),
    };
    [own, common].concat()
}

/// Checks the options of one object by themselves.
///
/// # Errors
/// Returns an option that is unknown or has a bad value.
pub fn check(kind: &'static Kind, level: Level, options: &Pairs) -> Result<(), Refused> {
    let known = names(kind, level);
    if let Some((name, _)) = options.iter().find(|(name, _)| !known.contains(&&**name)) {
        return Err(Refused {
            name: name.clone(),
            why: None,
            hint: format!("Options: {}.", known.join(", ")),
        });
    }
    let (server, mapping) = match level {
        Level::Server => (options, &[][..]),
        Level::UserMapping => (&[][..], options),
    };
    described(kind, &Target::default(), server, mapping).map(drop)
}

/// The destination that these options describe. Options that they leave out are as in `default`, which the settings
/// describe; but no credentials of the default are sent to another address.
///
/// # Errors
/// Returns an option with a bad value.
pub fn described(kind: &'static Kind, default: &Target, server: &Pairs, mapping: &Pairs) -> Result<Target, Refused> {
    let is_missing = |(_, value): &&(String, String)| value.is_empty() || value.contains('\0');
    if let Some((name, _)) = mapping.iter().find(is_missing) {
        return Err(refused(name, "it is empty", "Leave it out instead."));
    }
    let (mut server, mut mapping) = (Options::of(server), Options::of(mapping));
    if kind == default.kind {
        if !server.has("url") {
            mapping.inherit(&default.own.mapping);
        }
        server.inherit(&default.own.server);
    }
    let mut target = Target {
        kind,
        ..default.clone()
    };
    target.take(server, mapping)?;
    let of_settings = default.own.peer.endpoints();
    target.allow = match target
        .own
        .peer
        .endpoints()
        .iter()
        .all(|endpoint| of_settings.contains(endpoint))
    {
        true if kind == default.kind => AllowList::any(), // a superuser makes the settings
        _ if kind.may_be_private => default.allow.clone().and_private(),
        _ => default.allow.clone(),
    };
    Ok(target)
}

impl Target {
    /// The destination that the settings describe: the default one. `known` has the text of each of [`DEFAULTS`], `server`
    /// and `mapping` the options of its own.
    ///
    /// # Errors
    /// Returns an option with a bad value.
    pub fn of_settings(
        known: impl Fn(&str) -> String,
        options: Vec<(Level, String, OptionValue)>,
        allow: AllowList,
    ) -> Result<Self, Refused> {
        let (mut server, mut mapping) = (Options::default(), Options::default());
        server
            .0
            .extend(DEFAULTS.map(|name| (name.to_owned(), OptionValue::text(known(name)))));
        for (level, name, value) in options {
            match level {
                Level::Server => server.0.push((name, value)),
                Level::UserMapping => mapping.0.push((name, value)),
            }
        }
        let mut target = Self {
            allow,
            ..Self::default()
        };
        target.take(server, mapping)?;
        target.connect_timeout = CONNECT_TIMEOUT_MAX.min(target.answer_timeout);
        Ok(target)
    }

    /// Takes over these options.
    fn take(&mut self, mut server: Options, mapping: Options) -> Result<(), Refused> {
        server.0.sort_by_key(|(name, _)| name != "format"); // the names of headers depend on it
        let mut own = Options::default();
        for (name, value) in server.0 {
            let is_common = match value.as_text() {
                Some(text) => take_common(self, Given { name: &name, text })?,
                None => false,
            };
            if !is_common {
                own.0.push((name, value));
            }
        }
        let checked = self.statics.check(self.format);
        checked.map_err(|refusal| refused("format", refusal.message, refusal.hint))?;
        self.rules.one_by_one = self.kind.one_by_one;
        self.rules.retry.max_ms = self.rules.retry.max_ms.max(self.rules.retry.base_ms);
        let pem = |options: &Options, name| options.value(name).map(|value| checked_pem(name, value)).transpose();
        self.certificates = Certificates {
            ca: pem(&own, "tls_ca")?,
            cert: pem(&mapping, "tls_cert")?,
            key: pem(&mapping, "tls_key")?,
        };
        let peer = (self.kind.read)(&own, &mapping)?;
        self.own = Own {
            server: own,
            mapping,
            peer,
        };
        Ok(())
    }
}

/// Only checks that a text looks like PEM. The content is checked when it is used.
fn checked_pem(name: &str, value: &OptionValue) -> Result<OptionValue, Refused> {
    match value {
        OptionValue::Text(text) if !text.reveal().contains("-----BEGIN ") => Err(refused(
            name,
            "it is not in PEM",
            "Give the text of the file: -----BEGIN CERTIFICATE----- …",
        )),
        value => Ok(value.clone()),
    }
}

/// The template of the address of messages, if these options of a server have one; None = that of the settings counts.
pub fn address_template(kind: &Kind, server: &Pairs) -> Option<Template> {
    let Some(address) = kind.address else {
        return Some(Template::default());
    };
    let option = server.iter().find(|(name, _)| name == address);
    match option {
        Some((_, text)) => Template::parse(text).ok(),
        None if kind == Kind::of_settings() => None,
        None => Some(Template::default()),
    }
}

#[cfg(test)]
#[path = "described_tests.rs"]
mod tests;
