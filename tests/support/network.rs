//! Several hosts on one machine, each a network namespace with an address. Called by tests of partitions and of servers
//! that are on separate hosts.
//!
//! The namespaces have no names. The thread of the test moves into a namespace with a bridge, and each host is another
//! namespace, joined to the bridge by a pair of virtual interfaces. The kernel removes a namespace with its last
//! process and its last descriptor, so a killed test leaves nothing behind. Processes and threads start in the
//! namespace of the thread that starts them.
//!
//! ```text
//! thread of the test, 10.77.0.1 ── bridge ──┬── host 10.77.0.2
//!                                           ├── host 10.77.0.3
//!                                           └── …
//! ```

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::linux::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use crate::process::we_are_root;
use crate::skip::skip;

/// A namespace that a descriptor keeps alive.
#[derive(Debug)]
pub(crate) struct Namespace(File);

impl Namespace {
    /// The namespace of the calling thread.
    pub(crate) fn current() -> io::Result<Self> {
        File::open("/proc/thread-self/ns/net").map(Self)
    }

    /// Makes a namespace and moves the calling thread into it.
    fn create() -> io::Result<Self> {
        // SAFETY: unshare takes a plain number, and CLONE_NEWNET changes the calling thread alone.
        match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
            0 => Self::current(),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn join(&self) -> io::Result<()> {
        // SAFETY: setns takes plain numbers, and CLONE_NEWNET changes the calling thread alone.
        match unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Runs `action` in this namespace, on the calling thread. Without root, that works only in the thread's namespace.
    pub(crate) fn enter<T>(&self, action: impl FnOnce() -> T) -> io::Result<T> {
        let before = Self::current()?;
        if before.is(self)? {
            return Ok(action());
        }
        self.join()?;
        let _back = Back(before);
        Ok(action())
    }

    fn is(&self, other: &Self) -> io::Result<bool> {
        let (ours, theirs) = (self.0.metadata()?, other.0.metadata()?);
        Ok((ours.st_dev(), ours.st_ino()) == (theirs.st_dev(), theirs.st_ino()))
    }
}

/// Moves the thread back when it is dropped, also while a failed test unwinds.
struct Back(Namespace);

impl Drop for Back {
    fn drop(&mut self) {
        self.0.join().expect("go back to a network namespace");
    }
}

/// A network that the calling thread is on. It stays on the thread that made it.
pub struct Network {
    bridge: Namespace,
    last_address: Cell<u8>,
    _back: Back,
    _stays_on_its_thread: PhantomData<*const ()>,
}

impl Network {
    /// Makes a network without hosts. The calling thread has the address 10.77.0.1 from here on. If this machine allows
    /// no network with hosts, prints that `test` is skipped, and returns none.
    pub fn start(test: &str) -> Option<Self> {
        let network = Self::try_out().and_then(|()| Self::create());
        network.inspect_err(|reason| skip(test, reason)).ok()
    }

    /// Makes a network with a host, and removes it. A container may allow one step and refuse the next.
    fn try_out() -> Result<(), String> {
        static ALLOWED: OnceLock<Result<(), String>> = OnceLock::new();
        ALLOWED.get_or_init(|| Self::create()?.try_host().map(drop)).clone()
    }

    fn create() -> Result<Self, String> {
        if !we_are_root() {
            return Err("network namespaces need root".to_owned());
        }
        if let Some(missing) = ["/usr/sbin/ip", "/usr/sbin/nft"]
            .iter()
            .find(|path| !Path::new(path).exists())
        {
            return Err(format!("this machine has no {missing}"));
        }
        let before = Namespace::current().map_err(|error| format!("/proc has no namespaces: {error}"))?;
        let bridge = Namespace::create().map_err(|error| format!("this machine allows no namespaces: {error}"))?;
        let network = Self {
            bridge,
            last_address: Cell::new(1),
            _back: Back(before),
            _stays_on_its_thread: PhantomData,
        };
        ip("link set lo up")?;
        ip("link add bridge type bridge")?;
        ip("address add 10.77.0.1/24 dev bridge")?;
        ip("link set bridge up")?;
        Ok(network)
    }

    /// Adds a host with the next free address. It reaches every other host and the test.
    pub fn host(&self) -> Host {
        self.try_host().expect("what worked on the first network")
    }

    fn try_host(&self) -> Result<Host, String> {
        let number = self.last_address.get() + 1;
        self.last_address.set(number);
        let namespace = self.on_bridge(|| {
            let back = Back(Namespace::current().expect("the namespace of the bridge"));
            let namespace = Namespace::create().map_err(|error| format!("no further namespace: {error}"))?;
            drop(back);
            let path = format!("/proc/{}/fd/{}", std::process::id(), namespace.0.as_raw_fd());
            ip(&format!("link add host{number} type veth peer name eth0 netns {path}"))?;
            ip(&format!("link set host{number} master bridge up"))?;
            Ok::<_, String>(namespace)
        })?;
        let address = Ipv4Addr::new(10, 77, 0, number);
        let host = Host {
            namespace: Arc::new(namespace),
            address,
        };
        host.enter(|| {
            ip("link set lo up")?;
            ip(&format!("address add {address}/24 dev eth0"))?;
            ip("link set eth0 up")?;
            nft("add table ip network")?;
            nft("add set ip network cut { type ipv4_addr; }")?;
            nft("add chain ip network arriving { type filter hook input priority 0; }")?;
            nft("add rule ip network arriving ip saddr @cut drop")
        })?;
        Ok(host)
    }

    /// Drops every packet between two hosts, both ways and without an answer. Connections stay open.
    pub fn cut(&self, a: &Host, b: &Host) {
        set_cut("add", a, b);
    }

    /// Undoes [`Network::cut`].
    pub fn heal(&self, a: &Host, b: &Host) {
        set_cut("delete", a, b);
    }

    /// Drops what arrives from this end of a connection between two sockets of the test, without an answer, as a
    /// firewall does that has forgotten the connection. Others work.
    pub fn forget(&self, from: SocketAddr) {
        let (address, port) = (from.ip(), from.port());
        self.on_bridge(|| {
            nft("add table ip firewall")?;
            nft("add chain ip firewall arriving { type filter hook input priority 0; }")?;
            nft(&format!(
                "add rule ip firewall arriving ip saddr {address} tcp sport {port} drop"
            ))
        })
        .expect("drop a connection");
    }

    /// Takes the cable out: the host reaches nothing but itself.
    pub fn unplug(&self, host: &Host) {
        self.set_link(host, "down");
    }

    pub fn plug(&self, host: &Host) {
        self.set_link(host, "up");
    }

    fn set_link(&self, host: &Host, state: &str) {
        let [.., number] = host.address.octets();
        self.on_bridge(|| ip(&format!("link set host{number} {state}")))
            .expect("set a link");
    }

    fn on_bridge<T>(&self, action: impl FnOnce() -> T) -> T {
        self.bridge.enter(action).expect("enter the namespace of the bridge")
    }
}

/// A host of a network. A clone is the same host.
#[derive(Clone, Debug)]
pub struct Host {
    namespace: Arc<Namespace>,
    address: Ipv4Addr,
}

impl Host {
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Runs `action` on this host, on the calling thread. What it opens, and the processes and threads that it starts,
    /// stay on this host.
    pub fn enter<T>(&self, action: impl FnOnce() -> T) -> T {
        self.namespace.enter(action).expect("enter the namespace of a host")
    }
}

fn set_cut(verb: &str, a: &Host, b: &Host) {
    for (here, there) in [(a, b), (b, a)] {
        here.enter(|| nft(&format!("{verb} element ip network cut {{ {} }}", there.address)))
            .expect("cut or heal");
    }
}

fn ip(command: &str) -> Result<(), String> {
    run("ip", command)
}

fn nft(command: &str) -> Result<(), String> {
    run("nft", command)
}

/// Returns the first line of what the program reports if it fails.
fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(format!("/usr/sbin/{program}"))
        .args(arguments.split(' '))
        .output()
        .map_err(|error| format!("{program} does not run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let first = errors.lines().next().unwrap_or_default();
    Err(format!("{program} {arguments}: {first}"))
}
