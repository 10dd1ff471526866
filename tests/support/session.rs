//! What tests do in a session: publish events, run statements, read a value. A statement that fails panics with its
//! SQL.

use postgres::GenericClient;
use postgres::types::FromSqlOwned;
use serde_json::{Value, json};

use crate::consumer::label;
use crate::oracle::{Fate, Sent};
use crate::{Cluster, DB};

/// A call of outbox_publish. The payload has a label, by which a test recognises the message.
#[derive(Clone)]
pub struct Event {
    payload: Value,
    key: String,
    operation: &'static str,
    more: String,
}

impl Event {
    /// An event of type T and of the aggregate "item" "a", with the operation "changed".
    pub fn new(label: impl Into<Value>) -> Self {
        Self {
            payload: json!({ "label": label.into() }),
            key: "a".to_owned(),
            operation: "changed",
            more: String::new(),
        }
    }

    /// Sets the id of the aggregate: the key of the message is "item:" and this.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = key.into();
        self
    }

    /// Sets the operation, the last word of the routing key.
    pub fn operation(mut self, operation: &'static str) -> Self {
        self.operation = operation;
        self
    }

    pub fn to(self, destination: &str) -> Self {
        self.with(&format!("destination => '{destination}'"))
    }

    /// Adds an argument, in SQL.
    pub fn with(mut self, argument: &str) -> Self {
        self.more += &format!(", {argument}");
        self
    }

    /// The record for the oracle, once the event is committed.
    pub fn sent(&self) -> Sent {
        Sent {
            label: label(&json!({ "payload": self.payload })),
            payload: self.payload.clone(),
            fate: Fate::Committed,
        }
    }

    /// The statement that publishes the event.
    pub fn sql(&self) -> String {
        let payload = self.payload.to_string().replace('\'', "''");
        let Self {
            key, operation, more, ..
        } = self;
        format!("select outbox_publish('T', '{payload}', 'item', '{key}', '{operation}'{more})")
    }
}

impl<T: Into<Value>> From<T> for Event {
    fn from(label: T) -> Self {
        Self::new(label)
    }
}

/// Clients and transactions.
pub trait Session {
    /// Runs statements.
    fn run(&mut self, sql: &str);

    /// The single value of the single row that `sql` returns.
    fn value<T: FromSqlOwned>(&mut self, sql: &str) -> T;

    /// Publishes an event, or one with this label. Returns its seq.
    fn publish(&mut self, event: impl Into<Event>) -> i64;
}

impl<C: GenericClient> Session for C {
    #[track_caller]
    fn run(&mut self, sql: &str) {
        if let Err(error) = self.batch_execute(sql) {
            panic!("{sql}: {error:#?}");
        }
    }

    #[track_caller]
    fn value<T: FromSqlOwned>(&mut self, sql: &str) -> T {
        let row = match self.query_one(sql, &[]) {
            Ok(row) => row,
            Err(error) => panic!("{sql}: {error:#?}"),
        };
        row.try_get(0).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    #[track_caller]
    fn publish(&mut self, event: impl Into<Event>) -> i64 {
        self.value(&event.into().sql())
    }
}

impl Cluster {
    /// Publishes an event on a connection of its own. Returns its seq.
    #[track_caller]
    pub fn publish(&self, event: impl Into<Event>) -> i64 {
        self.connect(DB).publish(event)
    }

    /// Publishes events of one key with the labels `key 1` to `key count`, in one transaction.
    pub fn publish_run(&self, destination: &str, key: &str, count: usize) {
        let payload = format!("jsonb_build_object('label', '{key} ' || n)");
        let event =
            format!("outbox_publish('T', {payload}, 'item', '{key}', 'changed', destination => '{destination}')");
        self.exec(DB, &format!("select {event} from generate_series(1, {count}) n"));
    }
}

/// Publishes events without a key in one transaction.
pub fn publish_many(cluster: &Cluster, destination: &str, kind: &str, count: usize) {
    let event = format!("outbox_publish('{kind}', '{{}}', destination => '{destination}')");
    cluster.exec(DB, &format!("select {event} from generate_series(1, {count})"));
}

/// Types statements one after the other, as psql does.
pub fn type_sql(cluster: &Cluster, command: &str) {
    let mut client = cluster.connect(DB);
    command.split("; ").for_each(|statement| client.run(statement));
}
