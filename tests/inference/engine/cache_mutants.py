"""Prefix caches, forks and swap spaces with one thing wrong each, small enough to be a slip of the hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from inference.engine.block_pool import BlockPool
from inference.engine.plan import Move, MoveKind, StepPlan
from inference.engine.prefix_cache import PrefixCache
from inference.engine.request import Request
from inference.engine.scheduler import Scheduler
from inference.engine.start import Start
from inference.engine.swap import SwapSpace
from tests.inference.engine.mutant import Mutant


def cache_a_block_that_is_not_full(original: Any) -> Any:
    def keep(self: Scheduler, request: Request) -> None:
        computed = request.num_computed_tokens
        request.num_computed_tokens = min(computed + 1, len(request.tokens))
        original(self, request)
        request.num_computed_tokens = computed

    return keep


def share_blocks_among_tenants(original: Any) -> Any:
    def add(self: Scheduler, request: Request) -> None:
        salt, request.cache_salt = request.cache_salt, ""
        original(self, request)
        request.cache_salt = salt

    return add


def find_blocks_by_their_last_one(original: Any) -> Any:
    def find(self: PrefixCache, digests: Sequence[bytes]) -> list[int]:
        found = list(original(self, digests))
        return found[-1:] * len(found)

    return find


def find_the_whole_prompt(_original: Any) -> Any:
    return property(lambda self: len(self.tokens))


def evict_the_newest(_original: Any) -> Any:
    def evict(self: PrefixCache) -> int:
        block_id, _ = self._idle.popitem()
        self._drop(block_id)
        return block_id

    return evict


def give_back_the_first_block_first(original: Any) -> Any:
    def release(self: BlockPool, block_ids: Sequence[int]) -> None:
        original(self, list(reversed(block_ids)))

    return release


def leave_a_used_block_in_the_line(_original: Any) -> Any:
    def wake(_self: PrefixCache, _block_id: int) -> None:
        pass

    return wake


def evict_without_forgetting(_original: Any) -> Any:
    def evict(self: PrefixCache) -> int:
        block_id, _ = self._idle.popitem(last=False)
        return block_id

    return evict


def free_a_cached_block(_original: Any) -> Any:
    def release(self: BlockPool, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._check_held(block_id)
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    return release


def use_again_without_counting(original: Any) -> Any:
    def reuse(self: BlockPool, block_ids: Iterable[int]) -> None:
        held = [block_id for block_id in block_ids if not self.cache.is_idle(block_id)]
        original(self, block_ids)
        for block_id in held:
            self._ref_counts[block_id] -= 1

    return reuse


def count_idle_blocks_twice(_original: Any) -> Any:
    def has_room_for(self: Scheduler, request: Request, start: Start) -> bool:
        missing = self._pool.blocks_for(len(request.tokens)) - len(start.blocks)
        return missing <= self._pool.num_free

    return has_room_for


def write_to_shared_blocks(_original: Any) -> Any:
    def shared_index(_self: Scheduler, _request: Request) -> int | None:
        return None

    return shared_index


def take_a_block_of_its_own_without_a_copy(original: Any) -> Any:
    def take_blocks(self: Scheduler, request: Request) -> None:
        original(self, request)
        for move in list(self._moves):
            if move.kind is MoveKind.COPY:
                self._moves.remove(move)

    return take_blocks


def copy_the_wrong_way_round(original: Any) -> Any:
    def take_blocks(self: Scheduler, request: Request) -> None:
        count = len(self._moves)
        original(self, request)
        for index in range(count, len(self._moves)):
            move = self._moves[index]
            self._moves[index] = Move(move.kind, move.target, move.source)

    return take_blocks


def let_others_find_what_is_broken(original: Any) -> Any:
    def abort(self: Scheduler, request_id: str, *, is_broken: bool = False) -> bool:
        del is_broken
        return bool(original(self, request_id))

    return abort


def forget_a_block_and_not_those_behind(_original: Any) -> Any:
    def forget(self: PrefixCache, block_ids: Iterable[int]) -> list[int]:
        known = [block_id for block_id in block_ids if block_id in self][:1]
        idle = [block_id for block_id in known if self._idle.pop(block_id, 0) is None]
        for block_id in known:
            self._drop(block_id)
        return idle

    return forget


def swap_in_the_wrong_order(original: Any) -> Any:
    def swap_in(self: Scheduler, request: Request, num_reused: int) -> None:
        request.swap_slots.reverse()
        original(self, request, num_reused)

    return swap_in


def bring_nothing_back(original: Any) -> Any:
    def swap_in(self: Scheduler, request: Request, _num_reused: int) -> None:
        original(self, request, len(request.swap_slots))

    return swap_in


def keep_the_slots_of_those_that_run(original: Any) -> Any:
    def swap_in(self: Scheduler, request: Request, num_reused: int) -> None:
        slots = list(request.swap_slots)
        original(self, request, num_reused)
        request.swap_slots = slots

    return swap_in


def hand_out_slots_without_taking_them(original: Any) -> Any:
    def allocate(self: SwapSpace, count: int) -> list[int]:
        slots: list[int] = original(self, count)
        self._free.extend(reversed(slots))
        return slots

    return allocate


def leak_the_slots_of_the_aborted(original: Any) -> Any:
    def end(self: Scheduler, request_id: str, *how: Any) -> bool:
        if (request := self._waiting.get(request_id)) is not None:
            request.swap_slots = []
        return bool(original(self, request_id, *how))

    return end


def lose_the_moves_of_a_plan_that_never_ran(original: Any) -> Any:
    def plan(self: Scheduler) -> StepPlan:
        self._moves.clear()
        plan: StepPlan = original(self)
        return plan

    return plan


CACHE_MUTANTS = [
    Mutant(Scheduler, "_keep", cache_a_block_that_is_not_full, "B2"),
    Mutant(Scheduler, "add", share_blocks_among_tenants, "B2"),
    Mutant(PrefixCache, "find", find_blocks_by_their_last_one, "B[12]|S5|defended"),
    Mutant(Request, "num_reusable_tokens", find_the_whole_prompt, "S1"),
    Mutant(PrefixCache, "evict", evict_the_newest, "B2|defended: Block .* is cached"),
    Mutant(PrefixCache, "wake", leave_a_used_block_in_the_line, "B[12]|S5"),
    Mutant(PrefixCache, "evict", evict_without_forgetting, "B[123]|S5|defended"),
    Mutant(BlockPool, "release", give_back_the_first_block_first, "B2|defended"),
    Mutant(BlockPool, "release", free_a_cached_block, "B[123]|S5|defended"),
    Mutant(BlockPool, "reuse", use_again_without_counting, "B1|defended"),
    Mutant(Scheduler, "_has_room_for", count_idle_blocks_twice, "S4|defended: .* asked for"),
    Mutant(Scheduler, "_shared_index", write_to_shared_blocks, "B3"),
    Mutant(Scheduler, "_take_blocks", take_a_block_of_its_own_without_a_copy, "B2|S5"),
    Mutant(Scheduler, "_take_blocks", copy_the_wrong_way_round, "B2|S5"),
    Mutant(Scheduler, "abort", let_others_find_what_is_broken, "B2"),
    Mutant(PrefixCache, "forget", forget_a_block_and_not_those_behind, "B2|defended"),
    Mutant(Scheduler, "_swap_in", swap_in_the_wrong_order, "B2|S5"),
    Mutant(Scheduler, "_swap_in", bring_nothing_back, "B2|S5"),
    Mutant(Scheduler, "_swap_in", keep_the_slots_of_those_that_run, "B[24]|defended"),
    Mutant(SwapSpace, "allocate", hand_out_slots_without_taking_them, "B4|defended: Of .* swap"),
    Mutant(Scheduler, "_end", leak_the_slots_of_the_aborted, "B4|defended"),
    Mutant(Scheduler, "plan", lose_the_moves_of_a_plan_that_never_ran, "B2|S5"),
]
