"""Queues, bindings, policies and cluster state from RabbitMQ's management HTTP API.

Works with the API of RabbitMQ 3.10 to 4.3. Lists are asked for without statistics, which 4.x discourages and which
may be switched off; the numbers of messages in queues are counted by the broker itself in either case, every five
seconds by default.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from bide.delay.cascade import Policy
from bide.errors import ManagementApiError
from bide.management.endpoint import ManagementEndpoint
from bide.topology import Argument, Binding, Exchange, Queue

if TYPE_CHECKING:
    import httpx2

_PAGE: Final = 500
"""Entries per page: the most that RabbitMQ gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundExchange:
    """An exchange as it is on the broker.

    Attributes:
        policy: the name of the policy that applies to it, or None.
    """

    exchange: Exchange
    policy: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundQueue:
    """A queue as it is on the broker.

    Attributes:
        policy: the name of the policy that applies to it, or None.
        state: the broker's word for how it is, such as ``running`` or ``down``; empty where it says none.
        messages: all of them, or None where the broker has not counted yet. A message that has expired and that
            nothing takes is neither ready nor unacknowledged.
        ready: those that wait.
        unacknowledged: those that are with a consumer.
        members: the nodes with a replica, of a quorum queue or a stream; None where the broker does not report them.
        online: the members that are up.
        leader: the node that leads the replicas, or None.
    """

    queue: Queue
    type: str = "classic"
    policy: str | None = None
    state: str = ""
    messages: int | None = None
    ready: int | None = None
    unacknowledged: int | None = None
    members: tuple[str, ...] | None = None
    online: tuple[str, ...] = ()
    leader: str | None = None

    @property
    def between(self) -> int:
        """Messages that have left the queue's line and arrived nowhere yet; 0 where nothing is counted."""
        if self.messages is None or self.ready is None or self.unacknowledged is None:
            return 0
        return max(self.messages - self.ready - self.unacknowledged, 0)


class ManagementApi:
    """The management API of one broker. Nothing is sent before the first call; ``async with`` closes it.

    Args:
        endpoints: the addresses where it may be, tried in this order until one answers.
    """

    def __init__(self, *endpoints: ManagementEndpoint) -> None:
        if not endpoints:
            raise ValueError("a management API needs an address")
        self._endpoints = list(endpoints)
        self._client: httpx2.AsyncClient | None = None

    @property
    def address(self) -> str:
        """The address that it is asked at, without user and password."""
        return self._endpoints[0].base

    async def close(self) -> None:
        """Close its connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(
        self, method: str, *path: str, query: Mapping[str, str | int] | None = None, body: Any = None
    ) -> Any:
        """Call ``/api/<path>`` and return the decoded answer; None if it is empty.

        To get or to delete what does not exist returns None too.

        Raises:
            ManagementApiError: no answer, or one that says no.
        """
        import httpx2

        while True:
            endpoint = self._endpoints[0]
            if self._client is None:
                self._client = httpx2.AsyncClient(**endpoint.options())
            try:
                response = await self._client.request(
                    method, endpoint.url(*path, query=query), json=body, extensions={"trace": endpoint.trace}
                )
            except httpx2.HTTPError as error:
                if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and len(self._endpoints) > 1:
                    # None of them has answered yet: from the first answer on, that one alone is asked.
                    del self._endpoints[0]
                    await self.close()
                    continue
                raise endpoint.unreachable(error) from error
            del self._endpoints[1:]
            return endpoint.read(response, missing_ok=method in {"GET", "DELETE"})

    async def overview(self) -> Mapping[str, Any]:
        """What the API says of the broker as a whole: ``cluster_name``, ``rabbitmq_version``..."""
        return _object(await self.call("GET", "overview"))

    async def feature_flags(self) -> dict[str, str]:
        """State of each feature flag: ``enabled``, ``disabled``... 3.10 shows them to administrators only."""
        return {str(one["name"]): str(one["state"]) for one in _array(await self.call("GET", "feature-flags"))}

    async def nodes(self) -> dict[str, bool]:
        """The nodes of the cluster by name, and whether each is running."""
        return {str(one["name"]): bool(one["running"]) for one in _array(await self.call("GET", "nodes"))}

    async def exchange(self, vhost: str, name: str) -> FoundExchange | None:
        """One exchange, or None."""
        found = await self.call("GET", "exchanges", vhost, name)
        return None if found is None else _exchange(_object(found))

    async def exchanges(self, vhost: str, containing: str) -> list[FoundExchange]:
        """The exchanges whose names contain this text."""
        return [_exchange(one) async for one in self._pages("exchanges", vhost, containing)]

    async def queue(self, vhost: str, name: str, *, statistics: bool = False) -> FoundQueue | None:
        """One queue, or None; its messages are not counted here on every release.

        Args:
            vhost: of the queue.
            name: of the queue.
            statistics: ask for all that is known. Only so are the members of a stream reported.
        """
        query = None if statistics else {"disable_stats": "true", "enable_queue_totals": "true"}
        found = await self.call("GET", "queues", vhost, name, query=query)
        return None if found is None else _queue(_object(found))

    async def queues(self, vhost: str, containing: str) -> list[FoundQueue]:
        """The queues whose names contain this text, with their numbers of messages."""
        return [_queue(one) async for one in self._pages("queues", vhost, containing)]

    async def bindings_from(self, vhost: str, exchange: str) -> list[Binding]:
        """The bindings that have this exchange as their source; none if it does not exist."""
        found = await self.call("GET", "exchanges", vhost, exchange, "bindings", "source")
        return [_binding(one) for one in _array(found or [])]

    async def bindings(self, vhost: str, *, to_queue: str = "") -> list[Binding]:
        """All bindings of a virtual host, or of one queue, but those of the default exchange."""
        found = await self.call("GET", *(("queues", vhost, to_queue, "bindings") if to_queue else ("bindings", vhost)))
        return [_binding(one) for one in _array(found or []) if one["source"]]

    async def policies(self, vhost: str, *, operator: bool = False) -> dict[str, Policy]:
        """The policies of a virtual host by name; with ``operator``, its operator policies."""
        found = await self.call("GET", "operator-policies" if operator else "policies", vhost)
        return {one.name: one for one in (_policy(entry) for entry in _array(found or []))}

    async def set_policy(self, vhost: str, policy: Policy) -> None:
        """Make a policy, or change the one of that name."""
        body = {
            "pattern": policy.pattern,
            "definition": dict(policy.definition),
            "apply-to": policy.apply_to,
            "priority": policy.priority,
        }
        await self.call("PUT", "policies", vhost, policy.name, body=body)

    async def delete_policy(self, vhost: str, name: str) -> None:
        """Delete a policy; a missing one is not an error."""
        await self.call("DELETE", "policies", vhost, name)

    async def _pages(self, kind: str, vhost: str, containing: str) -> AsyncIterator[Mapping[str, Any]]:
        page = pages = 1
        while page <= pages:
            query: dict[str, str | int] = {
                "page": page,
                "page_size": _PAGE,
                "name": re.escape(containing),
                "use_regex": "true",
                "pagination": "true",
                "disable_stats": "true",
                "enable_queue_totals": "true",
            }
            answer = await self.call("GET", kind, vhost, query=query)
            if answer is None:
                raise ManagementApiError(
                    f"the management API at {self.address} knows no virtual host {vhost!r}: is it the API of this "
                    "broker? Name the right one with --management-url"
                )
            found = _object(answer)
            for one in _array(found.get("items")):
                yield one
            pages = int(found.get("page_count", 1))
            page += 1


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ManagementApiError(f"the management API answers with {type(value).__name__} where an object is due")
    return value


def _array(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise ManagementApiError(f"the management API answers with {type(value).__name__} where a list is due")
    return value


def _arguments(found: Mapping[str, Any]) -> dict[str, Argument]:
    # An argument may be a table or a list; as text it can still be compared and shown.
    arguments = found.get("arguments") or {}
    return {
        name: value if isinstance(value, str | int | bool | float) else json.dumps(value, sort_keys=True)
        for name, value in arguments.items()
    }


def _exchange(found: Mapping[str, Any]) -> FoundExchange:
    exchange = Exchange(
        name=found["name"],
        type=found["type"],
        durable=bool(found["durable"]),
        auto_delete=bool(found["auto_delete"]),
        internal=bool(found["internal"]),
        arguments=_arguments(found),
    )
    return FoundExchange(exchange=exchange, policy=found.get("policy") or None)


def _queue(found: Mapping[str, Any]) -> FoundQueue:
    queue = Queue(
        name=found["name"],
        durable=bool(found["durable"]),
        exclusive=bool(found.get("exclusive")),
        auto_delete=bool(found["auto_delete"]),
        arguments=_arguments(found),
    )
    members = found.get("members")
    return FoundQueue(
        queue=queue,
        type=str(found.get("type") or queue.type),
        policy=found.get("policy") or None,
        state=str(found.get("state") or ""),
        messages=found.get("messages"),
        ready=found.get("messages_ready"),
        unacknowledged=found.get("messages_unacknowledged"),
        members=None if members is None else tuple(members),
        online=tuple(found.get("online") or ()),
        leader=found.get("leader") or None,
    )


def _binding(found: Mapping[str, Any]) -> Binding:
    return Binding(
        source=found["source"],
        destination=found["destination"],
        routing_key=found["routing_key"],
        destination_type="exchange" if found["destination_type"] == "exchange" else "queue",
        arguments=_arguments(found),
    )


def _policy(found: Mapping[str, Any]) -> Policy:
    return Policy(
        name=found["name"],
        pattern=found["pattern"],
        definition=found["definition"],
        apply_to=found["apply-to"],
        priority=int(found.get("priority", 0)),
    )
