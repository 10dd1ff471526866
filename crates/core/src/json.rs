//! Reads JSON columns of an event, compares their values, and writes JSON bodies. A failure becomes a refusal.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use serde_json::json;
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

/// The members of a JSON object by name, in a form that is the same text for values that are equal as jsonb. Empty
/// unless it is an object.
pub(crate) fn comparable_members(json: &str) -> BTreeMap<String, String> {
    members(json, NESTED_MAX).unwrap_or_default()
}

/// What is nested deeper is compared as it is written.
const NESTED_MAX: u8 = 100;

fn members(json: &str, depth: u8) -> Option<BTreeMap<String, String>> {
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(json).ok()?;
    let members = members.into_iter();
    Some(
        members
            .map(|(name, value)| (name, comparable(value.get(), depth)))
            .collect(),
    )
}

fn comparable(json: &str, depth: u8) -> String {
    let form = match json.as_bytes().first() {
        Some(b'{') if depth > 0 => members(json, depth - 1).map(|members| {
            let members = members.iter().map(|(name, value)| format!("{}:{value}", json!(name)));
            format!("{{{}}}", members.collect::<Vec<_>>().join(","))
        }),
        Some(b'[') if depth > 0 => serde_json::from_str::<Vec<&RawValue>>(json).ok().map(|elements| {
            let elements = elements.iter().map(|element| comparable(element.get(), depth - 1));
            format!("[{}]", elements.collect::<Vec<_>>().join(","))
        }),
        Some(b'"') => serde_json::from_str::<String>(json)
            .ok()
            .map(|text| json!(text).to_string()),
        Some(b'-' | b'0'..=b'9') => {
            let (digits, exponent) = decimal(json);
            let sign = if json.starts_with('-') && !digits.is_empty() {
                "-"
            } else {
                ""
            };
            Some(format!("{sign}{digits}e{exponent}"))
        }
        _ => None,
    };
    form.unwrap_or_else(|| json.to_owned())
}

/// The significant digits of a number in JSON, and the power of ten of the first of them. Two texts of one number have
/// the same.
pub(crate) fn decimal(number: &str) -> (String, i64) {
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (whole, fraction) = mantissa
        .trim_start_matches('-')
        .split_once('.')
        .unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_start_matches(|digit: char| !digit.is_ascii_digit() || digit == '0');
    let leading = digits.len() - significant.len();
    let exponent = exponent
        .parse::<i64>()
        .unwrap_or(i64::MAX)
        .saturating_add(whole.len() as i64 - leading as i64);
    let significant = significant.trim_end_matches('0');
    match significant {
        "" => (String::new(), 0),
        digits => (digits.to_owned(), exponent),
    }
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
