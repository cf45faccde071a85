"""The commands, programs and manifests of the pages for operators."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import pytest
import yaml

from bide.cli.app import cli
from tests.acceptance.test_cli import Program
from tests.readme import Shell, blocks, code, commands_of, section, shape, table

if TYPE_CHECKING:
    from bide.local_broker import LocalBroker
    from tests.support import Rabbitmq, Vhost

PERMISSIONS: Final = "docs/permissions.md"
MONITORING: Final = "docs/monitoring.md"
CLUSTERS: Final = "docs/clusters.md"
KUBERNETES: Final = "docs/kubernetes.md"
REMOVE: Final = "docs/upgrade-and-remove.md"
PASSWORD: Final = "secret"


@pytest.fixture
def shell(tmp_path: Path, rabbitmq: Rabbitmq, vhost: Vhost) -> Shell:
    """A shell with a broker."""
    return Shell(tmp_path, rabbitmq, vhost)


# -- permissions


def url_of(vhost: Vhost, user: str) -> str:
    return re.sub(r"//.*?@", f"//{user}:{PASSWORD}@", vhost.url)


@pytest.mark.slow
def test_the_users_may_do_what_the_page_says_and_no_more(
    shell: Shell, vhost: Vhost, request: pytest.FixtureRequest
) -> None:
    for name, configure, write, read, tag in table(PERMISSIONS, "The users"):
        (user,) = code(name)
        vhost.broker.add_user(user, PASSWORD, tags=code(tag) if tag else ())
        # Other tests share the broker.
        request.addfinalizer(partial(vhost.broker.delete_user, user))
        patterns = {"configure": code(configure)[0], "write": code(write)[0], "read": code(read)[0]}
        vhost.broker.set_permissions(vhost.name, user, **patterns)
        shell.environment[user.upper()] = url_of(vhost, user)
    (declare,) = (text for _, text in blocks(PERMISSIONS, "The operator declares"))
    (use, refused) = (text for _, text in blocks(PERMISSIONS, "The sender and the worker use it"))
    for block in (declare, use):
        shell.check(commands_of(block))
    ((command, _),) = commands_of(refused)
    printed = shell.paste(command)
    assert printed.startswith("bide: "), printed
    assert "'sender'" in printed
    assert "orders" in printed
    # The level still counts the message for a moment after its delivery.
    denied = shell.paste("BIDE_URL=$WORKER bide delay destroy --yes --force || true")
    assert "permission" in denied, denied


# -- monitoring


@pytest.mark.slow
def test_verify_has_a_status_for_each_finding(shell: Shell) -> None:
    (block,) = (text for language, text in blocks(MONITORING, "From cron") if not language)
    shell.check(commands_of(block))


def test_the_command_for_managed_brokers_checks_the_broker(shell: Shell) -> None:
    shell.paste("bide topology apply point-to-point --queue orders && bide send x --to orders --in 1h")
    ((_, command),) = blocks("docs/managed-brokers.md")
    assert "delay verify" in command
    assert "no harmful policy" in shell.paste(command)


# -- clusters


def definitions_of(broker: LocalBroker, folder: Path) -> dict[str, Any]:
    file = folder / "bide.json"
    broker.rabbitmqctl("export_definitions", str(file))
    exported: dict[str, Any] = json.loads(file.read_text())
    return exported


@pytest.mark.long
def test_exported_definitions_make_the_same_queues(vhost: Vhost, tmp_path: Path) -> None:
    assert "export_definitions" in section(CLUSTERS, "Backup and restore")
    assert Program(vhost).run("delay", "apply").returncode == 0
    exported = definitions_of(vhost.broker, tmp_path)
    other = f"{vhost.name}-restored"
    url = vhost.broker.add_vhost(other)
    try:
        for kind in ("exchanges", "queues", "bindings", "policies"):
            exported[kind] = [{**one, "vhost": other} for one in exported[kind] if one["vhost"] == vhost.name]
        kept = {kind: exported[kind] for kind in ("exchanges", "queues", "bindings", "policies")}
        (tmp_path / "restored.json").write_text(json.dumps(kept))
        vhost.broker.rabbitmqctl("import_definitions", str(tmp_path / "restored.json"))
        restored = Program(type(vhost)(name=other, url=url, broker=vhost.broker))
        done = restored.run("delay", "verify")
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
    finally:
        vhost.broker.delete_vhost(other)


# -- Kubernetes


def containers(manifest: Any) -> list[dict[str, Any]]:
    template = manifest["spec"].get("template")
    found: list[dict[str, Any]] = template["spec"]["containers"] if template else []
    return found


def test_the_manifests_are_yaml_with_commands_that_exist() -> None:
    manifests = [yaml.safe_load(text) for language, text in blocks(KUBERNETES) if language == "yaml"]
    kinds = [one["kind"] for one in manifests]
    assert kinds == ["RabbitmqCluster", "Job", "Deployment", "StatefulSet"]
    commands = [one["command"] for manifest in manifests for one in containers(manifest)]
    for program, *arguments in commands:
        if program != "bide":
            continue
        command: click.Command = cli
        context = click.Context(cli, info_name="bide")
        while isinstance(command, click.Group):
            found = command.get_command(context, arguments.pop(0))
            assert found is not None
            command = found
        _, left, _ = command.make_parser(click.Context(command)).parse_args(list(arguments))
        assert left == []
    for manifest in manifests:
        if labels := manifest["spec"].get("selector", {}).get("matchLabels"):
            assert labels == manifest["spec"]["template"]["metadata"]["labels"]


# -- upgrade and remove


@pytest.mark.slow
def test_nothing_of_bide_is_left_after_its_removal(shell: Shell, vhost: Vhost) -> None:
    shell.paste("bide topology apply point-to-point --queue orders")
    shell.paste("bide send body --to orders --delay 2h && bide tap on")
    shell.paste("bide schedule add key body --to orders --delay 2h")
    found = blocks(REMOVE, "Remove bide from a broker")
    for language, text in found:
        if language == "python":
            (shell.folder / "remove.py").write_text(text, encoding="utf-8")
        else:
            for command, shown in commands_of(text):
                printed = shell.paste(command.replace("remove.py /", f"remove.py {vhost.name}"))
                if shown:
                    assert shape(printed)[-1] == shape(shown)[-1], f"{command}\n{printed}"
    left = {kind: vhost.broker.management.call("GET", kind, vhost.name) for kind in ("queues", "exchanges")}
    assert [one["name"] for one in left["queues"]] == ["orders"]
    assert not [one["name"] for one in left["exchanges"] if "bide" in one["name"]]
