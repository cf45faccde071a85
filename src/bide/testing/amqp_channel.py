"""The broker's side of an AMQP channel."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from bide.amqp import codec, reply_codes
from bide.errors import BrokerError, NotModelledError
from bide.testing.amqp_arguments import MethodArguments
from bide.testing.rules.channel import BrokerChannel, BrokerDelivery
from bide.testing.rules.errors import channel_error, not_modelled
from bide.testing.rules.virtual_host import VirtualHost
from bide.topology import Binding, Exchange, Queue

_METHOD: Final = struct.Struct(">HH")
_HEADER: Final = struct.Struct(">HHQ")
_NO_ROUTE: Final = 312
_BODY_FRAME_SIZE: Final = 131_072 - codec.FRAME_OVERHEAD
_MAX_REASON: Final = 255


class _Publish:
    """A publish whose header or body frames have not all arrived."""

    __slots__ = ("exchange", "mandatory", "parts", "properties", "remaining", "routing_key")

    def __init__(self, exchange: str, routing_key: str, *, mandatory: bool) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.mandatory = mandatory
        self.properties: Mapping[str, Any] = {}
        self.parts: list[bytes] = []
        self.remaining = 0


class ServerChannel:
    """The broker's side of a channel.

    Args:
        number: the number of the channel.
        host: the virtual host.
        connection: identifies the connection, as owner of exclusive queues.
        send: sends frames to the client.
        ended: called when the number of the channel can be reused.
    """

    def __init__(
        self,
        number: int,
        *,
        host: VirtualHost,
        connection: object,
        send: Callable[[bytes], None],
        ended: Callable[[], object],
    ) -> None:
        self._number = number
        self._host = host
        self._connection = connection
        self._deliver = send
        self._ended = ended
        self._channel = BrokerChannel(host, connection, self)
        self._confirms = False
        self._published = 0
        self._publish: _Publish | None = None
        self._is_closed = False
        self._names_made = 0

    def close(self) -> None:
        """Close the channel after the connection was lost."""
        if not self._is_closed:
            self._is_closed = True
            self._channel.close()

    @property
    def unsettled(self) -> Collection[int]:
        """The delivery tags that the client has not settled."""
        return self._channel.unsettled

    # -- frames from the client

    def on_method(self, payload: bytes) -> None:
        """Handle a method frame."""
        method = _METHOD.unpack_from(payload)
        if self._is_closed:
            # The broker closed the channel: everything is ignored until the client confirms that.
            if method == (20, 41):
                self._ended()
            elif method == (20, 40):
                self._send(codec.method(20, 41))
            return
        try:
            self._dispatch(method, MethodArguments(payload))
        except BrokerError as error:
            self._refuse(error, method)

    def on_header(self, size: int, properties: Mapping[str, Any]) -> None:
        """Handle a content header."""
        if self._publish is not None:
            self._publish.properties = properties
            self._publish.remaining = size
            if not size:
                self._complete(self._publish)

    def on_body(self, part: bytes) -> None:
        """Handle a body frame."""
        if self._publish is not None:
            self._publish.parts.append(part)
            self._publish.remaining -= len(part)
            if self._publish.remaining <= 0:
                self._complete(self._publish)

    def _dispatch(self, method: tuple[int, int], arguments: MethodArguments) -> None:
        match method:
            case (20, 40):
                self._is_closed = True
                self._channel.close()
                self._send(codec.method(20, 41))
                self._ended()
            case (40, _):
                self._on_exchange(method, arguments)
            case (50, _):
                self._on_queue(method, arguments)
            case (60, _):
                self._on_basic(method, arguments)
            case (85, 10):
                self._confirms = True
                self._send(codec.method(85, 11))
            case (90, _):
                not_modelled("transactions: use publisher confirms")
            case (20, 21):
                return
            case (20, 20) if arguments.flags(1) == [True]:
                # Messages are never held back, so there is nothing to do.
                self._send(codec.method(20, 21, codec.bits(True)))
            case _:
                not_modelled(f"the method {method} of AMQP")

    def _on_exchange(self, method: tuple[int, int], arguments: MethodArguments) -> None:
        arguments.short()
        match method:
            case (40, 10):
                name, kind = arguments.text(), arguments.text()
                passive, durable, auto_delete, internal, nowait = arguments.flags(5)
                exchange = Exchange(name, kind, durable, auto_delete, internal, arguments.table())
                self._host.declare_exchange(exchange, passive=passive)
                self._answer(nowait, codec.method(40, 11))
            case (40, 20):
                name = arguments.text()
                if_unused, nowait = arguments.flags(2)
                with self._host.turn():
                    self._host.delete_exchange(name, if_unused=if_unused)
                self._answer(nowait, codec.method(40, 21))
            case _:
                self._on_binding("exchange", arguments, removed=method == (40, 40))

    def _on_queue(self, method: tuple[int, int], arguments: MethodArguments) -> None:
        arguments.short()
        match method:
            case (50, 10):
                self._declare_queue(arguments)
            case (50, 30):
                queue = self._host.queue(arguments.text(), owner=self._connection)
                (nowait,) = arguments.flags(1)
                with self._host.turn():
                    number = queue.purge()
                self._answer(nowait, codec.method(50, 31, codec.long(number)))
            case (50, 40):
                name = arguments.text()
                if_unused, if_empty, nowait = arguments.flags(3)
                with self._host.turn():
                    number = self._host.delete_queue(
                        name, owner=self._connection, if_unused=if_unused, if_empty=if_empty
                    )
                self._answer(nowait, codec.method(50, 41, codec.long(number)))
            case _:
                self._on_binding("queue", arguments, removed=method == (50, 50))

    def _declare_queue(self, arguments: MethodArguments) -> None:
        name = arguments.text()
        passive, durable, exclusive, auto_delete, nowait = arguments.flags(5)
        if not name:
            self._names_made += 1
            name = f"memory.gen-{self._number}-{self._names_made}-{id(self._connection):x}"
        queue = Queue(name, durable, exclusive, auto_delete, arguments.table())
        found = self._host.declare_queue(queue, owner=self._connection, passive=passive)
        counts = codec.long(found.message_count) + codec.long(found.consumer_count)
        self._answer(nowait, codec.method(50, 11, codec.short_string(name), counts))

    def _on_binding(self, kind: str, arguments: MethodArguments, *, removed: bool) -> None:
        destination, source, key = arguments.text(), arguments.text(), arguments.text()
        # queue.unbind is the only one of these methods without a no-wait flag.
        nowait = False if kind == "queue" and removed else arguments.flags(1)[0]
        table = arguments.table()
        binding = Binding(source, destination, key, "queue" if kind == "queue" else "exchange", table)
        if removed:
            with self._host.turn():
                self._host.unbind(binding, owner=self._connection)
        else:
            self._host.bind(binding, owner=self._connection)
        replies = {("queue", False): (50, 21), ("queue", True): (50, 51), ("exchange", False): (40, 31)}
        self._answer(nowait, codec.method(*replies.get((kind, removed), (40, 51))))

    def _on_basic(self, method: tuple[int, int], arguments: MethodArguments) -> None:
        match method:
            case (60, 10):
                arguments.long()
                prefetch = arguments.short()
                (is_global,) = arguments.flags(1)
                if is_global:
                    not_modelled("a prefetch for the whole channel (basic.qos with global): set it per consumer")
                self._channel.qos(prefetch)
                self._send(codec.method(60, 11))
            case (60, 20):
                self._consume(arguments)
            case (60, 30):
                tag = arguments.text()
                (nowait,) = arguments.flags(1)
                self._channel.cancel(tag)
                self._answer(nowait, codec.method(60, 31, codec.short_string(tag)))
            case (60, 40):
                arguments.short()
                exchange, key = arguments.text(), arguments.text()
                mandatory, immediate = arguments.flags(2)
                if immediate:
                    raise channel_error(540, "NOT_IMPLEMENTED - immediate=true")
                self._publish = _Publish(exchange, key, mandatory=mandatory)
            case (60, 70):
                self._get(arguments)
            case (60, 80):
                delivery = arguments.long_long()
                self._channel.ack(delivery, multiple=arguments.flags(1)[0])
            case (60, 90):
                delivery = arguments.long_long()
                self._channel.reject(delivery, multiple=False, requeue=arguments.flags(1)[0], failed=True)
            case (60, 120):
                delivery = arguments.long_long()
                multiple, requeue = arguments.flags(2)
                self._channel.reject(delivery, multiple=multiple, requeue=requeue, failed=False)
            case _:
                not_modelled("basic.recover: reject the messages, or close the channel")

    def _consume(self, arguments: MethodArguments) -> None:
        arguments.short()
        queue, tag = arguments.text(), arguments.text()
        _, no_ack, exclusive, nowait = arguments.flags(4)
        if not tag:
            self._names_made += 1
            tag = f"memory.ctag-{self._names_made}"
        start = self._channel.consume(queue, tag, no_ack=no_ack, exclusive=exclusive, arguments=arguments.table())
        # The client expects consume-ok before the first delivery.
        self._answer(nowait, codec.method(60, 21, codec.short_string(tag)))
        start()

    def _get(self, arguments: MethodArguments) -> None:
        arguments.short()
        queue = arguments.text()
        delivery = self._channel.get(queue, no_ack=arguments.flags(1)[0])
        if delivery is None:
            self._send(codec.method(60, 72, b"\x00"))
            return
        self._send_content(
            codec.method(60, 71, *_address(delivery), codec.long(delivery.left)), delivery.properties, delivery.body
        )

    def _complete(self, publish: _Publish) -> None:
        self._publish = None
        body = b"".join(publish.parts)
        self._published += 1
        try:
            outcome = self._channel.publish(publish.exchange, publish.routing_key, publish.properties, body)
        except BrokerError as error:
            self._refuse(error, (60, 40))
            return
        if publish.mandatory and not outcome.routed:
            reason = (codec.short(_NO_ROUTE), codec.short_string("NO_ROUTE"))
            address = (codec.short_string(publish.exchange), codec.short_string(publish.routing_key))
            self._send_content(codec.method(60, 50, *reason, *address), publish.properties, body)
        if self._confirms:
            number = codec.long_long(self._published)
            self._send(
                codec.method(60, 80, number, b"\x00") if outcome.stored else codec.method(60, 120, number, b"\x00")
            )

    # -- frames to the client

    def delivered(self, delivery: BrokerDelivery) -> None:
        """See :class:`bide.testing.rules.channel.Receiver`."""
        tag = codec.short_string(delivery.consumer_tag or "")
        self._send_content(codec.method(60, 60, tag, *_address(delivery)), delivery.properties, delivery.body)

    def cancelled(self, tag: str) -> None:
        """See :class:`bide.testing.rules.channel.Receiver`."""
        self._send(codec.method(60, 30, codec.short_string(tag), b"\x01"))

    def _refuse(self, error: BrokerError, method: tuple[int, int]) -> None:
        self._is_closed = True
        self._channel.close()
        code = error.reply_code or reply_codes.NOT_IMPLEMENTED
        text = f"NOT_IMPLEMENTED - {error}" if isinstance(error, NotModelledError) else str(error)
        reason = text.encode()[:_MAX_REASON].decode(errors="ignore")
        self._send(codec.method(20, 40, codec.short(code), codec.short_string(reason), _METHOD.pack(*method)))

    def _answer(self, nowait: bool, payload: bytes) -> None:
        if not nowait:
            self._send(payload)

    def _send(self, payload: bytes) -> None:
        self._deliver(codec.frame(codec.METHOD, self._number, payload))

    def _send_content(self, payload: bytes, properties: Mapping[str, Any], body: bytes) -> None:
        header = _HEADER.pack(codec.BASIC_CLASS, 0, len(body)) + codec.properties(properties)
        self._deliver(
            b"".join(
                (
                    codec.frame(codec.METHOD, self._number, payload),
                    codec.frame(codec.HEADER, self._number, header),
                    *codec.body_frames(self._number, body, _BODY_FRAME_SIZE),
                )
            )
        )


def _address(delivery: BrokerDelivery) -> tuple[bytes, ...]:
    return (
        codec.long_long(delivery.delivery_tag),
        codec.bits(delivery.redelivered),
        codec.short_string(delivery.exchange),
        codec.short_string(delivery.routing_key),
    )
