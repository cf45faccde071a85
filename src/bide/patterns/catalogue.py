"""The catalogue of patterns, with their command-line options and samples.

The numbers are those of a well-known list of eighteen RabbitMQ patterns. Patterns without a number are primitives of
the numbered ones, or come from other sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from bide.errors import InvalidInputError
from bide.patterns import alternates, broadcast, conventions, delays, event_bus, partitions, primitives, rpc
from bide.patterns import service_classes as classes
from bide.patterns.options import Option, caveat_of, options_of, summary_of
from bide.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A pattern and the function that builds its topology.

    Attributes:
        number: the number of the pattern, 1 to 18, or None.
        title: a short title.
        build: the function; it returns the topology.
        sample: arguments for a sample of the pattern.
    """

    number: int | None = None
    title: str
    build: Callable[..., Topology]
    sample: Mapping[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        """The name on the command line, such as ``fanout-broadcast``."""
        return self.build.__name__.replace("_", "-")

    @property
    def example(self) -> str | None:
        """The file name of the pattern's example, such as ``01_fanout_broadcast.py``, or None."""
        return None if self.number is None else f"{self.number:02}_{self.build.__name__}.py"

    @property
    def summary(self) -> str:
        """The purpose of the pattern, in one sentence."""
        return summary_of(self.build)

    @property
    def caveat(self) -> str:
        """The pitfalls of the pattern, or an empty text."""
        return caveat_of(self.build)

    @property
    def options(self) -> tuple[Option, ...]:
        """The options of the pattern, in order."""
        return options_of(self.build)

    def topology(self, texts: Mapping[str, Sequence[str]]) -> Topology:
        """Build the topology from options that are given as text.

        Args:
            texts: name of the option, without dashes -> the values given for it.

        Raises:
            InvalidInputError: an option is unknown, missing or malformed, or the pattern refuses its value.
        """
        by_name = {one.name: one for one in self.options}
        for name in texts:
            if name not in by_name:
                known = ", ".join(f"--{one}" for one in by_name)
                raise InvalidInputError(f"the pattern {self.name} has no option --{name}: use one of {known}")
        missing = [one for one in by_name.values() if one.required and not texts.get(one.name)]
        if missing:
            needed = ", ".join(f"--{one.name} {one.form}" for one in missing)
            raise InvalidInputError(f"the pattern {self.name} needs {needed}: add them, or use --sample")
        return self.build(
            **{by_name[name].parameter: by_name[name].read(given) for name, given in texts.items() if given}
        )

    def sample_topology(self) -> Topology:
        """Build the topology of the sample."""
        return self.build(**self.sample)


def _event_bus(exchange: str, *, queues: Sequence[str], delay: str, keys: Sequence[str] = ()) -> Topology:
    """An event bus: a worker counts and delays retries, and parks messages that fail for good.

    Args:
        exchange: the exchange that events are published to.
        queues: the subscribers' queues; each has a retry queue, a delay queue and a parking queue.
        delay: time to wait before each retry.
        keys: binding keys besides the queues' names.
    """
    return event_bus.event_bus(exchange, *queues, delay=delay, keys=keys)


_event_bus.__name__ = "event_bus"

PATTERNS: Final = (
    Pattern(
        number=1,
        title="Fanout broadcast",
        build=broadcast.fanout_broadcast,
        sample={"exchange": "bookings", "queues": ["billing", "crm", "audit"]},
    ),
    Pattern(
        number=2,
        title="Layered exchanges",
        build=broadcast.layered_exchanges,
        sample={
            "exchange": "travel",
            "layers": {"bookings": "booking.#", "changes": "#"},
            "queues": {"billing": "bookings", "crm": "bookings", "pets": "changes"},
            "rules": {"pets": {"entity.type": "pet", "change.type": "new"}},
        },
    ),
    Pattern(
        number=3,
        title="E-mail routing by headers",
        build=broadcast.email_routing,
        sample={
            "exchange": "mailbox",
            "rules": {
                "finance": {"from": "reports@abc.example", "subject": "component status"},
                "safety": {"x-match": "any", "to:safety@air.example": True, "cc:safety@air.example": True},
            },
            "others": "other-mail",
        },
    ),
    Pattern(
        number=4,
        title="Public message exchanges, private consumer exchanges",
        build=conventions.private_consumer_exchanges,
        sample={
            "messages": ["booking.new", "booking.modified"],
            "consumers": {
                "app1": ["booking.new"],
                "app2": ["booking.new"],
                "app3": ["booking.new", "booking.modified"],
            },
            "keys": {"app3": ["mytravel.com"]},
            "rules": {"app2": {"client.id": 1001}},
        },
    ),
    Pattern(
        number=5,
        title="Point to point",
        build=conventions.point_to_point,
        sample={"queues": ["charge-card", "send-ticket"]},
    ),
    Pattern(
        number=6,
        title="Ordered processing in partitions",
        build=partitions.ordered_partitions,
        sample={"exchange": "bookings", "queue": "bookings", "partitions": 3},
    ),
    Pattern(
        number=7,
        title="Data locality",
        build=partitions.data_locality,
        sample={"exchange": "clicks", "queue": "clicks", "partitions": 3, "header": "user-id"},
    ),
    Pattern(
        number=8,
        title="Hierarchical routing",
        build=conventions.hierarchical_routing,
        sample={
            "messages": ["finance.invoicing.invoice-requested", "finance.fraud.alert", "finance.fraud.check"],
            "queues": {"ledger": ["finance"], "investigators": ["finance.fraud"]},
        },
    ),
    Pattern(
        number=9,
        title="Priority queue",
        build=classes.priority_queue,
        sample={"queue": "tickets", "priorities": 5, "max_length": 1000, "overflow": "reject-publish"},
    ),
    Pattern(
        number=10,
        title="Classes of service by topic",
        build=classes.classes_of_service,
        sample={"exchange": "orders", "queue": "orders", "levels": ["high", "low"], "otherwise": "low"},
    ),
    Pattern(
        number=11,
        title="If, else if, else",
        build=alternates.if_else,
        sample={
            "exchange": "clients",
            "branches": {"acme": ["acme"], "partners": ["globex", "initech"]},
            "otherwise": "everybody-else",
        },
    ),
    Pattern(
        number=12,
        title="Not",
        build=alternates.not_routing,
        sample={"exchange": "booking.new", "queue": "app2", "unwanted": ["mytravel.com"]},
    ),
    Pattern(
        number=13,
        title="Delayed retry by a cascade",
        build=delays.delayed_retry_cascade,
        sample={"queues": ["consumer-app-1", "consumer-app-2"], "levels": 3},
    ),
    Pattern(
        number=14,
        title="Delayed retry by an ephemeral exchange and queue",
        build=delays.ephemeral_delay,
        sample={"name": "retry.6f1c", "delay": "5s", "to": "orders"},
    ),
    Pattern(
        number=15,
        title="The delayed-message plugin",
        build=delays.delayed_message_exchange,
        sample={"exchange": "reminders", "bindings": {"mail": ["user.#"]}},
    ),
    Pattern(
        number=16,
        title="Delayed delivery by a cascade",
        build=delays.delayed_delivery_cascade,
        sample={"queues": ["orders"]},
    ),
    Pattern(
        number=17,
        title="Delayed delivery by the publisher's own exchange",
        build=delays.private_publisher_delay,
        sample={"exchange": "publisher3", "to": "bookings", "delay": "5m"},
    ),
    Pattern(
        number=18,
        title="Request and reply",
        build=rpc.rpc,
        sample={"queue": "prices", "replies": "instance", "instances": ["web1", "web2"]},
    ),
    Pattern(
        title="Wire tap",
        build=conventions.wire_tap,
        sample={"exchange": "app1.private", "queue": "app1.tap"},
    ),
    Pattern(
        title="Event bus with retries",
        build=_event_bus,
        sample={"exchange": "shop", "queues": ["orders"], "delay": "5s", "keys": ["order.*"]},
    ),
    Pattern(
        title="CC and BCC",
        build=primitives.carbon_copies,
        sample={"exchange": "desk", "queues": ["front", "back"]},
    ),
    Pattern(
        title="Expiry and auto-delete",
        build=primitives.ephemeral,
        sample={"exchange": "visit", "queue": "visitor", "expires": "1m"},
    ),
    Pattern(title="Auto-delete queue", build=primitives.auto_delete_queue, sample={"queue": "screen"}),
    Pattern(title="Exclusive queue", build=primitives.exclusive_queue, sample={"queue": "mine"}),
    Pattern(
        title="Length limits",
        build=primitives.bounded_queue,
        sample={"queue": "latest", "dead_letter_queue": "older", "max_length": 100},
    ),
    Pattern(
        title="Central dead-letter exchange",
        build=primitives.central_dead_letters,
        sample={"exchange": "dead-letters", "queues": ["orders", "bills"], "dead_letter_queue": "morgue"},
    ),
    Pattern(title="TTL", build=primitives.waiting_queue, sample={"queue": "later", "to": "orders", "ttl": "10s"}),
    Pattern(
        title="Alternate exchange",
        build=primitives.catch_all,
        sample={"exchange": "desk", "queues": ["front"], "unmatched": "lost-property"},
    ),
)
"""The eighteen numbered patterns in order, then the others."""


def find_pattern(name: str) -> Pattern:
    """Find a pattern by its name or number.

    Raises:
        InvalidInputError: there is no such pattern.
    """
    for pattern in PATTERNS:
        if name in (pattern.name, str(pattern.number)):
            return pattern
    near = get_close_matches(name, [one.name for one in PATTERNS], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InvalidInputError(f"there is no pattern {name!r}: {hint}'bide topology list' shows all patterns")
