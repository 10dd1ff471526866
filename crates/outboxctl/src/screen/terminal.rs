//! The terminal: taken over for the time of a screen, and given back whatever happens. What is written goes past the standard
//! output of Rust, for a terminal that nobody reads would hold its lock, and then nobody could give the terminal back.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{Event, KeyEvent, KeyEventKind, read};
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

/// Whether a screen can be shown: a person sits there, at something that moves a cursor. To a program in the background the
/// terminal does not belong: to change its settings would stop the program.
pub fn is_there() -> bool {
    let is_ours = || tcgetpgrp(stdout()).is_ok_and(|foreground| foreground == getpgrp());
    stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb") && is_ours()
}

/// What comes from a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Key(KeyEvent),
    /// It has another size; the next frame finds out which.
    Resized,
}

/// Waits for the next input. An error: the terminal is gone.
pub fn input() -> io::Result<Input> {
    loop {
        match read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => return Ok(Input::Key(key)),
            Event::Resize(..) => return Ok(Input::Resized),
            _ => {}
        }
    }
}

/// A terminal in raw mode, on its other screen. Dropping it brings back the first one.
pub struct Screen(pub Terminal<CrosstermBackend<BufWriter<Tty>>>);

impl Screen {
    /// Once only, and not after `restore`.
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
        // From here on each way out drops it.
        let mut screen = Self(terminal);
        entered?;
        // Not Terminal::clear: it asks the terminal where the cursor is, and fails where no answer comes in time.
        queue!(screen.0.backend_mut(), EnterAlternateScreen, Clear(ClearType::All))?;
        screen.0.backend_mut().flush()?;
        Ok(screen)
    }

    /// The next frame is drawn whole. For a terminal whose size has changed, even if it is what it was: what it has lost
    /// while it was smaller is not known.
    pub fn draw_anew(&mut self) -> io::Result<()> {
        let size = self.0.size()?;
        self.0.resize(Rect::from((Position::ORIGIN, size)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back, if it was taken. From then on no screen can write to it. Called by any thread, also while another
/// one draws. Waits for nobody: each step is tried whatever became of the one before, and a terminal that is gone needs none.
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
        // Nobody reads: what is there of a frame makes room for the last words.
        let _ = tcflush(&tty, QueueSelector::OFlush);
        let _ = tty.write_all(&last);
    }
}

/// A panic prints its message to the terminal, on whichever thread: it must be the one that the person keeps.
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

// ---- how it is written to -------------------------------------------------------------------------------------------

/// How the terminal is. Changed under `writer`, by whoever takes it or gives it back.
static STATE: AtomicU8 = AtomicU8::new(UNTOUCHED);
const UNTOUCHED: u8 = 0;
const TAKEN: u8 = 1;
const GIVEN_BACK: u8 = 2;

/// Room for a frame, so that it goes out at once.
const FRAME_BYTES: usize = 64 * 1024;

/// How soon a writer that waits for room sees that the terminal was given back.
const ROOM: Duration = Duration::from_millis(50);

/// Held for a write, which does not wait: whoever has given the terminal back knows that nothing comes after it.
fn writer() -> MutexGuard<'static, ()> {
    static WRITER: Mutex<()> = Mutex::new(());
    WRITER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The terminal once more, by a description of our own: that it does not wait is not the affair of the shell, which shares
/// the one of the standard output.
fn open_tty() -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(open("/dev/tty", flags, Mode::empty())?.into())
}

/// For a moment at most: it may have been given back meanwhile.
fn wait_for_room(tty: &File) {
    let limit = Timespec::try_from(ROOM).ok();
    let _ = poll(&mut [PollFd::new(tty, PollFlags::OUT)], limit.as_ref());
}

/// Writes as fast as the terminal takes it, for however long that is. When it was given back, what is left goes nowhere: an
/// error would only be printed, and by then it is known.
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
    use super::Screen;
    use std::process::Command;
    use support::Pty;

    #[test]
    #[ignore = "it panics: the test below runs it on a terminal"]
    fn a_panic_on_another_thread_and_on_this_one() {
        let _screen = Screen::enter().expect("a terminal");
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
        support::wait_until("the last words", std::time::Duration::from_secs(30), || {
            let written = String::from_utf8_lossy(&pty.written()).into_owned();
            let first = |what: &str| written.find(what);
            let (entered, left) = (first("\u{1b}[?1049h"), first("\u{1b}[?1049l"));
            first("the last").is_some() && entered.is_some() && entered < left && left < first("the first")
        });
    }
}
