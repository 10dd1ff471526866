//! Registers, starts and ends background workers, and connects the current one to a database. The launcher and the
//! workers call it on their main threads.

use super::major;
use pgrx::pg_sys;

/// How to start a worker. `argument` is passed to its main function.
pub struct Spec<'a> {
    pub name: &'a str,
    pub kind: &'a str,
    pub function: &'a str,
    pub argument: u64,
}

/// A dynamic worker that this process started.
pub struct Handle(*mut pg_sys::BackgroundWorkerHandle);

fn describe(spec: &Spec, restart_s: i32) -> pg_sys::BackgroundWorker {
    let mut worker = pg_sys::BackgroundWorker {
        bgw_flags: (pg_sys::BGWORKER_SHMEM_ACCESS | pg_sys::BGWORKER_BACKEND_DATABASE_CONNECTION) as i32,
        // After recovery: on a standby no worker starts until it is promoted.
        bgw_start_time: pg_sys::BgWorkerStartTime::BgWorkerStart_RecoveryFinished,
        bgw_restart_time: restart_s,
        bgw_main_arg: pg_sys::Datum::from(spec.argument),
        ..Default::default()
    };
    copy(spec.name, &mut worker.bgw_name);
    copy(spec.kind, &mut worker.bgw_type);
    copy("outbox", &mut worker.bgw_library_name);
    copy(spec.function, &mut worker.bgw_function_name);
    worker
}

/// Whether pg_upgrade runs this server.
pub fn in_binary_upgrade() -> bool {
    // SAFETY: a plain flag of the server, set by its command line.
    unsafe { pg_sys::IsBinaryUpgrade }
}

/// Registers a worker that the server starts, and restarts `restart_s` seconds after a failure. Only while preloading.
pub fn register_static(spec: &Spec, restart_s: i32) {
    let mut worker = describe(spec, restart_s);
    // SAFETY: the struct is copied.
    unsafe { pg_sys::RegisterBackgroundWorker(&mut worker) }
}

/// Starts a worker that the server does not restart. The server sets this process's latch when the worker starts or
/// ends. None: no worker slot is free (`max_worker_processes`).
pub fn start(spec: &Spec) -> Option<Handle> {
    let mut worker = describe(spec, pg_sys::BGW_NEVER_RESTART);
    let mut handle = std::ptr::null_mut();
    // SAFETY: the struct is copied. The handle is allocated in TopMemoryContext, so it lives as long as the process.
    unsafe {
        worker.bgw_notify_pid = pg_sys::MyProcPid;
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        let started = pg_sys::RegisterDynamicBackgroundWorker(&mut worker, &mut handle);
        pg_sys::MemoryContextSwitchTo(before);
        // Not then_some: if no slot is free, that would build and drop a handle of a null pointer.
        started.then(|| Handle(handle))
    }
}

impl Handle {
    /// False once the worker has ended.
    pub fn is_alive(&self) -> bool {
        let mut pid = 0;
        // SAFETY: the handle came from RegisterDynamicBackgroundWorker.
        let status = unsafe { pg_sys::GetBackgroundWorkerPid(self.0, &mut pid) };
        status != pg_sys::BgwHandleStatus::BGWH_STOPPED
    }

    /// Asks the worker to end.
    pub fn terminate(&self) {
        // SAFETY: the handle came from RegisterDynamicBackgroundWorker.
        unsafe { pg_sys::TerminateBackgroundWorker(self.0) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The server must not be called while an error unwinds: a second error would abort it.
        if !std::thread::panicking() {
            // SAFETY: RegisterDynamicBackgroundWorker allocated the handle with palloc, and it is not used any more.
            unsafe { pg_sys::pfree(self.0.cast()) }
        }
    }
}

/// Connects this worker to the shared catalogs only, without a database.
pub fn connect_to_shared_catalogs() {
    // SAFETY: the first thing a worker's main function does after `signals::install`.
    unsafe { pg_sys::BackgroundWorkerInitializeConnection(std::ptr::null(), std::ptr::null(), 0) }
}

/// Connects this worker to a database as a role. FATAL if either does not exist.
pub fn connect(database: pg_sys::Oid, role: pg_sys::Oid) {
    let flags = major::CONNECT_WITHOUT_LOGIN;
    // SAFETY: the first thing a worker's main function does after `signals::install`.
    unsafe { pg_sys::BackgroundWorkerInitializeConnectionByOid(database, role, flags) }
}

pub fn my_pid() -> i32 {
    // SAFETY: a plain static of this process.
    unsafe { pg_sys::MyProcPid }
}

/// Runs `callback` when this process ends, while it may still access shared memory. If registered before `connect`, it
/// runs after this process has left the database.
pub fn on_exit(callback: unsafe extern "C-unwind" fn(i32, pg_sys::Datum)) {
    // SAFETY: the callback is a static function.
    unsafe { pg_sys::on_shmem_exit(Some(callback), pg_sys::Datum::from(0)) }
}

/// Copies `text` into a fixed C buffer, truncated to fit.
fn copy(text: &str, buffer: &mut [std::ffi::c_char]) {
    let text = super::text::to_c_string(text);
    let bytes = text.as_bytes();
    let n = bytes.len().min(buffer.len() - 1);
    for (to, from) in buffer.iter_mut().zip(&bytes[..n]) {
        *to = *from as std::ffi::c_char;
    }
    buffer[n] = 0;
}
