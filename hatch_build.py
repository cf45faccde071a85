"""The long description of the package: README.md with links that also work on a package index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Description(MetadataHookInterface):
    """Makes links to files absolute if ``project.urls`` has the address of the repository, else removes them."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        link = rf"[\1]({source}/blob/v{metadata['version']}/\2)" if source else r"\1"
        text = re.sub(r"\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)", link, text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
