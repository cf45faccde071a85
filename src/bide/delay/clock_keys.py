"""The keys that ``Clock`` puts beside a message's own routing key."""

from __future__ import annotations

import re
from typing import Final

from bide.delay.clock_digits import Level
from bide.delay.protocol import MAX_NAME_BYTES, ExchangeTarget, Target
from bide.errors import InvalidNameError

_OURS: Final = re.compile(r"(?:~\.)*~(?:[edhmsc][0-9]{1,2}(?:/[0-9]+)?|[qrxk][:#].*)", re.DOTALL)


def is_transport_key(key: str) -> bool:
    """Whether a CC or BCC key is one of those that ``Clock`` puts there."""
    return _OURS.fullmatch(key) is not None


def digit_name(level: Level, digit: int, lane: int = 0) -> str:
    """What a digit is called in the names of queues: ``h5``, and ``h5/2`` for its third lane."""
    return f"{level.letter}{digit}" + (f"/{lane}" if lane else "")


def digit_key(level: Level, digit: int, lane: int = 0) -> str:
    """The key of a digit, without padding: ``~h5``."""
    return f"~{digit_name(level, digit, lane)}"


def padding_of(target: Target) -> str:
    """Words that give our keys as many words as the message's own routing key has.

    A topic exchange matches CC and BCC keys too. A pattern that matches a key whose words are all ours consists of
    wildcards alone, and then it matches every key of that many words, the message's own included: no queue gets
    a message that a direct publish would not have brought it. (The word ``~`` itself is ours: a pattern that asks for
    it, such as ``~.#``, does get our keys.)
    """
    return "~." * target.routing_key.count(".") if isinstance(target, ExchangeTarget) else ""


def target_key(target: Target) -> str:
    """The key that leads from the delivery exchange to a target, padding included.

    Raises:
        InvalidNameError: the routing key has too many words to leave room for it.
    """
    pad = padding_of(target)
    kind = "x" if isinstance(target, ExchangeTarget) else "r" if target.isolated else "q"
    name = str(target)[2:]
    if kind == "x":
        name = name.replace("%", "%25").replace(".", "%2E")
    key = f"~{kind}:{name}"
    if len(pad) + len(key.encode()) > MAX_NAME_BYTES:
        key = f"~{kind}#{hashed(name)}"
    if len(pad) + len(key) > MAX_NAME_BYTES:
        words = len(pad) // 2 + 1
        raise InvalidNameError(
            f"the routing key has {words} words, a delayed message can have {(MAX_NAME_BYTES - len(key)) // 2 + 1}: "
            "use fewer dots"
        )
    return pad + key


def hashed(name: str) -> str:
    """A short stand-in for a name that is too long."""
    # Imported here, because few names are that long.
    import hashlib

    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
