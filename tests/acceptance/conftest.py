"""The command line, for the acceptance tests."""

from __future__ import annotations

import pytest

from tests.acceptance.test_cli import Program
from tests.support import Vhost


@pytest.fixture
def program(vhost: Vhost) -> Program:
    """The command line on a virtual host of its own."""
    return Program(vhost)
