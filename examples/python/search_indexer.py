"""A search indexer: the newest state of each aggregate, in a full-text index (SQLite FTS5).

    search_indexer.py run            takes messages from RabbitMQ until it is stopped
    search_indexer.py search WORDS   prints the aggregates whose state holds them

Idempotent by seq: a state is written only over an older one, so a message that comes twice, or late, changes nothing. That
needs no table of ids, but each event must carry the whole state (docs/consumers.md).
AMQP_URL, EXCHANGE, QUEUE and INDEX (a file) say where.
"""
import json
import os
import sqlite3
import sys

import pika

SCHEMA = """
create table if not exists documents (number integer primary key, id text not null unique, seq integer not null);
create virtual table if not exists words using fts5 (body);
"""


def open_index():
    index = sqlite3.connect(os.environ.get("INDEX", "search.sqlite"), timeout=30)
    index.executescript(SCHEMA)
    return index


def text_of(value):
    """The words of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return " ".join(text_of(item) for item in value)
    return str(value)


def apply(index, event):
    """One message, in one transaction."""
    document = f"{event.get('aggregate_type', '')}:{event['aggregate_id']}"
    with index:
        newer = index.execute(
            """insert into documents (id, seq) values (?, ?)
               on conflict (id) do update set seq = excluded.seq where documents.seq < excluded.seq
               returning number""",
            (document, event["seq"]),
        ).fetchone()
        if newer is None:
            return  # this state, or a later one, is in the index already
        index.execute("delete from words where rowid = ?", newer)
        if event.get("operation") != "deleted":  # its seq stays: an older state must not bring it back
            index.execute("insert into words (rowid, body) values (?, ?)", (newer[0], text_of(event["payload"])))


def run():
    index = open_index()
    connection = pika.BlockingConnection(pika.URLParameters(os.environ.get("AMQP_URL", "amqp://localhost")))
    channel = connection.channel()
    queue = os.environ.get("QUEUE", "search")
    channel.queue_declare(queue, durable=True)
    channel.queue_bind(queue, os.environ.get("EXCHANGE", "outbox"), "#")
    channel.basic_qos(prefetch_count=100)

    def received(channel, method, _properties, body):
        try:
            event = json.loads(body)
            aggregate = event["aggregate_id"]  # only what has one is a document
        except (ValueError, KeyError, TypeError):
            aggregate = None
        if aggregate is None:
            channel.basic_reject(method.delivery_tag, requeue=False)  # to the dead letters of the queue, if it has any
            return
        apply(index, event)
        channel.basic_ack(method.delivery_tag)  # after the commit: what crashes before it comes again

    channel.basic_consume(queue, received)
    channel.start_consuming()


def search(words):
    found = open_index().execute(
        "select d.id from words join documents d on d.number = words.rowid where words match ? order by d.id", (words,)
    )
    for (document,) in found:
        print(document)


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run()
    elif sys.argv[1:2] == ["search"] and len(sys.argv) == 3:
        search(sys.argv[2])
    else:
        sys.exit(__doc__)
