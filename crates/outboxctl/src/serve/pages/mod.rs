//! The pages, as HTML. maud escapes whatever stands in them, so that no payload, key or error can be markup. What stays
//! live is made of named parts, which the poller makes once for all viewers and the event stream brings anew.

pub mod act;
mod chart;
mod fleet;
pub mod layout;
pub mod live;
pub mod messages;
mod overview;
