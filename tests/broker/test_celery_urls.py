"""URLs that a Celery program has, at a real broker."""

from __future__ import annotations

import bide
from tests.support import Vhost


async def test_the_urls_of_a_celery_program_connect(vhost: Vhost) -> None:
    celery_url = vhost.url.replace("amqp://", "pyamqp://")
    unreachable = celery_url.rpartition("@")[0] + f"@127.0.0.1:1/{vhost.name}"
    async with bide.connect(f"{unreachable};{celery_url}") as client:
        assert client.url.vhost == vhost.name
        assert len(client.url.hosts) == 2
        assert client.connected
