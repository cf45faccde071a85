"""Logins to MariaDB and MySQL: passwords, and certificates of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme

from bide.amqp import tls_warnings
from bide.errors import InvalidInputError, TimeoutStoreError
from bide.timeouts.database import Database
from tests.databases import mysql_server

PASSWORD = "grün, 5 €"  # not in Latin-1


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """The authority that signed the certificate of the server."""
    return trustme.CA()


@pytest.fixture(scope="module")
def url(authority: trustme.CA) -> Iterator[str]:
    """The URL of a server with TLS, for a user with a password."""
    with mysql_server(authority) as server:
        server.execute(server.admin, f"CREATE USER 'jürgen'@localhost IDENTIFIED BY '{PASSWORD}'")
        server.execute(server.admin, "GRANT ALL ON *.* TO 'jürgen'@localhost")
        yield server.admin.replace("root@", f"{quote('jürgen')}:{quote(PASSWORD)}@")


@pytest.fixture(autouse=True)
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server seems to be on another machine, which a test does not have."""
    monkeypatch.setattr(tls_warnings, "_warned", set())
    monkeypatch.setattr(tls_warnings, "_is_remote", lambda _peer, _own: True)


def test_a_certificate_that_is_not_checked_causes_a_warning(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Database(url) as database:
        assert database.query("SELECT CURRENT_USER()") == [("jürgen@localhost",)]
    (text,) = caplog.messages
    assert "without checking its certificate" in text
    assert "ssl_ca=FILE" in text
    assert PASSWORD not in text


def test_the_certificate_is_checked_if_its_authority_is_given(
    url: str, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, one in (("right", authority), ("wrong", trustme.CA())):
        one.cert_pem.write_to_path(str(tmp_path / f"{name}.pem"))
    url = f"{url}?ssl_ca={tmp_path}/right.pem"
    other_name = url.replace("127.0.0.1", "localhost")
    Database(url).close()
    Database(f"{other_name}&ssl_verify_identity=false").close()
    with Database(url) as database:
        ((socket,),) = database.query("SELECT @@socket")
    # The file of a socket has no name of a host.
    Database(f"{other_name}&unix_socket={socket}").close()
    assert caplog.messages == []
    for refused in (url.replace("right.pem", "wrong.pem"), other_name):
        with pytest.raises(TimeoutStoreError, match=r"certificate .* ssl_ca.* ssl_verify_identity=false") as caught:
            Database(refused)
        assert PASSWORD not in str(caught.value)


def test_the_name_in_the_certificate_is_checked_only_with_its_authority(url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"ssl_verify_identity=no: give true or false"):
        Database(f"{url}?ssl_ca=ca.pem&ssl_verify_identity=no")
    with pytest.raises(InvalidInputError, match=r"ssl_verify_identity=true.* ssl_ca=FILE"):
        Database(f"{url}?ssl_verify_identity=true")


def test_an_empty_option_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"ssl_ca= without a value"):
        Database(f"{url}?ssl_ca=")
