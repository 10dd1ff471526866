//! Asks for a password on the terminal, without showing the typed characters.

use crate::failure::{Code, Failure};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use std::io::{self, IsTerminal, Write, stderr, stdin};

/// Whether there is a terminal to ask on.
pub fn possible() -> bool {
    stdin().is_terminal() && stderr().is_terminal()
}

/// Asks for a password. The question goes to standard error, because standard output may be a file.
pub fn password(question: &str) -> Result<String, Failure> {
    let refused = |message: String| Failure::new(Code::CannotConnect, message);
    if !possible() {
        return Err(refused("no terminal to ask for a password".into())
            .hint("Put it into ~/.pgpass, or into the file that PGPASSFILE names."));
    }
    let typed = read_hidden(question);
    let typed = typed.map_err(|error| refused(format!("could not read from the terminal: {error}")))?;
    // Ctrl-C and Ctrl-D end the line without a line end.
    let password = typed.strip_suffix('\n').map(str::to_owned);
    password.ok_or_else(|| refused("no password was given".into()))
}

fn read_hidden(question: &str) -> io::Result<String> {
    const CTRL_C: u8 = 3;
    let before = tcgetattr(stdin())?;
    let mut hidden = before.clone();
    // Without ISIG, Ctrl-C does not end the process with a terminal that shows nothing.
    hidden.local_modes -= LocalModes::ECHO | LocalModes::ISIG;
    hidden.special_codes[SpecialCodeIndex::VEOL] = CTRL_C;
    // Before the question: otherwise characters that are typed immediately would be shown.
    tcsetattr(stdin(), OptionalActions::Now, &hidden)?;
    let _restore = Restore(before);
    eprint!("{question}");
    stderr().flush()?;
    // One read has one line, however it ended.
    let mut line = [0; 4096];
    let length = rustix::io::read(stdin(), &mut line)?;
    String::from_utf8(line[..length].to_vec()).map_err(io::Error::other)
}

/// The settings of the terminal, which are restored when this is dropped.
struct Restore(Termios);

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.0);
        eprintln!();
    }
}
