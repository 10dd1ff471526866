//! Pages of messages, for `list` and for the tabs of `serve`. A page is as fast with millions of messages as with five.
//!
//! The view outbox_messages is for one seq; a page in order of seq would read and sort all of it. So each table is read
//! along one of its indexes. `outbox` is read lane by lane (destination, partition). `outbox_waiting` and `outbox_dead`
//! are read by their keys or times. `outbox_history` is read in windows of seqs or times, which its BRIN index finds.
//! No query counts, and none reads more than a page if the filter matches the rows there.
//!
//! | module | question it answers |
//! |---|---|
//! | `by_seq` | which messages of any status are next in order of seq? It searches all until the page is full |
//! | `tab` | which messages of one kind are next in order of delivery? It reads a bounded part, and reports how far |
//! | `page` | how is a page requested, in any order? |
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
