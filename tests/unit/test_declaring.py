"""The transient refusals of declarations."""

from __future__ import annotations

import ssl

import pytest

from bide.admin.declaring import is_temporary
from bide.amqp import reply_codes
from bide.errors import BrokerUnreachableError, ClosedError, TlsError

NODE = "on node 'bide@localhost'"


@pytest.mark.parametrize(
    "text",
    [
        f"INTERNAL_ERROR - Cannot declare quorum queue 'q' in vhost '/' {NODE} with leader {NODE}: cluster_not_formed",
        f"INTERNAL_ERROR - Cannot declare quorum queue 'q' in vhost '/' {NODE} with leader {NODE}: {{erpc,timeout}}",
        f"INTERNAL_ERROR - Could not declare queue 'q' {NODE} because the metadata store operation timed out",
        f"INTERNAL_ERROR - Cannot declare a queue 'queue 'q' in vhost '/'' {NODE}: {{error,coordinator_unavailable}}",
        "INTERNAL_ERROR - Could not add binding due to timeout",
        "INTERNAL_ERROR - The operation to delete the queue from the metadata store timed out",
        "INTERNAL_ERROR",
    ],
)
def test_an_internal_error_of_a_busy_broker_is_retried(text: str) -> None:
    assert is_temporary(reply_codes.connection_error(541, text))


@pytest.mark.parametrize(
    "text",
    [
        "INTERNAL_ERROR - Cannot declare a queue 'q' of type 'stream': the corresponding feature flag is disabled",
        "INTERNAL_ERROR - Feature `transient_nonexcl_queues` is deprecated.\nIts use is not permitted.",
        "INTERNAL_ERROR - Interceptor: m expected to return n",
    ],
)
def test_a_permanent_internal_error_is_not_retried(text: str) -> None:
    assert not is_temporary(reply_codes.connection_error(541, text))


@pytest.mark.parametrize(
    "text",
    [
        "NOT_FOUND - home node 'a@localhost' of durable queue 'q' in vhost '/' is down or inaccessible",
        "NOT_FOUND - queue 'q' in vhost '/' process is stopped by supervisor",
        "NOT_FOUND - failed to perform operation on queue 'q' in vhost '/' due to timeout",
        "NOT_FOUND - failed to perform operation on queue 'q': its leader <0.1.0> may be stopping or being demoted",
    ],
)
def test_a_declaration_of_an_unavailable_queue_is_retried(text: str) -> None:
    assert is_temporary(reply_codes.channel_error(404, text))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (404, "NOT_FOUND - no queue 'q' in vhost '/'"),
        (403, "ACCESS_REFUSED - configure access to queue 'q' in vhost '/' refused for user 'u'"),
        (
            406,
            "PRECONDITION_FAILED - inequivalent arg 'x' for queue 'q' in vhost '/': received none but current is '1'",
        ),
        (406, "PRECONDITION_FAILED - cannot declare queue 'q' in vhost '/': queue limit in vhost '/' (1) is reached"),
    ],
)
def test_a_permanent_refusal_is_not_retried(code: int, text: str) -> None:
    assert not is_temporary(reply_codes.channel_error(code, text))


def test_an_untrusted_certificate_is_not_retried() -> None:
    error = TlsError("the certificate is not trusted")
    error.__cause__ = ssl.SSLCertVerificationError()
    assert not is_temporary(error)
    assert is_temporary(BrokerUnreachableError("no broker answers"))


def test_a_closed_connection_is_not_retried() -> None:
    assert not is_temporary(ClosedError("the connection was closed"))
