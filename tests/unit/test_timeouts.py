"""Stored timeouts as messages, and the names and URLs of databases."""

from __future__ import annotations

import socket
import traceback
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from threading import Thread
from typing import Any

import pytest

from bide.amqp.tls_warnings import warn_about_database
from bide.delay.allowed_targets import AllowedTargets
from bide.errors import InvalidInputError, TimeoutStoreError
from bide.timeouts.database import Database
from bide.timeouts.dialects import MySql, PostgreSql, dialect_of
from bide.timeouts.messages import timeout_message
from bide.timeouts.tables import StoredTimeout, TimeoutTable, choose_tables, mapped_table, stored_timeout

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
ALLOWED = AllowedTargets.of(["Sales", "bide.*"])
TIMEOUT = StoredTimeout("t-1", "Sales", "{}", b"body", NOW + timedelta(hours=1))


def message(**changed: Any) -> Any:
    return timeout_message(TIMEOUT._replace(**changed), now=NOW, max_delay=timedelta(days=3), allowed=ALLOWED)


def test_a_timeout_without_headers_gets_its_id_and_its_due_time() -> None:
    given: list[Any] = [None, "", "{}", {}]
    for headers in given:
        found = message(headers=headers)
        assert found.headers == {
            "NServiceBus.MessageId": "t-1",
            "NServiceBus.DeliverAt": "2026-12-01 13:00:00:000000 Z",
        }
        assert (found.to, found.body, found.message_id, found.deliver_at) == ("Sales", b"body", "t-1", TIMEOUT.due)


def test_a_timeout_with_a_blank_message_id_gets_its_own() -> None:
    for blank in ("", " "):
        found = message(headers={"NServiceBus.MessageId": blank})
        assert found.message_id == found.headers["NServiceBus.MessageId"] == "t-1"


def test_a_binary_id_becomes_a_message_id_in_hexadecimal() -> None:
    found = message(id=bytes(range(16)))
    assert found.message_id == found.headers["NServiceBus.MessageId"] == "000102030405060708090a0b0c0d0e0f"


def test_properties_are_those_that_nservicebus_makes_of_the_headers() -> None:
    headers = {
        "NServiceBus.MessageId": "m",
        "NServiceBus.DeliverAt": "kept",
        "NServiceBus.CorrelationId": "c",
        "NServiceBus.ReplyToAddress": "Billing",
        "NServiceBus.ContentType": "text/xml",
        "NServiceBus.EnclosedMessageTypes": "A.B, C, Version=1.0.0.0;A.Base, C",
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": "7",
        "empty": None,
    }
    found = message(headers=headers)
    assert (found.message_id, found.correlation_id, found.reply_to) == ("m", "c", "Billing")
    assert (found.content_type, found.type) == ("text/xml", "A.B")
    assert found.headers["NServiceBus.DeliverAt"] == "kept"
    assert not found.headers.keys() & {"NServiceBus.Transport.RabbitMQ.DelayInSeconds", "empty"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"destination": None}, "no destination"),
        ({"destination": ""}, "no destination"),
        ({"destination": "Salaries"}, "matches no allowed pattern"),
        ({"destination": "bide.v1.h1"}, "belongs to a delay infrastructure"),
        ({"headers": "{"}, "not JSON"),
        ({"headers": "[" * 100_000}, "not JSON"),
        ({"headers": "7"}, "not an object"),
        ({"headers": '{"a": {"b": 1}}'}, "'a' is of type dict"),
        ({"state": 7}, "type int"),
        ({"due": NOW + timedelta(days=4)}, "longer than the infrastructure can hold"),
    ],
)
def test_odd_timeouts_are_refused_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        message(**changed)


def test_times_without_a_zone_are_utc() -> None:
    naive, zoned = datetime(2026, 12, 1, 13), datetime(2026, 12, 1, 14, tzinfo=timezone(timedelta(hours=1)))  # noqa: DTZ001 (on purpose)
    assert {stored_timeout(("i", "d", None, b"", one)).due for one in (naive, zoned)} == {TIMEOUT.due}
    with pytest.raises(InvalidInputError, match="of type str"):
        stored_timeout(("i", "d", None, b"", "tomorrow"))


def test_an_endpoint_is_found_by_its_name_with_dots_or_that_of_its_table() -> None:
    sales, billing = (TimeoutTable(name=f"{one}TimeoutData", endpoint=one) for one in ("Sales_Orders", "Billing"))
    assert choose_tables([sales, billing], ["Sales.Orders"]) == [sales]
    assert choose_tables([sales, billing], ["BillingTimeoutData", "billing"]) == [billing]
    assert choose_tables([sales, billing], []) == [sales, billing]
    with pytest.raises(TimeoutStoreError, match="give one of Sales_Orders, Billing"):
        choose_tables([sales, billing], ["Sales"])


def test_a_mapped_table_needs_four_columns() -> None:
    columns = {"id": "a", "destination": "b", "body": "c", "due": "d"}
    table = mapped_table("t", columns)
    assert table.selection(PostgreSql().quote) == '"a", "b", NULL, "c", "d"'
    assert replace(table, headers="h").selection(MySql().quote) == "`a`, `b`, `h`, `c`, `d`"
    with pytest.raises(InvalidInputError, match="named for due"):
        mapped_table("t", {"id": "a", "destination": "b", "body": "c"})


def test_names_with_quotes_and_percent_signs_are_quoted() -> None:
    assert PostgreSql().quote('a"b%') == '"a""b%%"'
    assert MySql().quote("a`b%") == "`a``b%%`"


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///secret",
        "secret",
        "postgresql://u:secret@h:port/d",
        "postgresql://u:secret/x@h/d",
        "mysql://u:secret#x@h/d",
        "mysql://u:p@secret/x@h/d",
        "postgresql://u:secret%zz@h/d",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        dialect_of(url).connect(url)
    assert "secret" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("scheme", ["mssql", "mssql+pyodbc", "sqlserver", "oracle", "oracle+oracledb"])
def test_a_server_that_is_not_supported_is_named_with_the_way_out(scheme: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        dialect_of(f"{scheme}://u:secret@h/d")
    text = str(error.value)
    assert "SQL Server and Oracle are not supported" in text
    assert "migrate-timeouts" in text
    assert "bide pipeline schedule FILE --to-column Destination" in text
    assert "secret" not in text


def test_a_local_database_does_not_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first, second = socket.socketpair()
    with first, second:
        warn_about_database("ana", first, "use TLS")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        warn_about_database("ana", client, "use TLS")
    assert caplog.messages == []


def test_a_missing_certificate_file_is_bad_usage() -> None:
    url = "mysql://u@127.0.0.1:1/d?ssl_ca=/missing.pem"
    with pytest.raises(InvalidInputError, match=r"'/missing\.pem'.*No such file"):
        dialect_of(url).connect(url)


_PACKETS = [
    # The greeting of MySQL 8 without TLS: protocol 10, with its default way to log in.
    b"\x0a8.0.0\0\0\0\0\0saltsalt\0\0\xa2\x2d\x02\0\x08\0\x15" + bytes(10) + b"saltsaltsalt\0caching_sha2_password\0",
    # The password is needed in full, and then the public key to encrypt it with.
    b"\x01\x04",
    b"\x01a public key",
]


def _answer(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        for number, packet in enumerate(_PACKETS):
            connection.sendall(len(packet).to_bytes(3, "little") + bytes([2 * number]) + packet)
            connection.recv(10_000)


def test_a_login_that_needs_another_package_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pymysql._auth._have_cryptography", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = Thread(target=_answer, args=(server,))
        answering.start()
        with pytest.raises(InvalidInputError, match=r"'cryptography'.*ssl_ca=FILE") as error:
            Database(f"mysql://ana:secret@127.0.0.1:{server.getsockname()[1]}/shop")
        answering.join()
    assert "secret" not in str(error.value)
