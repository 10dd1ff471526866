//! What the store holds while the server works: statements that are kept, and cursors. An ERROR of the server unwinds as a
//! panic, and a call of the server on the way may raise again, which aborts the process and so the whole server. So
//! nothing here calls it then; the end of the (sub)transaction cleans up.

use crate::pg::spi::{OwnedPreparedStatement, SpiClient, SpiResult, SpiTupleTable};
use std::mem::{ManuallyDrop, forget};
use std::ops::Deref;

/// A statement that was planned once. Freed when it is dropped, but not while an error unwinds.
pub struct SavedStatement(Option<OwnedPreparedStatement>);

impl From<OwnedPreparedStatement> for SavedStatement {
    fn from(statement: OwnedPreparedStatement) -> Self {
        Self(Some(statement))
    }
}

impl Deref for SavedStatement {
    type Target = OwnedPreparedStatement;

    fn deref(&self) -> &OwnedPreparedStatement {
        self.0.as_ref().expect("taken only by drop")
    }
}

impl Drop for SavedStatement {
    fn drop(&mut self) {
        let statement = self.0.take();
        if std::thread::panicking() {
            forget(statement);
        }
    }
}

/// Reads the next rows of a cursor, by its name. Called in a session of SPI whose end frees them.
pub fn fetch<T>(
    client: &SpiClient,
    cursor: &str,
    count: usize,
    read: impl FnOnce(SpiTupleTable) -> SpiResult<T>,
) -> SpiResult<T> {
    let mut cursor = ManuallyDrop::new(client.find_cursor(cursor)?); // to drop it is to close it
    read(cursor.fetch(count as std::ffi::c_long)?)
}

pub fn close(client: &SpiClient, cursor: &str) -> SpiResult<()> {
    client.find_cursor(cursor).map(drop)
}
