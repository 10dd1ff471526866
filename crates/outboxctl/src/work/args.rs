//! The options of `outboxctl work`.

use clap::Args;
use std::path::PathBuf;

/// The options of `outboxctl work`.
#[derive(Args, Clone, Debug)]
pub struct WorkArgs {
    /// Deliver all partitions without sharing; refused while another worker is alive
    #[arg(long)]
    pub no_leasing: bool,
    /// Run a single pass and exit
    #[arg(long)]
    pub once: bool,
    /// Print nothing
    #[arg(long)]
    pub silent: bool,
    /// Print lines also on a terminal, instead of showing a screen
    #[arg(long)]
    pub no_screen: bool,
    /// Wait this long between two passes
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub interval_ms: u64,
    /// Print one line for this many seconds, with their sums
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub window: u64,
    /// URL of the default destination for this machine, without a password: amqp://user@host/vhost [default:
    /// outbox.url]
    #[arg(long, env = "OUTBOX_URL", hide_env_values = true)]
    pub url: Option<String>,
    /// File whose first line is the password for the URL, readable by its owner only
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// With amqps: file of the CAs to trust, in PEM [default: those of the system]
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// With amqps: file of the client certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// With amqps: file of the key of the client certificate, in PEM, readable by its owner only
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Part of the worker's name [default: the name of this host]
    #[arg(long, value_name = "LABEL")]
    pub name: Option<String>,
}

impl WorkArgs {
    pub fn label(&self) -> String {
        let host = || std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let label = self.name.clone().or_else(host).unwrap_or_default();
        label.trim().to_owned()
    }
}
