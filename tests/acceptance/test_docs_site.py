"""The documentation site: a build without warnings, its links, and what its pages load."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from bide.cli.app import COMMANDS
from bide.patterns.catalogue import PATTERNS
from tests import browser
from tests.polling import wait_until
from tests.timeouts import TIMEOUT

ROOT = Path(__file__).parents[2]
# Sphinx takes 40 s of processor time, most of it for the API.
pytestmark = [pytest.mark.long, pytest.mark.timeout(30 * TIMEOUT)]


class _Page(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in {"img", "script", "iframe", "source"} and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") in {"stylesheet", "icon", "preload", "search"}:
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    done = subprocess.run(
        [sys.executable, "scripts/build_docs.py", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=10 * TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _Page]:
    return {path: _Page(path) for path in site.rglob("*.html")}


def test_every_internal_link_leads_to_a_page_and_an_anchor(site: Path, pages: dict[Path, _Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_no_page_loads_anything_from_another_server(site: Path, pages: dict[Path, _Page]) -> None:
    assert [(path.name, one) for path, page in pages.items() for one in page.loaded if urlsplit(one).scheme] == []
    styles = [one for path in site.rglob("*.css") for one in re.findall(r"url\((.*?)\)", path.read_text())]
    assert [one for one in styles if "//" in one and not one.strip("'\"").startswith("data:")] == []


def test_every_page_of_the_docs_is_in_the_site(pages: dict[Path, _Page], site: Path) -> None:
    docs = ROOT / "docs"
    names = {
        path.relative_to(docs).with_suffix(".html") for path in [*docs.glob("*.md"), *docs.glob("patterns/*.md")]
    } - {Path("README.html")}
    built = {path.relative_to(site) for path in pages}
    assert names <= built
    assert sum(name.parent == Path("patterns") for name in names) == sum(one.number is not None for one in PATTERNS)


def test_the_reference_has_every_command(site: Path) -> None:
    assert {path.stem for path in (site / "reference" / "commands").glob("*.html")} == set(COMMANDS)
    assert "--routing-key KEY" in (site / "reference" / "commands" / "send.html").read_text()


def test_the_reference_is_generated_from_the_code(site: Path) -> None:
    reference = site / "reference"
    assert 'id="bide.Client.publish"' in (reference / "api" / "clients.html").read_text()
    assert 'id="bide.errors.UnroutableError"' in (reference / "errors.html").read_text()
    for page, text in (
        ("headers", "bide-due"),
        ("queues", "bide.v1.undeliverable"),
        ("metrics", "bide_message_lateness_seconds"),
        ("settings", "BIDE_URL"),
    ):
        assert text in (reference / f"{page}.html").read_text()


def test_search_works_from_files(site: Path, tmp_path: Path) -> None:
    # The index is a script, because a page that was opened as a file may not fetch one.
    with browser.start(tmp_path / "profile") as page:
        page.visit(f"{(site / 'search.html').as_uri()}?q=waiting+hall")
        links = "[...document.querySelectorAll('#search-results a')].map((one) => one.href)"
        target = (site / "waiting-hall.html").as_uri()
        wait_until(lambda: any(one.startswith(target) for one in page.evaluate(links)), "the page is found")


def test_pages_with_diagrams_load_the_script(site: Path) -> None:
    assert "mermaid.min.js" in (site / "patterns" / "01-fanout-broadcast.html").read_text()
    assert "mermaid.min.js" not in (site / "client.html").read_text()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with the scripts and settings of the site, but with few pages and no reference."""
    folder = tmp_path / "small"
    shutil.copytree(ROOT / "docs" / "site", folder / "docs" / "site", ignore=shutil.ignore_patterns("*.md"))
    shutil.copytree(
        ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__", "docs_reference.py")
    )
    for name, text in {
        ".gitignore": "/build/\n/.mermaid\n__pycache__/\n",
        "CHANGELOG.md": "# Changelog\n",
        "CONTRIBUTING.md": "# Contributing\n",
        "README.md": "```python\nimport bide\n```\n",
        "docs/README.md": "",
        "docs/benchmarks/none": "",
        "docs/patterns.md": "# Patterns\n",
        "docs/patterns/one.md": "# One\n",
        "docs/pictures/none": "",
        "docs/site/index.md": "# bide\n\n```{toctree}\npatterns\ncontributing\nchangelog\n```\n",
        "scripts/docs_reference.py": "def write(folder):\n    pass\n",
        "src/bide/__init__.py": "",
        "src/bide/version.py": 'VERSION = "0.9.0"\n',
    }.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (folder / ".mermaid").symlink_to(ROOT / ".mermaid")
    _git(folder, "init", "--quiet")
    return folder


def _git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, timeout=TIMEOUT)


def _release(folder: Path, tag: str) -> None:
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "--message", tag)
    _git(folder, "tag", tag)


def _build_versions(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/docs_versions.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=10 * TIMEOUT)


def test_without_a_release_the_site_of_the_checkout_is_built_alone(small: Path) -> None:
    done = _build_versions(small)
    assert (done.returncode, done.stderr) == (0, "")
    versions = small / "build" / "docs" / "versions"
    assert {path.name for path in versions.iterdir()} == {"unreleased", "index.html"}
    assert _Page(versions / "index.html").links == ["unreleased/index.html"]
    assert 'class="versions"' not in (versions / "unreleased" / "index.html").read_text()


@pytest.mark.parametrize(
    ("link", "error"),
    [
        ("nowhere.md", "docs/patterns/one.md: the link 'nowhere.md' leads to no file"),
        ("../patterns.md#nowhere", "local id not found in doc 'patterns': 'nowhere' [myst.xref_missing]"),
    ],
)
def test_a_broken_link_fails_the_build(small: Path, link: str, error: str) -> None:
    page = small / "docs" / "patterns" / "one.md"
    page.write_text(f"# One\n\n[a link]({link})\n")
    command = [sys.executable, "scripts/build_docs.py"]
    done = subprocess.run(command, cwd=small, capture_output=True, text=True, check=False, timeout=10 * TIMEOUT)
    assert done.returncode == 1
    assert error in done.stderr


def test_sites_of_all_releases_link_to_each_other(small: Path, tmp_path: Path) -> None:
    _release(small, "v0.9.0")
    # The page is not in the site of 0.9.0.
    (small / "docs" / "patterns" / "two.md").write_text("# Two\n")
    (small / "src" / "bide" / "version.py").write_text('VERSION = "0.10.0"\n')
    _release(small, "v0.10.0")
    script = (small / "scripts" / "build_docs.py").rename(tmp_path / "build_docs.py")
    _release(small, "v0.8.0")  # without the script, its site cannot be built
    script.rename(small / "scripts" / "build_docs.py")
    _git(small, "tag", "v0.11.0rc1", "v0.9.0")

    done = _build_versions(small)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "docs: 0.8.0 cannot be built: see the messages above"
    versions = small / "build" / "docs" / "versions"
    assert {path.name for path in versions.iterdir()} == {"unreleased", "0.10.0", "0.9.0", "index.html"}
    assert _Page(versions / "index.html").links == ["0.10.0/index.html"]

    with browser.start(tmp_path / "profile") as page:
        found = "[...document.querySelectorAll('.versions a')].map((one) => [one.innerText, one.href])"
        page.open(versions / "index.html")
        newest = (versions / "0.10.0" / "index.html").as_uri()
        wait_until(lambda: page.address() == newest, "the newest release is open")
        for version, title in (("unreleased", "0.10.0"), ("0.10.0", "0.10.0"), ("0.9.0", "0.9.0")):
            for name in ("index.html", "patterns/one.html", "patterns/two.html"):
                if (version, name) == ("0.9.0", "patterns/two.html"):
                    continue
                page.open(versions / version / name)
                assert f"bide {title}" in page.evaluate("document.title")
                assert page.evaluate("document.querySelector('.versions summary').innerText") == f"Version: {version}"
                assert page.evaluate("document.querySelector('.versions a').checkVisibility()") is False
                page.evaluate("document.querySelector('.versions summary').click()")
                assert page.evaluate("document.querySelector('.versions a').checkVisibility()") is True
                same = "index.html" if name == "patterns/two.html" else name
                assert page.evaluate(found) == [
                    ["unreleased", (versions / "unreleased" / name).as_uri()],
                    ["0.10.0", (versions / "0.10.0" / name).as_uri()],
                    ["0.9.0", (versions / "0.9.0" / same).as_uri()],
                ]
                assert page.evaluate("document.querySelector('.versions [aria-current]').innerText") == version
                assert [one for one in page.requests if not one.startswith(("file:", "data:"))] == []
                assert page.complaints == []
