"""Routing keys and the header of messages in the cascades of NServiceBus and Celery.

They are separate from :mod:`bide.delay.cascade`, because every client reads such keys, and few clients create a
cascade.
"""

from __future__ import annotations

import re
from typing import Final

from bide.delay.release import released_key

LEVELS: Final = 28
"""The number of levels that NServiceBus and Celery use: delays of up to 2^28 - 1 seconds."""

HEADER_DELAY: Final = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
"""The header of NServiceBus with the delay of a delayed send in whole seconds: a 32-bit integer (type ``I``), never
text."""

WILDCARDS: Final = frozenset({"*", "#"})
"""Words that are wildcards in the binding keys of a topic exchange."""

_DELAYED_KEY: Final = re.compile(rf"((?:[01]\.){{{LEVELS}}})(.*)", re.DOTALL)
_QUEUE_WORD: Final = re.compile(r"~q:([^.]*)", re.DOTALL)


def original_key(key: str) -> str:
    """The routing key that a received message had before it was delayed. Other keys are returned unchanged.

    For NServiceBus and Celery this is the address. If bide put a word in place of an address, it is the queue or the
    routing key that the word encodes.
    """
    found = _DELAYED_KEY.fullmatch(key)
    if found is None:
        return key
    address = found[2]
    if (queue := queue_name(address)) is not None:
        return queue
    released = released_key(address)
    return address if released is None else released


def queue_word(name: str) -> str:
    """One word of a routing key that names a queue."""
    return "~q:" + name.replace("%", "%25").replace(".", "%2E")


def queue_name(word: str) -> str | None:
    """The queue that a word of :func:`queue_word` names; None for any other word."""
    found = _QUEUE_WORD.fullmatch(word)
    return None if found is None else found[1].replace("%2E", ".").replace("%25", "%")
