"""What each fusion of the backend native gains: `python benchmarks/fusion.py MODEL`.

For each of the passes qkv, gate_up, norm_linear and rope_store: steps with all of them beside steps without
that one, in turn: decode at batch 1 and 8 over a context of 256, and a prompt of 512. `ratio` is the time
without the pass over the time with it: above 1 it pays. Makes MODEL, of random weights in the Qwen3-0.6B
shape, if it is not there. The logits of both are compared bit by bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import foreign_cores, output_flags, publish, spread
from make_model import ensure

from sagellm.accel.fusion import FUSIONS
from sagellm.core import InputBatch, KVLayout, PluginRegistry
from sagellm.engines.config.sections import ModelConfig
from sagellm.engines.loading.load import OpenedModel, open_model

BLOCK_SIZE, NUM_CONTEXT = 16, 256
LOADS = {"decode 1": (1, 1), "decode 8": (8, 1), "prefill 512": (1, 512)}
STEPS = {"decode 1": 8, "decode 8": 4, "prefill 512": 1}


def make(opened: OpenedModel, fusions: tuple[str, ...]) -> Callable[[InputBatch], torch.Tensor]:
    """Load the model, compute the context, and return the forward pass."""
    from sagellm.accel.native.backend import NativeForwardBackend

    backend = NativeForwardBackend(
        opened.spec, opened.weights, device=torch.device("cpu"), dtype=opened.dtype, fusions=fusions
    )
    (group,) = opened.spec.kv_groups("bfloat16")
    backend.initialize_kv_caches([KVLayout(group=group, block_size=BLOCK_SIZE)], [8 * 64])
    backend.forward(batch(8, NUM_CONTEXT))  # the context of all steps
    return backend.forward


def batch(num_seqs: int, num_tokens: int) -> InputBatch:
    """Return a step in which each sequence computes so many tokens behind its context."""
    start = NUM_CONTEXT if num_tokens == 1 else 0
    positions = torch.arange(start, start + num_tokens).repeat(num_seqs)
    blocks = torch.arange(num_seqs * 64).view(num_seqs, 64)
    owners = torch.arange(num_seqs).repeat_interleave(num_tokens)
    return InputBatch(
        input_ids=torch.arange(num_seqs * num_tokens) % 1000 + 5,
        position_ids=positions,
        slot_mapping=blocks[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_tables=blocks,
        query_lens=[num_tokens] * num_seqs,
        seq_lens=[start + num_tokens] * num_seqs,
        logits_indices=torch.arange(num_seqs) * num_tokens + num_tokens - 1,
    )


def seconds_of(forward: Callable[[InputBatch], torch.Tensor], step: InputBatch, count: int) -> float:
    """Return the seconds of one of `count` steps."""
    begun = time.perf_counter()
    for _ in range(count):
        forward(step)
    return (time.perf_counter() - begun) / count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    output_flags(parser, "fusion")
    options = parser.parse_args()
    foreign = foreign_cores()
    ensure(options.model)
    opened = open_model(ModelConfig(name=str(options.model)), PluginRegistry.load())
    whole = make(opened, FUSIONS)
    rows = [f"{'without':<12} {'step':<12} {'ms with':>8} {'ms without':>10}  ratio min / median / p99"]
    found: dict[str, dict[str, object]] = {}
    for left_out in FUSIONS:
        apart = make(opened, tuple(name for name in FUSIONS if name != left_out))
        for name, (num_seqs, num_tokens) in LOADS.items():
            step = batch(num_seqs, num_tokens)
            if not torch.equal(whole(step), apart(step)):
                raise SystemExit(f"without {left_out} the logits of {name} differ")
            times: dict[str, list[float]] = {"with": [], "without": []}
            for pair in range(options.pairs):
                for which in ("with", "without") if pair % 2 else ("without", "with"):
                    run = whole if which == "with" else apart
                    times[which].append(seconds_of(run, step, STEPS[name]))
            ratios = [b / a for a, b in zip(times["with"], times["without"], strict=True)]
            with_ms, without_ms = (
                spread([1e3 * each for each in times[which]], 3) for which in ("with", "without")
            )
            ratio = spread(ratios)
            found.setdefault(left_out, {})[name] = {
                "with_ms": with_ms,
                "without_ms": without_ms,
                "ratio": ratio,
            }
            rows.append(
                f"{left_out:<12} {name:<12} {with_ms['median']:8.2f} {without_ms['median']:10.2f}  "
                f"{ratio['min']:.3f} / {ratio['median']:.3f} / {ratio['p99']:.3f}"
            )
        del apart
    publish("fusion", "\n".join(rows), options, fusions=found, foreign_cores=foreign)


if __name__ == "__main__":
    main()
