//! Makes data directories. Called by the cluster. initdb takes about 1 s, a copy about 0.1 s, so initdb runs once for
//! each work directory, version and user.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::install::Installation;
use crate::process::{self, Account};
use crate::workdir;

/// Makes `data_dir`, as initdb would.
pub(crate) fn create_data_dir(installation: &Installation, data_dir: &Path) {
    let template = template(installation);
    // cp, not fs::copy: it keeps owner and mode, and shares blocks if the file system can.
    let mut copy = Command::new("cp");
    process::run(copy.args(["-a", "--reflink=auto"]).arg(template).arg(data_dir));
}

fn template(installation: &Installation) -> PathBuf {
    let account = process::postgres_account();
    let version: String = installation
        .version()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '.')
        .collect();
    // The user is part of the name, since the server must own its files.
    let user = if account.is_some() { "postgres" } else { "self" };
    let template = workdir::work_dir().join(format!("template-{version}-{user}"));
    let _lock = workdir::lock_work_dir();
    if !template.exists() {
        // The template gets its name when it is complete, so that no process uses an incomplete one.
        let half_made = template.with_extension("half-made");
        let _ = fs::remove_dir_all(&half_made);
        initdb(installation, account, &half_made);
        fs::rename(&half_made, &template).expect("name the template");
    }
    template
}

/// Makes `data_dir` a physical copy of the server at `connection`, as a standby of that server or independent.
pub(crate) fn copy_server(installation: &Installation, data_dir: &Path, connection: &str, standby: bool) {
    let account = process::postgres_account();
    create_owned_dir(data_dir, account);
    let mut backup = Command::new(installation.bin("pg_basebackup"));
    backup.args(["--no-sync", "--checkpoint=fast", "-d", connection, "-D"]);
    backup.arg(data_dir);
    if standby {
        backup.arg("--write-recovery-conf");
    }
    process::run_as(&mut backup, account);
    process::run(backup.current_dir(data_dir));
}

fn create_owned_dir(path: &Path, account: Option<Account>) {
    workdir::create_open_dir(path);
    // The server refuses a directory that other users may read.
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("chmod");
    if let Some(Account { uid, gid }) = account {
        chown(path, Some(uid), Some(gid)).expect("give a directory to user postgres");
    }
}

fn initdb(installation: &Installation, account: Option<Account>, data_dir: &Path) {
    create_owned_dir(data_dir, account);
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
            "-D",
        ])
        .arg(data_dir);
    process::run_as(&mut initdb, account);
    process::run(initdb.current_dir(data_dir));
}
