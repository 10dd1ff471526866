//! The settings and destinations that a worker uses. The runtime reads them; `worker` takes them over.

use outbox_core::settle::Rules;
use outbox_core::standbys::Standbys;
use outbox_transport::target::{Kind, Limits, Target, described};
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

/// The user mapping of a foreign server for a worker's role. It has no Debug: it holds secrets.
#[derive(Clone, PartialEq)]
pub enum Mapping {
    /// There is none, so the destination has no secrets.
    Absent,
    Options(Vec<(String, String)>),
    /// The destination has secrets, and the worker does not have them: why. Nothing may be sent.
    Unusable(String),
}

/// The problem of an empty user mapping. `role` is quoted as an identifier.
pub fn empty_mapping(role: &str) -> String {
    format!("the user mapping for {role} is empty")
}

/// A destination as the catalogs describe it. It has no Debug: `mapping` holds secrets.
#[derive(Clone, PartialEq)]
pub struct Described {
    pub name: String,
    pub kind: Kind,
    /// The options of the foreign server; empty if the settings describe the destination.
    pub options: Vec<(String, String)>,
    pub mapping: Mapping,
    pub paused: bool,
    /// Why nothing is sent until outbox_adopt(destination => …): another role owned the server of this name.
    pub not_adopted: Option<String>,
}

impl Described {
    /// The target that the description makes under these settings. Err: why it is invalid.
    pub fn target(&self, settings: &WorkerSettings) -> Result<Target, String> {
        if let Some(why) = &self.not_adopted {
            return Err(why.clone());
        }
        let default = settings.target.as_ref().map_err(String::clone)?;
        let mapping: &[_] = match &self.mapping {
            Mapping::Absent => &[],
            Mapping::Options(options) => options,
            Mapping::Unusable(why) => return Err(why.clone()),
        };
        described(self.kind, default, &self.options, mapping).map_err(|refused| refused.message)
    }
}
