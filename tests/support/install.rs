//! The Postgres installation that the tests run. Used by the cluster and by tests that need one of its programs.
//!
//! `make` mirrors the installation (see mirror_pg.sh) and installs the extension into the mirror. So tests need no
//! write access to the real installation and see no other extension.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The bin directory of a Postgres installation. Postgres finds its share and lib directories relative to itself.
#[derive(Clone, Debug)]
pub struct Installation {
    bindir: PathBuf,
}

impl Installation {
    /// The mirror that `make` names in OUTBOX_PG_BINDIR, or else the installation of the `pg_config` in PATH.
    pub fn from_env() -> Self {
        let bindir = match std::env::var_os("OUTBOX_PG_BINDIR") {
            Some(bindir) => PathBuf::from(bindir),
            None => PathBuf::from(ask_pg_config(Path::new("pg_config"), "--bindir")),
        };
        Self::at(bindir)
    }

    /// The installation with this bin directory.
    pub fn at(bindir: PathBuf) -> Self {
        let postgres = bindir.join("postgres");
        assert!(
            postgres.is_file(),
            "no {}: run the tests through `make`, or set OUTBOX_PG_BINDIR to the bin directory of a Postgres",
            postgres.display()
        );
        Self { bindir }
    }

    /// The path of a program of this installation, such as "initdb".
    pub fn bin(&self, program: &str) -> PathBuf {
        self.bindir.join(program)
    }

    /// The answer of this installation's pg_config, for example to "--sharedir".
    pub fn pg_config(&self, option: &str) -> String {
        ask_pg_config(&self.bin("pg_config"), option)
    }

    /// The version of this installation, such as "PostgreSQL 15.20".
    pub fn version(&self) -> String {
        self.pg_config("--version")
    }
}

fn ask_pg_config(pg_config: &Path, option: &str) -> String {
    let output = Command::new(pg_config).arg(option).output().unwrap_or_else(|error| {
        panic!(
            "cannot run {}: {error}; run the tests through `make`, or set OUTBOX_PG_BINDIR",
            pg_config.display()
        )
    });
    assert!(
        output.status.success(),
        "{} {option}: {}",
        pg_config.display(),
        output.status
    );
    String::from_utf8(output.stdout)
        .expect("pg_config answers in UTF-8")
        .trim()
        .to_owned()
}
