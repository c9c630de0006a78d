"""The conformance kit can fail: a provider of each kind with each of its methods broken, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from mutants import breaking, failures

from sagellm.core import KINDS, ExtraArg, PluginRegistry, ScheduleIR, SchedulerPassProtocol
from sagellm.engines.sampling.processors import BadWords
from sagellm.engines.testing.choice_grammar import ChoiceGrammar
from sagellm.testing import kv_tier
from sagellm.testing.installed import UncheckedError, factory_contract, installed_contract

WHOLE = {
    "draft_proposer": "suffix",
    "engine_adapter": "lmdeploy",
    "eviction_policy": "lru",
    "kv_allocator": "free_list",
    "kv_pool": "paged",
    "kv_tier": "host",
    "lifetime_predictor": "statistical",
    "prefix_cache": "radix",
    "quantizer": "int8",
    "reasoning_parser": "qwen3",
    "scheduler": "base",
    "sparsifier": "magnitude",
    "tool_parser": "hermes",
    "topology": "local",
    "trace_reader": "azure",
}
"""Of each kind one that keeps its contract; those that are missing here are `OURS`."""

UNCHECKED = {
    *("attention_backend", "checkpoint_format", "engine", "executor", "forward_backend"),
    *("kv_offload", "kv_saves", "model_family"),
}
"""Kinds without a contract in the kit, which therefore says that they were not checked."""

RULES: dict[str, dict[str, tuple[str, str | None]]] = {
    "draft_proposer": {
        "arrived": ("a short sequence may arrive", "a short sequence may arrive"),
        "departed": (
            "a seat has one sequence after another",
            "metrics count what was told and asked",
        ),
        "extended": (
            "tokens told at once or one by one are the same",
            "tokens told at once or one by one are the same",
        ),
        "metrics": ("metrics count what was told and asked", "metrics count what was told and asked"),
        "propose": ("the same question has the same answer", "the same question has the same answer"),
    },
    "eviction_policy": {
        "add_candidate": (
            "a removed candidate is not named until it is added again",
            "a removed candidate is not named until it is added again",
        ),
        "metrics": ("metrics count what was reported", "metrics count what was reported"),
        "on_hit": ("metrics count what was reported", "metrics count what was reported"),
        "on_insert": (
            "a removed candidate is not named until it is added again",
            "metrics count what was reported",
        ),
        "on_remove": ("every candidate is named once before none is left", "metrics count what was reported"),
        "remove_candidate": (
            "a removed candidate is not named until it is added again",
            "a removed candidate is not named until it is added again",
        ),
        "select_victims": ("a pinned sequence is never chosen", "a pinned sequence is never chosen"),
        "victim": (
            "a new policy names no victim",
            "a removed candidate is not named until it is added again",
        ),
        "victims": (
            "leaves taken at once are those that are named one by one",
            "leaves taken at once are those that are named one by one",
        ),
    },
    "engine_adapter": {
        "engine": ("it says which engine it is about", "it says which engine it is about"),
        "export": ("a command is text", "a command is text"),
        "knobs": ("a command is text", "a command is text"),
        "refusals": (
            "what the engine has not is refused by name",
            "what the engine has not is refused by name",
        ),
    },
    "grammar": {
        "advance": ("masks say what advances", "masks say what advances"),
        "mask": ("masks say what advances", "masks say what advances"),
        "metrics": ("metrics count what was done", "metrics count what was done"),
        "prepare": ("what is not valid is refused", "what is not valid is refused"),
        "rollback": ("a rollback undoes what was appended", "a rollback undoes what was appended"),
        "start": ("states share nothing", "states share nothing"),
    },
    "kv_allocator": {
        "all_allocated": ("an unknown id cannot be freed", "an unknown id cannot be freed"),
        "allocate": ("a size of zero or none at all is refused", "a size of zero or none at all is refused"),
        "check_integrity": ("an unknown id cannot be freed", None),
        "claim": (
            "the very blocks that are asked for can be claimed",
            "the very blocks that are asked for can be claimed",
        ),
        "free": ("all blocks can be had at once", "all blocks can be had at once"),
        "metrics": ("a size of zero or none at all is refused", "a size of zero or none at all is refused"),
        "num_free_blocks": (
            "a size of zero or none at all is refused",
            "a size of zero or none at all is refused",
        ),
        "occupancy": ("a size of zero or none at all is refused", "a size of zero or none at all is refused"),
    },
    "kv_pool": {
        "allocate": (
            "a block of one reference is written to as it is",
            "a block of one reference is written to as it is",
        ),
        "allocate_each": (
            "if there is no block for one there is none for any",
            "if there is no block for one there is none for any",
        ),
        "block_info": (
            "a block of one reference is written to as it is",
            "a block of one reference is written to as it is",
        ),
        "block_size": ("everything is free at first", "everything is free at first"),
        "check_integrity": ("a shared block is exchanged for a fresh one", None),
        "copy_on_write": (
            "a block of one reference is written to as it is",
            "a block of one reference is written to as it is",
        ),
        "evict_if_needed": (
            "an evictor that frees nothing is not asked for ever",
            "an evictor that frees nothing is not asked for ever",
        ),
        "free": (
            "a shared block is exchanged for a fresh one",
            "a shared block is exchanged for a fresh one",
        ),
        "get_free_blocks": (
            "a shared block is free after its last reference",
            "a shared block is free after its last reference",
        ),
        "metrics": (
            "a block of one reference is written to as it is",
            "a block of one reference is written to as it is",
        ),
        "move": ("a wrong move is refused whole", "a wrong move is refused whole"),
        "plan_moves": ("moves bring what is free together", "moves bring what is free together"),
        "set_evictor": (
            "an evictor that frees nothing is not asked for ever",
            "an evictor that frees nothing is not asked for ever",
        ),
        "share": (
            "a shared block is exchanged for a fresh one",
            "a shared block is exchanged for a fresh one",
        ),
        "total_blocks": (
            "a block of one reference is written to as it is",
            "a block of one reference is written to as it is",
        ),
    },
    "kv_tier": {
        "check_integrity": ("a block that is not there is wanted", None),
        "close": ("a block of another tenant salt or adapter is a miss", None),
        "contains": (
            "a block of another tenant salt or adapter is a miss",
            "a block that is not there is wanted",
        ),
        "get_cost_ns": ("a new tier is empty", "a new tier is empty"),
        "metrics": ("a new tier is empty", "a new tier is empty"),
        "poll": (
            "a block of another tenant salt or adapter is a miss",
            "a block of another tenant salt or adapter is a miss",
        ),
        "stored": (
            "a block of another tenant salt or adapter is a miss",
            "a block of another tenant salt or adapter is a miss",
        ),
        "submit": (
            "a block of another tenant salt or adapter is a miss",
            "a block of another tenant salt or adapter is a miss",
        ),
    },
    "lifetime_predictor": {
        "forget": ("an aborted sequence is forgotten and teaches nothing", None),
        "metrics": ("a fresh predictor predicts", "a fresh predictor predicts"),
        "predict": ("a fresh predictor predicts", "a fresh predictor predicts"),
        "predict_all": (
            "a batch is asked about as one after another",
            "a batch is asked about as one after another",
        ),
        "update": ("a length that is no count is refused", "a length that is no count is refused"),
    },
    "logits_processor": {
        "apply": ("a row is the same alone and in a batch in any order", "metrics count sequences and rows"),
        "extra_args": (
            "the extra args that it reads have names",
            "the extra args that it reads have names",
        ),
        "metrics": ("metrics count sequences and rows", "metrics count sequences and rows"),
        "start": ("a row is the same alone and in a batch in any order", None),
    },
    "prefix_cache": {
        "answers": (
            "answers are remembered with their prompts",
            "answers are remembered with their prompts",
        ),
        "check_integrity": ("a full cache keeps what fits and evicts nothing", None),
        "clear": ("a locked path survives eviction", "a locked path survives eviction"),
        "evict": ("a lock fails after blocks entered or left", "a lock fails after blocks entered or left"),
        "explain_miss": ("a miss is explained by what matches", "a miss is explained by what matches"),
        "insert_prefix": ("a block cannot hold two contents", "a block cannot hold two contents"),
        "keep_evicted": ("what is shown to a keeper is what is evicted", None),
        "lock": (
            "a hit is reported for every node of the path",
            "a hit is reported for every node of the path",
        ),
        "make_room": (
            "room is made for what is about to be inserted",
            "room is made for what is about to be inserted",
        ),
        "match_prefix": ("a block cannot hold two contents", "a block cannot hold two contents"),
        "metrics": ("a lock fails after blocks entered or left", "a lock fails after blocks entered or left"),
        "move_blocks": ("a move that cannot be changes nothing", "a move that cannot be changes nothing"),
        "note_miss": (
            "a noted miss is explained later as it was",
            "a noted miss is explained later as it was",
        ),
        "num_evictable_blocks": ("a locked path survives eviction", "a locked path survives eviction"),
        "num_idle_blocks": (
            "num idle blocks is what a lock would take",
            "num idle blocks is what a lock would take",
        ),
        "pin": ("pins are listed until they are ended", "pins are listed until they are ended"),
        "pins": ("pins are listed until they are ended", "pins are listed until they are ended"),
        "query_by_prefix": ("lookups are counted by lock and query", "lookups are counted by lock and query"),
        "record_answer": ("answers are remembered with their prompts", None),
        "replace_policy": (
            "another policy evicts what is cached",
            "another policy evicts what is cached",
        ),
        "runs": ("runs are all that is cached parents first", None),
        "subscribe": ("a subscriber hears of every block or of none", None),
        "unlock": ("a locked path survives eviction", "a locked path survives eviction"),
        "unpin": ("pins are listed until they are ended", "pins are listed until they are ended"),
    },
    "quantizer": {
        "count": (
            "metrics count bytes and the largest error",
            "metrics count bytes and the largest error",
        ),
        "dequantize": (
            "a round trip stays within the error that is stated",
            "a round trip stays within the error that is stated",
        ),
        "integer_form": ("a form for kernels is what quantize makes", None),
        "linear": (
            "linear multiplies by what the output stands for",
            "linear multiplies by what the output stands for",
        ),
        "metrics": ("equal weights give equal outputs", "equal weights give equal outputs"),
        "quantize": (
            "a round trip stays within the error that is stated",
            "a round trip stays within the error that is stated",
        ),
        "weight_form": ("a form of a checkpoint is that of the values", None),
    },
    "reasoning_parser": {
        "fits": ("it says which templates it fits", "it says which templates it fits"),
        "start": ("tags surround reasoning", "tags surround reasoning"),
        "tags": ("tags surround reasoning", "tags surround reasoning"),
    },
    "scheduler": {
        "add_optimization_pass": (
            "a pass that breaks a rule is named",
            "a pass that breaks a rule is named",
        ),
        "apply_pass": (
            "a pass that breaks a rule is named",
            "a pass that breaks a rule is named",
        ),
        "metrics": ("counts add up", "counts add up"),
        "repeat": ("steps of a steady plan are counted", "steps of a steady plan are counted"),
        "schedule": (
            "a budget below the number running lets decodes rotate",
            "a budget below the number running lets decodes rotate",
        ),
        "set_passes": (
            "passes are shown and replaced between steps",
            "passes are shown and replaced between steps",
        ),
        "lengthen_steps": ("steps are lengthened and shortened again", None),
        "watch": (
            "passes are shown and replaced between steps",
            "passes are shown and replaced between steps",
        ),
    },
    "scheduler_pass": {
        "name": ("a pass is a frozen dataclass with a name", "a pass is a frozen dataclass with a name"),
        "rests": (
            "a pass that rests would decide nothing in calm steps",
            "a pass that rests would decide nothing in calm steps",
        ),
        "run": (
            "a pass decides what it may and writes to nothing",
            "a pass decides what it may and writes to nothing",
        ),
    },
    "sparsifier": {
        "densify": (
            "what is kept comes back bit by bit",
            "what is kept comes back bit by bit",
        ),
        "kernel": ("a kernel multiplies by the weight as it is", None),
        "linear": (
            "linear multiplies by what the output stands for",
            "linear multiplies by what the output stands for",
        ),
        "metrics": ("metrics count what was pruned", "metrics count what was pruned"),
        "prune": ("prune is sparsify and densify", "prune is sparsify and densify"),
        "sparsify": (
            "exactly n of each m columns are kept",
            "exactly n of each m columns are kept",
        ),
    },
    "tool_parser": {
        "fits": ("it says which templates it fits", "it says which templates it fits"),
        "special_tokens": ("its special tokens are texts", "its special tokens are texts"),
        "start": ("answers share nothing", "answers share nothing"),
        "structure": ("a structure is a tag or none", None),
    },
    "topology": {
        "metrics": ("metrics tell how the last reading went", "metrics tell how the last reading went"),
        "read": (
            "available memory is within the limit and the limit within the machine",
            "available memory is within the limit and the limit within the machine",
        ),
    },
    "trace_reader": {
        "can_read": ("it knows its own format", "it knows its own format"),
        "read": ("it reads no further than it is asked", "it reads no further than it is asked"),
    },
}
"""By kind and method: the rule that fails where it raises, and where it returns None and does nothing.

None where that is allowed: an integrity check that finds nothing wrong, a `close` with nothing to close, a
processor that no request asks for, a cache that shows and tells nothing, calls that cannot be forced.
"""

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:40.68,370,44
2023-11-16 18:15:41.68,371,44
2023-11-16 18:15:42.68,372,44
"""
SAMPLES = {
    "trace_reader": TRACE,
    "reasoning_parser": "<think>\nhm\n</think>\n\nYes.",
    "tool_parser": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
}


@dataclass(frozen=True)
class OldestFirst(SchedulerPassProtocol):
    @property
    def name(self) -> str:
        return "oldest_first"

    def run(self, ir: ScheduleIR) -> ScheduleIR:
        if not ir.can_admit:
            return ir
        return ir.order_pending(np.argsort(ir.pending.arrived_time, kind="stable"))

    def rests(self, state: None) -> bool:
        return True


class StyledBadWords(BadWords):
    def extra_args(self) -> list[ExtraArg]:
        return [ExtraArg(name="style", type="str")]


@cache
def registry() -> PluginRegistry:
    return PluginRegistry.load()


OURS: dict[str, Callable[..., Any]] = {
    "grammar": ChoiceGrammar,
    "logits_processor": StyledBadWords,
    "scheduler_pass": OldestFirst,
}


def factory(kind: str) -> Callable[..., Any]:
    if kind in OURS:
        return OURS[kind]
    found: Any = registry().resolve(kind, WHOLE[kind])
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("samples")
    for kind, text in SAMPLES.items():
        (folder / kind).write_text(text)
    return {kind: str(folder / kind) for kind in SAMPLES}


MUTANTS = [
    pytest.param(kind, method, fault, rule, id=f"{kind}-{method}-{fault}")
    for kind, methods in RULES.items()
    for method, rules in methods.items()
    for fault, rule in zip(("raises", "does nothing"), rules, strict=True)
    if rule is not None
]


@pytest.mark.parametrize(("kind", "method", "fault", "rule"), MUTANTS)
def test_a_broken_method_breaks_the_rule_that_it_should(
    kind: str, method: str, fault: str, rule: str, samples: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = partial(kv_tier.run_to_end, max_polls=1_000)  # a tier that does nothing never answers
    monkeypatch.setattr(kv_tier, "run_to_end", impatient)
    contract = factory_contract(kind, breaking(factory(kind), method, fault), sample=samples.get(kind))
    assert list(failures(contract, rule)) == [rule]


@pytest.mark.parametrize("kind", RULES)
def test_a_whole_provider_breaks_none_of_these_rules(kind: str, samples: dict[str, str]) -> None:
    contract = factory_contract(kind, factory(kind), sample=samples.get(kind))
    for rule in {rule for rules in RULES[kind].values() for rule in rules if rule is not None}:
        assert list(failures(contract, rule)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_method_of_each_kind_is_broken_once_or_the_kind_is_not_checked(
    kind: str, samples: dict[str, str]
) -> None:
    if kind in UNCHECKED:
        with pytest.raises(UncheckedError, match=f"no contract for the kind {kind}"):
            installed_contract(kind, "null")
        return
    contract: Any = factory_contract(kind, factory(kind), sample=samples.get(kind))
    assert set(RULES[kind]) == set(contract.methods)
