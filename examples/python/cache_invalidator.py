"""A cache invalidator: drops the cached page of each aggregate that changed, and counts its generation.

Idempotent by the inbox of the extension: outbox_inbox_receive() returns in the same transaction whether the message is new, so
even a count stays right, however often a message comes (docs/consumers.md).
AMQP_URL, EXCHANGE and QUEUE say where from; DATABASE is a Postgres with the extension and these two tables:

    create table page_cache (key text primary key, page text not null);
    create table page_generation (key text primary key, generation bigint not null);

A reader that fills the cache notes the generation before it renders and stores the page only if that is unchanged.
"""
import os

import pika
import psycopg

CONSUMER = "page_cache"


def invalidate(database, message_id, key):
    """One message, in one transaction."""
    with database.transaction():
        is_new = database.execute("select outbox_inbox_receive(%s, %s)", (CONSUMER, message_id)).fetchone()[0]
        if not is_new:
            return
        database.execute("delete from page_cache where key = %s", (key,))
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
    channel.queue_bind(queue, os.environ.get("EXCHANGE", "outbox"), "#")
    channel.basic_qos(prefetch_count=100)

    def received(channel, method, properties, _body):
        headers = properties.headers or {}
        if properties.message_id is None or "aggregate_id" not in headers:
            channel.basic_reject(method.delivery_tag, requeue=False)  # to the dead letters of the queue, if it has any
            return
        key = f"{headers.get('aggregate_type', '')}:{headers['aggregate_id']}"
        invalidate(database, properties.message_id, key)
        channel.basic_ack(method.delivery_tag)  # after the commit: what crashes before it comes again

    channel.basic_consume(queue, received)
    channel.start_consuming()


if __name__ == "__main__":
    run()
