//! Free ports of loopback for private servers. Called by the cluster and the broker before they start a server.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{LazyLock, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// The range starts below that of the kernel's ephemeral ports (32768 and up). A port of that range, found by binding
/// port 0, may be taken by a client in the seconds that a broker needs to bind it again.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// The ports that this process has given out. Two servers may be starting at once, and neither has bound its port yet.
static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// A file with a byte for each port. A process locks the bytes of its ports, so that no other run of tests takes the
/// port of a server that is down for a moment. None: another user has the file.
static LOCKS: LazyLock<Option<File>> = LazyLock::new(open_locks);

fn open_locks() -> Option<File> {
    let path = std::env::temp_dir().join("outbox-test-ports");
    let open = |create| {
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create(create)
            .truncate(false)
            .mode(0o666)
            .open(&path)
    };
    open(false).or_else(|_| open(true)).ok()
}

/// Whether no other process has the port. This process then has it until it ends.
fn lock(file: &File, port: u16) -> bool {
    // SAFETY: plain data, for which zero is a value.
    let mut byte: libc::flock = unsafe { std::mem::zeroed() };
    (byte.l_type, byte.l_whence) = (libc::F_WRLCK as _, libc::SEEK_SET as _);
    (byte.l_start, byte.l_len) = (port.into(), 1);
    // SAFETY: an open file and a live flock.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &byte) == 0 }
}

/// A loopback port that no process listens on and that no run of tests has given out.
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
        .find(|port| {
            !given.contains(port)
                && TcpListener::bind(("127.0.0.1", *port)).is_ok()
                && LOCKS.as_ref().is_none_or(|file| lock(file, *port))
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_run_gets_a_port_that_was_given_out() {
        let port = free_port();
        let other = open_locks().expect("the file"); // opened again, as by another process
        assert!(!lock(&other, port));
    }
}
