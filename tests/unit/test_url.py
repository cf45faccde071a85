"""Broker URLs: parsing, refusals, and hidden passwords."""

from __future__ import annotations

import dataclasses
import ssl
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trustme
from hypothesis import example, given
from hypothesis import strategies as st

from bide.amqp.url import DEFAULT_URL, BrokerUrl
from bide.errors import InvalidUrlError

SECRET = "top-secret"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amqp://localhost", BrokerUrl(hosts=(("localhost", 5672),))),
        ("amqp://localhost/", BrokerUrl(hosts=(("localhost", 5672),))),
        ("amqps://localhost", BrokerUrl(hosts=(("localhost", 5671),), tls=True)),
        ("AMQP://LocalHost", BrokerUrl(hosts=(("localhost", 5672),))),
        ("amqp://u:p@h:1234/v", BrokerUrl(hosts=(("h", 1234),), user="u", password="p", vhost="v")),
        ("amqp://u@h", BrokerUrl(hosts=(("h", 5672),), user="u")),
        ("amqp://u:@h", BrokerUrl(hosts=(("h", 5672),), user="u", password="")),
        ("amqp://u%40a:p%2F%3A%23%3F%40@h", BrokerUrl(hosts=(("h", 5672),), user="u@a", password="p/:#?@")),
        ("amqp://u:a:b@h", BrokerUrl(hosts=(("h", 5672),), user="u", password="a:b")),
        ("amqp://u:a@b@h", BrokerUrl(hosts=(("h", 5672),), user="u", password="a@b")),
        ("amqp://ü:ß@h/ü", BrokerUrl(hosts=(("h", 5672),), user="ü", password="ß", vhost="ü")),
        ("amqp://h/%2F", BrokerUrl(hosts=(("h", 5672),), vhost="/")),
        ("amqp://h/a%2Fb%40", BrokerUrl(hosts=(("h", 5672),), vhost="a/b@")),
        ("amqp://h1,h2:5673,h3/v", BrokerUrl(hosts=(("h1", 5672), ("h2", 5673), ("h3", 5672)), vhost="v")),
        ("amqps://u:p@h1:1,h2", BrokerUrl(hosts=(("h1", 1), ("h2", 5671)), user="u", password="p", tls=True)),
        ("amqp://[::1]", BrokerUrl(hosts=(("::1", 5672),))),
        ("amqp://u:p@[2001:db8::7]:5673,127.0.0.1/", BrokerUrl(
            hosts=(("2001:db8::7", 5673), ("127.0.0.1", 5672)), user="u", password="p"
        )),
        ("amqp://h:65535", BrokerUrl(hosts=(("h", 65535),))),
        ("amqp://h1,h2?order=given", BrokerUrl(hosts=(("h1", 5672), ("h2", 5672)), shuffle=False)),
        ("amqp://h1,h2?order=RANDOM", BrokerUrl(hosts=(("h1", 5672), ("h2", 5672)), shuffle=True)),
        ("amqp://h", BrokerUrl(hosts=(("h", 5672),), heartbeat=10, shuffle=True)),
        ("amqp://h?heartbeat=0", BrokerUrl(hosts=(("h", 5672),), heartbeat=0)),
        (
            "amqp://h/?heartbeat=5&timeout=3&name=a%20b",
            BrokerUrl(hosts=(("h", 5672),), heartbeat=5, timeout=timedelta(seconds=3), name="a b"),
        ),
        (
            "amqps://h/?cafile=%2Fca.pem&certfile=/c.pem&keyfile=/k.pem&verify=false&auth=external",
            BrokerUrl(
                hosts=(("h", 5671),),
                tls=True,
                cafile="/ca.pem",
                certfile="/c.pem",
                keyfile="/k.pem",
                verify=False,
                external=True,
            ),
        ),
        # Celery's
        ("pyamqp://u:p@h", BrokerUrl(hosts=(("h", 5672),), user="u", password="p")),
        ("amqp://u@h//", BrokerUrl(hosts=(("h", 5672),), user="u", vhost="/")),
        ("amqp://h//?heartbeat=5", BrokerUrl(hosts=(("h", 5672),), heartbeat=5)),
        ("amqp://u:p;q@h", BrokerUrl(hosts=(("h", 5672),), user="u", password="p;q")),
        ("amqp://u:p@a/v;pyamqp://u:p@b:1/v", BrokerUrl(
            hosts=(("a", 5672), ("b", 1)), user="u", password="p", vhost="v"
        )),
        ("amqps://a//;AMQPS://b,c//", BrokerUrl(hosts=(("a", 5671), ("b", 5671), ("c", 5671)), tls=True)),
        ("amqps://h?verify=TRUE&auth=plain", BrokerUrl(hosts=(("h", 5671),), tls=True)),
    ],
)  # fmt: skip
def test_urls_are_parsed(text: str, expected: BrokerUrl) -> None:
    assert BrokerUrl.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not start with amqp:// or amqps://: give amqp://user:password@host:port/vhost"),
        ("localhost", "does not start with amqp://"),
        ("localhost:5672", "does not start with amqp://"),
        ("http://h", "does not start with amqp://"),
        ("amqp:h", "names no host"),
        ("amqp://", "names no host"),
        ("amqp:///v", "names no host"),
        ("amqp://u:p@/v", "names no host"),
        ("amqp://h1,,h2", "names no host"),
        ("amqp://h:port", "'amqp://h...' cannot be read: .* with a port from 1 to 65535"),
        ("amqp://h:65536", "'amqp://h:65536' cannot be read: .* with a port from 1 to 65535"),
        ("amqp://h:-1", "cannot be read"),
        ("amqp://h:0", "'amqp://h:0' has the port 0: .* from 1 to 65535"),
        ("amqp://[::1", "cannot be read"),
        ("amqp://::1", "cannot be read|names no host"),
        ("amqp://a..b", "cannot be read"),
        ("amqp://" + "a" * 64 + ".de", "cannot be read"),
        ("amqp://a b", "'a b' .* invalid characters"),
        ("amqp://a\0b", "invalid characters"),
        ("amqp://u:\udcff@h", "holds characters that UTF-8 cannot encode: .* percent-encoded"),
        ("amqp://a;b", "a semicolon between its hosts: separate them with commas"),
        (
            "amqp://a/v;amqp://b/w",
            "amqp://guest@a:5672/v and amqp://guest@b:5672/w differ in more than their hosts",
        ),
        ("amqp://a;amqps://b", "differ in more than their hosts"),
        ("amqp://a;http://b", "semicolon|invalid characters|cannot be read"),
        ("amqp://h//v", "the virtual host '/v' in the broker URL holds a slash: write it as %2F"),
        ("amqp://h?connection_attempts=5&retry_delay=2", "'connection_attempts' of pika: connect with wait='60s'"),
        ("amqp://h?retry_delay=2", "'retry_delay' of pika: connect with wait='60s'"),
        ("amqp://h?blocked_connection_timeout=300", "of pika: connect with timeout='30s', after which a publish fails"),
        ("amqp://h?socket_timeout=3", "'socket_timeout' of pika: give timeout=10"),
        ("amqps://h?ssl_options={}", "give cafile=, certfile= and keyfile=, or connect with ssl_context="),
        ("amqp://h/a/b", "the virtual host 'a/b' in the broker URL holds a slash: write it as %2F"),
        ("amqp://h/v@w", "unexpected .*: write them as %2F, %3F, %23 and %40"),
        ("amqp://h/#v", "unexpected"),
        ("amqp://h/?colour=red", "unknown option 'colour': known are auth, cafile, certfile, heartbeat"),
        ("amqp://h/?heartbeat=-1", "heartbeat='-1' .* not a whole number of seconds from 0 to 65535"),
        ("amqp://h/?heartbeat=65536", "from 0 to 65535"),
        ("amqp://h/?heartbeat=", "from 0 to 65535"),
        ("amqp://h/?heartbeat=٣", "from 0 to 65535"),
        ("amqp://h/?heartbeat=" + "9" * 5000, "from 0 to 65535"),
        ("amqp://h/?timeout=0", "timeout='0' .* from 1 to 3600"),
        ("amqp://h/?timeout=1.5", "from 1 to 3600"),
        ("amqp://h/?verify=maybe", "verify='maybe' in the broker URL: give one of true, 1, yes, false, 0, no"),
        ("amqp://h/?order=alphabetical", "order='alphabetical' in the broker URL: give one of random, given"),
        ("amqp://h/?auth=kerberos", "auth='kerberos' in the broker URL: give one of plain, external"),
    ],
)
def test_invalid_urls_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidUrlError, match=message):
        BrokerUrl.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        f"amqp://user:{SECRET}@",
        f"amqp://user:{SECRET}@/",
        f"amqp://user:{SECRET}@h:port/",
        f"amqp://user:{SECRET}@h/a/b",
        f"amqp://user:{SECRET}@h/?colour=red",
        f"amqp://user:{SECRET}@[/",
        f"amqp://user:{SECRET}@h,/",
        f"amqp://user:{SECRET}@a..b",
        f"http://user:{SECRET}@h/",
        f"user:{SECRET}@h",
        f"amqp:user:{SECRET}@h",
        f"amqp:/user:{SECRET}@h",
        f"amqp://user:\u2100{SECRET}@h",
        # written as it should not be, with what ends an address in a URL
        f"amqp://user:1/{SECRET}@h",
        f"amqp://user:1?{SECRET}@h",
        f"amqp://user:1#{SECRET}@h",
        f"amqp://user:1://{SECRET}@h",
        f"amqp://user:a@b?{SECRET}@h",
        f"amqp://user:{SECRET}/1@h",
        f"amqp://user:1/2:{SECRET}@h",
        # of Celery, with several brokers
        f"amqp://user:{SECRET}@a;amqp://user:{SECRET}@b/c/d",
        f"amqp://user:{SECRET}@a;amqp://user:other{SECRET}@b",
        f"amqp://user:{SECRET}@a;b",
        f"amqp://user:{SECRET}@a;http://user:{SECRET}@b",
        # without a host
        f"amqp://user:{SECRET}",
        f"amqp://user:{SECRET}/vhost",
        f"amqp://user:5{SECRET}",
    ],
)
def test_no_error_shows_a_password(text: str) -> None:
    with pytest.raises(InvalidUrlError) as caught:
        BrokerUrl.parse(text)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@given(
    password=st.text(alphabet="xy/:@?#%&,[] ", min_size=1, max_size=8), rest=st.sampled_from(["h", "h:1/v", "h/%2F"])
)
@example(password="1/2", rest="h")
def test_a_badly_quoted_password_is_used_or_hidden(password: str, rest: str) -> None:
    """Whatever becomes of it, no part of it is taken for something else and shown."""
    marked = f"{password}{SECRET}{password}"
    try:
        url = BrokerUrl.parse(f"amqp://user:{marked}@{rest}")
    except InvalidUrlError as error:
        shown = "".join(traceback.format_exception(error))
    else:
        shown = f"{url} {url!r}"
        assert SECRET in url.password
        assert url.hosts[0][0] == "h"
    assert SECRET not in shown


def test_a_password_is_not_printed() -> None:
    url = BrokerUrl.parse(f"amqp://user:{SECRET}@h1,[::1]:5673/a%2Fb?heartbeat=5")
    assert url.password == SECRET
    assert SECRET not in f"{url} {url!r} {(url,)} {dataclasses.replace(url, user='other')}"
    assert str(url) == "amqp://user@h1:5672,[::1]:5673/a%2Fb"


names = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=20)
hosts = st.sampled_from(["localhost", "h.example", "127.0.0.1", "::1", "2001:db8::7"])


@given(
    user=names,
    password=st.text(alphabet=st.characters(codec="utf-8"), max_size=20),
    vhost=names,
    addresses=st.lists(st.tuples(hosts, st.integers(1, 65535)), min_size=1, max_size=3),
    tls=st.booleans(),
)
def test_a_url_is_parsed_to_its_parts_and_printed_without_the_password(
    user: str, password: str, vhost: str, addresses: list[tuple[str, int]], tls: bool
) -> None:
    netloc = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)
    scheme = "amqps" if tls else "amqp"
    text = f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{netloc}/{quote(vhost, safe='')}"
    url = BrokerUrl.parse(text)
    assert url == BrokerUrl(hosts=tuple(addresses), user=user, password=password, vhost=vhost, tls=tls)
    assert BrokerUrl.parse(str(url)) == dataclasses.replace(url, password="guest")


@given(text=st.one_of(st.text(max_size=60), st.text(alphabet="amqps:/@?#[]%,.&=&h1", max_size=40)))
def test_any_text_is_parsed_or_refused_as_an_invalid_url(text: str) -> None:
    for candidate in (text, f"amqp://{text}", f"amqps://u:p@{text}", f"amqp://h/{text}", f"amqp://h/?{text}"):
        try:
            url = BrokerUrl.parse(candidate)
        except InvalidUrlError:
            continue
        assert url.hosts
        assert all(host and 1 <= port <= 65535 for host, port in url.hosts)
        assert BrokerUrl.parse(str(url)).hosts == url.hosts


def test_the_environment_names_the_broker() -> None:
    assert BrokerUrl.from_environment({"BIDE_URL": "amqp://h/v"}).vhost == "v"
    for nothing in ({}, {"BIDE_URL": ""}):
        assert BrokerUrl.from_environment(nothing) == BrokerUrl.parse(DEFAULT_URL)
    assert BrokerUrl.parse(DEFAULT_URL) == BrokerUrl(hosts=(("localhost", 5672),))


def test_a_plain_connection_has_no_tls_settings() -> None:
    assert BrokerUrl.parse("amqp://h").ssl_context() is None


def test_certificates_are_verified_unless_switched_off() -> None:
    context = BrokerUrl.parse("amqps://h").ssl_context()
    assert context is not None
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)
    context = BrokerUrl.parse("amqps://h?verify=no").ssl_context()
    assert context is not None
    assert (context.check_hostname, context.verify_mode) == (False, ssl.CERT_NONE)


def test_only_the_given_authority_is_trusted(tmp_path: Path) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("client.example")
    files = {"cafile": tmp_path / "ca.pem", "certfile": tmp_path / "cert.pem", "keyfile": tmp_path / "key.pem"}
    authority.cert_pem.write_to_path(files["cafile"])
    own.cert_chain_pems[0].write_to_path(files["certfile"])
    own.private_key_pem.write_to_path(files["keyfile"])
    url = BrokerUrl.parse("amqps://h?" + "&".join(f"{name}={quote(str(path))}" for name, path in files.items()))
    context = url.ssl_context()
    assert context is not None
    # Only the authority that was given is trusted, not those of the system beside it.
    assert [entry["subject"] for entry in context.get_ca_certs()] == [_subject(files["cafile"])]


def _subject(path: Path) -> Any:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    return context.get_ca_certs()[0]["subject"]


@pytest.mark.parametrize("option", ["cafile", "certfile"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unusable_certificate_files_are_refused(tmp_path: Path, option: str, content: str | None) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidUrlError, match=f"certificate files of the broker URL cannot be used .*{path}"):
        BrokerUrl.parse(f"amqps://u:{SECRET}@h?{option}={quote(str(path))}").ssl_context()
    with pytest.raises(InvalidUrlError, match="certificate files of the broker URL cannot be used"):
        BrokerUrl.parse(f"amqps://u:{SECRET}@h?{option}=%00").ssl_context()
