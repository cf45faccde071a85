"""Measurements of docs/bulk.md: encoding, decoding, and lateness by window.

``python -m benchmarks.bulk`` prints the tables. Encoding needs no broker: each way encodes the same 5,000 messages,
200 bytes with delays of whole minutes, and the time that counts is the processor's, of the quickest of many rounds.
Neither does decoding: of the content header of a message that was in two queues of ``Clock``. For the windows a fresh
private broker is started. ``publish_many`` publishes messages of 200 bytes as fast as it can, with delays of whole
seconds that take one hop or two, to a queue that is consumed meanwhile; none is due before all are published.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

from pamqp import body, commands, frame, header

from benchmarks.suite.percentiles import percentile
from benchmarks.suite.raw import FRAME_MAX
from benchmarks.suite.setup import TARGET, prepare, random_minutes
from bide.amqp import codec, decoding
from bide.client.client import Client, connect
from bide.client.encoding import Encoder
from bide.delay.celery import Celery
from bide.delay.clock import Clock
from bide.delay.nservicebus import NServiceBus
from bide.delay.received import restore
from bide.local_broker import LocalBroker
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.messages.prepared import PreparedMessage, check_message

_Any = TypeVar("_Any")

_BODY: Final = 200
_ROUNDS: Final = 15
_READ: Final = 5_000
_CLOCK: Final = Clock(max_delay=timedelta(minutes=59, seconds=59), resolution=timedelta(seconds=1), carrier="BCC")
_WINDOWS: Final = (10_000, 1_000)
_DELAYS: Final = {1: range(10, 30), 2: range(61, 80)}
"""Number of hops -> delays in seconds that need this number."""


def ways(now: datetime) -> dict[str, tuple[Sequence[PreparedMessage], Callable[[PreparedMessage], object]]]:
    """How a message can be encoded: the messages, as they are before, and what encodes one."""
    check = MessageChecker()
    alike = [
        check.check(OutgoingMessage(bytes(_BODY), to=TARGET, delay=delay)).starting(now) for delay in random_minutes()
    ]
    single = [
        check_message(OutgoingMessage(bytes(_BODY), to=TARGET, delay=delay)).starting(now) for delay in random_minutes()
    ]
    encoder = Encoder(_CLOCK, frame_max=FRAME_MAX)
    known = {}
    for one in single:
        route = one.route(_CLOCK, now)
        assert route is not None
        known[one.message_id] = route, one.wire_values(route, now)

    def whole(message: PreparedMessage) -> object:
        return encoder.encode(message, now, channel=1, mandatory=True)

    def by_codec(message: PreparedMessage) -> bytes:
        route, values = known[message.message_id]
        return b"".join(
            codec.publish(
                1,
                exchange=route.exchange,
                routing_key=route.routing_key,
                mandatory=True,
                encoded_properties=codec.properties(values),
                body=message.body,
                frame_max=FRAME_MAX,
            )
        )

    def by_pamqp(message: PreparedMessage) -> bytes:
        route, values = known[message.message_id]
        properties = commands.Basic.Properties(**values)
        frames = (
            commands.Basic.Publish(exchange=route.exchange, routing_key=route.routing_key, mandatory=True),
            header.ContentHeader(body_size=len(message.body), properties=properties),
            body.ContentBody(message.body),
        )
        return b"".join(frame.marshal(one, 1) for one in frames)

    encoded = encoder.encode(single[0], now, channel=1, mandatory=True)
    assert encoded is not None
    assert by_codec(single[0]) == encoded.frames
    # It sorts the headers.
    assert sorted(by_pamqp(single[0])) == sorted(by_codec(single[0]))
    return {
        "encoding with pamqp": (single, by_pamqp),
        "encoding value by value, our codec": (single, by_codec),
        "the route of a delayed message, and our codec": (single, whole),
        "both by a template": (alike, whole),
    }


def layouts(now: datetime) -> dict[str, tuple[Sequence[PreparedMessage], Callable[[PreparedMessage], object]]]:
    """The same messages for each layout, by its routes and by a template."""
    check = MessageChecker()
    alike = [
        check.check(OutgoingMessage(bytes(_BODY), to=TARGET, delay=delay)).starting(now) for delay in random_minutes()
    ]
    single = [replace(one, template=None) for one in alike]
    found: dict[str, tuple[Sequence[PreparedMessage], Callable[[PreparedMessage], object]]] = {}
    for infrastructure in (_CLOCK, NServiceBus(), Celery()):
        encode = partial(Encoder(infrastructure, frame_max=FRAME_MAX).encode, now=now, channel=1, mandatory=True)
        found[f"{infrastructure.name}, by its routes"] = single, encode
        found[f"{infrastructure.name}, by a template"] = alike, encode
    return found


def received(now: datetime) -> bytes:
    """The content header of a message, as it comes after two hops."""
    second, sent = now.replace(microsecond=0), int(now.timestamp() * 1_000)
    hops = {"c25": "c", "s1": "in.s"}
    ends = {"last": "c25", "first": "s1"}
    headers = {
        "bide-due": sent + 1_250,
        "bide-sent": sent,
        "bide-to": f"q:{TARGET}",
        "x-death": [
            {
                "count": 1,
                "reason": "expired",
                "queue": f"bide.v1.{queue}",
                "time": second,
                "exchange": f"bide.v1.{exchange}",
                "routing-keys": [TARGET],
            }
            for queue, exchange in hops.items()
        ],
        **{f"x-{which}-death-exchange": f"bide.v1.{hops[queue]}" for which, queue in ends.items()},
        **{f"x-{which}-death-queue": f"bide.v1.{queue}" for which, queue in ends.items()},
        **{f"x-{which}-death-reason": "expired" for which in ends},
    }
    encoded = codec.properties({"headers": headers, "delivery_mode": 2, "message_id": "0123456789abcdef" * 2})
    payload = struct.pack(">HHQ", codec.BASIC_CLASS, 0, _BODY) + encoded
    return codec.frame(codec.HEADER, 1, payload)


def readings(now: datetime) -> dict[str, Callable[[bytes], object]]:
    """How such a header can be read."""
    whole = received(now)
    _, _, read = frame.unmarshal(whole)
    values = decoding.properties(whole)
    # Both do the same work.
    assert isinstance(read, header.ContentHeader)
    assert read.properties.headers == values["headers"]
    assert restore("", "", values).values["headers"] == {}
    return {
        "decoding with pamqp": frame.unmarshal,
        "decoding, our codec": decoding.properties,
        "the same, and what the message was like when it was sent": lambda one: restore(
            "", "", decoding.properties(one)
        ),
        "decoded on first access": decoding.Properties,
    }


def microseconds(messages: Sequence[_Any], work: Callable[[_Any], object]) -> float:
    """Of processor time for a message, in the quickest of the rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        start = time.process_time()
        for one in messages:
            work(one)
        rounds.append(time.process_time() - start)
    return min(rounds) / len(messages) * 1e6


async def late(client: Client, *, messages: int, window: int, hops: int) -> tuple[float, list[float]]:
    """Messages per second that were confirmed, and how many milliseconds late each of them arrived."""
    chance, found = random.Random(1), list[float]()
    delays = [timedelta(seconds=seconds) for seconds in _DELAYS[hops]]

    def outgoing() -> Iterator[OutgoingMessage]:
        for _ in range(messages):
            yield OutgoingMessage(bytes(_BODY), to=TARGET, delay=chance.choice(delays))

    async def publish() -> float:
        start = time.perf_counter()
        report = await client.publish_many(outgoing(), window=window)
        return report.confirmed / (time.perf_counter() - start)

    async with client.consume(TARGET, prefetch=1_000) as arriving:
        publishing = asyncio.create_task(publish())
        async for message in arriving:
            await message.ack()
            assert message.lateness is not None
            found.append(message.lateness / timedelta(milliseconds=1))
            if len(found) == messages:
                break
        return await publishing, sorted(found)


async def windows(url: str, *, messages: int, rounds: int) -> None:
    """Measure in turns, and print medians of the rounds."""
    await prepare(url, _CLOCK)
    found: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    async with connect(url, infrastructure=_CLOCK) as client:
        for _ in range(rounds):
            for hops in _DELAYS:
                for window in _WINDOWS:
                    rate, times = await late(client, messages=messages, window=window, hops=hops)
                    values = (rate, percentile(times, 50), percentile(times, 99))
                    found.setdefault((window, hops), []).append(values)
    print("| `window` | hops | messages/s | p50, ms late | p99, ms late |\n|---|---|---|---|---|")
    for (window, hops), rows in found.items():
        cells = (f"{median(one[place] for one in rows):,.0f}" for place in range(3))
        print(f"| {window:,} | {hops} | {' | '.join(cells)} |")


def main() -> None:
    """Read the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=50_000, help="for each window (default 50000)")
    parser.add_argument("--rounds", type=int, default=3, help="of the windows, in turns (default 3)")
    parser.add_argument("--root", type=Path, help="run the RabbitMQ of the system in this folder (Linux, as root)")
    options = parser.parse_args()
    now = datetime.now(UTC)
    print("| sending | µs |\n|---|---|")
    for name, (messages, encode) in ways(now).items():
        print(f"| {name} | {microseconds(messages, encode):.1f} |")
    print("\n| layouts | µs |\n|---|---|")
    for name, (messages, encode) in layouts(now).items():
        print(f"| {name} | {microseconds(messages, encode):.1f} |")
    print("\n| receiving | µs |\n|---|---|")
    for name, read in readings(now).items():
        print(f"| {name} | {microseconds([received(now)] * _READ, read):.1f} |")
    print()
    with LocalBroker.start(ephemeral=True, chroot=options.root) as broker:
        asyncio.run(windows(broker.add_vhost("v"), messages=options.messages, rounds=options.rounds))


if __name__ == "__main__":
    main()
