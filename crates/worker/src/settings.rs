//! What a worker goes by: the settings of the server, and the destinations that there are.

use outbox_core::settle::Rules;
use outbox_transport::target::{Kind, Limits, Target, described};
use std::time::Duration;

/// The destination of who names none: a server of that name, else what the settings describe.
pub const DEFAULT_DESTINATION: &str = "default";

/// As of one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub enabled: bool,
    /// The default destination, and what the others leave out; or why it cannot be understood.
    pub target: Result<Target, String>,
    /// Of a destination that cannot be understood.
    pub rules: Rules,
    pub limits: Limits,
    /// How often the leases are looked at.
    pub lease_renew: Duration,
    /// Rows of one claim, at most.
    pub batch_size: u32,
    /// How long a worker sleeps when nothing calls for haste.
    pub idle_backoff_ms: u32,
}

/// A destination as the catalogs describe it. It has no Debug: `mapping` holds secrets.
#[derive(Clone, PartialEq)]
pub struct Described {
    pub name: String,
    pub kind: Kind,
    /// Of the server; none if the settings describe it.
    pub options: Vec<(String, String)>,
    /// Of the user mapping of the worker's role.
    pub mapping: Vec<(String, String)>,
    pub paused: bool,
}

impl Described {
    /// What it means under these settings.
    pub fn target(&self, settings: &Settings) -> Result<Target, String> {
        let default = settings.target.as_ref().map_err(String::clone)?;
        described(self.kind, default, &self.options, &self.mapping).map_err(|refused| refused.message)
    }
}
