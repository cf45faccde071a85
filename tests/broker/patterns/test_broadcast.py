"""Patterns 1, 2 and 3: broadcast."""

from __future__ import annotations

from email.message import EmailMessage

import pytest

import bide
from bide.amqp.connection import Connection
from bide.errors import UnroutableError
from bide.patterns.broadcast import email_routing, fanout_broadcast, layered_exchanges, mail_headers
from bide.patterns.catalogue import find_pattern
from tests.broker.patterns.queue_contents import bodies, take_all


async def test_every_queue_gets_a_copy(client: bide.Client, connection: Connection) -> None:
    await client.declare(fanout_broadcast("bookings", queues=["billing", "crm", "audit"]))
    for key in ("booking.new", "", "anything at all"):
        await client.publish(key, exchange="bookings", routing_key=key)
    copies = ["booking.new", "", "anything at all"]
    assert await bodies(connection, "billing", "crm", "audit") == {"billing": copies, "crm": copies, "audit": copies}


async def test_consumers_of_one_queue_share_its_messages(client: bide.Client) -> None:
    await client.declare(fanout_broadcast("bookings", queues=["billing"]))
    async with client.consume("billing", prefetch=1) as one, client.consume("billing", prefetch=1) as other:
        await client.publish("1", exchange="bookings")
        await client.publish("2", exchange="bookings")
        first, second = await anext(one), await anext(other)
        assert {first.body, second.body} == {b"1", b"2"}


async def test_a_queue_bound_later_gets_no_earlier_messages(client: bide.Client, connection: Connection) -> None:
    await client.declare(fanout_broadcast("bookings", queues=["early"]))
    await client.publish("first", exchange="bookings")
    await client.declare(fanout_broadcast("bookings", queues=["early", "late"]))
    await client.publish("second", exchange="bookings")
    assert await bodies(connection, "early", "late") == {"early": ["first", "second"], "late": ["second"]}


async def test_an_exchange_without_queues_drops_what_is_not_mandatory(client: bide.Client) -> None:
    await client.declare(bide.Topology([bide.Exchange("bookings", "fanout")]))
    with pytest.raises(UnroutableError):
        await client.publish("1", exchange="bookings")
    await client.publish("2", exchange="bookings", mandatory=False)


async def test_layered_exchanges_route_by_key_then_by_headers(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("2").sample_topology())
    pet = {"entity.type": "pet", "change.type": "new"}
    await client.publish("booking", exchange="travel", routing_key="booking.new")
    await client.publish("pet", exchange="travel", routing_key="extras.pet", headers=pet)
    await client.publish("pet with booking", exchange="travel", routing_key="booking.new", headers=pet)
    assert await bodies(connection, "billing", "crm", "pets") == {
        "billing": ["booking", "pet with booking"],
        "crm": ["booking", "pet with booking"],
        "pets": ["pet", "pet with booking"],
    }


async def test_a_queue_behind_two_layers_gets_one_copy(client: bide.Client, connection: Connection) -> None:
    one = layered_exchanges("entry", layers={"a": "#"}, queues={"q": "a"})
    other = layered_exchanges("entry", layers={"b": "#"}, queues={"q": "b"})
    await client.declare(one | other)
    await client.publish("once", exchange="entry", routing_key="k")
    assert await bodies(connection, "q") == {"q": ["once"]}


async def test_a_fanout_entry_reaches_every_layer(client: bide.Client, connection: Connection) -> None:
    await client.declare(
        layered_exchanges("entry", layers={"a": "", "b": ""}, queues={"p": "a", "q": "b"}, entry="fanout")
    )
    await client.publish("all", exchange="entry")
    assert await bodies(connection, "p", "q") == {"p": ["all"], "q": ["all"]}


async def test_mail_is_routed_by_its_headers(client: bide.Client, connection: Connection) -> None:
    await client.declare(find_pattern("3").sample_topology())
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "Reports@ABC.example", "fleet@air.example", "component status"
    await client.publish("for finance", exchange="mailbox", headers=mail_headers(mail))
    mail["Cc"] = "Safety <safety@air.example>"
    await client.publish("for both", exchange="mailbox", headers=mail_headers(mail))
    mail.replace_header("Subject", "Component status")
    del mail["Cc"]
    await client.publish("for other", exchange="mailbox", headers=mail_headers(mail))
    assert await bodies(connection, "finance", "safety", "other-mail") == {
        "finance": ["for finance", "for both"],
        "safety": ["for both"],
        "other-mail": ["for other"],
    }


async def test_headers_are_compared_with_their_types(client: bide.Client, connection: Connection) -> None:
    await client.declare(email_routing("mailbox", rules={"two": {"count": 2}}, others="rest"))
    for value in (2, "2", True):
        await client.publish(repr(value), exchange="mailbox", headers={"count": value})
    await client.publish("absent", exchange="mailbox")
    assert await bodies(connection, "two", "rest") == {"two": ["2"], "rest": ["'2'", "True", "absent"]}


async def test_order_and_extra_headers_do_not_matter(client: bide.Client, connection: Connection) -> None:
    await client.declare(email_routing("mailbox", rules={"q": {"a": 1, "b": "x"}}, others="rest"))
    await client.publish("yes", exchange="mailbox", headers={"z": 0, "b": "x", "a": 1})
    await client.publish("no", exchange="mailbox", headers={"a": 1})
    assert [one.body for one in await take_all(connection, "q")] == [b"yes"]
