"""``bide console`` with a real broker, a gate, Chromium and Firefox."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

import bide
from bide.admin.taps import turn_on
from bide.amqp.connection import Connection
from bide.amqp.url import BrokerUrl
from bide.client.schedule_requests import ScheduleRequests
from bide.console.server import serve
from bide.console.settings import Access
from bide.console.tap_index import TapIndex
from bide.console.vhost import ConsoleVhost
from bide.delay.protocol import HEADER_DUE, QueueTarget
from bide.delay.taps import taps_of
from bide.durations import to_milliseconds
from bide.gate import partition_session
from bide.messages.prepared import PreparedMessage
from bide.schedules.entries import ScheduleAnswer
from bide.schedules.names import partition_of
from bide.schedules.records import Operation
from bide.schedules.requests import RequestId
from tests import firefox
from tests.acceptance.test_cli import Program
from tests.broker import endpoints
from tests.broker.receiving import eventually, receive
from tests.broker.schedule_log import gating
from tests.browser import Browser
from tests.console import BUTTON, NASTY, READY, Client, Console, Window, console, fill, press
from tests.support import Vhost, stream_port
from tests.timeouts import TIMEOUT

REPEATED: Final = (0, 1)
"""Partitions whose gate gets the request of a change by filter again when it has forgotten its answer."""


async def reaches(value: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Wait until a value is the wanted one."""

    async def holds() -> bool:
        return await value() == wanted

    await eventually(holds)


async def test_the_page_shows_what_waits_and_changes_it(vhost: Vhost, chromium: Browser, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await fill(client)
        assert await client.count_scheduled(prefix="") == 22
        with console(vhost, has_gate=True) as running:
            await asyncio.to_thread(_look_around, Window(chromium, running.url), chromium, running)
        ran = await receive(client, "reminders", 10)
        assert sorted(str(one.key) for one in ran) == [f"invoice:0{number}" for number in range(10)]
        await reaches(lambda: client.count_scheduled(prefix="invoice:"), 0)
        assert (await client.count_scheduled(prefix=""), await client.scheduled("invoice:03")) == (2, None)


def _look_around(window: Window, chromium: Browser, running: Console) -> None:
    window.sign_in()
    assert "token" not in chromium.evaluate("location.href")
    assert chromium.evaluate("document.querySelectorAll('.plot rect').length") > 2
    assert "22\nschedules" in window.text
    assert "exact, from the index of the gates" in window.text
    _zoom(window, chromium)
    _cross_a_clock_change(window, chromium)

    # Keys open the views, and hostile texts are texts.
    chromium.evaluate("dispatchEvent(new KeyboardEvent('keydown', { key: '3' }))")
    window.wait("location.hash.startsWith('#/schedules')")
    window.wait(f"document.body.innerText.includes({json.dumps(NASTY)})")
    window.open(f"schedules?key={quote(NASTY)}")
    assert window.text.count(NASTY) >= 3
    assert chromium.evaluate("document.title") == "Schedules · bide console"
    assert chromium.evaluate("document.querySelectorAll('main script, main img').length") == 0
    window.open("schedules?key=digest")
    assert chromium.evaluate("document.querySelectorAll('ol li').length") == 5
    assert "computed from the rule" in window.text

    # Every view fits a phone, in both colour schemes, and asks no other host.
    papers = set()
    for name in ("waiting", "find?text=digest", "schedules", "many", "failures", "problems", "lateness", "log"):
        window.open(name, width=360, dark=True)
        assert chromium.evaluate("document.documentElement.scrollWidth") <= 360, name
        papers.add(chromium.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        # Chromium's own icons of date fields are data.
        assert {one for one in chromium.requests if not one.startswith((running.origin, "about:", "data:"))} == set()
        assert [one for one in chromium.complaints if "404" not in one] == [], name
    assert papers == {"rgb(16, 21, 20)"}

    # Also between a phone and a wide window, no button of a table is out of sight.
    right = "Math.max(...[...document.querySelectorAll('td button')].map(one => one.getBoundingClientRect().right))"
    whole = "[...document.querySelectorAll('.scroll')].every(one => one.scrollWidth <= one.clientWidth)"
    lines_of_rule = "new Set([...document.querySelectorAll('td .rule span')].map(one => one.offsetTop)).size"
    for width in (768, 1120, 1200):
        window.open("schedules", width=width)
        assert 0 < chromium.evaluate(right) <= width
        assert chromium.evaluate(whole)
        assert chromium.evaluate(lines_of_rule) == 1, width
        window.open("find?text=digest", width=width)
        assert chromium.evaluate(whole)

    # A finding has its command in its sentence, to copy, and not a second time below.
    window.open("problems")
    missing = "[...document.querySelectorAll('.finding .break')].find(one => one.innerText.startsWith('exchanges'))"
    assert chromium.evaluate(f"{missing}.textContent").endswith(": run bide delay applyCopy with the same settings")

    _find_key(window, chromium)
    _use_keyboard(window, chromium)
    _change_one(window, chromium)

    # Changes by conditions, from the list, with a count before.
    window.open("schedules?prefix=invoice%3A")
    chromium.evaluate("[...document.querySelectorAll('a')].find(one => one.innerText === 'Change all 20').click()")
    window.wait("document.body.innerText.includes('20 schedules match')")
    assert chromium.evaluate(f"{BUTTON.format('Resume')}.disabled")
    window.click("Pause")
    window.click("Pause 20", "dialog")
    window.wait("document.body.innerText.includes('20 paused')")
    window.wait(f"!!{BUTTON.format('Pause')}?.disabled")
    window.click("Resume")
    window.click("Resume 20", "dialog")
    window.wait("document.body.innerText.includes('20 schedules match; the paused ones are resumed')")
    window.wait(f"{BUTTON.format('Pause')}?.disabled === false")
    window.open("many?prefix=invoice%3A0&count=1")
    window.click("Run now")
    window.wait("document.querySelector('dialog h2')?.innerText === 'Run now 10 schedules?'")
    window.click("Run now 10", "dialog")
    window.wait("document.body.innerText.includes('10 delivered now')")
    window.open("many?prefix=invoice%3A1&count=1")
    window.click("Cancel")
    window.click("Cancel 10", "dialog")
    window.wait("document.body.innerText.includes('10 cancelled')")
    for width in (1120, 1200, 1400):
        window.open("log", width=width)
        assert "cancel schedules" in window.text
        assert "run-now schedules" in window.text
        assert chromium.evaluate(whole), width


def _zoom(window: Window, chromium: Browser) -> None:
    """Zoom the skyline of four days, whose bars are hours."""
    first = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)

    def at(hour: int) -> str:
        return f"{first + timedelta(hours=hour):%Y-%m-%dT%H:%M:%S}.000Z"

    def open_days() -> None:
        window.open(f"waiting?start={at(0)}&end={at(96)}")

    def shows(start: int, end: int) -> None:
        given = "new URLSearchParams(location.hash.split('?')[1])"
        window.wait(f"(given => given.get('start') + given.get('end'))({given}) === '{at(start)}{at(end)}'")

    chosen = "document.querySelector('.plot .chosen').getAttribute('visibility')"

    # Dragging shows the bars from the first to the last one, whole.
    for begin, end in ((24, 71), (71, 24)):
        open_days()
        left, top, width = chromium.evaluate(
            "(box => [box.left + 48, box.top + 100, box.width - 60])"
            "(document.querySelector('.plot svg').getBoundingClientRect())"
        )
        for kind, hour in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            x = left + (hour + 0.5) * width / 96
            chromium.call("Input.dispatchMouseEvent", type=kind, x=x, y=top, button="left", buttons=1, clickCount=1)
            if kind == "mousePressed":
                chromium.resize(1199)  # a scrollbar may appear meanwhile
            if kind == "mouseMoved":
                window.wait(f"{chosen} === 'visible'")
        shows(24, 72)
        window.wait("document.body.innerText.includes('30\u00a0min\\nper bar')")

    # Keys zoom around the middle, or around the bar that was chosen with the arrow keys.
    for keys, hours in (("+", (24, 73)), ("-", (-48, 145)), (("PageDown", "+"), (-15, 34))):
        open_days()
        chromium.evaluate("document.querySelector('.plot svg').focus()")
        for key in keys:
            press(chromium, key)
        shows(*hours)
    # The picture follows the width of its window, and keys still reach it.
    open_days()
    chromium.evaluate("document.querySelector('.plot svg').focus()")
    shown = chromium.evaluate("document.querySelector('.plot svg').getAttribute('viewBox')")
    chromium.resize(900)
    window.wait(f"document.querySelector('.plot svg').getAttribute('viewBox') !== '{shown}'")
    press(chromium, "Escape")
    window.wait("!location.hash.includes('start=')")


def _cross_a_clock_change(window: Window, chromium: Browser) -> None:
    """Days begin at midnight also after clocks changed, or at one o'clock where midnight is skipped."""
    chromium.evaluate("import('/skyline.js').then(one => window.skyline = one)")
    window.wait("!!window.skyline")
    try:
        for zone, start, end, expected in (
            ("Europe/Berlin", "2026-10-23T12:00Z", "2026-10-27T12:00Z", ["24 00", "25 00", "26 00", "27 00"]),
            ("Europe/Berlin", "2026-03-27T12:00Z", "2026-03-30T22:30Z", ["28 00", "29 00", "30 00", "31 00"]),
            ("America/Santiago", "2026-09-04T12:00Z", "2026-09-08T12:00Z", ["05 00", "06 01", "07 00", "08 00"]),
        ):
            chromium.call("Emulation.setTimezoneOverride", timezoneId=zone)
            first, last = (int(datetime.fromisoformat(one).timestamp()) * 1000 for one in (start, end))
            local = "one => new Date(one).toLocaleString('sv').slice(8, 13)"
            assert chromium.evaluate(f"skyline.ticks({first}, {last}, 5)[0].map({local})") == expected
    finally:
        chromium.call("Emulation.setTimezoneOverride", timezoneId="")


def _find_key(window: Window, chromium: Browser) -> None:
    """The hops of a key say which was seen and which is computed, and the places say where the key was found."""
    window.open("find?text=invoice%3A07")
    partition = partition_of("invoice:07")
    hops = chromium.evaluate("[...document.querySelectorAll('.hops li')].map(one => [one.className, one.innerText])")
    for (kind, text), (shown_kind, shown) in zip(
        [
            ("seen", f"Schedule log\npartition {partition}, version "),
            ("here", "Index of the gate\nwaits until 2"),
            ("computed", "reminders\nthe gate publishes it here when it is due"),
        ],
        hops,
        strict=True,
    ):
        assert (shown_kind, shown[: len(text)]) == (kind, text)
    places = "[...document.querySelectorAll('tbody tr')].map(one => one.innerText.split(/\\s*[\\t\\n]\\s*/))"
    assert chromium.evaluate(places)[0] == [f"the index of the gates, partition {partition}", "found", "exact"]


def _change_one(window: Window, chromium: Browser) -> None:
    window.open("schedules?key=digest")
    state = "document.querySelector('main .badge')?.innerText"
    window.click("Pause")
    window.wait(f"{state} === 'paused'")
    window.click("Resume")
    window.wait(f"{state} === 'waiting'")
    window.click("Edit")
    window.wait("!!document.querySelector('dialog [name=every]')")
    chromium.evaluate("document.querySelector('dialog [name=every]').value = '0 9 * * *'")
    window.click("Store", "dialog")
    window.wait("document.querySelector('main').innerText.includes('0 9 * * * Europe/Berlin')")
    window.click("Run now")
    window.click("Run now", "dialog")
    window.wait("document.querySelector('#toasts').innerText.includes('digest: delivered now')")


def _use_keyboard(window: Window, chromium: Browser) -> None:
    name = "((one) => one.getAttribute('aria-label') || one.textContent.trim() || one.name)(document.activeElement)"

    # Tab goes through the frame and then through the view, and the focus is visible.
    window.open("schedules")
    reached = []
    for _ in range(17):
        press(chromium, "Tab")
        reached.append(chromium.evaluate(name))
        assert chromium.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", reached
    assert reached == [
        *("Skip to the content", "bide", "Light or dark", "Keyboard shortcuts"),
        *("Waiting1", "Find a message2", "Schedules3", "Bulk changes4"),
        *("Failures5", "Problems6", "Lateness7", "Operator log8"),
        *("Refresh", "prefix", "to", "recurring", "Show"),
    ]

    # The link to the content does not leave the view.
    window.open("schedules")
    for key in ("Tab", "Enter"):
        press(chromium, key)
    assert chromium.evaluate("[location.hash, document.activeElement.id].join()") == "#/schedules,content"
    press(chromium, "Tab")
    assert chromium.evaluate(name) == "Refresh"

    # The focus stays on the link of the view that it opened.
    chromium.evaluate("document.querySelector('#views a:nth-child(4)').focus()")
    press(chromium, "Enter")
    window.wait("document.title === 'Bulk changes · bide console'")
    window.wait(READY)
    assert chromium.evaluate(name) == "Bulk changes4"

    # Escape closes a dialog, and the focus returns to its button.
    window.open("schedules")
    chromium.evaluate("document.querySelector('td button.bad').focus()")
    press(chromium, "Enter")
    window.wait("document.querySelector('dialog')?.contains(document.activeElement)")
    press(chromium, "Escape")
    window.wait("!document.querySelector('dialog')")
    window.wait("document.activeElement.matches('td button.bad')")


async def test_the_page_names_partitions_that_no_longer_know_what_they_changed(
    vhost: Vhost, chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Answers are forgotten after the second tick: after two seconds instead of two hours.
    monkeypatch.setattr(partition_session, "_TICK_EVERY", 1.0)
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await fill(client)
        known = sum(partition_of(f"invoice:{number:02}") not in REPEATED for number in range(20))
        console_vhost = ConsoleVhost(
            url=BrokerUrl.parse(vhost.url),
            infrastructure=await client.infrastructure(),
            management_url=vhost.broker.management_url,
            stream_port=stream_port(vhost.broker),
        )
        async with served(console_vhost) as url:
            monkeypatch.setattr(ScheduleRequests, "append", _append_until_forgotten)
            await asyncio.to_thread(_cancel_with_repeats, Window(chromium, url), known)
        assert await client.count_scheduled(prefix="invoice:") == 0


async def _append_until_forgotten(
    requests: ScheduleRequests,
    partition: int,
    what: str,
    make: Callable[[RequestId], Operation],
    *,
    needs_answer: bool,
    append: Callable[..., Awaitable[tuple[RequestId, ScheduleAnswer | None]]] = ScheduleRequests.append,
) -> tuple[RequestId, ScheduleAnswer | None]:
    """Repeat the request of two partitions, as a client whose computer slept before the answer came."""
    request, answer = await append(requests, partition, what, make, needs_answer=needs_answer)
    while partition in REPEATED and answer is not None and answer.outcome != "forgotten":
        await asyncio.sleep(0.1)  # the gate appends a tick every second
        _, answer = await append(requests, partition, what, make, needs_answer=needs_answer, number=request)
    return request, answer


def _cancel_with_repeats(window: Window, known: int) -> None:
    window.sign_in()
    window.open("many?prefix=invoice%3A&count=1")
    window.click("Cancel")
    window.click("Cancel 20", "dialog")
    text = "2 partitions applied the change more than an hour ago, and no longer know how many schedules they changed."
    window.wait(f"document.querySelector('.toast.bad')?.innerText === {json.dumps(f'{known} cancelled. {text}')}")
    window.open("log")
    assert f"cancelled, {known} done, 2 partitions not counted" in window.text


@pytest.mark.long
async def test_firefox_shows_what_waits_and_changes_it(vhost: Vhost, tmp_path: Path) -> None:
    folder = tmp_path / "firefox"
    folder.mkdir()
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await fill(client)
        with console(vhost, has_gate=True) as running:
            await asyncio.to_thread(_use_firefox, folder, running)
        assert (await client.count_scheduled(prefix="invoice:"), await client.count_scheduled(prefix="")) == (0, 2)


def _use_firefox(folder: Path, running: Console) -> None:
    with firefox.start(folder) as page:
        window = Window(page, running.url)
        window.sign_in()
        assert "token" not in page.evaluate("location.href")
        assert page.evaluate("document.querySelectorAll('.plot rect').length") > 2
        assert "22\nschedules" in window.text
        papers = []
        for _ in ("light", "dark"):
            for name in ("waiting", "failures"):
                window.open(name, width=360)
                assert page.evaluate("document.documentElement.scrollWidth") <= 360, name
                assert {one for one in page.requests if not one.startswith((running.origin, "about:"))} == set()
                assert page.complaints == [], name
            papers.append(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
            page.evaluate("dispatchEvent(new KeyboardEvent('keydown', { key: 't' }))")
        assert len(set(papers)) == 2
        window.open(f"schedules?key={quote(NASTY)}")
        assert window.text.count(NASTY) >= 3
        assert page.evaluate("document.title") == "Schedules · bide console"

        # A form, and a dialog.
        window.open("many")
        page.evaluate("document.querySelector('main input').value = 'invoice:'")
        window.click("Count")
        window.wait("document.body.innerText.includes('20 schedules match')")
        window.click("Cancel")
        window.click("Cancel 20", "dialog")
        window.wait("document.body.innerText.includes('20 cancelled')")


@pytest.mark.parametrize(("name", "sent_back"), [("Retry", 1), ("Discard", 0)])
async def test_an_operation_on_failed_messages_keeps_its_pace_until_it_is_stopped(
    vhost: Vhost, chromium: Browser, name: str, sent_back: int
) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("error"), bide.Queue.quorum("shop")]))
        for _ in range(5):
            await client.publish(b"", to="error", headers={"NServiceBus.FailedQ": "shop"})
        with console(vhost) as running:
            await asyncio.to_thread(_run_until_stopped, Window(chromium, running.url), chromium, name)
        # The queue takes back what the console has read a moment after the end of its connection.
        await reaches(lambda: client.message_count("error"), 4)
        assert await client.message_count("shop") == sent_back


def _run_until_stopped(window: Window, chromium: Browser, name: str) -> None:
    window.sign_in()
    window.open("failures?queue=error")
    window.click(f"{name} all")
    window.wait(f"document.querySelector('dialog h2')?.innerText === '{name} 5 messages?'")
    chromium.evaluate("document.querySelector('dialog [name=over]').value = '1h'")
    window.click(name, "dialog")
    window.wait("document.querySelector('.operation')?.innerText.includes('1 of 5 done')")
    assert "all messages, over 1h" in window.text
    assert chromium.evaluate("document.querySelector('.operation progress').value") == 1

    # The button keeps the focus while the progress is asked for.
    chromium.evaluate("document.querySelector('.operation button').focus()")
    asked = "performance.getEntriesByType('resource').filter(one => one.name.includes('api/operations')).length"
    window.wait(f"{asked} >= {chromium.evaluate(asked) + 3}")
    press(chromium, "Enter")
    window.wait("document.querySelector('.operation')?.innerText.includes('1 of 5 done, 4 left')")
    assert chromium.evaluate("document.querySelector('.operation .badge').innerText") == "stopped"
    window.wait("document.querySelector('main').innerText.includes('4 messages in error')")


async def test_views_that_read_the_same_queue_all_see_its_messages(vhost: Vhost) -> None:
    """The page of a failed message asks for the message and for its group at once."""
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("error")]))
        for number in range(20):
            await client.publish(b"", to="error", message_id=str(number))
        with console(vhost) as running:
            async with running.client() as page:
                ids = [one["id"] for one in (await page.get("failures/messages", queue="error"))["messages"]]
                assert len(ids) == 20
                found = await asyncio.gather(
                    *(page.get("failure", queue="error", id=one) for one in ids[-3:]),
                    page.get("failures/messages", queue="error"),
                    page.get("failures", queue="error"),
                    page.get("failures/count", queue="error"),
                    page.get("find", text=ids[-1]),
                )
    assert [one["id"] for one in found[:3]] == ids[-3:]
    assert len(found[3]["messages"]) == found[4]["total"] == found[5]["count"] == 20
    assert [one["id"] for one in found[6]["failed"]] == ids[-1:]


async def test_each_change_is_done_and_recorded_with_its_operator(vhost: Vhost, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await fill(client)
        with console(vhost, has_gate=True) as running:
            async with running.client() as page:
                await _change_schedules(page, client)
                await _change_failures(page, client)
                listed = (await page.get("history"))["operations"]
    assert {one["operation"] for one in listed} == {
        *(f"{one} schedule" for one in ("pause", "resume", "move", "run-now", "cancel", "edit")),
        *(f"{one} schedules" for one in ("pause", "resume", "move")),
        *("retry", "archive", "discard", "edit", "resend"),
    }
    assert {one["state"] for one in listed} == {"ended"}
    assert all(one["who"].startswith("console of ") for one in listed)


async def _change_schedules(page: Client, client: bide.Client) -> None:
    async def change(action: str, key: str, **values: Any) -> str:
        version = (await page.get("schedule", key=key))["version"]
        return str((await page.post("schedule/change", action=action, key=key, version=version, **values))["outcome"])

    assert await change("pause", "invoice:00") == "paused"
    # An edited schedule stays paused, and keeps its due time.
    before = await page.get("schedule", key="invoice:00")
    edited = await page.post("schedule/edit", key="invoice:00", version=before["version"], body="new")
    assert edited["outcome"] == "scheduled"
    after = await page.get("schedule", key="invoice:00")
    assert (after["state"], after["due"], after["body"]["text"]) == ("paused", before["due"], "new")
    assert await change("resume", "invoice:00") == "resumed"
    assert await change("move", "invoice:01", delay="5d") == "moved"
    assert await change("cancel", "invoice:02") == "cancelled"
    assert await change("run", "invoice:03") == "running"
    (message,) = await receive(client, "reminders", 1)
    assert message.key == "invoice:03"
    digest = await page.get("schedule", key="digest")
    changed: dict[str, Any] = {"key": "digest", "version": digest["version"], "every": "0 9 * * *", "time_zone": "UTC"}
    assert (await page.post("schedule/edit", **changed))["outcome"] == "scheduled"
    assert (await page.get("schedule", key="digest"))["every"] == "0 9 * * *"
    # What was shown is not what waits anymore.
    assert (await page.post("schedule/edit", **changed))["outcome"] == "changed"

    assert (await page.get("schedules/count", prefix="invoice:"))["count"] == 18
    moved = await page.post("schedules/change", action="move", prefix="invoice:", delay="4d")
    assert moved == {"outcome": "moved", "count": 18, "forgotten": []}
    assert "no condition" in (await page.post("schedules/change", 400, action="cancel"))["error"]
    await _pause_and_resume_many(page, client)
    assert (await page.get("schedules", recurring="1"))["schedules"][0]["key"] == "digest"
    first = await page.get("schedules")
    assert (len(first["schedules"]), first["count"], first["after"]) == (20, 20, None)
    await page.get("schedule", 404, key="nothing")


async def _pause_and_resume_many(page: Client, client: bide.Client) -> None:
    await client.pause("invoice:15")
    assert await page.get("schedules/count", prefix="invoice:1") == {"count": 10, "paused": 1}
    paused = await page.post("schedules/change", action="pause", prefix="invoice:1")
    assert paused == {"outcome": "paused", "count": 10, "forgotten": []}
    assert await page.get("schedules/count") == {"count": 20, "paused": 10}
    # What becomes due while it is paused is delivered when it is resumed.
    await client.reschedule("invoice:15", delay="0s")
    assert (await page.get("schedule", key="invoice:15"))["state"] == "paused"
    resumed = await page.post("schedules/change", action="resume", prefix="invoice:1")
    assert resumed == {"outcome": "resumed", "count": 10, "forgotten": []}
    (message,) = await receive(client, "reminders", 1)
    assert message.key == "invoice:15"
    assert (await page.get("schedules/count", prefix="invoice:1"))["paused"] == 0
    await client.schedule(json={"n": 15}, key="invoice:15", to="reminders", delay="3d")


async def _change_failures(page: Client, client: bide.Client) -> None:
    recorder = endpoints.Recorder()
    app = bide.Endpoint("shop", retry=bide.Retry(immediate=0, delays=[]), observers=[recorder])

    @app.handler
    def fail(message: bide.Message) -> None:
        raise (KeyError if message.type == "odd" else ValueError)(NASTY)

    async with endpoints.running(app, client, recorder):
        for number in range(6):
            await client.publish(b"body", to="shop", type="odd" if number % 2 else "even")
        await recorder.until("parked", count=6)
    found = await page.get("failures", queue="error")
    groups = {one["group"].partition(" ")[0]: one for one in found["groups"]}
    assert {name: (one["count"], one["text"]) for name, one in groups.items()} == {
        "KeyError": (3, repr(NASTY)),
        "ValueError": (3, NASTY),
    }
    group = groups["KeyError"]["group"]
    assert (await page.get("failures/count", queue="error", group=group))["queues"] == {"shop": 3}
    example = (await page.get("failures/messages", queue="error", group=group))["messages"][0]
    whole = await page.get("failure", queue="error", id=example["id"])
    assert (whole["body"]["text"], "in fail" in whole["stack"]) == ("body", True)
    sent = await page.post("failure/edit", queue="error", id=example["id"], body="fixed")
    assert sent["message_id"] != example["message_id"]
    assert "no condition" in (await page.post("failures/discard", 400, queue="error"))["error"]
    assert "'soon'" in (await page.post("failures/archive", 400, queue="error", all=True, over="soon"))["error"]
    other = (await page.get("failures/messages", queue="error", group=groups["ValueError"]["group"]))["messages"][0]
    for path, chosen in (
        ("failures/retry", {"group": group}),
        ("failures/archive", {"ids": [other["id"]], "over": "1s"}),
        ("failures/discard", {"all": True, "over": "1s"}),
    ):
        running = await page.post(path, queue="error", **chosen)

        async def state(name: str = running["id"]) -> object:
            listed = (await page.get("operations"))["operations"]
            return next(one["state"] for one in listed if one["id"] == name)

        await reaches(state, "done")
    assert (await client.message_count("error"), await client.message_count("error.archive")) == (0, 1)
    texts = [one["text"] for one in (await page.get("operations"))["operations"]]
    assert texts == ["all messages, over 1s", f"messages {other['id']}, over 1s", f"group {group}"]
    bodies = [one.body for one in await receive(client, "shop", 3)]
    assert sorted(bodies) == [b"body", b"body", b"fixed"]

    # A scheduled message whose target is missing is sent on when the target exists.
    await client.schedule(b"late", key="late", to="missing", delay="0s")

    async def undeliverable() -> object:
        return sum(one["messages"] for one in (await page.get("undeliverable"))["queues"])

    await reaches(undeliverable, 1)
    # The advice of findings is in commands, which the page lets people copy.
    commands = [command for one in (await page.get("findings"))["findings"] for command in one["commands"]]
    assert "bide delay resend --queue bide.v1.schedule.undeliverable --allow ..." in commands
    await client.declare(bide.Topology(queues=[bide.Queue.quorum("missing")]))
    queue = "bide.v1.schedule.undeliverable"
    assert await page.post("undeliverable/resend", queue=queue, allow=["missing"]) == {"sent": 1, "kept": {}}


async def test_a_message_is_found_in_the_taps_and_its_hops_are_computed(vhost: Vhost, chromium: Browser) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("mail")]))
        await client.publish(b"", to="mail", delay="10ms")
        # The tap must not see it.
        await receive(client, "mail", 1)
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        await turn_on(connection, await client.infrastructure())
        await connection.close()
        await client.publish(b"", to="mail", delay="2d 3h", message_id="later")
        await client.publish(b"", to="mail", delay="20ms", message_id="soon")
        await receive(client, "mail", 1)
        # In the stream, another message was delivered an hour late.
        delivered = QueueTarget(taps_of(await client.infrastructure()).delivered)
        late = {"headers": {HEADER_DUE: to_milliseconds(client.now()) - 3_600_000}}
        await client.forward(PreparedMessage(target=delivered, body=b"", message_id="late", values=late, is_copy=True))
        with console(vhost, "--read-only") as running:
            async with running.client() as page:

                async def delivered_in_time_or_late() -> object:
                    return sum(one["count"] for one in (await page.get("lateness"))["minutes"])

                await reaches(delivered_in_time_or_late, 2)
                minutes = (await page.get("lateness"))["minutes"]
                assert max(one["p99"] for one in minutes) > 3_000_000
                found = (await page.get("find", text="later"))["tap"]
                assert [hop["wait"] for hop in found["hops"] if hop["wait"]] == [2 * 86_400_000, 3 * 3_600_000]
                assert [hop["is_here"] for hop in found["hops"] if hop["wait"]] == [True, False]
                assert found["delivered_at"] is None
                over = (await page.get("find", text="soon"))["tap"]
                assert over["delivered_at"] >= over["due"]

                async def waiting() -> object:
                    # The API may still count the message that was delivered.
                    levels = (await page.get("levels"))["levels"]
                    return [(one["unit"], one["total"]) for one in levels if one["total"]]

                await reaches(waiting, [(86_400_000, 1)])
                # There is no gate, which the page says at once instead of waiting for an answer.
                assert "no schedule log" in (await page.get("timeline"))["gates"]["why"]
                await page.post("failures/retry", 403, queue="error", all=True)

                # What is due later is counted by target and due time, from the tap. The first message was before it.
                tapped = await page.get("tapped")
                assert [(one["target"], one["total"]) for one in tapped["targets"]] == [("q:mail", 1)]
                assert (tapped["total"], tapped["first"], tapped["last"]) == (1, found["due"], found["due"])
                assert (tapped["tap"]["number"], tapped["tap"]["older"]) == (2, 0)
                assert (await page.get("tapped", to="other"))["total"] == 0
            await asyncio.to_thread(_look_at_taps, Window(chromium, running.url), chromium, minutes)


def _look_at_taps(window: Window, chromium: Browser, minutes: list[dict[str, int]]) -> None:
    window.sign_in()
    # The message that waits, in one slot of the clock.
    assert chromium.evaluate("[...document.querySelectorAll('.dial .full')].map(one => one.ariaLabel).join()") == (
        "1 message: 2\u00a0d"
    )
    assert "counted by the broker, up to 5 s ago" in window.text
    _touch_slot(window, chromium)
    chromium.evaluate(
        "[...document.querySelectorAll('a')].find(one => one.innerText === 'Due times from the tap').click()"
    )
    window.wait("document.body.innerText.includes('Due times of messages without a key')")
    window.wait("document.querySelectorAll('.plot rect').length > 2")
    assert "computed from what the tap saw" in window.text
    assert "2 messages of bide.v1.tap.scheduled, stored since" in window.text
    assert "Read older messages" not in window.text
    # A bar is zoomed into.
    chromium.evaluate(
        "for (const key of ['ArrowRight', 'Enter'])"
        " document.querySelector('.plot svg').dispatchEvent(new KeyboardEvent('keydown', { key }))"
    )
    window.wait("location.hash.includes('tap=1') && location.hash.includes('start=')")
    window.wait(READY)
    window.open("find?text=later", width=360)
    assert "stream bide.v1.tap.scheduled" in window.text
    # The mark of the level where it waits says that this is computed.
    mark = "getComputedStyle(document.querySelector('.hops .here'), '::before').borderTopStyle"
    assert chromium.evaluate(mark) == "dashed"
    assert "Search older messages" not in window.text
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 360
    window.open("waiting?tap=1", width=360, dark=True)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 360
    _look_at_lateness(window, chromium, minutes)


def _touch_slot(window: Window, chromium: Browser) -> None:
    """Touching a slot shows its number of messages."""
    window.open("waiting", width=360)
    assert "Touch a slot, or point at it" in window.text
    place = "document.querySelector('.dial .full')"
    chromium.evaluate(f"{place}.scrollIntoView({{ block: 'center' }})")
    box = chromium.evaluate(
        f"(box => [box.left + box.width / 2, box.top + box.height / 2])({place}.getBoundingClientRect())"
    )
    chromium.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": box[0], "y": box[1]}])
    chromium.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    window.wait(
        "document.body.innerText.includes('1 message waits 2\u00a0d here. Computed: it is due within 3\u00a0d.')"
    )
    window.open("waiting")


def _look_at_lateness(window: Window, chromium: Browser, minutes: list[dict[str, int]]) -> None:
    """The chart and the table have the values of each minute."""
    window.open("lateness")
    assert chromium.evaluate(
        "[...document.querySelectorAll('.plot title')].map(one => one.textContent.split(': ')[1])"
    ) == [f"{name} {one[name]} ms of {one['count']}" for one in minutes for name in ("p99", "p50")]
    cells = "[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].slice(1).map(one => one.textContent))"
    assert chromium.evaluate(cells) == [
        [f"{one[name]:,}" for name in ("count", "p50", "p99", "max")] for one in minutes
    ]


@asynccontextmanager
async def served(console_vhost: ConsoleVhost) -> AsyncIterator[str]:
    """A console in this process, and its address."""
    started: asyncio.Future[Access] = asyncio.get_running_loop().create_future()
    stopping = asyncio.Event()
    serving = asyncio.create_task(serve([console_vhost], Access(port=0), started=started.set_result, stopping=stopping))
    try:
        # A console that does not start ends with its error instead.
        waits: set[asyncio.Future[Any]] = {started, serving}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            yield started.result().url
    finally:
        stopping.set()
        await serving


async def test_older_messages_of_a_tap_are_searched_and_counted_step_by_step(vhost: Vhost, chromium: Browser) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("mail")]))
        await client.publish(b"", to="mail", delay="1h")
        infrastructure = await client.infrastructure()
        connection = await Connection.open(BrokerUrl.parse(vhost.url))
        await turn_on(connection, infrastructure)
        await connection.close()
        messages = [bide.OutgoingMessage(b"", to="mail", delay="1h", message_id=f"m{one}") for one in range(30)]
        assert (await client.publish_many(messages)).confirmed == 30
        console_vhost = ConsoleVhost(
            url=BrokerUrl.parse(vhost.url),
            infrastructure=infrastructure,
            management_url=vhost.broker.management_url,
            stream_port=stream_port(vhost.broker),
        )
        stream = taps_of(infrastructure).scheduled
        console_vhost.tap_indexes[stream] = TapIndex(stream, at_once=10)
        async with served(console_vhost) as url:
            await asyncio.to_thread(_read_older, Window(chromium, url), stream)


def _read_older(window: Window, stream: str) -> None:
    window.sign_in()
    window.open("find?text=m15")
    assert "Nothing was found" in window.text
    assert " are older" in window.text
    window.click("Search older messages")
    window.wait("document.body.innerText.includes('seen by the tap at')")
    window.wait("!document.body.innerText.includes('Search older messages')")
    # Not more was read than needed.
    assert " are older" in window.text
    window.open("find?text=m15")
    assert "seen by the tap at" in window.text

    window.open("waiting?tap=1")
    assert f" messages of {stream}, stored since" in window.text
    assert " older ones are not counted" in window.text
    window.click("Read older messages")
    window.wait(f"document.body.innerText.includes('30 messages of {stream}')")
    window.wait("!document.body.innerText.includes('Read older messages')")
    assert "30\nmessages" in window.text
    assert "are not counted" not in window.text


async def test_without_the_management_api_less_is_shown(vhost: Vhost) -> None:
    async with bide.connect(vhost.url) as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("mail")]))
        await client.publish(b"", to="mail", delay="1d")
        with console(vhost, environment={"BIDE_MANAGEMENT_URL": "http://127.0.0.1:1"}) as running:
            async with running.client() as page:
                levels = await page.get("levels")
                assert (levels["source"], levels["total"]) == ("amqp", 1)
                assert "no management API" in levels["why"]
                assert "no management API" in (await page.get("queues"))["why"]
                statuses = {one["check"]: one["status"] for one in (await page.get("findings"))["findings"]}
                assert statuses["bindings"] == "not checked"
                assert "there is no tap" in (await page.get("lateness"))["why"]
                assert "there is no tap" in (await page.get("tapped"))["tap"]["why"]


async def test_the_console_shows_several_virtual_hosts(vhost: Vhost, chromium: Browser) -> None:
    other = f"{vhost.name}-other"
    url = vhost.broker.add_vhost(other)
    try:
        async with bide.connect(url) as client:
            await client.declare(bide.Topology(queues=[bide.Queue.quorum("only-here.error")]))
        with console(vhost, "--vhost", vhost.name, "--vhost", other) as running:
            async with running.client() as page:
                assert [one["name"] for one in (await page.get("about"))["vhosts"]] == [vhost.name, other]
                names = [one["name"] for one in (await page.get("queues", vhost=other))["queues"]]
                assert names == ["only-here.error"]
                assert (await page.get("queues", vhost=vhost.name))["queues"] == []
                await page.get("queues", 404, vhost="third")
            await asyncio.to_thread(_change_vhost, Window(chromium, running.url), chromium, other)
    finally:
        vhost.broker.delete_vhost(other)


def _change_vhost(window: Window, chromium: Browser, other: str) -> None:
    window.sign_in()
    window.open("failures")
    has_queue = "[...document.querySelectorAll('main option')].some((one) => one.value === 'only-here.error')"
    assert not chromium.evaluate(has_queue)
    chromium.evaluate(f"document.querySelector('#top select').value = {json.dumps(other)}")
    chromium.evaluate("document.querySelector('#top select').dispatchEvent(new Event('change'))")
    window.wait(has_queue)
    # The links of the page stay in the virtual host.
    links = "[...document.querySelectorAll('#views a')].every((one) => one.hash.endsWith({}))"
    assert chromium.evaluate(links.format(json.dumps(f"vhost={other}")))


def test_what_cannot_work_ends_with_one_line(vhost: Vhost) -> None:
    program = Program(vhost)
    assert "--origin, --user-header and --allow-user" in program.fails(2, "console", "--allow-user", "ann")
    with console(vhost) as running:
        port = running.origin.rpartition(":")[2]
        assert f"port {port} cannot be used" in program.fails(2, "console", "--port", port)


def test_without_the_extra_one_line_names_it() -> None:
    program = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['bide', 'console']; from bide.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "bide: the console needs starlette and uvicorn: install them with pip install 'bide[console]'\n"
    )


def test_the_documentation_shows_what_the_command_prints(vhost: Vhost) -> None:
    page = (Path(__file__).parents[2] / "docs" / "console.md").read_text(encoding="utf-8")
    with console(vhost) as running:
        origin, token = running.url.split("#token=")
        assert len(token) == 32
        port = origin.rpartition(":")[2].rstrip("/")
        assert f"\nconsole on {origin.replace(port, '8642')}#token=...\n" in page
