//! The words of the house: none that docs/glossary.md retired, and no sentence that is too long to be read once.
//!
//! Words are looked for in everything: prose, comments, texts, and the parts of identifiers (`was_told`, `ToldAfter`).
//! Sentences are looked for in comments, in prose, and in what `comment on` says about an object of SQL.

/// Each retired word or phrase, in lower case, and what to write.
pub const RETIRED: &[(&str, &str)] = &[
    ("nobody", "name the actor: no session, no worker, no role"),
    ("whoever", "name the actor: each session that, the worker that"),
    ("somebody", "name the actor"),
    ("anybody", "name the actor"),
    ("he", "name the actor, or they"),
    ("him", "name the actor, or them"),
    ("his", "name the actor, or their"),
    ("anew", "again"),
    ("afresh", "again"),
    ("mend", "fix"),
    ("mends", "fixes"),
    ("mended", "fixed"),
    ("mending", "fixing"),
    ("of one s own", "custom"),
    ("so many", "the number, at most N"),
    ("stand still", "is blocked"),
    ("stands still", "is blocked"),
    ("stood still", "was blocked"),
    ("what helps", "the fix"),
    ("parcel", "handoff"),
    ("parcels", "handoffs"),
    ("express", "fast path"),
    ("lay down", "copy into a slot"),
    ("laid down", "copied into a slot"),
    ("in hand", "in flight on the fast path"),
    ("reopen", "rewind"),
    ("reopens", "rewinds"),
    ("reopened", "rewound"),
    ("gate", "blocked key"),
    ("gates", "blocked keys"),
    ("errand", "request"),
    ("errands", "requests"),
    ("ticket", "request id"),
    ("tickets", "request ids"),
    ("glance", "snapshot"),
    ("bell", "waker"),
    ("bells", "wakers"),
    ("upkeep", "maintenance"),
    ("tick", "pass"),
    ("ticks", "passes"),
    ("hungry", "saturated"),
    ("bury", "make a dead letter of"),
    ("buries", "makes a dead letter of"),
    ("buried", "dead-lettered"),
    ("suspect", "poison candidate"),
    ("suspects", "poison candidates"),
    ("conclude", "on_outcome"),
    ("concludes", "ends"),
    ("concluded", "ended"),
    ("figure", "number, measurement, statistic"),
    ("figures", "numbers, measurements, statistics"),
    ("tell", "report, record, notify, show"),
    ("tells", "reports, records, notifies, shows"),
    ("telling", "reporting"),
    ("told", "reported, recorded, notified"),
    ("a look", "a refresh, a snapshot"),
    ("look again", "recheck"),
    ("looks again", "rechecks"),
    ("glances", "snapshots"),
    ("pace", "rate limit, speed"),
    ("paces", "limits the rate"),
    ("paced", "limited in rate"),
    ("shed", "evict"),
    ("sheds", "evicts"),
    ("who has", "name the actor: the worker that has"),
    ("whom", "name the actor"),
    ("hears", "name what reaches the actor"),
    ("for ever", "forever, without end"),
    ("dearer", "slower, costs more"),
    ("hence", "so"),
    ("thereof", "of it"),
    ("whereas", "but"),
    ("lest", "so that not"),
    ("seldom", "rarely"),
    ("lately", "recently"),
    ("such a one", "one of these"),
];

/// More words than this are two sentences.
const SENTENCE_MAX_WORDS: usize = 30;

/// Where the retired words must be, and files that a program wrote.
pub fn is_exempt(path: &str) -> bool {
    ["docs/glossary.md", "tests/tidy/words.rs"].contains(&path) || path.ends_with("package-lock.json")
}

/// Complaints about retired words, by line.
pub fn retired(text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words = format!(" {} ", words_of(line).join(" "));
        for (retired, instead) in RETIRED {
            if words.contains(&format!(" {retired} ")) {
                complaints.push(format!("{}: {retired:?} is retired: {instead}", index + 1));
            }
        }
    }
    complaints
}

/// The words of a line in lower case; an identifier is made of several.
fn words_of(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let (mut word, mut was_lower) = (String::new(), false);
    for c in line.chars().chain([' ']) {
        let ends = !c.is_alphabetic() || (c.is_uppercase() && was_lower);
        if ends && !word.is_empty() {
            words.push(std::mem::take(&mut word).to_lowercase());
        }
        if c.is_alphabetic() {
            word.push(c);
        }
        was_lower = c.is_lowercase();
    }
    words
}

/// Complaints about sentences with too many words.
pub fn long_sentences(path: &str, text: &str) -> Vec<String> {
    let blocks = match path.ends_with(".md") {
        true => prose(text),
        false => [comments(path, text), object_comments(path, text)].concat(),
    };
    let mut complaints = Vec::new();
    for (line, block) in blocks {
        for sentence in sentences(&block) {
            let count = sentence
                .split_whitespace()
                .filter(|word| word.contains(char::is_alphanumeric))
                .count();
            if count > SENTENCE_MAX_WORDS {
                let begin: Vec<&str> = sentence.split_whitespace().take(6).collect();
                complaints.push(format!("{line}: a sentence of {count} words: {} …", begin.join(" ")));
            }
        }
    }
    complaints
}

/// Code between backquotes counts as one word, and the address of a link as none.
fn sentences(block: &str) -> Vec<String> {
    let mut plain = String::new();
    for (index, part) in block.split('`').enumerate() {
        plain.push_str(if index % 2 == 0 { part } else { "X" });
    }
    let mut sentences = vec![String::new()];
    let words: Vec<&str> = plain.split_whitespace().collect();
    for (index, word) in words.iter().enumerate() {
        let visible = match (word.find("]("), word.find(')')) {
            (Some(end), Some(_)) => &word[..end],
            _ => word,
        };
        let last = sentences.last_mut().expect("there is one");
        last.push_str(visible);
        last.push(' ');
        let ends = word.ends_with(['.', '!', '?']) || word.ends_with(".)") || word.ends_with(".\"");
        let next = words.get(index + 1).and_then(|next| next.chars().next());
        if ends && next.is_some_and(|next| next.is_uppercase() || "(\"[".contains(next)) {
            sentences.push(String::new());
        }
    }
    sentences
}

/// Paragraphs, items and cells of a Markdown page, each with its first line.
fn prose(text: &str) -> Vec<(usize, String)> {
    let mut blocks = Blocks::default();
    let mut is_code = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with("```") {
            is_code = !is_code;
            blocks.end();
        } else if is_code {
        } else if line.starts_with('|') {
            blocks.cells(index + 1, line);
        } else if line.is_empty() {
            blocks.end();
        } else {
            blocks.add(index + 1, line);
        }
    }
    blocks.end();
    blocks.done
}

/// The comments of a source, with those that follow code on its line.
fn comments(path: &str, text: &str) -> Vec<(usize, String)> {
    let mark = match path.rsplit('.').next() {
        Some("c" | "java" | "js" | "php" | "rs") => "//",
        Some("sql") => "--",
        _ => "#",
    };
    let mut blocks = Blocks::default();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        match line.strip_prefix(mark) {
            Some(interpreter) if interpreter.starts_with("!/") => blocks.end(),
            Some(comment) => {
                let comment = comment.trim_start_matches(['/', '!']).trim();
                match comment {
                    _ if comment.starts_with('|') => blocks.cells(index + 1, comment),
                    _ if comment.is_empty() || comment.starts_with("--") => blocks.end(),
                    _ => blocks.add(index + 1, comment),
                }
            }
            None => blocks.end(),
        }
    }
    blocks.end();
    blocks.done
}

/// What each `comment on … is '…' '…'` of a file of SQL says, with the line of its statement.
fn object_comments(path: &str, text: &str) -> Vec<(usize, String)> {
    if !path.ends_with(".sql") {
        return Vec::new();
    }
    let statements = text.match_indices("comment on ");
    let statements = statements.filter(|(at, _)| *at == 0 || text[..*at].ends_with('\n'));
    statements
        .map(|(at, _)| {
            let rest = &text[at..];
            let statement = rest.split_once(";\n").map_or(rest, |(statement, _)| statement);
            // Quotes enclose each second part, and two of them in a literal are an apostrophe.
            let plain = statement.replace("''", "\u{2019}");
            let said: String = plain.split('\'').skip(1).step_by(2).collect();
            (text[..at].lines().count() + 1, said)
        })
        .collect()
}

#[derive(Default)]
struct Blocks {
    done: Vec<(usize, String)>,
    line: usize,
    block: String,
}

impl Blocks {
    fn add(&mut self, line: usize, text: &str) {
        let is_item = text.starts_with("- ") || text.starts_with("* ") || text.starts_with('#');
        let is_numbered = text
            .split_once(". ")
            .is_some_and(|(n, _)| n.bytes().all(|b| b.is_ascii_digit()));
        if is_item || is_numbered {
            self.end();
        }
        if self.block.is_empty() {
            self.line = line;
        }
        self.block.push_str(text);
        self.block.push(' ');
    }

    fn cells(&mut self, line: usize, row: &str) {
        self.end();
        self.done
            .extend(row.split('|').map(|cell| (line, cell.trim().to_owned())));
    }

    fn end(&mut self) {
        if !self.block.is_empty() {
            self.done.push((self.line, std::mem::take(&mut self.block)));
        }
    }
}

#[test]
fn a_retired_word_is_found_in_prose_and_in_identifiers() {
    for line in [
        "Nobody waits.",
        "fn was_told() {}",
        "struct ToldAfterCommit;",
        "the message is in hand",
        "one of one's own",
        "-- the upkeep's run",
    ] {
        assert_eq!(retired(line).len(), 1, "{line}");
    }
    for line in ["a heading", "fn handle()", "aggregate", "expression", "whose", "hello"] {
        assert!(retired(line).is_empty(), "{line}");
    }
}

#[test]
fn a_long_sentence_is_found_in_prose_and_in_comments() {
    let long = format!("{}end.", "word ".repeat(SENTENCE_MAX_WORDS));
    let fits = format!("{}end. Next one.", "word ".repeat(SENTENCE_MAX_WORDS - 1));
    for (path, begin) in [
        ("a.md", ""),
        ("a.md", "- "),
        ("a.rs", "/// "),
        ("a.sql", "-- "),
        ("a.sh", "# "),
    ] {
        assert_eq!(
            long_sentences(path, &format!("{begin}{long}")).len(),
            1,
            "{path} {begin}"
        );
        assert!(
            long_sentences(path, &format!("{begin}{fits}")).is_empty(),
            "{path} {begin}"
        );
    }
    assert_eq!(long_sentences("a.md", &format!("| {long} | b |")).len(), 1);
    let code = format!("```\n{long}\n```\n`{}` is code", "word ".repeat(40));
    assert!(long_sentences("a.md", &code).is_empty());
    let wrapped = format!("// {}\n// {}end.\n", "word ".repeat(16), "word ".repeat(16));
    assert_eq!(long_sentences("a.rs", &wrapped).len(), 1);
}

#[test]
fn a_long_sentence_is_found_in_the_comment_of_an_object() {
    let comment = |words: usize| {
        let half = "word ".repeat(words / 2);
        format!("select 1;\ncomment on function f(int) is\n  '{half}isn''t '\n  '{half}end.';\nselect 'a';\n")
    };
    let found = long_sentences("a.sql", &comment(SENTENCE_MAX_WORDS));
    assert_eq!(found, ["2: a sentence of 32 words: word word word word word word …"]);
    assert!(long_sentences("a.sql", &comment(SENTENCE_MAX_WORDS - 2)).is_empty());
    assert!(long_sentences("a.rs", &comment(SENTENCE_MAX_WORDS)).is_empty());
}
