"""The exchanges, queues and bindings of ``Clock``, by digit."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from bide.delay.clock_digits import LEVELS, Digit
from bide.delay.clock_keys import digit_key
from bide.delay.clock_names import ClockNames
from bide.delay.queues import final_queue, waiting_queue
from bide.topology import Binding, Exchange, Queue, Topology

WORDS_AT_APPLY: Final = 4
"""``bide delay apply`` binds the digit queues for routing keys of up to this many words."""

PADDINGS_AT_APPLY: Final = tuple("~." * words for words in range(WORDS_AT_APPLY))


@lru_cache(maxsize=16)
def core_topology(names: ClockNames) -> Topology:
    """All exchanges, and the bindings between them."""
    alternate = {"alternate-exchange": names.undeliverable}
    exchanges = [
        Exchange(names.undeliverable, "fanout"),
        Exchange(names.delivery_exchange, "direct", arguments=alternate),
        Exchange(names.released_exchange, "fanout"),
    ]
    queues = [final_queue(names.undeliverable)]
    bindings = [
        Binding(names.undeliverable, names.undeliverable),
        Binding(names.released_exchange, names.delivery_exchange, destination_type="exchange"),
    ]
    for level in LEVELS:
        exchanges += [
            Exchange(names.level_exchange(level), "direct", arguments=alternate),
            Exchange(names.entry_exchange(level), "fanout"),
        ]
        bindings.append(Binding(names.entry_exchange(level), names.level_exchange(level), destination_type="exchange"))
    zeros = [Digit(level, 0, padding=padding) for padding in PADDINGS_AT_APPLY for level in LEVELS]
    return Topology(exchanges, queues, bindings) | digit_topology(names, zeros)


def digit_topology(names: ClockNames, digits: Iterable[Digit]) -> Topology:
    """The queues of these digits, and their bindings."""
    queues: dict[str, Queue] = {}
    bindings: list[Binding] = []
    for digit in digits:
        queue, binding = _queue_and_binding(names, digit)
        if queue is not None:
            queues[queue.name] = queue
        bindings.append(binding)
    return Topology(queues=queues.values(), bindings=bindings)


def _queue_and_binding(names: ClockNames, digit: Digit) -> tuple[Queue | None, Binding]:
    level, below = digit.level, names.exchange_below(digit.level)
    exchange, key = names.level_exchange(level), digit.padding + digit_key(level, digit.value, digit.lane)
    if not digit.value:
        return None, Binding(exchange, below, key, "exchange")
    queue = waiting_queue(names.digit_queue(level, digit.value, digit.lane), level.unit * digit.value, below)
    return queue, Binding(exchange, queue.name, key)
