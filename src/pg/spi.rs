//! Runs statements through SPI, with pgrx's names, on the main thread. pgrx's SPI passes texts as bytes in the encoding
//! of the database, and raises if these are not UTF-8. This module converts text in both directions. A value that
//! cannot be read is an `Err` for the code that reads the row. tests/tidy.rs keeps pgrx's SPI out of every other file.
//!
//! In a session statements run with the rights of another role than the caller's. So all that SQL means is set here,
//! for every statement: with the caller's search_path its own types, functions and tables would be found, also by
//! triggers of the user of the server on our tables. Plans are kept with their search_path, and made again for another
//! one.

use super::array;
use super::scan::{row_id, tid};
use super::table::{ColumnType, ColumnValue};
use super::text::{self, Unreadable};
use super::{guc, major, xact};
use outbox_core::engine::RowId;
use outbox_core::session_settings;
use pgrx::datum::{Date, DatumWithOid, FromDatum, IntoDatum, TimestampWithTimeZone, Uuid};
use pgrx::pg_sys::{self, PgOid};
use pgrx::spi;
use std::ffi::{CString, c_long};
use std::fmt;

pub use pgrx::spi::OwnedPreparedStatement;

/// The types of the parameters of statements.
pub mod types {
    pub use pgrx::pg_sys::{
        BYTEAOID, INT2ARRAYOID, INT2OID, INT4ARRAYOID, INT4OID, INT8ARRAYOID, INT8OID, Oid, TEXTARRAYOID, TEXTOID,
        TIDARRAYOID, TIMESTAMPTZOID,
    };
}

#[derive(Debug)]
pub enum SpiError {
    /// An error of the server's SPI, or a wrong use of it.
    Statement(spi::SpiError),
    /// The value of this column, counted from one, cannot be read.
    Unreadable { column: usize, why: Unreadable },
}

pub type SpiResult<T> = Result<T, SpiError>;

impl fmt::Display for SpiError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Statement(error) => error.fmt(f),
            Self::Unreadable { column, why } => write!(f, "column {column} cannot be read: {why}"),
        }
    }
}

impl From<spi::SpiError> for SpiError {
    fn from(error: spi::SpiError) -> Self {
        Self::Statement(error)
    }
}

// ---- sessions -------------------------------------------------------------------------------------------------------

pub struct Spi;

impl Spi {
    pub fn connect<R>(body: impl FnOnce(&SpiClient) -> R) -> R {
        Self::connect_mut(|client| body(client))
    }

    pub fn connect_mut<R>(body: impl FnOnce(&mut SpiClient) -> R) -> R {
        // SAFETY: SpiClient is a transparent wrapper of pgrx's type.
        let run = || spi::Spi::connect_mut(|client| body(unsafe { &mut *std::ptr::from_mut(client).cast() }));
        match guc::names_are_set() {
            true => run(),
            false => guc::with(session_settings::NAMES, run),
        }
    }

    pub fn get_one<T: FromColumn>(sql: &str) -> SpiResult<Option<T>> {
        Self::get_one_with_args(sql, &[])
    }

    pub fn get_one_with_args<T: FromColumn>(sql: &str, args: &[Param]) -> SpiResult<Option<T>> {
        Self::connect_mut(|client| client.update(sql, Some(1), args)?.first().get_one())
    }

    pub fn get_two_with_args<A: FromColumn, B: FromColumn>(
        sql: &str,
        args: &[Param],
    ) -> SpiResult<(Option<A>, Option<B>)> {
        Self::connect_mut(|client| client.update(sql, Some(1), args)?.first().get_two())
    }

    pub fn run_with_args(sql: &str, args: &[Param]) -> SpiResult<()> {
        Self::connect_mut(|client| client.update(sql, None, args).map(drop))
    }
}

#[repr(transparent)]
pub struct SpiClient<'conn>(spi::SpiClient<'conn>);

/// A prepared statement, or the text of a statement.
pub enum Query<'a> {
    Prepared(&'a OwnedPreparedStatement),
    Text(CString),
}

impl<'a> From<&'a OwnedPreparedStatement> for Query<'a> {
    fn from(statement: &'a OwnedPreparedStatement) -> Self {
        Self::Prepared(statement)
    }
}

impl From<&str> for Query<'_> {
    fn from(sql: &str) -> Self {
        Self::Text(text::to_c_string(sql))
    }
}

fn of_oids(types: &[pg_sys::Oid]) -> Vec<PgOid> {
    types.iter().map(|oid| PgOid::from(*oid)).collect()
}

impl<'conn> SpiClient<'conn> {
    /// A statement with parameters of these types, which outlives the transaction.
    pub fn prepare(&self, sql: &str, types: &[pg_sys::Oid]) -> SpiResult<OwnedPreparedStatement> {
        Ok(self.0.prepare(&text::to_c_string(sql), &of_oids(types))?.keep())
    }

    pub fn prepare_mut(&self, sql: &str, types: &[pg_sys::Oid]) -> SpiResult<OwnedPreparedStatement> {
        Ok(self.0.prepare_mut(&text::to_c_string(sql), &of_oids(types))?.keep())
    }

    pub fn select<'a>(
        &self,
        query: impl Into<Query<'a>>,
        limit: Option<c_long>,
        args: &[Param],
    ) -> SpiResult<SpiTupleTable<'conn>> {
        let args = Param::all(args);
        let table = match query.into() {
            Query::Prepared(statement) => self.0.select(statement, limit, args),
            Query::Text(sql) => self.0.select(&sql, limit, args),
        };
        Ok(SpiTupleTable::of_last(table?))
    }

    pub fn update<'a>(
        &mut self,
        query: impl Into<Query<'a>>,
        limit: Option<c_long>,
        args: &[Param],
    ) -> SpiResult<SpiTupleTable<'conn>> {
        let args = Param::all(args);
        // `update` of pgrx assigns a transaction id first: its commit writes WAL, and a standby refuses it with an internal
        // error. A prepared statement keeps in itself that it may write; what it writes then assigns one.
        let table = match (query.into(), xact::is_in_recovery()) {
            (Query::Prepared(statement), _) => self.0.select(statement, limit, args),
            (Query::Text(sql), false) => self.0.update(&sql, limit, args),
            (Query::Text(sql), true) => self.0.select(&sql, limit, args),
        };
        Ok(SpiTupleTable::of_last(table?))
    }

    /// Runs a query that sees what is committed now, also in a transaction that keeps an older snapshot.
    pub fn select_latest(&self, sql: &str) -> SpiResult<SpiTupleTable<'conn>> {
        let sql = text::to_c_string(sql);
        // SAFETY: connected to SPI. A read-only statement uses the active snapshot. If an ERROR unwinds, the end of the
        // (sub)transaction removes it.
        let status = unsafe {
            pg_sys::PushActiveSnapshot(pg_sys::GetLatestSnapshot());
            let status = pg_sys::SPI_execute(sql.as_ptr(), true, 0);
            pg_sys::PopActiveSnapshot();
            status
        };
        spi::Spi::check_status(status)?;
        Ok(SpiTupleTable::last())
    }

    pub fn try_open_cursor(&self, query: &OwnedPreparedStatement, args: &[Param]) -> SpiResult<SpiCursor<'conn>> {
        Ok(SpiCursor(self.0.try_open_cursor(query, Param::all(args))?))
    }

    pub fn find_cursor(&self, name: &str) -> SpiResult<SpiCursor<'conn>> {
        Ok(SpiCursor(self.0.find_cursor(name)?))
    }
}

pub struct SpiCursor<'client>(spi::SpiCursor<'client>);

impl SpiCursor<'_> {
    pub fn fetch(&mut self, count: c_long) -> SpiResult<SpiTupleTable<'_>> {
        Ok(SpiTupleTable::of_last(self.0.fetch(count)?))
    }

    pub fn detach_into_name(self) -> String {
        self.0.detach_into_name()
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

pub struct SpiTupleTable<'conn> {
    /// None: the statement has no result.
    table: Option<&'conn pg_sys::SPITupleTable>,
    /// The number of the current row. None: before the first one.
    current: Option<usize>,
}

impl<'conn> SpiTupleTable<'conn> {
    /// The result of the statement that has just run. SPI keeps it until the end of the connection.
    fn of_last(_: spi::SpiTupleTable<'conn>) -> Self {
        Self::last()
    }

    fn last() -> Self {
        // SAFETY: null, or the result of that statement.
        let table = unsafe { pg_sys::SPI_tuptable.as_ref() };
        Self { table, current: None }
    }

    fn len(&self) -> usize {
        self.table.map_or(0, |table| table.numvals as usize)
    }

    pub fn first(self) -> Self {
        Self {
            current: Some(0),
            ..self
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The current row: the first one, after [`first`](Self::first).
    fn row(&self) -> SpiResult<SpiHeapTupleData<'conn>> {
        let current = self.current.filter(|current| *current < self.len());
        let (Some(table), Some(current)) = (self.table, current) else {
            return Err(SpiError::Statement(spi::SpiError::InvalidPosition));
        };
        // SAFETY: one of the `numvals` rows of the table, with its columns.
        Ok(unsafe { SpiHeapTupleData::of(*table.vals.add(current), table.tupdesc) })
    }

    pub fn get<T: FromColumn>(&self, ordinal: usize) -> SpiResult<Option<T>> {
        self.row()?.get(ordinal)
    }

    pub fn get_one<A: FromColumn>(&self) -> SpiResult<Option<A>> {
        self.get(1)
    }

    pub fn get_two<A: FromColumn, B: FromColumn>(&self) -> SpiResult<(Option<A>, Option<B>)> {
        let row = self.row()?;
        Ok((row.get(1)?, row.get(2)?))
    }

    pub fn get_three<A: FromColumn, B: FromColumn, C: FromColumn>(
        &self,
    ) -> SpiResult<(Option<A>, Option<B>, Option<C>)> {
        let row = self.row()?;
        Ok((row.get(1)?, row.get(2)?, row.get(3)?))
    }

    pub fn column_type_oid(&self, ordinal: usize) -> SpiResult<PgOid> {
        // SAFETY: the columns of the table.
        let columns = self.table.map(|table| unsafe { major::attributes(table.tupdesc) });
        let column = columns.and_then(|columns| columns.get(ordinal.wrapping_sub(1)));
        column.map(|column| PgOid::from(column.atttypid)).ok_or_else(no_column)
    }
}

impl<'conn> Iterator for SpiTupleTable<'conn> {
    type Item = SpiHeapTupleData<'conn>;

    fn next(&mut self) -> Option<Self::Item> {
        self.current = Some(self.current.map_or(0, |current| current + 1));
        self.row().ok()
    }
}

fn no_column() -> SpiError {
    SpiError::Statement(spi::SpiError::SpiError(spi::SpiErrorCodes::NoAttribute))
}

/// A row, taken apart. pgrx takes it apart with two calls of the server for each column.
pub struct SpiHeapTupleData<'conn> {
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
    columns: &'conn [pg_sys::FormData_pg_attribute],
}

impl SpiHeapTupleData<'_> {
    /// # Safety
    /// A row with these columns.
    unsafe fn of(row: pg_sys::HeapTuple, columns: pg_sys::TupleDesc) -> Self {
        // SAFETY: promised by the caller; a value and a flag for each column.
        unsafe {
            let attributes = major::attributes(columns);
            let mut values = vec![pg_sys::Datum::null(); attributes.len()];
            let mut nulls = vec![true; attributes.len()];
            pg_sys::heap_deform_tuple(row, columns, values.as_mut_ptr(), nulls.as_mut_ptr());
            Self {
                values,
                nulls,
                columns: attributes,
            }
        }
    }

    /// The value of a column, counted from one. None: it is NULL.
    pub fn get<T: FromColumn>(&self, ordinal: usize) -> SpiResult<Option<T>> {
        T::read(self, ordinal)
    }

    /// The datum of a column, None if it is NULL, and its type.
    fn column(&self, ordinal: usize) -> SpiResult<(Option<pg_sys::Datum>, pg_sys::Oid)> {
        let index = ordinal.wrapping_sub(1);
        let column = self.columns.get(index).ok_or_else(no_column)?;
        let datum = (!self.nulls[index]).then(|| self.values[index]);
        Ok((datum, column.atttypid))
    }

    fn plain<T: FromDatum + IntoDatum>(&self, ordinal: usize) -> SpiResult<Option<T>> {
        let (datum, oid) = self.column(ordinal)?;
        let (value, is_null) = (datum.unwrap_or(pg_sys::Datum::null()), datum.is_none());
        // SAFETY: a datum of that type, which is checked.
        let value = unsafe { T::try_from_datum(value, is_null, oid) };
        value.map_err(|error| SpiError::Statement(spi::SpiError::DatumError(error)))
    }
}

/// A type that a column can be read as.
pub trait FromColumn: Sized {
    fn read(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Option<Self>>;
}

/// A text with U+FFFD for each character that cannot be converted. It is for names: one bad name must not keep the
/// others from being read.
#[derive(Default)]
pub struct Lossy(pub String);

/// The datum of a column that has one of these types; another type is an error.
fn datum(row: &SpiHeapTupleData, ordinal: usize, types: &[pg_sys::Oid]) -> SpiResult<Option<pg_sys::Datum>> {
    let (datum, oid) = row.column(ordinal)?;
    match datum {
        Some(_) if !types.contains(&oid) => Err(SpiError::Statement(spi::SpiError::DatumError(
            pgrx::datum::TryFromDatumError::IncompatibleTypes {
                rust_type: "String",
                rust_oid: pg_sys::TEXTOID,
                datum_type: u32::from(oid).to_string(),
                datum_oid: oid,
            },
        ))),
        datum => Ok(datum),
    }
}

const TEXTS: &[pg_sys::Oid] = &[pg_sys::TEXTOID, pg_sys::VARCHAROID, pg_sys::JSONOID];

fn bytes<T>(
    row: &SpiHeapTupleData,
    column: usize,
    types: &[pg_sys::Oid],
    read: impl FnOnce(&[u8]) -> Result<T, Unreadable>,
) -> SpiResult<Option<T>> {
    let Some(datum) = datum(row, column, types)? else {
        return Ok(None);
    };
    // SAFETY: `datum` checked the type, and it is not null.
    let read = unsafe { text::with_bytes(datum, read) };
    read.map(Some).map_err(|why| SpiError::Unreadable { column, why })
}

impl FromColumn for String {
    fn read(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Option<Self>> {
        bytes(row, ordinal, TEXTS, text::from_server)
    }
}

impl FromColumn for Lossy {
    fn read(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Option<Self>> {
        let lossy = |bytes: &[u8]| Ok(Self(text::from_server_lossy(bytes)));
        bytes(row, ordinal, TEXTS, lossy)
    }
}

/// An integer of any size.
pub struct Number(pub i64);

impl FromColumn for Number {
    fn read(row: &SpiHeapTupleData, column: usize) -> SpiResult<Option<Self>> {
        let number = match row.column(column)?.1 {
            pg_sys::INT2OID => row.plain::<i16>(column)?.map(i64::from),
            pg_sys::INT4OID => row.plain::<i32>(column)?.map(i64::from),
            _ => row.plain::<i64>(column)?,
        };
        Ok(number.map(Self))
    }
}

impl FromColumn for Vec<Lossy> {
    fn read(row: &SpiHeapTupleData, column: usize) -> SpiResult<Option<Self>> {
        let array = datum(row, column, &[pg_sys::TEXTARRAYOID])?;
        Ok(array.map(|array| {
            // SAFETY: an array of texts, not null.
            unsafe { array::lossy_texts(array) }.into_iter().map(Lossy).collect()
        }))
    }
}

/// Reads a tid.
impl FromColumn for RowId {
    fn read(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Option<Self>> {
        let tid = datum(row, ordinal, &[pg_sys::TIDOID])?;
        // SAFETY: a tid is passed by reference, and is copied.
        Ok(tid.map(|tid| row_id(unsafe { tid.cast_mut_ptr::<pg_sys::ItemPointerData>().read_unaligned() })))
    }
}

/// Reads a bytea.
impl FromColumn for Vec<u8> {
    fn read(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Option<Self>> {
        bytes(row, ordinal, &[pg_sys::BYTEAOID], |bytes| {
            text::check_memory(bytes.len());
            Ok(bytes.to_vec())
        })
    }
}

impl FromColumn for Vec<Option<String>> {
    fn read(row: &SpiHeapTupleData, column: usize) -> SpiResult<Option<Self>> {
        let Some(array) = datum(row, column, &[pg_sys::TEXTARRAYOID])? else {
            return Ok(None);
        };
        // SAFETY: an array of texts, not null.
        let texts = unsafe { array::texts(array) };
        texts.map(Some).map_err(|why| SpiError::Unreadable { column, why })
    }
}

/// Reads an array of texts without its NULLs.
impl FromColumn for Vec<String> {
    fn read(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Option<Self>> {
        let texts = Vec::<Option<String>>::read(row, ordinal)?;
        Ok(texts.map(|texts| texts.into_iter().flatten().collect()))
    }
}

// ---- parameters -----------------------------------------------------------------------------------------------------

/// A parameter of a statement, with text in the encoding of the database.
#[repr(transparent)]
pub struct Param<'a>(DatumWithOid<'a>);

impl Param<'_> {
    fn all<'a, 'b>(params: &'b [Param<'a>]) -> &'b [DatumWithOid<'a>] {
        // SAFETY: Param is a transparent wrapper of DatumWithOid.
        unsafe { std::slice::from_raw_parts(params.as_ptr().cast(), params.len()) }
    }

    pub fn null(oid: pg_sys::Oid) -> Self {
        Self(DatumWithOid::null_oid(oid))
    }

    fn of(datum: Option<pg_sys::Datum>, oid: pg_sys::Oid) -> Self {
        match datum {
            // SAFETY: a datum of that type, alive while the call runs.
            Some(datum) => Self(unsafe { DatumWithOid::new(datum, oid) }),
            None => Self::null(oid),
        }
    }
}

impl<'a> Param<'a> {
    pub fn bytes(bytes: Option<&[u8]>) -> Self {
        Self::of(bytes.and_then(IntoDatum::into_datum), pg_sys::BYTEAOID)
    }

    /// A value of this type.
    pub fn of_column(value: ColumnValue<'a>, kind: ColumnType) -> Self {
        let datum = (!matches!(value, ColumnValue::Null)).then(|| value.datum());
        Self::of(datum, kind.oid())
    }

    /// An array of values of this type.
    pub fn array(values: impl Iterator<Item = ColumnValue<'a>>, kind: ColumnType) -> Self {
        let elements = values.map(|value| (!matches!(value, ColumnValue::Null)).then(|| value.datum()));
        Self::of(Some(array::of_datums(elements, kind.oid())), kind.array_oid())
    }

    /// An array of tid.
    pub fn row_ids(row_ids: &[RowId]) -> Self {
        let mut tids: Vec<_> = row_ids.iter().map(|row_id| tid(*row_id)).collect();
        let elements = tids
            .iter_mut()
            .map(|tid| Some(pg_sys::Datum::from(std::ptr::from_mut(tid))));
        Self::of(Some(array::of_datums(elements, pg_sys::TIDOID)), pg_sys::TIDARRAYOID)
    }

    pub fn texts<'b>(texts: impl Iterator<Item = Option<&'b str>>) -> Self {
        let elements = texts.map(|text| text.map(text::to_datum));
        Self::of(Some(array::of_datums(elements, pg_sys::TEXTOID)), pg_sys::TEXTARRAYOID)
    }
}

/// Types that contain no text, so that pgrx can convert them.
trait Plain: IntoDatum + FromDatum {}

macro_rules! plain {
    ($($type:ty),*) => {
        $(
            impl Plain for $type {}

            impl FromColumn for $type {
                fn read(row: &SpiHeapTupleData, ordinal: usize) -> SpiResult<Option<Self>> {
                    row.plain(ordinal)
                }
            }
        )*
    };
}

plain!(bool, i16, i32, i64, f64, Date, TimestampWithTimeZone, Uuid, pg_sys::Oid);
plain!(Vec<i16>, Vec<i32>, Vec<i64>, Vec<Option<i64>>);

impl<T: Plain> From<T> for Param<'_> {
    fn from(value: T) -> Self {
        Self(value.into())
    }
}

impl<T: Plain> From<Option<T>> for Param<'_> {
    fn from(value: Option<T>) -> Self {
        Self(value.into())
    }
}

impl From<&str> for Param<'_> {
    fn from(text: &str) -> Self {
        Some(text).into()
    }
}

impl From<Option<&str>> for Param<'_> {
    fn from(text: Option<&str>) -> Self {
        Self::of(text.map(text::to_datum), pg_sys::TEXTOID)
    }
}

impl From<String> for Param<'_> {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl From<Option<String>> for Param<'_> {
    fn from(text: Option<String>) -> Self {
        text.as_deref().into()
    }
}

impl From<Vec<Option<String>>> for Param<'_> {
    fn from(texts: Vec<Option<String>>) -> Self {
        Self::texts(texts.iter().map(Option::as_deref))
    }
}

impl From<Vec<Option<&str>>> for Param<'_> {
    fn from(texts: Vec<Option<&str>>) -> Self {
        Self::texts(texts.into_iter())
    }
}

impl From<Vec<String>> for Param<'_> {
    fn from(texts: Vec<String>) -> Self {
        Self::texts(texts.iter().map(|text| Some(text.as_str())))
    }
}

impl From<Vec<&'static str>> for Param<'_> {
    fn from(texts: Vec<&'static str>) -> Self {
        Self::texts(texts.into_iter().map(Some))
    }
}
