"""Greedy float32 output equals transformers' generate, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity import (
    CHECKPOINTS,
    Case,
    Reference,
    all_cases,
    compare,
    make_engine,
    pairwise_cases,
)

SUITE = [Case(name, pool="tight", block_size=8, max_num_batched_tokens=17) for name in CHECKPOINTS]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    built: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in built:
            built[name] = Reference.build(folder, name)
        return built[name]

    return reference


def check(case: Case, reference: Reference) -> None:
    engine = make_engine(case, reference)
    comparison = compare(case, reference, engine)
    print(f"{case}: {comparison.num_tokens} tokens, {comparison.allowed} allowed differences")
    assert comparison.is_exact, "\n".join(comparison.wrong[:5])
    # A budget of one token is taken by the sequence that runs, so that no second one is admitted beside it.
    if case.pool == "tight" and case.max_num_batched_tokens > 1:
        assert engine.metrics().num_preemptions > 0
    assert engine.client.core.kv.available_blocks == engine.client.core.kv.total_blocks
    engine.client.core.kv.check_integrity()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_reference_says_something(references: Any, name: str) -> None:
    reference = references(name)
    prompts = reference.long_prompts[::4] + reference.short_prompts[::4]
    assert min(len(set(reference.generate(prompt))) for prompt in prompts) >= 16


@pytest.mark.parametrize("case", SUITE, ids=str)
def test_tokens_equal_the_reference(references: Any, case: Case) -> None:
    check(case, references(case.checkpoint))


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
@pytest.mark.parametrize("case", pairwise_cases(list(CHECKPOINTS)), ids=str)
def test_tokens_equal_the_reference_pairwise(references: Any, case: Case) -> None:
    check(case, references(case.checkpoint))


@pytest.mark.matrix
@pytest.mark.parametrize("case", all_cases(list(CHECKPOINTS)), ids=str)
def test_tokens_equal_the_reference_in_every_combination(references: Any, case: Case) -> None:
    check(case, references(case.checkpoint))
