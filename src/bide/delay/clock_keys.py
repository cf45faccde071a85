"""The transport keys of ``Clock``: CC or BCC keys besides a message's own routing key."""

from __future__ import annotations

import re
from typing import Final, Literal

from bide.delay.clock_digits import Level
from bide.delay.protocol import MAX_NAME_BYTES, ExchangeTarget, Target
from bide.errors import InvalidNameError

_TRANSPORT_KEY: Final = re.compile(r"(?:~\.)*~(?:[edhmsc][0-9]{1,2}(?:/[0-9]+)?|[qrxk][:#].*)", re.DOTALL)


Carrier = Literal["CC", "BCC"]


def carrier_for(release: tuple[int, ...]) -> Carrier:
    """The header that carries the digits on a broker of this release.

    BCC keys do not appear at receivers or in ``x-death``. Before 4.0 they are lost when the broker has to dead-letter a
    message a second time (no route, or no confirm in time), so CC is used on those releases.
    """
    return "BCC" if release >= (4, 0) else "CC"


def is_transport_key(key: str) -> bool:
    """Whether a CC or BCC key is a transport key of ``Clock``."""
    return _TRANSPORT_KEY.fullmatch(key) is not None


def digit_name(level: Level, digit: int, lane: int = 0) -> str:
    """The name of a digit in queue names: ``h5``, and ``h5/2`` for its third lane."""
    return f"{level.letter}{digit}" + (f"/{lane}" if lane else "")


def digit_key(level: Level, digit: int, lane: int = 0) -> str:
    """The key of a digit, without padding: ``~h5``."""
    return f"~{digit_name(level, digit, lane)}"


def padding_of(target: Target) -> str:
    """The words before a transport key that make it as many words long as the message's own routing key.

    A topic exchange also matches CC and BCC keys. A pattern that matches a transport key consists of wildcards only, so
    it matches every key of that many words, including the message's own routing key. No queue therefore gets a message
    that an undelayed publish would not have routed to it. (The exception is a pattern with the padding word ``~``, such
    as ``~.#``, which does match transport keys.)
    """
    return "~." * target.routing_key.count(".") if isinstance(target, ExchangeTarget) else ""


def target_key(target: Target) -> str:
    """The key that the delivery exchange routes to a target, padding included.

    Raises:
        InvalidNameError: the routing key has too many words: the padded key would be too long.
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
            f"the routing key has {words} words, the limit is {(MAX_NAME_BYTES - len(key)) // 2 + 1} when delayed: "
            "use fewer dots"
        )
    return pad + key


def hashed(name: str) -> str:
    """A hash of a name, used in its place if the name is too long."""
    # Imported here, because few names are that long.
    import hashlib

    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
