//! Prepared statements and cursors. An ERROR of the server unwinds as a panic. A call of the server meanwhile may raise
//! again, which aborts the process and so the whole server. So this module does not call it then; the end of the
//! (sub)transaction cleans up.

use crate::pg::spi::{OwnedPreparedStatement, SpiClient, SpiResult, SpiTupleTable};
use std::mem::{ManuallyDrop, forget};
use std::ops::Deref;

/// A prepared statement, planned once. It is freed when it is dropped, but not while an error unwinds.
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

/// Reads the next rows of a cursor with this name. Called in an SPI session, whose end frees them.
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
