"""The name of this machine, and ids of endpoints on it."""

from __future__ import annotations

import socket
from functools import lru_cache
from typing import Final

HOST: Final = socket.gethostname()
"""The host name of this machine."""


@lru_cache(maxsize=64)
def host_id(endpoint: str) -> str:
    """The id of an endpoint on this machine, in 32 hexadecimal digits; the same after a restart."""
    # Imported here, because few clients need it.
    from uuid import NAMESPACE_DNS, uuid5

    return uuid5(NAMESPACE_DNS, f"{endpoint}@{HOST}").hex
