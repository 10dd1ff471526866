//! Tests of several hosts: what happens to messages when hosts fail or lose each other. Each host is a network
//! namespace of this machine, so these tests need root. docs/scaling has a page for each module.

mod commands;
mod failover;
mod rabbitmq_cluster;
mod shards;
mod workers_outside;
