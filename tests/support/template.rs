//! Makes data directories. Called by the cluster. initdb takes about 1 s and CREATE EXTENSION 0.5 s, a copy under 0.1
//! s. So both run once for each work directory, version, user and build of the extension.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use crate::cluster::{Cluster, StopMode};
use crate::install::Installation;
use crate::process::{self, Account};
use crate::workdir;

/// The data directory to copy: as initdb makes it, or with the extension in the database postgres, as CREATE EXTENSION
/// makes it with the default settings.
pub(crate) fn template(installation: &Installation, with_extension: bool) -> PathBuf {
    if with_extension {
        return template_with_extension(installation);
    }
    let template = named(installation, "initdb");
    let _lock = workdir::lock_work_dir();
    make_once(&template, |half_made| {
        initdb(installation, half_made);
    });
    template
}

pub(crate) fn copy(template: &Path, data_dir: &Path) {
    create_owned_dir(data_dir);
    // As the user of the server, so that nothing need be preserved: that would double the work for each of a thousand
    // files.
    let mut copy = Command::new("cp");
    process::run_as(&mut copy, process::postgres_account());
    process::run(
        copy.args(["-r", "--reflink=auto"])
            .arg(template.join("."))
            .arg(data_dir),
    );
}

/// The template for this library and its SQL, made today: its history has the partitions of today.
fn template_with_extension(installation: &Installation) -> PathBuf {
    let plain = template(installation, false);
    let template = named(
        installation,
        &format!("outbox-{:016x}", hash_of_extension(installation)),
    );
    workdir::run_dir(); // takes the same lock once
    let _lock = workdir::lock_work_dir();
    if !template.exists() {
        remove_unused(&named(installation, "outbox-"));
    }
    make_once(&template, |half_made| {
        let cluster = Cluster::builder()
            .installation(installation.clone())
            .conf("outbox.databases = 'another'") // no worker writes into the template
            .start_from(&plain);
        cluster.exec("postgres", "create extension outbox");
        // Since Postgres 19 a read can begin the visibility map of a catalog, and all processes are told. The first
        // process of a worker would end then, as if a setting had changed.
        let catalogs: String = cluster.query_one(
            "postgres",
            "select string_agg(oid::regclass::text, ', ') from pg_class
             where relnamespace = 'pg_catalog'::regnamespace and relkind = 'r'",
        );
        cluster.exec("postgres", &format!("vacuum {catalogs}"));
        cluster.stop(StopMode::Fast);
        copy(&cluster.data_dir(), half_made);
        let conf = "postgresql.conf";
        fs::copy(plain.join(conf), half_made.join(conf)).expect("the configuration of the template");
    });
    // Until this process ends, so that no other one removes it.
    static IN_USE: Mutex<BTreeMap<PathBuf, File>> = Mutex::new(BTreeMap::new());
    let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
    in_use.entry(template.clone()).or_insert_with(|| {
        let directory = File::open(&template).expect("open the template");
        directory.lock_shared().expect("lock the template");
        directory
    });
    template
}

/// Removes the templates of earlier builds and days, whose paths begin so, unless a process uses them. The caller holds
/// the lock of the work directory.
fn remove_unused(beginning: &Path) {
    let (directory, name) = (beginning.parent(), beginning.file_name().unwrap_or_default());
    let entries = fs::read_dir(directory.expect("a work directory")).expect("its templates");
    for entry in entries.flatten() {
        let is_template = entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(name.as_encoded_bytes());
        if is_template && File::open(entry.path()).is_ok_and(|template| template.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Today's date with the contents of the library and of the scripts. Computed once for each installation.
fn hash_of_extension(installation: &Installation) -> u64 {
    static KNOWN: Mutex<BTreeMap<PathBuf, u64>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry(installation.bin("postgres")).or_insert_with(|| {
        let mut hash = DefaultHasher::new();
        let now = SystemTime::UNIX_EPOCH.elapsed().expect("a date after 1970");
        (now.as_secs() / 86_400).hash(&mut hash);
        let library = PathBuf::from(installation.pg_config("--pkglibdir")).join("outbox.so");
        let scripts = PathBuf::from(installation.pg_config("--sharedir")).join("extension");
        let scripts = fs::read_dir(scripts).expect("the scripts of extensions").flatten();
        let ours = scripts.filter(|file| file.file_name().to_string_lossy().starts_with("outbox"));
        let mut ours: Vec<PathBuf> = ours.map(|file| file.path()).chain([library]).collect();
        ours.sort();
        for file in ours {
            let content = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            content.hash(&mut hash);
        }
        hash.finish()
    })
}

fn named(installation: &Installation, what: &str) -> PathBuf {
    let version = installation.version();
    let version: String = version
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '.')
        .collect();
    // The user is part of the name, since the server must own its files.
    let user = if process::postgres_account().is_some() {
        "postgres"
    } else {
        "self"
    };
    workdir::work_dir().join(format!("template-{version}-{user}-{what}"))
}

/// Makes a template unless it exists. It gets its name when it is complete, so that no process uses an incomplete one.
/// The caller holds the lock of the work directory.
fn make_once(template: &Path, make: impl FnOnce(&Path)) {
    if !template.exists() {
        let half_made = template.with_extension("half-made");
        let _ = fs::remove_dir_all(&half_made);
        make(&half_made);
        fs::rename(&half_made, template).expect("name the template");
    }
}

/// Makes `data_dir` a physical copy of the server at `connection`, as a standby of that server or independent.
pub(crate) fn copy_server(installation: &Installation, data_dir: &Path, connection: &str, standby: bool) {
    create_owned_dir(data_dir);
    let mut backup = Command::new(installation.bin("pg_basebackup"));
    backup.args(["--no-sync", "--checkpoint=fast", "-d", connection, "-D"]);
    backup.arg(data_dir);
    if standby {
        backup.arg("--write-recovery-conf");
    }
    process::run_as(&mut backup, process::postgres_account());
    process::run(backup.current_dir(data_dir));
}

fn create_owned_dir(path: &Path) {
    workdir::create_open_dir(path);
    // The server refuses a directory that other users may read.
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("chmod");
    if let Some(Account { uid, gid }) = process::postgres_account() {
        chown(path, Some(uid), Some(gid)).expect("give a directory to user postgres");
    }
}

fn initdb(installation: &Installation, data_dir: &Path) {
    create_owned_dir(data_dir);
    let mut initdb = Command::new(installation.bin("initdb"));
    initdb
        .args([
            "-A",
            "trust",
            "-U",
            "postgres",
            "--no-sync",
            "--locale=C",
            "-E",
            "UTF8",
            "--wal-segsize=1", // less to copy
            "-D",
        ])
        .arg(data_dir);
    process::run_as(&mut initdb, process::postgres_account());
    process::run(initdb.current_dir(data_dir));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_templates_that_no_process_uses_are_removed() {
        let directory = workdir::run_dir().join("templates");
        let paths = ["a-1", "a-2", "b-1"].map(|name| directory.join(name));
        paths
            .iter()
            .for_each(|path| fs::create_dir_all(path).expect("a template"));
        let used = File::open(&paths[0]).expect("a directory");
        used.lock_shared().expect("a lock");
        remove_unused(&directory.join("a-"));
        assert_eq!(paths.map(|path| path.exists()), [true, false, true]);
    }
}
