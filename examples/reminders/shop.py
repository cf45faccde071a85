"""A shop whose customers get a reminder unless they pay: a web application on schedules.

docs/reminders.md shows how to run it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import bide
from bide import ScheduleOutcome
from bide.errors import NoGateAnswerError

REMIND_AFTER = os.environ.get("REMIND_AFTER", "3d")
ORDERS: dict[int, dict[str, object]] = {}  # in place of a database


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with bide.connect(timeout="5s") as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("reminders")]))
        app.state.client = client
        yield


def order_of(request: Request) -> tuple[bide.Client, int, str]:
    number = request.path_params["number"]
    if number not in ORDERS:
        raise HTTPException(404, f"there is no order {number}")
    return request.app.state.client, number, f"invoice:{number}"


async def create(request: Request) -> JSONResponse:
    number = request.path_params["number"]
    ORDERS.setdefault(number, {**await request.json(), "paid": False})
    client, _, key = order_of(request)
    reminder = {"kind": "reminder", "order": number, **ORDERS[number]}
    # A repeated request replaces the reminder of the first one, so there is one in any case.
    made = await client.schedule(json=reminder, key=key, to="reminders", delay=REMIND_AFTER)
    if ORDERS[number]["paid"]:  # maybe before the reminder was scheduled, so that the payment cancelled nothing
        await client.cancel(key)
        raise HTTPException(409, f"order {number} is paid")
    return JSONResponse({"order": number, "reminder": made.outcome.value}, 201)


async def show(request: Request) -> JSONResponse:
    client, number, key = order_of(request)
    found = await client.scheduled(key)
    return JSONResponse({"order": number, **ORDERS[number], "reminder": found and found.state})


async def pay(request: Request) -> JSONResponse:
    client, number, key = order_of(request)
    was_paid, ORDERS[number]["paid"] = ORDERS[number]["paid"], True
    try:
        result = await client.cancel(key)
    except NoGateAnswerError:
        # The cancel is in the log, and takes effect when a gate reads it. The payment does not wait for that.
        return JSONResponse({"order": number, "paid": True, "reminder": "unknown"}, 202)
    match result.outcome:
        case ScheduleOutcome.CANCELLED:
            text = "thank you"
        case ScheduleOutcome.TOO_LATE if not was_paid:
            text = "thank you, please ignore our reminder"
            await client.publish(json={"kind": "apology", "order": number, **ORDERS[number]}, to="reminders")
        case _:  # The payment was repeated, or the reminder was delivered so long ago that gates have forgotten it.
            text = "thank you"
    return JSONResponse({"order": number, "paid": True, "reminder": result.outcome.value, "text": text})


async def extend(request: Request) -> JSONResponse:
    client, number, key = order_of(request)
    result = await client.reschedule(key, delay=(await request.json())["delay"])
    status = 200 if result.outcome is ScheduleOutcome.MOVED else 409
    return JSONResponse({"order": number, "reminder": result.outcome.value}, status)


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/orders/{number:int}", create, methods=["PUT"]),
        Route("/orders/{number:int}", show),
        Route("/orders/{number:int}/payment", pay, methods=["POST"]),
        Route("/orders/{number:int}/reminder", extend, methods=["PUT"]),
    ],
)
