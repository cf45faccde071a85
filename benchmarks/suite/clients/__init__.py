"""The other clients, each as its documentation says and with the settings that make it fast and safe."""

from __future__ import annotations
