"""Whose cached prompts a request may use follows from its API key, and from nothing in its body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.gateway.body import InvalidRequest
from controlplane.gateway.parameters import Call, Kind, Origin, parse

BODIES: dict[Kind, dict[str, Any]] = {
    Kind.CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    Kind.COMPLETION: {"model": "m", "prompt": "Hi"},
}


def _parse(kind: Kind, key_id: str = "k1", **changes: Any) -> Call:
    origin = Origin(request_id="r1", key_id=key_id, deadline_s=60.0)
    return parse(kind, json.dumps({**BODIES[kind], **changes}).encode(), origin)


@pytest.mark.parametrize("kind", Kind)
def test_cached_prompts_are_kept_apart_by_api_key(kind: Kind) -> None:
    salts = [_parse(kind, key_id).request.cache_salt for key_id in ("k1", "k2", "k1")]
    assert salts[0] == salts[2] != salts[1]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("salt", ["", "another-tenant", 1, ["key"]])
def test_a_cache_salt_of_the_caller_is_refused(kind: Kind, salt: object) -> None:
    with pytest.raises(InvalidRequest, match="made from your API key") as refused:
        _parse(kind, cache_salt=salt)

    error = refused.value
    assert (error.param, error.code, error.status) == ("cache_salt", "unsupported_parameter", 400)
