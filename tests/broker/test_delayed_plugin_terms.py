"""The export of the delayed-message plugin's tables, from recorded terms.

The terms are of the plugin 3.10.2 and 4.0.2. The tables are made on a broker without the plugin, so that the reading is
tested on every release that has Mnesia.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from bide.delayed_plugin.export import count_waiting, export, read_export
from bide.delayed_plugin.pending import PendingMessage, parse_page, read_page
from bide.durations import EPOCH
from bide.errors import BrokerError, InvalidInputError, LocalBrokerError
from bide.local_broker import LocalBroker
from bide.local_broker.configuration import SINGLE_NODE
from bide.local_broker.state import State

TERMS = {path.stem: path.read_text().strip() for path in (Path(__file__).parent / "delayed_plugin_terms").glob("*.txt")}
_TABLES = """
Table = list_to_atom("rabbit_delayed_message" ++ atom_to_list(node())),
Index = list_to_atom(atom_to_list(Table) ++ "_index"),
"""
_MAKE = (
    _TABLES
    + """
{atomic, ok} = mnesia:create_table(Table, [{record_name, delay_entry}, {attributes, [delay_key, delivery, ref]},
    {type, bag}, {ram_copies, [node()]}]),
{atomic, ok} = mnesia:create_table(Index, [{record_name, delay_index}, {attributes, [delay_key, const]},
    {type, ordered_set}, {ram_copies, [node()]}]),
[begin mnesia:dirty_write(Index, {delay_index, element(2, Row), true}), mnesia:dirty_write(Table, Row) end
    || Row <- binary_to_term(base64:decode(<<"TERMS">>))].
"""
)
_DROP = _TABLES + "mnesia:delete_table(Table), mnesia:delete_table(Index)."


def rabbitmqctl(broker: LocalBroker, folder: Path) -> str:
    """A command for ``--rabbitmqctl``."""
    state = State.load(broker.folder)
    assert state is not None
    words = " ".join(f"'{word}'" for word in [*state.commands["rabbitmqctl"], "--node", SINGLE_NODE.name])
    path = folder / "rabbitmqctl"
    environment = "\n".join(f"export {name}='{value}'" for name, value in state.environment.items())
    path.write_text(f'#!/bin/sh\n{environment}\nexec {words} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(params=sorted(TERMS))
def recorded(request: pytest.FixtureRequest, broker: LocalBroker, release: tuple[int, ...]) -> Iterator[str]:
    plugin = str(request.param)
    if release < (3, 13) and plugin.startswith("4"):
        pytest.skip("the broker has no message containers, which the plugin keeps since 3.13")
    try:
        broker.rabbitmqctl("eval", _MAKE.replace("TERMS", TERMS[plugin]))
    except LocalBrokerError as error:
        if "node_not_running" not in str(error):
            raise
        pytest.skip("the broker has no Mnesia")
    yield plugin
    broker.rabbitmqctl("eval", _DROP)


def by_body(messages: Iterator[PendingMessage]) -> dict[bytes, PendingMessage]:
    return {one.body: one for one in messages}


async def test_messages_are_read_as_they_were_published(recorded: str, broker: LocalBroker, tmp_path: Path) -> None:
    path = tmp_path / "pending.jsonl"
    done = await export(path, [rabbitmqctl(broker, tmp_path), "--quiet"], page=1)
    assert (done.messages, done.resumed) == (3, 0)
    assert done.exchanges == {("/", "orders"): 2, ("/", "fan"): 1}
    read = [one for one, _ in read_export(path)]
    assert [one.due for one in read] == sorted(one.due for one in read)
    found = by_body(iter(read))
    hello = found[b"hello"]
    assert (hello.vhost, hello.exchange, hello.routing_keys) == ("/", "orders", ("order.created",))
    assert hello.properties() == {
        "content_type": "text/plain",
        "headers": {"x-delay": 86_400_000, "a": 1, "deep": {"x": [1, "two", True]}},
        "delivery_mode": 2,
        "priority": 3,
        "expiration": "60000",
        "message_id": "m1",
    }
    copied = found[b"\x00\xff" * 10]
    assert copied.routing_keys == ("order.created", "order.paid", "order.audit")
    assert copied.properties()["headers"] == {"x-delay": 86_400_005, "CC": ["order.paid"]}
    assert found[b""].routing_keys == ("",)
    assert found[b""].properties()["headers"] == {"x-delay": "86400000"}
    first = EPOCH.fromtimestamp(read[0].due / 1000, EPOCH.tzinfo)
    assert count_waiting(path, "/", now=first).total() == sum(one.due > read[0].due for one in read)
    assert count_waiting(path, "other", now=EPOCH) == {}
    with pytest.raises(InvalidInputError, match="is a complete export already"):
        await export(path, ["false"])


@pytest.mark.slow
@pytest.mark.long
async def test_an_interrupted_export_continues_after_its_last_page(
    recorded: str, broker: LocalBroker, tmp_path: Path
) -> None:
    command = [rabbitmqctl(broker, tmp_path), "--quiet"]
    whole = tmp_path / "whole.jsonl"
    await export(whole, command, page=1)
    lines = whole.read_bytes().splitlines(keepends=True)
    messages = [line for line in lines if line.startswith(b'{"due"')]
    size = len(whole.read_bytes())
    for cut in (0, 10, len(lines[0]), len(b"".join(lines[:2])), len(b"".join(lines[:4])) - 3, size - 5):
        path = tmp_path / f"cut-{cut}.jsonl"
        path.write_bytes(whole.read_bytes()[:cut])
        with pytest.raises(InvalidInputError, match="is not a complete export"):
            next(read_export(path))
        done = await export(path, command, page=1)
        assert done.messages == 3
        assert [line for line in path.read_bytes().splitlines(keepends=True) if line.startswith(b'{"due"')] == messages


async def test_a_node_without_the_plugin_is_named(broker: LocalBroker, tmp_path: Path) -> None:
    with pytest.raises(BrokerError, match="the node has no tables of the delayed-message plugin"):
        await read_page([rabbitmqctl(broker, tmp_path), "--quiet"])
    path = tmp_path / "pending.jsonl"
    with pytest.raises(BrokerError, match="if none has, the messages are gone"):
        await export(path, [rabbitmqctl(broker, tmp_path), "--quiet"])
    assert not path.exists()
    with pytest.raises(BrokerError, match="no-such-program cannot be run"):
        await read_page(["no-such-program"])


async def test_a_file_that_is_no_export_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"a": 1}) + "\n")
    with pytest.raises(InvalidInputError, match=r"mine\.json was not written by"):
        await export(path, ["false"])
    assert path.read_text() == '{"a": 1}\n'


async def test_an_unusable_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    was_run = tmp_path / "was-run"
    with pytest.raises(FileNotFoundError):
        await export(tmp_path / "none" / "pending.jsonl", ["sh", "-c", 'touch "$0"', str(was_run)])
    assert not was_run.exists()


async def test_an_export_that_reads_nothing_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "pending.jsonl"
    with pytest.raises(BrokerError, match="false --quiet failed with status 1"):
        await export(path, ["false", "--quiet"])
    assert not path.exists()


async def test_the_error_of_a_node_that_is_not_reached_says_where_to_run_the_export(tmp_path: Path) -> None:
    command = tmp_path / "rabbitmqctl"
    said = "Error: unable to perform an operation on node 'rabbit@b'. Please see diagnostics.\\n\\nMost common reasons"
    command.write_text(f'#!/bin/sh\nprintf "{said}" >&2\nexit 69\n')
    command.chmod(0o755)
    with pytest.raises(BrokerError, match=r"'rabbit@b'\. Run the export .* with rabbitmqctl=\.\.\.$"):
        await export(tmp_path / "pending.jsonl", [str(command)])


def test_an_incomplete_page_is_refused() -> None:
    with pytest.raises(BrokerError, match="no complete page"):
        parse_page(b"1\tLw==\tZQ==\ta2V5\t\t\n")
