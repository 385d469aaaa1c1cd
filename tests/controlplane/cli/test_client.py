"""The client of the control API: pages followed, errors told in the server's words."""

from __future__ import annotations

import json

import httpx
import pytest

from controlplane.cli.client import ApiError, ControlClient, complete

URL = "http://control.test"


def client(answer: httpx.MockTransport) -> ControlClient:
    return ControlClient(URL, "ct-tatkal-x", transport=answer)


def problem(status: int, detail: str) -> httpx.Response:
    return httpx.Response(status, json={"detail": detail, "code": "x"})


def test_every_page_is_followed_with_the_token() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer ct-tatkal-x"
        if "cursor" in request.url.params:
            return httpx.Response(200, json={"next": None, "results": [model("b")]})
        following = f"{URL}/api/v1/models?cursor=2"
        return httpx.Response(200, json={"next": following, "results": [model("a")]})

    def model(name: str) -> dict[str, str]:
        return {"name": name, "description": "", "created_at": "2026-03-01T12:00:00Z"}

    assert [row.name for row in client(httpx.MockTransport(answer)).models()] == ["a", "b"]


def test_an_endpoint_whose_roles_are_unknown_says_so() -> None:
    row = {
        "name": "chat",
        "generation": 3,
        "is_published": True,
        "canary_bp": 0,
        "roles": None,
        "of a later release": 1,
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=row))
    assert client(transport).endpoint("chat").roles is None


def test_moves_send_what_was_given_and_nothing_else() -> None:
    sent: list[tuple[str, str, object]] = []
    done = {
        "generation": 3,
        "live": "tiny/2",
        "previous": None,
        "changed": True,
        "published": False,
        "requeued": None,
        "in_flight": None,
        "applied_in_ms": None,
        "of a later release": 1,
    }
    row = {"name": "chat", "generation": 4, "is_published": True, "canary_bp": 5, "roles": None}

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append((request.method, request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=row if request.method == "PATCH" else done)

    control = client(httpx.MockTransport(answer))
    assert control.promote("chat", "tiny/2", reason="better").published is False
    control.rollback("chat", leave="tiny/2", force=True)
    assert control.set_candidate("chat", None).generation == 4
    control.set_candidate("chat", "tiny/3", canary_bp=5)
    address = "/api/v1/endpoints/chat"
    assert sent == [
        ("POST", f"{address}/promote", {"version": "tiny/2", "reason": "better"}),
        ("POST", f"{address}/rollback", {"from": "tiny/2", "reason": "", "force": True}),
        ("PATCH", address, {"candidate": None, "reason": ""}),
        ("PATCH", address, {"candidate": "tiny/3", "canary_bp": 5, "reason": ""}),
    ]


def test_a_problem_is_told_in_the_servers_words() -> None:
    transport = httpx.MockTransport(lambda request: problem(403, "The role does not allow that."))
    with pytest.raises(ApiError, match=r"403 The role does not allow that.") as caught:
        client(transport).models()
    assert caught.value.status == 403


def test_nobody_there_is_status_zero() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(ApiError, match="connection refused") as caught:
        client(httpx.MockTransport(refuse)).models()
    assert caught.value.status == 0


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"null"])
def test_an_error_without_a_readable_body_is_still_told(body: bytes) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(502, content=body))
    with pytest.raises(ApiError, match="502 Bad Gateway"):
        client(transport).models()


def test_a_success_that_is_no_json_is_an_error() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text="hello"))
    with pytest.raises(ApiError, match="did not answer with JSON"):
        client(transport).models()


def test_a_completion_is_asked_for_and_its_text_returned() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200, json={"ready": True})
        assert request.url.path == "/v1/chat/completions"
        assert b'"model":"smollm2"' in request.content.replace(b" ", b"")
        return httpx.Response(200, json={"choices": [{"message": {"content": "Hello!"}}]})

    text = complete(URL, "sk-tatkal-x", "smollm2", transport=httpx.MockTransport(answer))
    assert text == "Hello!"


def test_a_gateway_that_is_not_ready_is_asked_for_nothing() -> None:
    paths = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(503, json={"ready": False})

    with pytest.raises(ApiError):
        complete(URL, "sk-tatkal-x", "smollm2", transport=httpx.MockTransport(answer))
    assert paths == ["/readyz"]


def test_an_openai_error_is_told_by_its_message() -> None:
    error = {"error": {"message": "No engine slot is ready.", "code": "no_ready_slot"}}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/readyz" else 503, json=error)

    transport = httpx.MockTransport(answer)
    with pytest.raises(ApiError, match=r"503 No engine slot is ready."):
        complete(URL, "sk-tatkal-x", "smollm2", transport=transport)
