//! Runs `make installcheck`: psql must print for the SQL of pg_test/ what pg_test/expected contains. No worker runs, so
//! only the statements change anything. OUTBOX_ACCEPT=1 accepts the output as the expected one.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::tidy::root;
use support::{Cluster, idle_cluster};

#[test]
fn psql_prints_the_expected_output() {
    let cluster = idle_cluster(&[]);
    let accepts = std::env::var_os("OUTBOX_ACCEPT").is_some_and(|value| value == "1");
    let tests = tests();
    if accepts {
        // Without the file of a new test pg_regress would stop.
        let expected = tests.iter().map(|test| expected(test));
        let missing = expected.filter(|path| !path.exists());
        missing.for_each(|path| fs::write(path, "").expect("an empty file"));
    }
    let output = installcheck(&cluster);
    let results = root().join("target/installcheck");
    if accepts {
        for test in &tests {
            let printed = results.join(format!("results/{test}.out"));
            fs::copy(printed, expected(test)).expect("take over what was printed");
        }
        return;
    }
    assert!(
        output.status.success(),
        "{}{}\nIf this output is correct: run again with OUTBOX_ACCEPT=1, and review git diff.",
        printed(&output),
        fs::read_to_string(results.join("regression.diffs")).unwrap_or_default(),
    );
    assert!(
        printed(&output).contains(&format!("All {} tests passed", tests.len())),
        "{}",
        printed(&output)
    );
}

#[test]
fn installcheck_names_what_the_server_lacks() {
    let without = Cluster::builder().preload(false).start();
    let with_worker = Cluster::builder().start();
    for (cluster, why) in [
        (without, "shared_preload_libraries"),
        (with_worker, "outbox.workers = 0"),
    ] {
        let output = installcheck(&cluster);
        assert!(
            !output.status.success() && printed(&output).contains(why),
            "{}",
            printed(&output)
        );
    }
}

fn installcheck(cluster: &Cluster) -> Output {
    let mut make = Command::new("make");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PG")) {
        make.env_remove(name);
    }
    make.current_dir(root())
        .arg("installcheck")
        .arg(format!(
            "PG_CONFIG={}",
            cluster.installation().bin("pg_config").display()
        ))
        .env("PGHOST", "127.0.0.1")
        .env("PGPORT", cluster.port().to_string())
        .env("PGUSER", "postgres")
        .output()
        .expect("run make")
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// The names of the tests in pg_test/sql.
fn tests() -> Vec<String> {
    let files = fs::read_dir(root().join("pg_test/sql")).expect("pg_test/sql").flatten();
    let names = files.filter_map(|file| Some(file.file_name().to_str()?.strip_suffix(".sql")?.to_owned()));
    names.collect()
}

fn expected(test: &str) -> PathBuf {
    root().join(format!("pg_test/expected/{test}.out"))
}
