//! Layers and circles of the modules of a crate, read from their text. A module imports what it names in a `use` or in
//! another path; a name that came by `use` counts as its home's. Unit tests, method calls and macros do not count.

use super::{File, files};
use std::collections::{BTreeMap, BTreeSet};

/// From the root of the crate, which is empty.
type Path = Vec<String>;

/// What a room of src/ never names. Sessions and workers meet in shared memory alone; what both run names neither.
const STRANGERS: [(&str, &[&str]); 5] = [
    ("session", &["worker"]),
    ("worker", &["session"]),
    ("store", &["session", "worker"]),
    ("shared", &["session", "store", "worker"]),
    (
        "pg",
        &["config", "error", "limits", "session", "shared", "store", "worker"],
    ),
];

#[test]
fn a_room_of_src_names_only_what_its_process_has() {
    assert_eq!(strangers(&imports(&sources("src"))), [""; 0]);
    let violation = "use crate::{\n    config,\n    worker::launcher,\n};";
    let found = strangers(&imports(&[("session/api.rs".into(), violation.into())]));
    assert_eq!(found, ["session names worker"]);
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let manifests = files("crates", "toml").into_iter();
    let crates = manifests.filter_map(|(path, _)| Some(format!("{}src", path.strip_suffix("Cargo.toml")?)));
    for directory in crates.chain(["src".to_owned()]) {
        assert_eq!(circles(&imports(&sources(&directory))), [""; 0], "{directory}");
    }
    let violation = [
        ("lib.rs", "pub use b::B;"),
        ("a/x.rs", "fn f(b: crate::B) {}"),
        ("b.rs", "use super::{a::{self, A}, c};"),
        (
            "c.rs",
            "// use crate::b::B;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;",
        ),
    ];
    let violation = violation.map(|(path, text)| (path.to_owned(), text.to_owned()));
    assert_eq!(circles(&imports(&violation)), ["a names b", "b names a"]);
}

fn sources(directory: &str) -> Vec<File> {
    let files = files(directory, "rs").into_iter();
    let files = files.map(|(path, text)| (path[directory.len() + 1..].to_owned(), text));
    files.filter(|(path, _)| !path.ends_with("tests.rs")).collect()
}

fn strangers(imports: &[(Path, Path)]) -> Vec<String> {
    let is_strange = |(from, to): &(&str, &str)| {
        let mut rooms = STRANGERS.iter().filter(|(room, _)| room == from);
        rooms.any(|(_, strangers)| strangers.contains(to))
    };
    let rooms = imports
        .iter()
        .filter_map(|(from, to)| Some((from.first()?.as_str(), to.first()?.as_str())));
    let strange: BTreeSet<_> = rooms.filter(is_strange).collect();
    strange
        .into_iter()
        .map(|(from, to)| format!("{from} names {to}"))
        .collect()
}

/// Each import that is in a circle, or between two. A module counts as one with all below it, so it may name its
/// children, and they may name it.
fn circles(imports: &[(Path, Path)]) -> Vec<String> {
    let mut edges = BTreeSet::new();
    for (from, to) in imports {
        let common = from.iter().zip(to).take_while(|(from, to)| from == to).count();
        if common < from.len() && common < to.len() {
            edges.insert((&from[..=common], &to[..=common]));
        }
    }
    loop {
        let (froms, tos): (BTreeSet<_>, BTreeSet<_>) = edges.iter().copied().unzip();
        let before = edges.len();
        edges.retain(|(from, to)| froms.contains(to) && tos.contains(from));
        if edges.len() == before {
            return edges
                .iter()
                .map(|(from, to)| format!("{} names {}", from.join("::"), to.join("::")))
                .collect();
        }
    }
}

/// Each module with each path that it names, from the root of the crate. `files`: paths below src/, and texts.
fn imports(files: &[File]) -> Vec<(Path, Path)> {
    let modules: BTreeMap<Path, Vec<Path>> = files.iter().map(|(file, text)| (module(file), named(text))).collect();
    let named = modules
        .iter()
        .flat_map(|(from, named)| named.iter().map(move |path| (from, path)));
    named
        .map(|(from, path)| (from.clone(), home(from, path, &modules)))
        .collect()
}

fn module(file: &str) -> Path {
    let mut path: Path = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    path.pop_if(|last| matches!(last.as_str(), "lib" | "main" | "mod"));
    path
}

/// Follows names that modules on the way have by `use`.
fn home(here: &[String], path: &[String], modules: &BTreeMap<Path, Vec<Path>>) -> Path {
    let mut path = from_root(here, path);
    for _ in 0..9 {
        let Some(at) = (0..path.len()).find(|at| !modules.contains_key(&path[..=*at])) else {
            break;
        };
        let mut known = modules.get(&path[..at]).into_iter().flatten();
        match known.find(|used| used.len() > 1 && used.last() == Some(&path[at])) {
            Some(used) => path = from_root(&path[..at], used),
            None => break,
        }
    }
    path
}

fn from_root(here: &[String], path: &[String]) -> Path {
    let ups = path.iter().take_while(|part| *part == "super").count();
    match path.first().map(String::as_str) {
        Some("crate") => path[1..].to_vec(),
        Some("self") => [here, &path[1..]].concat(),
        _ => [&here[..here.len().saturating_sub(ups)], &path[ups..]].concat(),
    }
}

/// Each path in the code. Braces behind `::` continue it.
fn named(text: &str) -> Vec<Path> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let code: Vec<&str> = code.lines().filter_map(|line| line.split("//").next()).collect();
    let code = code.join("\n").replace("::", "~");
    let is_word = |c: char| c == '_' || c.is_alphanumeric();
    let spaced = code
        .chars()
        .flat_map(|c| if is_word(c) { vec![c] } else { vec![' ', c, ' '] });
    let spaced: String = spaced.collect();
    let (mut found, mut stems, mut path, mut continues) = (Vec::new(), Vec::new(), Path::new(), false);
    for token in spaced.split_whitespace() {
        match token {
            "~" => {}
            "{" if continues => stems.push(path.clone()),
            _ if continues => path.push(token.to_owned()),
            _ => {
                found.extend((path.len() > 1).then_some(path));
                match token {
                    "{" => stems.push(Path::new()),
                    "}" => drop(stems.pop()),
                    _ => {}
                }
                path = stems.last().cloned().unwrap_or_default();
                if is_word(token.chars().next().unwrap_or_default()) && (token != "self" || path.is_empty()) {
                    path.push(token.to_owned());
                }
            }
        }
        continues = token == "~";
    }
    found
}
