"""Blocking client of a private broker's management API, faster than ``rabbitmqctl``."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from bide.management.endpoint import ManagementEndpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    """The management API of a broker on this machine: blocking, with one connection for each call."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    timeout: timedelta = timedelta(seconds=30)

    def call(self, method: str, *path: str, body: dict[str, Any] | None = None) -> Any:
        """Call ``/api/<path>``, percent-encoding its parts; return the decoded answer, or None if it is empty.

        Raises:
            ManagementApiError: the API did not answer, or refused.
        """
        import httpx2

        endpoint = ManagementEndpoint(
            base=f"http://{self.host}:{self.port}", user=self.user, password=self.password, timeout=self.timeout
        )
        content = (body or {}) if method in {"PUT", "POST"} else None
        try:
            with httpx2.Client(**endpoint.options()) as client:
                response = client.request(method, endpoint.url(*path), json=content)
        except httpx2.HTTPError as error:
            raise endpoint.unreachable(error) from error
        return endpoint.read(response)
