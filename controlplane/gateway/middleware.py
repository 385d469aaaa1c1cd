"""The one middleware of a gateway: bearer key -> caller. It is async, because a sync one costs a thread hop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import async_only_middleware

from controlplane.access.cache import Caller, InvalidKey
from controlplane.gateway.exchange import queue_unavailable
from controlplane.gateway.replies import error_reply
from controlplane.gateway.runtime import visit
from controlplane.health import PATHS
from inference.client import QueueUnavailable
from inference.protocol import Failure

GetResponse = Callable[[ASGIRequest], Awaitable[HttpResponseBase]]


@async_only_middleware
def authenticate(get_response: GetResponse) -> GetResponse:
    """Let probes pass, and everything else only with a valid key."""

    async def middleware(request: ASGIRequest) -> HttpResponseBase:
        if request.path in PATHS:
            return await get_response(request)
        here = visit(request)
        try:
            here.state["caller"] = await _check(request, here.runtime.keys.check)
        except InvalidKey as error:
            failure = Failure(code=error.code, message=error.message, status=error.status)
            return HttpResponse(**error_reply(failure))
        except QueueUnavailable:
            return HttpResponse(**error_reply(queue_unavailable()))
        return await get_response(request)

    return middleware


async def _check(request: ASGIRequest, check: Callable[[str], Awaitable[Caller]]) -> Caller:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("You didn't provide an API key. Send it as: Authorization: Bearer KEY.")
    return await check(key.strip())
