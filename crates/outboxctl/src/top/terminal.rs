//! The terminal: taken over for the time of a screen, and given back whatever happens.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use std::io::{self, IsTerminal, Stdout, stdout};
use std::sync::Once;

/// Whether a screen can be shown: a person sits there, at something that moves a cursor.
pub fn is_there() -> bool {
    stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// A terminal in raw mode, on its other screen. Dropping it brings back the first one.
pub struct Screen(pub Terminal<CrosstermBackend<Stdout>>);

impl Screen {
    pub fn enter() -> io::Result<Self> {
        restore_at_a_panic();
        let screen = Self(Terminal::new(CrosstermBackend::new(stdout()))?);
        // From here on each way out drops it.
        enable_raw_mode()?;
        // Not Terminal::clear: it asks the terminal where the cursor is, and fails where no answer comes in time.
        execute!(stdout(), EnterAlternateScreen, Clear(ClearType::All))?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Each step is tried whatever became of the one before; a terminal that is gone needs none.
fn restore() {
    let _ = disable_raw_mode();
    let _ = execute!(stdout(), LeaveAlternateScreen, Show);
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
            "top::terminal::tests::a_panic_on_another_thread_and_on_this_one",
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
