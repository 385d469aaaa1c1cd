"""Keys as the gateway checks them."""

from __future__ import annotations

import hmac
from unittest import mock

import pytest

from controlplane.access.cache import InvalidKey, KeyCache, KeyRecord, digest_key, parse_key

KEY = "sk-tatkal-ab12-" + "s" * 20 + "-_" + "s" * 21


class Store:
    """Published keys, and how often they were read."""

    def __init__(self) -> None:
        self.records = {"ab12": KeyRecord(digest_key(KEY), "app")}
        self.reads: list[str] = []
        self.now = 100.0

    async def read(self, key_id: str) -> str | None:
        """As ``inference.client.Client.read_key``."""
        self.reads.append(key_id)
        record = self.records.get(key_id)
        return record.to_json() if record else None

    def cache(self, size: int = 10) -> KeyCache:
        """A cache on this store and its clock."""
        return KeyCache(self.read, ttl_s=2.0, size=size, clock=lambda: self.now)


@pytest.fixture
def store() -> Store:
    """A store with one key."""
    return Store()


@pytest.mark.parametrize(
    ("key", "key_id"),
    [
        (KEY, "ab12"),
        ("sk-tatkal-ab12-" + "s" * 31, None),
        ("sk-tatkal--" + "s" * 43, None),
        ("sk-tatkal-AB-" + "s" * 43, None),
        ("sk-other-ab12-" + "s" * 43, None),
        (KEY + "\n", None),
        (KEY + "é", None),
        ("", None),
    ],
)
def test_an_id_is_read_from_well_formed_keys_only(key: str, key_id: str | None) -> None:
    assert parse_key(key) == key_id


def test_a_record_reads_back_from_json() -> None:
    record = KeyRecord("d", "né", endpoints=("a", "b"), revoked=True)

    assert KeyRecord.from_json(record.to_json()) == record


def test_no_scopes_allow_all_and_some_allow_themselves() -> None:
    assert KeyRecord("d", "n").allows("anything")
    assert KeyRecord("d", "n", endpoints=("a",)).allows("a")
    assert not KeyRecord("d", "n", endpoints=("a",)).allows("ab")


async def test_a_good_key_is_its_caller(store: Store) -> None:
    caller = await store.cache().check(KEY)

    assert (caller.key_id, caller.record.name) == ("ab12", "app")


@pytest.mark.parametrize(
    "key", [KEY[:-1] + "t", KEY.replace("ab12", "cd34"), "nonsense", "", "\udcff"]
)
async def test_any_other_key_is_refused_in_the_same_words(store: Store, key: str) -> None:
    with pytest.raises(InvalidKey) as refused:
        await store.cache().check(key)
    store.records["ab12"] = KeyRecord(digest_key(KEY), "app", revoked=True)
    with pytest.raises(InvalidKey) as revoked:
        await store.cache().check(KEY)

    assert refused.value.message == revoked.value.message
    assert (refused.value.code, refused.value.status) == ("invalid_api_key", 401)


@pytest.mark.parametrize("key", [KEY, KEY.replace("ab12", "cd34"), "nonsense"])
async def test_digests_are_compared_in_constant_time_for_every_key(store: Store, key: str) -> None:
    with (
        mock.patch.object(hmac, "compare_digest", return_value=False) as compare,
        pytest.raises(InvalidKey),
    ):
        await store.cache().check(key)

    compare.assert_called_once()
    assert [len(digest) for digest in compare.call_args.args] == [64, 64]


async def test_a_key_is_read_once_in_two_seconds(store: Store) -> None:
    cache = store.cache()
    for now in (100.0, 101.0, 101.99):
        store.now = now
        await cache.check(KEY)
    assert store.reads == ["ab12"]

    store.now = 102.0
    await cache.check(KEY)
    assert store.reads == ["ab12", "ab12"]


async def test_a_revocation_reaches_requests_after_two_seconds(store: Store) -> None:
    cache = store.cache()
    await cache.check(KEY)
    del store.records["ab12"]
    store.now += 2.0

    with pytest.raises(InvalidKey):
        await cache.check(KEY)


async def test_a_new_key_works_although_it_was_just_unknown(store: Store) -> None:
    cache = store.cache()
    record = store.records.pop("ab12")
    with pytest.raises(InvalidKey):
        await cache.check(KEY)
    store.records["ab12"] = record

    assert (await cache.check(KEY)).key_id == "ab12"


async def test_invented_ids_never_push_out_a_real_key_and_the_cache_is_bounded(
    store: Store,
) -> None:
    cache = store.cache(size=3)
    await cache.check(KEY)
    for index in range(20):
        with pytest.raises(InvalidKey):
            await cache.check(f"sk-tatkal-x{index}-" + "s" * 43)
    await cache.check(KEY)
    assert store.reads.count("ab12") == 1

    for index in range(5):
        other = f"sk-tatkal-y{index}-" + "s" * 43
        store.records[f"y{index}"] = KeyRecord(digest_key(other), "y")
        await cache.check(other)
    await cache.check(KEY)
    assert store.reads.count("ab12") == 2


async def test_an_error_of_the_store_is_told_and_not_remembered() -> None:
    answers: list[str | Exception] = [
        ConnectionError("down"),
        KeyRecord(digest_key(KEY), "a").to_json(),
    ]

    async def read(_key_id: str) -> str | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cache = KeyCache(read)
    with pytest.raises(ConnectionError):
        await cache.check(KEY)

    assert (await cache.check(KEY)).key_id == "ab12"
