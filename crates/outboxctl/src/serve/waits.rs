//! Why each message of the tabs Ready and In flight still waits: one reason in a few words. The page of a message has
//! all reasons in full (`queries::why`).

use super::session::{Session, Trouble};
use super::snapshot::Snapshot;
use crate::format::duration;
use crate::messages::page::Row;
use crate::messages::partition;
use crate::queries::Fetch;
use crate::queries::message::OUTBOX;
use crate::queries::model::Destination;
use crate::queries::state::DestinationState::{Missing, NotServed};
use serde::Deserialize;
use std::sync::LazyLock;

/// What is read for the rows of one page, besides the snapshot.
#[derive(Debug, Default)]
pub struct Waits {
    lanes: Vec<Lane>,
    /// The open transactions that have enqueued, the oldest first.
    transactions: Vec<Transaction>,
}

/// A lane that has messages on the page.
#[derive(Debug, Default, Deserialize)]
struct Lane {
    destination: String,
    partition_key: String,
    /// The first message that is not in flight. None = no such message is near the start of the lane.
    first: Option<i64>,
    /// The message that failed and blocks the messages after it.
    blocker: Option<i64>,
    /// The rate limit of the destination, in messages a second; 0 = none.
    max_rate: i64,
}

/// The query for the [`Lane`]s with the destinations `$1` and the partitions `$2`. Messages in flight are at the start
/// of their lane, so few rows are read to find the first other one.
static LANES: LazyLock<String> = LazyLock::new(|| {
    format!(
        r#"select l.destination, outbox_partition_label(l.partition::integer) as partition_key,
                  (select t.seq from (select * from outbox o where o.destination = l.destination and o.partition = l.partition
                                      order by o.seq limit 1000) t
                   where {} <> 'in flight' order by t.seq limit 1) as first,
                  (select min(b.blocker) from outbox_internal.blocked_lanes() b
                   where b.destination = l.destination and b.partition = l.partition) as blocker,
                  coalesce((select split_part(x.option, '=', 2)::bigint
                            from outbox_internal.destinations() d, unnest(d.options) x (option)
                            where d.destination = l.destination and x.option like 'max\_rate=%'),
                           nullif(current_setting('outbox.max_rate', true), '')::bigint, 0) as max_rate
           from (select distinct u.destination collate "C" as destination, u.partition
                 from unnest($1::text[], $2::smallint[]) u (destination, partition)) l"#,
        OUTBOX.status
    )
});

/// An open transaction that has enqueued.
#[derive(Debug, Default, Deserialize)]
struct Transaction {
    /// `None` = the transaction is prepared.
    pid: Option<i32>,
    /// `None` = the transaction has no xid yet.
    xid: Option<String>,
    age_s: f64,
    /// It has enqueued no message with a lower seq.
    low: i64,
}

const TRANSACTIONS: &str = "
    select t.pid, t.xid::text as xid, extract(epoch from t.age)::float8 as age_s, t.low from outbox_open_transactions() t
    where t.age > interval '1 second' order by t.age desc limit 100";

/// Reads what stops the messages of these rows.
pub async fn read(session: &Session, rows: &[Row]) -> Result<Waits, Trouble> {
    let lanes = rows.iter().filter_map(|row| {
        let partition = partition(row.text("partition_key")?).ok()?;
        Some((row.text("destination")?.to_owned(), partition.as_i16()))
    });
    let (destinations, partitions): (Vec<String>, Vec<i16>) = lanes.unzip();
    Ok(Waits {
        lanes: session.fetch(&LANES, &[&destinations, &partitions]).await?,
        transactions: session.fetch(TRANSACTIONS, &[]).await?,
    })
}

/// Why the message of this row is in flight and not published.
pub fn why_in_flight(row: &Row, snapshot: &Snapshot) -> String {
    let name = row.text("destination").unwrap_or_default();
    let destination = snapshot.destinations.iter().find(|known| known.name == name);
    match destination.and_then(|known| known.awaited_standbys()) {
        Some(awaited) => format!("{name} {awaited}"),
        None => "a worker sends it, or keeps it for an open transaction".to_owned(),
    }
}

/// Why the message of this row is not in flight.
pub fn why(row: &Row, snapshot: &Snapshot, waits: &Waits) -> String {
    let name = row.text("destination").unwrap_or_default();
    let partition = row.text("partition_key").unwrap_or_default();
    let of_lane = |lane: &&Lane| lane.destination == name && lane.partition_key == partition;
    let owner = snapshot.partitions.iter().find(|known| known.label == partition);
    let destination = snapshot.destinations.iter().find(|known| known.name == name);
    Facts {
        seq: row.number("seq"),
        has_key: row.text("key").is_some(),
        name,
        partition,
        is_standby: snapshot.now.is_standby,
        is_enabled: !snapshot
            .health
            .iter()
            .any(|check| check.check == "enabled" && !check.ok),
        destination: destination.map(|known| &**known),
        is_free: snapshot.server.leasing && owner.is_some_and(|known| known.owner.is_none()),
        lane: waits.lanes.iter().find(of_lane),
        transactions: &waits.transactions,
    }
    .why()
}

/// What decides about one message.
struct Facts<'a> {
    seq: i64,
    has_key: bool,
    name: &'a str,
    partition: &'a str,
    is_standby: bool,
    is_enabled: bool,
    destination: Option<&'a Destination>,
    /// Whether its partition has no owner and needs one.
    is_free: bool,
    lane: Option<&'a Lane>,
    transactions: &'a [Transaction],
}

impl Facts<'_> {
    /// The reason that stops the most other messages comes first.
    fn why(&self) -> String {
        let Self { name, partition, .. } = self;
        let state = self.destination.map(|known| &known.state);
        let state = match state.map(|state| (state.known(), state.as_str())) {
            _ if self.is_standby => return "this server is a standby".to_owned(),
            None | Some((Some(Missing), _)) => return format!("destination {name} does not exist"),
            Some((Some(NotServed), _)) => return format!("no worker serves {name}"),
            Some((_, state)) => state,
        };
        if !self.is_enabled {
            return "delivery is switched off".to_owned();
        }
        if state != "connected" {
            return format!("{name} is {state}");
        }
        if let Some(awaited) = self.destination.and_then(Destination::awaited_standbys) {
            return format!("{name} {awaited}");
        }
        let blocker = self.lane.and_then(|lane| lane.blocker);
        if let Some(blocker) = blocker.filter(|blocker| *blocker < self.seq) {
            return format!("behind message {blocker}");
        }
        if self.is_free {
            return format!("no worker owns {partition}");
        }
        let mut earlier = self.transactions.iter().filter(|open| open.low <= self.seq);
        if let Some(open) = earlier.next().filter(|_| self.has_key) {
            let since = duration(open.age_s);
            return match open.pid {
                Some(pid) => format!("a transaction that has been open for {since} (pid {pid}) may hold its key"),
                None => format!(
                    "a transaction that has been prepared for {since} (xid {}) may hold its key",
                    open.xid.as_deref().unwrap_or_default()
                ),
            };
        }
        // The list may be older than the lane.
        if self
            .lane
            .and_then(|lane| lane.first)
            .is_some_and(|first| self.seq <= first)
        {
            return "it is next".to_owned();
        }
        match self.lane.map_or(0, |lane| lane.max_rate) {
            0 => format!("earlier messages of {partition} go first"),
            rate => format!("earlier messages of {partition} go first, at most {rate} a second to {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queries::state::DestinationState::{self, Reported};
    use outbox_worker::State;

    fn destination(state: DestinationState) -> Destination {
        Destination {
            name: "audit".into(),
            state: state.into(),
            ..Destination::default()
        }
    }

    /// The reason of message 7 in a lane that begins at 5, if these facts change.
    fn why(state: DestinationState, lane: Lane, change: impl Fn(&mut Facts<'_>)) -> String {
        why_beside(&[], state, lane, change)
    }

    fn why_beside(
        transactions: &[Transaction],
        state: DestinationState,
        lane: Lane,
        change: impl Fn(&mut Facts<'_>),
    ) -> String {
        let destination = destination(state);
        let mut facts = facts(&destination, &lane, transactions);
        change(&mut facts);
        facts.why()
    }

    fn facts<'a>(destination: &'a Destination, lane: &'a Lane, transactions: &'a [Transaction]) -> Facts<'a> {
        Facts {
            seq: 7,
            has_key: true,
            name: "audit",
            partition: "p03",
            is_standby: false,
            is_enabled: true,
            destination: Some(destination),
            is_free: false,
            lane: Some(lane),
            transactions,
        }
    }

    fn lane() -> Lane {
        Lane {
            first: Some(5),
            ..Lane::default()
        }
    }

    const CONNECTED: DestinationState = Reported(State::Connected);

    #[test]
    fn only_the_first_of_its_lane_is_next() {
        let first = |first| Lane { first, ..lane() };
        let found = why(CONNECTED, lane(), |_| {});
        assert_eq!(found, "earlier messages of p03 go first");
        assert_eq!(why(CONNECTED, first(Some(7)), |_| {}), "it is next");
        assert_eq!(why(CONNECTED, first(None), |_| {}), found);
        let limited = |first| Lane {
            max_rate: 10,
            ..Lane { first, ..lane() }
        };
        assert_eq!(
            why(CONNECTED, limited(Some(5)), |_| {}),
            "earlier messages of p03 go first, at most 10 a second to audit"
        );
        assert_eq!(why(CONNECTED, limited(Some(7)), |_| {}), "it is next");
    }

    #[test]
    fn an_open_transaction_holds_back_later_messages_with_a_key() {
        let open = |low, pid| {
            [Transaction {
                pid,
                xid: pid.is_none().then(|| "812".to_owned()),
                age_s: 40.0,
                low,
            }]
        };
        let first = || Lane {
            first: Some(7),
            ..lane()
        };
        assert_eq!(
            why_beside(&open(6, Some(4711)), CONNECTED, first(), |_| {}),
            "a transaction that has been open for 40 s (pid 4711) may hold its key"
        );
        assert_eq!(
            why_beside(&open(6, None), CONNECTED, first(), |_| {}),
            "a transaction that has been prepared for 40 s (xid 812) may hold its key"
        );
        assert_eq!(
            why_beside(&open(8, Some(4711)), CONNECTED, first(), |_| {}),
            "it is next"
        );
        let without_key = |facts: &mut Facts<'_>| facts.has_key = false;
        assert_eq!(
            why_beside(&open(6, Some(4711)), CONNECTED, first(), without_key),
            "it is next"
        );
    }

    #[test]
    fn a_reason_that_stops_a_whole_lane_or_destination_is_the_one_that_is_shown() {
        let first = || Lane {
            first: Some(7),
            ..lane()
        };
        for (state, shown) in [
            (Reported(State::Paused), "audit is paused"),
            (Reported(State::Down), "audit is down"),
            (Reported(State::Blocked), "audit is blocked"),
            (Reported(State::Connecting), "audit is connecting"),
            (NotServed, "no worker serves audit"),
            (Missing, "destination audit does not exist"),
        ] {
            assert_eq!(why(state, first(), |_| {}), shown);
        }
        assert_eq!(
            why(CONNECTED, first(), |facts| facts.destination = None),
            "destination audit does not exist"
        );
        let waits = Destination {
            reason: Some("standby".into()),
            detail: Some("waits for standby s1".into()),
            ..destination(CONNECTED)
        };
        assert_eq!(facts(&waits, &first(), &[]).why(), "audit waits for standby s1");
        let off = |facts: &mut Facts<'_>| facts.is_enabled = false;
        assert_eq!(why(Reported(State::Paused), first(), off), "delivery is switched off");
        assert_eq!(
            why(NotServed, first(), |facts| facts.is_standby = true),
            "this server is a standby"
        );
        assert_eq!(
            why(CONNECTED, first(), |facts| facts.is_free = true),
            "no worker owns p03"
        );
        let blocked = |blocker| Lane {
            blocker: Some(blocker),
            ..first()
        };
        assert_eq!(why(CONNECTED, blocked(6), |_| {}), "behind message 6");
        assert_eq!(
            why(CONNECTED, blocked(8), |_| {}),
            "it is next",
            "a retried blocker comes later"
        );
    }
}
