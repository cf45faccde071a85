"""Messages on the broker's side, and the record of their dead-lettering.

The rules are those of RabbitMQ's modules ``rabbit_dead_letter`` (below 4.0) and ``mc`` (from 4.0 on). They differ:

* Below 4.0, the header ``x-death`` is the record, and clients can forge it. From 4.0 on, the record is kept separately
  and replaces the header on delivery, so that a client's header has no effect.
* A queue with a dead-letter routing key removes the header ``CC`` below 4.0, and keeps it from 4.0 on.
* ``x-last-death-*`` exists from 4.0 on.
* Below 4.0, the entries after the latest one change their order with every dead-lettering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from bide.topology.exchange_types import RoutedMessage

Reason = Literal["rejected", "expired", "maxlen", "delivery_limit"]

X_DEATH: Final = "x-death"

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How often a message was dead-lettered from a queue for a reason.

    Attributes:
        queue: the queue.
        reason: the reason.
        exchange, routing_keys: the exchange and the keys of the message at its first such death, without BCC keys.
        at: the first time, in seconds since the Unix epoch.
        count: how often.
        expiration: the message's own expiration at the first time, as text.
    """

    queue: str
    reason: str
    exchange: str
    routing_keys: tuple[str, ...]
    at: int
    count: int = 1
    expiration: str | None = None

    def as_table(self) -> dict[str, Any]:
        """The entry of ``x-death`` for this record."""
        table: dict[str, Any] = {
            "count": self.count,
            "reason": self.reason,
            "queue": self.queue,
            "time": _EPOCH + timedelta(seconds=self.at),
            "exchange": self.exchange,
            "routing-keys": list(self.routing_keys),
        }
        if self.expiration is not None:
            table["original-expiration"] = self.expiration
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMessage:
    """A message on the broker's side.

    Attributes:
        exchange: the exchange that it was published or last dead-lettered to.
        routing_keys: the routing key, then the keys of CC and BCC.
        properties: the properties by AMQP name, with headers without BCC; below 4.0 with ``x-death``.
        body: the body.
        bcc: the keys of BCC.
        deaths: the record of dead-lettering, the latest entry first; from 4.0 on.
        first_death, last_death: reason, queue and exchange; from 4.0 on.
        delivery_count: number of failures that dead letters carry from quorum queues (from 4.0 on) and classic queues
            (from 4.3 on).
    """

    exchange: str
    routing_keys: tuple[str, ...]
    properties: Mapping[str, Any]
    body: bytes
    bcc: tuple[str, ...] = ()
    deaths: tuple[Death, ...] = ()
    first_death: tuple[str, str, str] | None = None
    last_death: tuple[str, str, str] | None = None
    delivery_count: int | None = None
    routed: RoutedMessage = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        headers = self.properties.get("headers") or {}
        keys = tuple(dict.fromkeys(self.routing_keys))
        object.__setattr__(self, "routed", RoutedMessage(keys, {**headers, **dict(self._death_headers())}))

    @classmethod
    def published(cls, exchange: str, routing_key: str, properties: Mapping[str, Any], body: bytes) -> StoredMessage:
        """The message that the broker gets from a publisher.

        Raises:
            InvalidInputError: the header CC or BCC is not a list.
        """
        given = properties.get("headers")
        routed = RoutedMessage.published(routing_key, given)
        cc, bcc = (_texts((given or {}).get(name, ())) for name in ("CC", "BCC"))
        kept = dict(properties)
        if given is not None:
            kept["headers"] = dict(routed.headers)
        return cls(exchange=exchange, routing_keys=(routing_key, *cc, *bcc), bcc=bcc, properties=kept, body=body)

    @property
    def routing_key(self) -> str:
        """The routing key that receivers see."""
        return self.routing_keys[0]

    @property
    def expiration(self) -> int | None:
        """The message's own TTL in milliseconds."""
        value = self.properties.get("expiration")
        return None if value is None else int(value)

    @property
    def priority(self) -> int | None:
        """The priority that the publisher set."""
        value = self.properties.get("priority")
        return value if isinstance(value, int) else None

    @property
    def visible_keys(self) -> tuple[str, ...]:
        """The routing key and the keys of CC, which releases below 4.0 record in ``x-death``."""
        return (self.routing_key, *_texts((self.properties.get("headers") or {}).get("CC", ())))

    def dead_lettered(
        self, reason: Reason, queue: str, *, exchange: str, routing_key: str | None, at: int, release: tuple[int, ...]
    ) -> StoredMessage:
        """The message that a queue publishes to its dead-letter exchange.

        Args:
            reason: the reason.
            queue: the queue that it leaves.
            exchange, routing_key: those of the dead letter; None as key keeps the message's own keys.
            at: the current time, in seconds since the Unix epoch.
            release: the release of RabbitMQ.
        """
        headers = dict(self.properties.get("headers") or {})
        death = Death(
            queue=queue,
            reason=reason,
            exchange=self.exchange,
            routing_keys=_without(self.routing_keys, self.bcc) if release >= (4, 0) else self.visible_keys,
            at=at,
            expiration=self.properties.get("expiration"),
        )
        properties = {name: value for name, value in self.properties.items() if name != "expiration"}
        moved = replace(
            self,
            exchange=exchange,
            routing_keys=self.routing_keys if routing_key is None else (routing_key,),
            properties=properties,
        )
        if release >= (4, 0):
            same = next((one for one in self.deaths if (one.queue, one.reason) == (queue, reason)), None)
            latest = death if same is None else replace(same, count=same.count + 1)
            others = tuple(one for one in self.deaths if one is not same)
            here = (reason, queue, self.exchange)
            return replace(moved, deaths=(latest, *others), first_death=self.first_death or here, last_death=here)
        headers = _with_death(headers, death)
        if routing_key is not None:
            headers.pop("CC", None)
        return replace(moved, properties={**properties, "headers": headers})

    def is_cycle(self, queue: str, *, release: tuple[int, ...]) -> bool:
        """Whether a dead letter returns to a queue although no client has rejected it since it left that queue."""
        deaths: list[tuple[Any, Any]] = [(one.queue, one.reason) for one in self.deaths]
        if release < (4, 0):
            entries = (self.properties.get("headers") or {}).get(X_DEATH)
            if not isinstance(entries, list):
                return False
            # An entry that is not a table comes from a client, and ends the search like a rejection.
            deaths = [
                (one.get("queue"), one.get("reason")) if isinstance(one, Mapping) else (None, "rejected")
                for one in entries
            ]
        for died_in, reason in deaths:
            if reason == "rejected":
                return False
            if died_in == queue:
                return True
        return False

    def as_delivered(self, counts: Mapping[str, int], *, release: tuple[int, ...]) -> dict[str, Any]:
        """The properties that a receiver sees.

        Args:
            counts: headers that the queue adds, such as ``x-delivery-count``.
            release: the release of RabbitMQ.
        """
        values = dict(self.properties)
        headers = dict(values.get("headers") or {})
        if release >= (4, 0):
            if self.deaths:
                headers[X_DEATH] = [one.as_table() for one in self.deaths]
            headers.update(self._death_headers())
            headers = dict(sorted({**headers, **counts}.items()))
        else:
            headers.update(counts)
        if headers:
            values["headers"] = headers
        return values

    def _death_headers(self) -> Iterator[tuple[str, str]]:
        for position, values in (("first", self.first_death), ("last", self.last_death)):
            if values is not None:
                for name, value in zip(("reason", "queue", "exchange"), values, strict=True):
                    yield f"x-{position}-death-{name}", value


def _with_death(headers: dict[str, Any], death: Death) -> dict[str, Any]:
    """Add a dead-lettering to headers, by the rules of releases below 4.0."""
    entries = headers.get(X_DEATH)
    if entries is None:
        headers |= {
            "x-first-death-reason": death.reason,
            "x-first-death-queue": death.queue,
            "x-first-death-exchange": death.exchange,
            X_DEATH: [death.as_table()],
        }
    elif not isinstance(entries, list):
        headers[X_DEATH] = [death.as_table()]
    else:
        tables = _grouped([one for one in entries if isinstance(one, Mapping)])
        key = (death.queue, death.reason)
        same = next((one for one in tables if (one.get("queue"), one.get("reason")) == key), None)
        latest = death.as_table() if same is None else {**same, "count": same.get("count", 0) + 1}
        headers[X_DEATH] = [latest, *(one for one in tables if one is not same)]
    return headers


def _grouped(tables: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge entries with the same queue and reason, and reverse their order, as RabbitMQ does."""
    found: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for one in tables:
        found.setdefault((one.get("queue"), one.get("reason")), []).append(one)
    return [{"count": len(same), **same[0]} for same in reversed(found.values())]


def _texts(keys: Any) -> tuple[str, ...]:
    return tuple(key for key in keys if isinstance(key, str)) if isinstance(keys, list | tuple) else ()


def _without(keys: tuple[str, ...], removed: tuple[str, ...]) -> tuple[str, ...]:
    """Erlang's ``--``: each key to remove takes away one equal key."""
    left = list(keys)
    for key in removed:
        if key in left:
            left.remove(key)
    return tuple(left)
