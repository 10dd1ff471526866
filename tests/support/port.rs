//! Free ports of loopback for private servers. Called by the cluster and the broker before they start a server.

use std::collections::HashSet;
use std::net::TcpListener;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// The range starts below that of the kernel's ephemeral ports (32768 and up). A port of that range, found by binding
/// port 0, may be taken by a client in the seconds that a broker needs to bind it again.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// The ports that this process has given out. Two servers may be starting at once, and neither has bound its port yet.
static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// A loopback port that no process listens on and that this process has not given out before.
pub fn free_port() -> u16 {
    let mut given = GIVEN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let given = given.get_or_insert_default();
    // Each search starts at a different port, so that concurrent test binaries rarely try the same one.
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .subsec_nanos();
    let start = (now / 1_000).wrapping_add(std::process::id().wrapping_mul(7_919)) % u32::from(COUNT);
    let start = u16::try_from(start).expect("less than COUNT");
    (0..COUNT)
        .map(|step| FIRST + (start + step) % COUNT)
        .find(|port| !given.contains(port) && TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .inspect(|port| {
            given.insert(*port);
        })
        .expect("a free port on loopback")
}

/// A port of loopback on which no process listens.
pub fn dead_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}
