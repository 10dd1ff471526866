//! Why does a message not move? From what is known of it, in the order in which a person would ask. Pure.

use super::{age, text, time};
use crate::output::duration;
use serde::Serialize;
use serde_json::Value;

/// What is known of a message beside its own row. What there is none of is null.
pub struct Facts<'a> {
    pub message: &'a Value,
    /// The server follows another one.
    pub standby: bool,
    /// Problems of outbox_health that keep every message, or those for its destination: `check, problem, remedy`.
    pub problems: &'a [Value],
    /// Its row of outbox_destination_status.
    pub destination: &'a Value,
    /// Its row of outbox_partition_status.
    pub partition: &'a Value,
    /// The one that it waits behind: `seq, status, last_error, available_at`, `whole` if it holds up its whole partition.
    pub ahead: &'a Value,
    /// The oldest transaction that is open and may have enqueued before it: `pid, xid, age_s`.
    pub transaction: &'a Value,
}

/// A sentence, and the command that mends it, if there is one.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub why: String,
    pub remedy: Option<String>,
}

fn reason(why: impl Into<String>, remedy: impl Into<Option<String>>) -> Reason {
    Reason {
        why: why.into(),
        remedy: remedy.into(),
    }
}

/// Every reason that keeps it, the ones that keep it alone first. Of one that has ended there is none.
pub fn reasons(facts: &Facts<'_>) -> Vec<Reason> {
    let message = facts.message;
    let status = text(message, "status");
    if matches!(status, "published" | "discarded") {
        return Vec::new();
    }
    let seq = &message["seq"];
    let destination = text(message, "destination");
    let command = |verb: &str, seq: &Value| match destination {
        "default" => format!("outboxctl {verb} {seq}"),
        other => format!("outboxctl {verb} {seq} --destination {other}"),
    };
    if status == "dead" {
        let keeps = if message["blocks"] == true {
            ", and later messages of its key wait for it"
        } else {
            ""
        };
        let why = format!("It is given up{keeps}: {}", text(message, "last_error"));
        return vec![reason(
            why,
            format!("{}, or {}", command("retry", seq), command("discard", seq)),
        )];
    }
    if facts.standby {
        return vec![reason(
            "This server is a standby: the workers of its primary deliver.",
            None,
        )];
    }
    let mut reasons = Vec::new();
    match status {
        "in flight" => {
            reasons.push(reason(
                "A worker holds it: it is being sent, or kept for an earlier one of its key.",
                None,
            ));
        }
        "scheduled" => {
            let why = format!("It is scheduled for {}.", time(message, "available_at"));
            reasons.push(reason(why, command("retry", seq)));
        }
        "retrying" if !message["waits"].is_null() => {
            let why = format!(
                "Its last attempt failed, and the next one is due at {}: {}",
                time(message, "available_at"),
                text(message, "last_error")
            );
            reasons.push(reason(why, command("retry", seq)));
        }
        _ => {}
    }
    if !facts.ahead.is_null() {
        reasons.push(behind(facts.ahead, &command));
    }
    reasons.extend(facts.problems.iter().map(|problem| {
        reason(
            format!("{}.", text(problem, "problem")),
            Some(text(problem, "remedy").to_owned()).filter(|remedy| !remedy.is_empty()),
        )
    }));
    let told = facts.problems.iter().any(|problem| text(problem, "check") == "broker");
    if !(told && text(facts.destination, "state") == "down") {
        reasons.extend(of_destination(facts.destination, destination));
    }
    if facts.partition["lease_owner"].is_null() && facts.partition["leasing"] == true && facts.problems.is_empty() {
        let why = format!(
            "No worker owns partition {} at this moment.",
            text(message, "partition_key")
        );
        reasons.push(reason(why, None));
    }
    if !facts.transaction.is_null() && status != "scheduled" {
        let transaction = facts.transaction;
        let since = age(transaction, "age_s");
        reasons.push(match transaction["pid"].as_i64() {
            Some(pid) => reason(
                format!("A transaction that has enqueued is open for {since} (pid {pid}); if it holds the key of this message, the message waits for it."),
                format!("end it, or select pg_terminate_backend({pid})"),
            ),
            None => reason(
                format!("A prepared transaction that has enqueued is open for {since} (xid {}); if it holds the key of this message, the message waits for it.", text(transaction, "xid")),
                "COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts".to_owned(),
            ),
        });
    }
    if reasons.is_empty() {
        let first = &facts.partition["first_waiting_seq"];
        let oldest = facts.destination["oldest_pending_age_s"]
            .as_f64()
            .map(duration)
            .unwrap_or_default();
        reasons.push(match first.as_i64() == seq.as_i64() || first.is_null() {
            true => reason("Nothing keeps it: it is the next of its partition.", None),
            false => reason(
                format!("Nothing keeps it: it waits for its turn. The first of its partition is {first}, and the oldest for this destination has waited for {oldest}."),
                None,
            ),
        });
    }
    reasons
}

fn behind(ahead: &Value, command: &dyn Fn(&str, &Value) -> String) -> Reason {
    let seq = &ahead["seq"];
    let what = match ahead["whole"] == true {
        true => "partition",
        false => "key",
    };
    match text(ahead, "status") {
        "dead" => reason(
            format!(
                "It waits behind message {seq} of its {what}, which is dead: {}",
                text(ahead, "last_error")
            ),
            format!("{}, or {}", command("retry", seq), command("discard", seq)),
        ),
        "retrying" => reason(
            format!(
                "It waits behind message {seq} of its {what}, which failed and is tried again at {}: {}",
                time(ahead, "available_at"),
                text(ahead, "last_error")
            ),
            command("retry", seq),
        ),
        _ => reason(format!("It waits behind message {seq} of its {what}."), None),
    }
}

fn of_destination(row: &Value, destination: &str) -> Option<Reason> {
    let detail = text(row, "detail");
    let with_detail = |text: &str| match detail {
        "" => format!("{text}."),
        detail => format!("{text}: {detail}"),
    };
    let check = Some(format!("outboxctl check {destination}"));
    match text(row, "state") {
        "paused" => Some(reason(
            with_detail(&format!("Destination {destination} is paused")),
            format!("outboxctl resume {destination}"),
        )),
        "down" => Some(reason(
            format!("Destination {destination} is down ({}): {detail}", text(row, "reason")),
            check,
        )),
        "blocked" => Some(reason(with_detail("The broker blocks publishers"), None)),
        "unconfigured" => Some(reason(
            with_detail(&format!("Destination {destination} cannot be used as it is set")),
            check,
        )),
        "missing" => Some(reason(
            format!("There is no destination {destination} any more."),
            "CREATE SERVER of that name, or discard the message".to_owned(),
        )),
        "connecting" | "starting" => Some(reason(
            format!("A worker is connecting to destination {destination}."),
            None,
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn why(message: Value, change: impl Fn(&mut [Value; 4], &mut Vec<Value>)) -> Vec<(String, String)> {
        let mut others = [
            json!({ "state": "connected", "oldest_pending_age_s": 61.0 }),
            json!({ "lease_owner": "server-1", "leasing": true, "first_waiting_seq": 3 }),
            Value::Null,
            Value::Null,
        ];
        let mut problems = Vec::new();
        change(&mut others, &mut problems);
        let [destination, partition, ahead, transaction] = &others;
        let facts = Facts {
            message: &message,
            standby: message["standby"] == true,
            problems: &problems,
            destination,
            partition,
            ahead,
            transaction,
        };
        let reasons = reasons(&facts).into_iter();
        reasons
            .map(|reason| (reason.why, reason.remedy.unwrap_or_default()))
            .collect()
    }

    fn message(status: &str) -> Value {
        json!({ "seq": 7, "destination": "default", "status": status, "partition_key": "p03",
                "available_at": "2026-11-21T05:12:18+00:00", "last_error": "NO_ROUTE" })
    }

    #[test]
    fn what_has_ended_needs_no_reason() {
        assert_eq!(why(message("published"), |_, _| {}), []);
        assert_eq!(why(message("discarded"), |_, _| {}), []);
    }

    #[test]
    fn a_dead_message_says_why_and_both_ways_on() {
        let mut dead = message("dead");
        dead["blocks"] = true.into();
        dead["destination"] = "bus".into();
        let [(text, remedy)] = &why(dead, |_, _| {})[..] else {
            panic!("one reason")
        };
        assert!(text.contains("NO_ROUTE") && text.contains("later messages"), "{text}");
        assert_eq!(
            remedy,
            "outboxctl retry 7 --destination bus, or outboxctl discard 7 --destination bus"
        );
    }

    #[test]
    fn one_that_waits_for_its_turn_says_who_is_first() {
        let text = &why(message("pending"), |_, _| {})[0].0;
        assert!(
            text.contains("its turn") && text.contains("is 3") && text.contains("1 min 1 s"),
            "{text}"
        );
        let text = &why(message("pending"), |others, _| {
            others[1]["first_waiting_seq"] = 7.into()
        })[0]
            .0;
        assert!(text.contains("next of its partition"), "{text}");
    }

    #[test]
    fn one_behind_another_of_its_key_names_it_and_what_to_do_with_it() {
        let ahead = json!({ "seq": 3, "status": "dead", "last_error": "refused" });
        let reasons = why(message("pending"), |others, _| others[2] = ahead.clone());
        assert_eq!(reasons[0].1, "outboxctl retry 3, or outboxctl discard 3");
        assert!(reasons[0].0.contains("message 3") && reasons[0].0.contains("refused"));
        assert_eq!(reasons.len(), 1);
        let ahead =
            json!({ "seq": 3, "status": "retrying", "last_error": "x", "available_at": "2026-11-21T05:12:18Z" });
        let reasons = why(message("pending"), |others, _| others[2] = ahead.clone());
        assert_eq!(reasons[0].1, "outboxctl retry 3");
        assert!(reasons[0].0.contains("of its key, "), "{reasons:?}");
        let ahead = json!({ "seq": 3, "status": "dead", "last_error": "refused", "whole": true });
        let reasons = why(message("pending"), |others, _| others[2] = ahead.clone());
        assert!(reasons[0].0.contains("of its partition, "), "{reasons:?}");
    }

    #[test]
    fn on_a_standby_nothing_else_matters() {
        let mut pending = message("pending");
        pending["standby"] = true.into();
        let reasons = why(pending, |others, _| others[0]["state"] = "not served".into());
        assert!(reasons.len() == 1 && reasons[0].0.contains("standby"), "{reasons:?}");
    }

    #[test]
    fn every_reason_is_told() {
        let mut failed = message("retrying");
        failed["waits"] = "b".into();
        let reasons = why(failed, |others, problems| {
            others[0] = json!({ "state": "paused", "detail": "paused by ann: broker is being moved" });
            others[3] = json!({ "pid": 4711, "age_s": 90.0 });
            problems.push(json!({ "problem": "outbox.enabled is off: messages wait", "remedy": "set it on" }));
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
        assert!(reasons[2].0.contains("paused by ann"));
    }

    #[test]
    fn each_state_of_a_destination_that_keeps_messages_is_told() {
        for (state, word) in [
            ("down", "down"),
            ("blocked", "blocks"),
            ("unconfigured", "cannot be used"),
            ("missing", "no destination"),
            ("connecting", "connecting"),
        ] {
            let reasons = why(message("pending"), |others, _| others[0]["state"] = state.into());
            assert!(reasons[0].0.contains(word), "{state}: {}", reasons[0].0);
        }
        let reasons = why(message("pending"), |others, problems| {
            others[0] = json!({ "state": "down", "reason": "unreachable", "detail": "refused" });
            problems.push(
                json!({ "check": "broker", "problem": "the broker cannot be reached: refused", "remedy": "start it" }),
            );
        });
        assert_eq!(
            reasons,
            [("the broker cannot be reached: refused.".into(), "start it".into())],
            "said once"
        );
        let reasons = why(message("pending"), |others, _| others[1]["lease_owner"] = Value::Null);
        assert!(reasons[0].0.contains("p03"), "{}", reasons[0].0);
    }
}
