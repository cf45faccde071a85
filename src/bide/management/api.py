"""Client of RabbitMQ's management HTTP API: queues, bindings, policies, cluster state.

It supports RabbitMQ 3.10 to 4.3. Lists are requested without statistics, because 4.x discourages them and an operator
can disable them. Numbers of messages do not depend on statistics: the broker counts messages, by default every five
seconds.
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
from bide.management.endpoint import ManagementEndpoint, Patience
from bide.topology import Argument, Binding, Exchange, Queue

if TYPE_CHECKING:
    import httpx2

_PAGE: Final = 500
"""Entries per page: the most that RabbitMQ returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundExchange:
    """An exchange that exists on the broker.

    Attributes:
        exchange: the exchange as it was declared.
        policy: the name of the policy that applies to it, or None.
        delayed: number of messages that wait for it in the delayed-message plugin, on the node that answers; None if
            the plugin does not count them.
    """

    exchange: Exchange
    policy: str | None = None
    delayed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundQueue:
    """A queue that exists on the broker.

    Attributes:
        queue: the queue as it was declared.
        type: ``quorum``, ``classic`` or ``stream``.
        policy: the name of the policy that applies to it, or None.
        state: the state that the broker reports, such as ``running`` or ``down``; empty if it reports none.
        messages: number of messages, or None if the broker has not counted them yet. Includes dead letters
            that no target has confirmed yet, which are neither ready nor unacknowledged.
        ready: number of ready messages.
        unacknowledged: number of messages delivered to consumers and not acknowledged.
        members: the nodes with a replica of a quorum queue or stream; None if the broker does not report them.
        online: the members that are up.
        leader: the node with the leader, or None.
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
        """Number of dead letters that no target has confirmed yet; 0 if messages are not counted."""
        if self.messages is None or self.ready is None or self.unacknowledged is None:
            return 0
        return max(self.messages - self.ready - self.unacknowledged, 0)


class ManagementApi:
    """The management API of a broker. Use it with ``async with``, which closes it.

    Args:
        endpoints: possible addresses, tried in this order until one answers.
    """

    def __init__(self, *endpoints: ManagementEndpoint) -> None:
        if not endpoints:
            raise ValueError("no endpoint was given: give at least one")
        self._endpoints = list(endpoints)
        self._client: httpx2.AsyncClient | None = None

    @property
    def address(self) -> str:
        """The address in use, without user and password."""
        return self._endpoints[0].base

    async def close(self) -> None:
        """Close the connections."""
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
        self,
        method: str,
        *path: str,
        query: Mapping[str, str | int] | None = None,
        body: Any = None,
        patience: Patience | None = None,
    ) -> Any:
        """Call ``/api/<path>``; return the decoded answer, or None if it is empty.

        GET and DELETE of an object that does not exist return None too.

        Args:
            method: the HTTP method.
            path: the parts of the path.
            query: the parameters of the query.
            body: the body, which is sent as JSON.
            patience: for a call that may take longer than others; None applies the timeout of the endpoint.

        Raises:
            ManagementApiError: the API did not answer, or refused.
        """
        import httpx2

        while True:
            endpoint = self._endpoints[0]
            if self._client is None:
                self._client = httpx2.AsyncClient(**endpoint.options())
            timeout = (
                httpx2.USE_CLIENT_DEFAULT
                if patience is None
                else httpx2.Timeout(endpoint.timeout.total_seconds(), read=patience.timeout.total_seconds())
            )
            try:
                response = await self._client.request(
                    method,
                    endpoint.url(*path, query=query),
                    json=body,
                    extensions={"trace": endpoint.trace},
                    timeout=timeout,
                )
            except httpx2.HTTPError as error:
                if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) and len(self._endpoints) > 1:
                    # No endpoint has answered yet; the first one that answers is used from then on.
                    del self._endpoints[0]
                    await self.close()
                    continue
                raise endpoint.unreachable(error, patience) from error
            del self._endpoints[1:]
            return endpoint.read(response, missing_ok=method in {"GET", "DELETE"})

    async def overview(self) -> Mapping[str, Any]:
        """Information about the broker as a whole: ``cluster_name``, ``rabbitmq_version``..."""
        return _object(await self.call("GET", "overview"))

    async def feature_flags(self) -> dict[str, str]:
        """The state of each feature flag, such as ``enabled``. 3.10 shows them only to administrators."""
        return {str(one["name"]): str(one["state"]) for one in _array(await self.call("GET", "feature-flags"))}

    async def nodes(self) -> dict[str, bool]:
        """The nodes of the cluster, and whether each is running."""
        return {str(one["name"]): bool(one["running"]) for one in _array(await self.call("GET", "nodes"))}

    async def releases(self) -> dict[str, str]:
        """The release of RabbitMQ on each running node; empty if the node has started and not reported it yet."""
        return {str(one["name"]): _release(one) for one in _array(await self.call("GET", "nodes")) if one["running"]}

    async def connections_of(self, user: str) -> Sequence[Mapping[str, Any]]:
        """The name, virtual host and node of each connection of a user, including those opened a moment ago."""
        return _array(await self.call("GET", "connections", "username", user) or [])

    async def connected_at(self, connection: str) -> int | None:
        """The time at which a node accepted a connection, by its clock, in milliseconds since the epoch.

        Args:
            connection: the name of the connection, such as ``127.0.0.1:48106 -> 127.0.0.1:5672``.

        Returns:
            None if statistics do not have the connection, as in its first five seconds.
        """
        found = await self.call("GET", "connections", connection)
        at = None if found is None else _object(found).get("connected_at")
        return None if at is None else int(at)

    async def exchange(self, vhost: str, name: str) -> FoundExchange | None:
        """An exchange by name, or None."""
        found = await self.call("GET", "exchanges", vhost, name)
        return None if found is None else _exchange(_object(found))

    async def exchanges(self, vhost: str, containing: str) -> list[FoundExchange]:
        """The exchanges whose names contain a text."""
        return [_exchange(one) async for one in self._pages("exchanges", vhost, containing)]

    async def all_exchanges(self, vhost: str, *, patience: Patience | None = None) -> list[FoundExchange]:
        """All exchanges of a virtual host, in one call.

        The broker computes all exchanges for each page of a list, and with the delayed-message plugin this is slow.
        """
        found = await self.call("GET", "exchanges", vhost, query={"disable_stats": "true"}, patience=patience)
        if found is None:
            raise self._no_vhost(vhost)
        return [_exchange(one) for one in _array(found)]

    async def queue(self, vhost: str, name: str, *, statistics: bool = False) -> FoundQueue | None:
        """A queue by name, or None. Some releases do not report the number of its messages here.

        Args:
            vhost: the virtual host.
            name: the name of the queue.
            statistics: request all statistics, which include the members of a stream.
        """
        query = None if statistics else {"disable_stats": "true", "enable_queue_totals": "true"}
        found = await self.call("GET", "queues", vhost, name, query=query)
        return None if found is None else _queue(_object(found))

    async def queues(self, vhost: str, containing: str) -> list[FoundQueue]:
        """The queues whose names contain a text, with their numbers of messages."""
        return [_queue(one) async for one in self._pages("queues", vhost, containing)]

    async def bindings_from(self, vhost: str, exchange: str) -> list[Binding]:
        """The bindings whose source is this exchange; an empty list if the exchange does not exist."""
        found = await self.call("GET", "exchanges", vhost, exchange, "bindings", "source")
        return [_binding(one) for one in _array(found or [])]

    async def bindings(self, vhost: str, *, to_queue: str = "") -> list[Binding]:
        """All bindings of a virtual host, or of one queue, except those of the default exchange."""
        found = await self.call("GET", *(("queues", vhost, to_queue, "bindings") if to_queue else ("bindings", vhost)))
        return [_binding(one) for one in _array(found or []) if one["source"]]

    async def policies(self, vhost: str, *, operator: bool = False) -> dict[str, Policy]:
        """The policies of a virtual host by name, or its operator policies."""
        found = await self.call("GET", "operator-policies" if operator else "policies", vhost)
        return {one.name: one for one in (_policy(entry) for entry in _array(found or []))}

    async def set_policy(self, vhost: str, policy: Policy) -> None:
        """Create a policy, or change the one with that name."""
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
                raise self._no_vhost(vhost)
            found = _object(answer)
            for one in _array(found.get("items")):
                yield one
            pages = int(found.get("page_count", 1))
            page += 1

    def _no_vhost(self, vhost: str) -> ManagementApiError:
        return ManagementApiError(
            f"the management API at {self.address} has no virtual host {vhost!r}: if this is the API of another "
            "broker, give the right URL with management_url=..."
        )


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ManagementApiError(
            f"the management API returned {type(value).__name__} instead of an object: check its URL"
        )
    return value


def _array(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise ManagementApiError(f"the management API returned {type(value).__name__} instead of a list: check its URL")
    return value


def _release(node: Mapping[str, Any]) -> str:
    # Only some releases report it by itself, such as 4.3.
    applications = {one["name"]: one["version"] for one in node.get("applications") or ()}
    return str(node.get("rabbitmq_version") or applications.get("rabbit") or "")


def _arguments(found: Mapping[str, Any]) -> dict[str, Argument]:
    # Tables and lists become text, which can still be compared and shown.
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
    return FoundExchange(exchange=exchange, policy=found.get("policy") or None, delayed=found.get("messages_delayed"))


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
