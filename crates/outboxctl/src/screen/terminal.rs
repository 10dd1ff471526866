//! Takes over the terminal while a screen is shown, and gives it back in every case. Output bypasses the standard
//! output of Rust: a stalled terminal would hold its lock, and then no thread could give the terminal back.

use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::queue;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::layout::{Position, Rect};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::getpgrp;
use rustix::termios::{QueueSelector, tcflush, tcgetpgrp};
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write, stdout};
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// Whether a screen can be shown: there is a user, and a terminal that moves a cursor. A program in the background
/// does not own the terminal: changing its settings would stop the program.
pub fn is_there() -> bool {
    let is_ours = || tcgetpgrp(stdout()).is_ok_and(|foreground| foreground == getpgrp());
    stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb") && is_ours()
}

/// A terminal in raw mode, on its alternate screen. Dropping it restores the first screen.
pub struct RawTerminal(pub Terminal<CrosstermBackend<BufWriter<Tty>>>);

impl RawTerminal {
    /// Only once, and not after `restore`.
    pub fn enter() -> io::Result<Self> {
        restore_at_a_panic();
        let tty = BufWriter::with_capacity(FRAME_BYTES, Tty(open_tty()?));
        let terminal = Terminal::new(CrosstermBackend::new(tty))?;
        let writer = writer();
        if STATE.compare_exchange(UNTOUCHED, TAKEN, SeqCst, SeqCst).is_err() {
            return Err(io::Error::other("it was given back already"));
        }
        let entered = enable_raw_mode();
        drop(writer);
        // From here on every exit path drops it.
        let mut screen = Self(terminal);
        entered?;
        // Not Terminal::clear: it queries the position of the cursor, and fails if no answer comes in time.
        queue!(screen.0.backend_mut(), EnterAlternateScreen, Clear(ClearType::All))?;
        screen.0.backend_mut().flush()?;
        Ok(screen)
    }

    /// Gives a text to the clipboard of the terminal, also over ssh (OSC 52). A terminal that refuses does not tell.
    pub fn copy(&mut self, text: &str) -> io::Result<()> {
        write!(self.0.backend_mut(), "\u{1b}]52;c;{}\u{1b}\\", BASE64.encode(text))?;
        self.0.backend_mut().flush()
    }

    /// Draws the next frame completely. Needed after a change of the size, even back to the same one: what the terminal
    /// lost while it was smaller is not known.
    pub fn redraw(&mut self) -> io::Result<()> {
        let size = self.0.size()?;
        self.0.resize(Rect::from((Position::ORIGIN, size)))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back, if it was taken. From then on no screen can write to it. Any thread may call it, also while
/// another one draws. It waits for nothing: each step is tried whatever the result of the one before, and a terminal
/// that is gone needs none.
pub fn restore() {
    let _writer = writer();
    if STATE.swap(GIVEN_BACK, SeqCst) != TAKEN {
        return;
    }
    let _ = disable_raw_mode();
    let mut last = Vec::new();
    let _ = queue!(last, LeaveAlternateScreen, Show);
    if let Ok(mut tty) = open_tty()
        && tty.write_all(&last).is_err()
    {
        // The terminal is not read: the buffered part of a frame makes room for the last output.
        let _ = tcflush(&tty, QueueSelector::OFlush);
        let _ = tty.write_all(&last);
    }
}

/// A panic on any thread prints its message to the terminal: it must be the screen that the user keeps.
fn restore_at_a_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            print(info);
        }));
    });
}

// ---- writing to the terminal
// ------------------------------------------------------------------------------------------

/// The state of the terminal. Changed under `writer`, by the thread that takes it or gives it back.
static STATE: AtomicU8 = AtomicU8::new(UNTOUCHED);
const UNTOUCHED: u8 = 0;
const TAKEN: u8 = 1;
const GIVEN_BACK: u8 = 2;

/// The size of the buffer of a frame, so that it is written in one piece.
const FRAME_BYTES: usize = 64 * 1024;

/// How soon a waiting writer notices that the terminal was given back.
const ROOM: Duration = Duration::from_millis(50);

/// Held for a write, which does not wait: after a thread has given the terminal back no further output follows.
fn writer() -> MutexGuard<'static, ()> {
    static WRITER: Mutex<()> = Mutex::new(());
    WRITER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The terminal again, by a separate file description: its non-blocking mode must not affect the shell, which shares
/// the one of the standard output.
fn open_tty() -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(open("/dev/tty", flags, Mode::empty())?.into())
}

/// Held for a moment only: the terminal may have been given back by then.
fn wait_for_room(tty: &File) {
    let limit = Timespec::try_from(ROOM).ok();
    let _ = poll(&mut [PollFd::new(tty, PollFlags::OUT)], limit.as_ref());
}

/// Writes as fast as the terminal accepts, without a time limit. After the terminal was given back the rest is dropped:
/// an error would only be printed, and by then it is known.
pub struct Tty(File);

impl Write for Tty {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            {
                let _writer = writer();
                if STATE.load(SeqCst) == GIVEN_BACK {
                    return Ok(bytes.len());
                }
                match self.0.write(bytes) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    written => return written,
                }
            }
            wait_for_room(&self.0);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::RawTerminal;
    use std::process::Command;
    use support::Pty;

    #[test]
    #[ignore = "it panics: the test below runs it on a terminal"]
    fn a_panic_on_another_thread_and_on_this_one() {
        let _screen = RawTerminal::enter().expect("a terminal");
        let other = std::thread::spawn(|| panic!("the first"));
        assert!(other.join().is_err());
        panic!("the last");
    }

    #[test]
    fn a_panic_gives_the_terminal_back_before_it_says_why() {
        let mut command = Command::new(std::env::current_exe().expect("the path of this test"));
        command.args([
            "--exact",
            "screen::terminal::tests::a_panic_on_another_thread_and_on_this_one",
        ]);
        command.args(["--ignored", "--nocapture"]);
        let mut pty = Pty::start(command, 80, 24);
        assert!(!pty.wait().success());
        assert!(pty.is_cooked(), "the terminal is raw");
        support::wait_until("the last words", support::LONG, || {
            let written = String::from_utf8_lossy(&pty.written()).into_owned();
            let first = |what: &str| written.find(what);
            let (entered, left) = (first("\u{1b}[?1049h"), first("\u{1b}[?1049l"));
            first("the last").is_some() && entered.is_some() && entered < left && left < first("the first")
        });
    }
}
