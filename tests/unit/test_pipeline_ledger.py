"""The ledger of parts: each part is complete or absent."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from bide.errors import InvalidInputError
from bide.pipelines.ledger import Ledger, LedgerHead, LedgerPart

HEAD = LedgerHead(plan="p", broker="b", rows=3, checksum=-5, parts=2)


def test_a_ledger_reads_the_parts_it_wrote(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path / "deep" / "ledger"))
    assert (ledger.head(), ledger.numbers(), ledger.get(0)) == (None, set(), None)
    ledger.begin(HEAD)
    parts = [LedgerPart(part=0, sent=2, rejected=1), LedgerPart(part=123_456, sent=1, rejected=0)]
    for one in parts:
        ledger.add(one)
    for same in (Ledger(ledger.folder), pickle.loads(pickle.dumps(ledger))):
        assert same.head() == HEAD
        assert same.parts() == parts


def test_an_unfinished_file_is_not_a_part(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path))
    ledger.add(LedgerPart(part=1, sent=2, rejected=0))
    (tmp_path / "_part-00002.json.0a1b2c3d.tmp").write_text('{"part": 2, "se')
    assert ledger.numbers() == {1}


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "rows": 5}'])
def test_a_foreign_ledger_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ledger.json").write_text(text)
    with pytest.raises(InvalidInputError, match=r"name another|name another ledger"):
        Ledger(str(tmp_path)).head()


def test_an_unknown_url_scheme_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="the ledger 'ftp://x/y' is not a usable folder"):
        Ledger("ftp://x/y")


@pytest.mark.parametrize("place", ["file", "file/ledger"])
def test_an_unusable_folder_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    ledger = Ledger(str(tmp_path / place))
    with (
        pytest.raises(InvalidInputError, match=r"the ledger .*file.* cannot be used: .*; name another folder"),
        ledger.lock(),
    ):
        raise AssertionError("there is no folder to lock")
    with pytest.raises(InvalidInputError, match=r"the ledger .*file.* cannot be read: .*; name another folder"):
        ledger.head()
