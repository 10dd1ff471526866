//! The schema of the extension in the statements of this program. They name its objects as the scripts of an extension
//! do, `@extschema@.outbox_events`, and sessions have only pg_catalog in their search_path.
//!
//! The schema must not be in search_path. Another role could create a function or operator there that matches a call
//! better than the one in pg_catalog. It would run with the privileges of the user of this program.

const SCHEMA: &str = "@extschema@.";

/// The statement for an extension in this schema.
pub fn qualified(sql: &str, schema: &str) -> String {
    let prefix = format!("\"{}\".", schema.replace('"', "\"\""));
    let in_literal = format!("'{}", prefix.replace('\'', "''")); // an argument of has_table_privilege()
    sql.replace(&format!("'{SCHEMA}"), &in_literal).replace(SCHEMA, &prefix)
}

#[cfg(test)]
mod tests {
    use super::qualified;

    #[test]
    fn a_schema_with_quotes_in_its_name_is_quoted() {
        assert_eq!(
            qualified(
                "select from @extschema@.outbox where has_table_privilege('@extschema@.outbox', 'select')",
                r#"a"b'c"#
            ),
            r#"select from "a""b'c".outbox where has_table_privilege('"a""b''c".outbox', 'select')"#
        );
    }
}
