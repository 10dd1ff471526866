//! The paths of the program `outboxctl` and of the packages of the examples. Called by the tests that run them.

use crate::{Cluster, DB};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The path of the `outboxctl` that `make` built: beside this program, and for a test in the directory above it.
pub fn outboxctl() -> PathBuf {
    let this = std::env::current_exe().expect("the path of this program");
    let mut built = this.parent().expect("target/PROFILE");
    if built.ends_with("deps") {
        built = built.parent().expect("target/PROFILE/deps");
    }
    let program = built.join("outboxctl");
    assert!(
        program.is_file(),
        "no {}: run cargo build -p outboxctl",
        program.display()
    );
    program
}

/// outboxctl with these arguments, as the superuser in the database of the tests.
pub fn outboxctl_at(cluster: &Cluster, arguments: &[&str]) -> Command {
    let port = cluster.port().to_string();
    let mut command = Command::new(outboxctl());
    command
        .args(arguments)
        .args(["-h", "127.0.0.1", "-U", "postgres", "-d", DB, "-p", &port]);
    command
}

/// The directory with the packages that examples/ and programs of the docs import. `python` is a venv; `node` and
/// `consumers` have the node_modules of examples/ and of docs/consumers.md. The first call installs them below target/.
pub fn example_packages() -> &'static Path {
    static PACKAGES: OnceLock<PathBuf> = OnceLock::new();
    PACKAGES.get_or_init(|| {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let installed = Command::new(tests.join("support/example_packages.sh")).status();
        assert!(
            installed.expect("run example_packages.sh").success(),
            "cannot install the packages of the examples"
        );
        tests.join("../target/examples")
    })
}
