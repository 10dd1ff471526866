// A search indexer: the newest state of each aggregate, in a full-text index (a table of Postgres).
//
//     search_indexer.js run            takes messages from RabbitMQ until it is stopped
//     search_indexer.js search WORDS   prints the aggregates whose state holds them
//
// It reads the events of outbox_capture: a PATCH has only what changed, and is merged into the state; every other operation but
// DELETE has the whole state. Idempotent by seq: an event is applied only over an older one, so a message that comes twice, or
// late, changes nothing. That needs no table of ids (docs/consumers.md).
// AMQP_URL, EXCHANGE, QUEUE and DATABASE (of any Postgres) say where.
'use strict';

const amqp = require('amqplib');
const { Pool } = require('pg');

const database = new Pool({ connectionString: process.env.DATABASE });

// In one transaction. Without the lock two that start at once can both find no table, and one of them fails.
const SCHEMA = `
  select pg_advisory_xact_lock(74011);
  create table if not exists documents (id text primary key, seq bigint not null, state jsonb not null, words tsvector);
  create index if not exists documents_words on documents using gin (words)`;

const PARTIAL = ['PATCH', 'UPDATE', 'DELETE']; // UPDATE: of operations => 'sql'. A soft DELETE keeps the state for a restore

// One message, one statement. A document that is gone keeps its seq: an older event must not bring it back.
async function apply(event) {
  const id = `${event.aggregate_type ?? ''}:${event.aggregate_id}`;
  const state = PARTIAL.includes(event.operation) ? 'd.state || excluded.state' : 'excluded.state';
  const words = (of) => (event.operation === 'DELETE' ? 'null' : `jsonb_to_tsvector('simple', ${of}, '["string", "numeric"]')`);
  await database.query(
    `insert into documents as d (id, seq, state, words) values ($1, $2, $3, ${words('$3::jsonb')})
     on conflict (id) do update set seq = excluded.seq, state = ${state}, words = ${words(state)} where d.seq < excluded.seq`,
    [id, event.seq, JSON.stringify(event.payload)],
  );
}

function parse(content) {
  try {
    const event = JSON.parse(content);
    return event?.aggregate_id === undefined ? null : event; // only what has one is a document
  } catch {
    return null;
  }
}

async function run() {
  await database.query(SCHEMA);
  const connection = await amqp.connect(process.env.AMQP_URL ?? 'amqp://localhost');
  const channel = await connection.createChannel();
  const queue = process.env.QUEUE ?? 'search';
  await channel.assertQueue(queue, { durable: true });
  await channel.bindQueue(queue, process.env.EXCHANGE ?? 'events', '#');
  await channel.prefetch(100);

  const stop = (error) => {
    console.error(error); // what is not acknowledged comes again when we are started again
    process.exit(1);
  };
  connection.on('error', stop);
  connection.on('close', () => stop(new Error('the connection was closed')));

  // One after the other: the messages of a key are in order, and stay so.
  let last = Promise.resolve();
  await channel.consume(queue, (message) => {
    last = last.then(async () => {
      if (message === null) throw new Error('the queue was deleted');
      const event = parse(message.content);
      if (event === null) return channel.reject(message, false); // to the dead letters of the queue, if it has any
      await apply(event);
      channel.ack(message); // after the commit
    }).catch(stop);
  });
}

async function search(words) {
  await database.query(SCHEMA);
  const found = await database.query(
    `select id from documents where words @@ plainto_tsquery('simple', $1) order by id collate "C"`, [words]);
  for (const row of found.rows) console.log(row.id);
  await database.end();
}

const [command, words] = process.argv.slice(2);
const work = command === 'run' ? run() : command === 'search' && words ? search(words) : Promise.reject(new Error('run, or search WORDS'));
work.catch((error) => {
  console.error(error);
  process.exit(1);
});
