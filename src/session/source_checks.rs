//! Checks whether a relation of the user can be the event source, when it is set. store/source.rs reads it. Runs in a
//! user's backend.

use crate::error::{self, UserError, invalid};
use crate::pg::catalog;
use crate::pg::trigger::Call;
use crate::session::store::current_source::{self, Relation};
use crate::store::source::{PARTS, PartKind, Source, SourceMapping};
use pgrx::spi::quote_identifier;
use pgrx::{PgBuiltInOids, PgSqlErrorCode};

/// outbox_source_set().
pub fn set(call: Call, oid: Option<u32>, mut mapping: SourceMapping) -> Result<(), UserError> {
    let checked = || {
        let relation = oid
            .map(current_source::relation)
            .transpose()?
            .flatten()
            .ok_or_else(no_relation)?;
        check_relation(&relation).map(|()| relation)
    };
    checked()?;
    // Under the lock its name and its owner stay as they are.
    catalog::lock_table(oid.unwrap_or_default());
    let relation = checked()?;
    for ((part, _), value) in PARTS.iter().zip(&mut mapping) {
        match value {
            // Names are as stored, so that a name with capitals needs no quotes inside the quotes.
            Some(text) if relation.columns.contains(text) => *text = quote_identifier(&*text),
            None if ["seq", "type", "created_at"].contains(part) => {
                return Err(UserError::new(
                    PgSqlErrorCode::ERRCODE_NULL_VALUE_NOT_ALLOWED,
                    format!("an event needs a {part}"),
                    format!("Name the column, {part} => 'some_column', or write an SQL expression over a row."),
                ));
            }
            _ => {}
        }
    }
    let wanted = Source::new(&relation.schema, &relation.name, relation.owner, mapping.clone());
    for ((part, kind), expression) in PARTS.iter().zip(&mapping) {
        if let Some(expression) = expression {
            check_expression(&wanted, part, *kind, expression)?;
        }
    }
    if let Some(problem) = wanted.problem() {
        return Err(invalid(problem, "Try the expressions in a SELECT over the relation."));
    }
    if !wanted.is_read_by_index().unwrap_or(false) {
        error::warning(
            "no index finds the events by seq: each claim would read the whole table",
            "CREATE UNIQUE INDEX on what is given as seq, in the table that holds the rows.",
        );
    }
    let seq_is_lost = current_source::get(call)?.is_some_and(|old| old.seq_is_lost());
    current_source::set(call, &wanted, oid.unwrap_or_default(), seq_is_lost)
}

fn no_relation() -> UserError {
    UserError::new(
        PgSqlErrorCode::ERRCODE_UNDEFINED_TABLE,
        "the relation does not exist",
        "Pass the name of a table or view, for example 'shop.events'.",
    )
}

fn check_relation(relation: &Relation) -> Result<(), UserError> {
    let name = format!("{}.{}", relation.schema, relation.name);
    let wrong =
        |message: String, hint: &str| Err(UserError::new(PgSqlErrorCode::ERRCODE_WRONG_OBJECT_TYPE, message, hint));
    // Tables, partitioned tables, views, materialized views, foreign tables.
    if !["r", "p", "v", "m", "f"].contains(&relation.kind.as_str()) {
        return wrong(
            format!("{name} is not a table or view"),
            "Name a relation with one row for each event.",
        );
    }
    if relation.is_temporary {
        return wrong(
            format!("{name} is temporary: the workers do not see it"),
            "Name a table that all sessions share.",
        );
    }
    if relation.is_ours {
        return wrong(
            format!("{name} is a table of outbox itself"),
            "Name another table; select outbox_source_reset() goes back to outbox_events.",
        );
    }
    if catalog::is_superuser(relation.owner) {
        let kind = match relation.kind.as_str() {
            "v" => "VIEW",
            "m" => "MATERIALIZED VIEW",
            "f" => "FOREIGN TABLE",
            _ => "TABLE",
        };
        let [schema, table] = [&relation.schema, &relation.name].map(quote_identifier);
        let to = "a role that may do no more than it needs";
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("{name} belongs to a superuser"),
            format!("The expressions run as its owner: ALTER {kind} {schema}.{table} OWNER TO {to}."),
        ));
    }
    if !catalog::may_act_as(relation.owner) {
        return Err(UserError::new(
            PgSqlErrorCode::ERRCODE_INSUFFICIENT_PRIVILEGE,
            format!("must be owner of {name}"),
            format!(
                "Call it as a member of role {}: the expressions run as that role.",
                relation.owner_name
            ),
        ));
    }
    Ok(())
}

fn check_expression(source: &Source, part: &str, kind: PartKind, expression: &str) -> Result<(), UserError> {
    let found = source.type_of(expression).map_err(|cause| UserError {
        detail: Some(format!("{expression}: {cause}.")),
        ..invalid(
            format!("{part} is not an expression over a row of {}", source.relation),
            "Write a column, or SQL over the columns. Name your functions and operators with their schema: shop.f(total).",
        )
    })?;
    let is_one_of = |types: &[PgBuiltInOids]| types.iter().any(|oid| oid.value().to_u32() == found);
    type Oids = PgBuiltInOids;
    let hint = match kind {
        PartKind::Seq if !is_one_of(&[Oids::INT2OID, Oids::INT4OID, Oids::INT8OID, Oids::NUMERICOID]) => {
            "It must be an integer above 0: convert it, and create an index on the same expression."
        }
        PartKind::Time if !is_one_of(&[Oids::TIMESTAMPTZOID]) => {
            "It must be a timestamptz; of a timestamp in UTC it is: created_at at time zone 'UTC'."
        }
        PartKind::Json if is_one_of(&[Oids::TEXTOID, Oids::VARCHAROID, Oids::BPCHAROID, Oids::BYTEAOID]) => {
            "Text that holds JSON: data::json. Any other text: to_jsonb(data)."
        }
        _ => return Ok(()),
    };
    Err(UserError {
        detail: Some(format!("{expression} is of another type.")),
        ..UserError::new(
            PgSqlErrorCode::ERRCODE_DATATYPE_MISMATCH,
            format!("{part} is of the wrong type"),
            hint,
        )
    })
}
