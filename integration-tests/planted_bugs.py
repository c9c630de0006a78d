"""Bugs to plant in the product, each with the test of this suite that must fail because of it.

    python integration-tests/planted_bugs.py            # plant each in a separate process, run its test
    python integration-tests/planted_bugs.py NAME...    # only these
    python integration-tests/planted_bugs.py --list     # name, what it breaks, and the test

Exit code 1 if a test passes with its bug, or fails without any.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import wraps
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A small change that breaks the product."""

    name: str
    breaks: str
    caught_by: str  # a test of the quick suite, as pytest names it
    plant: Callable[[], None]


class Outcome(NamedTuple):
    """The result of running tests in one process."""

    exit_code: int  # of pytest: 0 all passed, 1 some failed
    failures: list[tuple[str, str]]  # test and exception type; failing fixtures do not count
    duration_s: float

    @property
    def is_caught(self) -> bool:
        """Whether a test itself failed."""
        return self.exit_code == 1 and bool(self.failures)


BUGS: list[Bug] = []


def bug(breaks: str, *, caught_by: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the decorated function, which plants a bug, in `BUGS` under its own name."""

    def add(plant: Callable[[], None]) -> Callable[[], None]:
        name = plant.__name__.replace("_", "-")
        BUGS.append(Bug(name=name, breaks=breaks, caught_by=caught_by, plant=plant))
        return plant

    return add


def change(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a function of a class or module by one that gets the original as its first argument."""
    original = getattr(owner, name)

    def replace(changed: Callable[..., Any]) -> None:
        @wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            return changed(original, *arguments, **options)

        setattr(owner, name, call)

    return replace


# -- which blocks are free, and who has them


@bug(
    "The free list gets one block of every `free` twice.",
    caught_by="kv-pool/tests/test_free_list_allocator.py::TestFreeListAllocator"
    "::test_no_random_sequence_of_calls_disagrees_with_a_model",
)
def a_double_insert_into_the_free_list() -> None:
    from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator

    @change(FreeListAllocator, "free")
    def free(original: Any, self: Any, block_ids: Any) -> None:
        original(self, block_ids)
        self._stack += block_ids[:1]


@bug(
    "Of every 500 blocks that are freed one stays allocated.",
    caught_by="kv-pool/tests/test_paged_kv_pool.py::TestPagedKVPool"
    "::test_random_operations_agree_with_a_model",
)
def a_leaked_block_in_500_frees() -> None:
    from sagellm.kvmgr.kv_pool.free_list import FreeListAllocator

    freed = count(1)

    @change(FreeListAllocator, "free")
    def free(original: Any, self: Any, block_ids: Any) -> None:
        original(self, block_ids)
        for block_id in block_ids:
            if next(freed) % 500 == 0:
                self.claim([block_id])


@bug(
    "`share` counts one reference too many.",
    caught_by="kv-pool/tests/test_paged_kv_pool.py::TestPagedKVPool"
    "::test_a_shared_block_is_free_after_its_last_reference",
)
def a_reference_count_off_by_one() -> None:
    from sagellm.kvmgr.kv_pool import PagedKVPool

    @change(PagedKVPool, "share")
    def share(original: Any, self: Any, block_ids: Any) -> None:
        original(self, block_ids)
        for block_id in block_ids:
            self._extra_refs[block_id] += 1


@bug(
    "`copy_on_write` hands out the shared block itself.",
    caught_by="kv-pool/tests/test_paged_kv_pool.py::TestPagedKVPool"
    "::test_a_shared_block_is_exchanged_for_a_fresh_one",
)
def a_shared_block_written_without_a_copy() -> None:
    from sagellm.kvmgr.kv_pool import PagedKVPool

    @change(PagedKVPool, "copy_on_write")
    def copy_on_write(_: Any, self: Any, block_id: Any, sequence_id: str, priority: int = 0) -> Any:
        return block_id


@bug(
    "The compactor copies KV over the block before the one that is free.",
    caught_by="engines/tests/test_compaction_model.py"
    "::test_every_slot_holds_its_sequences_kv_wherever_its_block_went[free_list-True]",
)
def compaction_into_a_block_in_use() -> None:
    from sagellm.engines.engine_core.compaction import Compactor

    @change(Compactor, "advance")
    def advance(original: Any, self: Any) -> int:
        if not hasattr(self, "copy_right"):
            self.copy_right = self._copy
            self._copy = lambda pairs: self.copy_right([(source, target - 1) for source, target in pairs])
        return int(original(self))


# -- which prefixes are cached, and whose they are


@bug(
    "Where a node is split, the upper part loses its last block.",
    caught_by="prefix-cache/tests/test_radix_prefix_cache.py::TestRadixPrefixCache"
    "::test_random_operations_agree_with_a_plain_model[False-2]",
)
def a_split_that_loses_a_block() -> None:
    from sagellm.kvmgr.prefix_cache import tree

    @change(tree, "split")
    def split(original: Any, *arguments: Any) -> Any:
        upper = original(*arguments)
        del upper.block_ids[-1]
        return upper


@bug(
    "The prefix cache takes all salts of a tenant for one.",
    caught_by="prefix-cache/tests/test_radix_prefix_cache.py::TestRadixPrefixCache"
    "::test_namespaces_never_share",
)
def a_salt_ignored_by_the_prefix_cache() -> None:
    from sagellm.kvmgr.prefix_cache import RadixPrefixCache

    def without_salt(original: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        unsalted = [each._replace(salt="") if hasattr(each, "salt") else each for each in arguments]
        return original(self, *unsalted, **options)

    for name in ("match_prefix", "insert_prefix", "query_by_prefix"):
        change(RadixPrefixCache, name)(without_salt)


@bug(
    "A partial match of ten tokens or more counts one too many.",
    caught_by="prefix-cache/tests/test_partial_blocks.py::test_a_block_matches_exactly_as_far_as_it_agrees[10]",
)
def a_token_too_many_in_a_partial_match() -> None:
    from sagellm.kvmgr.prefix_cache import node

    @change(node, "count_common_tokens")
    def count_common_tokens(original: Any, one: bytes, other: bytes) -> int:
        num_tokens = original(one, other)
        return min(num_tokens + (num_tokens > 9), min(len(one), len(other)) // node.TOKEN_BYTES)


@bug(
    "A leaf that loses its end keeps the partial blocks that followed there.",
    caught_by="prefix-cache/tests/test_tenants.py"
    "::test_a_leaf_that_a_quota_cuts_loses_the_partial_blocks_behind_it",
)
def a_cut_leaf_with_its_partial_blocks() -> None:
    from sagellm.kvmgr.prefix_cache.tree import RadixTree

    @change(RadixTree, "_cut")
    def cut(original: Any, self: Any, node: Any, num_blocks: int, departure: Any) -> Any:
        if num_blocks == node.num_blocks:
            return original(self, node, num_blocks, departure)
        partials, node.partials = node.partials, ()
        dropped = original(self, node, num_blocks, departure)
        node.partials = partials
        return dropped


@bug(
    "A leaf grows although partial blocks follow its end.",
    caught_by="prefix-cache/tests/test_radix_prefix_cache.py::TestRadixPrefixCache"
    "::test_random_operations_agree_with_a_plain_model[False-3]",
)
def a_leaf_that_grows_under_its_partial_blocks() -> None:
    from sagellm.kvmgr.prefix_cache.tree import RadixTree

    @change(RadixTree, "extend")
    def extend(original: Any, self: Any, found: Any, tail: Any, new: Any, **options: Any) -> Any:
        node = found.node
        is_at_end = node is not None and len(found.block_ids) * self.block_size == node.depth > 0
        if not is_at_end or not self._is_candidate(node) or node.priority != options["priority"]:
            return original(self, found, tail, new, **options)
        self._enter(new)
        released = self._release(self.partials.supersede(node, tail[: self.block_bytes]))
        self._lengthen(node, tail, new)
        return released


@bug(
    "Where a node is split, the upper part counts no pins.",
    caught_by="prefix-cache/tests/test_pins.py::test_a_pin_lives_on_when_its_path_is_split",
)
def a_split_that_loses_pins() -> None:
    from sagellm.kvmgr.prefix_cache import tree

    @change(tree, "split")
    def split(original: Any, *arguments: Any) -> Any:
        upper = original(*arguments)
        upper.num_pins = 0
        return upper


@bug(
    "Blocks that an interrupted eviction has dropped keep their ids when cached ones move with them.",
    caught_by="prefix-cache/tests/test_kv_events.py"
    "::test_an_eviction_that_is_interrupted_loses_no_block[None-2]",
)
def dropped_blocks_not_renamed() -> None:
    from sagellm.kvmgr.prefix_cache import RadixPrefixCache

    @change(RadixPrefixCache, "move_blocks")
    def move_blocks(original: Any, self: Any, moves: Any) -> None:
        tree, undelivered = self._tree, list(self._tree.undelivered)
        has_cached = any(source in tree.cached for source, _ in moves)
        original(self, moves)
        if has_cached:
            tree.undelivered = undelivered


@bug(
    "Every tenth eviction evicts nothing.",
    caught_by="prefix-cache/tests/test_radix_prefix_cache.py::TestRadixPrefixCache"
    "::test_random_operations_agree_with_a_plain_model[False-2]",
)
def an_eviction_skipped() -> None:
    from sagellm.kvmgr.prefix_cache.tree import RadixTree

    evictions = count(1)

    @change(RadixTree, "evict")
    def evict(original: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        return original(self, *arguments, **options) if next(evictions) % 10 else []


@bug(
    "All blocks are charged to one tenant.",
    caught_by="prefix-cache/tests/test_tenants.py::test_a_tenant_over_its_quota_evicts_only_its_own",
)
def a_wrong_tenant_s_account() -> None:
    from sagellm.core import DEFAULT
    from sagellm.kvmgr.prefix_cache.ledger import Ledger

    @change(Ledger, "account")
    def account(original: Any, self: Any, _: Any) -> Any:
        return original(self, DEFAULT)


@bug(
    "Keys of evicted blocks have 6 bits.",
    caught_by="prefix-cache/tests/test_explain_miss.py"
    "::test_cause_and_position_of_1_000_known_misses_are_right_while_ghosts_are_within_budget",
)
def ghost_keys_that_collide() -> None:
    from sagellm.kvmgr.prefix_cache import ghosts, node, radix, tree

    for module in (ghosts, node, radix, tree):
        module.hash = lambda value: hash(value) & 63  # type: ignore[attr-defined]


@bug(
    "LRU evicts what was used last.",
    caught_by="eviction-policy/tests/test_eviction_policies.py"
    "::test_a_hit_keeps_a_node_under_lru_and_not_under_fifo",
)
def an_eviction_order_upside_down() -> None:
    from sagellm.kvmgr.eviction.lru import LRUEvictionPolicy

    @change(LRUEvictionPolicy, "node_key")
    def node_key(original: Any, self: Any, node: Any) -> float:
        return -float(original(self, node))


# -- sequences and their blocks


@bug(
    "An abort leaves the lock on the cached prefix.",
    caught_by="engines/tests/test_engine_requests.py::test_an_abort_frees_the_blocks",
)
def a_lock_kept_after_an_abort() -> None:
    from sagellm.engines.engine_core.scheduler import Scheduler
    from sagellm.engines.engine_core.sequence import RequestStatus

    @change(Scheduler, "finish")
    def finish(original: Any, self: Any, sequence_id: Any, status: Any) -> Any:
        sequence = self._sequences.get(sequence_id)
        if status is RequestStatus.FINISHED_ABORTED and sequence is not None and sequence.match is not None:
            self._kv.cache.lock(sequence.match)  # so that the one that is undone is not the last
        return original(self, sequence_id, status)


@bug(
    "A preempted sequence keeps a reference to its blocks.",
    caught_by="engines/tests/test_engine_requests.py::test_preempted_requests_end_as_if_alone",
)
def blocks_kept_after_a_preemption() -> None:
    from sagellm.engines.engine_core.scheduler import Scheduler

    @change(Scheduler, "_preempt")
    def preempt(original: Any, self: Any, sequence: Any, **options: Any) -> None:
        self._kv._pool.share(sequence.block_ids)
        original(self, sequence, **options)


@bug(
    "A sequence writes into the cached block that agrees with its prompt in part.",
    caught_by="engines/tests/test_partial_block_reuse.py"
    "::test_output_is_the_same_when_a_block_is_reused_in_part",
)
def a_partial_block_shared_for_writing() -> None:
    from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager

    @change(KVCacheManager, "admit")
    def admit(original: Any, self: Any, sequence: Any) -> None:
        num_copies = len(self._copies)
        original(self, sequence)
        for source, target in self._copies[num_copies:]:
            self.seats.set_blocks(sequence.seat, sequence.block_ids.index(target), [source])
            self._pool.share([source])
            self._pool.free([target])
        del self._copies[num_copies:]


@bug(
    "Sequences that grow in one step are each told of the free blocks that there were before it.",
    caught_by="engines/tests/test_block_tables.py"
    "::test_all_that_grow_in_one_step_get_blocks_that_the_cache_gives_up[2]",
)
def free_blocks_not_counted_down() -> None:
    from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager

    @change(KVCacheManager, "reserve")
    def reserve(original: Any, self: Any, *arguments: Any) -> Any:
        num_free, allocate = self._pool.get_free_blocks(), self._allocate
        self._allocate = lambda sequence, num_blocks, may_evict: allocate(
            sequence, num_blocks, may_evict=num_blocks > num_free
        )
        try:
            return original(self, *arguments)
        finally:
            del self._allocate


@bug(
    "Only the first continuation of a request is aborted.",
    caught_by="engines/tests/test_engine_requests.py::test_an_abort_ends_all_continuations",
)
def an_abort_of_the_first_continuation() -> None:
    from sagellm.engines.requests.output_processor import OutputProcessor

    @change(OutputProcessor, "sequence_ids")
    def sequence_ids(original: Any, self: Any, request_id: Any) -> Any:
        return original(self, request_id)[:1]


@bug(
    "A step reads the block table that a sequence had before its blocks moved.",
    caught_by="engines/tests/test_compaction.py::test_tokens_are_the_same_when_blocks_move_at_every_step[enable_prefix_caching]",
)
def a_stale_block_table() -> None:
    from sagellm.engines.engine_core.seats import Seats

    @change(Seats, "replace_blocks")
    def replace_blocks(original: Any, self: Any, moved: Any) -> None:
        known = list(self._updates)
        original(self, moved)
        self._updates = known


@bug(
    "What is collected for a sequence that has left its seat is given to the next one there.",
    caught_by="integration-tests/test_step_contract.py::test_aborts_in_flight_lose_nothing",
)
def a_seat_without_generations() -> None:
    from sagellm.engines.engine_core.seats import Seats

    @change(Seats, "leave")
    def leave(original: Any, self: Any, seat: Any) -> None:
        original(self, seat)
        self.generation[seat] -= 1


@bug(
    "A draft that was refused counts as computed.",
    caught_by="integration-tests/test_step_contract.py::test_drafts_change_no_token[random_draft-roomy-0]",
)
def a_refused_draft_kept() -> None:
    from dataclasses import replace

    from sagellm.engines.engine_core.step_runner import StepRunner

    @change(StepRunner, "_commit")
    def commit(original: Any, self: Any, step: Any, output: Any, is_live: Any) -> Any:
        if step.drafts is not None:
            output = replace(output, num_accepted=step.drafts.counts)
        return original(self, step, output, is_live)


@bug(
    "Rows of a step get each other's hidden states.",
    caught_by="integration-tests/test_hidden_states.py"
    "::test_each_token_of_an_output_has_the_state_that_it_was_drawn_from[plain-torch]",
)
def hidden_states_of_other_rows() -> None:
    from sagellm.engines.worker import host_tokens

    @change(host_tokens, "_hidden_by_row")
    def by_row(original: Any, launched: Any, hidden: Any, is_kept: Any) -> Any:
        return original(launched, hidden.flip(0), is_kept)


@bug(
    "The answers of one namespace make drafts in all.",
    caught_by="engines/tests/test_draft_proposers.py::test_suffix_knows_the_answers_of_its_namespace_alone",
)
def drafts_across_namespaces() -> None:
    from sagellm.core import Namespace
    from sagellm.engines.drafts.suffix import SuffixProposer

    @change(SuffixProposer, "arrived")
    def arrived(original: Any, self: Any, seat: Any, token_ids: Any, num_prompt: int, _: Any) -> None:
        original(self, seat, token_ids, num_prompt, Namespace())


@bug(
    "The scheduler plans one token more than a step may have.",
    caught_by="scheduler-ir/tests/test_base_scheduler.py::TestBaseSchedulerIR"
    "::test_a_plan_fits_whatever_the_state",
)
def a_token_budget_exceeded() -> None:
    from sagellm.kvmgr.scheduler_ir import BaseSchedulerIR

    @change(BaseSchedulerIR, "__init__")
    def init(original: Any, self: Any, *, max_num_batched_tokens: int, **options: Any) -> None:
        original(self, max_num_batched_tokens=max_num_batched_tokens + 1, **options)


# -- KV outside the device


@bug(
    "The key of a stored block is the first byte of its hash.",
    caught_by="kv-pool/tests/test_kv_tiers.py::TestHostTier::test_no_block_is_lost_while_there_is_room",
)
def a_hash_cut_to_8_bits() -> None:
    from sagellm.core.kv_block import BlockHeader

    whole = BlockHeader.hash.func
    BlockHeader.hash = property(lambda self: whole(self)[:1] + bytes(15))  # type: ignore[assignment, misc]


@bug(
    "KV of one layout is stored as that of any other.",
    caught_by="kv-pool/tests/test_kv_tiers.py::TestFileTier::test_a_block_of_anything_else_is_a_miss",
)
def a_record_of_another_layout_accepted() -> None:
    from dataclasses import replace

    from sagellm.core.kv_block import BlockHeader

    @change(BlockHeader, "encode")
    def encode(original: Any, self: Any) -> Any:
        return original(replace(self, layout=""))


@bug(
    "The key of a stored block does not cover whose it is.",
    caught_by="engines/tests/test_tenants_in_tiers.py::test_hot_tiers_give_a_prompt_to_its_tenant_alone[host]",
)
def a_namespace_ignored_by_the_tiers() -> None:
    from dataclasses import replace

    from sagellm.core import DEFAULT
    from sagellm.core.kv_block import BlockHeader

    @change(BlockHeader, "encode")
    def encode(original: Any, self: Any) -> Any:
        return original(replace(self, namespace=DEFAULT))


@bug(
    "What is evicted is copied to the tiers after its block was given away.",
    caught_by="engines/tests/test_tier_simulation.py"
    "::test_no_order_of_steps_copies_and_late_answers_changes_a_token[0]",
)
def an_offload_that_reads_after_the_free() -> None:
    from sagellm.kvmgr.kv_pool.offload import KVOffload

    late: list[Any] = []

    @change(KVOffload, "poll")
    def poll(original: Any, self: Any) -> None:
        while late:
            keep, evicted = late.pop(0)
            keep(self, evicted)
        original(self)

    @change(KVOffload, "keep")
    def keep(original: Any, _: Any, evicted: Any) -> None:
        late.append((original, evicted))


@bug(
    "Blocks that come back from a tier are written in the reverse order.",
    caught_by="engines/tests/test_tier_simulation.py"
    "::test_no_order_of_steps_copies_and_late_answers_changes_a_token[0]",
)
def fetched_blocks_in_the_wrong_order() -> None:
    from sagellm.kvmgr.kv_pool.offload import KVOffload

    @change(KVOffload, "_write")
    def write(original: Any, self: Any, fetch: Any, data: Any) -> bool:
        return bool(original(self, fetch, data[::-1]))


@bug(
    "A prompt is looked up in the tiers in the namespace of who asked for it last.",
    caught_by="kv-pool/tests/test_offload.py"
    "::test_a_prompt_is_found_in_its_own_namespace_whoever_asked_before[host]",
)
def headers_of_the_namespace_before() -> None:
    from sagellm.kvmgr.kv_pool.offload import KVOffload

    @change(KVOffload, "_headers_of")
    def headers_of(original: Any, self: Any, token_ids: Any, namespace: Any) -> Any:
        if self._asked is not None and self._asked[0] == token_ids:
            return self._asked[2]
        return original(self, token_ids, namespace)


@bug(
    "KV of a preempted sequence is copied to the tiers in the default namespace.",
    caught_by="engines/tests/test_preemption_by_swap.py::test_what_is_swapped_out_stays_in_its_namespace",
)
def swapped_out_as_nobody_s() -> None:
    from sagellm.core import DEFAULT
    from sagellm.engines.engine_core import kv_cache_manager

    @change(kv_cache_manager, "headers_of")
    def headers_of(original: Any, token_ids: Any, block_size: int, _: Any, identity: Any) -> Any:
        return original(token_ids, block_size, DEFAULT, identity)


@bug(
    "Blocks that arrive after a lost one count as those before it.",
    caught_by="kv-pool/tests/test_offload.py::test_in_any_order_each_block_is_whole_and_under_way_once[0]",
)
def a_lost_block_skipped() -> None:
    from sagellm.kvmgr.kv_pool.offload import KVOffload

    @change(KVOffload, "_arrived")
    def arrived(original: Any, self: Any, get: Any, outcomes: Any) -> None:
        original(self, get, sorted(outcomes, key=lambda outcome: outcome != "done"))


@bug(
    "A fetch begins before the copies that wait for a step, one of which may read its blocks.",
    caught_by="engines/tests/test_tier_simulation.py"
    "::test_a_fetch_begins_after_the_copies_that_wait_for_a_step",
)
def a_fetch_before_the_copies() -> None:
    from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager

    @change(KVCacheManager, "_begin_fetch")
    def begin_fetch(original: Any, self: Any, *arguments: Any) -> Any:
        copies, self._copies = self._copies, []
        try:
            return original(self, *arguments)
        finally:
            self._copies = copies + self._copies


@bug(
    "Where blocks move, a fetch keeps the old ids of the cached blocks before its own.",
    caught_by="engines/tests/test_shared_fetches.py::test_a_fetch_knows_where_the_blocks_before_it_went[host]",
)
def a_fetch_that_loses_its_prefix() -> None:
    from sagellm.engines.engine_core.kv_cache_manager import KVCacheManager

    @change(KVCacheManager, "move_blocks")
    def move_blocks(original: Any, self: Any, moves: Any) -> None:
        known = [list(fetching.match.block_ids) for fetching in self._fetches]
        original(self, moves)
        for fetching, block_ids in zip(self._fetches, known, strict=True):
            fetching.match.block_ids[:] = block_ids


# -- from tokens to tokens, and to text


@bug(
    "The KV of a step's last token is written one slot off.",
    caught_by="integration-tests/test_token_exact_faults.py::test_without_a_fault_every_token_is_equal",
)
def kv_written_at_a_wrong_slot() -> None:
    from sagellm.engines.attention.kv_cache import Slots

    of = Slots.of

    def shifted(slot_mapping: Any, block_size: int) -> Slots:
        slots = of(slot_mapping, block_size)
        slots.offsets[-1] = (slots.offsets[-1] + 1) % block_size
        return slots

    Slots.of = shifted  # type: ignore[method-assign, assignment]


@bug(
    "The rows of a batch draw with each other's seeds.",
    caught_by="engines/tests/test_sampler.py"
    "::test_one_seed_gives_equal_tokens_alone_and_in_a_batch_of_33_in_any_order",
)
def another_row_s_seed() -> None:
    from sagellm.engines.sampling import torch_sampler

    @change(torch_sampler, "uniforms")
    def uniforms(original: Any, seeds: Sequence[int], positions: Sequence[int]) -> Any:
        return original(seeds[::-1], positions)


@bug(
    "The penalties of a token after a draft do not see the draft.",
    caught_by="engines/tests/test_row_draws.py"
    "::test_penalties_of_a_token_after_a_draft_see_the_draft[kernel]",
)
def penalties_without_drafts() -> None:
    from sagellm.engines.sampling.sequence_penalties import SequencePenalties

    @change(SequencePenalties, "after_each")
    def after_each(original: Any, penalties: Any, output: Any, drafts: Any) -> Any:
        return original(penalties, output, []) * (len(drafts) + 1)


@bug(
    "A mask that follows a step is given to the row before its own.",
    caught_by="engines/tests/test_row_draws.py::test_steps_in_flight_with_late_masks_give_the_same[kernel]",
)
def late_masks_of_a_neighbour() -> None:
    from sagellm.engines.worker import host_tokens

    @change(host_tokens, "masks_at")
    def masks_at(original: Any, masks: Any, which: Any, *sizes: Any) -> Any:
        found = original(masks, which, *sizes)
        places = list(found)
        return dict(zip(places[1:] + places[:1], found.values(), strict=True)) if which is not None else found


@bug(
    "All continuations of one prompt have one seed.",
    caught_by="engines/tests/test_engine_requests.py::test_several_continuations_of_one_prompt",
)
def one_seed_for_all_continuations() -> None:
    from sagellm.engines.requests import queued_request

    @change(queued_request, "QueuedSequence")
    def queued_sequence(original: Any, *arguments: Any) -> Any:
        return replace(original(*arguments), seed=1)


@bug(
    "The seed of each further continuation follows from the id of its request.",
    caught_by="engines/tests/test_engine_requests.py"
    "::test_a_seed_gives_the_same_continuations_alone_in_a_batch_and_after_preemption",
)
def a_seed_for_the_first_continuation_alone() -> None:
    from sagellm.engines.engine_core.sequence import Sequence

    @change(Sequence, "of")
    def of(original: Any, given: Any) -> Any:
        sequence = original(given)
        if not sequence.sequence_id.endswith("#0"):
            sequence.seed = sequence.key
        return sequence


@bug(
    "Of a seed the lower 32 bits count.",
    caught_by="engines/tests/test_sampler.py"
    "::test_uniform_numbers_depend_on_seed_and_position_alone_and_are_uniform",
)
def half_of_a_seed() -> None:
    from sagellm.engines.sampling import random
    from sagellm.engines.worker import seat_draws

    for module in (random, seat_draws):

        @change(module, "key_of")
        def key_of(original: Any, seed: int) -> int:
            return int(original(seed)) & 0xFFFFFFFF


@bug(
    "The likeliest continuation is that with the highest sum of log-probabilities, so mostly a short one.",
    caught_by="engines/server/tests/http/test_server_parameters.py"
    "::test_the_likeliest_is_so_per_token_and_equals_keep_their_order",
)
def the_likeliest_by_its_sum() -> None:
    from sagellm.server.http import shape

    @change(shape, "_mean_logprob")
    def mean_logprob(_: Any, output: Any) -> float:
        return output.cumulative_logprob or 0.0


@bug(
    "The stop string is shown with the text before it.",
    caught_by="engines/tests/test_stop.py::test_a_stop_string_across_pieces_is_never_shown",
)
def a_stop_string_not_cut() -> None:
    from sagellm.engines.sampling.stop import StopStringMatcher

    @change(StopStringMatcher, "append")
    def append(original: Any, self: Any, text: str, **options: Any) -> Any:
        emitted = original(self, text, **options)
        return emitted if emitted.stop is None else emitted._replace(text=emitted.text + emitted.stop)


@bug(
    "Bytes that wait for the rest of their character are dropped at the end.",
    caught_by="engines/tests/test_detokenizer.py::test_streamed_text_equals_the_whole_for_malformed_bytes",
)
def bytes_dropped_by_the_detokenizer() -> None:
    from sagellm.engines.text.detokenizer import IncrementalDetokenizer

    @change(IncrementalDetokenizer, "finish")
    def finish(_: Any, self: Any) -> str:
        return ""


# -- serving


@bug(
    "The core sends every token to every front.",
    caught_by="engines/server/tests/remote/test_engine_client.py::test_two_clients_see_their_own_sequences_alone",
)
def tokens_sent_to_everybody() -> None:
    from sagellm.server.remote import core_server

    @change(core_server.CoreServer, "_send_outputs")
    def send_outputs(original: Any, self: Any, outputs: Any) -> None:
        keys = list(self._selector.get_map().values())
        for connection in [key.data for key in keys if hasattr(key.data, "sequence_ids")]:
            others = [output for output in outputs if output.sequence_id not in connection.sequence_ids]
            if others:
                self._send(connection, core_server.encode(core_server.Step(others)))
        original(self, outputs)


@bug(
    "All API keys are one tenant's.",
    caught_by="engines/server/tests/http/test_server_access.py"
    "::test_each_key_is_a_tenant_and_nothing_in_the_body_changes_it",
)
def one_tenant_for_all_keys() -> None:
    from sagellm.server.http import access_control

    @change(access_control, "tenant_of")
    def tenant_of(original: Any, key: bytes) -> Any:
        return original(b"")


@bug(
    "Where a request has a salt, the key of its KV lacks its tenant.",
    caught_by="engines/server/tests/http/test_server_access.py"
    "::test_a_salt_divides_what_a_key_shares_and_joins_no_two_keys",
)
def a_tenant_dropped_by_a_salt() -> None:
    from sagellm.core import Namespace
    from sagellm.server.http.generation import Generation

    @change(Generation, "_namespace")
    def namespace(original: Any, self: Any, own: Any, body: Any) -> Any:
        found = original(self, own, body)
        return Namespace(salt=found.salt) if body.cache_salt else found


@bug(
    "Requests with any Host header are answered, as after DNS rebinding.",
    caught_by="engines/server/tests/http/test_server_access.py::test_other_hosts_are_refused_on_loopback",
)
def a_foreign_host_answered() -> None:
    from sagellm.server.http.access_control import AccessControl

    @change(AccessControl, "__init__")
    def init(original: Any, self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self._hosts = None


# -- running


class _Watch:
    """A pytest plugin that collects failing tests, but not failing fixtures."""

    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        if report.when == "call":
            self.failures.append((node.nodeid, call.excinfo.typename))


def run_tests(node_ids: Sequence[str], plant: Callable[[], None] | None = None) -> Outcome:
    """Run tests of this suite in a separate process, with a bug planted or without."""
    reading, writing = os.pipe()
    started_s = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_as_child(node_ids, plant, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said:
        raise RuntimeError(f"the process that ran {' '.join(node_ids)} ended without a result")
    exit_code, failures = json.loads(said)
    return Outcome(exit_code, [tuple(each) for each in failures], time.monotonic() - started_s)


def _run_as_child(node_ids: Sequence[str], plant: Callable[[], None] | None, writing: int) -> None:
    watch = _Watch()
    log = Path(os.environ["PLANTED_LOG"]) if "PLANTED_LOG" in os.environ else Path(os.devnull)
    exit_code = -1
    try:
        os.chdir(ROOT)
        with log.open("a") as file, redirect_stdout(file):
            if plant is not None:
                plant()
            options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=120", "--tb=short"]
            exit_code = int(pytest.main([*options, *node_ids], plugins=[watch]))
    finally:
        with os.fdopen(writing, "w", encoding="utf-8") as pipe:
            json.dump([exit_code, watch.failures], pipe)
        os._exit(0)


def import_what_tests_import() -> None:
    """Import slow modules once, before any process is forked, by running a small model."""
    import httpx  # noqa: F401
    import hypothesis  # noqa: F401
    import torch
    import uvicorn  # noqa: F401
    from transformers import AutoModelForCausalLM

    import sagellm.server.http
    import sagellm.server.remote  # noqa: F401
    from sagellm.engines import LLMEngine, SamplingParams
    from sagellm.engines.testing import make_checkpoint

    torch.set_num_threads(1)  # no pool of threads, which a forked process would not have
    with TemporaryDirectory() as folder:
        checkpoint = str(make_checkpoint(Path(folder), family="qwen3", seed=7))
        engine = LLMEngine(model=checkpoint, dtype="float32", device="cpu", num_blocks=64)
        engine.generate("the river", SamplingParams(max_tokens=2))
        reference = AutoModelForCausalLM.from_pretrained(checkpoint)
        reference.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    gc.collect()
    gc.freeze()  # the collector of a forked process would copy every page


def outcomes(bugs: Sequence[Bug]) -> Iterator[tuple[str, bool, Outcome]]:
    """Yield for "none", then for each bug, whether the outcome is the expected one, and the outcome."""
    import_what_tests_import()
    clean = run_tests(sorted({each.caught_by for each in bugs}))
    yield "none", clean.exit_code == 0, clean
    for each in bugs:
        outcome = run_tests([each.caught_by], each.plant)
        yield each.name, outcome.is_caught, outcome


def main() -> int:
    """Print a line for each bug."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", help="of bugs; default: all")
    parser.add_argument("--list", action="store_true", help="list the bugs and plant none")
    options = parser.parse_args()
    known = {each.name: each for each in BUGS}
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no bug is called {unknown[0]!r}; there are: {', '.join(known)}")
    bugs = [known[name] for name in options.names] or BUGS
    if options.list:
        for each in bugs:
            print(f"{each.name}\n  {each.breaks}\n  {each.caught_by}")
        return 0
    all_expected = True
    for name, is_expected, outcome in outcomes(bugs):
        all_expected &= is_expected
        found = "; ".join(f"{error} in {node_id}" for node_id, error in outcome.failures) or "all passed"
        mark = "" if is_expected else f"WRONG (pytest exit code {outcome.exit_code}): "
        print(f"{name}: {mark}{found} ({outcome.duration_s:.1f} s)", flush=True)
    return 0 if all_expected else 1


if __name__ == "__main__":
    sys.exit(main())
