//! What a terminal shows of an outbox: plain data in, lines of text out. No clock, no I/O and no state live here, so that
//! each part can be drawn by any command that has the data. `top` is made of all of it.

pub mod chart;
pub mod panel;
pub mod parts;
pub mod table;
pub mod text;
pub mod theme;
