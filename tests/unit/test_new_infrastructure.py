"""A custom delay infrastructure in the client, the plan and the taps."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import bide
import bide.testing
from bide.amqp import codec
from bide.client.encoding import Encoder
from bide.delay.levels import DelayLevel, DelayLevels
from bide.delay.protocol import DelayInfrastructure, QueueTarget, Target, address_of, round_up
from bide.delay.queues import waiting_queue
from bide.delay.routes import DelayRoute, Step
from bide.delay.taps import Retention, Taps, taps_of
from bide.errors import InvalidInputError
from bide.messages.checker import MessageChecker
from bide.messages.outgoing import OutgoingMessage
from bide.pipelines.plan.levels import PlanLevels
from bide.topology import Binding, Exchange, Queue, Topology
from tests.broker.receiving import connection_of
from tests.timeouts import TIMEOUT
from tests.unit.test_layers import MODULES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bide.delay.compiled import WireFormat
    from bide.delay.growing import ReadyDigits

UNIT = timedelta(seconds=10)
MILLISECOND = timedelta(milliseconds=1)
NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Ticks(DelayInfrastructure):
    """Delays of one to nine ticks of ten seconds, each a queue, for queues alone."""

    @property
    def name(self) -> str:
        return "ticks"

    @property
    def resolution(self) -> timedelta:
        return UNIT

    @property
    def max_delay(self) -> timedelta:
        return 9 * UNIT

    @property
    def delivery_exchange(self) -> str:
        return "ticks.delivery"

    @property
    def undeliverable(self) -> str:
        return "ticks.undeliverable"

    def queue(self, ticks: int) -> str:
        return f"ticks.{ticks}"

    def topology(self) -> Topology:
        queues = [waiting_queue(self.queue(one), one * UNIT, self.delivery_exchange) for one in range(1, 10)]
        return Topology(
            [Exchange("ticks.in", "fanout"), Exchange("ticks.wait", "headers"), Exchange(self.delivery_exchange)],
            [*queues, Queue.quorum(self.undeliverable)],
            [
                Binding("ticks.in", "ticks.wait", "", "exchange"),
                *(
                    Binding("ticks.wait", self.queue(one), "", arguments={"x-match": "all", "ticks": one})
                    for one in range(1, 10)
                ),
            ],
        )

    def probes(self) -> Topology:
        return Topology([Exchange(self.delivery_exchange)])

    def route(self, delay: timedelta, target: Target, *, message_id: str = "") -> DelayRoute:
        ticks = round_up(delay, UNIT, maximum=self.max_delay)
        exchange, key = address_of(target)
        if not ticks:
            return DelayRoute(exchange=exchange, routing_key=key, delay=timedelta(0), hops=0, requires=Topology())
        return DelayRoute(
            exchange="ticks.in",
            routing_key=key,
            headers={"ticks": ticks, "bide-to": str(target)},
            delay=ticks * UNIT,
            hops=1,
            requires=Topology(bindings=[Binding(self.delivery_exchange, key, key)]),
        )

    def steps(self, delay: timedelta, target: Target) -> tuple[Step, ...]:
        return ()

    def owns(self, name: str) -> bool:
        return name.startswith("ticks.")

    def sender_headers(
        self, *, message_id: str, now: datetime, due: datetime | None, values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        return {"clock": "analogue", "number": message_id}

    def delay_levels(self) -> DelayLevels:
        unit = UNIT // MILLISECOND
        return DelayLevels(
            levels=(DelayLevel(name="t", unit=unit, highest=9, queue="ticks.", has_queue_per_digit=True),)
        )

    def taps(self) -> Taps:
        return Taps(
            scheduled="ticks.tap.scheduled",
            delivered="ticks.tap.delivered",
            to_scheduled=(Binding("ticks.in", "ticks.tap.scheduled"),),
            to_delivered=(Binding("ticks.in", "ticks.tap.delivered"),),
        )


class CompiledTicks(Ticks):
    """The same, which compiles its routes."""

    def compile(self, target: Target, wire: WireFormat, ready: ReadyDigits | None = None) -> TicksRoute:
        return TicksRoute(self.route(UNIT, target), wire)


class TicksRoute:
    def __init__(self, shortest: DelayRoute, wire: WireFormat) -> None:
        self.routing_key = shortest.routing_key
        self.names = frozenset(shortest.headers)
        self._exchange = shortest.exchange
        self._to = str(shortest.headers["bide-to"])
        self._wire = wire

    def after(self, wait: int, message_id: str) -> tuple[str, str, bytes, int] | None:
        ticks = -(-wait // 10_000_000)
        if ticks > 9:
            return None
        return self._exchange, self.routing_key, self._wire.table_items({"ticks": ticks, "bide-to": self._to}), 1


BOTH = (Ticks(), CompiledTicks())


@pytest.mark.parametrize("infrastructure", BOTH, ids=lambda one: type(one).__name__)
async def test_a_client_delays_messages_with_a_new_infrastructure(infrastructure: Ticks) -> None:
    async with bide.testing.broker() as b, b.connect(infrastructure=infrastructure) as client:
        await client.declare(Topology(queues=[Queue.quorum("orders")]))
        await client.publish_many([OutgoingMessage(b"x", to="orders", delay="41s")])
        receipt = await client.publish("y", to="orders", delay="41s", headers={"mine": 1})
        assert receipt.hops == 1
        b.clock.advance("49s")
        connection = await connection_of(client)
        async with await connection.channel() as channel:
            assert await channel.get("orders") is None
        b.clock.advance("1s")
        async with client.consume("orders") as messages:
            for body in ("x", "y"):
                message = await asyncio.wait_for(anext(messages), TIMEOUT)
                await message.ack()
                assert (message.body.decode(), message.headers["number"]) == (body, message.message_id)
                assert message.lateness == timedelta(seconds=9)
        with pytest.raises(InvalidInputError, match="longer than this infrastructure can hold"):
            await client.publish("z", to="orders", delay="91s")


@pytest.mark.parametrize("infrastructure", BOTH, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("delay", [None, "0s", "1s", "10s", "90s"])
@pytest.mark.parametrize("headers", [None, {"mine": 1}, {"ticks": 5}, {"mine": 1, "clock": "digital"}])
def test_encoded_bytes_equal_those_of_its_routes(
    infrastructure: Ticks, delay: str | None, headers: dict[str, Any] | None
) -> None:
    message = OutgoingMessage(b"x", to="orders", delay=delay, headers=headers, message_id="m", priority=3)
    outgoing = MessageChecker().check(message).starting(NOW)
    route = outgoing.route(infrastructure, NOW)
    expected = infrastructure.sender_headers(message_id="m", now=NOW, due=outgoing.due, values=outgoing.values)
    frames = codec.publish(
        1,
        exchange=route.exchange if route is not None else "",
        routing_key="orders",
        mandatory=True,
        encoded_properties=codec.properties(outgoing.wire_values(route, NOW, expected)),
        body=b"x",
        frame_max=4096,
    )
    encoded = Encoder(infrastructure, frame_max=4096).encode(outgoing, NOW, channel=1, mandatory=True)
    assert encoded is not None
    assert encoded.frames == b"".join(frames)


def test_it_can_be_planned_for() -> None:
    levels = PlanLevels.of(Ticks())
    (interval,) = levels.intervals(0, 41_000)
    assert (levels.name, levels.levels[0].queue_of(interval.digit), interval.leave) == ("ticks", "ticks.5", 50_000)


def test_it_has_taps() -> None:
    taps = taps_of(Ticks())
    assert taps.topology(Retention()).queue("ticks.tap.scheduled") is not None
    assert taps.sources == ("ticks.in",)


def test_undefined_members_have_a_default() -> None:
    ticks = Ticks()
    assert (ticks.growing(), ticks.compile(QueueTarget("q"), codec)) == (None, None)
    assert ticks.for_release((4, 3)) is ticks is ticks.beside_nservicebus((3, 10))
    assert (ticks.relay_queues, ticks.base, ticks.release_prefix, ticks.writes_nservicebus_headers) == (
        (),
        "",
        "",
        False,
    )
    assert not len(ticks.address_topology("q"))


CONCRETE = frozenset({"Clock", "NServiceBus", "Celery", "WaitingHall"})
MADE_FOR_ONE = ("delay", "relay", "demo", "integrations")


def asked_for(tree: ast.AST) -> Iterator[str]:
    """The concrete infrastructure classes that code outside ``delay`` names."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                yield from CONCRETE & named(kinds)
            case ast.MatchClass(cls=kind):
                yield from CONCRETE & named(kind)
            case ast.Compare(left=ast.Call(func=ast.Name(id="type")), comparators=kinds):
                yield from CONCRETE & {name for kind in kinds for name in named(kind)}
            case _:
                continue


def named(node: ast.AST) -> set[str]:
    return {
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute)
    }


def test_no_module_checks_for_a_concrete_infrastructure() -> None:
    assert not {
        (module, name)
        for module in MODULES
        if not module.startswith(MADE_FOR_ONE)
        for text in [MODULES[module].read_text()]
        if any(name in text for name in CONCRETE)
        for name in asked_for(ast.parse(text))
    }


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(x, Clock)",
        "isinstance(x, NServiceBus | Celery)",
        "isinstance(x, (bide.Celery, int))",
        "type(x) is WaitingHall",
        "match x:\n    case Clock():\n        pass",
    ],
)
def test_a_check_for_a_concrete_infrastructure_is_found(code: str) -> None:
    assert list(asked_for(ast.parse(code)))
