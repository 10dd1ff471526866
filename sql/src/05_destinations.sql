-- Destinations: where messages go. One always exists, "default", described by the settings outbox.url and so on. Others
-- are foreign servers, so that CREATE SERVER, GRANT USAGE, user mappings, \des and pg_dump work as usual.

create function @extschema@.outbox_amqp_validator(options text[], catalog oid)
returns void language c strict as 'MODULE_PATHNAME', 'outbox_amqp_validator_wrapper';
comment on function @extschema@.outbox_amqp_validator(text[], oid) is
  'Internal: checks the options of servers and user mappings of outbox_amqp.';

create foreign data wrapper outbox_amqp no handler validator @extschema@.outbox_amqp_validator;
comment on foreign data wrapper outbox_amqp is
  'Destinations of outbox that are exchanges of an AMQP 0-9-1 broker (RabbitMQ). The password belongs in a user'
  ' mapping for the role of the workers.';

create function @extschema@.outbox_http_validator(options text[], catalog oid)
returns void language c strict as 'MODULE_PATHNAME', 'outbox_http_validator_wrapper';
comment on function @extschema@.outbox_http_validator(text[], oid) is
  'Internal: checks the options of servers and user mappings of outbox_http.';

create foreign data wrapper outbox_http no handler validator @extschema@.outbox_http_validator;
comment on foreign data wrapper outbox_http is
  'Destinations of outbox that are URLs to which messages are posted. Secrets belong in a user mapping for the role of'
  ' the workers.';

create function outbox_internal.mapping_problem(server oid)
returns text language c stable strict parallel safe as 'MODULE_PATHNAME', 'outbox_mapping_problem_wrapper';
comment on function outbox_internal.mapping_problem(oid) is
  'Why the workers in the server may not use the user mapping of a server: it is empty, as a dump leaves it whose role may'
  ' not read secrets. NULL = they may, or there is none.';

create table @extschema@.outbox_paused (
  destination text collate "C" primary key,
  since       timestamptz not null default pg_catalog.now(),
  paused_by   text        not null default session_user,
  reason      text,
  relay_until timestamptz
);
comment on column @extschema@.outbox_paused.relay_until is
  'Until when a relay may hold claims; see outbox_fetch_unpublished().';
comment on table @extschema@.outbox_paused is
  'Destinations to which nothing is delivered until outbox_resume(). Enqueue goes on.';
select pg_catalog.pg_extension_config_dump('@extschema@.outbox_paused', '');
