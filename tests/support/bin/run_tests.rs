//! usage: run-tests [--ci] [--times] ARTIFACTS TARGET… [-- FILTER…]
//!
//! Runs test binaries beside private RabbitMQs, to their ends, and lists every failure. Called by the Makefile.
//!
//! - ARTIFACTS: what `cargo build --tests --message-format=json` printed; it names the binaries.
//! - TARGET: the name of a test binary, or of a package for all of its binaries. The first one runs with many threads,
//!   since its tests wait for servers; all others run beside it, one after another.
//! - FILTER: tests of the first binary to run, as for `cargo test`.
//! - --ci: runs each failed test again, alone. One that passes then is named as flaky and does not fail the run. A skipped
//!   test does.
//! - --times: lists the slowest tests.
//!
//! A binary that prints nothing for ten minutes is killed, and the tests that it still ran are named: a test that hangs
//! must not hide which one it is. Its log ends with a list of all processes.
//!
//! The output of each binary is in target/test-logs. The data directories of servers are on a tmpfs if it has room.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::io::{BufRead, BufReader, Read, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::private_broker::Size;
use support::{Broker, PrivateBroker, process};

const LOGS: &str = "target/test-logs";
const TMPFS: &str = "/dev/shm";
const NAME: &str = "outbox-tests-";
/// The servers of all threads, with the tests that write a million rows.
const FREE_MIN_BYTES: u64 = 8 << 30;
const SLOWEST: usize = 60;
/// Several times as long as the slowest test takes on a slow machine.
const STALLED: Duration = Duration::from_mins(10);

fn main() -> ExitCode {
    let Some(options) = Options::parse() else {
        eprintln!("usage: run-tests [--ci] [--times] ARTIFACTS TARGET… [-- FILTER…]");
        return ExitCode::from(2);
    };
    let started = Instant::now();
    let binaries = binaries(&options);
    let _ = fs::remove_dir_all(LOGS);
    fs::create_dir_all(LOGS).expect("create the directory of the logs");
    // The systems are too large for memory, and a Debian needs device files.
    let is_small = options.targets.iter().all(|target| target != "systems");
    let _tmpfs = is_small.then(Tmpfs::make).flatten().inspect(|tmpfs| {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("OUTBOX_WORK_DIR", &tmpfs.0) }
    });
    let run = Run {
        options,
        seen: Mutex::default(),
    };
    let (many, others) = binaries.split_at(1);
    std::thread::scope(|scope| {
        scope.spawn(|| run.all(many, run.options.threads, &run.options.filters));
        scope.spawn(|| run.all(others, 2, &[]));
    });
    let failed = run.failed_again(&binaries);
    run.report(&failed, started.elapsed())
}

struct Options {
    ci: bool,
    times: bool,
    threads: usize,
    artifacts: PathBuf,
    targets: Vec<String>,
    filters: Vec<String>,
}

impl Options {
    fn parse() -> Option<Self> {
        let mut args: Vec<String> = std::env::args().skip(1).collect();
        let filters = match args.iter().position(|arg| arg == "--") {
            Some(end) => args.split_off(end).split_off(1),
            None => Vec::new(),
        };
        let (flags, mut names): (Vec<String>, Vec<String>) = args.into_iter().partition(|arg| arg.starts_with("--"));
        if names.len() < 2 || flags.iter().any(|flag| flag != "--ci" && flag != "--times") {
            return None;
        }
        let has = |name: &str| flags.iter().any(|flag| flag == name);
        let wanted = std::env::var("OUTBOX_TEST_THREADS").ok();
        Some(Self {
            ci: has("--ci"),
            times: has("--times"),
            threads: wanted.map_or_else(default_threads, |count| count.parse().expect("OUTBOX_TEST_THREADS")),
            artifacts: names.remove(0).into(),
            targets: names,
            filters,
        })
    }
}

/// Most of a test's time is waiting, so there are more threads than processors.
fn default_threads() -> usize {
    3 * std::thread::available_parallelism().map_or(2, usize::from)
}

struct Binary {
    package: String,
    target: String,
    program: PathBuf,
    /// The directory of its package, where cargo would start it.
    directory: PathBuf,
}

/// Where tests find a broker.
type BrokerVars = [(&'static str, String); 2];

fn vars(broker: &PrivateBroker) -> BrokerVars {
    [
        ("OUTBOX_BROKER_PORT", broker.port().to_string()),
        ("OUTBOX_BROKER_CTL", broker.ctl_script().display().to_string()),
    ]
}

impl Binary {
    /// Such as "core/models".
    fn name(&self) -> String {
        format!("{}/{}", self.package, self.target)
    }

    fn command(&self, broker: &BrokerVars, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(args)
            .current_dir(&self.directory)
            .env("CARGO_MANIFEST_DIR", &self.directory)
            .envs(broker.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// The test binaries that cargo has built, in the order of the targets.
fn binaries(options: &Options) -> Vec<Binary> {
    let artifacts = fs::read_to_string(&options.artifacts).expect("what cargo printed");
    let mut built: Vec<Binary> = artifacts.lines().filter_map(test_binary).collect();
    let mut found = Vec::new();
    for target in &options.targets {
        let before = found.len();
        found.extend(built.extract_if(.., |binary| [&binary.target, &binary.package].contains(&target)));
        assert!(found.len() > before, "cargo built no test binary of {target}");
    }
    found
}

/// The test binary of a line of cargo's output.
fn test_binary(line: &str) -> Option<Binary> {
    let artifact: Value = serde_json::from_str(line).ok()?;
    let program = artifact["executable"]
        .as_str()
        .filter(|_| artifact["profile"]["test"] == true)?;
    let directory = Path::new(artifact["manifest_path"].as_str()?).parent()?;
    Some(Binary {
        package: directory.file_name()?.to_str()?.to_owned(),
        target: artifact["target"]["name"].as_str()?.to_owned(),
        program: program.into(),
        directory: directory.to_owned(),
    })
}

struct Failure {
    /// The name of the binary.
    binary: String,
    test: String,
    log: PathBuf,
}

/// What the tests have printed so far.
#[derive(Default)]
struct Seen {
    passed: usize,
    ignored: usize,
    failed: Vec<Failure>,
    /// Binaries that ended without the results of all their tests.
    broken: Vec<String>,
    skipped: BTreeSet<String>,
    flaky: Vec<Failure>,
    times: Vec<(f64, String)>,
}

struct Run {
    options: Options,
    seen: Mutex<Seen>,
}

impl Run {
    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().expect("no panic while tests are counted")
    }

    /// Runs binaries one after another, beside a broker of their own: tests of the transport disturb theirs.
    fn all(&self, binaries: &[Binary], threads: usize, filters: &[String]) {
        if !binaries.is_empty() {
            let broker = Broker::start_sized(Size::SHARED);
            let vars = vars(&broker);
            binaries
                .iter()
                .for_each(|binary| self.binary(binary, &vars, threads, filters));
        }
    }

    /// Runs all tests of a binary that the filters choose.
    fn binary(&self, binary: &Binary, broker: &BrokerVars, threads: usize, filters: &[String]) {
        let started = Instant::now();
        let name = binary.name();
        let log = Path::new(LOGS).join(format!("{}.log", name.replace('/', "-")));
        let threads = format!("--test-threads={threads}");
        let mut args = vec![threads.as_str()];
        args.extend(filters.iter().map(String::as_str));
        let mut command = binary.command(broker, &args);
        if self.options.times {
            // An option that libtest calls unstable.
            command
                .env("RUSTC_BOOTSTRAP", "1")
                .args(["-Zunstable-options", "--report-time"]);
        }
        let mut in_order = false;
        let mut slow = BTreeSet::new();
        let status = watch(command, &log, |line| {
            in_order |= line.starts_with("test result: ");
            match line.strip_prefix("test ").and_then(|rest| rest.split_once(' ')) {
                Some((test, "has been running for over 60 seconds")) => slow.insert(test.to_owned()),
                Some((test, _)) => slow.remove(test),
                None => false,
            };
            self.see(&name, line, &log);
        });
        let mut seen = self.seen();
        if !in_order {
            let ran = match slow.is_empty() {
                true => String::new(),
                false => format!(" while it ran {}", Vec::from_iter(slow).join(", ")),
            };
            seen.broken
                .push(format!("{name}: {status}{ran}, see {}", log.display()));
        }
        println!("{name}: {status} after {:.0?}", started.elapsed());
    }

    /// Counts the result of a test, if the line has one.
    fn see(&self, binary: &str, line: &str, log: &Path) {
        let mut seen = self.seen();
        if let Some(skipped) = line.strip_prefix("skipped: ") {
            seen.skipped.insert(skipped.to_owned());
        }
        let Some((test, result)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) else {
            return;
        };
        let mut words = result.split_whitespace();
        let test = test.trim_end_matches(" - should panic");
        match words.next() {
            Some("ok") => seen.passed += 1,
            Some("FAILED") => {
                println!("FAILED: {binary} {test}");
                seen.failed.push(Failure {
                    binary: binary.to_owned(),
                    test: test.to_owned(),
                    log: log.to_owned(),
                });
            }
            Some("ignored,") | Some("ignored") => seen.ignored += 1,
            _ => return,
        }
        let seconds = words
            .next()
            .and_then(|time| time.trim_matches(['<', '>', 's']).parse().ok());
        seen.times
            .extend(seconds.map(|seconds| (seconds, format!("{binary} {test}"))));
        let ended = seen.passed + seen.failed.len();
        if ended.is_multiple_of(100) {
            println!("{ended} tests ended, {} of them failed", seen.failed.len());
        }
    }

    /// With --ci, runs each failed test again, alone. Returns those that fail for good.
    fn failed_again(&self, binaries: &[Binary]) -> Vec<Failure> {
        let failed = std::mem::take(&mut self.seen().failed);
        if failed.is_empty() || !self.options.ci {
            return failed;
        }
        let broker = Broker::start_sized(Size::SHARED);
        let vars = vars(&broker);
        let (flaky, failed) = failed.into_iter().partition(|Failure { binary, test, log }| {
            println!("once more, alone: {binary} {test}");
            let log = log.with_extension(format!("{}.again.log", test.replace("::", "-")));
            let binary = binaries.iter().find(|one| one.name() == *binary).expect("it ran");
            let mut passed = false;
            watch(binary.command(&vars, &["--exact", test]), &log, |line| {
                passed |= line.starts_with("test result: ok. 1 passed")
            });
            passed
        });
        self.seen().flaky = flaky;
        failed
    }

    /// Prints what the run has found, the most important last.
    fn report(&self, failed: &[Failure], took: Duration) -> ExitCode {
        let mut seen = self.seen();
        seen.times.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (seconds, test) in seen.times.iter().take(SLOWEST) {
            println!("{seconds:8.1} s  {test}");
        }
        println!(
            "\n{} passed, {} failed, {} flaky, {} skipped, {} ignored, in {:.0?}; the logs are in {LOGS}",
            seen.passed,
            failed.len(),
            seen.flaky.len(),
            seen.skipped.len(),
            seen.ignored,
            took
        );
        seen.skipped.iter().for_each(|test| println!("skipped: {test}"));
        for (kind, tests) in [("flaky", seen.flaky.as_slice()), ("FAILED", failed)] {
            for Failure { binary, test, log } in tests {
                println!("{kind}: {binary} {test}, see {}", log.display());
            }
        }
        seen.broken.iter().for_each(|binary| println!("FAILED: {binary}"));
        let skipped_too_many = self.options.ci && !seen.skipped.is_empty();
        if skipped_too_many {
            println!("FAILED: no test may be skipped here");
        }
        match failed.is_empty() && seen.broken.is_empty() && !skipped_too_many {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        }
    }
}

/// Runs a command to its end, copies its output to `log`, and shows each line to `see`. Kills it if it stalls.
fn watch(command: Command, log: &Path, see: impl FnMut(&str) + Send) -> ExitStatus {
    let log = Mutex::new(File::create(log).expect("create a log"));
    let see = Mutex::new(see);
    let read = |stream: Box<dyn Read + Send>, progress: mpsc::Sender<()>| {
        for line in BufReader::new(stream).split(b'\n') {
            let line = line.expect("read the output of a test");
            let line = String::from_utf8_lossy(&line);
            writeln!(log.lock().expect("no panic"), "{line}").expect("write the log");
            see.lock().expect("no panic")(&line);
            let _ = progress.send(());
        }
    };
    let mut child = process::spawn_bound(command, libc::SIGKILL).expect("start a test binary");
    let (stdout, stderr) = (
        child.stdout.take().expect("a pipe"),
        child.stderr.take().expect("a pipe"),
    );
    let (progress, progressed) = mpsc::channel();
    std::thread::scope(|scope| {
        let other = progress.clone();
        scope.spawn(|| read(Box::new(stdout), other));
        scope.spawn(|| read(Box::new(stderr), progress));
        loop {
            match progressed.recv_timeout(STALLED) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let list = Command::new("ps")
                        .args(["-ewwo", "pid,ppid,etime,stat,wchan:24,args", "--forest"])
                        .output();
                    let list = list.expect("list the processes").stdout;
                    log.lock().expect("no panic").write_all(&list).expect("write the log");
                    process::kill(&mut child);
                    break;
                }
            }
        }
    });
    child.wait().expect("wait for a test binary")
}

/// A directory in memory for the files of servers: each of them has a thousand files, written and removed within
/// seconds.
struct Tmpfs(PathBuf);

impl Tmpfs {
    /// None if this machine has no tmpfs that programs can be started from, or too little room on it.
    fn make() -> Option<Self> {
        sweep();
        let has_room = is_roomy(TMPFS) && available_memory_bytes() >= FREE_MIN_BYTES;
        let path = Path::new(TMPFS).join(format!("{NAME}{}", std::process::id()));
        (has_room && DirBuilder::new().mode(0o755).create(&path).is_ok()).then_some(Self(path))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the directories that killed runs of this user left.
fn sweep() {
    for entry in fs::read_dir(TMPFS).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_dead = |pid: &str| !Path::new("/proc").join(pid).exists();
        if name.strip_prefix(NAME).is_some_and(is_dead) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn is_roomy(directory: &str) -> bool {
    let Ok(path) = CString::new(directory) else {
        return false;
    };
    // SAFETY: statvfs reads the path and fills the struct, for which zeros are valid.
    let (found, system) = unsafe {
        let mut system: libc::statvfs = std::mem::zeroed();
        (libc::statvfs(path.as_ptr(), &raw mut system), system)
    };
    found == 0 && system.f_flag & libc::ST_NOEXEC == 0 && system.f_bavail * system.f_frsize >= FREE_MIN_BYTES
}

fn available_memory_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<u64> = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    kib.unwrap_or_default() << 10
}
