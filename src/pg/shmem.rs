//! Structs of atomics in the server's shared memory. The postmaster allocates them at startup, and every process
//! inherits them.

use pgrx::{pg_guard, pg_sys};
use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};

/// A type that may be in shared memory.
///
/// # Safety
/// The type has only atomics, is valid when all bytes are zero, and has no destructor.
pub unsafe trait Shareable: Sync + Sized {
    /// Makes all bytes zero: the state in which an entry begins. The caller is the only process that uses the entry.
    fn clear(&self) {
        const { assert!(align_of::<Self>() >= align_of::<AtomicU32>() && size_of::<Self>().is_multiple_of(4)) };
        // SAFETY: the words cover the value, which consists of atomics. Nothing reads its padding.
        let words =
            unsafe { std::slice::from_raw_parts((&raw const *self).cast::<AtomicU32>(), size_of::<Self>() / 4) };
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

// SAFETY: an atomic; zero is a valid value.
unsafe impl Shareable for AtomicU32 {}

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

/// An area of shared memory: a static that the postmaster sets to its memory before it starts other processes.
pub trait Area: Sync {
    /// Its size. Valid once the server has computed its limits.
    fn bytes(&self) -> usize;
    /// Finds or allocates its memory. Called only in the shared memory startup hook.
    fn attach(&self);
}

/// A struct in shared memory.
pub struct SharedStruct<T> {
    name: &'static CStr,
    memory: AtomicPtr<T>,
}

impl<T: Shareable> SharedStruct<T> {
    pub const fn new(name: &'static CStr) -> Self {
        let memory = AtomicPtr::new(std::ptr::null_mut());
        Self { name, memory }
    }

    /// The struct; None = the library was not preloaded, so there is none.
    pub fn get(&self) -> Option<&T> {
        // SAFETY: set once by the postmaster to memory that lives as long as the server; T is Shareable.
        unsafe { self.memory.load(Ordering::Relaxed).as_ref() }
    }
}

impl<T: Shareable> Area for SharedStruct<T> {
    fn bytes(&self) -> usize {
        size_of::<T>()
    }

    fn attach(&self) {
        self.memory
            .store(find_or_allocate(self.name, self.bytes()), Ordering::Relaxed);
    }
}

/// An array in shared memory. The server computes its length when it starts.
pub struct SharedSlice<T> {
    length: fn() -> usize,
    first: SharedStruct<T>,
}

impl<T: Shareable> SharedSlice<T> {
    pub const fn new(name: &'static CStr, length: fn() -> usize) -> Self {
        let first = SharedStruct::new(name);
        Self { length, first }
    }

    /// The array; empty if the library was not preloaded.
    pub fn get(&self) -> &[T] {
        let first = self.first.get();
        // SAFETY: the memory has this length, which does not change while the server runs.
        first.map_or(&[], |first| unsafe {
            std::slice::from_raw_parts(first, (self.length)())
        })
    }
}

impl<T: Shareable> Area for SharedSlice<T> {
    fn bytes(&self) -> usize {
        (self.length)() * size_of::<T>()
    }

    fn attach(&self) {
        let memory = find_or_allocate(self.first.name, self.bytes());
        self.first.memory.store(memory, Ordering::Relaxed);
    }
}

fn find_or_allocate<T: Shareable>(name: &'static CStr, bytes: usize) -> *mut T {
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
static AREAS: OnceLock<&'static [&'static dyn Area]> = OnceLock::new();

fn areas() -> &'static [&'static dyn Area] {
    AREAS.get().copied().unwrap_or_default()
}

/// Requests shared memory for these areas. Called once, while preloading.
pub fn request(areas: &'static [&'static dyn Area]) {
    _ = AREAS.set(areas);
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
    // SAFETY: called by the postmaster. The earlier hook runs first.
    unsafe {
        if let Some(next) = NEXT_REQUEST {
            next();
        }
        pg_sys::RequestAddinShmemSpace(areas().iter().map(|area| area.bytes()).sum());
    }
}

#[pg_guard]
unsafe extern "C-unwind" fn on_startup() {
    // SAFETY: called by the postmaster, also after a crash restart.
    unsafe {
        if let Some(next) = NEXT_STARTUP {
            next();
        }
    }
    areas().iter().for_each(|area| area.attach());
}
