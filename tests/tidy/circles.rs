//! Modules of a crate that import each other in a circle, found in their text.
//!
//! A module imports another when its code names what the other defines, in a `use` or in a path; a name that came by `use`
//! counts as its home's. `mod`, and a `pub use` of a name that the module itself does not say, import nothing.
//!
//! So a parent may declare its children and pass on their names. A child may name its parent, for an `impl` of the
//! parent's type too, if the parent names nothing of that child. Code of tests does not count. Method calls and the
//! output of macros are not followed.

use std::collections::{BTreeMap, BTreeSet};

/// From the root of the crate, which is empty.
type Path = Vec<String>;

/// What the code of a module says.
#[derive(Default)]
struct Module {
    uses: Vec<Use>,
    /// Each path, and each name by itself.
    said: BTreeSet<Path>,
}

struct Use {
    /// As what it is known here.
    name: String,
    /// None in another crate.
    target: Option<Path>,
    is_public: bool,
}

type Modules = BTreeMap<Path, Module>;

/// The names that a module takes from each other one.
type Imports = BTreeMap<Path, BTreeSet<String>>;

/// A complaint for each circle, with the names that tie it. `files`: paths below `src/`, and texts.
pub fn circles(files: &[(String, String)]) -> Vec<String> {
    let mut modules: Modules = (files.iter().map(|(file, _)| (path_of(file), Module::default()))).collect();
    for (file, text) in files {
        let path = path_of(file);
        let module = read(&path, &without_tests(&tokens(text)), &modules);
        modules.insert(path, module);
    }
    let imports: BTreeMap<&Path, Imports> = modules.keys().map(|path| (path, imports(path, &modules))).collect();
    let reached: BTreeMap<&Path, BTreeSet<&Path>> =
        modules.keys().map(|path| (path, reached(path, &imports))).collect();
    let circle_of = |path: &Path| -> BTreeSet<&Path> {
        let others = reached[path].iter().copied();
        others.filter(|other| reached[*other].contains(path)).collect()
    };
    let circles: BTreeSet<_> = modules
        .keys()
        .map(circle_of)
        .filter(|circle| !circle.is_empty())
        .collect();
    circles.iter().map(|circle| described(circle, &imports)).collect()
}

fn described(circle: &BTreeSet<&Path>, imports: &BTreeMap<&Path, Imports>) -> String {
    let shown = |path: &Path| match path.as_slice() {
        [] => "the root".to_owned(),
        path => path.join("::"),
    };
    let mut lines = vec![format!("{} modules import each other:", circle.len())];
    for from in circle {
        for (to, names) in imports[from].iter().filter(|(to, _)| circle.contains(to)) {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            lines.push(format!(
                "  {} takes {} from {}",
                shown(from),
                names.join(", "),
                shown(to)
            ));
        }
    }
    lines.join("\n")
}

// ---- who imports what -----------------------------------------------------------------------------------------------

fn imports(path: &Path, modules: &Modules) -> Imports {
    let Module { uses, said } = &modules[path];
    let is_said = |name: &str| said.iter().any(|said| said[0] == name);
    let used = uses.iter().filter(|used| !used.is_public || is_said(&used.name));
    let used = used.filter_map(|used| used.target.clone());
    let named = said.iter().filter_map(|said| from_root(said, path, modules));
    let mut imports = Imports::new();
    for (home, name) in used.chain(named).filter_map(|target| home(target, modules)) {
        if home != *path {
            imports.entry(home).or_default().insert(name);
        }
    }
    imports
}

/// Where a path leads that is said in the module `here`; None for another crate.
fn from_root(path: &[String], here: &[String], modules: &Modules) -> Option<Path> {
    let ups = path.iter().take_while(|part| *part == "super").count();
    let child = [here, &path[..1]].concat();
    let (base, rest) = match path[0].as_str() {
        "crate" => (Path::new(), &path[1..]),
        "self" => (here.to_vec(), &path[1..]),
        "super" => (here[..here.len().checked_sub(ups)?].to_vec(), &path[ups..]),
        _ if modules.contains_key(&child) => (child, &path[1..]),
        name => (find(name, here, modules)?.target.clone()?, &path[1..]),
    };
    Some([base.as_slice(), rest].concat())
}

fn find<'a>(name: &str, module: &[String], modules: &'a Modules) -> Option<&'a Use> {
    modules[module].uses.iter().find(|used| used.name == name)
}

/// The module that defines what a path leads to, and the name there. None for a module itself, and for another crate.
fn home(mut path: Path, modules: &Modules) -> Option<(Path, String)> {
    for _ in 0..modules.len() {
        let depth = (0..=path.len())
            .rev()
            .find(|depth| modules.contains_key(&path[..*depth]))?;
        let (module, rest) = path.split_at(depth);
        let (name, rest) = rest.split_first()?;
        match find(name, module, modules) {
            None => return Some((module.to_vec(), name.clone())),
            Some(used) => path = [used.target.as_ref()?.as_slice(), rest].concat(),
        }
    }
    None
}

/// What a module imports, what that imports, and so on.
fn reached<'a>(from: &'a Path, imports: &'a BTreeMap<&Path, Imports>) -> BTreeSet<&'a Path> {
    let mut reached = BTreeSet::new();
    let mut todo = vec![from];
    while let Some(path) = todo.pop() {
        todo.extend(imports[path].keys().filter(|to| reached.insert(*to)));
    }
    reached
}

// ---- reading --------------------------------------------------------------------------------------------------------

fn path_of(file: &str) -> Path {
    let mut path: Path = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if matches!(file, "lib.rs" | "main.rs") || file.ends_with("/mod.rs") {
        path.pop();
    }
    path
}

fn read(here: &Path, mut tokens: &[&str], modules: &Modules) -> Module {
    let mut module = Module::default();
    let mut before = "";
    while let [token, rest @ ..] = tokens {
        tokens = rest;
        if *token == "use" && rest.first() != Some(&"<") {
            let end = rest.iter().position(|token| *token == ";").unwrap_or(rest.len());
            let mut leaves = Vec::new();
            find_leaves(&rest[..end], &[], &mut leaves);
            module.uses.extend(leaves.into_iter().map(|(name, path)| Use {
                // The names behind a public `*` are not known here: the module counts as one that names them.
                is_public: matches!(before, "pub" | ")") && name != "*",
                target: from_root(&path, here, modules),
                name,
            }));
            tokens = &rest[end..];
        } else if is_name(token) {
            let mut path = vec![(*token).to_owned()];
            while let ["::", name, rest @ ..] = tokens
                && is_name(name)
            {
                path.push((*name).to_owned());
                tokens = rest;
            }
            if before != "." {
                module.said.insert(path);
            }
        }
        before = token;
    }
    module
}

/// The names that a `use` brings, and their paths.
fn find_leaves(tree: &[&str], stem: &[String], found: &mut Vec<(String, Path)>) {
    let mut depth = 0;
    let branches = tree.split(|token| {
        depth += i32::from(*token == "{") - i32::from(*token == "}");
        depth == 0 && *token == ","
    });
    for branch in branches.filter(|branch| !branch.is_empty()) {
        let (branch, alias) = match branch {
            [branch @ .., "as", alias] => (branch, Some((*alias).to_owned())),
            branch => (branch, None),
        };
        let open = branch.iter().position(|token| *token == "{");
        let parts = branch[..open.unwrap_or(branch.len())]
            .iter()
            .filter(|token| **token != "::");
        let mut path = [stem, &parts.map(|part| (*part).to_owned()).collect::<Path>()].concat();
        match open {
            Some(open) => find_leaves(&branch[open + 1..branch.len() - 1], &path, found),
            None => {
                path.truncate(path.len() - usize::from(path.len() > 1 && path.ends_with(&["self".to_owned()])));
                found.extend(alias.or(path.last().cloned()).map(|name| (name, path)));
            }
        }
    }
}

/// Leaves out each item that is compiled for tests only.
fn without_tests<'a>(tokens: &[&'a str]) -> Vec<&'a str> {
    let mut kept = Vec::new();
    let mut rest = tokens;
    while let [token, after @ ..] = rest {
        rest = match rest {
            ["#", "[", "cfg", "(", "test", ")", "]", item @ ..] => &item[item_length(item)..],
            _ => {
                kept.push(*token);
                after
            }
        };
    }
    kept
}

/// Up to the brace or the semicolon that ends it.
fn item_length(tokens: &[&str]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        depth += i32::from(["{", "(", "["].contains(token)) - i32::from(["}", ")", "]"].contains(token));
        if depth == 0 && ["}", ";"].contains(token) {
            return at + 1;
        }
    }
    tokens.len()
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c == '_' || c.is_alphabetic())
}

/// Names, numbers, `::`, `..` and single marks; no comments, literals of text, or lifetimes.
fn tokens(text: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let word = rest
            .find(|c: char| c != '_' && !c.is_alphanumeric())
            .unwrap_or(rest.len());
        let literal = literal_length(rest, word);
        let (length, is_token) = match first {
            _ if literal > 0 => (literal, false),
            _ if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), false),
            _ if rest.starts_with("/*") => (rest.find("*/").map_or(rest.len(), |at| at + 2), false),
            _ if word > 0 => (word, true),
            _ if rest.starts_with("::") || rest.starts_with("..") => (2, true),
            _ => (first.len_utf8(), !first.is_whitespace()),
        };
        if is_token {
            tokens.push(&rest[..length]);
        }
        rest = &rest[length..];
    }
    tokens
}

/// Of a text, a character or a lifetime that begins here, behind a prefix of `word` bytes; 0 if none does.
fn literal_length(rest: &str, word: usize) -> usize {
    let (prefix, literal) = rest.split_at(word);
    let hashes = literal.len() - literal.trim_start_matches('#').len();
    let is_raw = ["r", "br", "cr"].contains(&prefix) && literal[hashes..].starts_with('"');
    if is_raw {
        let close = format!("\"{}", "#".repeat(hashes));
        let open = word + hashes + 1;
        return rest[open..]
            .find(&close)
            .map_or(rest.len(), |at| open + at + close.len());
    }
    let mut chars = literal.char_indices();
    match chars.next() {
        Some((_, '"')) => {
            let mut escaped = false;
            let close = chars.find(|(_, c)| {
                let closes = *c == '"' && !escaped;
                escaped = *c == '\\' && !escaped;
                closes
            });
            word + close.map_or(literal.len(), |(at, _)| at + 1)
        }
        Some((_, '\'')) if prefix.is_empty() || prefix == "b" => {
            let (_, second) = chars.next().unwrap_or_default();
            let (end, third) = chars.next().unwrap_or_default();
            match (second, third) {
                ('\\', _) => word + end + literal[end + 1..].find('\'').map_or(0, |at| at + 2),
                (_, '\'') => word + end + 1,
                _ => {
                    word + 1
                        + literal[1..]
                            .find(|c: char| c != '_' && !c.is_alphanumeric())
                            .unwrap_or(0)
                }
            }
        }
        _ => 0,
    }
}

// ---- the rule sees a violation --------------------------------------------------------------------------------------

/// The circles of a crate of these files, each with its modules and names.
fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
    let files: Vec<_> = files
        .iter()
        .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
        .collect();
    circles(&files)
}

#[test]
fn modules_that_name_each_other_are_found_however_they_do() {
    let b = ("b.rs", "use crate::a::A;");
    for text in [
        "use crate::b::B;",
        "use super::b::{self, B as Other};",
        "pub use crate::b::*;",
        "pub(crate) use crate::b::B;\nfn f(b: B) {}",
        "use crate::b;\nfn f() { b::B::new() }",
        "fn f() { g(crate::b::B) }",
        "impl T for super::b::B<'a> {}",
    ] {
        let found = circles_of(&[
            ("a.rs", text),
            b,
            ("c.rs", "use crate::b::B as C;"),
            ("lib.rs", "mod a;"),
        ]);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert!(
            found[0].starts_with("2 modules import each other:\n  a takes "),
            "{text}: {found:?}"
        );
        assert!(found[0].ends_with(" from b\n  b takes A from a"), "{text}: {found:?}");
    }
}

#[test]
fn a_circle_of_three_and_one_beside_it_are_two_circles() {
    let three = [
        ("a.rs", "use crate::b::B;"),
        ("b.rs", "use crate::c::C;"),
        ("c/mod.rs", "use crate::a::A;"),
    ];
    let two = [("d.rs", "use crate::{a::A, e::E};"), ("e.rs", "use crate::d::{D, F};")];
    let found = circles_of(&[three.as_slice(), &two].concat());
    assert_eq!(
        found,
        [
            "3 modules import each other:\n  a takes B from b\n  b takes C from c\n  c takes A from a",
            "2 modules import each other:\n  d takes E from e\n  e takes D, F from d",
        ]
    );
}

#[test]
fn a_name_that_is_passed_on_is_its_homes() {
    let root = ("lib.rs", "mod a;\nmod b;\npub use a::{A, Z};\npub use std::fmt;");
    let found = circles_of(&[root, ("a.rs", "use crate::b::B;"), ("b.rs", "use crate::A;")]);
    assert_eq!(
        found,
        ["2 modules import each other:\n  a takes B from b\n  b takes A from a"]
    );
    assert!(circles_of(&[root, ("a.rs", "use crate::fmt;"), ("b.rs", "use crate::A;")]).is_empty());
}

#[test]
fn a_child_may_name_a_parent_that_names_nothing_of_it() {
    let child = ("a/part.rs", "use super::A;\nimpl A {\n    pub(super) fn f(&self) {}\n}");
    let parent = "mod part;\npub use part::Part;\npub struct A;\nimpl A {\n    fn g(&self) { self.f() }\n}\n";
    assert!(circles_of(&[("a.rs", parent), child]).is_empty());
    let says = format!("{parent}struct B(Part);");
    let found = circles_of(&[("a.rs", &says), child]);
    assert_eq!(
        found,
        ["2 modules import each other:\n  a takes Part from a::part\n  a::part takes A from a"]
    );
    let says = format!("{parent}fn h() {{ part::f() }}");
    assert_eq!(circles_of(&[("a.rs", &says), child]).len(), 1);
}

#[test]
fn tests_comments_and_texts_import_nothing() {
    let b = ("b.rs", "use crate::a::A;");
    for text in [
        "// use crate::b::B;",
        "/* use crate::b::B; */",
        "const T: &str = \"use crate::b::B;\";",
        "const T: &str = r#\"\" use crate::b::B;\"#;",
        "#[cfg(test)]\nmod tests {\n    use crate::b::B;\n    fn f() { [b'}', '{'] }\n}",
        "#[cfg(test)]\nuse crate::b::B;",
        "mod b;\npub use crate::b::B;",
    ] {
        assert_eq!(circles_of(&[("a.rs", text), b]), [""; 0], "{text}");
        let after = format!("{text}\nfn f<'a>(c: char) -> crate::b::B {{ c == '\\'' }}");
        assert_eq!(circles_of(&[("a.rs", &after), b]).len(), 1, "{after}");
    }
}
