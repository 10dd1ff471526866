//! Where is the program `outboxctl`? Called by the tests that run it.

use std::path::PathBuf;

/// It lies beside the directory of the tests; `make test` builds it first.
pub fn outboxctl() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let built = test
        .parent()
        .and_then(|deps| deps.parent())
        .expect("target/PROFILE/deps");
    let program = built.join("outboxctl");
    assert!(program.is_file(), "no {}: cargo build -p outboxctl", program.display());
    program
}
