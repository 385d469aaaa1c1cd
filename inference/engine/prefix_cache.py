"""Which full blocks can be used again: what each holds is named by a digest, and those without a holder wait in line.

A block's digest covers its own tokens and the digest of the block before it, down to a root that names the version and
the tenant. So equal digests mean equal keys and values, and a sequence finds what it can use by walking its own chain.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType

Chain = list[bytes]
"""The root of a sequence's digests, then one digest for each full block, in order."""


class BrokenCache(RuntimeError):
    """The tree of cached blocks does not hold together. Only a bug can cause it."""


def start_chain(version: str, salt: str) -> Chain:
    """The chain of a sequence without blocks.

    Each part is tagged and has its length before it: else version ``ab`` of tenant ``c`` were version ``a`` of ``bc``.
    """
    digest = sha256(b"tatkal prefix 1")
    for tag, text in ((b"version", version), (b"salt", salt)):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%s %d " % (tag, len(data)))
        digest.update(data)
    return [digest.digest()]


def extend_chain(chain: Chain, tokens: Sequence[int], num_blocks: int, block_size: int) -> None:
    """Have ``chain`` cover the first ``num_blocks`` blocks of ``tokens``; what it covers already stays.

    SHA-256, because a block that is taken for another gives a caller somebody else's keys and values. Python's own hash and
    the fast ones let a caller construct collisions.
    """
    for index in range(len(chain) - 1, num_blocks):
        ids = array("I", tokens[index * block_size : (index + 1) * block_size])
        if sys.byteorder == "big":
            ids.byteswap()
        chain.append(sha256(chain[-1] + ids.tobytes()).digest())


class PrefixCache:
    """Full blocks by the digest of what they hold; it knows nothing of those that hold them but whether there are any.

    The cached blocks form trees: a block is cached only while the one before it is. Whoever holds a block holds those
    before it, and gives them back later. So an idle block has idle descendants alone, they stand before it in the
    line, and the oldest in the line has none.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        # In the order in which they were cached: a block stands behind the one before it.
        self._digests: dict[int, bytes] = {}
        self._parents: dict[int, int | None] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._blocks)

    @property
    def num_idle(self) -> int:
        """Those of them that nobody holds."""
        return len(self._idle)

    @property
    def blocks(self) -> Mapping[bytes, int]:
        """All blocks that can be found, by digest."""
        return MappingProxyType(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digests

    def is_idle(self, block_id: int) -> bool:
        """Whether it is cached and nobody holds it."""
        return block_id in self._idle

    def digest_of(self, block_id: int) -> bytes | None:
        """What the block holds; None if it is not cached."""
        return self._digests.get(block_id)

    def get(self, digest: bytes) -> int | None:
        """The block that holds what ``digest`` names."""
        return self._blocks.get(digest)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached beginning of ``digests``."""
        found = []
        for digest in digests:
            block_id = self._blocks.get(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def add(self, block_id: int, digest: bytes, parent: int | None) -> None:
        """Have a held block be found under ``digest``; ``parent`` is the block before it, None before the first.

        Raises:
            BrokenCache: the block or the digest is cached already, or the parent is not.
        """
        if block_id in self._digests or digest in self._blocks:
            raise BrokenCache(f"Block {block_id} or what it holds is cached already.")
        if parent is not None and parent not in self._digests:
            raise BrokenCache(f"Block {parent} is not cached, so nobody finds block {block_id}.")
        self._blocks[digest] = block_id
        self._digests[block_id] = digest
        self._parents[block_id] = parent

    def rest(self, block_id: int) -> None:
        """Its last holder is gone: it goes to the end of the line of those that may be evicted."""
        self._idle[block_id] = None

    def wake(self, block_id: int) -> None:
        """An idle block is held again."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Forget the block that has been idle for longest, and return it.

        Raises:
            BrokenCache: a block behind it is still cached.
        """
        block_id, _ = self._idle.popitem(last=False)
        self._drop(block_id)
        return block_id

    def forget(self, block_ids: Iterable[int]) -> list[int]:
        """Forget these blocks and all behind them, held or not, and return those that were idle."""
        doomed: set[int] = {block_id for block_id in block_ids if block_id in self._digests}
        if not doomed:
            return []
        for block_id, parent in self._parents.items():
            if parent in doomed:
                doomed.add(block_id)
        idle = [block_id for block_id in self._idle if block_id in doomed]
        for block_id in doomed:
            self._idle.pop(block_id, None)
            self._drop(block_id)
        return idle

    def check_integrity(self) -> None:
        """Whether the maps agree and every block can be reached from a root.

        Raises:
            BrokenCache: they do not.
        """
        if self._blocks != {digest: block_id for block_id, digest in self._digests.items()}:
            raise BrokenCache("A block is cached under two digests, or a digest names two blocks.")
        if (
            self._parents.keys() != self._digests.keys()
            or not self._idle.keys() <= self._digests.keys()
        ):
            raise BrokenCache("A block is idle, or has a parent, and is not cached.")
        place = {block_id: index for index, block_id in enumerate(self._idle)}
        for block_id, parent in self._parents.items():
            if parent is None:
                continue
            if parent not in self._digests:
                raise BrokenCache(
                    f"Block {block_id} is cached and block {parent} before it is not."
                )
            if parent in place and place.get(block_id, len(place)) > place[parent]:
                raise BrokenCache(
                    f"Block {parent} would be evicted before block {block_id} behind it."
                )

    def _drop(self, block_id: int) -> None:
        del self._blocks[self._digests.pop(block_id)]
        del self._parents[block_id]
