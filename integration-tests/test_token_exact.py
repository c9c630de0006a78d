"""Greedy float32 output equals transformers' generate, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity import (
    CHECKPOINTS,
    Case,
    Comparison,
    Reference,
    all_cases,
    compare,
    make_engine,
    pairwise_cases,
)

from sagellm.accel.native import examine

LLAMAS = [name for name in CHECKPOINTS if name.startswith("llama")]
HALVES = [
    pytest.param(LLAMAS, id="llama"),
    pytest.param([name for name in CHECKPOINTS if name not in LLAMAS], id="others"),
]
"""Many checkpoints together: one near-tie of a prompt shows in several cases of its checkpoint."""

SUITE = [
    Case(name, pool="tight", block_size=8, max_num_batched_tokens=17, num_prompts=18, forward=forward)
    for name in CHECKPOINTS
    for forward in (("auto", "sdpa") if name in ("qwen3", "mistral") else ("auto",))
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    built: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in built:
            built[name] = Reference.build(folder, name)
        return built[name]

    return reference


def check_all(cases: list[Case], references: Any) -> None:
    """Run cases that together have more than 10,000 tokens: in fewer no difference at all is allowed."""
    comparison = sum((check(case, references(case.checkpoint)) for case in cases), Comparison())
    print(f"{comparison.num_tokens} tokens, {comparison.allowed} allowed differences")
    assert comparison.num_tokens > 10_000
    assert comparison.is_exact


def check(case: Case, reference: Reference) -> Comparison:
    engine = make_engine(case, reference)
    info = engine.client.core.info
    if case.forward == "auto" and "fallback" not in case.checkpoint and examine().variant is not None:
        assert info.settings["forward.backend"] == "sagellm-accel:native", info.refusals
    comparison = compare(case, reference, engine)
    print(f"{case}: {comparison.num_tokens} tokens, {comparison.allowed} allowed differences")
    assert not comparison.wrong, "\n".join(comparison.wrong[:5])
    # A budget of one token is taken by the sequence that runs, so that no second one is admitted beside it.
    if case.pool == "tight" and case.max_num_batched_tokens > 1:
        assert engine.metrics().num_preemptions > 0
    assert engine.client.core.kv.available_blocks == engine.client.core.kv.total_blocks
    engine.client.core.kv.check_integrity()
    return comparison


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_reference_says_something(references: Any, name: str) -> None:
    reference = references(name)
    prompts = reference.long_prompts[:18:2] + reference.short_prompts[::4]
    reference.prepare(prompts)
    assert min(len(set(reference.generate(prompt))) for prompt in prompts) >= 16


@pytest.mark.no_cover
def test_tokens_equal_the_reference(references: Any) -> None:
    check_all(SUITE, references)


def test_the_allocator_makes_no_difference(references: Any) -> None:
    reference = references("qwen3")
    for prefix_caching in (True, False):
        case = Case("qwen3", pool="tight", block_size=8, prefix_caching=prefix_caching)
        engine = make_engine(case, reference, kv_allocator="buddy")
        comparison = compare(case, reference, engine)
        assert comparison.is_exact, "\n".join(comparison.wrong[:5])
        assert engine.metrics().num_preemptions > 0
        engine.client.core.kv.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("names", HALVES)
def test_tokens_equal_the_reference_pairwise(references: Any, names: list[str]) -> None:
    check_all(pairwise_cases(names), references)


@pytest.mark.matrix
@pytest.mark.parametrize("names", HALVES)
def test_tokens_equal_the_reference_in_every_combination(references: Any, names: list[str]) -> None:
    check_all(all_cases(names), references)
