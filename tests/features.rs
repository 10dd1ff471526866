//! Checks the pages of docs/ without a server. Each link leads to a file and a heading that exist, and each test that
//! docs/features.md, docs/guarantees.md or docs/proofs.md names is a test.

use crate::tidy::{File, files, read, root};
use std::path::Path;

const TABLE: &str = "docs/features.md";

#[test]
fn every_link_of_the_documentation_has_a_target() {
    let mut pages = files("docs", "md");
    pages.extend(
        ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md"].map(|path| (path.to_owned(), read(path))),
    );
    let dead: Vec<String> = pages.iter().flat_map(|(path, text)| dead_links(path, text)).collect();
    assert!(dead.is_empty(), "{}", dead.join("\n"));
    let links =
        "[a](settings.md#outboxurl) [b](../README.md#install) [c](nowhere.md) [d](settings.md#nowhere) [e](#nowhere)";
    assert_eq!(dead_links(TABLE, links).len(), 3);
}

/// A reader in a hurry reads a page to its end. In a reference he looks something up.
#[test]
fn no_page_but_a_reference_has_more_than_2500_words() {
    let references = ["docs/settings.md", "docs/sql-api.md"];
    let pages = files("docs", "md").into_iter();
    let pages = pages.filter(|(path, _)| !references.contains(&path.as_str()));
    let sizes = pages.map(|(path, text)| (path, text.split_whitespace().count()));
    let long = sizes.filter(|(_, words)| *words > 2500);
    assert_eq!(long.collect::<Vec<_>>(), []);
    assert!(read("README.md").lines().count() <= 120, "lines of README.md");
}

/// A link with the name of a test leads to its file.
#[test]
fn every_test_that_a_feature_names_is_a_test() {
    let tests = links(&read(TABLE))
        .into_iter()
        .filter(|(_, target)| target.ends_with(".rs"));
    let missing = tests.filter(|(name, target)| !is_test(name.trim_matches('`'), &read(&resolve(TABLE, target))));
    assert_eq!(missing.collect::<Vec<_>>(), []);
}

/// A line such as "- order: `a`, `b`" names a test file, or the directory beside it or a crate, and tests in it.
#[test]
fn every_test_that_a_guarantee_names_is_a_test() {
    let sources: Vec<File> = ["tests", "crates"]
        .iter()
        .flat_map(|directory| files(directory, "rs"))
        .collect();
    let is_there = |group: &str, test: &str| {
        sources
            .iter()
            .any(|(path, text)| is_of(path, group) && is_test(test, text))
    };
    let mut named = [proofs(&read("docs/guarantees.md")), proofs(&read("docs/proofs.md"))].concat();
    assert!(named.len() > 150, "{} tests", named.len());
    named.retain(|(group, test)| !is_there(group, test));
    assert_eq!(named, []);
    let first = "every_test_that_a_guarantee_names_is_a_test";
    assert!(is_there("features", first) && !is_there("order", first) && !is_there("features", "is_of"));
}

/// A filter of the Makefile that matches no test would run nothing. `make chaos` runs each file that has rounds or
/// seeds.
#[test]
fn every_filter_of_the_makefile_is_a_test_and_chaos_leaves_out_no_file() {
    let makefile = read("Makefile").replace("\\\n", "");
    let filters = |list: &str| -> Vec<&str> {
        let mut lines = makefile.lines().map(str::split_whitespace);
        let line = lines.find(|line| line.clone().next() == Some(list));
        line.expect(list).skip(2).collect() // the name, and "="
    };
    let sources = files("tests", "rs");
    let is_there = |filter: &&str| {
        let name = filter.trim_end_matches("::").rsplit("::").next().expect("a name");
        let is_module = |path: &str| path.ends_with(&format!("/{name}.rs"));
        sources
            .iter()
            .any(|(path, text)| is_module(path) || text.contains(&format!("fn {name}")))
    };
    for list in ["PROMISES", "CHANCE"] {
        let missing = filters(list).into_iter().filter(|filter| !is_there(filter));
        assert_eq!(missing.collect::<Vec<_>>(), [""; 0], "{list}");
    }
    let chance = filters("CHANCE");
    let by_chance = sources
        .iter()
        .filter(|(_, text)| text.contains("\nuse support::chaos::"));
    let modules = by_chance.map(|(path, _)| path.trim_end_matches(".rs").rsplit('/').next().expect("a name"));
    let left_out = modules.filter(|module| !chance.iter().any(|filter| filter.contains(&format!("{module}::"))));
    assert_eq!(left_out.collect::<Vec<_>>(), [""; 0]);
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

fn is_of(path: &str, group: &str) -> bool {
    let mut below = path.trim_end_matches(".rs").split('/').skip(1);
    below.any(|part| part == group)
}

fn is_test(name: &str, source: &str) -> bool {
    // Other attributes may follow.
    let marked = source.split("#[test]\n").skip(1);
    let mut tests = marked.filter_map(|rest| rest.lines().map(str::trim).find(|line| !line.starts_with('#')));
    let on_both_hosts = format!("pub fn {name}(host: Host) {{"); // tests/hosts.rs makes two tests of it
    tests.any(|line| line.starts_with(&format!("fn {name}("))) || source.contains(&on_both_hosts)
}

fn dead_links(path: &str, text: &str) -> Vec<String> {
    let is_dead = |target: &String| {
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let file = match file {
            "" => path.to_owned(),
            _ => resolve(path, file),
        };
        !root().join(&file).exists() || !anchor.is_empty() && !anchors(&read(&file)).contains(&anchor.to_owned())
    };
    let targets = links(text).into_iter().map(|(_, target)| target);
    let dead = targets.filter(|target| !target.contains("://") && is_dead(target));
    dead.map(|target| format!("{path}: {target} leads nowhere")).collect()
}

fn resolve(from: &str, target: &str) -> String {
    let directory = Path::new(from).parent().expect("a file");
    directory.join(target).display().to_string()
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

/// The anchors that GitHub gives the headings.
fn anchors(text: &str) -> Vec<String> {
    let prose = text.split("```").step_by(2).flat_map(str::lines);
    let headings = prose.filter(|line| line.starts_with('#'));
    let slug = |line: &str| -> String {
        let heading = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        heading
            .chars()
            .filter(|c| c.is_alphanumeric() || "-_".contains(*c))
            .collect()
    };
    headings.map(slug).collect()
}
