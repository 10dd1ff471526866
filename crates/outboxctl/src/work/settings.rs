//! The settings of a worker outside the server. Most are the settings of the server that every role may read. The
//! address of the broker and the secrets come from the command line. The worker reads no secret of the server.

use super::args::WorkArgs;
use super::error::{WorkError, unexpected};
use super::worker_session::Refreshed;
use outbox_transport::kind::Kind;
use outbox_transport::options::{Level, NamedFile, OptionValue};
use outbox_worker::{KnownSettings, WorkerSettings};
use std::collections::HashMap;
use std::path::Path;

/// The settings of the worker, from those of the server and the options.
pub fn read(refreshed: &Refreshed, args: &WorkArgs) -> Result<WorkerSettings, WorkError> {
    let known = Known(&refreshed.settings);
    WorkerSettings::read(&known, options(&known, args)).map_err(|why| unexpected(&why))
}

struct Known<'a>(&'a HashMap<String, String>);

impl KnownSettings for Known<'_> {
    fn text(&self, name: &str) -> String {
        self.0.get(&format!("outbox.{name}")).cloned().unwrap_or_default()
    }
}

/// The options of the default destination: of the command line, and of the settings that name no file.
fn options(known: &Known, args: &WorkArgs) -> Vec<(Level, String, OptionValue)> {
    let url = args
        .url
        .as_ref()
        .map(|url| (Level::Server, "url".to_owned(), OptionValue::text(url)));
    let files = [
        (Level::Server, "tls_ca", &args.tls_ca, "--tls-ca"),
        (Level::UserMapping, "tls_cert", &args.tls_cert, "--tls-cert"),
        (Level::UserMapping, "tls_key", &args.tls_key, "--tls-key"),
        (Level::UserMapping, "password", &args.password_file, "--password-file"),
    ];
    let file = |path: &Path, named_by| {
        let path = path.display().to_string();
        OptionValue::File(NamedFile { named_by, path })
    };
    let files = files
        .into_iter()
        .filter_map(|(level, name, path, by)| Some((level, name.to_owned(), file(path.as_deref()?, by))));
    let settings = Kind::of_settings()
        .settings
        .iter()
        .filter(|setting| setting.file.is_none());
    let of_server = settings.filter_map(|setting| {
        let name = setting.name.to_str().unwrap_or_default();
        setting.value(known.0.get(name).cloned().unwrap_or_default())
    });
    let of_server = of_server.filter(|(_, name, _)| name != "url" || url.is_none());
    let own: Vec<_> = of_server.collect();
    own.into_iter().chain(url).chain(files).collect()
}
