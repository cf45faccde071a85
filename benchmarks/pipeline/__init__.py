"""Speed of the data pipeline, in this checkout and another one, with its limits.

All of it is measured in one run on one broker. Each side of a comparison runs in processes of its own, which import
bide from their own checkout, and the sides take turns: A B, B A. This package imports the other checkout nowhere.
"""

from __future__ import annotations
