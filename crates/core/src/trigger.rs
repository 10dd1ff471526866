//! The argument of a trigger of `outbox_attach` or `outbox_capture`: a JSON object that the SQL function of that name
//! wrote. It is part of the trigger's definition, so a dump contains it and `\d` shows it. The owner of the table can
//! write any other by hand, so it is checked completely.

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The argument of `outbox_attach`: which rows of an event table are enqueued.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attached {
    /// A condition over the row, in SQL; None = all rows.
    pub when: Option<String>,
    /// The key of a row, in SQL.
    pub key: Option<String>,
    /// The column with the seq.
    pub seq: String,
    pub destination: Option<String>,
}

/// The argument of `outbox_capture`: the form of the events of a table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Captured {
    pub aggregate_type: String,
    /// The beginning of the types of its events.
    pub type_prefix: String,
    /// `http` or `sql`.
    pub operations: String,
    /// An SQL expression; None = the primary key.
    pub aggregate_id: Option<String>,
    /// The column that marks a row as deleted when it is not NULL.
    pub soft_delete_column: Option<String>,
    /// None = all.
    pub columns: Option<Vec<String>>,
    pub destination: Option<String>,
}

/// # Errors
/// What is wrong with the argument.
pub fn parse<T: DeserializeOwned>(argument: &str) -> Result<T, String> {
    serde_json::from_str(argument).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_members_are_none() {
        let attached = parse::<Attached>(r#"{"seq": "n", "when": "type like 'Order%'"}"#).unwrap();
        assert_eq!(attached.when.as_deref(), Some("type like 'Order%'"));
        assert_eq!(
            (attached.seq.as_str(), attached.key, attached.destination),
            ("n", None, None)
        );
    }

    #[test]
    fn missing_and_unknown_members_and_invalid_json_are_errors() {
        for argument in ["", "{}", r#"{"seq": "n", "wen": "true"}"#, r#"{"seq": 1}"#, "[]"] {
            assert!(parse::<Attached>(argument).is_err(), "{argument}");
        }
        assert!(parse::<Captured>(r#"{"aggregate_type": "a"}"#).is_err());
    }
}
