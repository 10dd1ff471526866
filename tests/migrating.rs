//! Tests that the pages of docs/migrating/ lead from another system to this one, and back. Each test creates and fills
//! the old system's table as the documents of that system do. Then it runs each SQL block of the page in psql, as a
//! reader would. Then it counts and reads the messages that RabbitMQ received. A query of the old table shows what the
//! old relay would still send.

mod common;

#[path = "migrating/corewrite.rs"]
mod corewrite;
#[path = "migrating/debezium.rs"]
mod debezium;
#[path = "common/decoding.rs"]
mod decoding;
#[path = "migrating/page.rs"]
mod page;
#[path = "migrating/pillar.rs"]
mod pillar;
#[path = "migrating/symfony.rs"]
mod symfony;
