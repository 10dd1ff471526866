//! The words of the checks of `outbox_health` and of the reasons of `outbox_why`. `outbox_internal.findings`
//! (sql/src/50_views.sql) and `outbox_internal.obstacles` (53_why.sql) find what is wrong and have the values.

use crate::finding::{Words, words};

pub static CHECKS: &[Words] = &[
    // ---- the server ------------------------------------------------------------------------------------------------
    words(
        "not_preloaded",
        "outbox is not in shared_preload_libraries: no worker runs, messages wait",
        "[`superuser ALTER SYSTEM SET shared_preload_libraries = {libraries}`; then restart the server\
         |add outbox to shared_preload_libraries and restart the server]",
    ),
    words(
        "disabled",
        "outbox.enabled is off: messages wait",
        "`setting {enabled=on:alter}`",
    ),
    words(
        "standby",
        "this server is a standby: nothing is delivered from here",
        "ask the primary; after a promotion the workers of this server start by themselves",
    ),
    words(
        "extension_older",
        "the library that the server runs is of version {library}, and the extension of this database is of version \
         {extension}",
        "`owner ALTER EXTENSION outbox UPDATE`",
    ),
    words(
        "library_older",
        "the library that the server runs is of version {library}, and the extension of this database is of version \
         {extension}",
        "install the library of the extension's version and restart the server",
    ),
    // ---- standbys --------------------------------------------------------------------------------------------------
    words(
        "no_standby_names",
        "outbox.publish_after is standby, and outbox.standby_names is empty: messages wait",
        "name the standbys in outbox.standby_names, by their application_name",
    ),
    words(
        "no_standby_quorum",
        "outbox.standby_names has a pattern, and outbox.standby_quorum is 0: messages wait, as nothing says how many \
         standbys all of a pattern are",
        "set how many must have a commit: `setting {standby_quorum=1:alter}`",
    ),
    words(
        "standbys_behind",
        "standbys are connected and behind: a worker {awaited}",
        "see their flush_lsn in pg_stat_replication: network or disk is slow",
    ),
    words(
        "standbys_missing",
        "[standbys are not connected: {missing}; after {timeout} messages are sent without them\
         |messages wait for standbys that are not connected: {missing}][; connected: {connected}]",
        "start them, or correct outbox.standby_names, for example if one was made again under another name; only direct \
         standbys of this server count: those in its pg_stat_replication",
    ),
    // ---- the database ----------------------------------------------------------------------------------------------
    words(
        "database_not_adopted",
        "nothing is delivered from this database until it is adopted: {why}",
        "`admin select outbox_adopt()`, if this database, not the original, must deliver the waiting messages",
    ),
    words(
        "settings_lost",
        "outbox_settings has lost its row: nothing is published or delivered. If this database had a partitioner, name it, \
         too",
        "`admin select outbox_configure(partition_count => {partitions}, leasing => {leasing:L})`",
    ),
    words(
        "partitions_lost",
        "{lost} of {partitions} partitions have lost their row in outbox_partitions: their messages wait",
        "`admin select outbox_configure()`",
    ),
    words(
        "partition_unknown",
        "messages are in partition {label}, which does not exist: they came from a database with more partitions",
        "`admin select outbox_configure(partition_count => {partitions})`",
    ),
    words(
        "seq_not_drawn",
        "outbox_events has seq {seq}, and its sequence has not given it out: publishing fails with 23505",
        "`owner select setval(s, greatest({seq}, nextval(s))) from (select {sequence:L}::regclass) x (s)`",
    ),
    words(
        "seqs_again",
        "the seqs of outbox_events begin again, and were drawn up to {seq} before: new events get the history, the attempts \
         and the dead letters of old ones",
        "`owner select setval(s, greatest({seq}, nextval(s))) from (select {sequence:L}::regclass) x (s)`",
    ),
    words(
        "seqs_cached",
        "each session draws {cache} seqs of outbox_events ahead: events of a key are sent out of order",
        "`owner alter sequence {sequence} increment 1 cache 1 no cycle`",
    ),
    words(
        "seqs_do_not_grow",
        "seqs of outbox_events do not always grow: events of a key are sent out of order",
        "`owner alter sequence {sequence} increment 1 cache 1 no cycle`",
    ),
    words(
        "role_missing",
        "role {role:I}, which the workers run as, does not exist",
        "[`superuser ALTER SYSTEM SET outbox.worker_role = {owner:L}; SELECT pg_reload_conf()`\
         |`superuser CREATE ROLE {role:I}` and make it the owner of the tables of outbox and of its functions with SECURITY \
         DEFINER; DROP EXTENSION would drop the messages]",
    ),
    words(
        "role_superuser",
        "role {role:I} is a superuser: the workers do not run as a superuser",
        "`superuser ALTER ROLE {role:I} NOSUPERUSER`",
    ),
    words(
        "role_has_member",
        "role {member} is a member of {role:I}, and could become a superuser",
        "`superuser REVOKE {role:I} FROM {member}`",
    ),
    words(
        "function_foreign",
        "function {function} of role {owner:I} is not part of the extension, and could be called in place of one that is",
        "`owner drop {kind} {function}`",
    ),
    words(
        "schema_owner",
        "schema {schema:I} belongs to a role that is not a superuser and could create functions in it that are called in \
         place of those of the extension",
        "`superuser alter schema {schema:I} owner to {owner:I}`",
    ),
    words(
        "member_owner",
        "{object} of the extension belongs to role {owner:I}, which is no superuser and could replace it: others would run what \
         that role wants",
        "`superuser REASSIGN OWNED BY {owner:I} TO {superuser:I}`, which also gives away what else it owns in this database; or \
         make it a superuser again",
    ),
    words(
        "schema_create",
        "[role {role}|every role] may create functions in schema {schema:I} that are called in place of those of the \
         extension",
        "`owner revoke create on schema {schema:I} from [{role}|public]`",
    ),
    words(
        "function_altered",
        "function {function:I} of the extension was altered, and it runs with more rights than its caller",
        "find out who did so; then `superuser select outbox_internal.restore_function({function:L})`",
    ),
    words(
        "function_without_path",
        "function {function} runs in statements on {table}, and sets no search_path: it finds other objects than those of \
         pg_catalog only by names with their schema",
        "`owner alter function {function} set search_path = {path}`",
    ),
    words(
        "trigger_undoes",
        "trigger {trigger:I} of {table} runs before each change of a row, and can undo it: messages may be lost, stuck or \
         sent again",
        "`owner ALTER TABLE {table} DISABLE TRIGGER {trigger:I}`; then a new lease sends again what stays in flight: \
         `signal select pg_terminate_backend(pid) from outbox_worker_status where alive`",
    ),
    words(
        "rule_replaces",
        "rule {rule:I} of {table} replaces changes of rows: messages may be lost, stuck or sent again",
        "`owner DROP RULE {rule:I} ON {table}`; then a new lease sends again what stays in flight: \
         `signal select pg_terminate_backend(pid) from outbox_worker_status where alive`",
    ),
    words(
        "other_owner",
        "{objects}[ and {more} more] must belong to {role:I}, the role of the workers: what uses them fails",
        "`superuser {command}`",
    ),
    words(
        "statement_fails",
        "a statement of a worker fails: {error}",
        "undo what the error names[, for example: `owner {command}`|: no row security, trigger or event trigger of others \
         may refuse statements of {role:I}]; the log of the server has the whole error",
    ),
    words(
        "maintenance_fails",
        "it has failed since {since}: {error}",
        "undo what the error names[, for example: `owner {command}`|: no row security, trigger or event trigger of others \
         may refuse statements of {role:I}]; the log of the server has the whole error",
    ),
    words(
        "source_unreadable",
        "{problem}",
        "[messages wait until it can be read: correct it, or name its columns again: \
         `admin select outbox_source_set({columns})`\
         |`admin select outbox_source_reset()`, or outbox_source_set() for the same relation]",
    ),
    words(
        "trigger_disabled",
        "trigger {triggers} of table {table} [{replica:?}fires in replication only|is disabled]: its rows are written \
         without events",
        "`owner ALTER TABLE {table} {enable}`",
    ),
    words(
        "capture_incomplete",
        "table {table} has lost a trigger of outbox_capture: {operations} makes no event",
        "`owner select outbox_capture({table:L}{settings})`",
    ),
    // ---- the workers -----------------------------------------------------------------------------------------------
    words(
        "worker_hangs",
        "{worker} hangs: its process {pid} wrote its last heartbeat at {since}",
        "if it is stopped, `host kill -CONT {pid}` at the shell of the server; else \
         `signal select pg_terminate_backend({pid})`",
    ),
    words(
        "workers_0",
        "outbox.workers is 0: nothing is delivered",
        "`setting {workers=1:alter}`",
    ),
    words(
        "time_slices",
        "[{serves:?}there are more databases than worker slots: this one is served in turn with others\
         |no worker is alive in this database now: there are more databases than worker slots, so they are served in turn]",
        "raise max_worker_processes by {missing} or more and restart the server",
    ),
    words(
        "no_worker_slots",
        "[{serves:?}not every worker of this database runs|no worker is alive in this database]: max_worker_processes is \
         used up",
        "raise max_worker_processes by {missing} or more and restart the server",
    ),
    words(
        "too_many_workers",
        "[{serves:?}not every worker of this database runs|no worker is alive in this database]: the server already has the \
         most workers, 128",
        "lower outbox.workers, narrow outbox.databases, or end workers outside the server, and reload",
    ),
    words(
        "too_many_databases",
        "no worker is alive in this database: the server already serves the most databases, 128",
        "drop a database, or close one with ALTER DATABASE ... ALLOW_CONNECTIONS false; databases without the extension \
         count, too",
    ),
    words(
        "no_worker",
        "no worker is alive in this database[: {obstacle}]",
        "[{see}|wait a few seconds; then search the server log for \"outbox\"]",
    ),
    words(
        "database_excluded",
        "no worker is alive in this database: outbox.databases does not name it",
        "`setting {databases:alter}`",
    ),
    words(
        "database_template",
        "no worker is alive in this database: it is a template, which no worker serves",
        "`owner ALTER DATABASE {database:I} IS_TEMPLATE false`",
    ),
    words(
        "database_closed",
        "no worker is alive in this database: it is closed to connections",
        "`owner ALTER DATABASE {database:I} ALLOW_CONNECTIONS true`",
    ),
    words(
        "role_may_not_connect",
        "no worker is alive in this database: role {role:I} may not connect to it",
        "`owner GRANT CONNECT ON DATABASE {database:I} TO {role:I}`",
    ),
    words(
        "role_may_not_log_in",
        "no worker is alive in this database: role {role:I} may not log in",
        "`superuser ALTER ROLE {role:I} LOGIN CONNECTION LIMIT 0`",
    ),
    // ---- destinations ----------------------------------------------------------------------------------------------
    words(
        "unconfigured",
        "{detail}",
        "correct the options of server {destination:I}; see docs/destinations.md",
    ),
    words(
        "default_ignored",
        "the server \"default\" does not count: its owner {owner:I} is no member of outbox_admin",
        "`owner ALTER SERVER \"default\" OWNER TO outbox_admin`, or `owner DROP SERVER \"default\"`",
    ),
    words(
        "destination_missing",
        "messages wait for this destination, which does not exist",
        "[create it again as role {owner:I}: `owner {command}`|create it with CREATE SERVER]; or discard them: \
         `admin select outbox_discard(seq, destination) from outbox_messages where destination = {destination:L} and status \
         in ('ready', 'blocked', 'retrying', 'scheduled', 'dead')`",
    ),
    words(
        "destination_not_adopted",
        "{why}: its messages wait",
        "`admin select outbox_adopt(destination => {destination:L})`, if this server may have them",
    ),
    words(
        "subscriber_missing",
        "it is subscribed, and does not exist: no event goes there",
        "`admin select outbox_unsubscribe({destination:L})`[; or create it again as role {owner:I}: `owner {command}`]",
    ),
    words(
        "notices_with_source",
        "notices of its dead letters do not reach {receiver}: events are read from a source, where a notice has no place",
        "`owner ALTER SERVER {destination:I} OPTIONS (DROP dead_letters_to)`",
    ),
    words(
        "notice_receiver_missing",
        "notices of its dead letters do not reach {receiver}: it does not exist",
        "`owner ALTER SERVER {destination:I} OPTIONS (DROP dead_letters_to)`; or create the server {receiver:I}",
    ),
    words(
        "notice_receiver_refused",
        "notices of its dead letters do not reach {receiver}: {owner} has no USAGE on it",
        "`owner GRANT USAGE ON FOREIGN SERVER {receiver:I} TO {owner}`",
    ),
    words(
        "paused",
        "[pausing, {in_flight} in flight, ]paused by {by} since {since}[: {reason}]",
        "`admin select outbox_resume({destination:L})`",
    ),
    // ---- messages --------------------------------------------------------------------------------------------------
    words(
        "retrying",
        "{count} message(s) have failed three times or more, for example seq {seq} to {destination}, since {since}: {error}",
        "[{unroutable}|`admin select seq, destination, attempts, last_error from \
         outbox_messages where status = 'retrying'`; correct the cause]; then \
         `admin select outbox_retry({seq}, {destination:L})` tries immediately",
    ),
    words(
        "dead_letters",
        "{count} dead letter(s), for example: {error}",
        "`admin select * from outbox_dead`; then [{unroutable}, and \
         `admin select outbox_retry({seq}, {destination:L})`\
         |{refused:?}`admin select outbox_discard({seq}, {destination:L})`, or let the receiver take it, and \
         `admin select outbox_retry({seq}, {destination:L})`\
         |`admin select outbox_retry({seq}, {destination:L})` or `admin select outbox_discard({seq}, {destination:L})`]",
    ),
    words(
        "keys_blocked",
        "{count} key(s) are blocked by a dead letter, for example: {key} (seq {seq})",
        "`admin select outbox_retry({seq}, {destination:L})`, or `admin select outbox_discard({seq}, {destination:L})`, \
         unblocks the key; with outbox.on_dead = skip none blocks",
    ),
    words(
        "queue_nearly_full",
        "{pending} of {most} messages pending: the queue is nearly full",
        "see the other checks for why they wait; or raise the limit: `setting {max_pending:set}`",
    ),
    words(
        "queue_full",
        "{pending} of {most} messages pending: the queue is full, enqueue is refused",
        "see the other checks for why they wait; or raise the limit: `setting {max_pending:set}`",
    ),
    words(
        "no_room_for_statistics",
        "{count} destination(s) have neither statistics nor max_pending, for example {example}: the server has room for \
         those of 4096",
        "drop destinations that get no messages any more, or move a database to another server",
    ),
    words(
        "transaction_open",
        "the session with pid {pid} ({who}) has enqueued and not ended for {age}[, last statement: {statement}]",
        "later messages of its keys wait for it: end it, or `signal select pg_terminate_backend({pid})`",
    ),
    words(
        "transaction_prepared",
        "transaction {xid} has been prepared for {age}",
        "[`superuser COMMIT PREPARED {gid:L}`, or `superuser ROLLBACK PREPARED {gid:L}`\
         |COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts]",
    ),
    words(
        "partitions_locked",
        "process {pid}[ ({program})] has had rows of outbox_partitions locked since {since}: no other worker can take over \
         {partitions} partition(s)",
        "if it is stopped, `host kill -CONT {pid}` at the shell of the server; else \
         `signal select pg_terminate_backend({pid})`",
    ),
    words(
        "lag_behind_prepared",
        "the oldest message that can be delivered, seq {seq}, has waited for {age}: a prepared transaction has it locked: \
         {gid}",
        "`superuser COMMIT PREPARED {gid:L}`, or `superuser ROLLBACK PREPARED {gid:L}`",
    ),
    words(
        "lag_behind_locks",
        "the oldest message that can be delivered, seq {seq}, has waited for {age}: the session with pid {pid} ({who}) keeps \
         the workers waiting by its locks[, last statement: {statement}]",
        "end its transaction, or `signal select pg_terminate_backend({pid})`",
    ),
    words(
        "lag_at_max_rate",
        "the oldest message that can be delivered, seq {seq}, has waited for {age}: its destination may take at most {most} \
         a second",
        "if it can take more: `setting {max_rate:set}`",
    ),
    words(
        "lag",
        "the oldest message that can be delivered, seq {seq}, has waited for {age}; its destination takes {per_s} messages a \
         second",
        "see the other checks; if all are ok, the workers, or what they deliver to, are too slow: `setting {workers:alter}`; or \
         raise outbox.batch_size",
    ),
    // ---- why one message waits: outbox_why -------------------------------------------------------------------------
    words(
        "message_dead",
        "It was given up[{blocks:?}, and later messages of its key wait for it]: {error}",
        "[{unroutable}; then `admin select outbox_retry({seq}, {destination:L})`\
         |{refused:?}it is refused as it is: `admin select outbox_discard({seq}, {destination:L})`, or let the receiver take it, \
         then `admin select outbox_retry({seq}, {destination:L})`\
         |{unsendable:?}it can never be sent as it is: `admin select outbox_discard({seq}, {destination:L})`, or correct its \
         event or the destination, then `admin select outbox_retry({seq}, {destination:L})`\
         |`admin select outbox_retry({seq}, {destination:L})`, or `admin select outbox_discard({seq}, {destination:L})`]",
    ),
    words(
        "message_scheduled",
        "It is scheduled for {at}.",
        "`admin select outbox_retry({seq}, {destination:L})`",
    ),
    words(
        "message_retrying",
        "Its last attempt failed, and the next one is due at {at}: {error}",
        "[{unroutable}; then ]\
         `admin select outbox_retry({seq}, {destination:L})`",
    ),
    words(
        "message_on_standby",
        "This server is a standby: only the workers of its primary deliver.",
        "",
    ),
    words(
        "message_in_flight",
        "A worker holds it: it is being sent, or it is parked for an open transaction with its key.",
        "",
    ),
    words(
        "message_behind_ready",
        "It waits behind message {behind} of its {unit}.",
        "",
    ),
    words(
        "message_behind_dead",
        "It waits behind message {behind} of its {unit}, which is dead: {error}",
        "`admin select outbox_retry({behind}, {destination:L})`, or `admin select outbox_discard({behind}, {destination:L})`",
    ),
    words(
        "message_behind_retrying",
        "It waits behind message {behind} of its {unit}, which failed and is retried at {due}: {error}",
        "`admin select outbox_retry({behind}, {destination:L})`",
    ),
    words(
        "message_awaits_standbys",
        "Destination {destination} {awaited}.",
        "start the standbys that it waits for, or correct outbox.standby_names",
    ),
    words(
        "message_without_destination",
        "Destination {destination} no longer exists.",
        "create it with CREATE SERVER, or discard the message: `admin select outbox_discard({seq}, {destination:L})`",
    ),
    words(
        "message_not_served",
        "No worker serves destination {destination} yet.",
        "",
    ),
    words(
        "message_after_pause",
        "Destination {destination} was resumed; delivery continues within about a second.",
        "",
    ),
    words(
        "message_at_destination",
        "Destination {destination} is {state}.",
        "[{unconfigured:?}`admin select * from outbox_check({destination:L})`]",
    ),
    words(
        "message_without_owner",
        "No worker owns partition {label} at the moment.",
        "",
    ),
    words(
        "message_behind_transaction",
        "A transaction that has enqueued has been open for {age} (pid {pid}); if it has enqueued with the key of this \
         message, the message waits for it.",
        "end it, or `signal select pg_terminate_backend({pid})`",
    ),
    words(
        "message_behind_prepared",
        "A prepared transaction that has enqueued has been open for {age} (xid {xid}); if it has enqueued with the key of \
         this message, the message waits for it.",
        "[`superuser COMMIT PREPARED {gid:L}`, or `superuser ROLLBACK PREPARED {gid:L}`\
         |COMMIT PREPARED or ROLLBACK PREPARED; see pg_prepared_xacts]",
    ),
    words(
        "message_next",
        "Nothing blocks it: it is the next message of its partition.",
        "",
    ),
    words(
        "message_after_earlier",
        "Nothing blocks it: earlier messages of {label} go first[, from {first} on][, at most {max_rate} a second to \
         {destination}].",
        "",
    ),
];

#[cfg(test)]
mod tests {
    use super::CHECKS;
    use crate::finding::check_table;

    #[test]
    fn each_code_has_its_words() {
        assert_eq!(check_table(CHECKS), Ok(()));
    }
}
