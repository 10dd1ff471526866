"""A cache invalidator: drops the cached pages that show an aggregate that changed, and counts their generations.

The page of product 7 has the key product:7, a list of products product:list:…, and a category category:NAME:products. A change
drops the page, all lists, and the categories that the event names. One that names none may be in any: then all go.

Idempotent by the inbox of the extension: outbox_inbox_receive() returns in the same transaction whether the message is new, so
even a count stays right, however often a message comes (docs/consumers.md).
AMQP_URL, EXCHANGE and QUEUE say where from; DATABASE is a Postgres with the extension and these two tables:

    create table page_cache (key text primary key, page text not null);
    create table page_generation (key text primary key, generation bigint not null);

A reader that fills the cache notes the generation before it renders, and stores the page only if that is unchanged. For a list
that is the generation of product:list:*, for a category the sum of its own and that of category:*.
"""
import json
import os

import pika
import psycopg

CONSUMER = "page_cache"


def cache_keys(event):
    """The keys of the pages that show the aggregate of an event. A key that ends with * is the start of keys."""
    kind = event.get("aggregate_type", "")
    keys = [f"{kind}:{event['aggregate_id']}", f"{kind}:list:*"]
    if kind == "product":
        states = (event["payload"], event.get("previous_payload") or {})
        names = {state["category"] for state in states if state.get("category") is not None}
        keys += [f"category:{name}:products" for name in sorted(names)] or ["category:*"]
    return keys


def invalidate(database, message_id, keys):
    """One message, in one transaction."""
    with database.transaction():
        is_new = database.execute("select outbox_inbox_receive(%s, %s)", (CONSUMER, message_id)).fetchone()[0]
        if not is_new:
            return
        for key in keys:
            start = key[:-1] if key.endswith("*") else None
            database.execute("delete from page_cache where key = %s or starts_with(key, %s)", (key, start))
            database.execute(
                """insert into page_generation (key, generation) values (%s, 1)
                   on conflict (key) do update set generation = page_generation.generation + 1""",
                (key,),
            )


def run():
    database = psycopg.connect(os.environ.get("DATABASE", ""), autocommit=True)
    connection = pika.BlockingConnection(pika.URLParameters(os.environ.get("AMQP_URL", "amqp://localhost")))
    channel = connection.channel()
    queue = os.environ.get("QUEUE", "page_cache")
    channel.queue_declare(queue, durable=True)
    channel.queue_bind(queue, os.environ.get("EXCHANGE", "events"), "#")
    channel.basic_qos(prefetch_count=100)

    def received(channel, method, properties, body):
        try:
            keys = cache_keys(json.loads(body))
        except (ValueError, KeyError, TypeError):
            keys = None
        if properties.message_id is None or keys is None:
            channel.basic_reject(method.delivery_tag, requeue=False)  # to the dead letters of the queue, if it has any
            return
        invalidate(database, properties.message_id, keys)
        channel.basic_ack(method.delivery_tag)  # after the commit: what crashes before it comes again

    channel.basic_consume(queue, received)
    channel.start_consuming()


if __name__ == "__main__":
    run()
