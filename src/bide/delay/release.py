"""Release queues, each for one exchange and one routing key.

A release queue stands between the delivery exchange and a target. Its dead-letter exchange and routing key are fixed,
so the target gets the message with its own routing key, for any type of exchange. If the target accepts no messages,
only its own messages wait. Before RabbitMQ 4.0 the broker also removes the CC header when it dead-letters from here.
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
    """One word of a routing key that encodes an exchange and the routing key for it."""
    return f"~r:{_escaped(exchange)}~{_escaped(routing_key)}"


def release_key(target: ExchangeTarget) -> str:
    """The key of ``Clock`` for the release queue of an exchange and a routing key."""
    word = release_word(target.exchange, target.routing_key).removeprefix("~r:")
    key = f"~k:{word}"
    return key if len(key.encode()) <= MAX_NAME_BYTES else f"~k#{hashed(word)}"


def released_key(word: str) -> str | None:
    """The routing key that a word of :func:`release_word` encodes; None for any other word."""
    found = released_address(word)
    return None if found is None else found[1]


def released_address(word: str) -> tuple[str, str] | None:
    """The exchange and the routing key that a word of :func:`release_word` encodes; None for any other word."""
    found = _WORD.fullmatch(word)
    return None if found is None else (_unescaped(found[1]), _unescaped(found[2]))


def release_queue(prefix: str, exchange: str, routing_key: str) -> Queue:
    """The queue that dead-letters messages to an exchange with this routing key.

    Args:
        prefix: starts its name. A name that would be too long ends with a hash.
        exchange: the exchange; empty for the default exchange, whose routing keys are queue names.
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
