"""Peak memory of a run: `python benchmarks/memory.py MODEL`; VmHWM against weights + KV + 500 MiB.

A fresh process loads the checkpoint, fills every KV block that it was given, and decodes a batch.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from common import report
from make_model import ensure

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.machine import peak_rss_mib


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--quantization", default=None)
    options = parser.parse_args()
    path = ensure(options.model)
    engine = LLMEngine(
        model=str(path), dtype="bfloat16", num_blocks=options.num_blocks, quantization=options.quantization
    )
    after_loading = peak_rss_mib()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 20_000) for _ in range(length)] for length in [2048, *[300] * 16]]
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    weights = engine.metrics().modules["model_family"].weight_bytes / 2**20
    kv = engine.layout.block_bytes * options.num_blocks / 2**20
    peak = peak_rss_mib()
    report(
        "memory",
        weights_mib=round(weights, 1),
        kv_mib=round(kv, 1),
        peak_after_loading_mib=round(after_loading, 1),
        peak_rss_mib=round(peak, 1),
        overhead_mib=round(peak - weights - kv, 1),
        limit_mib=500,
    )


if __name__ == "__main__":
    main()
