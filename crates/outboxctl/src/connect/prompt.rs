//! Asks whoever sits at the terminal for a password. What is typed is not shown.

use crate::failure::{Code, Failure};
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, read};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use std::io::{IsTerminal, Write, stderr, stdin};

/// Whether there is somebody to ask.
pub fn possible() -> bool {
    stdin().is_terminal() && stderr().is_terminal()
}

/// The question goes to standard error: standard output may be a file.
pub fn password(question: &str) -> Result<String, Failure> {
    let failed =
        |error: std::io::Error| Failure::new(Code::CannotConnect, format!("the terminal cannot be read: {error}"));
    if !possible() {
        return Err(
            Failure::new(Code::CannotConnect, "there is no terminal to ask for a password")
                .hint("Put it into ~/.pgpass, or into a file that PGPASSFILE names."),
        );
    }
    // Before the question: who types at once would see it.
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

/// The terminal shows nothing of what is typed while this lives.
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
    fn what_is_typed_can_be_mended_and_taken_back() {
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
