//! What every terminal screen needs, whatever it shows: `terminal` takes over the terminal and gives it back, `text`
//! and `theme` make words and colours, `list` makes rows with columns, `frame` makes text of a frame.

#[cfg(test)]
pub mod fixture;
pub mod frame;
pub mod list;
pub mod terminal;
pub mod text;
pub mod theme;
