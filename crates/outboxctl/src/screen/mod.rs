//! What every terminal screen needs, whatever it shows: `terminal` takes over the terminal and gives it back, `text` and
//! `theme` make words and colours, `frame` makes text of a frame.

pub mod frame;
pub mod terminal;
pub mod text;
pub mod theme;
#[cfg(test)]
pub mod trial;
