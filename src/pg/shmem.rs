//! Structs of atomics in the server's shared memory. The postmaster allocates them at startup, and every process
//! inherits them.

use pgrx::{pg_guard, pg_sys};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// A type that may be in shared memory: only atomics, valid when all bytes are zero, and without a destructor.
///
/// # Safety
/// The type has only atomics, is valid when all bytes are zero, and has no destructor.
pub unsafe trait Shareable: Sync {}

// SAFETY: an atomic; zero is a valid value.
unsafe impl Shareable for std::sync::atomic::AtomicU32 {}

/// A lock in shared memory: one process at a time may change the data that it protects.
#[repr(C)]
pub struct SpinLock(AtomicU32);

impl SpinLock {
    /// Runs `body` under the lock. It must neither raise nor wait: other processes spin until it returns.
    pub fn with<T>(&self, body: impl FnOnce() -> T) -> T {
        let taken = || self.0.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        while taken().is_err() {
            std::thread::yield_now();
        }
        let _released = Release(&self.0);
        body()
    }
}

/// Ends the lock, also if a panic unwinds: the other processes would spin for ever.
struct Release<'a>(&'a AtomicU32);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// A short text in shared memory, at most `BYTES` long. A process that changes it holds a lock.
#[repr(C)]
pub struct ShortText<const BYTES: usize> {
    length: AtomicU32,
    bytes: [AtomicU8; BYTES],
}

impl<const BYTES: usize> ShortText<BYTES> {
    /// Stores the text, truncated at a character boundary to fit.
    pub fn set(&self, text: &str) {
        let text = &text[..text.floor_char_boundary(BYTES)];
        for (shared, byte) in self.bytes.iter().zip(text.bytes()) {
            shared.store(byte, Ordering::Relaxed);
        }
        self.length.store(text.len() as u32, Ordering::Relaxed);
    }

    pub fn get(&self) -> String {
        let length = self.length.load(Ordering::Relaxed) as usize;
        let bytes = self.bytes.iter().take(length);
        String::from_utf8_lossy(&bytes.map(|byte| byte.load(Ordering::Relaxed)).collect::<Vec<u8>>()).into_owned()
    }
}

/// A struct in shared memory. The postmaster sets the pointer before it starts other processes.
pub struct Shared<T: Shareable>(AtomicPtr<T>);

impl<T: Shareable> Shared<T> {
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    /// The struct; None = the library was not preloaded, so there is none.
    pub fn get(&self) -> Option<&T> {
        // SAFETY: set once by the postmaster to memory that lives as long as the server; T is Shareable.
        unsafe { self.0.load(Ordering::Relaxed).as_ref() }
    }

    /// Finds or allocates the struct. Called only in the shared memory startup hook.
    pub fn attach(&self, name: &'static std::ffi::CStr) {
        self.0.store(find_or_allocate(name, 1), Ordering::Relaxed);
    }
}

/// An array in shared memory, with a length that is known when the server starts.
pub struct SharedSlice<T: Shareable>(AtomicPtr<T>, AtomicUsize);

impl<T: Shareable> SharedSlice<T> {
    pub const fn new() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()), AtomicUsize::new(0))
    }

    pub fn get(&self) -> Option<&[T]> {
        let first = self.0.load(Ordering::Relaxed);
        // SAFETY: set once by the postmaster to memory that lives as long as the server. The length was stored before
        // the pointer.
        (!first.is_null()).then(|| unsafe { std::slice::from_raw_parts(first, self.1.load(Ordering::Relaxed)) })
    }

    /// Finds or allocates the array. Called only in the shared memory startup hook.
    pub fn attach(&self, name: &'static std::ffi::CStr, length: usize) {
        let first = find_or_allocate(name, length);
        self.1.store(length, Ordering::Relaxed);
        self.0.store(first, Ordering::Relaxed);
    }
}

fn find_or_allocate<T: Shareable>(name: &'static std::ffi::CStr, length: usize) -> *mut T {
    let bytes = length * size_of::<T>();
    let mut found = false;
    // SAFETY: ShmemInitStruct returns memory of that size, aligned to a cache line; zero is a valid T.
    unsafe {
        let memory = pg_sys::ShmemInitStruct(name.as_ptr(), bytes, &mut found);
        if !found {
            std::ptr::write_bytes(memory.cast::<u8>(), 0, bytes);
        }
        memory.cast()
    }
}

/// True while the postmaster loads shared_preload_libraries.
pub fn preloading() -> bool {
    // SAFETY: a plain flag of the server.
    unsafe { pg_sys::process_shared_preload_libraries_in_progress }
}

static mut NEXT_REQUEST: Option<unsafe extern "C-unwind" fn()> = None;
static mut NEXT_STARTUP: Option<unsafe extern "C-unwind" fn()> = None;
static SIZE: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());
static ATTACH: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// Requests shared memory and registers `attach`. The server calls `bytes` for the size when it knows its limits, and
/// `attach` when the memory is ready. Called once, while preloading.
pub fn request(bytes: fn() -> usize, attach: fn()) {
    SIZE.store(bytes as *mut (), Ordering::Relaxed);
    ATTACH.store(attach as *mut (), Ordering::Relaxed);
    // SAFETY: the postmaster is single-threaded here. The hooks are chained as core requires.
    unsafe {
        NEXT_REQUEST = pg_sys::shmem_request_hook;
        pg_sys::shmem_request_hook = Some(on_request);
        NEXT_STARTUP = pg_sys::shmem_startup_hook;
        pg_sys::shmem_startup_hook = Some(on_startup);
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn on_request() {
    // SAFETY: called by the postmaster. The earlier hook runs first. SIZE holds a fn() -> usize from `request`.
    unsafe {
        if let Some(next) = NEXT_REQUEST {
            next();
        }
        let bytes = std::mem::transmute::<*mut (), fn() -> usize>(SIZE.load(Ordering::Relaxed));
        pg_sys::RequestAddinShmemSpace(bytes());
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn on_startup() {
    // SAFETY: called by the postmaster (again after a crash restart); ATTACH holds a fn() from `request`.
    unsafe {
        if let Some(next) = NEXT_STARTUP {
            next();
        }
        let attach = ATTACH.load(Ordering::Relaxed);
        if !attach.is_null() {
            std::mem::transmute::<*mut (), fn()>(attach)();
        }
    }
}
