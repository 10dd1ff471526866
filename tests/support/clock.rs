//! A server whose clocks a test shifts.

use std::os::unix::fs::FileExt;
use std::process::Command;

use crate::{Broker, Cluster, fresh_names, unconnected_builder, wait_connected};

/// The shifts of the clocks of a server, in seconds: of the wall clock, and of the boot-time clock, which no process
/// sets.
pub struct Clock(std::fs::File);

impl Clock {
    pub fn set(&self, wall: i64, boot: i64) {
        let shifts = [wall.to_ne_bytes(), boot.to_ne_bytes()].concat();
        self.0.write_all_at(&shifts, 0).expect("write the shifts");
    }
}

/// A server whose clock the test sets.
pub fn cluster_with_clock(broker: &Broker, exchange: &str, conf: &[&str]) -> (Cluster, Clock) {
    let dir = std::env::temp_dir().join(format!("outbox-clock-{}-{}", std::process::id(), fresh_names().0));
    std::fs::create_dir_all(&dir).expect("a directory");
    let (library, shift) = (dir.join("clock.so"), dir.join("shift"));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/support/clock.c");
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(source)
        .status();
    assert!(made.expect("cc").success(), "{source}");
    let clock = Clock(std::fs::File::create(&shift).expect("a file"));
    clock.set(0, 0);
    let cluster = unconnected_builder(&broker.url(), exchange, conf)
        .variable("LD_PRELOAD", &library)
        .variable("CLOCK_SHIFT", &shift)
        .start();
    wait_connected(&cluster);
    // The postmaster has mapped both files, and no process of the server runs another program.
    std::fs::remove_dir_all(&dir).expect("remove them");
    (cluster, clock)
}
