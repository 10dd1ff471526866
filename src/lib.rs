//! outbox: a transactional outbox for Postgres with its relay inside the server. This file is the module map and the
//! entry points that the server calls by name; the logic is elsewhere. ARCHITECTURE.md tells how a message flows.
//!
//! A folder is named after the process that runs its lines:
//!
//! | module | is run by | may name |
//! |---|---|---|
//! | `session` | a user's backend | all but `worker` |
//! | `worker` | the launcher, workers, the upkeep | all but `session` |
//! | `store` | both: SQL that both need | `pg` and the leaves |
//! | `shared` | all: what processes share, in shared memory | `pg` and the leaves |
//! | `config`, `event`, `limits`, `error` | all: the leaves | `pg`, and `error` |
//! | `pg` | all: thin, safe words for the server | nothing of ours |
//!
//! No two files import each other, not even by way of others.

mod config;
mod error;
mod event;
mod limits;
mod pg;
mod session;
mod shared;
mod store;
mod worker;

use pgrx::{pg_guard, pg_sys};

pgrx::pg_module_magic!(name, version);

// `cargo pgrx package` and `install` write the install script from what the library carries, over any file of ours: this
// makes it the same script that `make install` copies.
pgrx::extension_sql_file!("../sql/outbox--0.1.0.sql", name = "install_script");

/// Called when the library is loaded: by the postmaster (shared_preload_libraries), or by a backend that uses a function
/// of ours without that. In the second case enqueue works, but there is no shared memory and no worker.
#[allow(non_snake_case)]
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    pg::backtrace::never();
    config::define();
    session::effects::init();
    if pg::shmem::preloading() {
        shared::lifecycle::reserve();
        worker::launcher::register();
        session::utility::init();
    }
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn outbox_launcher_main(_argument: pg_sys::Datum) {
    worker::launcher::main()
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn outbox_worker_main(argument: pg_sys::Datum) {
    // SAFETY: a background worker has one thread until it starts a publisher.
    unsafe { outbox_transport::prepare_process() };
    match worker::launcher::unpack(argument.value() as u64) {
        (database, shared::workers::MAINTENANCE) => worker::maintenance::main(database),
        (database, number) => worker::process::main(database, number),
    }
}
