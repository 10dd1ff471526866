//! The settings and destinations that a worker uses. The runtime reads them; `worker` takes them over.

use outbox_core::finding::Finding;
use outbox_core::settle::Rules;
use outbox_core::standbys::{self, Standbys};
use outbox_transport::AllowList;
use outbox_transport::described::described;
use outbox_transport::kind::Kind;
use outbox_transport::kind::{Limits, Target};
use outbox_transport::options::{Level, OptionValue};
use std::str::FromStr;
use std::time::Duration;

/// The destination of messages that name none: the foreign server with this name, or else the settings.
pub const DEFAULT_DESTINATION: &str = "default";

/// The settings of the server, as of one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSettings {
    pub enabled: bool,
    /// The default destination, and the defaults for options that other destinations omit. Err: why it is invalid.
    pub target: Result<Target, String>,
    /// The rules of a destination with an invalid description.
    pub rules: Rules,
    /// The limits of a destination with an invalid description.
    pub limits: Limits,
    /// The standbys that must have a commit before its message is sent; None = `outbox.publish_after` is `local`.
    pub standbys: Option<Standbys>,
    /// How often a worker checks and renews its leases.
    pub lease_renew: Duration,
    /// The most rows of one claim.
    pub batch_size: u32,
    /// The wait after a pass that left nothing to do, in ms.
    pub idle_backoff_ms: u32,
}

/// The settings of the server by name without `outbox.`, in the units of pg_settings.
pub trait KnownSettings {
    fn text(&self, name: &str) -> String;

    /// # Errors
    /// The server has no such setting, or not as a number.
    fn number<T: FromStr>(&self, name: &str) -> Result<T, String> {
        let text = self.text(name);
        text.parse()
            .map_err(|_| format!("the setting outbox.{name} is \"{text}\", not a number"))
    }
}

impl WorkerSettings {
    /// The settings of a worker. `own`: the options of the default destination that only its kind has, and certificates.
    ///
    /// # Errors
    /// A setting is missing or is no number.
    pub fn read(known: &impl KnownSettings, own: Vec<(Level, String, OptionValue)>) -> Result<Self, String> {
        let lease_ttl_ms = known.number::<u64>("lease_ttl")? * 1_000;
        let target = default_target(known, own);
        let described = target.as_ref().cloned().unwrap_or_default();
        Ok(Self {
            enabled: known.text("enabled") == "on",
            rules: described.rules,
            limits: described.limits,
            target,
            standbys: awaited_standbys(known)?,
            lease_renew: Duration::from_millis((known.number::<u64>("lease_renew")? * 1_000).min(lease_ttl_ms / 2)),
            batch_size: known.number("batch_size")?,
            idle_backoff_ms: known.number("idle_backoff")?,
        })
    }
}

/// The default destination, and the defaults of other destinations.
///
/// # Errors
/// Why the settings describe none.
pub fn default_target(known: &impl KnownSettings, own: Vec<(Level, String, OptionValue)>) -> Result<Target, String> {
    let allow = AllowList::parse(&known.text("http_allow"))?;
    Target::of_settings(|name| known.text(name), own, allow).map_err(|refused| refused.to_string())
}

/// The standbys that must have a commit before its message is sent; None = the primary alone.
///
/// # Errors
/// A setting is missing or is no number.
pub fn awaited_standbys(known: &impl KnownSettings) -> Result<Option<Standbys>, String> {
    if known.text("publish_after") != "standby" {
        return Ok(None);
    }
    let timeout_ms: i64 = known.number("standby_timeout")?;
    Ok(Some(Standbys::new(
        standbys::names(&known.text("standby_names"))?,
        known.number("standby_quorum")?,
        u64::try_from(timeout_ms).ok().map(Duration::from_millis),
    )))
}

/// The user mapping of a foreign server for a worker's role. It has no Debug: it holds secrets.
#[derive(Clone, PartialEq)]
pub enum Mapping {
    /// There is none, so the destination has no secrets.
    Absent,
    Options(Vec<(String, String)>),
    /// The destination has secrets, and the worker does not have them: why. Nothing may be sent.
    Unusable(Finding),
}

/// The problem of an empty user mapping. `role` is quoted as an identifier.
pub fn empty_mapping(role: &str) -> Finding {
    Finding::new("mapping_empty", format!("the user mapping for {role} is empty")).with("role", role)
}

/// A destination as the catalogs describe it. It has no Debug: `mapping` holds secrets.
#[derive(Clone, PartialEq)]
pub struct Described {
    pub name: String,
    /// None = this version knows none for its foreign data wrapper, so nothing can be sent.
    pub kind: Option<&'static Kind>,
    /// The options of the foreign server; empty if the settings describe the destination.
    pub options: Vec<(String, String)>,
    pub mapping: Mapping,
    pub paused: bool,
    /// Why nothing is sent until outbox_adopt(destination => …): another role owned the server of this name.
    pub not_adopted: Option<String>,
}

impl Described {
    /// The target that the description makes under these settings. Err: why it is invalid.
    pub fn target(&self, settings: &WorkerSettings) -> Result<Target, Finding> {
        if let Some(why) = &self.not_adopted {
            return Err(why.clone().into());
        }
        let default = settings.target.as_ref().map_err(|why| Finding::from(why.as_str()))?;
        let mapping: &[_] = match &self.mapping {
            Mapping::Absent => &[],
            Mapping::Options(options) => options,
            Mapping::Unusable(why) => return Err(why.clone()),
        };
        let kind = self
            .kind
            .ok_or("the library that the server runs does not know this kind of destination")?;
        described(kind, default, &self.options, mapping).map_err(|refused| {
            let finding = Finding::from(refused.to_string());
            match self.options.iter().any(|(name, _)| *name == refused.name) {
                true => finding.with("option", refused.name),
                false => finding,
            }
        })
    }
}
