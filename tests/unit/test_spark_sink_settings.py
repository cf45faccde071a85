"""The options of a write."""

from __future__ import annotations

from datetime import timedelta

import pytest

from bide.delay.by_name import LAYOUTS
from bide.errors import InvalidOptionError
from bide.spark.options import Options
from bide.spark.sink_settings import SinkSettings


def settings_of(**options: str) -> SinkSettings:
    return SinkSettings.read(Options({"queue": "q", **options}), {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_accepts_a_queue_and_a_delay(layout: str) -> None:
    found = settings_of(layout=layout, delay="5s")
    assert found.constants == {"to": "q", "delay": timedelta(seconds=5)}
    assert "deliver_at" in settings_of(layout=layout, deliver_at="2030-11-21T06:00:00Z").constants


def test_an_exchange_can_have_a_routing_key() -> None:
    found = SinkSettings.read(Options({"exchange": "x", "routing_key": "k"}), {})
    assert found.constants == {"exchange": "x", "routing_key": "k"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"maxDelay": "long"}, "the option maxDelay: the delay 'long' cannot be read"),
        ({"resolution": "fine"}, "the option resolution: the delay 'fine' cannot be read"),
        (
            {"layout": "nservicebus", "lanes": "2"},
            "'nservicebus' has no setting 'lanes', which belongs to clock: leave it",
        ),
        ({"timeout": "0"}, "the option timeout is zero"),
        ({"timeout": "soon"}, "the option timeout: the delay 'soon' cannot be read"),
    ],
)
def test_errors_name_the_spark_option(options: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        settings_of(**options)
    assert expected in str(caught.value)
    assert "--" not in str(caught.value)
