"""API keys as a gateway knows them: parsed, digested, looked up by id, remembered for two seconds.

The control plane writes ``KeyRecord`` JSON under a key's id; the gateway reads it through a callable that it is
given. There is no database here.

A key's secret is 32 random bytes. Slow hashes protect secrets that can be guessed; nobody guesses 256 random bits, so
one SHA-256 is enough, and costs a request a microsecond instead of a tenth of a second.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Self

from controlplane.errors import DomainError

KEY_PREFIX = "sk-tatkal"
CACHE_TTL_S = 2.0
CACHE_SIZE = 4096

_KEY = re.compile(r"sk-tatkal-(?P<id>[a-z0-9]{1,32})-[A-Za-z0-9_-]{32,128}")
_NO_DIGEST = hashlib.sha256(b"").hexdigest()


class InvalidKey(DomainError):
    """No such key, or no longer; which of the two is not told."""

    code = "invalid_api_key"
    status = HTTPStatus.UNAUTHORIZED


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is published of a key. No ``endpoints`` means all of them."""

    digest: str
    name: str
    endpoints: tuple[str, ...] = ()
    revoked: bool = False

    def allows(self, endpoint: str) -> bool:
        """Whether the key may use ``endpoint``."""
        return not self.endpoints or endpoint in self.endpoints

    def to_json(self) -> str:
        """What lies under the key's id."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild from ``to_json``."""
        data = json.loads(text)
        return cls(
            digest=data["digest"],
            name=data["name"],
            endpoints=tuple(data["endpoints"]),
            revoked=bool(data["revoked"]),
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: a key that was checked."""

    key_id: str
    record: KeyRecord


def parse_key(key: str) -> str | None:
    """The id inside ``sk-tatkal-{id}-{secret}``, or None where ``key`` is not of that form."""
    match = _KEY.fullmatch(key)
    return match["id"] if match else None


def digest_key(key: str) -> str:
    """What is stored instead of the key: the SHA-256 of all of it, in hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class KeyCache:
    """Checked keys, at most ``CACHE_TTL_S`` old, so that a revocation reaches every request after that.

    Only found records are remembered. A flood of invented ids therefore never pushes out a real one.
    """

    def __init__(
        self,
        read: Callable[[str], Awaitable[str | None]],
        *,
        ttl_s: float = CACHE_TTL_S,
        size: int = CACHE_SIZE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._ttl_s = ttl_s
        self._size = size
        self._clock = clock
        self._records: OrderedDict[str, tuple[float, KeyRecord]] = OrderedDict()

    async def check(self, key: str) -> Caller:
        """The caller behind ``key``.

        The digests are compared for unknown ids too, against one that no key has.

        Raises:
            InvalidKey: malformed, unknown, revoked, or another secret.
        """
        key_id = parse_key(key)
        record = await self._find(key_id) if key_id else None
        expected = record.digest if record else _NO_DIGEST
        is_same = hmac.compare_digest(digest_key(key), expected)
        if key_id is None or record is None or not is_same or record.revoked:
            raise InvalidKey("Incorrect API key provided. Ask for one, or check its spelling.")
        return Caller(key_id, record)

    async def _find(self, key_id: str) -> KeyRecord | None:
        now = self._clock()
        kept = self._records.get(key_id)
        if kept is not None and now - kept[0] < self._ttl_s:
            return kept[1]
        self._records.pop(key_id, None)
        text = await self._read(key_id)
        if text is None:
            return None
        record = KeyRecord.from_json(text)
        self._records[key_id] = (now, record)
        if len(self._records) > self._size:
            self._records.popitem(last=False)
        return record
