//! How does a program behave on a terminal? A pseudo terminal with the program on its other side: keys go in, what it
//! writes is collected. What that looks like, an emulator in the test tells.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::process;

const EXIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A program on a terminal of its own. Dropping it kills the program.
pub struct Pty {
    master: File,
    /// Held, so that settings of the terminal can be asked for when the program has ended.
    slave: OwnedFd,
    child: Child,
    written: Arc<Mutex<Vec<u8>>>,
    reading: Arc<(Mutex<Reading>, Condvar)>,
}

/// What becomes of what the program writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    Goes,
    /// After the piece that is being waited for.
    IsToRest,
    Rests,
}

impl Pty {
    /// Starts `command` with a terminal of that size as its input, output and controlling terminal.
    pub fn start(mut command: Command, columns: u16, lines: u16) -> Self {
        let size = window_size(columns, lines);
        let (mut master, mut slave) = (-1, -1);
        // SAFETY: both descriptors and the size are valid for the call; a name and settings are not asked for.
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
        // SAFETY: openpty has just opened them, and nobody else owns them.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        for fd in [master.as_raw_fd(), slave.as_raw_fd()] {
            // SAFETY: the descriptor is open; a program that inherited it would keep the terminal alive.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
        let side = || slave.try_clone().expect("duplicate a descriptor");
        command.stdin(side()).stdout(side()).stderr(side());
        // SAFETY: between fork and exec only system calls that are async-signal-safe are made, and nothing is allocated.
        unsafe {
            command.pre_exec(|| {
                // The thread of the test outlives the program, but for a test that is killed: then it is to go as well.
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
            // It ends with an error when nobody has the other side open.
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

    /// All that the program has written so far.
    pub fn written(&self) -> Vec<u8> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Types.
    pub fn send(&self, keys: &str) {
        (&self.master).write_all(keys.as_bytes()).expect("type");
    }

    /// Changes the size of the terminal, which signals the program.
    pub fn resize(&self, columns: u16, lines: u16) {
        let size = window_size(columns, lines);
        // SAFETY: the descriptor is open, and the size is valid for the call.
        let set = unsafe { libc::ioctl(self.master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        assert_eq!(set, 0, "TIOCSWINSZ: {}", std::io::Error::last_os_error());
    }

    /// Whether the terminal echoes and edits lines, as a shell leaves it, or is raw.
    pub fn is_cooked(&self) -> bool {
        let mut settings = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: tcgetattr fills the settings, which are read only if it did.
        let settings = unsafe {
            let asked = libc::tcgetattr(self.master.as_raw_fd(), settings.as_mut_ptr());
            assert_eq!(asked, 0, "tcgetattr: {}", std::io::Error::last_os_error());
            settings.assume_init()
        };
        let wanted = libc::ICANON | libc::ECHO | libc::ISIG;
        settings.c_lflag & wanted == wanted
    }

    /// Whether what the program writes is read, but for a last piece; else the terminal is as a window that hangs.
    pub fn read(&self, goes: bool) {
        *state_of(&self.reading) = if goes { Reading::Goes } else { Reading::IsToRest };
        self.reading.1.notify_all();
    }

    /// Whether there is no room for more, and will be none until somebody reads: who writes would wait for that.
    pub fn is_full(&self) -> bool {
        if *state_of(&self.reading) != Reading::Rests {
            return false;
        }
        let mut asked = libc::pollfd {
            fd: self.slave.as_raw_fd(),
            events: libc::POLLOUT,
            revents: 0,
        };
        // SAFETY: one descriptor is asked about, which is open.
        let ready = unsafe { libc::poll(&raw mut asked, 1, 0) };
        assert!(ready >= 0, "poll: {}", std::io::Error::last_os_error());
        ready == 0
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait for a child of ours").is_some()
    }

    /// Waits until the program has ended by itself.
    pub fn wait(&mut self) -> ExitStatus {
        process::reap(&mut self.child, EXIT_TIMEOUT).expect("the program to end")
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

/// On the thread that reads: waits while nothing is to be read.
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
