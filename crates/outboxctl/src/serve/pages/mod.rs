//! The pages, as HTML. maud escapes all values, so that no payload, key or error can be markup. Live content is made of
//! named parts, which the poller makes once for all viewers and the event stream updates.

pub mod act;
mod chart;
mod fleet;
pub mod layout;
pub mod live;
pub mod messages;
mod overview;
