//! Without a terminal, or in the background: a line for each reading.

use crate::format;
use crate::queries::model::{Part, PartitionRow, Snapshot, WorkerRow};
use crate::screen::text::{age, harmless, known, rate};
use serde::Serialize;
use serde_json::{Value, json};

pub fn line(snapshot: &Snapshot) -> String {
    let mut said = format!("{} ", snapshot.now.clock);
    match &snapshot.status {
        Ok(status) => {
            let number = |value: Option<i64>| known(value, |value| value.to_string());
            said += &format!(
                "pending {}, in flight {}, dead {}, published {}, published/s {}, failed/s {}, oldest {}",
                number(status.pending),
                number(status.in_flight),
                status.dead,
                number(status.published_total),
                known(status.published_per_s, rate),
                known(status.failed_per_s, rate),
                known(status.oldest_s, age),
            );
        }
        Err(why) => said += &format!("status is not readable: {why}"),
    }
    let workers: &[WorkerRow] = snapshot.workers.as_deref().unwrap_or_default();
    let alive = workers.iter().filter(|worker| worker.is_alive).count();
    let partitions: &[PartitionRow] = snapshot.partitions.as_deref().unwrap_or_default();
    let owned = partitions.iter().filter(|partition| partition.owner.is_some()).count();
    said += &format!(
        ", workers {alive}/{}, partitions {owned}/{}",
        workers.len(),
        partitions.len()
    );
    for problem in snapshot.problems.iter().flatten() {
        said += &format!("; {}: {}", problem.title(), problem.problem);
    }
    harmless(&said)
}

/// A reading as one JSON document, in which control characters are escaped.
pub fn json(snapshot: &Snapshot) -> String {
    fn part<T: Serialize>(part: &Part<T>) -> Value {
        part.as_ref()
            .map_or_else(|error| json!({ "error": error }), |rows| json!(rows))
    }
    format::json(&json!({
        "now": snapshot.now,
        "status": part(&snapshot.status),
        "throughput": part(&snapshot.throughput),
        "partitions": part(&snapshot.partitions),
        "workers": part(&snapshot.workers),
        "passes": part(&snapshot.passes),
        "destinations": part(&snapshot.destinations),
        "errors": part(&snapshot.errors),
        "messages": part(&snapshot.messages),
        "problems": part(&snapshot.problems),
    }))
}
