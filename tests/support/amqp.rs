//! AMQP for the tests: amqprs behind blocking calls. Called by the broker and the consumer.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::Ipv4Addr;
use std::time::Duration;

use amqprs::channel::Channel;
use amqprs::connection::{Connection, OpenConnectionArguments};
use amqprs::{FieldArray, FieldTable, FieldValue};
use serde_json::{Map, Value};

use crate::wait::{LONG, patient};

/// The address and port of a broker, and the user and password to log in with.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    pub host: Ipv4Addr,
    pub port: u16,
    pub user: String,
    pub password: String,
}

pub(crate) async fn connect(address: &Address) -> Result<Connection, amqprs::error::Error> {
    Connection::open(&OpenConnectionArguments::new(
        &address.host.to_string(),
        address.port,
        &address.user,
        &address.password,
    ))
    .await
}

/// A runtime on the calling thread. amqprs spawns tasks on it, which run only during a `block_on`.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("build a runtime")
}

/// Runs one operation on a new connection and closes the connection. The broker answers in order, so the close also
/// proves that the broker has handled the operation. No connection can be stale after a restart of the broker, and a
/// failed operation closes no other channel.
pub(crate) fn operate<T, F>(address: &Address, what: &str, operation: impl FnOnce(Channel) -> F) -> T
where
    F: Future<Output = Result<T, amqprs::error::Error>>,
{
    match try_operate(address, LONG, operation) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => panic!(
            "{what} at port {}: {error}; the broker's log has the reason",
            address.port
        ),
        Err(_) => panic!("{what} at port {}: no answer", address.port),
    }
}

pub(crate) fn try_operate<T, F>(
    address: &Address,
    timeout: Duration,
    operation: impl FnOnce(Channel) -> F,
) -> Result<Result<T, amqprs::error::Error>, tokio::time::error::Elapsed>
where
    F: Future<Output = Result<T, amqprs::error::Error>>,
{
    let all = async {
        let connection = connect(address).await?;
        let channel = connection.open_channel(None).await?;
        // The channel stays open until the connection closes. amqprs closes a dropped channel in a background task,
        // and the answer to that close could arrive on a closed connection.
        let value = operation(channel.clone()).await;
        connection.close().await?;
        value
    };
    runtime().block_on(async { tokio::time::timeout(patient(timeout), all).await })
}

/// Message headers as JSON. Bytes become an array of numbers, and a decimal becomes its text, since JSON lacks both.
pub(crate) fn headers_to_json(table: &FieldTable) -> BTreeMap<String, Value> {
    table
        .as_ref()
        .iter()
        .map(|(name, value)| (name.to_string(), to_json(value)))
        .collect()
}

fn to_json(value: &FieldValue) -> Value {
    match value {
        FieldValue::t(v) => Value::from(*v),
        FieldValue::b(v) => Value::from(*v),
        FieldValue::B(v) => Value::from(*v),
        FieldValue::s(v) => Value::from(*v),
        FieldValue::u(v) => Value::from(*v),
        FieldValue::I(v) => Value::from(*v),
        FieldValue::i(v) => Value::from(*v),
        FieldValue::l(v) => Value::from(*v),
        FieldValue::T(v) => Value::from(*v),
        FieldValue::f(v) => Value::from(*v),
        FieldValue::d(v) => Value::from(*v),
        FieldValue::D(v) => Value::from(v.to_string()),
        FieldValue::S(v) => Value::from(v.as_ref().as_str()),
        FieldValue::A(v) => Vec::from(v.clone()).iter().map(to_json).collect(),
        FieldValue::F(v) => Value::Object(headers_to_json(v).into_iter().collect()),
        FieldValue::V => Value::Null,
        FieldValue::x(v) => Value::from(Vec::<u8>::from(v.clone())),
    }
}

/// An AMQP table from a JSON object, for headers or the arguments of a declaration. An integer becomes a signed 64-bit
/// integer.
pub(crate) fn table_from_json(object: &Map<String, Value>) -> FieldTable {
    let mut table = FieldTable::new();
    for (name, value) in object {
        table.insert(
            name.as_str().try_into().expect("a name of at most 255 bytes"),
            from_json(value),
        );
    }
    table
}

fn from_json(value: &Value) -> FieldValue {
    match value {
        Value::Null => FieldValue::V,
        Value::Bool(v) => FieldValue::t(*v),
        Value::Number(v) => match v.as_i64() {
            Some(v) => FieldValue::l(v),
            None => FieldValue::d(v.as_f64().expect("a JSON number")),
        },
        Value::String(v) => FieldValue::from(v.as_str()),
        Value::Array(v) => {
            let values: Vec<FieldValue> = v.iter().map(from_json).collect();
            FieldValue::A(FieldArray::try_from(values).expect("an array below 4 GiB"))
        }
        Value::Object(v) => FieldValue::F(table_from_json(v)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn headers_of_every_type_become_json() {
        let mut table = FieldTable::new();
        let mut put = |name: &str, value| table.insert(name.try_into().expect("a short name"), value);
        put("bool", FieldValue::t(true));
        put("i8", FieldValue::b(i8::MIN));
        put("u8", FieldValue::B(u8::MAX));
        put("i16", FieldValue::s(i16::MIN));
        put("u16", FieldValue::u(u16::MAX));
        put("i32", FieldValue::I(i32::MIN));
        put("u32", FieldValue::i(u32::MAX));
        put("i64", FieldValue::l(i64::MIN));
        put("time", FieldValue::T(u64::MAX));
        put("double", FieldValue::d(0.1));
        put("null", FieldValue::V);
        put("bytes", FieldValue::x(vec![0, 255].try_into().expect("a short array")));
        put("nested", from_json(&json!({"a": ["b", 1, {"c": null}]})));
        let expected = json!({
            "bool": true, "i8": i8::MIN, "u8": u8::MAX, "i16": i16::MIN, "u16": u16::MAX, "i32": i32::MIN,
            "u32": u32::MAX, "i64": i64::MIN, "time": u64::MAX, "double": 0.1, "null": null, "bytes": [0, 255],
            "nested": {"a": ["b", 1, {"c": null}]},
        });
        assert_eq!(to_json(&FieldValue::F(table)), expected);
    }
}
