"""Reports that cannot be written, or not completely."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from bide.errors import InvalidInputError
from bide.pipelines.report.writing import write
from tests.reports import figures

LIMIT: Final = 10_000

# The kernel kills it as soon as a file that it writes gets longer.
KILLED: Final = """
import resource, signal, sys
from pathlib import Path
from bide.pipelines.report.writing import write
from tests.reports import figures

limit = int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
write(figures(), out=Path(sys.argv[1]), svg=None, title="t")
"""


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    place.mkdir()
    with pytest.raises(InvalidInputError, match=r"page\.html cannot be written: .+; name another"):
        write(figures(), out=place, svg=None, title="t")
    assert not [one for one in tmp_path.iterdir() if one != place]


def test_a_kill_in_the_middle_leaves_the_old_report(tmp_path: Path) -> None:
    place = tmp_path / "page.html"
    place.write_text("the old one")
    root = Path(__file__).parents[2]
    # Without -B, Python would leave byte code that ends at the limit, and could not import these modules any more.
    killed = subprocess.run([sys.executable, "-B", "-c", KILLED, str(place), str(LIMIT)], cwd=root, check=False)
    assert killed.returncode == -signal.SIGXFSZ
    assert place.read_text() == "the old one"
    (beside,) = (one for one in tmp_path.iterdir() if one != place)
    assert beside.name.startswith(".page.html.")
    assert beside.stat().st_size == LIMIT, "it was in the middle of it"
    write(figures(), out=place, svg=None, title="t")
    assert place.read_text().endswith("</html>\n")
