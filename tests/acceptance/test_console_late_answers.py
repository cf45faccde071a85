"""Late answers in the page of ``bide console``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

import bide
from tests.broker.receiving import until_ready
from tests.broker.schedule_log import gating
from tests.browser import Browser
from tests.console import BUTTON, Window, console, fill, press
from tests.support import Vhost

HOLD: Final = """
(real => {
    window.held = [];
    window.shown = 0;
    window.fetch = async (...given) => {
        if (!given[0].startsWith(PATH)) return real(...given);
        const answer = await new Promise(done => held.push(done)) ?? await real(...given);
        const text = await answer.text();
        // The page reads its copy, and draws, first.
        setTimeout(() => new Response(text).text().then(() => setTimeout(() => shown++)));
        return new Response(text, answer);
    };
})(window.fetch)
"""
"""Hold up the answers of one path. ``held`` has a function for each, which lets it go on, or gives another answer."""

ERROR: Final = "new Response(JSON.stringify({ error: 'the gate refused' }), { status: 400 })"


async def test_a_late_answer_does_not_change_the_current_view(vhost: Vhost, chromium: Browser, tmp_path: Path) -> None:
    async with bide.connect(vhost.url) as client, gating(vhost.url, tmp_path / "gate"):
        await fill(client)
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("error")]))
        for _ in range(2):
            await client.publish(b"text", to="error")
        with console(vhost, has_gate=True) as running:
            await asyncio.to_thread(_check_late_answers, Window(chromium, running.url), chromium)
        # One was sent back, and no other change was confirmed but a pause.
        await until_ready(vhost.url, "error", 1)
        assert await client.count_scheduled(prefix="") == 22


def _hold(window: Window, chromium: Browser, view: str, path: str) -> None:
    window.open(view)
    chromium.evaluate(HOLD.replace("PATH", json.dumps(f"api/{path}")))


def _leave(window: Window, chromium: Browser, answer: str = "") -> None:
    """Type into another view before the answer comes."""
    window.wait("held.length === 1")
    chromium.evaluate("location.hash = '#/find'")
    window.wait("document.title === 'Find a message · bide console' && !!document.querySelector('main input')")
    chromium.evaluate("document.querySelector('main input').value = 'typed'")
    chromium.evaluate(f"held.pop()({answer})")


def _check_late_answers(window: Window, chromium: Browser) -> None:
    typed = "document.querySelector('main input')?.value"
    dialogs = "document.querySelectorAll('dialog').length"
    window.sign_in()

    _hold(window, chromium, "schedules?key=digest", "schedule/change")
    window.click("Pause")
    _leave(window, chromium)
    window.wait("document.querySelector('#toasts').innerText.includes('digest: paused')")
    assert chromium.evaluate(typed) == "typed"

    window.open("failures?queue=error")
    view = "[...document.querySelectorAll('td a.button')].find(one => one.innerText === 'View').hash.slice(2)"
    _hold(window, chromium, chromium.evaluate(view), "failure/edit")
    window.click("Edit")
    window.wait("!!document.querySelector('dialog [name=to]')")
    chromium.evaluate("document.querySelector('dialog [name=to]').value = 'reminders'")
    window.click("Send back", "dialog")
    window.wait("held.length === 1")
    press(chromium, "Escape")
    _leave(window, chromium)
    window.wait("document.querySelector('#toasts').innerText.includes('sent back as')")
    assert chromium.evaluate(typed) == "typed"

    for view, path, button in (
        ("failures?queue=error", "failures/count", "Discard all"),
        ("failures?queue=error", "failures/count", "Archive all"),
        ("failures?queue=error", "failures/count", "Retry all"),
        ("many?prefix=invoice%3A&count=1", "schedules/count", "Cancel"),
    ):
        _hold(window, chromium, view, path)
        window.click(button)
        _leave(window, chromium)
        window.wait("shown === 1")
        assert chromium.evaluate(dialogs) == 0, button
        assert chromium.evaluate(typed) == "typed"

    # Further clicks while the schedules are counted open no second dialog.
    _hold(window, chromium, "many?prefix=invoice%3A&count=1", "schedules/count")
    for button in ("Run now", "Run now", "Cancel"):
        chromium.evaluate(f"{BUTTON.format(button)}.click()")
    window.wait("held.length === 2")
    chromium.evaluate("held.forEach(one => one())")
    window.wait("shown === held.length")
    window.wait(f"{dialogs} === 1")

    # An error is shown although its dialog was closed.
    _hold(window, chromium, "schedules?key=digest", "schedule/change")
    window.click("Run now")
    window.click("Run now", "dialog")
    window.wait("held.length === 1")
    press(chromium, "Escape")
    window.wait(f"{dialogs} === 0")
    chromium.evaluate(f"held.pop()({ERROR})")
    window.wait("document.querySelector('#toasts').innerText.includes('the gate refused')")
