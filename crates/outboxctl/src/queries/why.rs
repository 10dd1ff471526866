//! Why a message is not delivered: reads the facts about a message and derives the reasons from them, the most
//! specific first.

use super::message::MessageRow;
use super::model::{Check, Destination, Partition};
use super::state::DestinationState::{Missing, Reported};
use super::state::{MessageStatus, Parsed};
use super::{Fetch, Parameters, views};
use crate::format::{duration, stamp};
use outbox_worker::State;
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// The facts that affect a message, besides its own row.
#[derive(Default)]
pub struct Facts {
    /// The server is a standby.
    pub is_standby: bool,
    pub leasing: bool,
    /// The failed health checks that stop the delivery of all messages, or of those for its destination.
    pub problems: Vec<Check>,
    pub destination: Option<Destination>,
    pub partition: Option<Partition>,
    /// The message of its key or its partition behind which it waits.
    pub ahead: Option<Ahead>,
    /// The oldest open transaction that may have enqueued before it.
    pub transaction: Option<Transaction>,
}

/// A message behind which another one waits.
#[derive(Default, Deserialize)]
pub struct Ahead {
    seq: i64,
    status: Parsed<MessageStatus>,
    last_error: Option<String>,
    available_at: Option<String>,
    /// Whether it blocks its whole partition, not only its key.
    whole: bool,
}

/// The query for the [`Ahead`] of message `$4` with key `$3`, to destination `$1` in partition `$2`. It returns the
/// strongest blocker first. A message that was put behind another one (`$5`) may wait behind a later seq, if that was
/// replayed or retried by hand. A lane has no index by key, so only its first 10,000 rows are searched.
const AHEAD: &str = "
    (select h.seq, h.status, h.last_error, h.available_at, true as whole
     from outbox_internal.blocked_lanes() l cross join lateral (
       select d.seq, 'dead' as status, d.reason as last_error, null::timestamptz as available_at
       from outbox_dead d where d.seq = l.blocker and d.destination = l.destination
       union all
       select w.seq, 'retrying', w.last_error, w.due_at
       from outbox_waiting w where w.seq = l.blocker and w.destination = l.destination) h
     where l.destination = $1 and l.partition = $2 and l.blocker < $4)
    union all
    (select d.seq, 'dead' as status, d.reason as last_error, null::timestamptz as available_at, false from outbox_dead d
     where d.blocks and d.partition = $2 and d.destination = $1 and d.key = $3 order by d.seq limit 1)
    union all
    (select w.seq, 'retrying', w.last_error, w.due_at, false from outbox_waiting w
     where w.due_at is not null and w.state = 'b' and w.partition = $2 and w.destination = $1
       and w.key = $3 and (w.seq < $4 or ($5 and w.seq <> $4)) order by w.seq limit 1)
    union all
    (select o.seq, 'ready', o.last_error, null, false
     from (select * from outbox x where x.destination = $1 and x.partition = $2 order by x.seq limit 10000) o
     where o.seq < $4 and o.key = $3 order by o.seq limit 1)
    limit 1";

/// An open transaction that has enqueued.
#[derive(Default, Deserialize)]
pub struct Transaction {
    /// `None` = the transaction is prepared.
    pid: Option<i32>,
    /// `None` = the transaction has no xid yet: so far the session keeps what it enqueued in memory.
    xid: Option<String>,
    /// The name of a prepared transaction, as a literal of SQL.
    gid: Option<String>,
    age_s: f64,
}

/// The query for the oldest [`Transaction`] that may have enqueued before message `$1`, open for more than 1 s.
const TRANSACTION: &str = "
    select t.pid, t.xid::text as xid, quote_literal(g.gid) as gid, extract(epoch from t.age)::float8 as age_s
    from outbox_open_transactions() t left join pg_prepared_xacts g on g.transaction = t.xid and t.prepared
    where t.low <= $1 and t.age > interval '1 second' order by t.age desc limit 1";

/// The query for the failed health checks that affect a message to destination `$1` in partition `$2`. Most
/// problems of a destination are in its own row, but only its checks have the remedies.
static PROBLEMS: LazyLock<String> = LazyLock::new(|| {
    format!(
        r#"select h.* from ({}) h
           where not h.ok and (h."check" in ('preload', 'enabled', 'identity', 'role', 'workers', 'source', 'standbys')
             or h."check" in ('broker', 'blocked', 'destination', 'bodies') and h.destination = $1
             or h."check" = 'partitions' and not exists (select from outbox_partitions p where p.partition = $2))"#,
        views::HEALTH
    )
});

static DESTINATION: LazyLock<String> =
    LazyLock::new(|| format!("select d.* from ({}) d where d.name = $1", views::DESTINATIONS));

static PARTITION: LazyLock<String> =
    LazyLock::new(|| format!("select p.* from ({}) p where p.label = $1", views::PARTITIONS));

#[derive(Deserialize)]
struct Surroundings {
    is_standby: bool,
    leasing: bool,
}

const SURROUNDINGS: &str = "select pg_is_in_recovery() as is_standby, leasing from outbox_settings";

/// The reasons why the message of this row is not delivered.
pub async fn of<S: Fetch + Sync>(session: &S, message: &MessageRow) -> Result<Vec<Reason>, S::Error> {
    if message.has_ended() || message.status.is(MessageStatus::Dead) {
        return Ok(reasons(message, &Facts::default()));
    }
    let (seq, destination) = (&message.seq, &message.destination);
    let is_behind = message.status.is(MessageStatus::Blocked);
    let surroundings: Vec<Surroundings> = session.fetch(SURROUNDINGS, &[]).await?;
    let (is_standby, leasing) = surroundings
        .first()
        .map_or((false, false), |row| (row.is_standby, row.leasing));
    let lane: &Parameters<'_> = &[destination, &message.partition, &message.key, seq, &is_behind];
    let facts = Facts {
        is_standby,
        leasing,
        problems: session.fetch(&PROBLEMS, &[destination, &message.partition]).await?,
        destination: session.fetch(&DESTINATION, &[destination]).await?.pop(),
        partition: session.fetch(&PARTITION, &[&message.partition_key]).await?.pop(),
        ahead: session.fetch(AHEAD, lane).await?.pop(),
        transaction: session.fetch(TRANSACTION, &[seq]).await?.pop(),
    };
    Ok(reasons(message, &facts))
}

/// A reason as a sentence, and the command that removes the cause, if there is one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub why: String,
    pub remedy: Option<String>,
    /// The seq of the message behind which it waits.
    #[serde(skip)]
    pub behind: Option<i64>,
}

fn reason(why: impl Into<String>, remedy: impl Into<Option<String>>) -> Reason {
    Reason {
        why: why.into(),
        remedy: remedy.into(),
        behind: None,
    }
}

/// All reasons why the message is not delivered, those that affect only this message first. A message that has ended
/// has none.
fn reasons(message: &MessageRow, facts: &Facts) -> Vec<Reason> {
    let status = message.status.known();
    if message.has_ended() {
        return Vec::new();
    }
    let (seq, destination) = (message.seq, message.destination.as_str());
    let last_error = message.last_error.as_deref().unwrap_or_default();
    let due = message.available_at.as_deref().map(stamp).unwrap_or_default();
    let command = |verb: &str, seq: i64| match destination {
        "default" => format!("outboxctl {verb} {seq}"),
        other => format!("outboxctl {verb} {seq} --destination {other}"),
    };
    if status == Some(MessageStatus::Dead) {
        let keeps = match message.blocks {
            Some(true) => ", and later messages of its key wait for it",
            _ => "",
        };
        return vec![reason(
            format!("It was given up{keeps}: {last_error}"),
            format!("{}, or {}", command("retry", seq), command("discard", seq)),
        )];
    }
    if facts.is_standby {
        return vec![reason(
            "This server is a standby: only the workers of its primary deliver.",
            None,
        )];
    }
    let mut reasons = Vec::new();
    let awaited_standbys = facts.destination.as_ref().and_then(Destination::awaited_standbys);
    match status {
        Some(MessageStatus::InFlight) if awaited_standbys.is_none() => {
            reasons.push(reason(
                "A worker holds it: it is being sent, or it is parked for an open transaction with its key.",
                None,
            ));
        }
        Some(MessageStatus::Scheduled) => {
            let why = format!("It is scheduled for {due}.");
            reasons.push(reason(why, command("retry", seq)));
        }
        Some(MessageStatus::Retrying) => {
            let first = match last_error.starts_with("unroutable") {
                true => "; bind a queue for it first",
                false => "",
            };
            let why = format!("Its last attempt failed, and the next one is due at {due}: {last_error}{first}");
            reasons.push(reason(why, command("retry", seq)));
        }
        _ => {}
    }
    reasons.extend(facts.ahead.as_ref().map(|ahead| behind(ahead, &command)));
    let of_standbys = |problem: &&Check| problem.check == "standbys";
    reasons.extend(awaited_standbys.map(|awaited| {
        let problem = facts.problems.iter().find(of_standbys);
        let remedy = problem
            .map(|problem| problem.remedy.clone())
            .filter(|remedy| !remedy.is_empty());
        reason(format!("Destination {destination} {awaited}."), remedy)
    }));
    reasons.extend(
        facts
            .problems
            .iter()
            .filter(|problem| !of_standbys(problem))
            .map(|problem| {
                reason(
                    format!("{}.", problem.problem),
                    Some(problem.remedy.clone()).filter(|remedy| !remedy.is_empty()),
                )
            }),
    );
    if let Some(row) = &facts.destination
        && !is_reported(row, &facts.problems)
    {
        reasons.extend(of_destination(row, &facts.problems));
    }
    let is_free = facts
        .partition
        .as_ref()
        .is_some_and(|partition| partition.owner.is_none());
    if is_free && facts.leasing && facts.problems.is_empty() {
        let why = format!("No worker owns partition {} at the moment.", message.partition_key);
        reasons.push(reason(why, None));
    }
    if let Some(transaction) = &facts.transaction
        && status != Some(MessageStatus::Scheduled)
    {
        reasons.push(of_transaction(transaction));
    }
    if reasons.is_empty() {
        let first = facts
            .partition
            .as_ref()
            .and_then(|partition| partition.first_waiting_seq);
        let oldest = facts.destination.as_ref().and_then(|destination| destination.oldest_s);
        let oldest = oldest.map(duration).unwrap_or_default();
        reasons.push(match first.filter(|first| *first != seq) {
            None => reason("Nothing blocks it: it is the next message of its partition.", None),
            Some(first) => reason(
                format!("Nothing blocks it: earlier messages are delivered first. The first one of its partition is {first}, and the oldest one for this destination has waited for {oldest}."),
                None,
            ),
        });
    }
    reasons
}

fn behind(ahead: &Ahead, command: &dyn Fn(&str, i64) -> String) -> Reason {
    let seq = ahead.seq;
    let last_error = ahead.last_error.as_deref().unwrap_or_default();
    let what = if ahead.whole { "partition" } else { "key" };
    let found = match ahead.status.known() {
        Some(MessageStatus::Dead) => reason(
            format!("It waits behind message {seq} of its {what}, which is dead: {last_error}"),
            format!("{}, or {}", command("retry", seq), command("discard", seq)),
        ),
        Some(MessageStatus::Retrying) => {
            let due = ahead.available_at.as_deref().map(stamp).unwrap_or_default();
            reason(
                format!(
                    "It waits behind message {seq} of its {what}, which failed and is retried at {due}: {last_error}"
                ),
                command("retry", seq),
            )
        }
        _ => reason(format!("It waits behind message {seq} of its {what}."), None),
    };
    Reason {
        behind: Some(seq),
        ..found
    }
}

fn of_transaction(transaction: &Transaction) -> Reason {
    let since = duration(transaction.age_s);
    let waits = "if it has enqueued with the key of this message, the message waits for it.";
    match transaction.pid {
        Some(pid) => reason(
            format!("A transaction that has enqueued has been open for {since} (pid {pid}); {waits}"),
            format!("end it, or select pg_terminate_backend({pid})"),
        ),
        None => reason(
            format!(
                "A prepared transaction that has enqueued has been open for {since} (xid {}); {waits}",
                transaction.xid.as_deref().unwrap_or_default()
            ),
            match &transaction.gid {
                Some(gid) => format!("COMMIT PREPARED {gid}, or ROLLBACK PREPARED {gid}"),
                None => "COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts".to_owned(),
            },
        ),
    }
}

/// Whether a check has reported the state of the destination.
fn is_reported(row: &Destination, problems: &[Check]) -> bool {
    let check = match row.state.known() {
        Some(Reported(State::Down)) => "broker",
        Some(Reported(State::Blocked)) => "blocked",
        Some(Reported(State::Unconfigured) | Missing) => "destination",
        _ => return false,
    };
    problems.iter().any(|problem| problem.check == check)
}

fn of_destination(row: &Destination, problems: &[Check]) -> Option<Reason> {
    let destination = &row.name;
    let detail = row.detail.as_deref().unwrap_or_default();
    let with_detail = |text: &str| match detail {
        "" => format!("{text}."),
        detail => format!("{text}: {detail}"),
    };
    let check = Some(format!("outboxctl check {destination}"));
    match row.state.known()? {
        Reported(State::Pausing) if detail.contains("paused by ") => Some(reason(
            with_detail(&format!("Destination {destination} is pausing")),
            format!("outboxctl resume {destination}"),
        )),
        Reported(State::Pausing) => None,
        Reported(State::Paused) => match detail.strip_prefix("paused ") {
            Some(by) => Some(reason(
                format!("Destination {destination} is paused {by}"),
                format!("outboxctl resume {destination}"),
            )),
            // Either delivery is switched off, which another reason reports, or the worker has not yet read that the
            // destination was resumed.
            None if problems.iter().any(|problem| problem.check == "enabled") => None,
            None => Some(reason(
                format!("Destination {destination} was resumed; delivery continues within about a second."),
                None,
            )),
        },
        Reported(State::Down) => Some(reason(
            format!(
                "Destination {destination} is down ({}): {detail}",
                row.reason.as_deref().unwrap_or_default()
            ),
            check,
        )),
        Reported(State::Blocked) => Some(reason(with_detail("The broker blocks publishers"), None)),
        Reported(State::Unconfigured) => Some(reason(
            with_detail(&format!("Destination {destination} cannot be used with its settings")),
            check,
        )),
        Missing => Some(reason(
            format!("Destination {destination} no longer exists."),
            "create it with CREATE SERVER, or discard the message".to_owned(),
        )),
        Reported(State::Connecting | State::Starting) => Some(reason(
            format!("A worker is connecting to destination {destination}."),
            None,
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queries::state::DestinationState::{self, NotServed};

    fn why(message: &MessageRow, change: impl Fn(&mut Facts)) -> Vec<(String, String)> {
        let mut facts = Facts {
            leasing: true,
            destination: Some(Destination {
                name: message.destination.clone(),
                oldest_s: Some(61.0),
                ..destination(Reported(State::Connected))
            }),
            partition: Some(Partition {
                owner: Some("server-1".into()),
                first_waiting_seq: Some(3),
                ..Partition::default()
            }),
            ..Facts::default()
        };
        change(&mut facts);
        let reasons = reasons(message, &facts).into_iter();
        reasons
            .map(|reason| (reason.why, reason.remedy.unwrap_or_default()))
            .collect()
    }

    fn message(status: MessageStatus) -> MessageRow {
        MessageRow {
            seq: 7,
            destination: "default".into(),
            status: status.into(),
            partition_key: "p03".into(),
            available_at: Some("2026-11-21T05:12:18+00:00".into()),
            last_error: Some("NO_ROUTE".into()),
            ..MessageRow::default()
        }
    }

    fn destination(state: DestinationState) -> Destination {
        Destination {
            name: "default".into(),
            state: state.into(),
            ..Destination::default()
        }
    }

    fn problem(check: &str, problem: &str, remedy: &str) -> Check {
        Check {
            destination: None,
            check: check.into(),
            ok: false,
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    #[test]
    fn a_message_that_has_ended_has_no_reason() {
        assert_eq!(why(&message(MessageStatus::Published), |_| {}), []);
        assert_eq!(why(&message(MessageStatus::Discarded), |_| {}), []);
    }

    #[test]
    fn a_message_whose_destination_waits_for_a_standby_names_it_once_with_the_remedy() {
        let waits = |facts: &mut Facts| {
            let known = facts.destination.as_mut().expect("a destination");
            known.reason = Some("standby".into());
            known.detail = Some("waits for standby s1".into());
            facts.problems = vec![problem("standbys", "messages wait for standbys", "start them")];
        };
        let expected = (
            "Destination default waits for standby s1.".to_owned(),
            "start them".to_owned(),
        );
        for status in [MessageStatus::InFlight, MessageStatus::Ready] {
            assert_eq!(why(&message(status), waits), std::slice::from_ref(&expected));
        }
    }

    #[test]
    fn a_dead_letter_has_its_error_and_both_remedies() {
        let dead = MessageRow {
            blocks: Some(true),
            destination: "bus".into(),
            ..message(MessageStatus::Dead)
        };
        let [(text, remedy)] = &why(&dead, |_| {})[..] else {
            panic!("not one reason")
        };
        assert!(text.contains("NO_ROUTE") && text.contains("later messages"), "{text}");
        assert_eq!(
            remedy,
            "outboxctl retry 7 --destination bus, or outboxctl discard 7 --destination bus"
        );
    }

    #[test]
    fn an_unblocked_message_names_the_first_of_its_partition() {
        let text = &why(&message(MessageStatus::Ready), |_| {})[0].0;
        assert!(
            text.contains("earlier messages") && text.contains("is 3") && text.contains("1 min 1 s"),
            "{text}"
        );
        let is_first = |facts: &mut Facts| facts.partition.as_mut().expect("one").first_waiting_seq = Some(7);
        let text = &why(&message(MessageStatus::Ready), is_first)[0].0;
        assert!(text.contains("next message of its partition"), "{text}");
    }

    #[test]
    fn a_message_behind_another_names_it_and_its_remedy() {
        let behind = |status: MessageStatus, last_error: &str| {
            why(&message(MessageStatus::Ready), |facts| {
                facts.ahead = Some(Ahead {
                    seq: 3,
                    status: status.into(),
                    last_error: Some(last_error.into()),
                    available_at: Some("2026-11-21T05:12:18Z".into()),
                    whole: status == MessageStatus::Dead,
                })
            })
        };
        let reasons = behind(MessageStatus::Dead, "refused");
        assert_eq!(reasons[0].1, "outboxctl retry 3, or outboxctl discard 3");
        assert!(reasons[0].0.contains("message 3 of its partition, ") && reasons[0].0.contains("refused"));
        assert_eq!(reasons.len(), 1);
        let reasons = behind(MessageStatus::Retrying, "x");
        assert_eq!(reasons[0].1, "outboxctl retry 3");
        assert!(reasons[0].0.contains("message 3 of its key, "), "{reasons:?}");
    }

    #[test]
    fn on_a_standby_it_is_the_only_reason() {
        let reasons = why(&message(MessageStatus::Ready), |facts| {
            facts.is_standby = true;
            facts.destination = Some(destination(NotServed));
        });
        assert!(reasons.len() == 1 && reasons[0].0.contains("standby"), "{reasons:?}");
    }

    #[test]
    fn every_reason_is_reported() {
        let failed = MessageRow {
            ..message(MessageStatus::Retrying)
        };
        let reasons = why(&failed, |facts| {
            facts.destination = Some(Destination {
                detail: Some("paused by ann: broker is being moved".into()),
                ..destination(Reported(State::Paused))
            });
            facts.transaction = Some(Transaction {
                pid: Some(4711),
                age_s: 90.0,
                ..Transaction::default()
            });
            facts.problems = vec![problem("enabled", "outbox.enabled is off: messages wait", "set it on")];
        });
        let remedies: Vec<&str> = reasons.iter().map(|(_, remedy)| remedy.as_str()).collect();
        assert_eq!(
            remedies,
            [
                "outboxctl retry 7",
                "set it on",
                "outboxctl resume default",
                "end it, or select pg_terminate_backend(4711)"
            ]
        );
        assert!(
            reasons[0].0.contains("2026-11-21 05:12:18+00: NO_ROUTE"),
            "{}",
            reasons[0].0
        );
        assert_eq!(reasons[1].0, "outbox.enabled is off: messages wait.");
        assert_eq!(
            reasons[2].0,
            "Destination default is paused by ann: broker is being moved"
        );
    }

    #[test]
    fn a_prepared_transaction_is_ended_by_its_name() {
        let reasons = why(&message(MessageStatus::Ready), |facts| {
            facts.transaction = Some(Transaction {
                gid: Some("'one'".into()),
                ..Transaction::default()
            });
        });
        assert_eq!(reasons[0].1, "COMMIT PREPARED 'one', or ROLLBACK PREPARED 'one'");
    }

    #[test]
    fn a_destination_that_was_resumed_or_is_switched_off_is_not_called_paused() {
        let resumed = why(&message(MessageStatus::Ready), |facts| {
            facts.destination = Some(destination(Reported(State::Paused)))
        });
        let [(text, remedy)] = &resumed[..] else {
            panic!("{resumed:?}")
        };
        assert!(text.contains("continues within") && remedy.is_empty(), "{resumed:?}");
        let off = why(&message(MessageStatus::Ready), |facts| {
            facts.destination = Some(destination(Reported(State::Paused)));
            facts.problems = vec![problem("enabled", "outbox.enabled is off", "set it on")];
        });
        assert_eq!(off, [("outbox.enabled is off.".into(), "set it on".into())]);
    }

    #[test]
    fn each_state_of_a_destination_that_stops_delivery_is_reported() {
        for (state, word) in [
            (Reported(State::Down), "down"),
            (Reported(State::Blocked), "blocks"),
            (Reported(State::Unconfigured), "cannot be used"),
            (Missing, "no longer exists"),
            (Reported(State::Connecting), "connecting"),
        ] {
            let reasons = why(&message(MessageStatus::Ready), |facts| {
                facts.destination = Some(destination(state))
            });
            assert!(reasons[0].0.contains(word), "{state:?}: {}", reasons[0].0);
        }
        let reasons = why(&message(MessageStatus::Ready), |facts| {
            facts.destination = Some(destination(Reported(State::Down)));
            facts.problems = vec![problem("broker", "the broker cannot be reached: refused", "start it")];
        });
        assert_eq!(
            reasons,
            [("the broker cannot be reached: refused.".into(), "start it".into())],
            "the problem is reported once"
        );
        for (state, check) in [(Missing, "destination"), (Reported(State::Blocked), "blocked")] {
            let reasons = why(&message(MessageStatus::Ready), |facts| {
                facts.destination = Some(destination(state));
                facts.problems = vec![problem(check, "it waits", "create it")];
            });
            assert_eq!(reasons, [("it waits.".into(), "create it".into())], "{check}");
        }
        let free = |facts: &mut Facts| facts.partition.as_mut().expect("one").owner = None;
        let reasons = why(&message(MessageStatus::Ready), free);
        assert!(reasons[0].0.contains("p03"), "{}", reasons[0].0);
    }
}
