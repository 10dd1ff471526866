//! What a terminal shows of an outbox: plain data in, lines of text out. No clock, no I/O and no state live here, so that
//! each part can be drawn by any command that has the data; but for `terminal`, which takes the terminal over and gives it
//! back. `top` and the screen of `work` are made of it.

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
