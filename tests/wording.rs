//! Tests that the docs list everything that the server shows, by its names, and nothing else. It covers checks of
//! outbox_health, views and their columns, states and reasons, kinds of failures, actions in the audit, and metrics.

use crate::tidy::files;
use outbox_transport::DownReason;
use outbox_transport::kinds::KINDS;
use std::collections::BTreeSet;
use support::Cluster;
use support::{DB, quiet_cluster};

const INCIDENTS: &str = include_str!("../docs/operate/incidents.md");
const SQL_API: &str = include_str!("../docs/sql-api.md");
const MONITOR: &str = include_str!("../docs/monitor.md");
const TROUBLESHOOTING: &str = include_str!("../docs/troubleshooting.md");
const ERRORS: &str = include_str!("../docs/errors.md");

/// The text below a heading, up to the next heading.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let begin = page
        .find(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("no {heading:?}"));
    let text = &page[begin + heading.len() + 2..];
    let text = text.split("\n## ").next().unwrap_or_default();
    text.split("\n### ").next().unwrap_or_default()
}

/// The cells of the first column of the table that begins with this line.
fn first_cells<'a>(text: &'a str, head: &str) -> Vec<&'a str> {
    let Some(begin) = text.find(head) else {
        return Vec::new();
    };
    let rows = text[begin..].lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.split('|').nth(1).unwrap_or_default().trim())
        .collect()
}

/// The text between two texts.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let begin = text.find(from).unwrap_or_else(|| panic!("no {from:?}")) + from.len();
    let len = text[begin..]
        .find(to)
        .unwrap_or_else(|| panic!("no {to:?} after {from:?}"));
    &text[begin..begin + len]
}

/// The words of a list in prose, without text in brackets.
fn listed(list: &str) -> BTreeSet<String> {
    let mut plain = String::new();
    let mut depth = 0;
    for c in list.chars() {
        depth += i32::from(c == '(');
        if depth == 0 && c != '`' {
            plain.push(if c == '\n' { ' ' } else { c });
        }
        depth -= i32::from(c == ')');
    }
    let words = plain
        .split([',', ';'])
        .map(|word| word.trim().trim_start_matches("or ").trim().to_owned());
    words.filter(|word| !word.is_empty()).collect()
}

/// Each quoted text that follows `before` in a source.
fn quoted_after(source: &str, before: &str, quote: char) -> BTreeSet<String> {
    let parts = source.split(before).skip(1);
    parts
        .filter_map(|rest| Some(rest.split_once(quote)?.0.to_owned()))
        .collect()
}

fn down_reasons() -> BTreeSet<String> {
    let own = KINDS.iter().flat_map(|kind| kind.reasons);
    let reasons = own.chain(&DownReason::ALL).map(|reason| reason.name().to_owned());
    reasons.collect()
}

fn texts(cluster: &Cluster, sql: &str) -> Vec<String> {
    let rows = cluster.connect(DB).query(sql, &[]).expect(sql);
    rows.iter().map(|row| row.get(0)).collect()
}

fn columns(cluster: &Cluster, relation: &str) -> BTreeSet<String> {
    let sql = format!(
        "select attname::text from pg_attribute where attrelid = '{relation}'::regclass and attnum > 0 and not attisdropped"
    );
    texts(cluster, &sql).into_iter().collect()
}

/// The names in backquotes in a text.
fn names(text: &str) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.flat_map(listed).collect()
}

#[test]
fn incidents_md_has_a_line_for_each_check_of_outbox_health() {
    let shown = texts(&quiet_cluster(), r#"select "check" from outbox_health"#);
    let text = section(INCIDENTS, "## What each line of outbox_health means");
    assert_eq!(first_cells(text, "| check | not ok means | do |"), shown);
}

/// The docs have a heading for each view, with exactly its columns below it.
#[test]
fn sql_api_md_names_each_view_and_its_columns() {
    let cluster = quiet_cluster();
    let views = texts(
        &cluster,
        "select c.relname::text from pg_class c join pg_depend d on d.classid = 'pg_class'::regclass and d.objid = c.oid
           and d.deptype = 'e' join pg_extension x on x.oid = d.refobjid and x.extname = 'outbox'
         where c.relkind = 'v' and c.relnamespace <> 'outbox_internal'::regnamespace order by 1",
    );
    assert!(views.len() >= 10, "{views:?}");
    let elsewhere = first_cells(section(SQL_API, "## Names in other systems"), "| their column | here |");
    let elsewhere: BTreeSet<String> = elsewhere.into_iter().flat_map(listed).collect();
    let leases = columns(&cluster, "outbox_partition_status");
    for name in [
        "partition_key",
        "lease_owner",
        "lease_until",
        "lease_epoch",
        "updated_at",
    ] {
        assert!(elsewhere.contains(name) && leases.contains(name), "{name}");
    }
    for view in views.iter().map(String::as_str).chain(["outbox_audit"]) {
        let text = section(SQL_API, &format!("### {view}"));
        let shown = columns(&cluster, view);
        let mut known = names(text);
        let cells = first_cells(text, "| column | is |");
        let cells: BTreeSet<String> = cells.into_iter().flat_map(listed).collect();
        known.extend(cells.iter().cloned());
        if view == "outbox_messages" {
            known.extend(columns(&cluster, "outbox_events"));
            known.extend(elsewhere.iter().cloned());
        }
        let unnamed: Vec<_> = shown.difference(&known).collect();
        assert!(unnamed.is_empty(), "{view} has {unnamed:?}, the docs do not say so");
        // The list at the beginning of a section, and the column of names in its table.
        let list = text.trim_start().split('`').nth(1).filter(|list| list.contains(", "));
        let claimed: BTreeSet<String> = list.into_iter().flat_map(listed).chain(cells).collect();
        let missing: Vec<_> = claimed.difference(&shown).collect();
        assert!(
            missing.is_empty(),
            "the docs name {missing:?}, {view} has no such column"
        );
    }
}

#[test]
fn sql_api_md_names_each_state_and_reason_of_a_destination() {
    let cluster = quiet_cluster();
    let text = section(SQL_API, "### outbox_destination_status");
    let states: Vec<String> = texts(
        &cluster,
        "select m[1] from pg_constraint c cross join regexp_matches(pg_get_constraintdef(c.oid), '''([^'']+)''', 'g') m
         where c.conrelid = 'outbox_connections'::regclass and c.contype = 'c' and pg_get_constraintdef(c.oid) like '%(state%'",
    );
    let mut shown: BTreeSet<String> = states.into_iter().collect();
    assert!(shown.len() > 5, "{shown:?}");
    // States and reasons that no worker can know.
    let view: String = cluster.query_one(DB, "select pg_get_viewdef('outbox_destination_status'::regclass)");
    for state in ["missing", "not served"] {
        assert!(view.contains(&format!("'{state}'")), "{state}");
        shown.insert(state.to_owned());
    }
    assert_eq!(listed(between(text, "`state` is one of ", ". While it is")), shown);

    let reasons = down_reasons();
    let named = between(text, "`reason` is one of ", ": see [answers]").replace("by HTTP also", "");
    assert_eq!(listed(&named), reasons);
}

#[test]
fn the_pages_of_errors_name_each_reason_of_a_destination_and_each_sqlstate_that_the_code_raises() {
    let mut reasons = down_reasons();
    for rare in ["protocol", "closed"] {
        assert!(reasons.remove(rare), "{rare}: see the log of the peer");
    }
    reasons.extend(["unconfirmed", "standby", "memory"].map(str::to_owned)); // the worker adds these
    let text = section(TROUBLESHOOTING, "## By reason of a destination");
    let cells = first_cells(text, "| reason | means | fix |");
    let named: BTreeSet<String> = cells.into_iter().flat_map(listed).collect();
    assert_eq!(named, reasons);

    let text = section(ERRORS, "## By SQLSTATE");
    let rows = text
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| SQLSTATE"));
    let named: BTreeSet<String> = rows
        .filter_map(|row| Some(row.split('|').nth(2)?.trim().to_owned()))
        .collect();
    let mut raised = BTreeSet::new();
    for (_, text) in files("sql/src", "sql") {
        raised.extend(quoted_after(&text, "errcode = '", '\''));
    }
    // Errors in a definition, which name the object: their text is enough.
    let plain = [
        "array_subscript_error",
        "duplicate_object",
        "feature_not_supported",
        "numeric_value_out_of_range",
        "undefined_column",
        "undefined_table",
        "wrong_object_type",
    ];
    let missing: Vec<&String> = raised
        .iter()
        .filter(|name| !named.contains(*name) && !plain.contains(&name.as_str()))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn sql_api_md_names_each_kind_of_failure_and_each_audit_action() {
    let source = between(
        include_str!("../crates/core/src/settle.rs"),
        "pub enum FailureKind {",
        "\n    }\n",
    );
    let kinds = quoted_after(source, " = \"", '"');
    assert!(kinds.len() > 5, "{kinds:?}");
    let of_statements = ["database", "source"].map(str::to_owned);
    let kinds: BTreeSet<String> = kinds.into_iter().chain(of_statements).collect();
    let text = section(SQL_API, "### outbox_errors");
    let cells = first_cells(text, "| kind | means |");
    let (down, named) = cells.split_last().expect("rows");
    let named: BTreeSet<String> = named.iter().map(|kind| (*kind).to_owned()).collect();
    assert_eq!(named, kinds);
    assert!(down.starts_with("unreachable, "), "{down}");

    let mut actions = BTreeSet::new();
    for (_, text) in [files("sql/src", "sql"), files("src/session", "rs")].concat() {
        let text: String = text.split_whitespace().collect(); // an argument may be on the next line
        actions.extend(quoted_after(&text, "record_audit('", '\''));
    }
    let text = section(SQL_API, "### outbox_audit");
    assert_eq!(listed(between(text, "`action` is ", ".\n`actor`")), actions);
}

#[test]
fn monitor_md_names_each_metric() {
    /// A name without the suffix that the format adds for a unit or a counter.
    fn stem(name: &str) -> String {
        name.trim_end_matches("_total").trim_end_matches("_seconds").to_owned()
    }
    let source = include_str!("../crates/outboxctl/src/serve/metrics.rs");
    let source = source.split("#[cfg(test)]").next().unwrap_or_default();
    let shown: BTreeSet<String> = source
        .split('"')
        .skip(1)
        .step_by(2)
        .filter(|text| {
            text.starts_with("outbox_")
                && !text.contains(|c: char| !c.is_ascii_lowercase() && c != '_' && !c.is_ascii_digit())
        })
        .map(stem)
        .collect();
    assert!(shown.len() > 20, "{shown:?}");
    let cells = first_cells(section(MONITOR, "## Metrics"), "| metric | labels | |");
    let named: BTreeSet<String> = cells
        .into_iter()
        .flat_map(listed)
        .map(|name| stem(&name.replace('…', "outbox_destination")))
        .collect();
    assert_eq!(named, shown);
}

/// Each message is in a line of a source, with a placeholder where the docs have "…". If a SQLSTATE is near it, it is
/// that of the docs.
#[test]
fn errors_md_quotes_only_messages_that_the_code_has_with_their_sqlstate() {
    let mut sources = vec![vec![
        "permission denied for function outbox_publish".to_owned(), // what Postgres says
    ]];
    for (directory, extension) in [("src", "rs"), ("sql/src", "sql"), ("crates", "rs")] {
        let files = files(directory, extension).into_iter();
        let files = files.filter(|(path, _)| !path.contains("/tests/") && !path.ends_with("tests.rs"));
        sources.extend(files.map(|(_, text)| code(&text)));
    }
    let states = section(ERRORS, "## By SQLSTATE").lines();
    let states: Vec<Vec<&str>> = states.map(|row| row.split('|').map(str::trim).collect()).collect();
    let name_of = |state: &str| {
        let row = states.iter().find(|row| row.get(1) == Some(&state));
        row.map(|row| row[2])
    };
    let text = section(ERRORS, "## By message");
    let rows = text.lines().filter(|row| row.starts_with("| ") && row.contains('`'));
    let mut complaints = Vec::new();
    for row in rows.clone() {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let name = name_of(cells[2]);
        if cells[2].len() == 5 && name.is_none() {
            complaints.push(format!("{} is in no row by SQLSTATE", cells[2]));
        }
        for message in cells[1].split('`').skip(1).step_by(2) {
            if !sources.iter().any(|lines| has_message(lines, message, name)) {
                complaints.push(format!("{message}, {name:?}"));
            }
        }
    }
    assert!(rows.count() > 40 && complaints.is_empty(), "{}", complaints.join("\n"));
}

/// Whether a line has all parts of a message between its "…", in their order, and the lines around it no other
/// SQLSTATE.
fn has_message(lines: &[String], message: &str, name: Option<&str>) -> bool {
    (0..lines.len()).filter(|at| has_parts(&lines[*at], message)).any(|at| {
        let near = lines[at.saturating_sub(5)..lines.len().min(at + 3)].join(" ");
        let is_named = |name: &str| {
            let in_rust = format!("ERRCODE_{}", name.to_uppercase());
            near.contains(&format!("errcode = '{name}'")) || near.contains(&in_rust)
        };
        name.is_none_or(is_named) || !near.contains("errcode") && !near.contains("ERRCODE_")
    })
}

fn has_parts(line: &str, message: &str) -> bool {
    let mut rest = line;
    message.split('…').all(|part| match rest.split_once(part) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}

#[test]
fn a_message_that_the_code_has_not_is_found() {
    let lines = [
        "raise exception 'destination \"%\" is full'",
        "using errcode = 'object_in_use'",
    ];
    let lines = lines.map(str::to_owned);
    assert!(has_message(&lines, "destination \"…\" is full", Some("object_in_use")));
    assert!(!has_message(&lines, "destination \"…\" is full", Some("syntax_error")));
    for message in ["destination \"…\" is empty", "is full…destination"] {
        assert!(!has_message(&lines, message, None), "{message}");
    }
}

/// The lines of a source, without escapes, comments and unit tests.
fn code(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    let code = text.lines().map(str::trim);
    let code = code.filter(|line| !line.starts_with("//") && !line.starts_with("--"));
    code.map(|line| line.replace('\\', "")).collect()
}
