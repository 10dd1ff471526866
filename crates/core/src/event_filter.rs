//! Which subscriptions an event meets, as far as their lists and headers say it. A session asks this for each event for
//! the default destination; `src/session/store/subscription_conditions.rs` asks the conditions in SQL afterwards.

use crate::json::comparable_members;
use std::collections::{BTreeMap, HashMap, HashSet};

/// What one subscription asks for, apart from its condition.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventFilter {
    /// None = all; an empty list = none.
    types: Option<HashSet<String>>,
    /// None = all; an event without an aggregate type meets no list.
    aggregate_types: Option<HashSet<String>>,
    /// The headers that the event must have, as [`comparable_members`].
    headers: BTreeMap<String, String>,
}

impl EventFilter {
    /// `headers` is the JSON text of an object.
    pub fn new(types: Option<Vec<String>>, aggregate_types: Option<Vec<String>>, headers: Option<&str>) -> Self {
        Self {
            types: types.map(HashSet::from_iter),
            aggregate_types: aggregate_types.map(HashSet::from_iter),
            headers: headers.map(comparable_members).unwrap_or_default(),
        }
    }

    fn is_met(&self, kind: &str, aggregate_type: Option<&str>, headers: &BTreeMap<String, String>) -> bool {
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
pub struct EventFilters {
    filters: Vec<EventFilter>,
    /// By the first header of the filter and by its value.
    by_header: HashMap<String, HashMap<String, Vec<usize>>>,
    by_type: HashMap<String, Vec<usize>>,
    others: Vec<usize>,
}

impl EventFilters {
    pub fn new(filters: Vec<EventFilter>) -> Self {
        let mut all = Self::default();
        for (position, filter) in filters.iter().enumerate() {
            match (filter.headers.iter().next(), &filter.types) {
                (Some((name, value)), _) => {
                    let by_value = all.by_header.entry(name.clone()).or_default();
                    by_value.entry(value.clone()).or_default().push(position);
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

    /// The positions of the subscriptions that each event is compared with: those without headers and a list of types.
    pub fn of_each_event(&self) -> &[usize] {
        &self.others
    }

    /// The positions of the subscriptions that the event meets, in their order. `headers` is the JSON text of an
    /// object.
    pub fn met(&self, kind: &str, aggregate_type: Option<&str>, headers: Option<&str>) -> Vec<usize> {
        let headers = headers.filter(|_| self.read_headers());
        let headers = headers.map(comparable_members).unwrap_or_default();
        let by_header = self
            .by_header
            .iter()
            .filter_map(|(name, by_value)| by_value.get(headers.get(name)?));
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{hash_map, vec};
    use proptest::option;
    use proptest::prelude::*;

    /// Texts of values that are equal as jsonb, a line each.
    const EQUAL: [&[&str]; 12] = [
        &["1", "1.0", "10e-1", "0.1E+1"],
        &["-1", "-1.00"],
        &["0", "-0", "0.0e7"],
        &["100000000000000000001", "1.00000000000000000001e20"],
        &["100000000000000000002"],
        &["1e400", "0.1e401"],
        &["true"],
        &["null"],
        &[r#""é\"{""#, r#""\u00e9\u0022{""#],
        &[r#""1""#],
        &[
            r#"{"a":[1,{}],"b":"]"}"#,
            r#"{ "b" : 1, "b" : "]", "\u0061" : [1.0, { }] }"#,
        ],
        &[r#"[1,{},"a","b"]"#, "[ 1e0,\t{},\"a\",\r\n\"b\"]"],
    ];

    /// Headers by name, as lines of [`EQUAL`]; and as JSON.
    fn headers() -> impl Strategy<Value = (HashMap<String, usize>, String)> {
        hash_map("[xy]", (0..EQUAL.len(), any::<usize>()), 0..3).prop_map(|headers| {
            let members = headers.iter().map(|(name, (line, text))| {
                let texts = EQUAL[*line];
                format!(r#""{name}": {}"#, texts[text % texts.len()])
            });
            let json = format!("{{{}}}", members.collect::<Vec<_>>().join(", "));
            (
                headers.into_iter().map(|(name, (line, _))| (name, line)).collect(),
                json,
            )
        })
    }

    proptest! {
        #[test]
        fn an_event_meets_the_subscriptions_whose_filter_it_meets(
            filters in vec((option::of(vec("[ab]?", 0..3)), option::of(vec("[ab]?", 0..3)), headers()), 0..8),
            kind in "[ab]?", aggregate_type in option::of("[ab]?"), (of_event, json) in headers()
        ) {
            let is_met = |(types, aggregate_types, (headers, _)): &(Option<Vec<_>>, Option<Vec<_>>, (HashMap<_, _>, _))| {
                types.as_ref().is_none_or(|types| types.contains(&kind))
                    && aggregate_types.as_ref()
                        .is_none_or(|types| aggregate_type.as_ref().is_some_and(|own| types.contains(own)))
                    && headers.iter().all(|(name, line)| of_event.get(name) == Some(line))
            };
            let expected: Vec<usize> = (0..filters.len()).filter(|position| is_met(&filters[*position])).collect();
            let filters = filters.into_iter().map(|(types, aggregate_types, (_, json))| {
                EventFilter::new(types, aggregate_types, Some(&json))
            });
            let filters = EventFilters::new(filters.collect());
            prop_assert_eq!(filters.met(&kind, aggregate_type.as_deref(), Some(&json)), expected);
        }
    }

    #[test]
    fn a_filter_without_lists_is_met_by_every_event_and_an_empty_list_by_none() {
        let none = EventFilter::new(Some(Vec::new()), None, None);
        let tenant = EventFilter::new(None, None, Some(r#"{"tenant": "acme"}"#));
        let all = EventFilters::new(vec![EventFilter::default(), none, tenant]);
        assert_eq!(all.met("A", None, None), [0]);
        assert_eq!(all.met("A", None, Some(r#"{"tenant": "acme", "n": 1}"#)), [0, 2]);
        assert_eq!(all.met("A", None, Some(r#"{"tenant": "other"}"#)), [0]);
    }
}
