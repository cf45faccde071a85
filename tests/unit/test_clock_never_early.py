"""``Clock`` with clients of different settings and deleted queues: never early."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bide.delay.clock import Clock
from bide.delay.protocol import ExchangeTarget, QueueTarget, Target
from bide.topology import Binding, Exchange, Queue, Topology
from bide.topology.routing import Model

SECOND = timedelta(seconds=1)


class Broker(RuleBasedStateMachine):
    """A broker on which clients apply, bind and publish in any order, and queues are deleted by hand.

    Whatever they do, a message reaches its own target at its due time, or it is set aside or held back where it can be
    found: it is never early, never elsewhere, and never gone.
    """

    CLIENTS = (
        Clock(max_delay=timedelta(hours=3), resolution=SECOND),
        Clock(max_delay=timedelta(minutes=90), resolution=timedelta(seconds=15), lanes=2),
        Clock(max_delay=timedelta(seconds=20), carrier="BCC"),
    )
    TARGETS = (
        QueueTarget("orders"),
        QueueTarget("orders", isolated=True),
        ExchangeTarget("shop", "order.created"),
        ExchangeTarget("shop", "a.b.c.d.e"),
    )
    clients = st.sampled_from(CLIENTS)
    targets: st.SearchStrategy[Target] = st.sampled_from(TARGETS)

    def __init__(self) -> None:
        super().__init__()
        self.topology = Topology(
            [Exchange("shop", "topic")],
            [Queue("orders"), Queue("shop's")],
            [Binding("shop", "shop's", "*.created"), Binding("shop", "shop's", "*.*.*.*.*")],
        )

    @initialize(client=clients)
    def begin(self, client: Clock) -> None:
        self.topology |= client.topology()

    @rule(client=clients)
    def apply(self, client: Clock) -> None:
        self.topology |= client.topology()

    @rule(client=clients, to=targets)
    def bind(self, client: Clock, to: Target) -> None:
        known = {one.name for one in self.topology.queues}
        required = client.route(client.max_delay, to).requires
        self.topology |= Topology(
            queues=required.queues,
            # The broker refuses to bind a queue that is not there, and the publisher goes on.
            bindings=[
                one
                for one in required.bindings
                if one.destination_type == "exchange" or one.destination in known | {q.name for q in required.queues}
            ],
        )

    @precondition(lambda self: len(self.topology.queues) > 1)
    @rule(data=st.data())
    def delete_a_queue(self, data: st.DataObject) -> None:
        names = sorted({one.name for one in self.topology.queues} - {"bide.v1.undeliverable"})
        gone = data.draw(st.sampled_from(names))
        self.topology = Topology(
            self.topology.exchanges,
            [one for one in self.topology.queues if one.name != gone],
            [one for one in self.topology.bindings if one.destination_type == "exchange" or one.destination != gone],
        )

    @rule()
    def mend_the_targets(self) -> None:
        self.topology |= Topology(
            queues=[Queue("orders"), Queue("shop's")],
            bindings=[Binding("shop", "shop's", "*.created"), Binding("shop", "shop's", "*.*.*.*.*")],
        )

    @rule(client=clients, to=targets, data=st.data(), message_id=st.text(max_size=3))
    def publish(self, client: Clock, to: Target, data: st.DataObject, message_id: str) -> None:
        delay = data.draw(
            st.timedeltas(timedelta(microseconds=1), client.max_delay)
            | st.sampled_from([client.resolution, client.max_delay, timedelta(seconds=15)])
        )
        route = client.route(delay, to, message_id=message_id)
        (arrival,) = Model(self.topology).travel(route.exchange, route.routing_key, route.headers)
        own = to.queue if isinstance(to, QueueTarget) else "shop's"
        assert arrival.queue in (own, client.undeliverable, client.release_queue(to))
        if arrival.queue == own:
            assert arrival.at == route.delay >= delay
        elif arrival.queue == client.release_queue(to):
            assert arrival.fate == "stuck"
            assert arrival.at == route.delay
        else:
            assert arrival.fate == "arrived"
        if arrival.queue != own:
            assert arrival.headers["bide-to"] == str(to)

    @invariant()
    def the_layout_is_one(self) -> None:
        for client in self.CLIENTS:
            assert client.topology() | self.topology


TestNeverEarly = Broker.TestCase
TestNeverEarly.settings = settings(
    max_examples=max(settings.default.max_examples // 5, 1) if settings.default else 20, stateful_step_count=25
)
