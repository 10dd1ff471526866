//! The rules of the house that a test can keep. Each rule is a pure function over a file's text that returns its
//! complaints, a test that holds it against every file, and a test that shows it a violation. No server is needed. Two rules
//! have files of their own: tidy/circles.rs and tidy/words.rs.

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/words.rs"]
mod words;

use circles::circles;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

// ---- the rules, over the tree ---------------------------------------------------------------------------------------

#[test]
fn only_the_store_says_spi() {
    assert_no_complaints(&rust_files(), |path, text| match path {
        "src/pg/spi.rs" => Vec::new(),
        _ if STORES.iter().any(|store| path.starts_with(store)) || path.starts_with("tests/") => Vec::new(),
        _ => lines_that_say("Spi", text),
    });
}

#[test]
fn text_crosses_the_border_in_one_place() {
    assert_no_complaints(&rust_files(), |path, text| match path {
        "src/pg/text.rs" => Vec::new(),
        "src/pg/spi.rs" => raw_arguments(text),
        _ if path.starts_with("src/") => [raw_texts(text), raw_arguments(text)].concat(),
        _ => Vec::new(),
    });
}

#[test]
fn the_install_script_is_ascii() {
    // The server takes it for text of the database's encoding, whatever that is.
    assert_no_complaints(&files("sql", "sql"), |_, text| complain(text, |line| !line.is_ascii()));
}

#[test]
fn only_src_pg_is_unsafe_or_names_the_server() {
    assert_no_complaints(&rust_files(), |path, text| match path {
        _ if !path.starts_with("src/") || path.starts_with("src/pg/") => Vec::new(),
        _ => unsafe_lines(path, text),
    });
}

#[test]
fn a_folder_of_src_names_only_what_its_process_has() {
    assert_no_complaints(&files("src", "rs"), strange_names);
}

#[test]
fn no_exemption_outlives_its_line() {
    for Exemption { path, line, .. } in EXEMPTIONS {
        let used = read(path).lines().any(|l| l.contains(line) && is_code(l));
        assert!(used, "{path} has no {line:?} any more: remove the exemption");
    }
}

#[test]
fn nothing_that_is_dropped_calls_the_server_while_an_error_unwinds() {
    let sources = files("src", "rs");
    assert_no_complaints(&sources, risky_drops);
    for (path, dropped, _) in DROPS {
        assert!(read(path).contains(dropped), "{path} has no {dropped:?} any more");
    }
}

#[test]
fn no_crate_below_crates_depends_on_pgrx() {
    let manifests = files("crates", "toml");
    assert!(manifests.len() >= 2, "no manifests found");
    assert_no_complaints(&manifests, |_, text| lines_that_say("pgrx", text));
}

#[test]
fn the_core_has_no_clock_no_dice_no_threads_and_no_io() {
    assert_no_complaints(&files("crates/core/src", "rs"), |_, text| impure_lines(text));
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let manifests = files("crates", "toml").into_iter();
    let crates = manifests
        .map(|(path, _)| path.replace("Cargo.toml", "src"))
        .chain(["src".to_owned()]);
    for directory in crates {
        let sources = files(&directory, "rs").into_iter();
        let sources: Vec<File> = sources
            .map(|(path, text)| (path[directory.len() + 1..].to_owned(), text))
            .collect();
        let circles = circles(&sources);
        assert!(circles.is_empty(), "{directory}: {}", circles.join("\n"));
    }
}

#[test]
fn only_one_file_of_the_tests_lets_time_pass() {
    let files: Vec<_> = rust_files()
        .into_iter()
        .filter(|(path, _)| path.starts_with("tests/") || path.contains("/tests/"))
        .filter(|(path, _)| !["tests/support/wait.rs", "tests/tidy.rs"].contains(&path.as_str()))
        .collect();
    assert_no_complaints(&files, |_, text| sleeping_lines(text));
}

#[test]
fn every_file_says_first_what_it_is_for() {
    let mut all = rust_files();
    all.extend(files("sql", "sql"));
    all.extend(files("pg_test/sql", "sql"));
    all.extend(files("tests", "sh"));
    all.extend(files("packaging", "sh"));
    all.push((".ci/run".into(), read(".ci/run")));
    assert_no_complaints(&all, missing_header);
}

#[test]
fn the_install_script_is_what_make_sql_makes() {
    let made = Command::new(root().join("tests/support/build_sql.sh"))
        .output()
        .expect("run build_sql.sh");
    assert!(made.status.success(), "build_sql.sh: {}", made.status);
    let made = String::from_utf8(made.stdout).expect("SQL in UTF-8");
    let script = format!("sql/outbox--{}.sql", version());
    if let Some(line) = first_difference(&made, &read(&script)) {
        panic!("{script} is stale from line {line} on: run `make sql`");
    }
}

/// Databases have what these scripts made, and an update begins with that.
#[test]
fn the_scripts_of_released_versions_never_change() {
    let released = [(
        "sql/outbox--0.1.0.sql",
        "9b368204373d63a6b752c34e238ae483c34cffd726241f008d98d3736cfedd91",
    )];
    for (script, sum) in released {
        let output = Command::new("sha256sum").arg(root().join(script)).output();
        let output = String::from_utf8(output.expect("sha256sum").stdout).expect("ASCII");
        assert!(output.starts_with(sum), "{script} has changed");
    }
}

#[test]
fn the_library_carries_the_install_script_of_its_version() {
    let wanted = format!("extension_sql_file!(\"../sql/outbox--{}.sql\"", version());
    assert!(
        read("src/lib.rs").contains(&wanted),
        "src/lib.rs: {wanted} is what cargo pgrx writes"
    );
}

#[test]
fn pgxn_gets_the_version_of_this_tree() {
    let meta = read("META.json");
    let versions = meta.matches(&format!("\"version\": \"{}\"", version())).count();
    assert_eq!(
        versions, 2,
        "META.json: the versions of the distribution and of the extension"
    );
    assert!(meta.contains(&format!("\"file\": \"sql/outbox--{}.sql\"", version())));
}

#[test]
fn every_setting_stands_in_the_docs() {
    let complaints = undocumented_settings(&read("src/config.rs"), &read("docs/settings.md"));
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn every_sql_object_has_a_comment() {
    assert_no_complaints(&files("sql/src", "sql"), |_, text| uncommented_objects(text));
}

#[test]
fn every_definer_and_plpgsql_function_pins_its_search_path() {
    assert_no_complaints(&files("sql/src", "sql"), |_, text| unpinned_functions(text));
}

#[test]
fn no_line_of_sql_is_wider_than_a_screen() {
    assert_no_complaints(&files("sql", "sql"), |_, text| too_wide(text));
}

#[test]
fn no_file_uses_a_word_that_the_glossary_retired() {
    assert_no_complaints(&written_files(), |_, text| words::retired(text));
}

#[test]
fn the_glossary_lists_as_refused_only_words_that_are() {
    let glossary = read("docs/glossary.md");
    let table = glossary.split("## Refused words").nth(1).expect("the heading");
    let table = table.split("\n## ").next().unwrap_or_default();
    let rows = table.lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(|row| row.split('|').nth(1)).skip(1);
    let words: Vec<&str> = cells.flat_map(|cell| cell.split(',')).map(str::trim).collect();
    assert!(words.len() > 20, "{words:?}");
    for word in words {
        assert_eq!(words::retired(word).len(), 1, "{word:?} is not refused");
    }
}

#[test]
fn no_sentence_is_too_long_to_be_read_once() {
    assert_no_complaints(&written_files(), words::long_sentences);
}

#[test]
fn the_lock_file_is_committed() {
    assert!(read("Cargo.lock").contains("name = \"outbox\""), "Cargo.lock lacks us");
    assert!(!read(".gitignore").contains("Cargo.lock"), "Cargo.lock is ignored");
}

#[test]
fn the_map_of_the_architecture_is_short() {
    const BYTES_MAX: usize = 8192;
    let bytes = read("ARCHITECTURE.md").len();
    assert!(
        bytes <= BYTES_MAX,
        "ARCHITECTURE.md has {bytes} bytes, more than {BYTES_MAX}: move reasons to docs/decisions"
    );
}

#[test]
fn no_file_is_longer_than_a_reader_can_hold() {
    let mut all = rust_files();
    all.extend(files("sql/src", "sql"));
    all.extend(files("tests", "sh"));
    assert_no_complaints(&all, |_, text| too_long(text));
}

// ---- the rules, over a text -----------------------------------------------------------------------------------------

/// Where SQL is: what a session says, what a worker says, and what both do.
const STORES: [&str; 3] = ["src/session/store/", "src/store/", "src/worker/store/"];

/// What the files of a folder never name. Sessions and workers meet in shared memory alone; what both run names neither.
const STRANGERS: [(&str, &[&str]); 5] = [
    ("src/session/", &["worker"]),
    ("src/worker/", &["session"]),
    ("src/store/", &["session", "worker"]),
    ("src/shared/", &["session", "store", "worker"]),
    (
        "src/pg/",
        &["config", "error", "limits", "session", "shared", "store", "worker"],
    ),
];

fn strange_names(path: &str, text: &str) -> Vec<String> {
    let folder = STRANGERS.iter().find(|(folder, _)| path.starts_with(folder));
    let strangers = folder.map_or(&[][..], |(_, strangers)| strangers);
    complain(text, |line| {
        let names = |stranger: &&str| {
            says(&format!("crate::{stranger}"), line) || line.contains("crate::{") && says(stranger, line)
        };
        strangers.iter().any(names)
    })
}

/// A line outside src/pg that may be unsafe or name pg_sys.
struct Exemption {
    path: &'static str,
    line: &'static str,
    /// Printed nowhere: it is for the next author of an exemption.
    _reason: &'static str,
}

const fn exempt(path: &'static str, line: &'static str, _reason: &'static str) -> Exemption {
    Exemption { path, line, _reason }
}

const EXEMPTIONS: &[Exemption] = &[
    exempt(
        "src/lib.rs",
        "use pgrx::{pg_guard, pg_sys}",
        "entry points that the server calls",
    ),
    exempt(
        "src/lib.rs",
        "#[unsafe(no_mangle)]",
        "the server finds a worker by its symbol",
    ),
    exempt(
        "src/lib.rs",
        "argument: pg_sys::Datum",
        "the signature of a worker's entry point",
    ),
    exempt(
        "src/lib.rs",
        "unsafe { outbox_transport::prepare_process() }",
        "must run before any thread",
    ),
    exempt(
        "src/session/api.rs",
        "unsafe { Args::new(fcinfo) }",
        "only who knows the declaration can promise the types",
    ),
    exempt(
        "src/session/api.rs",
        "fcinfo: pg_sys::FunctionCallInfo",
        "handed on, to know the function's schema",
    ),
    exempt(
        "src/shared/launcher.rs",
        "_arg: pgrx::pg_sys::Datum",
        "the signature of an exit callback",
    ),
    exempt("src/shared/lifecycle.rs", "_arg: pgrx::pg_sys::Datum", "the same"),
    exempt("src/worker/process.rs", "_arg: pgrx::pg_sys::Datum", "the same"),
    exempt(
        "src/config.rs",
        "pg_sys::GucStringCheckHook",
        "the type of a hook that check_hook! made",
    ),
    exempt(
        "src/config.rs",
        "unsafe {",
        "pgrx has no safe way to define a setting with a check",
    ),
    exempt(
        "src/error.rs",
        "use pgrx::pg_sys::panic::ErrorReport",
        "pgrx keeps its safe report there",
    ),
];

fn unsafe_lines(path: &str, text: &str) -> Vec<String> {
    let exempted = |line: &&String| {
        let mut exemptions = EXEMPTIONS.iter();
        // Only who writes the struct can promise that it may lie in shared memory.
        let promises = path.starts_with("src/shared/") && line.contains("unsafe impl Shareable for ");
        promises || exemptions.any(|exemption| exemption.path == path && line.contains(exemption.line))
    };
    let mut lines = lines_that_say("unsafe", text);
    lines.extend(lines_that_say("pg_sys", text));
    lines.into_iter().filter(|line| !exempted(&line)).collect()
}

/// Each Drop in src/, and why it is safe. An ERROR of the server unwinds as a panic; one more on the way aborts the process,
/// and with it every session.
const DROPS: &[(&str, &str, &str)] = &[
    (
        "src/shared/statistics.rs",
        "impl Drop for DestinationStats",
        "shared memory alone: atomics, and a turn that raises nothing",
    ),
    (
        "src/pg/bgworker.rs",
        "impl Drop for Handle",
        "frees memory, but not while an error unwinds",
    ),
    (
        "src/pg/foreign.rs",
        "impl Drop for Left",
        "writes variables of the server, and calls nothing",
    ),
    (
        "src/store/statement.rs",
        "impl Drop for SavedStatement",
        "frees a plan, but not while an error unwinds",
    ),
];

/// Types of pgrx that call the server as they are dropped. SPI sessions do so too, and are left: their end frees memory of
/// their own and cannot raise.
const RISKY: [&str; 6] = [
    "OwnedPreparedStatement",
    "find_cursor",
    "PgRelation",
    "PgLwLock",
    "PgSpinLock",
    "PgVarlena",
];

fn risky_drops(path: &str, text: &str) -> Vec<String> {
    let is_known = |line: &str| {
        DROPS
            .iter()
            .any(|(of, dropped, _)| *of == path && line.contains(dropped))
    };
    complain(text, |line| {
        let is_drop = says("Drop", line) && says("impl", line) && says("for", line);
        let is_kept = path.starts_with("src/session/store/") && says("OwnedPreparedStatement", line); // in Statements: never freed
        let is_holder = ["src/store/statement.rs", "src/pg/spi.rs"].contains(&path); // the second hands them to the first
        let is_risky = !is_holder && !is_kept && RISKY.iter().any(|word| says(word, line));
        is_drop && !is_known(line) || is_risky && !line.contains("use pgrx::")
    })
}

/// Lines by which text of the server would reach Rust, or leave it, without being converted: pgrx's own SPI, which its
/// prelude brings too, and C strings taken for UTF-8.
fn raw_texts(text: &str) -> Vec<String> {
    complain(text, |line| {
        let of_spi = line.contains("pgrx::spi") && !line.contains("pgrx::spi::quote_identifier;");
        let prelude = line.contains("pgrx::prelude::*") && text.contains("Spi");
        of_spi
            || prelude
            || ["to_string_lossy", "CString::new("]
                .iter()
                .any(|way| line.contains(way))
    })
}

/// Arguments and results of functions of SQL that pgrx would take for UTF-8, or would allocate without a bound.
fn raw_arguments(text: &str) -> Vec<String> {
    let mut in_signature = false;
    complain(text, |line| {
        in_signature |= line.contains("#[pg_extern");
        let types = [
            "&str",
            "&'static str",
            "String",
            ": Vec<i16>",
            ": Vec<i64>",
            ": Option<Vec<",
        ];
        let is_raw = in_signature && types.iter().any(|raw| line.contains(raw));
        in_signature &= !line.ends_with('{');
        is_raw
    })
}

/// Lines of code with the whole word `word`.
fn lines_that_say(word: &str, text: &str) -> Vec<String> {
    complain(text, |line| says(word, line))
}

fn impure_lines(text: &str) -> Vec<String> {
    const WORDS: [&str; 5] = ["Instant", "SystemTime", "rand", "thread", "process"];
    const PATHS: [&str; 4] = ["std::io", "std::fs", "std::net", "std::env"];
    complain(text, |line| {
        WORDS.iter().any(|word| says(word, line)) || PATHS.iter().any(|path| line.contains(path))
    })
}

fn sleeping_lines(text: &str) -> Vec<String> {
    complain(text, |line| line.contains("sleep"))
}

fn missing_header(path: &str, text: &str) -> Vec<String> {
    let mut lines = text.lines();
    let mut first = lines.next().unwrap_or_default();
    if first.starts_with("#!/") {
        first = lines.next().unwrap_or_default();
    }
    let mark = match path.rsplit_once('.') {
        Some((_, "rs")) => "//! ",
        Some((_, "sql")) => "-- ",
        _ => "# ",
    };
    match first.strip_prefix(mark) {
        Some(said) if !said.trim().is_empty() => Vec::new(),
        _ => vec![format!("does not open with {mark:?} and what it is for")],
    }
}

fn undocumented_settings(config: &str, docs: &str) -> Vec<String> {
    let names = config.split("c\"outbox.").skip(1);
    let names: BTreeSet<&str> = names.filter_map(|rest| rest.split('"').next()).collect();
    assert!(names.len() > 10, "the settings are not found: {names:?}");
    names
        .into_iter()
        .map(|name| format!("outbox.{name}"))
        .filter(|name| !docs.lines().any(|line| says(name, line)))
        .map(|name| format!("{name} does not stand in docs/settings.md"))
        .collect()
}

fn uncommented_objects(sql: &str) -> Vec<String> {
    const KINDS: [&str; 6] = ["schema", "table", "function", "view", "type", "trigger"];
    let named = |line: &str, verb: &str| {
        let (kind, rest) = line.strip_prefix(verb)?.split_once(' ')?;
        let rest = rest.trim_start_matches("@extschema@.");
        let name = rest
            .split(|c: char| !"_.".contains(c) && !c.is_ascii_alphanumeric())
            .next()?;
        KINDS.contains(&kind).then(|| format!("{kind} {name}"))
    };
    let commented: BTreeSet<String> = sql.lines().filter_map(|line| named(line, "comment on ")).collect();
    let created = sql
        .lines()
        .filter_map(|line| named(&line.replace("or replace ", ""), "create "));
    created
        .filter(|object| !commented.contains(object))
        .map(|object| format!("{object} has no comment"))
        .collect()
}

/// C functions are left out: a SET clause would cost each call, and their statements qualify every name (see store.rs).
fn unpinned_functions(sql: &str) -> Vec<String> {
    let functions = sql.split("create function ").skip(1);
    functions
        .filter_map(|rest| {
            let head = &rest[..rest.find("$$").or(rest.find(';')).unwrap_or(rest.len())];
            let must = head.contains("language plpgsql")
                || (head.contains("security definer") && !head.contains("language c"));
            let pinned = head.contains("set search_path = pg_catalog, pg_temp");
            let name = rest.split('(').next().unwrap_or_default();
            (must && !pinned).then(|| format!("{name} does not pin search_path"))
        })
        .collect()
}

fn too_long(text: &str) -> Vec<String> {
    const LINES_MAX: usize = 850;
    match text.lines().count() {
        0..=LINES_MAX => Vec::new(),
        lines => vec![format!("{lines} lines, more than {LINES_MAX}")],
    }
}

fn too_wide(text: &str) -> Vec<String> {
    const COLUMNS_MAX: usize = 120;
    let lines = text.lines().enumerate();
    lines
        .map(|(index, line)| (index + 1, line.chars().count()))
        .filter(|(_, columns)| *columns > COLUMNS_MAX)
        .map(|(number, columns)| format!("{number}: {columns} columns, more than {COLUMNS_MAX}"))
        .collect()
}

fn first_difference(a: &str, b: &str) -> Option<usize> {
    if a == b {
        return None;
    }
    let same = a.lines().zip(b.lines()).take_while(|(a, b)| a == b).count();
    Some(same + 1)
}

// ---- each rule sees a violation -------------------------------------------------------------------------------------

#[test]
fn a_word_is_found_whole_and_in_code_only() {
    assert_eq!(lines_that_say("Spi", "use pgrx::Spi;"), ["1: use pgrx::Spi;"]);
    assert!(lines_that_say("Spi", "// Spi\nSpiResult; MySpi; spi").is_empty());
    assert!(lines_that_say("pgrx", "# no pgrx here\nserde = \"1\"").is_empty());
    assert_eq!(lines_that_say("pgrx", "pgrx = \"=0.18.1\"").len(), 1);
}

#[test]
fn text_that_is_not_converted_is_found() {
    assert_eq!(raw_texts("use pgrx::spi::{Spi, quote_identifier};").len(), 1);
    assert!(raw_texts("use pgrx::spi::quote_identifier;").is_empty());
    assert_eq!(
        raw_texts("use pgrx::prelude::*;\nSpi::connect(f)"),
        ["1: use pgrx::prelude::*;"]
    );
    assert!(raw_texts("use pgrx::prelude::*;").is_empty());
    assert_eq!(raw_texts("CStr::from_ptr(p).to_string_lossy()").len(), 1);
    let function = "#[pg_extern(sql = false)]\nfn f(key: &str) -> bool {\n    g(\"\".to_string(), String::new())\n}";
    assert_eq!(raw_arguments(function), ["2: fn f(key: &str) -> bool {"]);
    let function = "#[pg_extern(sql = false)]\nfn f(\n    seqs: Vec<i64>,\n) -> Option<String> {\n}";
    assert_eq!(raw_arguments(function).len(), 2);
}

#[test]
fn a_name_of_another_process_is_found() {
    let path = "src/session/effects.rs";
    let found = ["use crate::worker::launcher;", "use crate::{config, worker};"];
    for line in found {
        assert_eq!(strange_names(path, line).len(), 1, "{line}");
        assert!(strange_names("src/lib.rs", line).is_empty());
    }
    assert!(strange_names(path, "use crate::shared::workers;\n// as crate::worker does").is_empty());
}

#[test]
fn an_unsafe_line_is_found_unless_exempted_for_that_file() {
    assert_eq!(
        unsafe_lines("src/session/effects.rs", "a();\nunsafe { b() }"),
        ["2: unsafe { b() }"]
    );
    assert_eq!(unsafe_lines("src/session/effects.rs", "use pgrx::pg_sys;").len(), 1);
    let exempted = "unsafe impl Shareable for State {}";
    assert!(unsafe_lines("src/shared/databases.rs", exempted).is_empty());
    assert_eq!(unsafe_lines("src/session/effects.rs", exempted).len(), 1);
}

#[test]
fn a_drop_that_may_call_the_server_is_found() {
    assert_eq!(risky_drops("src/session/effects.rs", "impl Drop for Table {").len(), 1);
    assert_eq!(
        risky_drops("src/session/effects.rs", "impl<T> Drop for Table<T> {").len(),
        1
    );
    assert!(risky_drops("src/store/statement.rs", "impl Drop for SavedStatement {").is_empty());
    assert_eq!(
        risky_drops("src/session/effects.rs", "impl Drop for SavedStatement {").len(),
        1
    );
    assert_eq!(
        risky_drops("src/store/body.rs", "let c = client.find_cursor(n)?;").len(),
        1
    );
    assert_eq!(
        risky_drops("src/store/body.rs", "    statement: OwnedPreparedStatement,").len(),
        1
    );
}

#[test]
fn a_clock_dice_a_thread_and_io_are_found() {
    for line in [
        "let now = Instant::now();",
        "use std::time::SystemTime;",
        "rand::random()",
        "std::thread::spawn(f)",
        "use std::io::Read;",
        "std::fs::read(p)",
    ] {
        assert_eq!(impure_lines(line).len(), 1, "{line}");
    }
    assert!(impure_lines("// on the main thread\nlet operand = 1;").is_empty());
}

#[test]
fn every_way_to_let_time_pass_is_found() {
    for line in ["thread::sleep(d);", "tokio::time::sleep_until(t)", "select pg_sleep(1)"] {
        assert_eq!(sleeping_lines(line).len(), 1, "{line}");
    }
    assert!(sleeping_lines("// nothing else sleeps\nwait_until();").is_empty());
}

#[test]
fn a_file_without_a_header_is_found() {
    for (path, text) in [
        ("a.rs", "use b;"),
        ("a.rs", "//!\n"),
        ("a.sql", "select 1;"),
        ("a.sh", "#!/bin/sh\nset -eu"),
    ] {
        assert_eq!(missing_header(path, text).len(), 1, "{path} {text:?}");
    }
    for (path, text) in [
        ("a.rs", "//! What?"),
        ("a.sql", "-- What?"),
        ("a.sh", "#!/bin/sh\n# What?"),
    ] {
        assert!(missing_header(path, text).is_empty(), "{path} {text:?}");
    }
}

#[test]
fn a_stale_install_script_is_found() {
    assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(2));
    assert_eq!(first_difference("a\nb\n", "a\n"), Some(2));
    assert_eq!(first_difference("a\n", "a\n"), None);
}

#[test]
fn a_setting_without_docs_is_found() {
    let config: String = (0..11).map(|n| format!("c\"outbox.s{n}\",\n")).collect();
    let docs: String = (1..12).map(|n| format!("`outbox.s{n}`\n")).collect();
    // s1 is not excused by s10.
    assert_eq!(
        undocumented_settings(&config, &docs.replace("`outbox.s1`", "")),
        [
            "outbox.s0 does not stand in docs/settings.md",
            "outbox.s1 does not stand in docs/settings.md"
        ]
    );
}

#[test]
fn an_object_without_a_comment_is_found() {
    let created = "create table @extschema@.t (\ncreate function @extschema@.f(a int)\ncreate trigger g before\n\
                   create function outbox_internal.f(a int)";
    assert_eq!(
        uncommented_objects(created),
        [
            "table t has no comment",
            "function f has no comment",
            "trigger g has no comment",
            "function outbox_internal.f has no comment"
        ]
    );
    let commented = "comment on table @extschema@.t is\ncomment on function @extschema@.f(int) is\n\
                     comment on trigger g on\ncomment on function outbox_internal.f(int) is";
    assert!(uncommented_objects(&format!("{created}\n{commented}")).is_empty());
}

#[test]
fn a_function_without_a_search_path_is_found() {
    let pinned = "set search_path = pg_catalog, pg_temp";
    let function = |name: &str, clauses: &str| format!("create function {name}() returns int {clauses} as $$ 1 $$;\n");
    let sql = [
        function("a", "language plpgsql"),
        function("b", "language sql security definer"),
        function("c", &format!("language plpgsql {pinned}")),
        function("d", "language sql"),
        "create function e() returns int language c security definer as 'x', 'y';\n".into(),
        // The clause of the next function does not excuse this one.
        function("f", "language plpgsql"),
        function("g", &format!("language sql security definer {pinned}")),
    ];
    let found = unpinned_functions(&sql.concat());
    let expected = ["a", "b", "f"].map(|name| format!("{name} does not pin search_path"));
    assert_eq!(found, expected);
}

#[test]
fn a_wide_line_is_found() {
    assert!(too_wide(&"x".repeat(120)).is_empty());
    let wide = format!("a\n-- {}", "x".repeat(118));
    assert_eq!(too_wide(&wide), ["2: 121 columns, more than 120"]);
}

#[test]
fn a_long_file_is_found() {
    assert!(too_long(&"x\n".repeat(850)).is_empty());
    assert_eq!(too_long(&"x\n".repeat(851)), ["851 lines, more than 850"]);
}

// ---- reading the tree -----------------------------------------------------------------------------------------------

/// Path below the root, and text.
type File = (String, String);

fn assert_no_complaints(files: &[File], rule: impl Fn(&str, &str) -> Vec<String>) {
    assert!(!files.is_empty(), "no files found: the rule holds for nothing");
    let complaints: Vec<String> = files
        .iter()
        .flat_map(|(path, text)| rule(path, text).into_iter().map(move |said| format!("{path}: {said}")))
        .collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

fn complain(text: &str, mut bad: impl FnMut(&str) -> bool) -> Vec<String> {
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| is_code(line) && bad(line))
        .map(|(index, line)| format!("{}: {}", index + 1, line.trim()))
        .collect()
}

fn is_code(line: &str) -> bool {
    let line = line.trim_start();
    !["//", "# "].iter().any(|comment| line.starts_with(comment))
}

fn says(word: &str, line: &str) -> bool {
    let part_of_word = |c: Option<char>| c.is_some_and(|c| c == '_' || c.is_alphanumeric());
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        !part_of_word(before.chars().next_back()) && !part_of_word(after.chars().next())
    })
}

/// Names of files that people write end so. Snapshots and expected output are made from these.
const WRITTEN: [&str; 14] = [
    "c", "css", "java", "js", "json", "md", "php", "py", "rs", "sh", "sql", "toml", "txt", "yml",
];

/// All that is written in the words of docs/glossary.md: prose, code, SQL and scripts.
fn written_files() -> Vec<File> {
    let roots = [
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "README.md",
        "SECURITY.md",
        ".ci/run",
        "Cargo.toml",
        "Makefile",
        "outbox.control",
    ]
    .map(|path| (path.to_owned(), read(path)));
    let written = |directory| WRITTEN.iter().flat_map(move |extension| files(directory, extension));
    let below = [
        "src",
        "crates",
        "tests",
        "sql/src",
        "pg_test/sql",
        "docs",
        "contrib",
        "examples",
        "packaging",
    ];
    let all = roots.into_iter().chain(below.into_iter().flat_map(written));
    all.filter(|(path, _)| !words::is_exempt(path)).collect()
}

fn rust_files() -> Vec<File> {
    ["src", "crates", "tests"]
        .iter()
        .flat_map(|directory| files(directory, "rs"))
        .collect()
}

/// Every file below `directory` whose name ends so, in order of path.
fn files(directory: &str, extension: &str) -> Vec<File> {
    let mut found = Vec::new();
    let mut todo = vec![root().join(directory)];
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            let entries = fs::read_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            todo.extend(entries.flatten().map(|entry| entry.path()));
        } else if path.extension().is_some_and(|e| e == extension) {
            let relative = path.strip_prefix(root()).expect("below the root");
            let relative = relative.to_str().expect("a path in UTF-8").to_owned();
            found.push((relative.clone(), read(&relative)));
        }
    }
    found.sort_unstable();
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests/ is in the root").to_path_buf()
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
