//! Makes an event from a written row: its type, operation, payload and previous payload. Called by the trigger of
//! `outbox_capture` in the session that writes. Rows are JSON text, in the form in which Postgres writes jsonb.
//!
//! | written | type | payload | previous payload |
//! |---|---|---|---|
//! | a new row | …Created | the row | – |
//! | a changed row | …Updated | its key, and the changed columns | the changed columns before |
//! | a row marked as deleted | …Deleted | as for a changed row | as for a changed row |
//! | a row whose mark is removed | …Restored | as for a changed row | as for a changed row |
//! | a deleted row | …Deleted; …ForceDeleted where rows are marked | its key | the row |
//!
//! A changed id makes two events, because consumers identify an aggregate by its id: the old aggregate is deleted, and
//! a new one is created. The second event is stored after all others of its statement. An id may pass from one row to
//! another, and must be deleted before it is created.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

/// The form of the events of a table.
#[derive(Clone, Debug)]
pub struct CaptureRules {
    /// The first part of each event type: `Product` in ProductCreated.
    pub prefix: String,
    pub operations: Operations,
    /// Whether rows are deleted by a mark in one of their columns.
    pub marks_deleted: bool,
    /// The columns of the primary key. The payload of an update always contains them.
    pub key_columns: Vec<String>,
}

/// The names that an event uses for its operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operations {
    /// POST, PATCH, DELETE.
    Http,
    /// INSERT, UPDATE, DELETE.
    Sql,
}

/// A row before or after the statement.
#[derive(Clone, Debug, Default)]
pub struct ChangedRow {
    pub aggregate_id: String,
    /// A JSON object with a member for each column.
    pub json: String,
    /// Whether the row is marked as deleted.
    pub is_marked: bool,
}

/// The contents of an event that a written row makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub kind: String,
    pub operation: &'static str,
    pub aggregate_id: String,
    pub payload: String,
    pub previous_payload: Option<String>,
}

/// The events that an updated row makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// No event, because no column changed.
    Nothing,
    /// One event.
    Changed(Change),
    /// Two events, because the id changed: one for the aggregate that is gone, one for the new one.
    Moved { deleted: Change, inserted: Change },
}

#[derive(Clone, Copy, PartialEq)]
enum ChangeVerb {
    Created,
    Updated,
    Deleted,
    ForceDeleted,
    Restored,
}

/// The columns of a row by name. Values stay raw JSON, so each keeps its bytes.
type RowColumns<'a> = BTreeMap<String, &'a RawValue>;

impl CaptureRules {
    /// The event of a new row.
    pub fn inserted(&self, new: ChangedRow) -> Change {
        self.change(ChangeVerb::Created, new.aggregate_id, new.json, None)
    }

    /// The event of a deleted row.
    ///
    /// # Errors
    /// If the row is not a JSON object.
    pub fn deleted(&self, old: ChangedRow) -> Result<Change, String> {
        let verb = match self.marks_deleted {
            true => ChangeVerb::ForceDeleted,
            false => ChangeVerb::Deleted,
        };
        let payload = write(&self.keys_of(&columns(&old.json)?))?;
        Ok(self.change(verb, old.aggregate_id, payload, Some(old.json)))
    }

    /// The events of an updated row.
    ///
    /// # Errors
    /// If a row is not a JSON object.
    pub fn updated(&self, old: ChangedRow, new: ChangedRow) -> Result<Update, String> {
        if old.aggregate_id != new.aggregate_id {
            let (deleted, inserted) = (self.deleted(old)?, self.inserted(new));
            return Ok(Update::Moved { deleted, inserted });
        }
        let verb = match (old.is_marked, new.is_marked) {
            (false, true) => ChangeVerb::Deleted,
            (true, false) => ChangeVerb::Restored,
            _ if old.json == new.json => return Ok(Update::Nothing),
            _ => ChangeVerb::Updated,
        };
        let (before, after) = (columns(&old.json)?, columns(&new.json)?);
        let differs = |(name, value): &(&String, &&RawValue)| {
            let was = before.get(*name);
            was.is_none_or(|was| was.get() != value.get())
        };
        let mut payload = self.keys_of(&after);
        let mut previous = RowColumns::new();
        for (name, value) in after.iter().filter(differs) {
            payload.insert(name.clone(), value);
            previous.extend(before.get(name).map(|was| (name.clone(), *was)));
        }
        let (payload, previous) = (write(&payload)?, write(&previous)?);
        Ok(Update::Changed(self.change(
            verb,
            new.aggregate_id,
            payload,
            Some(previous),
        )))
    }

    /// The key columns of a row.
    fn keys_of<'a>(&self, row: &RowColumns<'a>) -> RowColumns<'a> {
        let keys = self.key_columns.iter();
        keys.filter_map(|name| row.get_key_value(name))
            .map(|(name, value)| (name.clone(), *value))
            .collect()
    }

    fn change(
        &self,
        verb: ChangeVerb,
        aggregate_id: String,
        payload: String,
        previous_payload: Option<String>,
    ) -> Change {
        let (suffix, operations) = verb.names();
        Change {
            kind: format!("{}{suffix}", self.prefix),
            operation: operations[self.operations as usize],
            aggregate_id,
            payload,
            previous_payload,
        }
    }
}

impl Operations {
    /// The operations by the name in the options of `outbox_capture`: http or sql.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "http" => Some(Self::Http),
            "sql" => Some(Self::Sql),
            _ => None,
        }
    }
}

impl ChangeVerb {
    /// The end of the type, and the operation by its name of HTTP and of SQL.
    fn names(self) -> (&'static str, [&'static str; 2]) {
        match self {
            Self::Created => ("Created", ["POST", "INSERT"]),
            Self::Updated => ("Updated", ["PATCH", "UPDATE"]),
            Self::Restored => ("Restored", ["PATCH", "UPDATE"]),
            Self::Deleted => ("Deleted", ["DELETE", "DELETE"]),
            Self::ForceDeleted => ("ForceDeleted", ["DELETE", "DELETE"]),
        }
    }
}

fn columns(json: &str) -> Result<RowColumns<'_>, String> {
    serde_json::from_str(json).map_err(|error| format!("a row is not a JSON object: column {}", error.column()))
}

fn write(columns: &RowColumns<'_>) -> Result<String, String> {
    serde_json::to_string(columns).map_err(|error| format!("a row cannot be written as JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    fn rules(marks_deleted: bool) -> CaptureRules {
        CaptureRules {
            prefix: "Product".into(),
            operations: Operations::Http,
            marks_deleted,
            key_columns: vec!["id".into()],
        }
    }

    fn row(id: &str, json: &Value) -> ChangedRow {
        ChangedRow {
            aggregate_id: id.into(),
            json: json.to_string(),
            is_marked: false,
        }
    }

    fn value(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    fn parts(change: &Change) -> (&str, &str, Value, Option<Value>) {
        let previous = change.previous_payload.as_deref().map(value);
        (&change.kind, change.operation, value(&change.payload), previous)
    }

    fn changed(update: Result<Update, String>) -> Change {
        match update {
            Ok(Update::Changed(change)) => change,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_payload_of_a_new_row_is_the_whole_row() {
        let change = rules(false).inserted(row("1", &json!({"id": 1, "name": "a"})));
        assert_eq!(
            parts(&change),
            ("ProductCreated", "POST", json!({"id": 1, "name": "a"}), None)
        );
        assert_eq!(change.aggregate_id, "1");
    }

    #[test]
    fn an_update_has_its_key_the_changed_columns_and_their_old_values() {
        let old = row("1", &json!({"id": 1, "name": "a", "price": 1, "note": null}));
        let new = row("1", &json!({"id": 1, "name": "a", "price": 2, "note": "n"}));
        let change = changed(rules(false).updated(old, new));
        let expected = (
            "ProductUpdated",
            "PATCH",
            json!({"id": 1, "price": 2, "note": "n"}),
            Some(json!({"price": 1, "note": null})),
        );
        assert_eq!(parts(&change), expected);
    }

    #[test]
    fn an_update_that_changes_nothing_makes_no_event() {
        let same = row("1", &json!({"id": 1}));
        assert_eq!(rules(true).updated(same.clone(), same), Ok(Update::Nothing));
    }

    #[test]
    fn setting_the_mark_deletes_and_removing_it_restores_even_if_no_payload_column_changed() {
        let plain = row("1", &json!({"id": 1}));
        let marked = ChangedRow {
            is_marked: true,
            ..plain.clone()
        };
        let update = |old: &ChangedRow, new: &ChangedRow| {
            let c = changed(rules(true).updated(old.clone(), new.clone()));
            (c.kind, c.operation, c.payload, c.previous_payload.unwrap())
        };
        let (key, nothing) = (r#"{"id":1}"#.to_owned(), "{}".to_owned());
        assert_eq!(
            update(&plain, &marked),
            ("ProductDeleted".into(), "DELETE", key.clone(), nothing.clone())
        );
        assert_eq!(
            update(&marked, &plain),
            ("ProductRestored".into(), "PATCH", key, nothing)
        );
        assert_eq!(rules(true).updated(marked.clone(), marked), Ok(Update::Nothing));
    }

    #[test]
    fn the_previous_payload_of_a_deleted_row_is_the_whole_row() {
        let old = row("1", &json!({"id": 1, "name": "a"}));
        for (marks, kind) in [(false, "ProductDeleted"), (true, "ProductForceDeleted")] {
            let change = rules(marks).deleted(old.clone()).unwrap();
            let expected = (kind, "DELETE", json!({"id": 1}), Some(json!({"id": 1, "name": "a"})));
            assert_eq!(parts(&change), expected);
        }
    }

    #[test]
    fn a_changed_id_makes_two_events() {
        let update = rules(false).updated(row("1", &json!({"id": 1})), row("2", &json!({"id": 2})));
        let Ok(Update::Moved { deleted, inserted }) = update else {
            panic!("{update:?}")
        };
        let parts = |c: Change| (c.kind, c.aggregate_id, c.payload);
        let expected = [
            ("ProductDeleted", "1", r#"{"id":1}"#),
            ("ProductCreated", "2", r#"{"id":2}"#),
        ];
        let expected = expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned()));
        assert_eq!([parts(deleted), parts(inserted)], expected);
    }

    #[test]
    fn operations_have_sql_names_if_the_rules_say_so() {
        let rules = CaptureRules {
            operations: Operations::Sql,
            ..rules(false)
        };
        let (a, b) = (row("1", &json!({"id": 1, "n": 1})), row("1", &json!({"id": 1, "n": 2})));
        assert_eq!(rules.inserted(a.clone()).operation, "INSERT");
        assert_eq!(changed(rules.updated(a.clone(), b)).operation, "UPDATE");
        assert_eq!(rules.deleted(a).unwrap().operation, "DELETE");
        assert_eq!(
            ["http", "sql", "HTTP"].map(Operations::parse),
            [Some(Operations::Http), Some(Operations::Sql), None]
        );
    }

    #[test]
    fn numbers_keep_their_digits() {
        let old = ChangedRow {
            json: r#"{"n": 1.10}"#.into(),
            ..ChangedRow::default()
        };
        let new = ChangedRow {
            json: r#"{"n": 123456789012345678901234567890.10}"#.into(),
            ..ChangedRow::default()
        };
        let change = changed(rules(false).updated(old, new));
        assert_eq!(change.payload, r#"{"n":123456789012345678901234567890.10}"#);
        assert_eq!(change.previous_payload.as_deref(), Some(r#"{"n":1.10}"#));
    }

    #[test]
    fn a_row_that_is_not_an_object_is_an_error_and_no_panic() {
        let broken = ChangedRow {
            json: "[1]".into(),
            ..ChangedRow::default()
        };
        assert!(rules(false).deleted(broken.clone()).is_err());
        assert!(rules(false).updated(broken, row("", &json!({}))).is_err());
    }

    proptest! {
        /// The payload applied to the old row gives the new one, and the previous payload applied to the new row the
        /// old one.
        #[test]
        fn payloads_lead_from_one_row_to_the_other_and_back(
            rows in prop::collection::btree_map("[a-d\"\u{e4}]{1,2}", (0..3, 0..3), 0..6)
        ) {
            let side = |pick: fn(&(i32, i32)) -> i32| {
                let members = rows.iter().map(|(name, both)| (name.clone(), Value::from(pick(both))));
                Value::Object(members.collect::<Map<_, _>>())
            };
            let (old, new) = (side(|both| both.0), side(|both| both.1));
            match rules(false).updated(row("1", &old), row("1", &new)).unwrap() {
                Update::Nothing => prop_assert_eq!(old, new),
                Update::Changed(change) => {
                    let over = |base: &Value, patch: &str| {
                        let mut base = base.clone();
                        base.as_object_mut().unwrap().extend(value(patch).as_object().unwrap().clone());
                        base
                    };
                    prop_assert_ne!(&old, &new);
                    prop_assert_eq!(over(&old, &change.payload), new.clone());
                    prop_assert_eq!(over(&new, &change.previous_payload.unwrap()), old.clone());
                }
                moved => prop_assert!(false, "{:?}", moved),
            }
        }
    }
}
