"""The command line and a browser, for the acceptance tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import browser
from tests.acceptance.test_cli import Program
from tests.browser import Browser
from tests.support import Vhost


@pytest.fixture
def program(vhost: Vhost) -> Program:
    """The command line on a virtual host of its own."""
    return Program(vhost)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser.start(tmp_path_factory.mktemp("profile")) as started:
        yield started
