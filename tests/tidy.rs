//! The rules of the house that a search in the text can keep. No server is needed. CONTRIBUTING.md says what keeps the
//! others.

mod imports;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use outbox_core::envelope::SHORT_STRING_MAX;
use outbox_core::event::EVENT_BYTES_MAX;
use outbox_core::partition::PartitionCount;
use outbox_core::settle::EXPIRED;
use serde_json::Value;

/// What is refused, whether a line of code of a file is that, and a violation: a rule that finds nothing would not be
/// noticed.
type Rule = (&'static str, fn(&str, &str) -> bool, (&'static str, &'static str));

const RULES: [Rule; 8] = [
    (
        "SPI outside of the stores",
        |path, line| !is_store(path) && !path.starts_with("tests/") && says(line, "Spi"),
        ("src/session/effects.rs", "use crate::pg::spi::Spi;"),
    ),
    (
        "unsafe code, or a name of the server, outside of src/pg",
        |path, line| is_above_pg(path) && (says(line, "unsafe") || says(line, "pg_sys")),
        ("src/session/effects.rs", "unsafe { f() }"),
    ),
    (
        // An ERROR of the server unwinds as a panic; one more on the way aborts the process, and with it every session.
        "a Drop that may call the server while an error unwinds",
        |path, line| path.starts_with("src/") && line.starts_with("impl") && line.contains("Drop for"),
        ("src/session/effects.rs", "impl<T> Drop for Table<T> {"),
    ),
    (
        // SPI sessions call it too, and are left: their end frees memory of their own and cannot raise.
        "a type of pgrx that calls the server as it is dropped",
        |path, line| {
            path.starts_with("src/") && RISKY.split(' ').any(|name| says(line, name)) && !line.contains("use ")
        },
        ("src/store/source.rs", "let cursor = client.find_cursor(name)?;"),
    ),
    (
        "text that is not converted by src/pg/text.rs",
        |path, line| {
            let is_border = ["src/pg/spi.rs", "src/pg/text.rs"].contains(&path);
            let prelude = is_store(path) && line.contains("pgrx::prelude::*"); // brings pgrx's Spi
            let raw = ["to_string_lossy", "CString::new(", "pgrx::spi::"]
                .iter()
                .any(|way| line.contains(way));
            path.starts_with("src/") && !is_border && (prelude || raw) && !line.ends_with("::quote_identifier;")
        },
        ("src/store/source.rs", "use pgrx::spi::{SpiClient, quote_identifier};"),
    ),
    (
        "pgrx below crates/, where code may run on another thread than the main one",
        |path, line| path.starts_with("crates/") && path.ends_with(".toml") && says(line, "pgrx"),
        ("crates/core/Cargo.toml", "pgrx = \"=0.19.3\""),
    ),
    (
        // tests/clippy.toml refuses the functions of Rust in the package of tests/.
        "a test that sleeps",
        |path, line| match path.split_once("tests/") {
            Some(("", _)) => says(line, "pg_sleep"),
            Some(_) => line.contains("sleep"),
            None => false,
        },
        ("tests/order.rs", "client.execute(\"select pg_sleep(1)\")"),
    ),
    (
        "an install script that is not ASCII: the server takes it for text of the database's encoding",
        |path, line| path.starts_with("sql/") && !line.is_ascii(),
        ("sql/src/10_tables.sql", "comment on table t is 'a → b';"),
    ),
];

/// Lines that a rule refuses, and why they may stay.
const EXEMPT: [(&str, &str); 21] = [
    // Entry points that the server calls, and their signatures.
    ("src/lib.rs", "use pgrx::{pg_guard, pg_sys}"),
    ("src/lib.rs", "#[unsafe(no_mangle)]"),
    ("src/lib.rs", "argument: pg_sys::Datum"),
    ("src/session/", "fcinfo: pg_sys::FunctionCallInfo"),
    ("src/", "_arg: pgrx::pg_sys::Datum"),
    // Must run before any thread.
    ("src/lib.rs", "unsafe { outbox_transport::prepare_process() }"),
    // The promise of the types is the declaration's.
    ("src/session/api.rs", "unsafe { Args::new(fcinfo) }"),
    // The promise that a struct may lie in shared memory is the struct's.
    ("src/shared/", "unsafe impl Shareable for "),
    // pgrx has no safe way to define a setting with a check.
    ("src/config.rs", "unsafe {"),
    // pgrx keeps its safe report there.
    // Touches shared memory alone: atomics, and a turn that raises nothing.
    ("src/shared/statistics.rs", "impl Drop for DestinationStats"),
    ("src/pg/shmem.rs", "Drop for Release"),
    // Touches memory of this process alone.
    ("src/session/changes.rs", "impl Drop for Ends"),
    // Writes variables of the server, and calls nothing.
    ("src/pg/user_code.rs", "impl Drop for Left"),
    // These free memory, but not while an error unwinds.
    ("src/pg/bgworker.rs", "impl Drop for Handle"),
    ("src/store/statement.rs", "impl Drop for SavedStatement"),
    // Hand plans and cursors to SavedStatement, or keep them for the life of the process.
    ("src/store/statement.rs", "OwnedPreparedStatement"),
    ("src/store/statement.rs", "client.find_cursor(cursor)"),
    ("src/pg/spi.rs", "OwnedPreparedStatement"),
    ("src/pg/spi.rs", "find_cursor("),
    ("src/session/store/", "OwnedPreparedStatement"),
    ("tests/tidy.rs", "pg_sleep"),
];

const STORES: [&str; 4] = ["src/session/store/", "src/store/", "src/worker/store/", "src/pg/spi.rs"];

/// Types of pgrx, and a function that returns one.
const RISKY: &str = "OwnedPreparedStatement find_cursor PgRelation PgLwLock PgSpinLock PgVarlena";

#[test]
fn each_rule_holds_and_would_find_a_violation() {
    let trees = [
        ("src", "rs"),
        ("crates", "rs"),
        ("tests", "rs"),
        ("crates", "toml"),
        ("sql", "sql"),
    ];
    let files: Vec<File> = trees
        .iter()
        .flat_map(|(tree, extension)| files(tree, extension))
        .collect();
    let exempt = |path: &str, line: &str| {
        EXEMPT
            .iter()
            .any(|(of, part)| path.starts_with(of) && line.contains(part))
    };
    let mut complaints = Vec::new();
    for (rule, refuses, (path, violation)) in RULES {
        assert!(
            root().join(path).exists() && refuses(path, violation),
            "{rule}: does not find its violation"
        );
        for (path, text) in &files {
            let lines = code(text).filter(|(_, line)| refuses(path, line) && !exempt(path, line));
            complaints.extend(lines.map(|(number, line)| format!("{path}:{number}: {rule}: {line}")));
        }
    }
    for (path, part) in EXEMPT {
        let mut of = files.iter().filter(|(file, _)| file.starts_with(path));
        if !of.any(|(_, text)| code(text).any(|(_, line)| line.contains(part))) {
            complaints.push(format!("{path} has no {part:?} any more: remove the exemption"));
        }
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// The lines that name a broker outside of its folder and of the registry, in product code. The numbers only fall: what is
/// left names a limit, exports the types of a kind, or prints an example.
const NAMING_BROKERS: [(&str, usize); 6] = [
    ("crates/outboxctl/src/board/fixture.rs", 2),
    ("crates/outboxctl/src/listen.rs", 1),
    ("crates/transport/src/lib.rs", 2),
    ("sql/src/26_capture.sql", 1),
    ("sql/src/44_inbox.sql", 1),
    ("src/pg/text.rs", 1),
];

#[test]
fn a_broker_is_named_in_its_folder_alone() {
    let places = [
        ("src", "rs"),
        ("crates/core/src", "rs"),
        ("crates/worker/src", "rs"),
        ("crates/transport/src", "rs"),
        ("crates/outboxctl/src", "rs"),
        ("sql/src", "sql"),
    ];
    let own = [
        "crates/transport/src/amqp/",
        "crates/transport/src/http/",
        "crates/transport/src/kinds.rs",
    ];
    let product = (places.iter().flat_map(|(tree, extension)| files(tree, extension)))
        .filter(|(path, _)| !path.ends_with("tests.rs") && !own.iter().any(|own| path.starts_with(own)));
    let found: BTreeMap<String, usize> = product
        .map(|(path, text)| {
            let code_of_tests = text.find("#[cfg(test)]\nmod ").unwrap_or(text.len());
            let lines = code(&text[..code_of_tests]).filter(|(_, line)| names_a_broker(line));
            let count = lines.filter(|(_, line)| !line.starts_with("-- ")).count();
            (path, count)
        })
        .filter(|(_, count)| *count > 0)
        .collect();
    assert_eq!(
        found,
        NAMING_BROKERS.map(|(path, count)| (path.to_owned(), count)).into()
    );
}

/// What is wrong is a code with values; the words for it are for people. The words of RabbitMQ are read in `amqp/findings.rs`,
/// because it has no codes.
#[test]
fn no_text_of_ours_is_read_again() {
    let texts = ["problem", "remedy", "detail", "last_error", "why", "error", "reason"];
    let sql = |line: &str| {
        texts.iter().any(|text| {
            [" like '", " not like '", " ~ '", ", ' is '"]
                .iter()
                .any(|read| line.contains(&format!("{text}{read}")))
                || ["substring(", "split_part("].iter().any(|read| {
                    let mut calls = line.match_indices(read).map(|(at, _)| &line[at + read.len()..]);
                    calls.any(|rest| rest.split([',', ')']).next().is_some_and(|given| given.ends_with(text)))
                })
        })
    };
    let rust = |line: &str| {
        let reads = [
            "starts_with(\"",
            "ends_with(\"",
            "contains(\"",
            "split_once(\"",
            "strip_prefix(\"",
            "strip_suffix(\"",
        ];
        texts
            .iter()
            .any(|text| reads.iter().any(|read| line.contains(&format!("{text}.{read}"))))
    };
    assert!(sql("where u.detail like '%user mapping%'") && sql("substring(u.problem, 'x')") && !sql("d.reason like f"));
    assert!(rust("problem.problem.starts_with(\"connecting\")") && !rust("reason.contains(word)"));
    let trees = [
        "src",
        "crates/core/src",
        "crates/worker/src",
        "crates/transport/src",
        "crates/outboxctl/src",
    ];
    let code_of = |path: String, text: String, reads: &dyn Fn(&str) -> bool| {
        let code_of_tests = text.find("#[cfg(test)]\nmod ").unwrap_or(text.len());
        let found: Vec<String> = code(&text[..code_of_tests])
            .filter(|(_, line)| reads(line))
            .map(|(number, line)| format!("{path}:{number}: {line}"))
            .collect();
        found
    };
    let product = trees.iter().flat_map(|tree| files(tree, "rs"));
    let product = product.filter(|(path, _)| !path.ends_with("tests.rs") && !path.ends_with("amqp/findings.rs"));
    let mut found: Vec<String> = product.flat_map(|(path, text)| code_of(path, text, &rust)).collect();
    found.extend(
        files("sql/src", "sql")
            .into_iter()
            .flat_map(|(path, text)| code_of(path, text, &sql)),
    );
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// `compare_exchange` is no exchange.
fn names_a_broker(line: &str) -> bool {
    let mut words = line
        .split(|c: char| c != '_' && !c.is_alphanumeric())
        .map(str::to_lowercase);
    words.any(|word| {
        ["amqp", "rabbit", "lapin", "ureq"]
            .iter()
            .any(|part| word.contains(part))
            || word.starts_with("exchange")
            || word.ends_with("_http")
    })
}

/// A file that no module names is not compiled: its tests run nowhere.
#[test]
fn each_file_of_tests_is_named_as_a_module() {
    let files = files("tests", "rs");
    for (path, _) in &files {
        let (directory, name) = path.rsplit_once('/').expect("a path below tests/");
        let name = name.trim_end_matches(".rs");
        if ["suite", "systems", "kind", "lib"].contains(&name) || directory.ends_with("/bin") {
            continue; // Cargo.toml names it
        }
        let parents = ["", "/suite", "/systems", "/kind", "/lib"].map(|file| format!("{directory}{file}.rs"));
        let declares = |line: &str| line.trim_start_matches("pub ") == format!("mod {name};");
        let mut parents = files.iter().filter(|(file, _)| parents.contains(file));
        assert!(
            parents.any(|(_, text)| code(text).any(|(_, line)| declares(line))),
            "no file has `mod {name};` for {path}"
        );
    }
}

/// pgrx would take a text for UTF-8, and would allocate an array without a bound.
#[test]
fn no_function_of_sql_takes_or_returns_text_or_arrays_of_pgrx() {
    let is_raw = |signature: &str| {
        let raw = [
            "&str",
            "&'static str",
            "String",
            ": Vec<i16>",
            ": Vec<i64>",
            ": Option<Vec<",
        ];
        raw.iter().any(|raw| signature.contains(raw))
    };
    assert_eq!(
        heads(
            "#[pg_extern]\nfn f(\n    key: &str,\n) -> i64 {\n",
            "#[pg_extern",
            "{\n",
            is_raw
        )
        .len(),
        1
    );
    for (path, text) in files("src", "rs") {
        assert_eq!(heads(&text, "#[pg_extern", "{\n", is_raw), [""; 0], "{path}");
    }
}

/// C functions are left out: a SET clause would cost each call, and their statements qualify every name.
#[test]
fn every_definer_and_plpgsql_function_pins_its_search_path() {
    let is_unpinned = |head: &str| {
        let is_definer = head.contains("security definer") && !head.contains("language c");
        (is_definer || head.contains("language plpgsql")) && !head.contains("set search_path = pg_catalog, pg_temp")
    };
    let violation = "create function f() returns int language plpgsql as $$ … $$;";
    assert_eq!(heads(violation, "create function ", "$$", is_unpinned).len(), 1);
    for (path, text) in files("sql/src", "sql") {
        assert_eq!(heads(&text, "create function ", "$$", is_unpinned), [""; 0], "{path}");
    }
}

/// Each part of a text from `begin` to `end` that is bad.
fn heads<'a>(text: &'a str, begin: &str, end: &str, is_bad: impl Fn(&str) -> bool) -> Vec<&'a str> {
    let heads = text.split(begin).skip(1).filter_map(|rest| rest.split(end).next());
    heads.filter(|head| is_bad(head)).collect()
}

#[test]
fn the_scripts_are_what_make_sql_makes() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sql");
    fs::remove_dir_all(&directory).ok();
    fs::create_dir_all(&directory).expect("a directory");
    let made = Command::new(root().join("tests/support/build_sql.sh"))
        .arg(VERSION)
        .arg(&directory)
        .output()
        .expect("run build_sql.sh");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let scripts: Vec<_> = fs::read_dir(&directory).expect("the scripts").collect();
    assert!(!scripts.is_empty(), "no install script");
    for script in scripts {
        let path = script.expect("a script").path();
        let name = format!("sql/{}", path.file_name().expect("a name").display());
        assert!(
            read(&name) == fs::read_to_string(&path).expect("a script"),
            "{name} is stale: run `make sql`"
        );
    }
}

/// The install scripts of released versions, with their checksums (sha256sum). Databases have what they made, and
/// updates begin with that.
pub const RELEASED: &[(&str, &str)] = &[(
    "0.2.0",
    "55f0e512b9d71a0ef3352f4cfdecde9532c9af5a94fd4f57a62864ac552770b1",
)];

#[test]
fn the_script_of_a_released_version_never_changes() {
    let released: Vec<(String, String)> = RELEASED
        .iter()
        .map(|(version, sum)| (format!("sql/outbox--{version}.sql"), (*sum).to_owned()))
        .collect();
    let is_earlier = |path: &str| path.matches("--").count() == 1 && !path.ends_with(&format!("--{VERSION}.sql"));
    let mut scripts: Vec<(String, String)> = files("sql", "sql")
        .into_iter()
        .filter(|(path, _)| path.starts_with("sql/outbox--") && is_earlier(path))
        .map(|(path, _)| {
            let output = Command::new("sha256sum").arg(root().join(&path)).output();
            let printed = String::from_utf8(output.expect("sha256sum").stdout).expect("a checksum");
            (path, printed.split(' ').next().unwrap_or_default().to_owned())
        })
        .collect();
    scripts.sort();
    assert_eq!(scripts, released, "add the checksum of a new release to RELEASED");
}

#[test]
fn all_that_names_a_version_names_that_of_this_tree() {
    let series = VERSION.rsplit_once('.').expect("three numbers").0;
    for (path, part) in [
        (
            "src/lib.rs",
            format!("extension_sql_file!(\"../sql/outbox--{VERSION}.sql\""),
        ), // what cargo pgrx writes
        ("outbox.control", "default_version = '@CARGO_VERSION@'\n".to_owned()),
        ("SECURITY.md", format!("\n| {series} | in the latest release |\n")),
        ("SECURITY.md", format!(": v{VERSION}.")),
    ] {
        assert!(read(path).contains(&part), "{path} has no {part}");
    }
    let changelog = read("CHANGELOG.md");
    let mut sections = changelog.lines().filter_map(|line| line.strip_prefix("## ["));
    let newest = sections.next();
    assert!(
        newest.is_some_and(|heading| heading.starts_with(&format!("{VERSION}] - "))),
        "{newest:?}"
    );
    let numbers = |path: &str| -> Vec<u32> { path.split(['-', '.']).flat_map(str::parse).collect() };
    let scripts = files("sql", "sql").into_iter().map(|(path, _)| path);
    let installs = scripts.filter(|path| path.starts_with("sql/outbox--") && numbers(path).len() == 3);
    let newest = installs.max_by_key(|path| numbers(path)).expect("a script");
    assert_eq!(newest, format!("sql/outbox--{VERSION}.sql"));
    let meta: Value = serde_json::from_str(&read("META.json")).expect("META.json");
    let extension = &meta["provides"]["outbox"];
    assert_eq!(
        [&meta["version"], &extension["version"], &extension["file"]],
        [VERSION, VERSION, &newest]
    );
}

/// SQL and texts repeat some limits of the code.
#[test]
fn sql_and_texts_have_the_limits_of_the_code() {
    let limit = |path: &str, name: &str| {
        let text = read(path);
        let declared = text.split_once(&format!("const {name}: "));
        let value = declared.and_then(|(_, rest)| rest.split_once(';')?.0.split_once(" = "));
        let (_, value) = value.unwrap_or_else(|| panic!("{path} has no {name}"));
        value.replace('_', "")
    };
    let (short, partitions, event) = (SHORT_STRING_MAX, PartitionCount::MAX, EVENT_BYTES_MAX);
    let destinations = limit("src/shared/statistics.rs", "MAX_DESTINATIONS");
    let causes = limit("src/shared/error_groups.rs", "MAX_OF_DATABASE");
    let dead = limit("src/worker/maintenance.rs", "COUNT_ROWS_MAX");
    assert_eq!(dead, limit("crates/outboxctl/src/serve/snapshot.rs", "DEAD_CAP"));
    let (tables, capture) = ("sql/src/10_tables.sql", "sql/src/26_capture.sql");
    let (expiry, relay) = ("sql/src/32_expiry.sql", "sql/src/46_relay.sql");
    for (path, part) in [
        (tables, format!("octet_length(aggregate_id) <= {short})")),
        (tables, format!("octet_length(key) <= {short})")),
        (capture, format!("|| 'ForceDeleted') > {short} ")),
        (tables, format!("partition_count between 1 and {partitions})")),
        ("sql/src/12_identity.sql", format!("least(highest + 1, {partitions})")),
        ("sql/src/20_enqueue.sql", format!("not between 1 and {partitions} then")),
        (
            "sql/src/41_configure.sql",
            format!("not between 1 and {partitions} then"),
        ),
        (relay, format!("event_bytes_max constant integer := {event};")),
        (relay, format!("'{EXPIRED}'")),
        (expiry, format!("'{EXPIRED}'")),
        ("sql/src/50_views.sql", format!("outbox_dead limit {dead})")),
        ("sql/src/50_views.sql", format!(", {causes} causes at most")),
        ("crates/core/src/findings.rs", format!("those of {destinations}\"")),
        ("docs/sql-api.md", format!("beyond {destinations} destinations")),
    ] {
        assert!(read(path).contains(&part), "{path} has no {part}");
    }
}

fn is_store(path: &str) -> bool {
    STORES.iter().any(|store| path.starts_with(store))
}

fn is_above_pg(path: &str) -> bool {
    path.starts_with("src/") && !path.starts_with("src/pg/")
}

/// Whether the line has the whole word.
fn says(line: &str, word: &str) -> bool {
    let mut words = line.split(|c: char| c != '_' && !c.is_alphanumeric());
    words.any(|part| part == word)
}

/// The lines that are no comment, with their numbers.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    lines.filter(|(_, line)| !line.starts_with("//") && !line.starts_with("# "))
}

/// Path below the root, and text.
pub type File = (String, String);

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Every file below a directory whose name ends so.
pub fn files(directory: &str, extension: &str) -> Vec<File> {
    let (mut found, mut todo) = (Vec::new(), vec![root().join(directory)]);
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            todo.extend(entries.flatten().map(|entry| entry.path()));
        } else if path.extension().is_some_and(|end| end == extension) {
            let path = path.strip_prefix(root()).expect("below the root").display().to_string();
            found.push((path.clone(), read(&path)));
        }
    }
    assert!(!found.is_empty(), "{directory} has no .{extension}");
    found
}

pub fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub fn root() -> &'static Path {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests/ is in the root")
}
