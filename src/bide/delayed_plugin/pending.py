"""Messages that wait in the delayed-message plugin, read from its tables while it runs.

The plugin keeps the messages of a node in two Mnesia tables of that node: ``rabbit_delayed_messageNODE``, and its index
``rabbit_delayed_messageNODE_index``, which is ordered by due time. ``rabbitmqctl eval`` reads them in pages and changes
nothing. Before RabbitMQ 3.13 a message is a ``basic_message``. Since then it is a message container, which the node
converts.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bide.amqp.decoding import properties
from bide.errors import BrokerError, UndecodableMessageError

PAGE_MESSAGES: Final = 20_000
PAGE_BYTES: Final = 16_000_000
"""A page ends after this many messages, or bytes of messages, whichever comes first."""

_HEADER_BEFORE_PROPERTIES: Final = bytes(7) + b"\x00\x3c\x00\x00" + bytes(8)
"""The start of a content header frame, in front of the properties."""

_KEY: Final = re.compile(r"[A-Za-z0-9+/=]*")

_PAGE: Final = r"""
Table = list_to_atom("rabbit_delayed_message" ++ atom_to_list(node())),
Index = list_to_atom(atom_to_list(Table) ++ "_index"),
Start = case <<"KEY">> of
    <<>> -> mnesia:dirty_first(Index);
    Key64 -> mnesia:dirty_next(Index, binary_to_term(base64:decode(Key64)))
end,
Parts = fun
    ({basic_message, _, Keys, Content, _, _}) -> {Keys, Content};
    (Message) -> {mc:routing_keys(Message), mc:protocol_state(mc:convert(mc_amqpl, Message))}
end,
Line = fun({delay_entry, {delay_key, Due, Exchange}, Delivery, _}) ->
    Message = case Delivery of {delivery, _, _, _, M, _, _} -> M; M -> M end,
    {Keys, Content} = Parts(Message),
    {content, 60, _, Properties, _, Fragments} =
        rabbit_binary_generator:ensure_content_encoded(Content, rabbit_framing_amqp_0_9_1),
    {resource, Vhost, exchange, Name} = element(2, Exchange),
    iolist_to_binary([integer_to_list(Due), 9, base64:encode(Vhost), 9, base64:encode(Name), 9,
        lists:join(",", [base64:encode(K) || K <- Keys]), 9, base64:encode(Properties), 9,
        base64:encode(iolist_to_binary(lists:reverse(Fragments))), 10])
end,
Walk = fun
    W('$end_of_table', _, _, _, Lines) -> {"end", <<>>, Lines};
    W(_, Last, Count, Size, Lines) when Count >= MESSAGES; Size >= BYTES ->
        {"more", base64:encode(term_to_binary(Last)), Lines};
    W(Key, _, Count, Size, Lines) ->
        New = [Line(One) || One <- mnesia:dirty_read(Table, Key)],
        W(mnesia:dirty_next(Index, Key), Key, Count + length(New), Size + iolist_size(New), [New | Lines])
end,
{State, Next, Lines} = Walk(Start, none, 0, 0, []),
io:put_chars([lists:reverse(Lines), State, 9, Next, 9, atom_to_list(node()), 10]),
ok.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingMessage:
    """A message that waits in the plugin.

    Attributes:
        due: its due time, in milliseconds since the Unix epoch.
        exchange: the exchange that it was published to.
        routing_keys: its routing key, and then those of its CC and BCC headers.
        encoded_properties: its properties as AMQP 0-9-1 encodes them.
    """

    due: int
    vhost: str
    exchange: str
    routing_keys: tuple[str, ...]
    encoded_properties: bytes
    body: bytes

    def properties(self) -> dict[str, Any]:
        """The properties by their AMQP names.

        Raises:
            UndecodableMessageError: the properties cannot be decoded as AMQP 0-9-1.
        """
        try:
            return properties(_HEADER_BEFORE_PROPERTIES + self.encoded_properties)
        except ValueError as error:
            raise UndecodableMessageError(f"the properties of a message cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Messages in the order of their due times.

    Attributes:
        next_key: where the next page starts; empty on the last page.
        node: the node on which the messages wait.
    """

    messages: tuple[PendingMessage, ...]
    next_key: str
    node: str


async def read_page(
    command: Sequence[str],
    key: str = "",
    *,
    messages: int = PAGE_MESSAGES,
    environment: Mapping[str, str] | None = None,
) -> Page:
    """Read a page of the messages that wait on one node.

    Args:
        command: the command that runs ``rabbitmqctl`` for the node.
        key: where to start: :attr:`Page.next_key` of the page before.
        messages: the number of messages after which the page ends.
        environment: environment variables of the command; by default those of this process.

    Raises:
        BrokerError: the command fails, or the plugin does not run on the node.
    """
    if not _KEY.fullmatch(key):
        raise BrokerError(f"{key!r} is not the start of a page: the file of the export is damaged")
    expression = (
        _PAGE.replace("KEY", key, 1).replace("MESSAGES", str(messages)).replace("BYTES", str(PAGE_BYTES)).strip()
    )
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            "eval",
            expression,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
    except OSError as error:
        raise BrokerError(f"{command[0]} cannot be run ({error.strerror}): give it with rabbitmqctl=...") from error
    out, stderr = await process.communicate()
    if process.returncode:
        text = stderr.decode(errors="replace")
        if "no_exists" in text:
            raise BrokerError(
                "the node has no tables of the delayed-message plugin: 'rabbitmq-plugins disable' and the feature flag "
                "khepri_db delete them with their messages. Export the nodes that still have tables; if none has, the "
                "messages are gone, and the exchanges can be replaced without an export"
            )
        reason = text.strip()
        if "unable to perform an operation on node" in reason:
            reason = (
                f"{reason.partition('. Please see')[0]}. Run the export on the machine of the node, as root or as the "
                "user of RabbitMQ, or give a command that reaches the node with rabbitmqctl=..."
            )
        raise BrokerError(f"{' '.join(command)} failed with status {process.returncode}: {reason[:500]}")
    return parse_page(out)


def parse_page(output: bytes) -> Page:
    """Parse the output of a page.

    Raises:
        BrokerError: the output is not complete.
    """
    lines = output.split(b"\n")
    ends = [number for number, line in enumerate(lines) if line.startswith((b"more\t", b"end\t"))]
    if not ends:
        raise BrokerError(f"rabbitmqctl printed no complete page: {output[-200:]!r}")
    _, next_key, node = lines[ends[0]].decode().split("\t")
    # The command may print lines of its own before the messages.
    read = [line.split(b"\t") for line in lines[: ends[0]]]
    return Page(messages=tuple(_message(line) for line in read if len(line) == 6), next_key=next_key, node=node)


def _message(parts: list[bytes]) -> PendingMessage:
    due, vhost, exchange, keys, encoded, body = parts
    return PendingMessage(
        due=int(due),
        vhost=b64decode(vhost).decode(),
        exchange=b64decode(exchange).decode(),
        routing_keys=tuple(b64decode(one).decode(errors="surrogateescape") for one in keys.split(b",")),
        encoded_properties=b64decode(encoded),
        body=b64decode(body),
    )
