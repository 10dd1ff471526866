//! The history of what was pending, for the charts. The database keeps none, so the poller adds up its own readings: it
//! begins when the monitor starts.

use crate::queries::model::DestinationRow;
use std::collections::BTreeMap;

/// The most messages of each destination that were pending at one time of a period.
#[derive(Default)]
pub struct BacklogHistory(BTreeMap<Period, BTreeMap<String, i64>>);

/// The length of a period in seconds, and its number since 1970.
type Period = (i64, i64);

impl BacklogHistory {
    /// Adds a reading to the current period of each length, of which only the last `kept` stay.
    pub fn record(&mut self, now_s: f64, periods: &[(i64, usize)], destinations: &[DestinationRow]) {
        for (length_s, kept) in periods {
            let current = (now_s as i64).div_euclid(*length_s);
            let first = current + 1 - *kept as i64;
            self.0
                .retain(|(length, number), _| length != length_s || *number >= first);
            let most = self.0.entry((*length_s, current)).or_default();
            for destination in destinations {
                let pending = destination.pending.unwrap_or_default();
                match most.get_mut(&destination.name) {
                    Some(most) => *most = pending.max(*most),
                    None if pending > 0 => _ = most.insert(destination.name.clone(), pending),
                    None => {}
                }
            }
        }
    }

    /// The periods of this length, by their number. A destination without a pending message is left out.
    pub fn periods(&self, length_s: i64) -> impl Iterator<Item = (i64, &BTreeMap<String, i64>)> {
        let all = self.0.range((length_s, i64::MIN)..=(length_s, i64::MAX));
        all.map(|((_, number), most)| (*number, most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(pending: i64) -> [DestinationRow; 2] {
        let named = |name: &str, pending| DestinationRow {
            name: name.into(),
            pending: Some(pending),
            ..DestinationRow::default()
        };
        [named("a", pending), named("idle", 0)]
    }

    #[test]
    fn a_period_has_the_most_messages_that_were_pending_and_old_periods_are_dropped() {
        let mut history = BacklogHistory::default();
        let kept = [(60, 2), (600, 2)];
        for (second, pending) in [(0, 5), (59, 9), (61, 7), (70, 0), (125, 1)] {
            history.record(f64::from(second), &kept, &reading(pending));
        }
        let of = |length_s| -> Vec<(i64, Vec<(&str, i64)>)> {
            let periods = history.periods(length_s);
            periods
                .map(|(number, most)| (number, most.iter().map(|(name, n)| (&**name, *n)).collect()))
                .collect()
        };
        assert_eq!(of(60), [(1, vec![("a", 7)]), (2, vec![("a", 1)])]);
        assert_eq!(of(600), [(0, vec![("a", 9)])]);
    }
}
