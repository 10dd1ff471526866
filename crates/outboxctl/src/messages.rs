//! Pages of messages, for `list` and for the tabs of `serve`, and the actions on many messages. The search itself is a
//! function of the extension.
//!
//! | module | question it answers |
//! |---|---|
//! | `by_seq` | which messages of any status are next in order of seq? It searches all until the page is full |
//! | `tab` | which messages of one status are next in order of delivery, which are the newest of all, how many match? It reads a bounded part, and reports how far |
//! | `page` | how is a page requested, and shown as SQL? |
//! | `filter` | which criteria must a message match? |
//! | `bulk` | how are all messages that match the criteria retried, discarded or replayed? |
//! | `sql` | how is a statement both run and shown? |

pub mod bulk;
pub mod by_seq;
pub mod filter;
pub mod page;
pub mod sql;
pub mod tab;

pub use filter::{Filter, When, partition};
