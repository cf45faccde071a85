"""The other clients, used as documented and with settings that make them fast and safe."""

from __future__ import annotations
