//! The files of private servers: their directories and their removal. Called by every module that starts a server.
//!
//! ```text
//! WORK/                      OUTBOX_WORK_DIR, or target/private of the workspace
//!   template-…/              data directories that are copied for each cluster (see template.rs)
//!   run-PID/                 of one process; holds `lock`, locked while that process lives
//!     cluster-1/ broker-2/   of one server, removed when the server is dropped
//!     keep                   present when OUTBOX_KEEP=1 left the files of a server for inspection
//! ```
//! A process that was killed cannot clean up, so the next process removes each run-PID whose lock is free.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::process;

/// The logs of servers whose test failed, by run and server.
const FAILED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/failed");

/// The directory of one server.
#[derive(Debug)]
pub struct ServerDir {
    path: PathBuf,
}

impl ServerDir {
    /// Makes a new empty directory. `kind` becomes part of its name.
    pub fn create(kind: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let path = run_dir().join(format!("{kind}-{}", NEXT.fetch_add(1, Ordering::Relaxed)));
        create_open_dir(&path);
        Self { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file for all output of the server.
    pub fn log_file(&self) -> PathBuf {
        self.path.join("log")
    }

    /// Opens the log. The server inherits the descriptor, since it may run as a user that cannot write here.
    pub(crate) fn open_log(&self) -> File {
        let opened = File::options().create(true).append(true).open(self.log_file());
        opened.unwrap_or_else(|error| panic!("open {}: {error}", self.log_file().display()))
    }

    pub fn log(&self) -> String {
        // The last line may end in the middle of a character while the server writes it.
        String::from_utf8_lossy(&fs::read(self.log_file()).unwrap_or_default()).into_owned()
    }

    /// Removes the directory; OUTBOX_KEEP=1 keeps it. If the thread panics, prints the end of the server's log and
    /// copies the log to target/failed.
    pub fn finish(&self) {
        if std::thread::panicking() {
            eprintln!("{}", last_lines(&self.log(), 40));
            let copy = Path::new(FAILED).join(self.path.strip_prefix(work_dir()).unwrap_or(&self.path));
            let copied = fs::create_dir_all(&copy).and_then(|()| fs::copy(self.log_file(), copy.join("log")));
            if copied.is_ok() {
                eprintln!("the whole log is {}/log", copy.display());
            }
        }
        if std::env::var_os("OUTBOX_KEEP").is_some_and(|value| value == "1") {
            let _ = File::create(run_dir().join("keep"));
            eprintln!("the files are kept in {}", self.path.display());
            return;
        }
        // The next process removes what cannot be removed now.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The last `count` lines of `text`.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// The directory that contains the directories of all runs. The user that Postgres runs as can enter it.
pub fn work_dir() -> &'static Path {
    static WORK_DIR: OnceLock<PathBuf> = OnceLock::new();
    WORK_DIR.get_or_init(|| {
        let wanted = match std::env::var_os("OUTBOX_WORK_DIR") {
            Some(path) => PathBuf::from(path),
            None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/private"),
        };
        fs::create_dir_all(&wanted).unwrap_or_else(|error| panic!("create {}: {error}", wanted.display()));
        let wanted = wanted.canonicalize().expect("the path of a directory just created");
        if postgres_can_enter(&wanted) {
            return wanted;
        }
        // Root's clone may be in a home directory of mode 0700.
        let path = std::env::temp_dir().join("outbox-private-root");
        eprintln!(
            "user postgres cannot enter {}: the servers' files are in {}",
            wanted.display(),
            path.display()
        );
        if !path.is_dir() {
            create_open_dir(&path);
        }
        let owner = fs::symlink_metadata(&path).expect("a directory just created");
        assert!(
            owner.is_dir() && owner.uid() == 0,
            "{} belongs to another user: remove it",
            path.display()
        );
        path
    })
}

fn postgres_can_enter(dir: &Path) -> bool {
    let mut command = Command::new("true");
    process::run_as(&mut command, process::postgres_account());
    // The change of directory happens after the change of user, and the spawn fails if it fails.
    command.current_dir(dir).status().is_ok_and(|status| status.success())
}

/// Creates one directory that other users may enter, with any umask.
pub(crate) fn create_open_dir(path: &Path) {
    fs::create_dir(path)
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o755)))
        .unwrap_or_else(|error| panic!("create {}: {error}", path.display()));
}

/// Takes the lock that guards changes in the work directory itself. Dropping the file releases the lock.
pub(crate) fn lock_work_dir() -> File {
    let lock = open_lock(&work_dir().join("lock"));
    lock.lock().expect("lock the work directory");
    lock
}

fn open_lock(path: &Path) -> File {
    let opened = File::options().create(true).truncate(false).write(true).open(path);
    opened.unwrap_or_else(|error| panic!("open {}: {error}", path.display()))
}

struct RunDir {
    path: PathBuf,
    _alive: File,
}

static RUN_DIR: OnceLock<RunDir> = OnceLock::new();

/// The directory of this process.
pub(crate) fn run_dir() -> &'static Path {
    let run_dir = RUN_DIR.get_or_init(|| {
        let _lock = lock_work_dir();
        sweep();
        let path = work_dir().join(format!("run-{}", std::process::id()));
        // A process with the same pid left it, and the sweep kept it: the files of a failed test.
        if path.exists() {
            fs::remove_dir_all(&path).expect("remove the files of an earlier run");
        }
        create_open_dir(&path);
        let alive = open_lock(&path.join("lock"));
        alive.lock().expect("lock a file just created");
        // SAFETY: the handler is a plain function that stays valid, takes nothing and does not unwind.
        unsafe { libc::atexit(remove_run_dir) };
        RunDir { path, _alive: alive }
    });
    &run_dir.path
}

/// Rust does not drop statics, so an exit handler of libc removes the directory of this process.
extern "C" fn remove_run_dir() {
    if let Some(RunDir { path, .. }) = RUN_DIR.get()
        && !path.join("keep").exists()
    {
        let _ = fs::remove_dir_all(path);
    }
}

/// Removes the directories that killed processes left. The caller holds the lock of the work directory, so no run
/// directory is half created.
fn sweep() {
    for entry in fs::read_dir(work_dir()).expect("read the work directory").flatten() {
        let path = entry.path();
        let is_run = entry.file_name().to_string_lossy().starts_with("run-");
        if is_run && !path.join("keep").exists() && is_dead(&path) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

fn is_dead(run: &Path) -> bool {
    match File::options().write(true).open(run.join("lock")) {
        Ok(lock) => lock.try_lock().is_ok(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}
