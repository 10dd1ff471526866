//! Standard output, for users and scripts: lines and lists, with colours on a terminal; and lines on standard error. No
//! text of a database or a broker reaches the terminal as a control sequence.

use crate::failure::{Code, Failure};
use crate::screen::list::{self, ListRow};
use crate::screen::text::harmless;
use crate::screen::theme;
use ratatui::crossterm::terminal::size;
use ratatui::prelude::IntoCrossterm;
use ratatui::style::Style;
use ratatui::text::Line;
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};

/// Writes to standard output. The program exits with 0 when its reader closes the pipe, as `head` does: that is no
/// failure.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        written => {
            written.map_err(|error| Failure::new(Code::Refused, format!("could not write to standard output: {error}")))
        }
    }
}

/// Writes a line about the work to standard error, and ignores errors: a closed pipe must not stop the work.
pub fn log(text: &str) {
    _ = writeln!(stderr().lock(), "{}", log_line(text));
}

fn log_line(text: &str) -> String {
    format!("outboxctl: {}", harmless(text))
}

/// Writes lines, with their styles if standard output is a terminal that takes colours.
pub fn print_lines(lines: impl IntoIterator<Item = Line<'static>>) -> Result<(), Failure> {
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    print(&as_text(
        lines,
        stdout().is_terminal() && theme::has_colour() && !is_dumb,
    ))
}

fn as_text(lines: impl IntoIterator<Item = Line<'static>>, colours: bool) -> String {
    let mut text = String::new();
    for line in lines {
        for span in &line.spans {
            let (style, content) = (line.style.patch(span.style), harmless(&span.content));
            match colours && style != Style::new() && !content.is_empty() {
                true => text.push_str(&style.into_crossterm().apply(content).to_string()),
                false => text.push_str(&content),
            }
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }
    text
}

/// Prints rows under the titles of their columns. On a terminal long texts are cut, so that each row is one line, and
/// columns without room are left out; the output for a script has all.
pub fn print_rows(rows: &[ListRow]) -> Result<(), Failure> {
    let (mut lines, same) = list::lines(rows, room(), 2);
    lines.iter_mut().take(1).for_each(|titles| titles.style = theme::STRONG);
    lines.extend(list::each(&same));
    print_lines(lines)
}

/// The width that a line may have.
pub fn room() -> usize {
    let columns = stdout().is_terminal().then(columns).flatten();
    columns.map_or(usize::MAX / 2, usize::from)
}

/// The columns of the terminal.
pub fn columns() -> Option<u16> {
    let from_environment = || std::env::var("COLUMNS").ok()?.parse().ok();
    from_environment().or_else(|| Some(size().ok()?.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_surround_the_text_and_no_text_controls_the_terminal() {
        let lines = [
            Line::styled("", theme::BAD),
            Line::styled("down", theme::BAD),
            Line::raw("\x1b[2J  "),
        ];
        let text = as_text(lines.clone(), true);
        assert!(
            text.starts_with('\n') && text.contains("mdown\x1b[") && text.ends_with("\n␛[2J\n"),
            "{text:?}"
        );
        assert_eq!(as_text(lines, false), "\ndown\n␛[2J\n");
        assert_eq!(
            log_line("refused: \x1b]52;c;eA==\x07\nforged"),
            "outboxctl: refused: ␛]52;c;eA==␇ forged"
        );
    }
}
