"""bf16: batched, chunked, cached and preempted output against our own unbatched, uncached run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import CHECKPOINTS, NUM_OUTPUT_TOKENS, SHORT, make_prompts

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.testing import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
MARGIN_ULPS = 2.0  # a difference is allowed only below this top-2 margin, in bf16 ulps of the top logit


def tokens_per_allowed_difference() -> int:
    """10,000, or 1,000 where torch's own products already depend on the number of rows (AMX does)."""
    generator = torch.Generator().manual_seed(0)
    for width in (64, 112, 128, 168, 1024):
        weight = torch.randn(256, width, generator=generator).bfloat16()
        rows = torch.randn(64, width, generator=generator).bfloat16()
        alone = torch.cat([torch.nn.functional.linear(row[None], weight) for row in rows])
        if any(
            not torch.equal(torch.nn.functional.linear(rows[:number], weight), alone[:number])
            for number in (8, 33, 64)
        ):
            return 1_000
    return 10_000


@dataclass
class Alone:
    """What one prompt generates by itself, and how clear each choice was."""

    tokens: list[int]
    margins: list[float] = field(default_factory=list)  # bf16 ulps


def make_engine(path: Path, **settings: Any) -> LLMEngine:
    return LLMEngine(model=str(path), dtype="bfloat16", device="cpu", block_size=8, **settings)


def run_alone(path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[Alone]:
    engine = make_engine(path, num_blocks=64, enable_prefix_caching=False)
    runner: Any = engine.client.core.runner  # type: ignore[attr-defined]
    execute, margins = runner.execute_model, []

    def record(batch: Any) -> Any:
        logits = execute(batch)
        first, second = torch.as_tensor(logits)[0].topk(2).values.tolist()
        margins.append((first - second) / 2.0 ** (math.floor(math.log2(abs(first))) - 7))
        return logits

    monkeypatch.setattr(runner, "execute_model", record)
    results = []
    for prompt in prompts:
        margins.clear()
        results.append(Alone(engine.generate(prompt, GREEDY)[0].outputs[0].token_ids, margins.copy()))
    return results


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((index for index, (a, b) in pairs if a != b), None)


WAYS: dict[str, dict[str, Any]] = {
    "batched": {"num_blocks": 400, "enable_prefix_caching": False},
    "chunked and cached": {"num_blocks": 400, "max_num_batched_tokens": 33},
    "preempted": {"num_blocks": 40, "max_num_batched_tokens": 33},
}


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("qwen3",), id="one"),
        pytest.param(("qwen2", "llama", "mistral", "fallback-1"), id="four more", marks=pytest.mark.full),
    ],
)
def test_bf16_in_a_batch_equals_bf16_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
) -> None:
    num_tokens, allowed, wrong = 0, 0, []
    for name in names:
        path = make_checkpoint(tmp_path / name, seed=3, dtype="bfloat16", **CHECKPOINTS[name])
        prompts = make_prompts(515, SHORT)
        expected = run_alone(path, prompts, monkeypatch)
        for way, settings in WAYS.items():
            engine = make_engine(path, **settings)
            outputs = engine.generate(prompts, GREEDY)
            assert (engine.metrics().num_preemptions > 0) == (way == "preempted")
            for prompt, output, alone in zip(prompts, outputs, expected, strict=True):
                num_tokens += len(alone.tokens)
                first = first_difference(output.outputs[0].token_ids, alone.tokens)
                if first is None:
                    continue
                margin = alone.margins[first]
                if margin < MARGIN_ULPS:
                    allowed += 1
                else:
                    wrong.append(f"{name} {way}: prompt of {len(prompt)}, output {first}, {margin} ulps")
    with capsys.disabled():
        print(f"\nbf16: {num_tokens} tokens, {allowed} allowed differences, {len(wrong)} wrong")
    assert not wrong
    assert allowed * tokens_per_allowed_difference() <= num_tokens
