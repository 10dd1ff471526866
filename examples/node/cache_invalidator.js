// A cache invalidator: drops the cached page of each aggregate that changed, and counts its generation.
//
// Idempotent by the inbox of the extension: outbox_inbox_receive() returns in the same transaction whether the message is new,
// so even a count stays right, however often a message comes (docs/consumers.md).
// AMQP_URL, EXCHANGE and QUEUE say where from; DATABASE is a Postgres with the extension and these two tables:
//
//     create table page_cache (key text primary key, page text not null);
//     create table page_generation (key text primary key, generation bigint not null);
//
// A reader that fills the cache notes the generation before it renders and stores the page only if that is unchanged.
'use strict';

const amqp = require('amqplib');
const { Client } = require('pg');

const CONSUMER = 'page_cache';

// One message, in one transaction.
async function invalidate(database, messageId, key) {
  await database.query('begin');
  const received = await database.query('select outbox_inbox_receive($1, $2) as is_new', [CONSUMER, messageId]);
  if (received.rows[0].is_new) {
    await database.query('delete from page_cache where key = $1', [key]);
    await database.query(
      `insert into page_generation (key, generation) values ($1, 1)
       on conflict (key) do update set generation = page_generation.generation + 1`, [key]);
  }
  await database.query('commit');
}

async function run() {
  const database = new Client({ connectionString: process.env.DATABASE });
  await database.connect();
  const connection = await amqp.connect(process.env.AMQP_URL ?? 'amqp://localhost');
  const channel = await connection.createChannel();
  const queue = process.env.QUEUE ?? 'page_cache';
  await channel.assertQueue(queue, { durable: true });
  await channel.bindQueue(queue, process.env.EXCHANGE ?? 'outbox', '#');
  await channel.prefetch(100);

  const stop = (error) => {
    console.error(error); // the transaction is rolled back, and the message comes again when we are started again
    process.exit(1);
  };
  connection.on('error', stop);
  connection.on('close', () => stop(new Error('the connection was closed')));
  database.on('error', stop);

  let last = Promise.resolve(); // one after the other: there is one connection to the database
  await channel.consume(queue, (message) => {
    last = last.then(async () => {
      if (message === null) throw new Error('the queue was deleted');
      const { messageId, headers = {} } = message.properties;
      if (messageId === undefined || headers.aggregate_id === undefined) {
        return channel.reject(message, false); // to the dead letters of the queue, if it has any
      }
      await invalidate(database, messageId, `${headers.aggregate_type ?? ''}:${headers.aggregate_id}`);
      channel.ack(message); // after the commit
    }).catch(stop);
  });
}

run().catch((error) => {
  console.error(error);
  process.exit(1);
});
