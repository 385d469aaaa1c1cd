"""/v1/models, /v1/chat/completions, /v1/completions, /v1/feedback: each view translates, and makes one call."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from http import HTTPStatus
from typing import Any

from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from controlplane.gateway import replies
from controlplane.gateway.body import InvalidRequest
from controlplane.gateway.choices import Delta, Piece, join_pieces
from controlplane.gateway.exchange import (
    Exchange,
    RequestFailed,
    endpoint_not_allowed,
    queue_unavailable,
    unknown_model,
)
from controlplane.gateway.feedback import parse_feedback
from controlplane.gateway.parameters import Call, Kind, Origin, parse
from controlplane.gateway.runtime import Visit, visit
from inference.client import QueueUnavailable
from inference.protocol import Failure

PING_S = 15.0

logger = logging.getLogger(__name__)

View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]


def allow(*methods: str) -> Callable[[View], View]:
    """Answer other methods, and every failure that a view raises, in OpenAI's error shape."""

    def decorate(view: View) -> View:
        @wraps(view)
        async def answer(request: ASGIRequest, **kwargs: str) -> HttpResponseBase:
            if request.method not in methods:
                return _method_not_allowed(request, methods)
            try:
                return await view(request, **kwargs)
            except InvalidRequest as error:
                return _error(Failure(error.code, error.message, error.status, error.param))
            except RequestFailed as error:
                return _error(error.failure)
            except QueueUnavailable:
                return _error(queue_unavailable())

        return answer

    return decorate


@allow("GET", "HEAD")
async def models(request: ASGIRequest) -> HttpResponseBase:
    """The endpoints that the caller may use."""
    return _json(replies.model_list(await _endpoints(visit(request))))


@allow("GET", "HEAD")
async def model(request: ASGIRequest, name: str) -> HttpResponseBase:
    """One endpoint that the caller may use, else 403 or 404."""
    here = visit(request)
    if not here.caller.record.allows(name):
        raise RequestFailed(endpoint_not_allowed(name))
    if name not in await _endpoints(here):
        raise RequestFailed(unknown_model(name))
    return _json(replies.model(name))


@allow("POST")
async def chat_completions(request: ASGIRequest) -> HttpResponseBase:
    """The next turn of a conversation."""
    return await _complete(request, Kind.CHAT)


@allow("POST")
async def completions(request: ASGIRequest) -> HttpResponseBase:
    """The continuation of a prompt."""
    return await _complete(request, Kind.COMPLETION)


@allow("POST")
async def feedback(request: ASGIRequest) -> HttpResponseBase:
    """What a caller thinks of an answer: taken down now, and joined to its request later."""
    here = visit(request)
    record = parse_feedback(request.body, key_id=here.caller.key_id, now=time.time())
    here.runtime.client.record(record)
    reply = HttpResponse(replies.feedback(record), content_type="application/json")
    reply.status_code = HTTPStatus.ACCEPTED
    return reply


async def unknown_path(_request: ASGIRequest) -> HttpResponseBase:
    """Everything that is not served."""
    return _error(
        Failure(
            code="unknown_url",
            message="Unknown request URL. Served are /v1/models, /v1/chat/completions, /v1/completions and /v1/feedback.",
            status=HTTPStatus.NOT_FOUND,
        )
    )


def bad_request(_request: HttpRequest, **_details: object) -> HttpResponse:
    """What Django itself finds wrong with a request."""
    return _error(
        Failure("bad_request", "The request is malformed.", status=HTTPStatus.BAD_REQUEST)
    )


def server_error(request: ASGIRequest) -> HttpResponse:
    """A fault of ours. Django has logged its traceback; the reply tells nothing of it."""
    logger.error("request failed request=%s", visit(request).request_id)
    return _error(
        Failure(
            code="server_error",
            message="The server had an error while it processed your request.",
            status=HTTPStatus.INTERNAL_SERVER_ERROR,
        )
    )


async def _endpoints(here: Visit) -> list[str]:
    names = await here.runtime.client.endpoints()
    return sorted(name for name in names if here.caller.record.allows(name))


async def _complete(request: ASGIRequest, kind: Kind) -> HttpResponseBase:
    here = visit(request)
    origin = Origin(here.request_id, here.caller.key_id, here.runtime.deadline_s)
    call = parse(kind, request.body, origin)
    if not here.caller.record.allows(call.request.endpoint):
        raise RequestFailed(endpoint_not_allowed(call.request.endpoint))
    exchange = here.runtime.exchange(call, here.exits)
    try:
        response = await _answer(exchange, call)
    except RequestFailed as error:
        response = _error(error.failure)
    if exchange.is_known_endpoint:
        here.state["endpoint"] = call.request.endpoint
    return _with_placement(response, exchange)


async def _answer(exchange: Exchange, call: Call) -> HttpResponseBase:
    """Hold the reply until the first rows: a failure before them is an HTTP status, and the version is final."""
    await exchange.open()
    first = await exchange.read()
    request = call.request
    header = replies.Header(
        call.kind,
        request.id,
        int(time.time()),
        model=request.endpoint,
        with_logprobs=request.sampling.logprobs is not None,
        text_start=len(request.prompt or ""),
    )
    if not call.stream:
        return await _whole(exchange, header, first)
    chunks = replies.Chunks(header, n=request.n, include_usage=call.include_usage)
    response = StreamingHttpResponse(
        _events(exchange, chunks, first), content_type="text/event-stream; charset=utf-8"
    )
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"
    return response


async def _whole(exchange: Exchange, header: replies.Header, delta: Delta | None) -> HttpResponse:
    pieces: list[Piece] = []
    while True:
        if delta is not None:
            pieces += delta.pieces
            if delta.finished is not None:
                return _json(replies.whole_answer(header, join_pieces(pieces), delta.finished))
        delta = await exchange.read()


async def _events(
    exchange: Exchange, chunks: replies.Chunks, delta: Delta | None
) -> AsyncIterator[bytes]:
    """The stream from its first rows on. It ends with a reason for each choice and ``[DONE]``, or with an error."""
    start = chunks.start()
    try:
        while True:
            if delta is None:
                yield replies.PING
            elif data := start + b"".join([chunks.piece(each) for each in delta.pieces]):
                start = b""
                yield data + (chunks.finish(delta.finished) if delta.finished else b"")
            if delta is not None and delta.finished is not None:
                return
            delta = await exchange.read(PING_S)
    except RequestFailed as error:
        yield replies.error_event(error.failure)


def _with_placement(response: HttpResponseBase, exchange: Exchange) -> HttpResponseBase:
    if (placement := exchange.placement) is not None:
        response["X-Model-Version"] = placement.version
        response["X-Tatkal-Generation"] = str(placement.generation)
    return response


def _method_not_allowed(request: ASGIRequest, methods: tuple[str, ...]) -> HttpResponse:
    response = _error(
        Failure(
            code="method_not_allowed",
            message=f"Not allowed to {request.method} on {request.path}; use {methods[0]}.",
            status=HTTPStatus.METHOD_NOT_ALLOWED,
        )
    )
    response["Allow"] = ", ".join(methods)
    return response


def _json(content: bytes) -> HttpResponse:
    return HttpResponse(content, content_type="application/json")


def _error(failure: Failure) -> HttpResponse:
    return HttpResponse(**replies.error_reply(failure))
