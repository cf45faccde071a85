"""Where the management API of a broker is looked for."""

from __future__ import annotations

import pytest

from bide.admin.locate import management_api
from bide.amqp.url import BrokerUrl

SHOP = BrokerUrl.parse("amqp://ana:secret@shop.example/orders")


@pytest.mark.parametrize(
    ("named", "environment", "address"),
    [
        (None, {}, "http://shop.example:15672"),
        ("https://api.example", {"BIDE_MANAGEMENT_URL": "http://elsewhere.example:80"}, "https://api.example:15671"),
        (None, {"BIDE_MANAGEMENT_URL": "http://api.example:8080/"}, "http://api.example:8080"),
        (
            None,
            {"BIDE_URL": "amqp://bob@shop.example/bills", "BIDE_MANAGEMENT_URL": "http://api.example"},
            "http://api.example:15672",
        ),
        # Whoever sets both means one broker: for another, the second would ask the wrong one.
        (
            None,
            {"BIDE_URL": "amqp://ana:secret@bank.example", "BIDE_MANAGEMENT_URL": "http://bank.example"},
            "http://shop.example:15672",
        ),
        # Nothing is to be decided by it.
        (None, {"BIDE_URL": "amqp://shop.example/a/b"}, "http://shop.example:15672"),
    ],
)
def test_the_address_comes_from_the_argument_then_the_environment_then_the_broker_url(
    named: str | None, environment: dict[str, str], address: str
) -> None:
    assert management_api(SHOP, named, environment=environment).address == address
