//! Tests that `make install` needs no second build as root, and that the installation of missing tools works beside
//! another apt.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support::Installation;
use support::workdir::ServerDir;

/// The root of the project.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A directory with a script for each name, to be added to PATH.
fn scripts(directory: &Path, scripts: &[(&str, &str)]) {
    for (name, body) in scripts {
        let path = directory.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("write a script");
        let mut mode = std::fs::metadata(&path).expect("the script").permissions();
        mode.set_mode(0o755);
        std::fs::set_permissions(&path, mode).expect("make it executable");
    }
}

#[test]
fn make_install_after_make_needs_no_cargo() {
    let installation = Installation::from_env();
    let version = installation.version();
    let digits = version.trim_start_matches("PostgreSQL ").chars();
    let major: String = digits.take_while(char::is_ascii_digit).collect();
    let target = root().join(format!("target/pg{major}"));
    let built = |profile: &str| {
        std::fs::metadata(target.join(profile).join("liboutbox.so"))
            .and_then(|so| so.modified())
            .ok()
    };
    let profile = if built("debug") > built("release") {
        "dev"
    } else {
        "release"
    };
    let directory = ServerDir::create("make-install");
    let destination = directory.path().to_owned();
    let install = |more: &[String]| {
        let pg_config = format!("PG_CONFIG={}", installation.bin("pg_config").display());
        let output = Command::new("make")
            .current_dir(root())
            .args(["install", "CARGO=/nonexistent/cargo", &pg_config])
            .arg(format!("PROFILE={profile}"))
            .arg(format!("DESTDIR={}", destination.display()))
            .args(more)
            .output()
            .expect("run make");
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (succeeds, stderr) = install(&[]);
    assert!(succeeds, "{stderr}");
    let installed = Command::new("find")
        .arg(&destination)
        .args(["-name", "outbox*"])
        .output()
        .expect("find");
    let installed = String::from_utf8_lossy(&installed.stdout).into_owned();
    let script = concat!("outbox--", env!("CARGO_PKG_VERSION"), ".sql");
    for file in ["outbox.so", "outbox.control", script] {
        assert!(installed.contains(&format!("/{file}\n")), "no {file} in {installed}");
    }
    let (succeeds, stderr) = install(&["LIBRARY=/nonexistent/liboutbox.so".to_owned()]);
    assert!(!succeeds && stderr.contains("run `make` first"), "{stderr}");
    directory.finish();
}

/// Runs install_tools.sh on a machine without any command but these. apt-get logs its calls and then runs `apt`.
/// Returns what is printed, and the calls.
fn install_tools(group: &str, apt: &str) -> (String, Vec<String>) {
    let (output, calls) = install_tools_with(&[("sudo", "exec \"$@\"")], group, apt);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    (printed, calls)
}

/// The same, not as root, and with these further commands. It may fail.
fn install_tools_with(more: &[(&str, &str)], group: &str, apt: &str) -> (Output, Vec<String>) {
    let directory = ServerDir::create("install-tools");
    let bin = directory.path();
    let log = bin.join("log");
    std::fs::write(&log, "").expect("write the log");
    let apt = format!("echo \"$*\" >> {log}\n{apt}", log = log.display());
    // The file of the system's Postgres is left alone.
    let nothing = [("mkdir", ":"), ("tee", ":"), ("mv", ":"), ("rm", ":")];
    scripts(bin, &[("apt-get", &apt), ("cargo", ":"), ("id", "echo 1000")]);
    scripts(bin, &nothing);
    scripts(bin, more);
    for program in ["env", "grep", "sed", "true"] {
        let real = ["/usr/bin", "/bin"]
            .map(|at| Path::new(at).join(program))
            .into_iter()
            .find(|path| path.exists());
        std::os::unix::fs::symlink(real.expect(program), bin.join(program)).expect("a link");
    }
    let output = Command::new("/bin/sh")
        .arg(root().join("tests/support/install_tools.sh"))
        .arg(group)
        .env("PATH", bin)
        .env("LOG", &log)
        .env("OUTBOX_APT_WAIT", "true") // instead of five seconds
        .env_remove("PG_CONFIG")
        .output()
        .expect("run install_tools.sh");
    let calls = std::fs::read_to_string(&log).expect("the calls");
    directory.finish();
    (output, calls.lines().map(str::to_owned).collect())
}

#[test]
fn installing_tools_waits_for_another_apt() {
    let locked = "echo 'E: Unable to lock directory /var/lib/apt/lists/' >&2; exit 100";
    let apt = format!("case \"$*\" in *update*) [ $(grep -c update $LOG) -gt 2 ] || {{ {locked}; }} ;; esac");
    let (printed, calls) = install_tools("ctl", &apt);
    assert!(printed.contains("another apt is running"), "{printed}");
    let [first, second, third, install] = &calls[..] else {
        panic!("other calls: {calls:#?}")
    };
    assert!(
        [first, second, third].iter().all(|call| call.ends_with("update")),
        "{calls:#?}"
    );
    assert!(
        install.starts_with("-o DPkg::Lock::Timeout=600") && install.contains(" install "),
        "{install}"
    );
}

#[test]
fn a_user_who_may_not_install_is_told_what_root_has_to_install() {
    let (output, calls) = install_tools_with(&[], "tests", "");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "it goes on");
    let (told, packages) = errors.split_once(':').expect("packages");
    assert!(
        told.ends_with("only root can install them, with `apt-get install`"),
        "{errors}"
    );
    assert!(packages.contains(" openssl "), "{errors}");
    assert!(
        packages.ends_with(" postgresql postgresql-server-dev-all\n"),
        "{errors}"
    );
    assert!(calls.is_empty(), "{calls:#?}");
}

#[test]
fn without_postgres_15_the_newest_major_that_apt_offers_is_installed() {
    let apt = "case \"$*\" in *simulate*-15*|*simulate*-18*) exit 100 ;; esac";
    let (_, calls) = install_tools("build", apt);
    let install = calls.last().expect("calls");
    assert!(install.contains(" install -y "), "{calls:#?}");
    assert!(install.contains(" postgresql-17 postgresql-server-dev-17"), "{install}");
}

#[test]
fn a_package_that_apt_does_not_offer_is_left_out_and_its_tests_are_named() {
    let apt = "case \"$*\" in *chromium*) exit 100 ;; esac";
    let (printed, calls) = install_tools("systems", apt);
    assert!(printed.contains("tests with the browser will be skipped"), "{printed}");
    let install = calls.last().expect("calls");
    assert!(
        install.contains(" prometheus") && !install.contains("chromium"),
        "{install}"
    );
}
