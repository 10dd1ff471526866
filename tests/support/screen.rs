//! A program on a pseudo terminal with an emulator, so that a test sees what a person would see.

use crate::wait::patient;
use crate::{LONG, Pty, wait_until};
use std::process::Command;

/// A program on a terminal, with the emulator of its screen.
pub struct Screen {
    pub pty: Pty,
    emulator: vt100::Parser,
    seen: usize,
}

impl Screen {
    pub fn start(command: Command, columns: u16, lines: u16) -> Self {
        Self {
            pty: Pty::start(command, columns, lines),
            emulator: vt100::Parser::new(lines, columns, 0),
            seen: 0,
        }
    }

    pub fn screen(&mut self) -> &vt100::Screen {
        let written = self.pty.written();
        self.emulator.process(&written[self.seen..]);
        self.seen = written.len();
        self.emulator.screen()
    }

    pub fn text(&mut self) -> String {
        self.screen().contents()
    }

    /// Waits until the screen shows all of `words`.
    pub fn wait_for(&mut self, words: &[&str]) -> String {
        self.wait_until(&format!("{words:?}"), |text| {
            words.iter().all(|word| text.contains(word))
        })
    }

    pub fn wait_until(&mut self, what: &str, condition: impl Fn(&str) -> bool) -> String {
        let deadline = std::time::Instant::now() + patient(LONG);
        let mut text = self.text();
        wait_until(&format!("the screen to show {what}"), LONG * 2, || {
            text = self.text();
            let is_late = std::time::Instant::now() >= deadline || self.pty.has_ended();
            assert!(!is_late, "waited in vain for {what} on this screen:\n{text}");
            condition(&text)
        });
        text
    }

    pub fn resize(&mut self, columns: u16, lines: u16) {
        self.screen();
        // vt100 0.16 subtracts with overflow if a character wraps on a screen of one line (grid.rs, col_wrap), or a
        // wide character meets a screen of one column. The program may still write for a larger terminal.
        self.emulator.screen_mut().set_size(lines.max(2), columns.max(2));
        self.pty.resize(columns, lines);
    }

    /// Asserts that the program has ended with `code` and has restored the terminal: main screen, cursor, line editing.
    pub fn assert_restored(&mut self, code: i32) {
        let status = self.pty.wait();
        assert_eq!(status.code(), Some(code), "{status}:\n{}", self.text());
        assert!(self.pty.is_cooked(), "the terminal is raw");
        // The last output of the program may not have arrived yet.
        wait_until("the main screen to return", LONG, || !self.screen().alternate_screen());
        wait_until("the cursor to return", LONG, || !self.screen().hide_cursor());
    }
}
