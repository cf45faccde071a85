"""Invalid results files of the benchmark."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as run_bench
from benchmarks.suite import page
from benchmarks.suite.catalogue import MEASUREMENTS
from benchmarks.suite.results import Results
from bide.cli.app import BAD_USAGE

WHOLE: dict[str, Any] = {
    "format": 1,
    "date": "2026-11-21T08:00:00+00:00",
    "scale": 1,
    "rounds": 1,
    "machine": {"processor": "a", "cores": "4", "memory": "24 GB", "kernel": "Linux", "python": "CPython"},
    "releases": {"RabbitMQ": "4.3.6"},
    "rows": [
        {
            "measurement": "lateness",
            "case": "Clock",
            "setting": "1,500/s",
            "values": {"p50": [10.0], "p99": [10]},
            "runs": [{"begun": "2026-11-21T08:00:00+00:00", "source": "0123456789", "busy": 0}],
            "notes": [],
        }
    ],
    "failures": [],
}


def changed(*path: str | int, to: Any) -> str:
    """The whole with something else in one place; nothing in it if that is ``...``."""
    data = copy.deepcopy(WHOLE)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(data)


ROW = ("rows", 0)
RUN = (*ROW, "runs", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "recursion"),
        ("null", "get"),
        (changed("date", to=5), "'date' of it is not text"),
        (changed("date", to=...), "it has no 'date'"),
        (changed("scale", to="1"), "'scale' of it is not a number"),
        (changed("scale", to=float("nan")), "'scale' of it is not a number"),
        (changed("scale", to=10**400), "'scale' of it is not a number"),
        (changed("rounds", to=True), "'rounds' of it is not a whole number"),
        (changed("machine", to={}), "'machine' of it is not an object of texts with processor, cores"),
        (changed("machine", "cores", to=4), "'machine' of it is not"),
        (changed("releases", to={}), "'releases' of it is not an object of texts with RabbitMQ"),
        (changed("rows", to={}), "'rows' of it is not a list of objects"),
        (changed("rows", to=[5]), "'rows' of it is not a list of objects"),
        (changed(*ROW, "case", to=...), "row 1 has no 'case'"),
        (changed(*ROW, "values", to=None), "'values' of row 1 is not an object of lists of numbers"),
        (changed(*ROW, "values", to={"rate": 5}), "'values' of row 1 is not"),
        (changed(*ROW, "values", to={"rate": ["5"]}), "'values' of row 1 is not"),
        (changed(*ROW, "values", to={"rate": [float("inf")]}), "'values' of row 1 is not"),
        (changed(*ROW, "notes", to="slow"), "'notes' of row 1 is not a list of texts"),
        (changed(*ROW, "colour", to="red"), "colour"),
        (changed(*RUN, "busy", to=...), "a run of row 1 has no 'busy'"),
        (changed(*RUN, "stolen", to="much"), "'stolen' of a run of row 1 is not a number or null"),
        (changed(*RUN, "colour", to="red"), "colour"),
        (changed("failures", to=[{}]), "'failures' of it is not a list of texts"),
        (changed("colour", to="red"), "colour"),
    ],
)
def test_another_file_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    assert run_bench(["--from", str(file), "--page", str(tmp_path / "page")]) == BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file} holds no results of the benchmark: " in line
    assert expected in line
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    "options",
    [["--scale", "1"], ["--rounds", "3"], ["--only", "a"], ["--root", "/"], ["--keep", "kept"]],
    ids=lambda options: options[0],
)
def test_measuring_options_are_refused_together_with_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    file = tmp_path / "kept.json"
    file.write_text(json.dumps(WHOLE))
    assert run_bench(["--from", str(file), *options]) == BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{options[0]} is for measuring, and --from measures nothing" in line


@pytest.mark.parametrize("option", ["--keep", "--page"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "file").touch()
    assert run_bench([option, str(tmp_path / "file" / "folder")]) == BAD_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be made (Not a directory): name another" in line


@pytest.mark.parametrize(
    "values",
    [
        {"p50": [10.0], "p99": [10]},
        {"p50": [0], "p99": [0]},
        {"p50": [-1.0, 5.0]},
        {"p50": []},
        {},
    ],
)
def test_any_measured_values_can_be_shown(tmp_path: Path, values: dict[str, list[float]]) -> None:
    """Exactly ten, nothing at all, less than nothing."""
    results = Results.from_dict(json.loads(changed(*ROW, "values", to=values)))
    assert "RabbitMQ 4.3.6" in page.write(tmp_path, [results], MEASUREMENTS).read_text()
    assert (tmp_path / "benchmarks/lateness.svg").exists() == any(max(one, default=0) > 0 for one in values.values())
