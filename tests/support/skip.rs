//! Tests that this machine cannot run: each says so and passes. run_tests.rs lists them at its end, and with --ci
//! fails.

use std::io::Write as _;
use std::path::Path;

/// Says that `test` is skipped, and why.
pub fn skip(test: &str, reason: &str) {
    // Not eprintln: libtest shows what that prints only if the test fails.
    let line = format!("skipped: {test}, because {reason}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("write to stderr");
}

/// Whether this machine lacks one of these commands or absolute paths. If so, says that `test` is skipped.
pub fn skip_without(test: &str, needed: &[&str]) -> bool {
    let missing = needed.iter().find(|needed| !exists(needed));
    if let Some(missing) = missing {
        skip(test, &format!("this machine has no {missing}"));
    }
    missing.is_some()
}

fn exists(needed: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // An absolute path stays as it is.
    std::env::split_paths(&path).any(|directory| directory.join(Path::new(needed)).exists())
}
