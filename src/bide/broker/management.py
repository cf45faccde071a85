"""The few calls of the management API that a private broker needs for itself.

Standard library only, and one connection for each call: this is for set-up, where ``rabbitmqctl`` would take a second
each time.
"""

from __future__ import annotations

import base64
import http.client
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from bide.errors import ManagementApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    """The management API of a broker on this machine."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    timeout: float = 30.0

    def call(self, method: str, *path: str, body: dict[str, Any] | None = None) -> Any:
        """Call ``/api/<path>``, each part of which is escaped; return the decoded answer, None if it is empty.

        Raises:
            ManagementApiError: no answer, or one that says no.
        """
        target = "/api/" + "/".join(quote(part, safe="") for part in path)
        credentials = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            connection.request(
                method,
                target,
                body=json.dumps(body if body is not None else {}) if method in {"PUT", "POST"} else None,
                headers={"Authorization": f"Basic {credentials}", "Content-Type": "application/json"},
            )
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ManagementApiError(f"{method} {target} on {self.host}:{self.port}: {error}") from error
        finally:
            connection.close()
        if response.status >= 300:
            reason = answer.decode(errors="replace").strip()
            raise ManagementApiError(f"{method} {target} on {self.host}:{self.port}: {response.status} {reason}")
        return json.loads(answer) if answer else None
