//! The criteria of `list` and of a search on a page of `serve`.

use clap::Args;
use outbox_core::partition::Partition;
use serde::{Serialize, Serializer};

/// The criteria that a message must match, by the names that the search has for them. Texts are compared exactly.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize)]
pub struct Filter {
    /// Only messages to this destination
    #[arg(long)]
    pub destination: Option<String>,
    /// Only messages of this partition, such as p07
    #[arg(long, value_parser = partition)]
    #[serde(serialize_with = "number")]
    pub partition: Option<Partition>,
    /// Only messages with this ordering key
    #[arg(long)]
    pub key: Option<String>,
    /// Only events of this type
    #[arg(long = "type", value_name = "TYPE")]
    #[serde(rename = "type")]
    pub event_type: Option<String>,
    /// Only events of this aggregate type
    #[arg(long, value_name = "TYPE")]
    pub aggregate_type: Option<String>,
    /// Only events of this aggregate
    #[arg(long, value_name = "ID")]
    pub aggregate_id: Option<String>,
    /// Only with an error LIKE this
    #[arg(long, value_name = "PATTERN")]
    pub error_like: Option<String>,
    /// Only messages enqueued since this time, or ended since then if they have ended: a time, or an age (90s, 15m, 2h,
    /// 7d)
    #[arg(long, value_name = "WHEN")]
    pub since: Option<When>,
    /// Only the messages of the event with this id, of any status
    #[arg(long, value_name = "UUID", value_parser = uuid)]
    pub id: Option<String>,
    /// Only events with this correlation id
    #[arg(long, value_name = "ID")]
    pub correlation_id: Option<String>,
    /// Only messages with this key, type, aggregate, actor or correlation id, or with this text in the error
    #[arg(value_name = "WORD")]
    pub word: Option<String>,
    #[arg(skip)]
    pub seq: Option<i64>,
}

impl Filter {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a message is matched by its event.
    pub fn asks_for_events(&self) -> bool {
        let of_event = [
            &self.event_type,
            &self.aggregate_type,
            &self.aggregate_id,
            &self.correlation_id,
            &self.word,
        ];
        of_event.iter().any(|criterion| criterion.is_some())
    }
}

fn number<S: Serializer>(partition: &Option<Partition>, to: S) -> Result<S::Ok, S::Error> {
    partition.map(Partition::as_i16).serialize(to)
}

/// Parses a partition: `p07` or `7`.
pub fn partition(text: &str) -> Result<Partition, String> {
    let number = text.strip_prefix('p').unwrap_or(text).parse();
    let partition = number.ok().and_then(|number| Partition::new(number).ok());
    partition.ok_or_else(|| "a partition is p00 to p1023".into())
}

/// Parses the id of an event: a UUID with or without hyphens, in lower case as Postgres prints it.
pub fn uuid(text: &str) -> Result<String, String> {
    let hex: String = text.chars().filter(|c| *c != '-').collect();
    let is_uuid = hex.len() == 32 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    match is_uuid && (text.len() == 32 || text.len() == 36) {
        true => Ok(text.to_ascii_lowercase()),
        false => Err("an id is a UUID, such as 0198c0de-0000-7000-8000-000000000001".into()),
    }
}

/// A time that Postgres parses, or an age.
#[derive(Clone, Debug, PartialEq)]
pub enum When {
    SecondsAgo(i64),
    At(String),
}

/// As the search reads it: `7200s` is an age.
impl Serialize for When {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::SecondsAgo(seconds) => to.collect_str(&format_args!("{seconds}s")),
            Self::At(moment) => to.serialize_str(moment),
        }
    }
}

impl std::str::FromStr for When {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unit = match text.chars().last() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 86_400,
            _ => 0,
        };
        let number = text.get(..text.len().saturating_sub(1)).unwrap_or_default();
        let number = Some(number).filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()));
        Ok(match number.and_then(|number| number.parse::<u32>().ok()) {
            Some(number) if unit > 0 => Self::SecondsAgo(i64::from(number) * unit),
            _ => Self::At(text.to_owned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_distinguished_from_a_time() {
        let when = |text: &str| text.parse::<When>().expect("infallible");
        assert_eq!(when("90s"), When::SecondsAgo(90));
        assert_eq!(when("15m"), When::SecondsAgo(900));
        assert_eq!(when("2h"), When::SecondsAgo(7200));
        assert_eq!(when("7d"), When::SecondsAgo(604_800));
        for text in ["today", "2026-11-21", "d", "", "-5m", "1.5h", "5 m", "µ"] {
            assert_eq!(when(text), When::At(text.into()), "{text:?}");
        }
    }

    #[test]
    fn a_partition_is_named_by_its_label_or_number() {
        let number = |text| partition(text).map(Partition::as_i16);
        assert_eq!(["p07", "7", "p1023"].map(number), [Ok(7), Ok(7), Ok(1023)]);
        assert!(
            ["p", "", "p1024", "-1", "q1"]
                .iter()
                .all(|text| partition(text).is_err())
        );
    }
}
