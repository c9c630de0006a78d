"""What widening is worth on a CPU with slow 16-bit products: `python benchmarks/widened_prefill.py MODEL`.

Time to the first token of 512 and tokens per second of decode, in float32, in bfloat16 and with int8 weights,
the last two as an engine comes and with weights that are never widened. A CPU without AVX-512 is
imitated, and the result says so, with ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import foreign_cores, output_flags, publish, spread
from make_model import ensure

from sagellm.accel import widening
from sagellm.engines import LLMEngine, SamplingParams

LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
NAMES = ("float32", "bfloat16", "bfloat16, never widened", "int8", "int8, never widened")


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Load the model in one way and time requests: of one token, then of some more."""
    kind, never = name.removesuffix(", never widened"), name.endswith("never widened")
    found = widening._measured
    if never:
        widening._measured = lambda dtype: widening.NEVER  # type: ignore[assignment]
    try:
        engine = LLMEngine(
            model=str(options.model),
            dtype="float32" if kind == "float32" else "bfloat16",
            quantization="int8" if kind == "int8" else None,
            num_blocks=128,
            enable_prefix_caching=False,
        )
        prompt = [3 + 7 * index % 20_000 for index in range(options.prompt)]
        repeats = 1 if never else options.repeats
        _time_s(engine, prompt[:16], 2)
        prefill_s = [_time_s(engine, prompt, 1) for _ in range(repeats)]
        decode = [
            options.tokens / _time_s(engine, prompt[:1], options.tokens) for _ in range(options.repeats)
        ]
        engine.close()
    finally:
        widening._measured = found
        gc.collect()
    return {"prefill_s": spread(prefill_s), "decode_tok_s": spread(decode, 2)}


def _time_s(engine: LLMEngine, prompt: list[int], num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started_s = time.perf_counter()
    engine.generate([prompt], params)
    return time.perf_counter() - started_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3, help="of each; once where nothing is widened")
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=list(NAMES))
    output_flags(parser, "widened-prefill")
    options = parser.parse_args()
    ensure(options.model, sharpness=1 / 3)
    others = foreign_cores()
    found = widening.widening_for(torch.bfloat16, torch.device("cpu"))
    rows = {name: measure(options, name) for name in options.ways}
    text = [f"{'':26}prefill of {options.prompt}, s   decode, tok/s"]
    for name, row in rows.items():
        text.append(f"{name:26}{row['prefill_s']['median']:18.2f}{row['decode_tok_s']['median']:16.2f}")
    publish(
        "widened-prefill",
        "\n".join(text),
        options,
        foreign_cores=others,
        imitated_cpu={name: os.environ[name] for name in LIMITS if name in os.environ},
        widening=dataclasses.asdict(found),
        prompt_tokens=options.prompt,
        threads=torch.get_num_threads(),
        ways=rows,
    )


if __name__ == "__main__":
    main()
