"""The comparison with transformers can fail: planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity import Case, Reference, compare, make_engine

from sagellm.core import AttentionBackendProtocol, InputBatch
from sagellm.engines import LLMEngine

CASE = Case("mistral", block_size=8, max_num_batched_tokens=512, pool="tight", forward="sdpa")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return Reference.build(folder, CASE.checkpoint)


def change_inputs(engine: LLMEngine, change: Callable[[InputBatch], None]) -> None:
    runner: Any = engine.client.core.runner  # type: ignore[attr-defined]
    prepare = runner.prepare_inputs

    def prepare_inputs(scheduled: Any) -> InputBatch:
        batch: InputBatch = prepare(scheduled)
        change(batch)
        return batch

    runner.prepare_inputs = prepare_inputs


def shift_decode_positions(engine: LLMEngine) -> None:
    def shift(batch: InputBatch) -> None:
        starts = [sum(batch.query_lens[:row]) for row in range(batch.num_seqs)]
        for start, length in zip(starts, batch.query_lens, strict=True):
            if length == 1:
                batch.position_ids[start] += 1

    change_inputs(engine, shift)


def swap_two_blocks(engine: LLMEngine) -> None:
    def swap(batch: InputBatch) -> None:
        for row, length in enumerate(batch.seq_lens):
            if length > 16:
                batch.block_tables[row, [0, 1]] = batch.block_tables[row, [1, 0]].clone()

    change_inputs(engine, swap)


def shorten_the_window(engine: LLMEngine) -> None:
    backend: AttentionBackendProtocol = engine.client.core.runner.backend._attention  # type: ignore[attr-defined]
    forward = backend.forward

    def forward_with_less(query: Any, key: Any, value: Any, layer_kv: Any, plan: object, spec: Any) -> Any:
        return forward(
            query, key, value, layer_kv, plan, replace(spec, sliding_window=spec.sliding_window - 1)
        )

    backend.forward = forward_with_less  # type: ignore[method-assign]


@pytest.mark.no_cover
def test_without_a_fault_every_token_is_equal(reference: Reference) -> None:
    assert compare(CASE, reference, make_engine(CASE, reference)).is_exact


@pytest.mark.parametrize("plant", [shift_decode_positions, swap_two_blocks, shorten_the_window])
def test_a_planted_fault_is_found(reference: Reference, plant: Callable[[LLMEngine], None]) -> None:
    engine = make_engine(CASE, reference)
    plant(engine)
    comparison = compare(CASE, reference, engine)
    print(f"{plant.__name__}: {len(comparison.wrong)} of the outputs are wrong")
    assert not comparison.is_exact
