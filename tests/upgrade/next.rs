//! The next version: what a release over this one would be. Its scripts are made as `make sql` makes them, from sql/src
//! with a change of each kind, and its library is this one with another number.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use support::workdir::ServerDir;
use support::{Installation, process};

use super::OWN;

pub const NEXT: &str = "0.4.0";

/// What it changes: file, text, and the text in its place.
const CHANGES: &[(&str, &str, &str)] = &[
    // Tables: a column, an index, a constraint. And a table (NEW_FILE).
    (
        "10_tables.sql",
        "  error_code   text\n) partition by range (published_at)",
        "  error_code   text,\n  note         text default 'none'\n) partition by range (published_at)",
    ),
    (
        "10_tables.sql",
        "on @extschema@.outbox_dead (destination, partition, key collate \"C\", seq) where blocks;",
        "on @extschema@.outbox_dead (destination, partition, seq) where blocks;",
    ),
    (
        "42_bulk.sql",
        "'subscribe', 'unsubscribe'))",
        "'subscribe', 'unsubscribe', 'note'))",
    ),
    // Functions: a body, a name of an argument, a further argument, another owner in both directions, a name.
    (
        "20_enqueue.sql",
        "return outbox_internal.partition_label(partition);",
        "return outbox_internal.partition_label(partition + 0);",
    ),
    (
        "20_enqueue.sql",
        "outbox_internal.partition_label(partition integer)",
        "outbox_internal.partition_label(number integer)",
    ),
    (
        "20_enqueue.sql",
        "lpad(partition::text, greatest(2, pg_catalog.length(partition::text)), '0')",
        "lpad(number::text, greatest(2, pg_catalog.length(number::text)), '0')",
    ),
    (
        "20_enqueue.sql",
        "expires_at timestamptz default null, if_exists text default 'error'
) returns bigint language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_publish_wrapper';",
        "expires_at timestamptz default null, if_exists text default 'error', note text default null
) returns bigint language c volatile parallel unsafe as 'MODULE_PATHNAME', 'outbox_publish_wrapper';",
    ),
    (
        "20_enqueue.sql",
        "timestamptz, uuid, timestamptz, text) is\n  'Stores one event",
        "timestamptz, uuid, timestamptz, text, text) is\n  'Stores one event",
    ),
    (
        "40_operate.sql",
        "outbox_resume(destination text default 'default', reason text default null)
returns boolean language plpgsql volatile parallel unsafe security definer",
        "outbox_resume(destination text default 'default', reason text default null)
returns boolean language plpgsql volatile parallel unsafe",
    ),
    (
        "50_views.sql",
        "returns setof record language sql volatile\nbegin atomic\n  select t.pid, t.xid",
        "returns setof record language sql volatile security definer set search_path = pg_catalog, pg_temp
begin atomic\n  select t.pid, t.xid",
    ),
    (
        "56_work.sql",
        "outbox_internal.work_standbys()",
        "outbox_internal.work_standby_names()",
    ),
    (
        "90_privileges.sql",
        "outbox_internal.work_standbys,",
        "outbox_internal.work_standby_names,",
    ),
    // Views: a public and an internal one.
    (
        "50_views.sql",
        "- 60) as p95_ms
from outbox_internal.counters c;
comment on view @extschema@.outbox_status",
        "- 60) as p95_ms, (select count(*) from @extschema@.outbox_notes) as notes
from outbox_internal.counters c;
comment on view @extschema@.outbox_status",
    ),
    (
        "50_views.sql",
        "select w.worker_id, w.pid from @extschema@.outbox_workers w",
        "select w.worker_id, w.pid, w.started_at from @extschema@.outbox_workers w",
    ),
    // A comment, a right, a plan.
    (
        "20_enqueue.sql",
        "'The IEEE CRC-32 of the UTF-8 bytes of a key.'",
        "'The CRC-32 of a key.'",
    ),
    (
        "90_privileges.sql",
        "outbox_internal.destinations, outbox_internal.blocked_lanes",
        "outbox_internal.blocked_lanes",
    ),
    ("85_plans.sql", "('outcome', lookup)", "('outcome', row_by_row)"),
];

const NEW_TABLE: &str = "create table @extschema@.outbox_notes (
  seq  bigint primary key,
  note text not null default 'none'
);
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_notes', '');
";

const NEW_TRIGGER: &str = "create trigger outbox_notes_noted before insert on @extschema@.outbox_notes
  for each row execute function outbox_internal.noted();
";

/// What it has in addition.
const NEW_FILE: &str = "comment on table @extschema@.outbox_notes is
  'Notes about messages.';
create function outbox_internal.noted() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  new.note := lower(new.note);
  return new;
end
$$;
comment on function outbox_internal.noted() is
  'Notes are in lower case.';
";

/// The part of its update script that is written by hand.
const BY_HAND: &str = "
alter table @extschema@.outbox_history add column note text default 'none';
drop index @extschema@.outbox_dead_destination_partition_key_seq_idx;
create index on @extschema@.outbox_dead (destination, partition, seq) where blocks;
alter table @extschema@.outbox_audit drop constraint outbox_audit_action_check,
  add constraint outbox_audit_action_check check (action in ('retry', 'discard', 'replay', 'purge', 'configure', 'forget',
                                                             'adopt', 'source', 'pause', 'resume', 'assign',
                                                             'subscribe', 'unsubscribe', 'note'));
";

/// A private Postgres with the scripts of both versions. Its library is of this version until
/// [`Next::install_library`].
pub struct Next {
    directory: ServerDir,
    installation: Installation,
}

impl Next {
    pub fn install() -> Self {
        let own = Installation::from_env();
        let directory = ServerDir::create("next");
        let root = directory.path().join("pg");
        let mut mirror = Command::new(in_tree("tests/support/mirror_pg.sh"));
        process::run(mirror.arg(own.bin("pg_config")).arg(&root));
        let below_root = |path: &str| root.join(path.trim_start_matches('/'));
        let installation = Installation::at(below_root(&own.pg_config("--bindir")));
        let next = Self {
            directory,
            installation,
        };
        let scripts = PathBuf::from(next.installation.pg_config("--sharedir")).join("extension");
        let control = read(&in_tree("outbox.control")).replace("@CARGO_VERSION@", NEXT);
        fs::write(scripts.join("outbox.control"), control).expect("the control file");
        next.make_scripts(&scripts);
        let library = PathBuf::from(own.pg_config("--pkglibdir")).join("outbox.so");
        fs::copy(library, next.library()).expect("the library");
        next
    }

    pub fn installation(&self) -> Installation {
        self.installation.clone()
    }

    fn library(&self) -> PathBuf {
        PathBuf::from(self.installation.pg_config("--pkglibdir")).join("outbox.so")
    }

    /// Makes the scripts as a release does: see CONTRIBUTING.md.
    fn make_scripts(&self, to: &Path) {
        let tree = self.directory.path().join("tree");
        for directory in ["sql/src", "sql/update", "tests/support"] {
            fs::create_dir_all(tree.join(directory)).expect("a directory");
        }
        let copy = |file: &str| fs::copy(in_tree(file), tree.join(file)).expect(file);
        for tool in ["tests/support/build_sql.sh", "tests/support/build_update.pl"] {
            copy(tool);
        }
        copy(&format!("sql/outbox--{OWN}.sql"));
        for entry in fs::read_dir(in_tree("sql/src")).expect("sql/src").flatten() {
            let name = entry.file_name().into_string().expect("a name");
            let mut text = read(&entry.path());
            for (_, from, changed) in CHANGES.iter().filter(|(file, ..)| *file == name) {
                assert!(
                    text.contains(from),
                    "{name} has no {from}: choose another change of that kind"
                );
                text = text.replace(from, changed);
            }
            fs::write(tree.join("sql/src").join(name), text).expect("a file of SQL");
        }
        let new_file = [NEW_TABLE, NEW_FILE, NEW_TRIGGER].concat();
        fs::write(tree.join("sql/src/49_notes.sql"), new_file).expect("a file of SQL");
        let by_hand = [
            BY_HAND,
            NEW_TABLE,
            "-- The generated statements stand here.\n",
            NEW_TRIGGER,
        ]
        .concat();
        fs::write(tree.join(format!("sql/update/{OWN}--{NEXT}.sql")), by_hand).expect("an update");
        process::run(Command::new(tree.join("tests/support/build_sql.sh")).arg(NEXT));
        for name in [OWN.to_owned(), NEXT.to_owned(), format!("{OWN}--{NEXT}")] {
            let name = format!("outbox--{name}.sql");
            fs::copy(tree.join("sql").join(&name), to.join(&name)).expect("a script");
        }
    }

    /// Replaces the library. A server that runs has the old one until it starts again.
    pub fn install_library(&self) {
        let number = |version: &str| [version.as_bytes(), b"\0"].concat();
        let (old, new) = (number(OWN), number(NEXT));
        assert_eq!(old.len(), new.len(), "the numbers of both versions are equally long");
        let mut library = fs::read(self.library()).expect("the library");
        let places: Vec<usize> = (0..library.len() - old.len())
            .filter(|at| library[*at..].starts_with(&old))
            .collect();
        assert!(!places.is_empty(), "the library has no {OWN}");
        for at in places {
            library[at..at + new.len()].copy_from_slice(&new);
        }
        // Not into the file that a server has mapped.
        let replacement = self.directory.path().join("outbox.so");
        fs::write(&replacement, library).expect("the new library");
        fs::rename(replacement, self.library()).expect("install it");
    }
}

impl Drop for Next {
    fn drop(&mut self) {
        self.directory.finish();
    }
}

fn in_tree(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
