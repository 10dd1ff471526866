//! Which subscriptions an event meets, as far as their lists and headers say it. A session asks this for each event for
//! the default destination; `src/session/store/subscriptions.rs` asks the conditions in SQL afterwards.

use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// What one subscription asks for, apart from its condition.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventFilter {
    /// None = all; an empty list = none.
    pub types: Option<HashSet<String>>,
    /// None = all; an event without an aggregate type meets no list.
    pub aggregate_types: Option<HashSet<String>>,
    /// The headers that the event must have, with these values.
    pub headers: Map<String, Value>,
}

impl EventFilter {
    /// `headers` is the JSON text of an object.
    pub fn new(types: Option<Vec<String>>, aggregate_types: Option<Vec<String>>, headers: Option<&str>) -> Self {
        Self {
            types: types.map(HashSet::from_iter),
            aggregate_types: aggregate_types.map(HashSet::from_iter),
            headers: object(headers),
        }
    }

    fn is_met(&self, kind: &str, aggregate_type: Option<&str>, headers: &Map<String, Value>) -> bool {
        self.types.as_ref().is_none_or(|types| types.contains(kind))
            && (self.aggregate_types.as_ref())
                .is_none_or(|types| aggregate_type.is_some_and(|aggregate_type| types.contains(aggregate_type)))
            && self
                .headers
                .iter()
                .all(|(name, value)| headers.get(name) == Some(value))
    }
}

/// The filters of all subscriptions, in the order in which they were given. An event is compared only with those that
/// name its value of a header, its type, or neither.
#[derive(Debug, Default)]
pub struct Subscriptions {
    filters: Vec<EventFilter>,
    /// By the first header of the filter and by its value as JSON.
    by_header: HashMap<String, HashMap<String, Vec<usize>>>,
    by_type: HashMap<String, Vec<usize>>,
    others: Vec<usize>,
}

impl Subscriptions {
    pub fn new(filters: Vec<EventFilter>) -> Self {
        let mut all = Self::default();
        for (position, filter) in filters.iter().enumerate() {
            match (filter.headers.iter().next(), &filter.types) {
                (Some((name, value)), _) => {
                    let by_value = all.by_header.entry(name.clone()).or_default();
                    by_value.entry(value.to_string()).or_default().push(position);
                }
                (None, Some(types)) => types
                    .iter()
                    .for_each(|kind| all.by_type.entry(kind.clone()).or_default().push(position)),
                (None, None) => all.others.push(position),
            }
        }
        Self { filters, ..all }
    }

    /// Whether it takes the headers of an event to know what it meets.
    pub fn read_headers(&self) -> bool {
        !self.by_header.is_empty()
    }

    /// The positions of the subscriptions that the event meets, in their order. `headers` is the JSON text of an object.
    pub fn met(&self, kind: &str, aggregate_type: Option<&str>, headers: Option<&str>) -> Vec<usize> {
        let headers = object(headers.filter(|_| self.read_headers()));
        let by_header = self
            .by_header
            .iter()
            .filter_map(|(name, by_value)| by_value.get(&headers.get(name)?.to_string()));
        let candidates = by_header
            .chain(self.by_type.get(kind))
            .chain([&self.others])
            .flatten()
            .copied();
        let mut met: Vec<usize> = candidates
            .filter(|position| self.filters[*position].is_met(kind, aggregate_type, &headers))
            .collect();
        met.sort_unstable();
        met
    }
}

fn object(text: Option<&str>) -> Map<String, Value> {
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{hash_map, hash_set};
    use proptest::option;
    use proptest::prelude::*;
    use serde_json::json;

    fn headers() -> impl Strategy<Value = Map<String, Value>> {
        let value = prop_oneof![Just(json!("a")), Just(json!(1)), Just(json!(true)), Just(json!(null))];
        hash_map("[xy]", value, 0..3).prop_map(|headers| headers.into_iter().collect())
    }

    fn filter() -> impl Strategy<Value = EventFilter> {
        let names = || option::of(hash_set("[ab]?", 0..3));
        (names(), names(), headers()).prop_map(|(types, aggregate_types, headers)| EventFilter {
            types,
            aggregate_types,
            headers,
        })
    }

    proptest! {
        #[test]
        fn an_event_meets_the_subscriptions_whose_filter_it_meets(
            filters in proptest::collection::vec(filter(), 0..8),
            kind in "[ab]?", aggregate_type in option::of("[ab]?"), headers in headers()
        ) {
            let aggregate_type = aggregate_type.as_deref();
            let expected: Vec<usize> = (0..filters.len())
                .filter(|position| filters[*position].is_met(&kind, aggregate_type, &headers))
                .collect();
            let text = Value::Object(headers).to_string();
            prop_assert_eq!(Subscriptions::new(filters).met(&kind, aggregate_type, Some(&text)), expected);
        }
    }

    #[test]
    fn a_filter_without_lists_is_met_by_every_event_and_an_empty_list_by_none() {
        let none = EventFilter::new(Some(Vec::new()), None, None);
        let tenant = EventFilter::new(None, None, Some(r#"{"tenant": "acme"}"#));
        let all = Subscriptions::new(vec![EventFilter::default(), none, tenant]);
        assert_eq!(all.met("A", None, None), [0]);
        assert_eq!(all.met("A", None, Some(r#"{"tenant": "acme", "n": 1}"#)), [0, 2]);
        assert_eq!(all.met("A", None, Some(r#"{"tenant": "other"}"#)), [0]);
    }
}
