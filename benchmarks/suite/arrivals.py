"""A shared file in which workers record the lateness of each task, eight bytes per task."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "BIDE_BENCH_FOLDER"
URL_VARIABLE: Final = "BIDE_BENCH_URL"

_NUMBER: Final = struct.Struct("<d")


class Arrivals:
    """The file, in a folder that the worker's environment names."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "arrivals"
        self._ready = folder / "ready"
        self._descriptor: int | None = None

    @classmethod
    def of_environment(cls) -> Arrivals:
        """In a worker."""
        return cls(Path(os.environ[FOLDER_VARIABLE]))

    def add(self, due: float) -> None:
        """Write down that a task begins now which was due at this Unix time."""
        late = time.time() - due
        if self._descriptor is None:
            self._descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # So few bytes at the end of a file are written as a whole, or not at all.
        os.write(self._descriptor, _NUMBER.pack(late))

    def tell_ready(self) -> None:
        """Record that the worker is ready for tasks."""
        self._ready.touch()

    @property
    def is_ready(self) -> bool:
        """Whether a worker is ready."""
        return self._ready.exists()

    @property
    def count(self) -> int:
        """Tasks that began."""
        return self._file.stat().st_size // _NUMBER.size if self._file.exists() else 0

    def milliseconds(self) -> list[float]:
        """How late each of them began."""
        return [late * 1000 for (late,) in _NUMBER.iter_unpack(self._file.read_bytes())] if self.count else []
