//! What a terminal shows of an outbox: plain data in, lines of text out. There is no clock, I/O or state here, so every
//! command with the data can draw each part. The exception is `terminal`, which takes over the terminal and gives it
//! back. `top` and the screen of `work` use it.

pub mod chart;
pub mod frame;
pub mod keys;
pub mod layout;
pub mod panel;
pub mod parts;
pub mod samples;
pub mod table;
pub mod terminal;
pub mod text;
pub mod theme;
#[cfg(test)]
pub mod trial;
