//! Workers in a simulated world: tables, shared memory, several destinations, publishers and brokers, sessions, a
//! person, clocks, and faults of all kinds, including shutdowns and lost sessions. An oracle with separate books
//! complains if a message is lost, sent too early, out of order or twice without a reason, or never ends.
//!
//! OUTBOX_SIM_TRACE chooses a message to trace.

#[path = "simulation/config.rs"]
mod config;
#[path = "simulation/fast_path.rs"]
mod fast_path;
#[path = "simulation/host.rs"]
mod host;
#[path = "simulation/memory.rs"]
mod memory;
#[path = "simulation/oracle.rs"]
mod oracle;
#[path = "simulation/publisher.rs"]
mod publisher;
#[path = "simulation/run.rs"]
mod run;
#[path = "simulation/sessions.rs"]
mod sessions;
#[path = "simulation/tables.rs"]
mod tables;
#[path = "simulation/world.rs"]
mod world;

use config::{Config, Flaw};
use outbox_core::settle::Ordering;
use run::Simulation;
use support::chaos::seeds;

const STEPS: u64 = 100_000;

fn assert_keeps_its_promises(config: &Config) {
    let (mut handed_over, mut unclaimed) = (0, 0);
    for seed in seeds(4) {
        match Simulation::new(config, seed).run(STEPS) {
            Ok(tally) => {
                println!("{} seed {seed}: {tally:?}", config.name);
                assert!(tally.published > tally.steps / 100, "not much happened: {tally:?}");
                assert!(tally.messages > 0 && tally.handed_over >= tally.published);
                assert_eq!(config.faults > 0, tally.repeated > 0, "{tally:?}");
                handed_over += tally.handed_over;
                unclaimed += tally.unclaimed;
            }
            Err(complaint) => panic!("{}: OUTBOX_SEED={seed}: {complaint}", config.name),
        }
    }
    // A partition that is blocked by a failed message, or has many, is read from the tables.
    let is_read = config.faults > 0 || config.messages > 3;
    let mostly_still = config.ordering == Ordering::Partition && is_read;
    assert!(
        mostly_still || unclaimed > handed_over / 200,
        "{unclaimed} of {handed_over}"
    );
}

#[test]
fn without_faults_every_message_arrives_once_and_in_order() {
    assert_keeps_its_promises(&Config::CALM);
}

#[test]
fn with_every_fault_no_message_is_lost_and_order_is_kept_behind_a_dead_letter() {
    assert_keeps_its_promises(&Config::ROUGH);
}

#[test]
fn with_every_fault_order_is_kept_if_dead_letters_do_not_block() {
    let config = Config {
        name: "rough, dead letters do not block",
        dead_blocks: false,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn with_every_fault_order_is_kept_if_messages_without_a_listener_are_discarded() {
    for ordering in [Ordering::Key, Ordering::Partition] {
        let config = Config {
            name: "rough, nobody has to listen",
            ordering,
            discards_unroutable: true,
            poisoned: 1_000,
            ..Config::ROUGH
        };
        assert_keeps_its_promises(&config);
    }
}

#[test]
fn with_partition_order_every_message_arrives_once_and_in_order() {
    let config = Config {
        name: "calm, by partition",
        ordering: Ordering::Partition,
        ..Config::CALM
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn with_every_fault_the_order_of_a_partition_is_kept_behind_a_dead_letter() {
    let config = Config {
        name: "rough, by partition",
        ordering: Ordering::Partition,
        requests: 100,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn with_every_fault_the_order_of_a_partition_is_kept_if_dead_letters_do_not_block() {
    let config = Config {
        name: "very rough, by partition, dead letters do not block",
        ordering: Ordering::Partition,
        dead_blocks: false,
        expiring: 300,
        sessions: 20,
        messages: 12,
        ends: 500,
        faults: 300,
        hold_ups: 1_500,
        nacked: 1_000,
        store_errors: 600,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn a_message_that_ends_the_connection_is_charged_and_no_other() {
    for ordering in [Ordering::Key, Ordering::Partition] {
        let config = Config {
            name: "messages that end the connection",
            ordering,
            ends_connection: 50,
            dead_blocks: false,
            keys: 40,
            ..Config::CALM
        };
        let mut charged = 0;
        for seed in seeds(4) {
            match Simulation::new(&config, seed).run(STEPS) {
                Ok(tally) => {
                    println!("{ordering:?} seed {seed}: {tally:?}");
                    charged += tally.charged;
                }
                Err(complaint) => panic!("{ordering:?}: OUTBOX_SEED={seed}: {complaint}"),
            }
        }
        assert!(charged > 0, "{ordering:?}: none was charged");
    }
}

#[test]
fn expired_messages_are_not_sent_and_block_nothing_and_the_others_keep_their_order() {
    let config = Config {
        name: "rough, many expire",
        expiring: 2_000,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn no_message_is_sent_before_the_standby_has_its_commit_and_all_are_sent() {
    for (base, standby) in [(Config::CALM, 2_000), (Config::ROUGH, 300)] {
        let config = Config {
            name: "a standby",
            standby: Some(standby),
            ..base
        };
        assert_keeps_its_promises(&config);
    }
}

#[test]
fn long_transactions_and_few_keys_keep_order() {
    let config = Config {
        name: "long transactions",
        sessions: 20,
        keys: 3,
        ends: 500,
        messages: 12,
        window: 40,
        batch: 100,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn workers_that_come_and_go_all_the_time_keep_order() {
    let config = Config {
        name: "very rough",
        partitions: 8,
        keys: 40,
        faults: 600,
        hold_ups: 3_000,
        nacked: 1_500,
        poisoned: 300,
        store_errors: 1_000,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn each_of_several_destinations_keeps_its_order_and_its_rate() {
    let config = Config {
        name: "rough, several destinations",
        destinations: 3,
        pauses: 1_000,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

#[test]
fn messages_whose_events_the_worker_reads_keep_every_promise() {
    for base in [Config::CALM, Config::ROUGH] {
        let config = Config {
            name: "events in a source",
            source: true,
            ..base
        };
        assert_keeps_its_promises(&config);
    }
}

#[test]
fn workers_with_little_memory_keep_every_promise() {
    for base in [Config::CALM, Config::ROUGH] {
        let config = Config {
            name: "little memory",
            destinations: 3,
            memory: 72_000,
            hangs: 20,
            ..base
        };
        assert_keeps_its_promises(&config);
    }
}

#[test]
fn many_messages_of_few_keys_that_go_one_by_one_keep_every_promise() {
    for base in [Config::CALM, Config::ROUGH] {
        for ordering in [Ordering::Key, Ordering::Partition] {
            let config = Config {
                name: "few keys, one by one",
                destinations: 3,
                keys: 3,
                messages: 12,
                ordering,
                ..base.clone()
            };
            assert_keeps_its_promises(&config);
        }
    }
}

#[test]
fn workers_with_a_read_limit_keep_order() {
    let config = Config {
        name: "rough, with requests",
        requests: 500,
        keys: 3,
        ..Config::ROUGH
    };
    assert_keeps_its_promises(&config);
}

// ---- mistakes are found ---------------------------------------------------------------------------------------------

fn assert_finds(flaw: Flaw, complaint: &str) {
    assert_finds_with(Ordering::Key, flaw, complaint);
}

fn assert_finds_with(ordering: Ordering, flaw: Flaw, complaint: &str) {
    let config = Config {
        ordering,
        ..Config::MISTAKEN
    };
    assert_finds_in(&config, flaw, complaint);
}

fn assert_finds_in(config: &Config, flaw: Flaw, complaint: &str) {
    let config = Config {
        flaw: Some(flaw),
        ..config.clone()
    };
    let mut others = Vec::new();
    for seed in 1..=2_000 {
        match Simulation::new(&config, seed).run(30_000) {
            Err(said) if said.contains(complaint) => return,
            Err(said) => others.push(said),
            Ok(_) => {}
        }
    }
    panic!("{flaw:?} is not found, but {others:?}");
}

#[test]
fn a_claim_that_repeats_itself_is_found() {
    assert_finds(Flaw::ClaimRepeats, "twice");
}

#[test]
fn a_session_that_leaves_before_it_lowers_rewind_is_found() {
    assert_finds(Flaw::LeavesBeforeRewind, "comes before it");
}

#[test]
fn a_worker_that_ignores_commits_during_its_claim_is_found() {
    assert_finds(Flaw::NoPeekAtRewind, "comes before it");
}

#[test]
fn a_worker_that_takes_a_rewind_and_does_not_read_is_found() {
    assert_finds(Flaw::RewindTakenUnread, "comes before it"); // a message by shared memory overtakes it
}

#[test]
fn a_worker_that_does_not_find_for_whom_a_shared_rewind_is_is_found() {
    assert_finds(Flaw::SharedRewindUnread, "comes before it");
}

#[test]
fn a_session_that_draws_before_it_announces_is_found() {
    assert_finds(Flaw::DrawsBeforeAnnouncing, "was handed over before");
}

#[test]
fn a_worker_that_takes_the_rewind_of_another_is_found() {
    // By a worker whose leases have expired in the middle of a pass.
    let config = Config {
        hold_ups: 10_000,
        ..Config::MISTAKEN
    };
    assert_finds_in(&config, Flaw::AnyWorkerTakesRewind, "comes before it");
}

#[test]
fn a_settle_without_a_lease_is_found() {
    assert_finds(Flaw::SettleIgnoresLease, "which it lost");
}

#[test]
fn a_settle_that_does_not_hold_the_lease_to_its_end_is_found() {
    assert_finds(Flaw::SettleHoldsNoLease, "of its key is not");
}

#[test]
fn a_worker_that_does_not_learn_of_blocked_keys_is_found() {
    assert_finds(Flaw::BlockedKeysForgotten, "comes before it");
}

#[test]
fn a_worker_that_does_not_learn_of_blocked_partitions_is_found() {
    assert_finds_with(Ordering::Partition, Flaw::BlockedKeysForgotten, "comes before it");
}

#[test]
fn a_session_that_publishes_its_partition_late_is_found() {
    // Few lanes and faults, and no fast path: more claims see a transaction between its two steps.
    let config = Config {
        ordering: Ordering::Partition,
        partitions: 1,
        fast_path: 0,
        poisoned: 0,
        nacked: 0,
        faults: 0,
        store_errors: 0,
        memory_errors: 0,
        ..Config::MISTAKEN
    };
    assert_finds_in(&config, Flaw::RecordsLaneLate, "was handed over before");
}

#[test]
fn a_worker_that_sends_after_its_lease_is_found() {
    assert_finds(Flaw::NoDeadline, "after its lease");
}

#[test]
fn a_publisher_that_continues_after_a_stop_is_found() {
    assert_finds(Flaw::StopsNothing, "after its lease");
}

#[test]
fn a_claim_that_leaves_a_message_for_the_worker_to_take_is_found() {
    assert_finds(Flaw::ClaimedNotRevoked, "twice");
}

#[test]
fn a_worker_that_ignores_newly_ready_messages_is_found() {
    assert_finds(Flaw::NoPeekReady, "comes before it");
}

#[test]
fn a_worker_that_ends_without_freeing_its_slots_is_found() {
    // Few crashes of the server, because they empty shared memory.
    assert_finds_in(&Config::ROUGH, Flaw::EndsWithFastInFlight, "is not free");
}

#[test]
fn a_worker_that_reads_the_position_before_it_claims_is_found() {
    let config = Config {
        standby: Some(300),
        ..Config::MISTAKEN
    };
    let found = "before the standby had its commit";
    assert_finds_in(&config, Flaw::ReadsWalBeforeClaim, found);
}
