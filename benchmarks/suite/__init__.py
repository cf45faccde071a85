"""The benchmark suite: bide, other clients and the broker, compared on one machine.

Every case runs in a process of its own (``python -m benchmarks.suite``) against a private broker, in a virtual host of
its own, in turns: A B C, A B C. A case answers with numbers, which become medians, tables and pages.
"""

from __future__ import annotations
