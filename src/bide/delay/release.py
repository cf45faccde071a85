"""Release queues for one exchange and one routing key.

Such a queue stands between the delivery exchange and a target. Its dead-letter exchange and routing key are fixed, so
the target gets the message with its own routing key, whatever the type of the exchange, and a target that takes no
messages holds up its own messages only. Below RabbitMQ 4.0 the broker also removes the CC header on this way.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from bide.delay.clock_keys import hashed
from bide.delay.protocol import MAX_NAME_BYTES, ExchangeTarget
from bide.delay.queues import waiting_queue
from bide.topology import Queue

_WORD: Final = re.compile(r"~r:([^.~]*)~([^.~]*)", re.DOTALL)
_ESCAPES: Final = (("%", "%25"), ("~", "%7E"), ("/", "%2F"), (".", "/"))


def release_word(exchange: str, routing_key: str) -> str:
    """One word of a routing key that names an exchange and the routing key to publish to it with."""
    return f"~r:{_escaped(exchange)}~{_escaped(routing_key)}"


def release_key(target: ExchangeTarget) -> str:
    """The key that ``Clock`` reaches the release queue of an exchange and a routing key by."""
    word = release_word(target.exchange, target.routing_key).removeprefix("~r:")
    key = f"~k:{word}"
    return key if len(key.encode()) <= MAX_NAME_BYTES else f"~k#{hashed(word)}"


def released_key(word: str) -> str | None:
    """The routing key in a word of :func:`release_word`; None for any other word."""
    found = _WORD.fullmatch(word)
    return _unescaped(found[2]) if found is not None else None


def release_queue(prefix: str, exchange: str, routing_key: str) -> Queue:
    """The queue that passes messages on to an exchange with this routing key.

    Args:
        prefix: starts its name; a name that would be too long ends with a hash.
        exchange: empty for the default exchange, whose routing keys are names of queues.
    """
    name = prefix + release_word(exchange, routing_key).removeprefix("~r:")
    if len(name.encode()) > MAX_NAME_BYTES:
        name = f"{prefix}#{hashed(name)}"
    return waiting_queue(name, timedelta(0), exchange, dead_letter_key=routing_key)


def _escaped(name: str) -> str:
    for plain, escape in _ESCAPES:
        name = name.replace(plain, escape)
    return name


def _unescaped(text: str) -> str:
    for plain, escape in reversed(_ESCAPES):
        text = text.replace(escape, plain)
    return text
