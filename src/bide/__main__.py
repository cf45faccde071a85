"""``python -m bide``: the same as the command ``bide``."""

from __future__ import annotations

from bide.cli import main

if __name__ == "__main__":
    main()
