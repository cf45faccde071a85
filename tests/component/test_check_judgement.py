"""The judge of ``bide check`` finds planted faults in written histories, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from bide.check.history import UNDELIVERABLE, CheckHistory, Row, digest_of, next_run
from bide.check.judgement import judge
from bide.errors import InvalidInputError
from tests.check_cases import CASES, found
from tests.check_histories import DELIVERED, SECOND, SENT, write_history


@pytest.mark.parametrize("case", CASES)
def test_a_history_breaks_exactly_the_promises_that_were_planted(case: str, tmp_path: Path) -> None:
    rows, expected = CASES[case]
    assert found(judge(write_history(tmp_path, *rows))) == expected


def test_the_verdict_names_the_message_and_by_how_much_it_was_early(tmp_path: Path) -> None:
    early = replace(DELIVERED, received_at=SENT.due - 2 * SECOND)
    [finding] = [one for one in judge(write_history(tmp_path, SENT, early)).findings if one.violations]
    [example] = finding.examples
    assert (finding.rule, example.id, example.place) == ("early", "m1", "q")
    assert example.off == 2 * SECOND - SENT.due_error - 1_000


def test_the_allowed_lateness_is_an_argument(tmp_path: Path) -> None:
    folder = write_history(tmp_path, SENT, replace(DELIVERED, received_at=SENT.due + 3 * SECOND))
    assert found(judge(folder)) == {}
    assert found(judge(folder, max_lateness=timedelta(seconds=2))) == {"late": 1}


def test_runs_are_judged_together_and_each_by_its_own_clock(tmp_path: Path) -> None:
    lost = replace(SENT, id="lost")
    write_history(tmp_path, lost)
    write_history(tmp_path, replace(DELIVERED, id="lost"), run="run-0002")
    verdict = judge(tmp_path)
    assert verdict.runs == 2
    assert verdict.seconds == 120
    assert found(verdict) == {"lost": 1, "strange": 1}


def test_an_unfinished_run_is_named_and_not_judged(tmp_path: Path) -> None:
    write_history(tmp_path)
    write_history(tmp_path, SENT, finished=False, run="run-0002")
    verdict = judge(tmp_path)
    assert verdict.unfinished == ("run-0002",)
    assert verdict.violations == 0


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    write_history(tmp_path, finished=False)
    with pytest.raises(InvalidInputError, match="has no finished run: 'bide check run' writes one"):
        judge(tmp_path)


def test_the_digest_changes_with_any_file(tmp_path: Path) -> None:
    folder = write_history(tmp_path, SENT, DELIVERED)
    before = CheckHistory.open(folder).digest()
    assert CheckHistory.open(folder).digest() == before
    file = folder / "run-0001" / "run.json"
    file.write_text(file.read_text().replace('"seed": 7', '"seed": 8'))
    assert CheckHistory.open(folder).digest() != before


def test_a_second_run_needs_to_be_asked_for(tmp_path: Path) -> None:
    assert next_run(tmp_path / "new", again=False) == "run-0001"
    write_history(tmp_path)
    with pytest.raises(InvalidInputError, match="has 1 run already: add another run with --continue"):
        next_run(tmp_path, again=False)
    assert next_run(tmp_path, again=True) == "run-0002"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(InvalidInputError, match=r"has files that are not part of a history, such as thesis\.txt"):
        next_run(tmp_path, again=True)


def test_undeliverable_messages_are_counted(tmp_path: Path) -> None:
    rows: list[Row] = [SENT, replace(DELIVERED, place=UNDELIVERABLE), replace(DELIVERED, place=UNDELIVERABLE)]
    assert judge(write_history(tmp_path, *rows)).undeliverable == 1


def test_digests_of_bodies_differ() -> None:
    assert digest_of(b"a") != digest_of(b"b")
