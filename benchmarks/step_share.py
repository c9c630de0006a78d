"""How much of a decode step is not the forward pass: `python benchmarks/step_share.py MODEL`.

32 sequences decode together, greedily and with usual sampling settings; a step is timed from the engine's
`step` to its outputs, and the forward pass inside it. Makes MODEL, of random weights in the Qwen3-0.6B shape,
if it is not there. Its logits are nearly uniform, so that top-p alone keeps most of the vocabulary: the most
that a draw has to read. With `--speculation`, prompts and answers repeat one phrase (the next token's
logit is raised), so that every row has drafts, which are accepted: `num_tokens` of a step says how many it
computed.

At last the worker alone computes steps of 8 rows that ask for more than a token: two with masks, one with 4
drafts, or both, each beside a plain step of the same rows. The ratio includes the longer forward pass of the
drafts, which `forward_ms` tells apart.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import foreign_cores, output_flags, publish, spread
from make_model import ensure

from sagellm.core import SequenceId, StepInput, pack
from sagellm.core.protocols.step import BlockUpdates, Runs, Seat, SeatArrival, TokenMasks
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
NUM_PHRASE = 16
NUM_ROWS = 8
NUM_DRAFTS = 4
WITH_DRAFTS = 5  # row, and
WITH_MASKS = (1, 6)


class TimedForward:
    """Wraps a backend's `forward`, and adds up the time that it takes."""

    def __init__(self, engine: LLMEngine) -> None:
        backend: Any = engine.client.core.runner.backend  # type: ignore[attr-defined]
        self._forward = backend.forward
        self.spent_s, self.num_tokens = 0.0, 0
        self.next_token: torch.Tensor | None = None  # (vocab,)
        backend.forward = self

    def __call__(self, batch: Any) -> Any:
        """Run it."""
        begun_s = time.perf_counter()
        logits = self._forward(batch)
        self.spent_s += time.perf_counter() - begun_s
        self.num_tokens = len(batch.input_ids)
        if self.next_token is not None:
            drawn = self.next_token[batch.input_ids[batch.logits_indices].long()]
            logits[torch.arange(len(drawn)), drawn] = 1e4
        return logits


def measure(
    engine: LLMEngine, forward: TimedForward, name: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Return milliseconds of a step in which all sequences decode."""
    params = SamplingParams(max_tokens=options.steps, ignore_eos=True, seed=1, **SETTINGS[name])
    rng = np.random.default_rng(0)
    phrase = (5 + rng.permutation(1500)[:NUM_PHRASE]).tolist()
    if options.speculation:
        forward.next_token = torch.zeros(engine.vocab_size, dtype=torch.long)
        forward.next_token[phrase] = torch.tensor(phrase[1:] + phrase[:1])
    for number in range(options.running):
        prompt = rng.integers(5, 1500, NUM_CONTEXT).tolist()
        if options.speculation:
            prompt = phrase * (NUM_CONTEXT // NUM_PHRASE)
        engine.add_request(prompt, params, request_id=f"{name}-{number}")
    steps, forwards, sizes = [], [], []
    gc.collect()
    while engine.has_unfinished_requests():
        forward.spent_s = 0.0
        begun_s = time.perf_counter()
        outputs = engine.step()
        took_s = time.perf_counter() - begun_s
        if len(outputs) == options.running:
            steps.append(took_s * 1000)
            forwards.append(forward.spent_s * 1000)
            sizes.append(float(forward.num_tokens))
    steps, forwards = steps[WARM_STEPS:], forwards[WARM_STEPS:]
    rest = [step - each for step, each in zip(steps, forwards, strict=True)]
    shares = [each / step for step, each in zip(steps, rest, strict=True)]
    return {
        "step_ms": spread(steps),
        "forward_ms": spread(forwards),
        "rest_ms": spread(rest),
        "rest_share": spread(shares),
        "num_tokens": spread(sizes[WARM_STEPS:]),
    }


def mixed_step(number: int, tokens: Any, *, masks: bool, drafts: bool, vocab_size: int) -> StepInput:
    """Return a step that decodes `NUM_ROWS` rows; repeated, it computes the same again."""
    num_new = np.ones(NUM_ROWS, np.int32)
    runs = None
    if drafts:
        num_new[WITH_DRAFTS] += NUM_DRAFTS
        runs = Runs(tokens[:NUM_DRAFTS].astype(np.int32), num_new - 1)
    words = np.random.default_rng(1).integers(0, 2**32, (2, -(-vocab_size // 32)), np.uint32)
    positions = np.array(WITH_MASKS, np.int32) + np.array([0, NUM_DRAFTS * drafts], np.int32)
    return StepInput(
        step=number,
        seats=np.arange(NUM_ROWS, dtype=np.int32),
        num_new=num_new,
        starts=np.full(NUM_ROWS, NUM_CONTEXT, np.int32),
        is_sampled=np.ones(NUM_ROWS, np.bool_),
        drafts=runs,
        masks=TokenMasks(positions, words) if masks else None,
    )


def seat_rows(worker: Any, block_size: int) -> None:
    """Give the worker sequences whose prompts are computed, each with its own blocks."""
    rng = np.random.default_rng(0)
    num_blocks = -(-(NUM_CONTEXT + NUM_DRAFTS + 2) // block_size)
    seats, indices = np.divmod(np.arange(NUM_ROWS * num_blocks, dtype=np.int32), np.int32(num_blocks))
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=100)
    arrivals = [
        SeatArrival(
            Seat(seat),
            SequenceId(f"mixed-{seat}"),
            pack(rng.integers(5, 1500, NUM_CONTEXT).tolist()),
            NUM_CONTEXT,
            params,
            seat,
        )
        for seat in range(NUM_ROWS)
    ]
    first = StepInput(
        step=1,
        seats=np.arange(NUM_ROWS, dtype=np.int32),
        num_new=np.full(NUM_ROWS, NUM_CONTEXT, np.int32),
        starts=np.zeros(NUM_ROWS, np.int32),
        is_sampled=np.ones(NUM_ROWS, np.bool_),
        arrivals=arrivals,
        new_blocks=BlockUpdates(np.zeros_like(seats), seats, indices, np.arange(len(seats), dtype=np.int32)),
    )
    worker.compute(first)


def measure_mixed(engine: LLMEngine, forward: TimedForward, num_steps: int) -> dict[str, dict[str, Any]]:
    """Return milliseconds of plain steps and of others, which alternate; and the ratios of the medians."""
    core: Any = engine.client
    worker = core.core.parts.worker
    seat_rows(worker, worker.runner.layouts[0].block_size)
    kinds = {
        "plain": (False, False),
        "masks": (True, False),
        "drafts": (False, True),
        "masks, drafts": (True, True),
    }
    tokens = np.random.default_rng(2).integers(5, 1500, NUM_DRAFTS)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in kinds}
    gc.collect()
    for number in range(num_steps + WARM_STEPS):
        for name, (masks, drafts) in kinds.items():
            step = mixed_step(number + 2, tokens, masks=masks, drafts=drafts, vocab_size=engine.vocab_size)
            forward.spent_s = 0.0
            begun_s = time.perf_counter()
            output = worker.compute(step)
            took_s = time.perf_counter() - begun_s
            assert not output.errors, output.errors
            if number >= WARM_STEPS:
                found[name][0].append(took_s * 1000)
                found[name][1].append(forward.spent_s * 1000)
    plain_ms = float(np.median(found["plain"][0]))
    return {
        name: {
            "step_ms": spread(steps),
            "forward_ms": spread(forwards),
            "rest_ms": spread([step - each for step, each in zip(steps, forwards, strict=True)]),
            "ratio": spread([step / plain_ms for step in steps]),
        }
        for name, (steps, forwards) in found.items()
    }


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return the figures as lines of text."""
    lines = [f"{'':>24}{'':>10}{'min':>10}{'median':>10}{'p99':>10}"]
    for name, figures in rows.items():
        for what, values in figures.items():
            numbers = "".join(f"{values[each]:>10.3f}" for each in ("min", "median", "p99"))
            lines.append(f"{name:>24}  {what:<10}{numbers}")
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
    parser.add_argument("--speculation", default="", help="draft with this, such as 'ngram{max_tokens=4}'")
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
        num_blocks=options.running * 64 + 64,
        step_target_ms=60_000,
        max_model_len=1024,
        enable_prefix_caching=False,
        **(
            {"speculation": options.speculation, "adaptive_speculation": False} if options.speculation else {}
        ),
    )
    forward = TimedForward(engine)
    rows = {name: measure(engine, forward, name, options) for name in options.settings}
    if not options.speculation:
        mixed = measure_mixed(engine, forward, options.steps)
        rows |= {f"{NUM_ROWS} rows, {name}": figures for name, figures in mixed.items()}
    engine.close()
    publish(
        "step_share",
        table_of(rows),
        options,
        busy_cores=busy,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        speculation=options.speculation,
        rows=rows,
    )


if __name__ == "__main__":
    main()
