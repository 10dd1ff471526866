//! The models of the protocol, each in a file of its own, and the examples of docs/formats.md.

mod checking;
mod cursor;
mod fast_path;
mod model_cursor;
mod model_fast_path;
mod model_floor;
mod model_lease;
mod model_standby;
