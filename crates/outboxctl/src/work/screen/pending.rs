//! Counts the pending messages in the partitions of this worker. It uses a separate session, so that the worker's
//! session never waits for a count. Runs as a task of the runtime.

use crate::connect::{self, ConnectArgs};
use crate::failure::{Code, Failure};
use crate::work::board::Board;
use crate::work::snapshot::Depth;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};
use tokio_postgres::{Client, Row};

const REFRESH_EVERY: Duration = Duration::from_secs(1);
/// The pause after a count, as a multiple of the time that the count took.
const REST: u32 = 9;
/// The wait before a new session is opened.
const RECONNECT_AFTER: Duration = Duration::from_secs(5);
/// The longest wait for the server.
const ANSWER: Duration = Duration::from_secs(15);

const SETTINGS: &str = "set application_name = 'outboxctl work, screen'; set default_transaction_read_only = on;
    set statement_timeout = '2s'; set lock_timeout = '500ms'; set jit = off";

/// Counts until the program ends.
pub async fn watch(connect: ConnectArgs, board: Arc<Board>) {
    loop {
        let session = timeout(ANSWER, open(&connect))
            .await
            .unwrap_or_else(|_| Err(unanswered()));
        let Err(failure) = match session {
            Ok(client) => count(&client, &board).await,
            Err(failure) => Err(failure),
        };
        board.count(Err(failure.message));
        sleep(RECONNECT_AFTER).await;
    }
}

async fn open(connect: &ConnectArgs) -> Result<Client, Failure> {
    let session = connect::connect_session(connect).await?;
    session.client.batch_execute(SETTINGS).await?;
    Ok(session.client)
}

async fn count(client: &Client, board: &Board) -> Result<Infallible, Failure> {
    let sql = "select partition, pending, is_all from outbox_internal.work_pending($1::smallint[])";
    loop {
        let began = Instant::now();
        let partitions = board.partitions();
        let rows = timeout(ANSWER, client.query(sql, &[&partitions])).await;
        let rows = rows.map_err(|_| unanswered())??;
        let depth = |row: &Row| Depth {
            pending: row.get(1),
            is_all: row.get(2),
        };
        let counted: BTreeMap<i16, Depth> = rows.iter().map(|row| (row.get(0), depth(row))).collect();
        board.count(Ok(counted));
        sleep(REFRESH_EVERY.max(began.elapsed() * REST)).await;
    }
}

fn unanswered() -> Failure {
    let limit_s = ANSWER.as_secs();
    Failure::new(
        Code::CannotConnect,
        format!("the server has not answered for {limit_s} s"),
    )
}
