"""The error lines of a failed start, from shortened consoles of real nodes."""

from __future__ import annotations

from pathlib import Path

from bide.local_broker.logs import explain_failed_start, relevant_lines

UNKNOWN_KEY = """\
2026-11-21 01:27:42.241518+00:00 [error] <0.132.0> You've tried to set no.such.key, but there is no such setting.
2026-11-21 01:27:42.267969+00:00 [error] <0.132.0>   Did you mean one of these?
2026-11-21 01:27:42.327079+00:00 [error] <0.132.0>     log.exchange

BOOT FAILED
===========
2026-11-21 01:27:42.331316+00:00 [error] <0.132.0>\x20
2026-11-21 01:27:42.331316+00:00 [error] <0.132.0> BOOT FAILED
2026-11-21 01:27:42.331316+00:00 [error] <0.132.0> ===========
2026-11-21 01:27:42.331316+00:00 [error] <0.132.0> Error during startup: {error,failed_to_prepare_configuration}
Error during startup: {error,failed_to_prepare_configuration}
2026-11-21 01:27:43.340850+00:00 [error] <0.132.0>     supervisor: {local,rabbit_prelaunch_sup}
2026-11-21 01:27:43.340850+00:00 [error] <0.132.0>     errorContext: start_error
"""

PORT_TAKEN = """\
2026-11-21 01:27:01.152066+00:00 [info] <0.223.0> Feature flags: list of feature flags found:

  ##  ##      RabbitMQ 3.10.8
  Starting broker...
BOOT FAILED
===========
Error during startup: {error,
                       {could_not_start_listener,"127.0.0.1",45177,
                        eaddrinuse}}

{"init terminating in do_boot",{error,{could_not_start_listener,"127.0.0.1",45177}}}
"""


def test_an_unknown_configuration_key_is_reported() -> None:
    assert relevant_lines(UNKNOWN_KEY.splitlines()) == [
        "You've tried to set no.such.key, but there is no such setting.",
        "  Did you mean one of these?",
        "    log.exchange",
        "Error during startup: {error,failed_to_prepare_configuration}",
    ]


def test_a_port_in_use_is_reported() -> None:
    assert relevant_lines(PORT_TAKEN.splitlines()) == [
        "Error during startup: {error,",
        '                       {could_not_start_listener,"127.0.0.1",45177,',
        "                        eaddrinuse}}",
    ]


def test_without_an_error_the_last_log_lines_are_reported() -> None:
    lines = [f"line {number}" for number in range(100)]
    relevant = relevant_lines(lines)
    assert relevant[-1] == "line 99"
    assert relevant == lines[-len(relevant) :]


def test_the_explanation_names_the_log(tmp_path: Path) -> None:
    assert explain_failed_start(tmp_path) == f"It wrote nothing to its logs in {tmp_path / 'log'}"
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "supervisor.log").write_text("Traceback: no such program\n", encoding="utf-8")
    (tmp_path / "log" / "server.log").write_text("\n", encoding="utf-8")
    assert explain_failed_start(tmp_path) == f"From {tmp_path}/log/supervisor.log:\n  Traceback: no such program"
    (tmp_path / "log" / "server.log").write_bytes(b"caf\xe9\n")
    assert explain_failed_start(tmp_path) == f"From {tmp_path}/log/server.log:\n  caf\N{REPLACEMENT CHARACTER}"
