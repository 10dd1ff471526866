//! The settings of a worker's session, in the server and outside. ALTER DATABASE, ALTER ROLE and the server's own files
//! have settings that stop a worker, or change the plans and texts of its statements. A setting that this version of
//! the server does not have is left out. Settings of outbox are not here: those are meant for the worker.

/// Names and values that any role may set.
pub const SETTINGS: &[(&str, &str)] = &[
    // It writes, and sees the commits of others.
    ("default_transaction_read_only", "off"),
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_deferrable", "off"),
    // A settle that a crash undoes would be sent again, so it waits for the disk; claims and heartbeats need not. No
    // commit waits for a standby: a missing one would block the worker, and messages that it lacks are only sent again.
    ("synchronous_commit", "local"),
    // It waits only as long as it decides itself, and a heartbeat does not wait for a locked row.
    ("lock_timeout", "500ms"),
    ("transaction_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
    // An error ends a statement, not the session.
    ("exit_on_error", "off"),
    // A row that a policy hides is no missing row: an error, not a dead letter.
    ("row_security", "off"),
    // The objects that it creates, partitions of the history, and where.
    ("default_tablespace", ""),
    ("temp_tablespaces", ""),
    ("default_table_access_method", "heap"),
    // The meaning of names and texts.
    ("search_path", "pg_catalog, pg_temp"),
    ("standard_conforming_strings", "on"),
    ("array_nulls", "on"),
    ("transform_null_equals", "off"),
    ("quote_all_identifiers", "off"),
    ("timezone", "UTC"),
    ("datestyle", "ISO, MDY"),
    ("intervalstyle", "postgres"),
    ("bytea_output", "hex"),
    ("extra_float_digits", "1"),
    ("xmlbinary", "base64"),
    ("xmloption", "content"),
    // The statements of a worker are planned once and reused for years of table sizes: the right plan is always an index
    // or a ctid.
    ("plan_cache_mode", "force_generic_plan"),
    ("jit", "off"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_sort", "off"),
    ("enable_indexscan", "on"),
    ("enable_indexonlyscan", "on"),
    ("enable_tidscan", "on"),
    ("enable_nestloop", "on"),
    ("enable_material", "on"),
    ("enable_memoize", "on"),
    ("enable_hashagg", "on"),
    ("enable_incremental_sort", "on"),
    ("enable_partition_pruning", "on"),
    ("enable_partitionwise_join", "off"),
    ("enable_partitionwise_aggregate", "off"),
    ("constraint_exclusion", "partition"),
    ("max_parallel_workers_per_gather", "0"),
    ("force_parallel_mode", "off"),
    ("debug_parallel_query", "off"),
    ("seq_page_cost", "1"),
    ("random_page_cost", "4"),
    ("cpu_tuple_cost", "0.01"),
    ("cpu_index_tuple_cost", "0.005"),
    ("cpu_operator_cost", "0.0025"),
    ("effective_cache_size", "4GB"),
    ("cursor_tuple_fraction", "0.1"),
    ("recursive_worktable_factor", "10"),
    ("from_collapse_limit", "8"),
    ("join_collapse_limit", "8"),
    ("geqo", "on"),
    ("geqo_threshold", "12"),
    // The pointers of a claim and the arrays of a settle fit into it: no temporary files.
    ("work_mem", "16MB"),
    ("hash_mem_multiplier", "2"),
];

/// Settings that only a superuser can have set for a role or database; and the role that a session runs as, which for a
/// worker outside may be intended.
pub const IN_THE_SERVER: &[(&str, &str)] = &[
    ("role", "none"),
    ("session_replication_role", "origin"),
    ("temp_file_limit", "-1"),
];

/// As a statement for a worker outside.
pub fn statement() -> String {
    let values: Vec<String> = (SETTINGS.iter().map(|(name, value)| format!("('{name}', '{value}')"))).collect();
    format!(
        "select pg_catalog.set_config(v.name, v.value, false) from (values {}) v (name, value)
         where pg_catalog.current_setting(v.name, true) is not null",
        values.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_setting_exists_once_and_needs_no_quoting() {
        let all: Vec<_> = SETTINGS.iter().chain(IN_THE_SERVER).collect();
        let names: BTreeSet<_> = all.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), all.len());
        assert!(
            all.iter()
                .all(|(name, value)| !name.contains('\'') && !value.contains('\''))
        );
    }
}
