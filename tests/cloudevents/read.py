# Reads messages as a consumer does, with the CloudEvents SDK: JSON lines in, JSON lines out, one event or one error for
# each message. A structured message must also match a schema, written after section 3 of the specification 1.0.2.
import json
import sys

import jsonschema
from cloudevents.core.bindings.http import HTTPMessage, from_http_event
from cloudevents.core.bindings.rabbitmq import RabbitMQMessage, from_rabbitmq_event

TEXT = {"type": "string", "minLength": 1, "pattern": "^[^\\u0000-\\u001f\\u007f-\\u009f\\ufdd0-\\ufdef\\ufffe\\uffff]+$"}
URI_REFERENCE = {"type": "string", "pattern": "^([A-Za-z0-9._~:/?#\\[\\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+$"}
SCHEMA = {
    "type": "object",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {"const": "1.0"},
        "id": TEXT,
        "source": URI_REFERENCE,
        "type": TEXT,
        "subject": TEXT,
        "time": {
            "type": "string",
            "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$",
        },
        "datacontenttype": {"type": "string", "pattern": "^[^/ ]+/[^/ ]+$"},
        "data": {},
    },
    # Extensions: short names, simple values.
    "additionalProperties": TEXT,
    "propertyNames": {"pattern": "^[a-z0-9]{1,20}$"},
}


def read(message):
    body = message["body"].encode()
    if message["content_type"].startswith("application/cloudevents"):
        jsonschema.validate(json.loads(body), SCHEMA)
    if message["transport"] == "amqp":
        event = from_rabbitmq_event(RabbitMQMessage(message["headers"], message["content_type"], body))
    else:
        headers = {"content-type": message["content_type"], **message["headers"]}
        event = from_http_event(HTTPMessage(headers, body))
    attributes = dict(event.get_attributes())
    if "time" in attributes:
        attributes["time"] = attributes["time"].strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"attributes": attributes, "data": event.get_data()}


for line in sys.stdin:
    try:
        answer = read(json.loads(line))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
