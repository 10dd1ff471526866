//! Asks for a password on the terminal, without showing the typed characters.

use crate::failure::{Code, Failure};
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, read};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use std::io::{IsTerminal, Write, stderr, stdin};

/// Whether there is a terminal to ask on.
pub fn possible() -> bool {
    stdin().is_terminal() && stderr().is_terminal()
}

/// Asks for a password. The question goes to standard error, because standard output may be a file.
pub fn password(question: &str) -> Result<String, Failure> {
    let failed = |error: std::io::Error| {
        Failure::new(
            Code::CannotConnect,
            format!("could not read from the terminal: {error}"),
        )
    };
    if !possible() {
        return Err(Failure::new(Code::CannotConnect, "no terminal to ask for a password")
            .hint("Put it into ~/.pgpass, or into the file that PGPASSFILE names."));
    }
    // Raw mode begins before the question: otherwise characters typed at once would be shown.
    let _raw = Raw::enter().map_err(failed)?;
    eprint!("{question}");
    stderr().flush().map_err(failed)?;
    let mut typed = String::new();
    loop {
        let Event::Key(key) = read().map_err(failed)? else {
            continue;
        };
        match after(&mut typed, key) {
            Typed::More => {}
            Typed::Done => return Ok(typed),
            Typed::Cancelled => return Err(Failure::new(Code::CannotConnect, "no password was given")),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Typed {
    More,
    Done,
    Cancelled,
}

fn after(typed: &mut String, key: KeyEvent) -> Typed {
    if key.kind == KeyEventKind::Release {
        return Typed::More;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c' | 'd') if control => return Typed::Cancelled,
        KeyCode::Char('u') if control => typed.clear(),
        KeyCode::Char('j' | 'm') if control => return Typed::Done,
        KeyCode::Char(c) if !control => typed.push(c),
        KeyCode::Backspace => _ = typed.pop(),
        KeyCode::Enter => return Typed::Done,
        _ => {}
    }
    Typed::More
}

/// Keeps the terminal in raw mode until it is dropped, so that typed characters are not shown.
struct Raw;

impl Raw {
    fn enter() -> std::io::Result<Self> {
        enable_raw_mode()?;
        Ok(Self)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = disable_raw_mode();
        eprintln!();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typed_password_can_be_corrected_and_cancelled() {
        let mut typed = String::new();
        let mut key = |code, modifiers| after(&mut typed, KeyEvent::new(code, modifiers));
        for c in "xy".chars() {
            assert_eq!(key(KeyCode::Char(c), KeyModifiers::NONE), Typed::More);
        }
        key(KeyCode::Char('u'), KeyModifiers::CONTROL);
        for c in "aBz".chars() {
            key(KeyCode::Char(c), KeyModifiers::SHIFT);
        }
        key(KeyCode::Backspace, KeyModifiers::NONE);
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), Typed::Cancelled);
        assert_eq!(key(KeyCode::Enter, KeyModifiers::NONE), Typed::Done);
        assert_eq!(typed, "aB");
    }
}
