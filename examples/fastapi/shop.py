# shop.py
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse

import bide


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with bide.connect(timeout="5s", wait="60s") as client:
        await client.declare(bide.Topology(queues=[bide.Queue.quorum("mail")]))
        app.state.client = client
        yield


def client_of(request: Request) -> bide.Client:
    client: bide.Client = request.app.state.client
    return client


Broker = Annotated[bide.Client, Depends(client_of)]
app = FastAPI(lifespan=lifespan)


@app.put("/orders/{number}", status_code=201)
async def order(number: int, client: Broker) -> dict[str, int]:
    await client.schedule(json={"reminder": number}, key=f"order:{number}", to="mail", delay="3d")
    await client.publish(json={"receipt": number}, to="mail", delay="1s")
    return {"order": number}


@app.post("/orders/{number}/payment")
async def pay(number: int, client: Broker) -> dict[str, str]:
    result = await client.cancel(f"order:{number}")
    return {"reminder": result.outcome.value}


@app.get("/health")
async def health(client: Broker) -> JSONResponse:
    return JSONResponse({"broker": client.connected}, 200 if client.connected else 503)


@app.exception_handler(bide.errors.BrokerError)
@app.exception_handler(bide.errors.NoGateAnswerError)
async def unavailable(request: Request, error: bide.errors.BideError) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 503)
