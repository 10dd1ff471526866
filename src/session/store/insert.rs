//! The statements that insert rows of a layout, for tables that cannot be written without one.

use crate::pg::spi::types::Oid;
use crate::pg::spi::{OwnedPreparedStatement, Param, SpiClient, SpiResult};
use crate::pg::table::{Column, ColumnValue, Layout};

/// Prepares the statement that writes one row, or many given as arrays. Its parameters are the given columns, then
/// those of `more`: further columns with their expressions, which have these types. `end`: what follows.
///
/// One row is by far the most frequent case: with arrays its statement takes a third longer.
pub fn prepare(
    client: &SpiClient,
    layout: &Layout,
    into: &str,
    is_one: bool,
    more: &[(&str, &str)],
    types: &[Oid],
    end: &str,
) -> SpiResult<OwnedPreparedStatement> {
    let given: Vec<&Column> = layout.given().collect();
    let names = given.iter().map(|column| column.name);
    let names: Vec<&str> = names.chain(more.iter().map(|(name, _)| *name)).collect();
    let parameters = (1..=given.len()).map(|number| match is_one {
        true => format!("${number}"),
        // In the select list, which returns the elements one by one. In FROM they would be copied first.
        false => format!("pg_catalog.unnest(${number})"),
    });
    let values: Vec<String> = parameters
        .chain(more.iter().map(|(_, value)| (*value).to_owned()))
        .collect();
    let (names, values) = (names.join(", "), values.join(", "));
    let sql = format!("insert into {into} as e ({names}) select {values} {end}");
    let kinds = given.iter().map(|column| match is_one {
        true => column.kind.oid(),
        false => column.kind.array_oid(),
    });
    let types: Vec<Oid> = kinds.chain(types.iter().copied()).collect();
    client.prepare_mut(&sql, &types)
}

/// The parameters of such a statement for these rows.
pub fn parameters<'a, const N: usize>(layout: &Layout, rows: &[[ColumnValue<'a>; N]]) -> Vec<Param<'a>> {
    let columns = layout.given().enumerate();
    let parameter = |(index, column): (usize, &Column)| match rows {
        [row] => Param::of_column(row[index], column.kind),
        rows => Param::array(rows.iter().map(|row| row[index]), column.kind),
    };
    columns.map(parameter).collect()
}
