"""The search for the stream port of a broker."""

from __future__ import annotations

import pytest

from bide.admin.locate import stream_port
from bide.errors import InvalidUrlError

SHOP = "amqp://ana:secret@shop.example/orders"


@pytest.mark.parametrize(
    ("environment", "port"),
    [
        ({}, None),
        ({"BIDE_STREAM_PORT": "5999"}, 5999),
        ({"BIDE_URL": "amqp://bob@shop.example/bills", "BIDE_STREAM_PORT": "5999"}, 5999),
        # Both variables describe one broker: for another broker the port would be wrong.
        ({"BIDE_URL": "amqp://ana:secret@bank.example", "BIDE_STREAM_PORT": "5999"}, None),
        # Nothing is to be decided by it.
        ({"BIDE_URL": "amqp://shop.example/a/b"}, None),
        ({"BIDE_URL": "amqp://shop.example/a/b", "BIDE_STREAM_PORT": ""}, None),
    ],
)
def test_the_stream_port_comes_from_the_environment_for_its_broker(
    environment: dict[str, str], port: int | None
) -> None:
    assert stream_port(SHOP, environment) == port


@pytest.mark.parametrize("given", ["0", "70000", "-1", "http://shop.example:5552"])
def test_an_invalid_port_is_refused(given: str) -> None:
    with pytest.raises(InvalidUrlError, match="BIDE_STREAM_PORT is"):
        stream_port(SHOP, {"BIDE_STREAM_PORT": given})


def test_an_unreadable_bide_url_is_named() -> None:
    """The error names the variable, since the URL was not given on the command line."""
    with pytest.raises(InvalidUrlError, match=r"BIDE_STREAM_PORT belongs to the broker of BIDE_URL, .* 'a/b'"):
        stream_port(SHOP, {"BIDE_URL": "amqp://ana:secret@shop.example/a/b", "BIDE_STREAM_PORT": "5999"})
