//! Checks docs/features.md without a server. Each link of the documentation leads to a file and a heading that exist.
//! Each test named in the table of features exists. Each feature that is not marked as missing names a test.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const TABLE: &str = "docs/features.md";

#[test]
fn every_link_of_the_documentation_has_a_target() {
    let mut complaints = Vec::new();
    for path in documents() {
        complaints.extend(dead_links(&path, &read(&path)));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn every_feature_names_its_use_its_page_and_its_tests_or_is_marked_as_missing() {
    let rows = features(&read(TABLE));
    assert!(rows.len() > 40, "{} rows", rows.len());
    let complaints: Vec<String> = rows.iter().flat_map(|row| incomplete(row)).collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn every_test_that_a_feature_names_is_a_test() {
    let named = features(&read(TABLE))
        .into_iter()
        .flatten()
        .flat_map(|cell| links(&cell));
    let complaints: Vec<String> = named
        .filter(|(_, target)| target.ends_with(".rs"))
        .filter_map(|(text, target)| {
            let name = text.trim_matches('`');
            let file = resolve(Path::new(TABLE), &target);
            let source = fs::read_to_string(&file).unwrap_or_default();
            (!is_test(name, &source)).then(|| format!("{} has no test {name}", file.display()))
        })
        .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// A line such as "- order: `a`, `b`" names a test file, or the directory beside it or a crate, and tests in it.
#[test]
fn every_test_that_a_guarantee_names_is_a_test() {
    let mut sources = Vec::new();
    for dir in ["tests", "crates"] {
        collect_sources(&root().join(dir), &mut sources);
    }
    let named = proofs(&read("docs/guarantees.md"));
    assert!(named.len() > 150, "{} tests", named.len());
    let complaints: Vec<String> = named
        .into_iter()
        .filter(|(group, test)| !(sources.iter()).any(|(path, source)| is_of(path, group) && is_test(test, source)))
        .map(|(group, test)| format!("{group} has no test {test}"))
        .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn every_decision_names_what_decided_it_by_tests_that_exist() {
    let mut sources = Vec::new();
    for dir in ["tests", "crates"] {
        collect_sources(&root().join(dir), &mut sources);
    }
    let exists = |test: &str| {
        let (plain, generic) = (format!("fn {test}("), format!("fn {test}<"));
        (sources.iter()).any(|(_, source)| source.contains(&plain) || source.contains(&generic))
    };
    let pages = documents().into_iter();
    let pages: Vec<String> = pages.filter(|page| page.starts_with("docs/decisions/")).collect();
    assert!(pages.len() > 11, "{pages:?}");
    let complaints: Vec<String> = (pages.iter())
        .flat_map(|page| {
            undecided(&read(page), exists)
                .into_iter()
                .map(move |said| format!("{page}: {said}"))
        })
        .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn the_checks_find_their_violations() {
    let decisions = "# Page\n\n## A\n\nDecided by a rule: `a_b_c_d_e`.\n\n## B\n\nText.\n\n## C\n\nDecided by `a_b`.\n";
    assert!(undecided(&decisions.replace("Text.", "Decided by that."), |_| true).is_empty());
    assert_eq!(
        undecided(decisions, |_| false),
        ["A: no test a_b_c_d_e", "B: no \"Decided by\""]
    );
    assert_eq!(
        proofs("text `x`\n- order: `a`,\n  `b`\n- no test: `c`\n\n`d`"),
        [("order".to_owned(), "a".to_owned()), ("order".into(), "b".into())]
    );
    let path = |path: &str| root().join(path);
    assert!(is_of(&path("tests/order.rs"), "order") && is_of(&path("tests/limits/rate.rs"), "limits"));
    assert!(is_of(&path("crates/core/src/budget.rs"), "core") && !is_of(&path("tests/order.rs"), "tests"));
    let dead = |link: &str| dead_links("docs/features.md", &format!("a [link]({link})")).len();
    assert_eq!(
        [
            dead("settings.md"),
            dead("settings.md#outboxurl"),
            dead("../README.md#install")
        ],
        [0, 0, 0]
    );
    assert_eq!(
        [dead("nowhere.md"), dead("settings.md#nowhere"), dead("#nowhere")],
        [1, 1, 1]
    );
    assert_eq!(slug("outbox_publish → bigint"), "outbox_publish--bigint");
    assert_eq!(
        slug("What each line of `outbox_health` means"),
        "what-each-line-of-outbox_health-means"
    );
    assert!(is_test("a", "#[test]\nfn a() {") && !is_test("a", "fn a() {") && !is_test("a", "#[test]\nfn ab() {"));
    assert!(is_test("a", "pub fn a(host: Host) {") && !is_test("a", "pub fn a() {"));
    let row = |cells: &str| incomplete(&features(&format!("| {cells} |"))[0]).len();
    assert_eq!(row("a | b | `c` | [d](d.md) | [`t`](../tests/t.rs)"), 0);
    assert_eq!(row("a | b | **not yet** | – | –"), 0);
    assert_eq!(row("a | b | `c` | [d](d.md) | –"), 1);
    assert_eq!(row("a | b | `c` | – | [`t`](../tests/t.rs)"), 1);
    assert_eq!(row("a | b | `c`"), 1);
}

/// Complaints about the entries of a page of docs/decisions. A name in backquotes with four underscores is of a test.
fn undecided(page: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut complaints = Vec::new();
    for entry in page.split("\n## ").skip(1) {
        let (heading, text) = entry.split_once('\n').unwrap_or((entry, ""));
        let Some((_, decided)) = text.split_once("\nDecided by ") else {
            complaints.push(format!("{heading}: no \"Decided by\""));
            continue;
        };
        let named = decided.split('`').skip(1).step_by(2);
        let tests = named.filter(|name| name.matches('_').count() >= 4);
        let missing = tests.filter(|test| !exists(test));
        complaints.extend(missing.map(|test| format!("{heading}: no test {test}")));
    }
    complaints
}

/// The tests that the lists name, each with the file or crate that its list begins with.
fn proofs(text: &str) -> Vec<(String, String)> {
    let mut named = Vec::new();
    let mut group: Option<String> = None;
    for line in text.lines() {
        if !line.starts_with("  ") {
            let begin = line.strip_prefix("- ").and_then(|rest| rest.split_once(": `"));
            let is_word = |word: &str| word.chars().all(|c| c.is_ascii_lowercase() || c == '_');
            group = begin.map(|(word, _)| word.to_owned()).filter(|word| is_word(word));
        }
        if let Some(group) = &group {
            let quoted = line.split('`').skip(1).step_by(2);
            let whole = quoted.filter(|test| !test.starts_with('_')); // otherwise it is the common end of several names
            named.extend(whole.map(|test| (group.clone(), test.to_owned())));
        }
    }
    named
}

fn is_of(path: &Path, group: &str) -> bool {
    let path = path.strip_prefix(root()).unwrap_or(path);
    let inner = path.components().skip(1).map(|part| part.as_os_str().to_string_lossy());
    inner
        .into_iter()
        .any(|part| part.strip_suffix(".rs").unwrap_or(&part) == group)
}

fn collect_sources(dir: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect_sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("a source");
            found.push((path, source));
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn documents() -> Vec<String> {
    let mut documents = vec![
        "README.md".to_owned(),
        "CONTRIBUTING.md".into(),
        "ARCHITECTURE.md".into(),
    ];
    for dir in ["docs", "docs/decisions", "docs/migrating"] {
        for entry in fs::read_dir(root().join(dir)).expect(dir) {
            let name = entry.expect(dir).file_name().into_string().expect("UTF-8");
            if name.ends_with(".md") {
                documents.push(format!("{dir}/{name}"));
            }
        }
    }
    assert!(documents.len() > 15, "{documents:?}");
    documents
}

/// The rows of the table, each as its cells.
fn features(text: &str) -> Vec<Vec<String>> {
    let rows = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| feature"));
    rows.map(|row| {
        row.trim_matches('|')
            .split(" | ")
            .map(|cell| cell.trim().to_owned())
            .collect()
    })
    .collect()
}

fn incomplete(row: &[String]) -> Vec<String> {
    let [feature, _from, usage, page, tests] = row else {
        return vec![format!("{row:?} has not five cells")];
    };
    if usage.starts_with("**not yet**") {
        return Vec::new();
    }
    let mut complaints = Vec::new();
    if !page.contains(".md") {
        complaints.push(format!("{feature}: no page"));
    }
    if !tests.contains(".rs)") {
        complaints.push(format!("{feature}: no test"));
    }
    complaints
}

fn is_test(name: &str, source: &str) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let is_function = |line: &str| {
        line.strip_prefix("fn ")
            .is_some_and(|rest| rest.split('(').next() == Some(name))
    };
    // Attributes may be between the two.
    let has_mark = |end: usize| {
        let before = lines[..end].iter().rev().take_while(|line| line.starts_with('#'));
        before.into_iter().any(|line| *line == "#[test]")
    };
    // A function of tests/hosts.rs, which makes two tests of each.
    let is_on_both_hosts = |line: &str| {
        line.strip_prefix("pub fn ")
            .is_some_and(|rest| rest.split_once('(') == Some((name, "host: Host) {")))
    };
    (0..lines.len()).any(|number| is_function(lines[number]) && has_mark(number) || is_on_both_hosts(lines[number]))
}

fn dead_links(path: &str, text: &str) -> Vec<String> {
    let dead = links(text)
        .into_iter()
        .filter(|(_, target)| !target.contains("://"))
        .filter(|(_, target)| {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => root().join(path),
                _ => resolve(Path::new(path), file),
            };
            match (anchor, fs::read_to_string(&file)) {
                ("", _) => !file.exists(),
                (_, Err(_)) => true,
                (anchor, Ok(text)) => !anchors(&text).contains(anchor),
            }
        });
    dead.map(|(_, target)| format!("{path}: {target} leads nowhere"))
        .collect()
}

fn resolve(from: &Path, target: &str) -> PathBuf {
    root().join(from.parent().unwrap_or(Path::new(""))).join(target)
}

/// Text and target of each `[text](target)` outside code blocks. A text may contain line breaks.
fn links(text: &str) -> Vec<(String, String)> {
    let prose: Vec<&str> = text.split("```").step_by(2).collect();
    let prose = prose.join(" ");
    let mut found = Vec::new();
    let mut rest = prose.as_str();
    while let Some(middle) = rest.find("](") {
        let after = &rest[middle + 2..];
        let target = after.split(')').next().unwrap_or_default();
        let name = rest[..middle].rsplit('[').next().unwrap_or_default();
        found.push((name.to_owned(), target.split_whitespace().collect()));
        rest = after;
    }
    found
}

fn anchors(text: &str) -> BTreeSet<String> {
    let prose = text.split("```").step_by(2);
    let headings = prose.flat_map(str::lines).filter(|line| line.starts_with('#'));
    headings.map(|line| slug(line.trim_start_matches('#').trim())).collect()
}

/// The anchor that GitHub gives a heading.
fn slug(heading: &str) -> String {
    let chars = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    chars.collect::<String>().to_lowercase().replace(' ', "-")
}
