//! outbox: a transactional outbox for Postgres with its relay inside the server. This file is the module map and the
//! entry points that the server calls by name; the logic is elsewhere. ARCHITECTURE.md describes the path of a message.
//!
//! A folder has the name of the process that runs its code:
//!
//! | module | is run by | may name |
//! |---|---|---|
//! | `session` | a user's backend | all but `worker` |
//! | `worker` | the launcher, workers, maintenance | all but `session` |
//! | `store` | both: SQL for both | `pg` and the leaves |
//! | `shared` | all: the areas of shared memory | `pg` and the leaves |
//! | `config`, `event`, `limits`, `error` | all: the leaves | `pg`, and `error` |
//! | `pg` | all: thin, safe wrappers of the server's functions | no other module |
//!
//! Files do not import each other in a circle.

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

// `cargo pgrx package` and `install` write the install script from the library, over an existing file. This line makes
// it the same script that `make install` copies.
pgrx::extension_sql_file!("../sql/outbox--0.3.0.sql", name = "install_script");

/// Called when the library is loaded: by the postmaster (shared_preload_libraries), or without preload by a backend
/// that calls a function of the extension. Enqueue then works, but there is no shared memory and no worker.
#[allow(non_snake_case)]
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    pg::backtrace::never();
    config::define();
    session::effects::init();
    session::changes::init(session::capture::store);
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
