//! Where is the program `outboxctl`? Called by the tests that run it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// The path of `outboxctl`, built from the tree as it is now: a stale one would be tested for nothing.
pub fn outboxctl() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--locked", "-p", "outboxctl"]);
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        // A test lies in target/<profile>/deps.
        let test = std::env::current_exe().expect("the path of this test");
        let directory = test.parent().and_then(|deps| deps.parent()).expect("target/<profile>");
        if directory.ends_with("release") {
            build.arg("--release");
        }
        let status = build.status().expect("run cargo");
        assert!(status.success(), "build outboxctl: {status}");
        directory.join("outboxctl")
    });
    built.clone()
}
