"""The web application of the console."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from bide.console import failures, health, history, lateness, schedules, search, waiting
from bide.console.parameters import Parameters
from bide.console.security import SIGN_IN_PATH, Guard, csrf_token, session_cookie
from bide.console.settings import Access
from bide.console.vhost import ConsoleVhost
from bide.error_queues.operator_log import this_operator
from bide.errors import BideError, InvalidInputError, NotFoundError, TargetNotFoundError
from bide.runtime.logs import logger
from bide.version import VERSION

log = logger(__name__)

Handler = Callable[[ConsoleVhost, Parameters], Awaitable[dict[str, Any]]]

READS: Final[Mapping[str, Handler]] = {
    "timeline": waiting.timeline,
    "levels": waiting.levels,
    "tapped": waiting.tap_timeline,
    "find": search.find,
    "find/taps": search.find_in_taps,
    "schedules": schedules.listing,
    "schedules/count": schedules.count,
    "schedule": schedules.details,
    "queues": failures.queues,
    "failures": failures.groups,
    "failures/messages": failures.messages,
    "failures/count": failures.count,
    "failure": failures.details,
    "operations": failures.operations,
    "findings": health.findings,
    "undeliverable": health.undeliverable,
    "lateness": lateness.lateness,
    "history": history.history,
}
"""The handlers of GET requests, by path below ``/api/``."""

CHANGES: Final[Mapping[str, Handler]] = {
    "schedule/change": schedules.change,
    "schedule/edit": schedules.edit,
    "schedules/change": schedules.change_all,
    "failures/retry": failures.retry,
    "failures/discard": failures.discard,
    "failures/archive": failures.archive,
    "failure/edit": failures.edit,
    "operations/stop": failures.stop,
    "undeliverable/resend": health.resend,
}
"""The handlers of POST requests, by path below ``/api/``. They need a CSRF token."""

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_MAX_REQUEST: Final = 1_000_000
"""The maximum size of the body of a request, in bytes."""


def make_app(vhosts: Sequence[ConsoleVhost], access: Access, advise: Callable[[str], str] = str) -> ASGIApp:
    """Create the application.

    Args:
        vhosts: the connected virtual hosts. The page shows the first one by default.
        advise: rewrites the texts of errors and findings, to name commands and options instead of Python calls.
    """
    named = {one.name: one for one in vhosts}

    async def about(request: Request) -> Response:
        user = request.scope["bide.user"]
        values = {
            "version": VERSION,
            "read_only": access.is_read_only,
            "user": user,
            "csrf": csrf_token(access, user),
            "vhosts": [{"name": one.name, "broker": str(one.url), "layout": one.infrastructure.name} for one in vhosts],
        }
        return JSONResponse(values)

    async def sign_in(request: Request) -> Response:
        values = await _body(request)
        cookie = session_cookie(access, str(values.get("token", "")))
        if cookie is None:
            return JSONResponse({"error": "this is not the token that 'bide console' printed"}, 403)
        return JSONResponse({}, headers={"set-cookie": cookie})

    routes = [Route("/api/about", about), Route(SIGN_IN_PATH, _answering(sign_in, advise), methods=["POST"])]
    routes += [
        Route(f"/api/{path}", _handled(handler, named, advise, is_change=False)) for path, handler in READS.items()
    ]
    routes += [
        Route(f"/api/{path}", _handled(handler, named, advise, is_change=True), methods=["POST"])
        for path, handler in CHANGES.items()
    ]
    routes += [Route("/", _static_file("index.html"))]
    routes += [Route(f"/{name}", _static_file(name)) for name in _page_files()]
    return Guard(Starlette(routes=routes), access)


def _page_files() -> list[str]:
    folder = files("bide.console") / "page"
    return sorted(one.name for one in folder.iterdir() if one.name.rpartition(".")[2] in _TYPES)


def _static_file(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files("bide.console") / "page" / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]

    async def serve(_: Request) -> Response:
        return Response(content, media_type=kind)

    return serve


def _handled(
    handler: Handler, vhosts: Mapping[str, ConsoleVhost], advise: Callable[[str], str], *, is_change: bool
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        values = await _body(request) if is_change else dict(request.query_params)
        name = values.pop("vhost", None)
        vhost = vhosts.get(str(name)) if name is not None else next(iter(vhosts.values()))
        if vhost is None:
            raise NotFoundError(f"this console has no virtual host {name!r}: start it with --vhost {name}")
        parameters = Parameters(values=values, operator=operator_of(str(request.scope["bide.user"])), advise=advise)
        return JSONResponse(await handler(vhost, parameters))

    return _answering(handle, advise)


def operator_of(user: str) -> str:
    """The name in the operator log, for a user that a proxy signed in; without a proxy, the user is empty."""
    return f"{user} (console of {this_operator()})" if user else f"console of {this_operator()}"


def _answering(
    handle: Callable[[Request], Awaitable[Response]], advise: Callable[[str], str]
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint, so that its errors become JSON responses."""

    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except InvalidInputError as error:
            return _failed(error, 400, advise)
        except (NotFoundError, TargetNotFoundError) as error:
            return _failed(error, 404, advise)
        except BideError as error:
            return _failed(error, 502, advise)
        except Exception as error:
            log.exception("the request for %s failed", request.url.path)
            return JSONResponse({"error": f"internal error: {type(error).__name__}", "kind": "internal"}, 500)

    return answer


def _failed(error: BideError, status: int, advise: Callable[[str], str]) -> Response:
    return JSONResponse({"error": advise(str(error)), "kind": type(error).__name__}, status)


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        InvalidInputError: the body is too long, or not a JSON object.
    """
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MAX_REQUEST:
            raise InvalidInputError(
                f"the body of the request is longer than {_MAX_REQUEST:,} bytes: send a shorter one"
            )
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body of the request is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInputError("the body of the request is not a JSON object")
    return found
