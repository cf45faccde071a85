"""A private RabbitMQ node on this machine, for tests, demos and development.

The node listens on loopback only, keeps everything in one folder, and does not affect other nodes::

    from bide.local_broker import LocalBroker

    with LocalBroker.start(ephemeral=True) as broker:
        print(broker.url)
"""

from __future__ import annotations

from bide.local_broker.installation import Installation
from bide.local_broker.local import LocalBroker, find_running
from bide.local_broker.state import default_folder

__all__ = ["Installation", "LocalBroker", "default_folder", "find_running"]
