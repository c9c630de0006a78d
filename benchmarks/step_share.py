"""How much of a decode step is not the forward pass: `python benchmarks/step_share.py MODEL`.

32 sequences decode together, greedily and with usual sampling settings; a step is timed from the engine's
`step` to its outputs, and the forward pass inside it. Makes MODEL, of random weights in the Qwen3-0.6B shape,
if it is not there. Its logits are nearly uniform, so that top-p alone keeps most of the vocabulary: the most
that a draw has to read.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import foreign_cores, output_flags, publish, spread
from make_model import ensure

from sagellm.engines import LLMEngine, SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "min-p": {"temperature": 0.8, "min_p": 0.05},
}
WARM_STEPS = 4
NUM_CONTEXT = 256


class TimedForward:
    """Wraps a backend's `forward`, and adds up the time that it takes."""

    def __init__(self, engine: LLMEngine) -> None:
        backend: Any = engine.client.core.runner.backend  # type: ignore[attr-defined]
        self._forward = backend.forward
        self.spent_s = 0.0
        backend.forward = self

    def __call__(self, batch: Any) -> Any:
        """Run it."""
        begun_s = time.perf_counter()
        logits = self._forward(batch)
        self.spent_s += time.perf_counter() - begun_s
        return logits


def measure(
    engine: LLMEngine, forward: TimedForward, name: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Return milliseconds of a step in which all sequences decode."""
    params = SamplingParams(max_tokens=options.steps, ignore_eos=True, seed=1, **SETTINGS[name])
    rng = np.random.default_rng(0)
    for number in range(options.running):
        prompt = rng.integers(5, 1500, NUM_CONTEXT).tolist()
        engine.add_request(prompt, params, request_id=f"{name}-{number}")
    steps, forwards = [], []
    gc.collect()
    while engine.has_unfinished_requests():
        forward.spent_s = 0.0
        begun_s = time.perf_counter()
        outputs = engine.step()
        took_s = time.perf_counter() - begun_s
        if len(outputs) == options.running:
            steps.append(took_s * 1000)
            forwards.append(forward.spent_s * 1000)
    steps, forwards = steps[WARM_STEPS:], forwards[WARM_STEPS:]
    rest = [step - each for step, each in zip(steps, forwards, strict=True)]
    shares = [each / step for step, each in zip(steps, rest, strict=True)]
    return {
        "step_ms": spread(steps),
        "forward_ms": spread(forwards),
        "rest_ms": spread(rest),
        "rest_share": spread(shares),
    }


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return the figures as lines of text."""
    lines = [f"{'':>14}{'':>10}{'min':>10}{'median':>10}{'p99':>10}"]
    for name, figures in rows.items():
        for what, values in figures.items():
            numbers = "".join(f"{values[each]:>10.3f}" for each in ("min", "median", "p99"))
            lines.append(f"{name:>14}  {what:<10}{numbers}")
            name = ""
    return "\n".join(lines)


def main() -> None:
    """Measure every setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--running", type=int, default=32, help="sequences; default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="tokens of each; default: %(default)s")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    output_flags(parser, "step_share")
    options = parser.parse_args()
    busy = foreign_cores()
    engine = LLMEngine(
        str(ensure(options.model)),
        dtype="bfloat16",
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        num_blocks=options.running * 32 + 64,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    forward = TimedForward(engine)
    rows = {name: measure(engine, forward, name, options) for name in options.settings}
    engine.close()
    publish(
        "step_share",
        table_of(rows),
        options,
        busy_cores=busy,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        rows=rows,
    )


if __name__ == "__main__":
    main()
