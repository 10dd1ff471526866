"""A search indexer: the newest state of each aggregate, in a full-text index (SQLite FTS5).

    search_indexer.py run            takes messages from RabbitMQ until it is stopped
    search_indexer.py search WORDS   prints the aggregates whose state holds them

It reads the events of outbox_capture: a PATCH has only what changed, and is merged into the state; every other operation but
DELETE has the whole state. Idempotent by seq: an event is applied only over an older one, so a message that comes twice, or
late, changes nothing. That needs no table of ids (docs/consumers.md).
AMQP_URL, EXCHANGE, QUEUE and INDEX (a file) say where.
"""
import json
import os
import sqlite3
import sys

import pika

PARTIAL = ("PATCH", "UPDATE", "DELETE")  # UPDATE: of operations => 'sql'. A soft DELETE keeps the state for a restore

SCHEMA = """
create table if not exists documents (number integer primary key, id text not null unique, seq integer not null, state text);
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
    return "" if value is None else str(value)


def apply(index, event):
    """One message, in one transaction."""
    document = f"{event.get('aggregate_type', '')}:{event['aggregate_id']}"
    operation, state = event.get("operation"), event["payload"]
    with index:
        index.execute("begin immediate")
        old = index.execute("select number, seq, state from documents where id = ?", (document,)).fetchone()
        number, seq, before = old or (None, 0, "null")
        if event["seq"] <= seq:
            return  # this event, or a later one, is in the index already
        before = json.loads(before)
        if operation in PARTIAL and isinstance(before, dict) and isinstance(state, dict):
            state = {**before, **state}
        number = index.execute(
            "insert or replace into documents (number, id, seq, state) values (?, ?, ?, ?)",
            (number, document, event["seq"], json.dumps(state)),
        ).lastrowid
        index.execute("delete from words where rowid = ?", (number,))
        if operation != "DELETE":  # its seq stays: an older event must not bring it back
            index.execute("insert into words (rowid, body) values (?, ?)", (number, text_of(state)))


def run():
    index = open_index()
    connection = pika.BlockingConnection(pika.URLParameters(os.environ.get("AMQP_URL", "amqp://localhost")))
    channel = connection.channel()
    queue = os.environ.get("QUEUE", "search")
    channel.queue_declare(queue, durable=True)
    channel.queue_bind(queue, os.environ.get("EXCHANGE", "events"), "#")
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
