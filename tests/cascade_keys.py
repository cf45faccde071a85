"""A parser of the routing keys of binary cascades."""

from __future__ import annotations

import re
from typing import Final

from bide.delay.cascade_keys import LEVELS

_DELAYED_KEY: Final = re.compile(rf"((?:[01]\.){{{LEVELS}}})(.*)", re.DOTALL)


def split_key(key: str) -> tuple[int, str]:
    """The delay in seconds and the address that the routing key of a delayed message holds.

    The first 56 characters are the delay, whatever the address: an address may contain dots (rule of
    NServiceBus.RabbitMQ, and of Celery).
    """
    found = _DELAYED_KEY.fullmatch(key)
    assert found is not None, f"{key!r} does not start with {LEVELS} binary digits"
    digits, address = found.groups()
    return int(digits.replace(".", ""), 2), address
