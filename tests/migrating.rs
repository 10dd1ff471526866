//! Tests that the pages of docs/migrating/ lead from another system to this one, and back. Each test creates and fills
//! the old system's table as the documents of that system do. Then it runs each SQL block of the page in psql, as a
//! reader would. Then it counts and reads the messages that RabbitMQ received. A query of the old table shows what the
//! old relay would still send.

mod corewrite;
mod debezium;
mod page;
mod pillar;
mod symfony;
