"""Payloads of the method frames for topologies and consumers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bide.amqp import codec
from bide.topology import Binding, Exchange, Queue

_EXCHANGE: Final = 40
_QUEUE: Final = 50
_TICKET: Final = b"\x00\x00"
"""The access ticket: a reserved field of AMQP 0-9-1."""
_WAIT: Final = b"\x00"


def declare_exchange(exchange: Exchange, *, passive: bool) -> bytes:
    """Declare an exchange, or only check that it exists (passive)."""
    return codec.method(
        _EXCHANGE,
        10,
        _TICKET,
        codec.short_string(exchange.name),
        codec.short_string(exchange.type),
        codec.bits(passive, exchange.durable, exchange.auto_delete, exchange.internal, False),
        codec.table(exchange.arguments),
    )


def declare_queue(queue: Queue, *, passive: bool) -> bytes:
    """Declare a queue, or only check that it exists (passive)."""
    return codec.method(
        _QUEUE,
        10,
        _TICKET,
        codec.short_string(queue.name),
        codec.bits(passive, queue.durable, queue.exclusive, queue.auto_delete, False),
        codec.table(queue.arguments),
    )


def bind(binding: Binding) -> bytes:
    """Create a binding."""
    if binding.destination_type == "queue":
        return codec.method(_QUEUE, 20, *_names(binding), _WAIT, codec.table(binding.arguments))
    return codec.method(_EXCHANGE, 30, *_names(binding), _WAIT, codec.table(binding.arguments))


def unbind(binding: Binding) -> bytes:
    """Remove a binding. ``queue.unbind`` has no no-wait flag, ``exchange.unbind`` has one."""
    if binding.destination_type == "queue":
        return codec.method(_QUEUE, 50, *_names(binding), codec.table(binding.arguments))
    return codec.method(_EXCHANGE, 40, *_names(binding), _WAIT, codec.table(binding.arguments))


def _names(binding: Binding) -> tuple[bytes, ...]:
    names = (binding.destination, binding.source, binding.routing_key)
    return _TICKET, *(codec.short_string(name) for name in names)


def delete_queue(name: str, *, if_empty: bool, if_unused: bool) -> bytes:
    """Delete a queue."""
    return codec.method(_QUEUE, 40, _TICKET, codec.short_string(name), codec.bits(if_unused, if_empty, False))


def delete_exchange(name: str, *, if_unused: bool) -> bytes:
    """Delete an exchange."""
    return codec.method(_EXCHANGE, 20, _TICKET, codec.short_string(name), codec.bits(if_unused, False))


def purge_queue(name: str) -> bytes:
    """Discard the ready messages of a queue."""
    return codec.method(_QUEUE, 30, _TICKET, codec.short_string(name), _WAIT)


def qos(prefetch: int) -> bytes:
    """Set the prefetch of the channel's next consumers."""
    return codec.method(codec.BASIC_CLASS, 10, codec.long(0), codec.short(prefetch), b"\x00")


def consume(queue: str, tag: str, arguments: Mapping[str, Any] | None, *, exclusive: bool, no_ack: bool) -> bytes:
    """Start a consumer."""
    names = (codec.short_string(queue), codec.short_string(tag))
    return codec.method(
        codec.BASIC_CLASS, 20, _TICKET, *names, codec.bits(False, no_ack, exclusive, False), codec.table(arguments)
    )


def cancel(tag: str, *, no_wait: bool = False) -> bytes:
    """Cancel a consumer."""
    return codec.method(codec.BASIC_CLASS, 30, codec.short_string(tag), codec.bits(no_wait))


def flow() -> bytes:
    """Let messages flow, as they do already: the broker answers, and nothing changes."""
    return codec.method(20, 20, codec.bits(True))


def get(queue: str) -> bytes:
    """Get one message."""
    return codec.method(codec.BASIC_CLASS, 70, _TICKET, codec.short_string(queue), b"\x00")
