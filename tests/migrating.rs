//! Do the pages of docs/migrating/ lead from an old system to this one, and back? The old system's table is made and filled
//! as its own documents have it; then each SQL block of the page runs in psql, as a person copies it; then the messages that
//! RabbitMQ got are counted and read. What the old relay would still take is asked of the old table.

mod common;

#[path = "migrating/corewrite.rs"]
mod corewrite;
#[path = "migrating/debezium.rs"]
mod debezium;
#[path = "migrating/page.rs"]
mod page;
#[path = "migrating/pillar.rs"]
mod pillar;
#[path = "migrating/symfony.rs"]
mod symfony;
