//! The criteria of `list` and of a search on a page of `serve`, and their conditions in SQL.

use super::sql::{Sql, containing};
use clap::Args;
use outbox_core::partition::Partition;

/// Where this role reads events.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Events {
    /// It may not read them.
    Unread,
    Stored,
    /// One by one, with the rights of the role there.
    InSource,
}

impl Events {
    /// The event with this seq, as a table expression `name` and its condition.
    pub fn with_seq(self, name: &str, seq: &str) -> String {
        match self {
            Self::Unread | Self::Stored => format!("@extschema@.outbox_events {name} where {name}.seq = {seq}"),
            Self::InSource => format!("outbox_internal.event_shown({seq}) {name} where {name}.error is null"),
        }
    }
}

/// The criteria that a message must match. Texts are compared exactly.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct Filter {
    /// Only messages to this destination
    #[arg(long)]
    pub destination: Option<String>,
    /// Only messages of this partition, such as p07
    #[arg(long, value_parser = partition)]
    pub partition: Option<Partition>,
    /// Only messages with this ordering key
    #[arg(long)]
    pub key: Option<String>,
    /// Only events of this type
    #[arg(long = "type", value_name = "TYPE")]
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

    /// Whether the criteria need the event, not only the message. A word does not: it is also searched for in messages
    /// alone.
    pub fn asks_for_events(&self) -> bool {
        self.id.is_some() || !self.on_events().is_empty()
    }

    /// Whether a message that the index finds may still be excluded by its event or the word.
    pub fn is_checked_later(&self) -> bool {
        self.asks_for_events() || self.word.is_some()
    }

    /// The conditions on messages. `name` maps a column to its name in the statement; `since` is the time column to
    /// compare.
    pub fn of_message(&self, name: impl Fn(&str) -> String, since: &str) -> Sql {
        let mut sql = self.of_lane(&name);
        compare(&mut sql, &name("key"), "=", &self.key, "text");
        compare(&mut sql, &name("seq"), "=", &self.seq, "bigint");
        let of_event = format!(
            "{} = (select e.seq from @extschema@.outbox_events e where e.id",
            name("seq")
        );
        if self.id.is_some() {
            compare(&mut sql, &of_event, "=", &self.id, "uuid");
            sql.push(")");
        }
        compare(&mut sql, &name("last_error"), "like", &self.error_like, "text");
        if let Some(when) = &self.since {
            sql.push(&format!("\n  and {} >= ", name(since))).append(&when.sql());
        }
        sql
    }

    /// The conditions on the events of messages, with one index lookup for each message. Without `offset 0` the planner
    /// may scan all events for those of a type. `name` maps a column of messages to its name in the statement.
    pub fn of_event(&self, name: impl Fn(&str) -> String, events: Events) -> Sql {
        let mut sql = Sql::default();
        let seq = name("seq");
        let event = format!("exists (select from {}", events.with_seq("e", &seq));
        let of_event = self.on_events();
        if !of_event.is_empty() {
            sql.push(&format!("\n  and {event}"))
                .append(&of_event)
                .push(" offset 0)");
        }
        if let Some(word) = &self.word {
            const COLUMNS: &str = "e.type, e.aggregate_type, e.aggregate_id, e.correlation_id, e.actor, e.id::text";
            sql.push(&format!("\n  and ({} = ", name("key"))).value(word, "text");
            sql.push(&format!(" or {} ilike ", name("last_error")));
            sql.value(containing(word), "text");
            if events != Events::Unread {
                sql.push(&format!(" or {event} and ")).value(word, "text");
                sql.push(&format!(" in ({COLUMNS}) offset 0)"));
            }
            sql.push(")");
        }
        sql
    }

    /// The conditions on the events `e`.
    pub fn on_events(&self) -> Sql {
        let mut sql = Sql::default();
        compare(&mut sql, "e.type", "=", &self.event_type, "text");
        compare(&mut sql, "e.aggregate_type", "=", &self.aggregate_type, "text");
        compare(&mut sql, "e.aggregate_id", "=", &self.aggregate_id, "text");
        compare(&mut sql, "e.correlation_id", "=", &self.correlation_id, "text");
        sql
    }

    /// The conditions on messages or lanes. `name` maps a column to its name in the statement.
    pub fn of_lane(&self, name: impl Fn(&str) -> String) -> Sql {
        let mut sql = Sql::default();
        compare(&mut sql, &name("destination"), "=", &self.destination, "text");
        let partition = self.partition.map(Partition::as_i16);
        compare(&mut sql, &name("partition"), "=", &partition, "smallint");
        sql
    }
}

fn compare(sql: &mut Sql, column: &str, operator: &str, value: &Option<impl ToString>, kind: &'static str) {
    if let Some(value) = value {
        sql.push(&format!("\n  and {column} {operator} "))
            .value(value.to_string(), kind);
    }
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

impl When {
    pub fn sql(&self) -> Sql {
        let mut sql = Sql::default();
        match self {
            Self::SecondsAgo(seconds) => sql.push("now() - ").value(format!("{seconds} s"), "interval"),
            Self::At(moment) => sql.value(moment, "timestamptz"),
        };
        sql
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
