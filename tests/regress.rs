//! Runs the SQL of pg_test/ with Postgres' own pg_regress: psql must print what pg_test/expected contains. No worker
//! runs, so only the statements change anything. OUTBOX_ACCEPT=1 accepts the output as the expected one.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use support::process::{self, Account};
use support::{Cluster, Installation};
use support::{DB, idle_cluster, wait_true};

#[test]
fn psql_prints_the_expected_output() {
    let cluster = cluster();
    // In a directory beside the data directory: it is removed with it, and remains with it when the test fails.
    let dir = cluster.data_dir().with_file_name("regress");
    let tests = copy_tests(&dir);
    let mut pg_regress = Command::new(pg_regress(cluster.installation()));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
        pg_regress.env_remove(name);
    }
    pg_regress
        .arg(option("bindir", cluster.installation().bin("")))
        .arg(option("inputdir", &dir))
        .arg(option("outputdir", &dir))
        .arg(option("host", "127.0.0.1"))
        .arg(option("port", cluster.port().to_string()))
        .arg(option("user", "postgres"))
        .arg("--use-existing")
        .arg(option("dbname", DB))
        .args(&tests)
        .env("HOME", &dir) // the home of the test may be closed to the user of pg_regress
        .current_dir(&dir);
    process::run_as(&mut pg_regress, process::postgres_account());
    let output = pg_regress.output().expect("run pg_regress");

    if std::env::var_os("OUTBOX_ACCEPT").is_some_and(|value| value == "1") {
        return accept(&dir, &tests);
    }
    assert!(
        output.status.success(),
        "{}{}{}\nIf this output is correct: run again with OUTBOX_ACCEPT=1, and review git diff.",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
        fs::read_to_string(dir.join("regression.diffs")).unwrap_or_default(),
    );
}

/// A server where the extension can be created, and where messages are counted from the first one.
fn cluster() -> Cluster {
    let cluster = idle_cluster(&[]);
    // The launcher allocates an entry for the counters soon after its start.
    wait_true(
        &cluster,
        "the counters",
        "select exists (select from outbox_internal.shared_memory('counters'))",
    );
    cluster.exec(DB, "drop extension outbox");
    cluster
}

fn pg_regress(installation: &Installation) -> PathBuf {
    let makefile = PathBuf::from(installation.pg_config("--pgxs")); // PGXS/src/makefiles/pgxs.mk
    let src = makefile.ancestors().nth(2).expect("a path of a file in pgxs");
    let program = src.join("test/regress/pg_regress");
    assert!(
        program.is_file(),
        "no {}: Debian has it in postgresql-client-15",
        program.display()
    );
    program
}

/// Copies pg_test to `dir`, where the user of the server may read and write; returns the names of the tests.
fn copy_tests(dir: &Path) -> Vec<String> {
    make_dir(dir);
    for part in ["sql", "expected"] {
        make_dir(&dir.join(part));
        for file in fs::read_dir(pg_test().join(part)).expect("read pg_test").flatten() {
            let copy = dir.join(part).join(file.file_name());
            fs::copy(file.path(), &copy).expect("copy a file of pg_test");
            // A checkout may be readable for its owner only.
            fs::set_permissions(&copy, fs::Permissions::from_mode(0o644)).expect("open the copy");
        }
    }
    let files = fs::read_dir(dir.join("sql")).expect("read the copy").flatten();
    let mut tests: Vec<String> = files
        .filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".sql")?.to_owned()))
        .collect();
    tests.sort_unstable();
    assert!(!tests.is_empty(), "no tests in {}", pg_test().display());
    for test in &tests {
        // Without the file pg_regress would stop; with an empty one it shows the difference.
        let expected = out_file(&dir.join("expected"), test);
        if !expected.is_file() {
            fs::write(expected, "").expect("an empty file");
        }
    }
    tests
}

fn make_dir(path: &Path) {
    fs::create_dir(path).unwrap_or_else(|error| panic!("create {}: {error}", path.display()));
    if let Some(Account { uid, gid }) = process::postgres_account() {
        chown(path, Some(uid), Some(gid)).expect("give the directory to the user of the server");
    }
}

fn accept(dir: &Path, tests: &[String]) {
    for test in tests {
        let printed = out_file(&dir.join("results"), test);
        fs::copy(printed, out_file(&pg_test().join("expected"), test)).expect("take over what was printed");
    }
}

fn out_file(dir: &Path, test: &str) -> PathBuf {
    dir.join(format!("{test}.out"))
}

fn pg_test() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pg_test")
}

fn option(name: &str, value: impl AsRef<Path>) -> String {
    format!("--{name}={}", value.as_ref().display())
}
