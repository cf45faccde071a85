"""A cluster that bide did not start, for runs without faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bide.admin.locate import management_api
from bide.amqp.url import BrokerUrl
from bide.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCluster:
    """The address of a cluster that gets no faults.

    Attributes:
        url: the AMQP URL, with the virtual host of the run.
        management_url: the URL of the management API; None for the default one.
        nodes: the names of the running nodes.
    """

    url: str = field(repr=False)
    management_url: str | None = field(repr=False)
    release: str
    nodes: tuple[str, ...]


@asynccontextmanager
async def foreign_cluster(url: str, management_url: str | None) -> AsyncIterator[ForeignCluster]:
    """Create the virtual host of a URL, and delete it at the end with everything in it.

    Args:
        url: the AMQP URL, with the name of a virtual host that does not exist. Its user has to be an administrator,
            unless *management_url* has another one.
        management_url: the URL of the management API; see :func:`bide.admin.locate.management_api`.

    Raises:
        InvalidUrlError: a URL cannot be read.
        InvalidInputError: the virtual host exists, so that it may have messages of others.
        ManagementApiError: the API did not answer, or refused.
    """
    broker = BrokerUrl.parse(url)
    async with management_api(broker, management_url) as api:
        if await api.call("GET", "vhosts", broker.vhost) is not None:
            raise InvalidInputError(
                f"the virtual host {broker.vhost!r} exists: give the URL with the name of a new one, which the run "
                "creates and deletes; one that a killed run left is deleted with 'rabbitmqctl delete_vhost'"
            )
        release = str((await api.overview())["rabbitmq_version"])
        nodes = tuple(name for name, is_running in (await api.nodes()).items() if is_running)
        await api.call("PUT", "vhosts", broker.vhost, body={})
        try:
            permissions = {"configure": ".*", "write": ".*", "read": ".*"}
            await api.call("PUT", "permissions", broker.vhost, broker.user, body=permissions)
            yield ForeignCluster(url=url, management_url=management_url, release=release, nodes=nodes)
        finally:
            await api.call("DELETE", "vhosts", broker.vhost)
