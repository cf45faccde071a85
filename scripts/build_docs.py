"""The documentation site: collects the pages, generates the reference, and runs Sphinx.

Usage: build_docs.py [OUTPUT]; the default is build/docs. Warnings, broken links among them, are errors. The pages under
docs/ are for the forge too, so their links lead to files of the repository: here they lead to pages.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import docs_reference

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
SITE: Final = DOCS / "site"
SCRIPT: Final = ROOT / ".mermaid" / "mermaid.min.js"

_BESIDE: Final = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages outside docs/."""

_STARTS: Final = {"README.md": "index.md", "docs/README.md": "index.md"}
"""Pages that the site's own start page replaces."""

_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_ANCHOR: Final = re.compile(r'<a id="([\w-]+)"></a>')
_FENCE: Final = re.compile(r"^(?P<fence>```+|~~~+)", re.MULTILINE)
_LANGUAGES: Final = {
    ".py": "python",
    ".json": "json",
    ".go": "go",
    ".java": "java",
    ".js": "javascript",
    ".mjs": "javascript",
}


def collect(source: Path) -> None:
    """Write the sources of the site into an empty folder."""
    shutil.copytree(SITE, source, dirs_exist_ok=True)
    shutil.copy(SCRIPT, source / "_static")
    for folder in ("pictures", "benchmarks"):
        shutil.copytree(DOCS / folder, source / folder)
    pages = {path: path.relative_to(DOCS) for path in DOCS.rglob("*.md") if not path.is_relative_to(SITE)}
    pages |= {ROOT / name: Path(page) for name, page in _BESIDE.items()}
    pages.pop(DOCS / "README.md")
    linked: set[Path] = set()
    for path, page in pages.items():
        place = source / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_with_links(path, page, linked))
    _add_list_of_patterns(source / "patterns.md")
    _add_program(source / "index.md")
    for path in sorted(linked):
        _write_code(source, path)
    docs_reference.write(source / "reference")


def _with_links(path: Path, page: Path, linked: set[Path]) -> str:
    """The text of a page whose links lead to pages of the site. Code between fences stays unchanged."""
    parts, inside = [], False
    for line in path.read_text().splitlines(keepends=True):
        if _FENCE.match(line.lstrip()):
            inside = not inside
        line = _ANCHOR.sub(lambda anchor: f"({_label(path, anchor[1])})=\n", line)
        parts.append(line if inside else _LINK.sub(lambda link: _moved(link, path, page, linked), line))
    return "".join(parts)


def _moved(link: re.Match[str], path: Path, page: Path, linked: set[Path]) -> str:
    target, hash_, anchor = link[3].partition("#")
    if ":" in target:
        return link[0]
    found = (path.parent / target).resolve() if target else path
    if anchor and found.suffix == ".md" and anchor in _ANCHOR.findall(found.read_text()):
        return f"{link[1]}[{link[2]}](#{_label(found, anchor)})"
    if not target:
        return link[0]
    if not found.exists():
        raise SystemExit(f"{path.relative_to(ROOT)}: the link {link[3]!r} leads to no file")
    name = found.relative_to(ROOT).as_posix()
    if name in _STARTS:
        moved = _STARTS[name]
        hash_ = anchor = ""
    elif name in _BESIDE:
        moved = _BESIDE[name]
    elif found.is_relative_to(DOCS) and found.suffix != ".json":
        moved = found.relative_to(DOCS).as_posix()
    else:
        linked.add(found)
        moved = f"code/{name}.md"
    up = Path(os.path.relpath(moved, page.parent)).as_posix()
    return f"{link[1]}[{link[2]}]({up}{hash_}{anchor})"


def _label(path: Path, anchor: str) -> str:
    """The name of an anchor in the whole site."""
    return f"{path.stem}-{anchor}".lower()


def _write_code(source: Path, path: Path) -> None:
    """A page with a file of the repository, or with those of a folder."""
    name = path.relative_to(ROOT).as_posix()
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if _is_text(one))
    lines = ["---", "orphan: true", "---", f"# {name}"]
    for one in files:
        if one != path:
            lines += ["", f"## {one.relative_to(path).as_posix()}"]
        language = _LANGUAGES.get(one.suffix, "none")
        lines += ["", f"`````{{code-block}} {language}", one.read_text().strip(), "`````"]
    place = source / "code" / f"{name}.md"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("\n".join(lines) + "\n")


def _is_text(path: Path) -> bool:
    ignored = {"node_modules", "__pycache__", "package-lock.json"}
    return path.is_file() and not ignored & set(path.parts) and path.suffix not in {".pyc", ".class"}


def _add_list_of_patterns(page: Path) -> None:
    pages = sorted(page.with_suffix("").glob("*.md"))
    names = "\n".join(f"patterns/{one.stem}" for one in pages)
    page.write_text(f"{page.read_text()}\n```{{toctree}}\n:hidden:\n\n{names}\n```\n")


def _add_program(page: Path) -> None:
    """Put the first program of the README into the start page. The tests run it there."""
    program = re.search(r"^```python\n.*?^```\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert program is not None
    page.write_text(page.read_text().replace("<!-- the first program of README.md -->\n", program[0]))


def build(output: Path) -> int:
    """Build the site; return the exit code of Sphinx."""
    from sphinx.cmd.build import build_main

    if not SCRIPT.exists():
        raise SystemExit("the script for diagrams is missing: run scripts/install-mermaid.sh")
    source, new = output / "source", output / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    collect(new)
    _keep_times(source, new)
    shutil.rmtree(source, ignore_errors=True)
    new.rename(source)
    options = ["-b", "html", "-W", "--keep-going", "-q", "-d", str(output / "doctrees")]
    return build_main([*options, str(source), str(output / "html")])


def _keep_times(old: Path, new: Path) -> None:
    """Give unchanged files the times of the last build, after which Sphinx does not read them again."""
    for path in new.rglob("*"):
        before = old / path.relative_to(new)
        if path.is_file() and before.is_file() and before.read_bytes() == path.read_bytes():
            shutil.copystat(before, path)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    code = build(place.resolve())
    if code == 0:
        print(f"docs: open {place / 'html' / 'index.html'}")
    sys.exit(code)
