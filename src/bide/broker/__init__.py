"""The private local broker: a RabbitMQ node of our own, for tests, demos and development.

It listens on loopback only, keeps everything in one folder, and never touches a node that it did not start::

    from bide.broker import LocalBroker

    with LocalBroker.start(ephemeral=True) as broker:
        print(broker.url)
"""

from __future__ import annotations

from bide.broker.installation import Installation
from bide.broker.local import LocalBroker, find_running
from bide.broker.state import default_folder

__all__ = ["Installation", "LocalBroker", "default_folder", "find_running"]
