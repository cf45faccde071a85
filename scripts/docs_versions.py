"""The documentation sites of all releases and of this checkout, with links between them.

Usage: docs_versions.py; the sites are build/docs/versions/VERSION and build/docs/versions/unreleased. A release is a
tag such as v1.2.0. Its site is built from its files with the installed tools. A site that cannot be built is reported
and left out, and the exit code is 1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
OUTPUT: Final = ROOT / "build" / "docs" / "versions"
UNRELEASED: Final = "unreleased"

_TAG: Final = re.compile(r"v(\d+(?:\.\d+)*)")
_PLACE: Final = "<!-- versions -->"
"""The line of docs/site/_templates/sidebar/variant-selector.html."""


def releases() -> list[str]:
    """The versions of the tags, newest first, without pre-releases."""
    tags = map(_TAG.fullmatch, _git("tag", "--list", "v*").splitlines())
    found = [tag[1] for tag in tags if tag is not None]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")], reverse=True)


def _git(*arguments: str) -> str:
    program = shutil.which("git")
    if program is None:
        raise SystemExit("there is no git, which knows the releases: install it")
    return subprocess.run([program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def build(version: str) -> bool:
    """Build the site of a version; return whether that worked."""
    print(f"docs: building {version}", flush=True)
    with TemporaryDirectory() as folder:
        tree, built = ROOT, Path(folder, "built")
        if version != UNRELEASED:
            tree = Path(folder, "tree")
            # Unlike a worktree, an archive leaves nothing in the repository when this program is killed.
            archive = Path(folder, "tree.tar")
            _git("archive", f"--output={archive}", f"refs/tags/v{version}")
            shutil.unpack_archive(archive, tree, filter="data")
            (tree / ".mermaid").symlink_to(ROOT / ".mermaid")
        # The reference is generated from the code that is imported.
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, "scripts/build_docs.py", str(built)]
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            shutil.move(built / "html", OUTPUT / version)
    return done.returncode == 0


def add_list(version: str, versions: Sequence[str]) -> None:
    """Put links to all versions into the sidebar of each page of one."""
    site = OUTPUT / version
    for path in site.rglob("*.html"):
        items = []
        for other in versions:
            same = OUTPUT / other / path.relative_to(site)
            link = os.path.relpath(same if same.exists() else OUTPUT / other / "index.html", path.parent)
            current = ' aria-current="true"' if other == version else ""
            items.append(f'<li><a href="{Path(link).as_posix()}"{current}>{other}</a></li>')
        summary = f"<summary>Version: {version}</summary>"
        found = f'<details class="versions">{summary}<ul>{"".join(items)}</ul></details>'
        path.write_text(path.read_text(encoding="utf-8").replace(_PLACE, found, 1), encoding="utf-8")


def write_index(version: str) -> None:
    """Write a page that leads to the site of a version."""
    start = f"{version}/index.html"
    lines = [
        *("<!doctype html>", '<html lang="en">', '<meta charset="utf-8">', "<title>bide</title>"),
        f'<meta http-equiv="refresh" content="0; url={start}">',
        f'<a href="{start}">bide {version}</a>',
        "</html>",
    ]
    (OUTPUT / "index.html").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Build all sites; return the exit code."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    versions = [UNRELEASED, *releases()]
    built = [version for version in versions if build(version)]
    if len(built) > 1:
        for version in built:
            add_list(version, built)
    if built:
        write_index(next((version for version in built if version != UNRELEASED), UNRELEASED))
        print(f"docs: open {OUTPUT / 'index.html'}")
    left_out = [version for version in versions if version not in built]
    if left_out:
        print(f"docs: {', '.join(left_out)} cannot be built: see the messages above", file=sys.stderr)
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
