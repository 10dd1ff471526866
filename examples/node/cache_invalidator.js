// A cache invalidator: drops the cached pages that show an aggregate that changed, and counts their generations.
//
// The page of product 7 has the key product:7, a list of products product:list:…, and a category category:NAME:products. A change
// drops the page, all lists, and the categories that the event names. One that names none may be in any: then all go.
//
// Idempotent by the inbox of the extension: outbox_inbox_receive() returns in the same transaction whether the message is new,
// so even a count stays right, however often a message comes (docs/consumers.md).
// AMQP_URL, EXCHANGE and QUEUE say where from; DATABASE is a Postgres with the extension and these two tables:
//
//     create table page_cache (key text primary key, page text not null);
//     create table page_generation (key text primary key, generation bigint not null);
//
// A reader that fills the cache notes the generation before it renders, and stores the page only if that is unchanged. For a list
// that is the generation of product:list:*, for a category the sum of its own and that of category:*.
'use strict';

const amqp = require('amqplib');
const { Client } = require('pg');

const CONSUMER = 'page_cache';

// The keys of the pages that show the aggregate of an event. A key that ends with * is the start of keys.
function cacheKeys(content) {
  const event = JSON.parse(content);
  if (event?.aggregate_id === undefined) throw new Error('no aggregate');
  const kind = event.aggregate_type ?? '';
  const keys = [`${kind}:${event.aggregate_id}`, `${kind}:list:*`];
  if (kind !== 'product') return keys;
  const names = [event.payload, event.previous_payload].map((state) => state?.category).filter((name) => name != null);
  return keys.concat(names.length === 0 ? ['category:*'] : [...new Set(names)].sort().map((name) => `category:${name}:products`));
}

// One message, in one transaction.
async function invalidate(database, messageId, keys) {
  await database.query('begin');
  const received = await database.query('select outbox_inbox_receive($1, $2) as is_new', [CONSUMER, messageId]);
  for (const key of received.rows[0].is_new ? keys : []) {
    const start = key.endsWith('*') ? key.slice(0, -1) : null;
    await database.query('delete from page_cache where key = $1 or starts_with(key, $2)', [key, start]);
    await database.query(
      `insert into page_generation (key, generation) values ($1, 1)
       on conflict (key) do update set generation = page_generation.generation + 1`, [key]);
  }
  await database.query('commit');
}

function parse(content) {
  try {
    return cacheKeys(content);
  } catch {
    return null;
  }
}

async function run() {
  const database = new Client({ connectionString: process.env.DATABASE });
  await database.connect();
  const connection = await amqp.connect(process.env.AMQP_URL ?? 'amqp://localhost');
  const channel = await connection.createChannel();
  const queue = process.env.QUEUE ?? 'page_cache';
  await channel.assertQueue(queue, { durable: true });
  await channel.bindQueue(queue, process.env.EXCHANGE ?? 'events', '#');
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
      const { messageId } = message.properties;
      const keys = parse(message.content);
      if (messageId === undefined || keys === null) {
        return channel.reject(message, false); // to the dead letters of the queue, if it has any
      }
      await invalidate(database, messageId, keys);
      channel.ack(message); // after the commit
    }).catch(stop);
  });
}

run().catch((error) => {
  console.error(error);
  process.exit(1);
});
