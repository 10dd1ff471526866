//! Processes that cannot outlive the test process, and the user they run as. Called by every module that starts a
//! server.
//!
//! A test process may be killed at any time. The kernel then sends each server the signal that it registered with
//! PR_SET_PDEATHSIG. So no run leaves a server behind, and no server ever needs to be ended by name.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::Duration;

use crate::network::Namespace;
use crate::wait::{LONG, try_wait_for, wait_until};

/// The user that servers run as when the tests run as root: Postgres refuses to run as root.
#[derive(Clone, Copy, Debug)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
}

pub fn we_are_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// The account to run Postgres under, or none if the tests run as an ordinary user: Postgres then runs as that user.
pub fn postgres_account() -> Option<Account> {
    static ACCOUNT: OnceLock<Option<Account>> = OnceLock::new();
    *ACCOUNT.get_or_init(|| {
        we_are_root().then(|| Account {
            uid: ask_id("-u"),
            gid: ask_id("-g"),
        })
    })
}

fn ask_id(option: &str) -> u32 {
    let output = Command::new("id").args([option, "postgres"]).output().expect("run id");
    let answer = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    answer
        .parse()
        .unwrap_or_else(|_| panic!("as root the tests run Postgres as user postgres, which does not exist"))
}

/// Makes `command` run under `account`, without the supplementary groups of root.
pub fn run_as(command: &mut Command, account: Option<Account>) {
    if let Some(Account { uid, gid }) = account {
        command.uid(uid).gid(gid);
    }
}

/// Runs `command` to its end; shows its output only if it fails.
pub fn run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("run {command:?}: {error}"));
    let printed = [output.stdout, output.stderr].concat();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&printed)
    );
}

/// Starts a server that gets `death_signal` when this process ends.
///
/// The server gets a separate session: a Ctrl-C in the terminal goes to the test alone, which ends the server. And
/// Linux gives each session the same share of the processors. Each process of Postgres has its own session, so all
/// brokers and tests together had the share of one backend, and a busy machine kept confirms back for seconds. It
/// starts in the network namespace of the calling thread, as any child does.
pub fn spawn_bound(mut command: Command, death_signal: i32) -> io::Result<Child> {
    let us = std::process::id();
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are allowed. setsid, prctl and
    // getppid are plain system calls, and the closure allocates nothing. It runs after the change of user, which clears
    // the setting.
    unsafe {
        command.pre_exec(move || {
            if libc::setsid() < 0 || libc::prctl(libc::PR_SET_PDEATHSIG, death_signal) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call above; then the kernel never sends the signal.
            if libc::getppid().cast_unsigned() != us {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        })
    };
    let (answer, child) = mpsc::channel();
    let order = Order {
        command,
        namespace: Namespace::current()?,
        answer,
    };
    spawner()
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .send(order)
        .expect("the spawner never ends");
    child.recv().expect("the spawner answers every order")
}

struct Order {
    command: Command,
    namespace: Namespace,
    answer: mpsc::Sender<io::Result<Child>>,
}

/// The thread that starts all servers. The trap: "parent" in PR_SET_PDEATHSIG is the thread that forked. Each test runs
/// on a separate thread, so a server shared by tests would die with the test that started it. This thread lives as long
/// as the process.
fn spawner() -> &'static Mutex<mpsc::Sender<Order>> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Order>>> = OnceLock::new();
    SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                for mut order in inbox {
                    // The command cannot enter the namespace after its change of user.
                    let spawned = order.namespace.enter(|| order.command.spawn()).flatten();
                    // If the caller is gone, it cannot own the child. The child is dropped here and ends by its death
                    // signal.
                    let _ = order.answer.send(spawned);
                }
            })
            .expect("start the spawner thread");
        Mutex::new(orders)
    })
}

/// Sends `signal` to one process. It is no error if the process has ended already: it may end at any time.
pub fn signal(pid: u32, signal: i32) {
    let pid = libc::pid_t::try_from(pid).expect("a pid");
    assert!(pid > 1, "never signal a process group or init");
    // SAFETY: kill takes plain numbers.
    unsafe { libc::kill(pid, signal) };
}

/// Stops a process with SIGSTOP and waits until it is stopped: from then on it starts no other process.
pub fn suspend(pid: u32) {
    signal(pid, libc::SIGSTOP);
    wait_until("a process to stop", LONG, || {
        state_and_parent(pid).is_none_or(|(state, _)| state != "R" && state != "S" && state != "D")
    });
}

/// Waits until `child` has ended and reaps it. Returns none if `timeout` passes first.
pub fn reap(child: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    try_wait_for(timeout, || child.try_wait().expect("wait for a child process"))
}

/// Kills `child` and reaps it.
pub fn kill(child: &mut Child) {
    // An error means that the child has ended already.
    let _ = child.kill();
    let _ = child.wait();
}

/// The live processes whose parent is `pid`.
pub fn children_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("read /proc");
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|child| state_and_parent(*child).is_some_and(|(_, parent)| parent == pid))
        .collect()
}

/// The most memory that the process has had at a time, in MiB.
pub fn peak_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the status of a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).expect("VmHWM");
    kib.parse::<u64>().expect("a number") / 1024
}

/// Waits until none of `pids` runs any more. A zombie counts as ended, for its parent may be an init that never reaps.
/// A zombie with other threads does not count: they end after the first thread and hold the shared memory until then.
pub fn wait_until_ended(what: &str, pids: &[u32], timeout: Duration) {
    let threads = |pid: u32| std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    let has_ended = |pid: u32| state_and_parent(pid).is_none_or(|(state, _)| state == "Z" && threads(pid) <= 1);
    wait_until(what, timeout, || pids.iter().all(|pid| has_ended(*pid)));
}

fn state_and_parent(pid: u32) -> Option<(String, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // "pid (name) state ppid …"; the name may contain spaces and brackets.
    let mut rest = stat.rsplit_once(')')?.1.split_whitespace();
    Some((rest.next()?.to_owned(), rest.next()?.parse().ok()?))
}
