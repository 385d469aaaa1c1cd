"""The gateway's promises on the wire: raw bytes, clients that leave, faults in the middle, errors in one shape."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.gateway import views
from inference.client import QueueUnavailable
from inference.protocol import Failure
from tests.controlplane.gateway.conftest import Served
from tests.controlplane.gateway.fakes import (
    ENDPOINT,
    HANG,
    KEY,
    VERSION,
    Step,
    failure_row,
    last_row,
    text_row,
)

CHAT: dict[str, Any] = {"model": ENDPOINT, "messages": [{"role": "user", "content": "Hi"}]}
CANARY = "canary-0e7b1c"


def raw_request(path: str, body: dict[str, Any], *headers: str) -> bytes:
    """One request as bytes."""
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {KEY}",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Everything up to and with ``mark``, or to the end of the connection."""
    seen = b""
    while mark not in seen and (data := connection.recv(65536)):
        seen += data
    return seen


def events_of(content: bytes) -> list[str]:
    """The data of each server-sent event."""
    blocks = content.decode().split("\n\n")
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


def test_a_stream_is_these_bytes(gateway: Served) -> None:
    gateway.fake.script = [[text_row(0, "Hé")], [last_row(1, "!")]]
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    with gateway.http() as client:
        response = client.post("/v1/chat/completions", json=body)

    *chunks, usage, done = events_of(response.content)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    first = json.loads(chunks[0])
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[1:]] == [
        {"content": "Hé"},
        {"content": "!"},
        {},
    ]
    assert json.loads(usage)["choices"] == []
    assert done == "[DONE]"
    assert response.content.isascii()


def test_a_fault_in_the_middle_sends_an_error_and_no_done(gateway: Served) -> None:
    gateway.fake.script = [[text_row(0, "Hel")], [failure_row(1, Failure("gap", "Lost.", 502))]]
    with gateway.http() as client:
        response = client.post("/v1/chat/completions", json={**CHAT, "stream": True})

    *_, last = events_of(response.content)
    assert json.loads(last) == {
        "error": {"message": "Lost.", "type": "server_error", "param": None, "code": "gap"}
    }
    assert b"[DONE]" not in response.content
    assert b'"finish_reason":"' not in response.content


def test_rows_that_end_without_a_last_one_are_a_visible_error(gateway: Served) -> None:
    gateway.fake.script = [[text_row(0, "Hel")]]
    with gateway.http() as client:
        streamed = client.post("/v1/completions", json=_prompt(stream=True))
        whole = client.post("/v1/completions", json=_prompt())

    assert json.loads(events_of(streamed.content)[-1])["error"]["code"] == "stream_interrupted"
    assert whole.status_code == 502


def test_a_waiting_stream_is_kept_alive_by_comments(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "PING_S", 0.05)
    gateway.fake.script = [[text_row(0, "a")], 0.3, [text_row(1, "b")], [last_row(2)]]
    with gateway.http() as client:
        response = client.post("/v1/chat/completions", json={**CHAT, "stream": True})

    assert response.content.count(b": ping\n\n") >= 2
    texts = [json.loads(event)["choices"][0]["delta"] for event in events_of(response.content)[:-1]]
    assert [text.get("content") for text in texts] == ["", "a", "b", None]


def test_no_byte_is_sent_before_the_first_row(gateway: Served) -> None:
    gateway.fake.script = [0.2, [last_row(0, "x")]]
    with gateway.connect() as connection:
        connection.sendall(raw_request("/v1/chat/completions", {**CHAT, "stream": True}))
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(5)
        assert read_until(connection, b"[DONE]").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [[HANG], [[text_row(0, "a")], HANG]], ids=["waiting", "midway"])
def test_a_client_that_leaves_cancels_at_once(
    gateway: Served, script: list[Any], stream: bool
) -> None:
    gateway.fake.script = script
    connection = gateway.connect()
    connection.sendall(raw_request("/v1/chat/completions", {**CHAT, "stream": stream}))
    if stream and len(script) > 1:
        read_until(connection, b'"content":"a"')
    else:
        _wait_until(lambda: bool(gateway.fake.requests))
        time.sleep(0.05)

    left_at = time.monotonic()
    connection.close()

    assert gateway.fake.left.wait(5)
    assert gateway.fake.left_at[0] - left_at < 0.1
    record = gateway.fake.wait_for_records()[0]
    assert (record.outcome, record.status, record.version) == ("cancelled", 499, VERSION)
    assert (record.first_token_s is None) is (len(script) == 1)


def test_every_one_of_many_leaving_clients_cancels(gateway: Served) -> None:
    pace: list[Step] = [0.001, [text_row(1, "b")]]
    gateway.fake.script = [[text_row(0, "a")], *pace * 2000, HANG]
    connections = [gateway.connect() for _ in range(30)]
    for connection in connections:
        connection.sendall(raw_request("/v1/chat/completions", {**CHAT, "stream": True}))
    for connection in connections:
        read_until(connection, b'"content":"a"')
        connection.close()

    records = gateway.fake.wait_for_records(30)
    assert {record.outcome for record in records} == {"cancelled"}
    assert len(gateway.fake.left_at) == 30
    _wait_until(lambda: not gateway.runtime.exchanges)


def test_two_requests_on_one_connection_are_answered_in_turn(gateway: Served) -> None:
    one = raw_request("/v1/completions", _prompt())
    two = raw_request("/v1/completions", _prompt(), "Connection: close")
    with gateway.connect() as connection:
        connection.sendall(one + two)
        seen = read_until(connection, b"never")

    assert seen.count(b"HTTP/1.1 200 OK") == 2
    ids = [request.id.encode() for request in gateway.fake.requests]
    assert seen.index(ids[0]) < seen.index(ids[1])


def test_the_callers_request_id_is_never_used(gateway: Served) -> None:
    with gateway.http() as client:
        replies = [
            client.post("/v1/completions", json=_prompt(), headers={"x-request-id": "same"})
            for _ in range(2)
        ]

    ids = {reply.headers["x-request-id"] for reply in replies}
    assert ids == {request.id for request in gateway.fake.requests}
    assert len(ids) == 2
    assert "same" not in ids


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
        ("GET", "/v1/models/%00%ff%0d", 404, "model_not_found"),
        ("GET", "/v1/%0d%0ax-injected:%20yes", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/models/", 404, "unknown_url"),
        ("GET", "/admin/", 404, "unknown_url"),
    ],
)
def test_other_methods_and_paths_are_refused_in_openais_shape(
    gateway: Served, method: str, path: str, status: int, code: str
) -> None:
    with gateway.http() as client:
        response = client.request(method, path)

    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "x-request-id" in response.headers


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/nowhere"])
@pytest.mark.parametrize("header", [None, "", "Basic eA==", "Bearer", f"Bearer {KEY},{KEY}", KEY])
def test_without_a_good_key_nothing_is_told(gateway: Served, path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    with gateway.http(key=None) as client:
        response = client.get(path, headers=headers)

    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_without_redis_keys_and_models_are_503(gateway: Served) -> None:
    gateway.fake.read_error = QueueUnavailable("down")
    with gateway.http() as client:
        unchecked = client.get("/v1/models")
        gateway.fake.read_error = None
        assert client.get("/v1/models").status_code == 200
        gateway.fake.read_error = QueueUnavailable("down")
        checked = client.get("/v1/models")

    for response in (unchecked, checked):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.json()["error"]["type"] == "overloaded_error"


def test_a_fault_of_ours_is_a_500_that_tells_nothing(
    gateway: Served, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.fake.refusals = [RuntimeError("/usr/lib/secret 0xdeadbeef")]
    with gateway.http() as client:
        response = client.post("/v1/chat/completions", json=CHAT)

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-should-retry"] == "false"


def test_prompts_answers_and_keys_stay_out_of_the_logs(
    gateway: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway.fake.store_texts = True
    gateway.fake.script = [[last_row(0, CANARY)]]
    body = {"model": ENDPOINT, "messages": [{"role": "user", "content": CANARY}]}
    with gateway.http() as client:
        client.post("/v1/chat/completions", json=body)
        client.post("/v1/chat/completions", json={**body, CANARY: CANARY})
        client.post("/v1/chat/completions", json={**body, "temperature": CANARY})
        client.post("/v1/chat/completions", content=CANARY)
        gateway.fake.refusals = [RuntimeError("a fault of ours")]
        client.post("/v1/chat/completions", json=body)
    gateway.fake.wait_for_records(2)

    ours = [record for record in caplog.records if not record.name.startswith(("http", "hpack"))]
    text = "\n".join(logging.Formatter().format(record) for record in ours)
    assert "a fault of ours" in text, "The log was not captured."
    assert CANARY not in text
    assert KEY not in text


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *("model", "messages", "prompt", "stop", "logit_bias", "stream", "stream_options", "user"),
        *("metadata", "temperature", "max_tokens", "seed", "n", "tools", "top_k", "zzz"),
    ]
)


@pytest.mark.slow
def test_no_json_body_is_ever_a_500(gateway: Served) -> None:
    @settings(max_examples=200, deadline=None)
    @given(changes=st.dictionaries(NAMES, JSON, max_size=3), kind=st.sampled_from(["chat/", ""]))
    def post(changes: dict[str, Any], kind: str) -> None:
        body = json.dumps({**(CHAT if kind else _prompt()), **changes})
        response = client.post(f"/v1/{kind}completions", content=body)
        assert response.status_code in (200, 400, 404)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    with gateway.http() as client:
        post()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"model": NaN}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"metadata":' * 50_000,
        '{"model": "x"}'.encode("utf-16"),
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
    ],
)
def test_a_body_that_is_no_request_is_a_400(gateway: Served, content: bytes) -> None:
    with gateway.http() as client:
        response = client.post("/v1/chat/completions", content=content)

    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_probes_need_no_key_and_tell_what_is_wrong(gateway: Served) -> None:
    with gateway.http(key=None) as client:
        assert client.get("/livez").json() == {"status": "ok"}
        assert client.get("/readyz").status_code == 200
        assert client.get("/startupz").status_code == 200
        gateway.fake.names = []
        unready = client.get("/readyz")
        assert client.get("/startupz").status_code == 200

    assert unready.status_code == 503
    assert unready.json()["checks"]["slots"] == {
        "ok": False,
        "detail": "No endpoint has a ready engine slot.",
    }


def test_metrics_count_by_known_endpoint_and_status(gateway: Served) -> None:
    with gateway.http() as client:
        client.post("/v1/chat/completions", json=CHAT)
        client.post("/v1/chat/completions", json={**CHAT, "model": "invented"})
        # A request is counted after its reply has gone out; then this one alone is in flight.
        seen = (
            'tatkal_http_requests_total{endpoint="",status="404"} 1.0',
            "tatkal_http_requests_in_flight 1.0",
        )
        text = ""

        def is_counted() -> bool:
            nonlocal text
            text = client.get("/metrics").text
            return all(line in text for line in seen)

        _wait_until(is_counted)

    labels = f'endpoint="{ENDPOINT}",version="{VERSION}"'
    assert f'tatkal_http_requests_total{{endpoint="{ENDPOINT}",status="200"}} 1.0' in text
    assert f"tatkal_request_generation_tokens_sum{{{labels}}} 3.0" in text
    assert f"tatkal_time_to_first_token_seconds_count{{{labels}}} 1.0" in text
    assert f"tatkal_inter_token_latency_seconds_count{{{labels}}}" in text
    assert "invented" not in text


def _prompt(**more: Any) -> dict[str, Any]:
    return {"model": ENDPOINT, "prompt": "Once", **more}


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "It did not happen within 5 s."
        time.sleep(0.01)
