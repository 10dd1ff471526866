//! Logical decoding, as Debezium reads it: a slot of pgoutput, whose messages are described in the Postgres manual
//! under "Logical Replication Message Formats".

use std::collections::{BTreeMap, HashMap};

use postgres::Client;

/// A row that was inserted.
#[derive(Debug, PartialEq)]
pub struct Insert {
    pub table: String,
    /// The text of each column; None = null.
    pub columns: BTreeMap<String, Option<String>>,
}

pub fn make_slot(client: &mut Client, slot: &str) {
    client
        .query("select pg_create_logical_replication_slot($1, 'pgoutput')", &[&slot])
        .expect("a slot");
}

/// The rows that were inserted into the tables of a publication since the last call, in the order of their commits.
pub fn inserts(client: &mut Client, slot: &str, publication: &str) -> Vec<Insert> {
    let sql = "select data from pg_logical_slot_get_binary_changes($1, null, null, 'proto_version', '1',
                 'publication_names', $2)";
    let messages = client.query(sql, &[&slot, &publication]).expect("decode");
    let mut tables = HashMap::new();
    let mut inserts = Vec::new();
    for message in &messages {
        let mut message = Message(message.get(0));
        match message.byte() {
            b'R' => {
                let (id, table) = message.relation();
                tables.insert(id, table);
            }
            b'I' => inserts.push(message.insert(&tables)),
            _ => {}
        }
    }
    inserts
}

/// The part of a message that is not yet read.
struct Message<'a>(&'a [u8]);

impl Message<'_> {
    fn take(&mut self, bytes: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(bytes);
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn int16(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().expect("2 bytes"))
    }

    fn int32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().expect("4 bytes"))
    }

    fn text(&mut self, bytes: usize) -> String {
        String::from_utf8(self.take(bytes).to_vec()).expect("UTF-8")
    }

    fn name(&mut self) -> String {
        let end = self.0.iter().position(|byte| *byte == 0).expect("the end of a name");
        let name = self.text(end);
        self.byte();
        name
    }

    /// The oid of a table, its name, and the names of its columns.
    fn relation(&mut self) -> (u32, (String, Vec<String>)) {
        let id = self.int32();
        self.name(); // of its schema
        let table = self.name();
        self.byte(); // its replica identity
        let columns = (0..self.int16()).map(|_| {
            self.byte(); // whether it is in the key
            let name = self.name();
            self.take(8); // the oid and the modifier of its type
            name
        });
        (id, (table, columns.collect()))
    }

    fn insert(&mut self, tables: &HashMap<u32, (String, Vec<String>)>) -> Insert {
        let (table, columns) = &tables[&self.int32()];
        assert_eq!((self.byte(), usize::from(self.int16())), (b'N', columns.len()));
        let value = |name: &String| match self.byte() {
            b'n' => (name.clone(), None),
            b't' => {
                let bytes = self.int32() as usize;
                (name.clone(), Some(self.text(bytes)))
            }
            other => panic!("a value of kind {other}"),
        };
        Insert {
            table: table.clone(),
            columns: columns.iter().map(value).collect(),
        }
    }
}
