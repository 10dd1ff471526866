//! The settings of a worker's session, in the server and outside. ALTER DATABASE, ALTER ROLE and the server's own files
//! have settings that stop a worker, or change the plans and texts of its statements. A setting that this version of
//! the server does not have is left out. Settings of outbox are not here: those are meant for the worker.

use std::ffi::CStr;

/// The name and the value of a setting, which any role may set.
pub type SessionSetting = (&'static CStr, &'static CStr);

/// What the words of a statement mean. All SQL of the extension runs with these, and so does what it calls, such as the
/// triggers of a user on its tables: in a session it runs with the rights of another role than its caller's.
pub const NAMES: &[SessionSetting] = &[
    (c"search_path", c"pg_catalog, pg_temp"),
    (c"standard_conforming_strings", c"on"),
    (c"array_nulls", c"on"),
    (c"transform_null_equals", c"off"),
    (c"quote_all_identifiers", c"off"),
];

/// How values become texts, and texts values. The code of users whose results must be the same in each session, such as
/// the conditions of subscriptions, also runs with these.
pub const TEXTS: &[SessionSetting] = &[
    (c"timezone", c"UTC"),
    (c"datestyle", c"ISO, MDY"),
    (c"intervalstyle", c"postgres"),
    (c"bytea_output", c"hex"),
    (c"extra_float_digits", c"1"),
    (c"xmlbinary", c"base64"),
    (c"xmloption", c"content"),
];

/// The other settings of a worker.
const OF_A_WORKER: &[SessionSetting] = &[
    // It writes, and sees the commits of others.
    (c"default_transaction_read_only", c"off"),
    (c"default_transaction_isolation", c"read committed"),
    (c"default_transaction_deferrable", c"off"),
    // A settle that a crash undoes would be sent again, so it waits for the disk; claims and heartbeats need not. No
    // commit waits for a standby: a missing one would block the worker, and messages that it lacks are only sent again.
    (c"synchronous_commit", c"local"),
    // It waits only as long as it decides itself, and a heartbeat does not wait for a locked row.
    (c"lock_timeout", c"500ms"),
    (c"transaction_timeout", c"0"),
    (c"idle_in_transaction_session_timeout", c"0"),
    (c"idle_session_timeout", c"0"),
    // An error ends a statement, not the session.
    (c"exit_on_error", c"off"),
    // A row that a policy hides is no missing row: an error, not a dead letter.
    (c"row_security", c"off"),
    // The objects that it creates, partitions of the history, and where.
    (c"default_tablespace", c""),
    (c"temp_tablespaces", c""),
    (c"default_table_access_method", c"heap"),
    // The statements of a worker are planned once and reused for years of table sizes: the right plan is always an
    // index or a ctid.
    (c"plan_cache_mode", c"force_generic_plan"),
    (c"jit", c"off"),
    (c"enable_seqscan", c"off"),
    (c"enable_bitmapscan", c"off"),
    (c"enable_hashjoin", c"off"),
    (c"enable_mergejoin", c"off"),
    (c"enable_sort", c"off"),
    (c"enable_indexscan", c"on"),
    (c"enable_indexonlyscan", c"on"),
    (c"enable_tidscan", c"on"),
    (c"enable_nestloop", c"on"),
    (c"enable_material", c"on"),
    (c"enable_memoize", c"on"),
    (c"enable_hashagg", c"on"),
    (c"enable_incremental_sort", c"on"),
    (c"enable_partition_pruning", c"on"),
    (c"enable_partitionwise_join", c"off"),
    (c"enable_partitionwise_aggregate", c"off"),
    (c"constraint_exclusion", c"partition"),
    (c"max_parallel_workers_per_gather", c"0"),
    (c"force_parallel_mode", c"off"),
    (c"debug_parallel_query", c"off"),
    (c"seq_page_cost", c"1"),
    (c"random_page_cost", c"4"),
    (c"cpu_tuple_cost", c"0.01"),
    (c"cpu_index_tuple_cost", c"0.005"),
    (c"cpu_operator_cost", c"0.0025"),
    (c"effective_cache_size", c"4GB"),
    (c"cursor_tuple_fraction", c"0.1"),
    (c"recursive_worktable_factor", c"10"),
    (c"from_collapse_limit", c"8"),
    (c"join_collapse_limit", c"8"),
    (c"geqo", c"on"),
    (c"geqo_threshold", c"12"),
    // The pointers of a claim and the arrays of a settle fit into it: no temporary files.
    (c"work_mem", c"16MB"),
    (c"hash_mem_multiplier", c"2"),
];

/// Settings that only a superuser can have set for a role or database; and the role that a session runs as, which for a
/// worker outside may be intended.
pub const IN_THE_SERVER: &[SessionSetting] = &[
    (c"role", c"none"),
    (c"session_replication_role", c"origin"),
    (c"temp_file_limit", c"-1"),
];

/// The settings of every worker's session.
pub fn settings() -> impl Iterator<Item = SessionSetting> {
    [NAMES, TEXTS, OF_A_WORKER].into_iter().flatten().copied()
}

/// As a statement for a worker outside.
pub fn statement() -> String {
    let value =
        |(name, value): SessionSetting| format!("('{}', '{}')", name.to_string_lossy(), value.to_string_lossy());
    let values: Vec<String> = settings().map(value).collect();
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
        let all: Vec<SessionSetting> = settings().chain(IN_THE_SERVER.iter().copied()).collect();
        let names: BTreeSet<_> = all.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), all.len());
        let has_quote = |text: &CStr| text.to_bytes().contains(&b'\'');
        assert!(all.iter().all(|(name, value)| !has_quote(name) && !has_quote(value)));
    }
}
