//! A program on a pseudo terminal: the test sends keys and reads what the program writes. A terminal emulator in the
//! test interprets that output.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::{LONG, process};

/// A program on a new pseudo terminal. Dropping it kills the program.
pub struct Pty {
    master: File,
    /// Kept open, so that the test can read the settings of the terminal after the program has ended.
    slave: OwnedFd,
    child: Child,
    written: Arc<Mutex<Vec<u8>>>,
    reading: Arc<(Mutex<Reading>, Condvar)>,
}

/// The state of the thread that reads the terminal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    Goes,
    /// A pause was requested: the thread pauses after the read that it waits for.
    IsToRest,
    Rests,
}

impl Pty {
    /// Starts `command` with a terminal of the given size as its input, output and controlling terminal.
    pub fn start(mut command: Command, columns: u16, lines: u16) -> Self {
        let size = window_size(columns, lines);
        let (mut master, mut slave) = (-1, -1);
        // SAFETY: both descriptors and the size are valid for the call; the name and the settings may be null.
        let opened = unsafe {
            libc::openpty(
                &raw mut master,
                &raw mut slave,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                &raw const size,
            )
        };
        assert_eq!(opened, 0, "openpty: {}", std::io::Error::last_os_error());
        // SAFETY: openpty has just opened the descriptors, and no other owner exists.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        for fd in [master.as_raw_fd(), slave.as_raw_fd()] {
            // SAFETY: the descriptor is open. A program that inherited the descriptor would keep the terminal alive.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        let side = || slave.try_clone().expect("duplicate a descriptor");
        command.stdin(side()).stdout(side()).stderr(side());
        // SAFETY: between fork and exec the closure makes only async-signal-safe system calls and allocates nothing.
        unsafe {
            command.pre_exec(|| {
                // The thread of the test outlives the program, except if the test is killed: then the program must end
                // too.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            })
        };
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, sink) = (master.try_clone().expect("duplicate a descriptor"), written.clone());
        let reading = Arc::new((Mutex::new(Reading::Goes), Condvar::new()));
        let own_reading = Arc::clone(&reading);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // The loop ends with an error when no process has the other side open.
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                rest(&own_reading);
                let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                sink.extend_from_slice(&buffer[..count]);
            }
        });
        Self {
            master,
            slave,
            child,
            written,
            reading,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All bytes that the program has written so far.
    pub fn written(&self) -> Vec<u8> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Types `keys`.
    pub fn send(&self, keys: &str) {
        (&self.master).write_all(keys.as_bytes()).expect("type");
    }

    /// Changes the size of the terminal; the kernel signals the program.
    pub fn resize(&self, columns: u16, lines: u16) {
        let size = window_size(columns, lines);
        // SAFETY: the descriptor is open, and the size is valid for the call.
        let set = unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        assert_eq!(set, 0, "TIOCSWINSZ: {}", std::io::Error::last_os_error());
    }

    /// Whether the terminal echoes and edits lines, as a shell leaves it, or is raw.
    pub fn is_cooked(&self) -> bool {
        let mut settings = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: tcgetattr fills the settings, and they are read only if it succeeded.
        let settings = unsafe {
            let result = libc::tcgetattr(self.master.as_raw_fd(), settings.as_mut_ptr());
            assert_eq!(result, 0, "tcgetattr: {}", std::io::Error::last_os_error());
            settings.assume_init()
        };
        let cooked = libc::ICANON | libc::ECHO | libc::ISIG;
        settings.c_lflag & cooked == cooked
    }

    /// Switches reading on or off. With reading off, one more read may happen; then the terminal behaves like a window
    /// that hangs.
    pub fn read(&self, goes: bool) {
        *state_of(&self.reading) = if goes { Reading::Goes } else { Reading::IsToRest };
        self.reading.1.notify_all();
    }

    /// Whether the terminal has no room for more output and reading is off: a program that writes would block.
    pub fn is_full(&self) -> bool {
        if *state_of(&self.reading) != Reading::Rests {
            return false;
        }
        let mut descriptor = libc::pollfd {
            fd: self.slave.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: the pointer is to one descriptor, which is open.
        let ready = unsafe { libc::poll(&raw mut descriptor, 1, 0) };
        assert!(ready >= 0, "poll: {}", std::io::Error::last_os_error());
        ready == 0
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait for a child process").is_some()
    }

    /// Waits until the program has ended by itself.
    pub fn wait(&mut self) -> ExitStatus {
        process::reap(&mut self.child, LONG).expect("the program to end")
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        process::kill(&mut self.child);
    }
}

fn state_of(reading: &(Mutex<Reading>, Condvar)) -> MutexGuard<'_, Reading> {
    reading.0.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called by the reading thread: waits while reading is off.
fn rest(reading: &(Mutex<Reading>, Condvar)) {
    let mut state = state_of(reading);
    while *state != Reading::Goes {
        *state = Reading::Rests;
        state = reading.1.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

fn window_size(columns: u16, lines: u16) -> libc::winsize {
    libc::winsize {
        ws_row: lines,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}
