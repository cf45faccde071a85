"""Routing keys and the header of messages in the cascades of NServiceBus and Celery.

Apart from :mod:`bide.delay.cascade`, because every client reads them and few make a cascade.
"""

from __future__ import annotations

import re
from typing import Final

from bide.delay.release import released_key

LEVELS: Final = 28
"""Levels of a cascade that lives with NServiceBus or Celery: delays of up to 2^28 - 1 seconds."""

HEADER_DELAY: Final = "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
"""Header of NServiceBus with the delay of a delayed send: whole seconds, a 32-bit integer (``I`` on the wire), never
text."""

_DELAYED_KEY: Final = re.compile(rf"((?:[01]\.){{{LEVELS}}})(.*)", re.DOTALL)
_QUEUE_WORD: Final = re.compile(r"~q:([^.]*)", re.DOTALL)


def original_key(key: str) -> str:
    """The routing key that a received message had before it was delayed; any other key unchanged.

    The address of NServiceBus and Celery, without the word that bide puts before it for Celery.
    """
    found = _DELAYED_KEY.fullmatch(key)
    if found is None:
        return key
    address = found[2]
    tagged = _QUEUE_WORD.fullmatch(address)
    if tagged is not None:
        return tagged[1].replace("%2E", ".").replace("%25", "%")
    released = released_key(address)
    return address if released is None else released


def queue_word(name: str) -> str:
    """One word of a routing key that names a queue."""
    return "~q:" + name.replace("%", "%25").replace(".", "%2E")
