//! Pages of messages, for `list` and for the tabs of `serve`, as quick with millions that wait as with five.
//!
//! The view outbox_messages is for one seq; in order of seq it would be read to its end and sorted. So each table is asked by
//! an index that it has: `outbox` lane by lane (destination, partition), `outbox_waiting` and `outbox_dead` by their keys or
//! times, `outbox_history` in windows of seqs or times, which its BRIN index finds. No query counts, and none reads more than a
//! page where the filter finds one there.
//!
//! | module | question it answers |
//! |---|---|
//! | `by_seq` | which messages of any status are next in order of seq? All are looked through until there is a page |
//! | `tab` | which messages of one kind are next in the order in which they go or went? Looks so far, and says how far |
//! | `page` | how is a page asked for, whatever its order? |
//! | `filter` | what must a message meet? |
//! | `bulk` | how are all that meet criteria retried, discarded or replayed? |
//! | `sql` | how is a statement both run and shown? |

pub mod bulk;
pub mod by_seq;
pub mod filter;
pub mod page;
pub mod sql;
pub mod tab;

pub use filter::{Filter, When, partition};
