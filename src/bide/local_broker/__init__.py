"""A private RabbitMQ on this machine, a node or a cluster, for tests, demos and development.

It listens on loopback only, keeps everything in one folder, and does not affect other nodes::

    from bide.local_broker import LocalBroker, LocalCluster

    with LocalBroker.start(ephemeral=True) as broker:
        print(broker.url)
    with LocalCluster.start(nodes=3, ephemeral=True) as cluster:
        cluster.nodes[0].kill()
"""

from __future__ import annotations

from bide.local_broker.cluster import LocalCluster, find_running
from bide.local_broker.installation import Installation
from bide.local_broker.local import LocalBroker
from bide.local_broker.state import default_folder

__all__ = ["Installation", "LocalBroker", "LocalCluster", "default_folder", "find_running"]
