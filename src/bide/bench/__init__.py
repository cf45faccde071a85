"""The benchmark: what bide, its rivals, and the broker can do, side by side on one machine.

Every case runs in a process of its own (``python -m bide.bench``) against a private broker, in a virtual host of its
own, in turns: A B C, A B C. What a case measured comes back as numbers; medians, tables and pages are made of these.
"""

from __future__ import annotations
