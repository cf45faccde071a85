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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"delay": "5s"}, "the options producerName and delay were both given: with producerName, a task stores all"),
        ({"deliver_at": "2030-01-01T00:00:00Z"}, "the options producerName and deliver_at were both given"),
        ({"isolated": "true"}, "the options producerName and isolated were both given"),
        ({"idPrefix": "x"}, "the options producerName and idPrefix were both given"),
        ({"rejects": "/tmp/rejects"}, "the options producerName and rejects were both given"),
        ({"past": "send"}, "the options producerName and past were both given"),
        ({"producerName": "x" * 101}, "the option producerName has 101 bytes: give at most 100"),
        ({"producerName": " "}, "the option producerName is empty"),
    ],
)
def test_options_that_contradict_a_producer_name_are_refused(options: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        settings_of(**{"producerName": "copy", **options})
    assert str(caught.value).startswith(expected)


def test_a_producer_name_needs_a_stream() -> None:
    with pytest.raises(InvalidOptionError, match="the option producerName needs the option queue"):
        SinkSettings.read(Options({"producerName": "copy", "exchange": "x"}), {})
    with pytest.raises(InvalidOptionError, match="the option streamPort needs producerName"):
        settings_of(streamPort="5552")


def test_the_stream_port_comes_from_the_option_or_the_environment() -> None:
    environment = {"BIDE_STREAM_PORT": "1234"}
    options = {"queue": "s", "producerName": "copy"}
    assert SinkSettings.read(Options(options), {}).stream_port is None
    assert SinkSettings.read(Options(options), environment).stream_port == 1234
    assert SinkSettings.read(Options({**options, "streamPort": "2345"}), environment).stream_port == 2345
    assert SinkSettings.read(Options({"queue": "s"}), environment).stream_port is None
