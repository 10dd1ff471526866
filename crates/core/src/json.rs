//! Reads JSON columns of an event, and writes JSON bodies. A failure becomes a refusal.

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::refusal::Refusal;

/// The value of a column, with its bytes unchanged.
pub(crate) fn raw<'a>(column: &str, json: &'a str) -> Result<&'a RawValue, Refusal> {
    serde_json::from_str(json).map_err(|error| not_json(column, &error))
}

/// Reports the position, never the text: serde's message may quote the value.
pub(crate) fn not_json(column: &str, error: &serde_json::Error) -> Refusal {
    Refusal::new(
        format!(
            "{column} is not valid JSON at line {} column {}",
            error.line(),
            error.column()
        ),
        format!("Store {column} as json or jsonb."),
    )
}

/// The members of an object, in this order.
pub(crate) struct Members<'a>(pub(crate) &'a [Option<(&'static str, Member<'a>)>]);

#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Member<'a> {
    Text(&'a str),
    Number(i64),
    Json(&'a RawValue),
}

impl Serialize for Members<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().flatten().map(|(name, value)| (name, value)))
    }
}

/// The body for `value`, which takes about this many bytes.
pub(crate) fn written(value: &impl Serialize, bytes: usize) -> Result<Vec<u8>, Refusal> {
    let mut body = Vec::with_capacity(bytes);
    serde_json::to_writer(&mut body, value).map_err(|error| unwritten(&error))?;
    Ok(body)
}

pub(crate) fn unwritten(error: &serde_json::Error) -> Refusal {
    Refusal::new(
        format!("the body could not be written: {error}"),
        "This is a defect of the outbox; please report it.",
    )
}
