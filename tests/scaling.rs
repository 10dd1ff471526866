//! Tests of several hosts: what happens to messages when hosts fail or lose each other. Each host is a network namespace
//! of this machine, so these tests need root. docs/scaling has a page for each module.

#[path = "scaling/commands.rs"]
mod commands;
mod common;
#[path = "common/courier.rs"]
mod courier;
#[path = "scaling/failover.rs"]
mod failover;
#[path = "scaling/rabbitmq_cluster.rs"]
mod rabbitmq_cluster;
#[path = "scaling/shards.rs"]
mod shards;
#[path = "scaling/workers_outside.rs"]
mod workers_outside;
