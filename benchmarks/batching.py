"""Does batching pay, and what does the engine cost on top of the model?

`python benchmarks/batching.py MODEL`: (1) 16 concurrent requests against the same 16 one after another,
in output tokens per second; (2) one request (prompt 128, output 128) against transformers' generate, in
pairs, bf16. The two sides of each pair run one after the other in the same process.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from common import foreign_cores, report, spread
from make_model import ensure

from sagellm.engines import LLMEngine, SamplingParams


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids, never the same twice, so that no prefix is shared."""
    rng = random.Random(seed)
    return [rng.randrange(3, 20_000) for _ in range(length)]


def run_ours(engine: LLMEngine, prompts: list[list[int]], num_tokens: int) -> float:
    """Return output tokens per second over the whole run."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params)
    elapsed = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed


def run_transformers(model: Any, ids: list[int], num_tokens: int) -> float:
    """Return output tokens per second of one request."""
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
    return (out.shape[1] - len(ids)) / (time.perf_counter() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-transformers", action="store_true")
    options = parser.parse_args()
    path = ensure(options.model)
    others = foreign_cores()
    engine = LLMEngine(model=str(path), dtype="bfloat16", num_blocks=1024, enable_prefix_caching=False)
    run_ours(engine, [prompt(128, 1)], 8)

    batched, single = [], []
    for round_ in range(options.rounds):
        prompts = [prompt(128, 100 + 16 * round_ + i) for i in range(16)]
        batched.append(run_ours(engine, prompts, 32))
        started = time.perf_counter()
        for ids in prompts:
            run_ours(engine, [ids], 32)
        single.append(16 * 32 / (time.perf_counter() - started))
    figures: dict[str, Any] = {
        "foreign_cores": others,
        "batched_16_tok_s": spread(batched),
        "one_after_another_tok_s": spread(single),
        "batching_gain": spread([a / b for a, b in zip(batched, single, strict=True)]),
    }
    if not options.skip_transformers:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        run_transformers(model, prompt(128, 2), 8)
        ours, theirs = [], []
        for pair in range(options.pairs):
            ids = prompt(128, 1000 + pair)
            ours.append(run_ours(engine, [ids], 128))
            theirs.append(run_transformers(model, ids, 128))
        figures |= {
            "ours_tok_s": spread(ours),
            "transformers_tok_s": spread(theirs),
            "ratio": spread([a / b for a, b in zip(ours, theirs, strict=True)]),
        }
    report("batching", **figures)


if __name__ == "__main__":
    main()
