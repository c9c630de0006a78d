"""What does a prompt of 8,000 tokens do to 8 streams? `python benchmarks/long_prompt.py [MODEL]`.

Streams decode; then the prompt comes. The same work is run with chunks by time, the default, and with none
(`scheduler_passes="chunk=none"`, a step as large as the prompt): how long each step takes until the prompt's
first token (from `LLMEngine.step` to its outputs), the streams' gaps between tokens (ITL), the time to the
prompt's first token (TTFT), and tokens a second from the prompt's arrival to the end of all requests. Before
that, a shorter prompt beside the streams lets the engine learn what steps cost; `--warm-tokens 0` omits it.

Bars, of the chunked run: no step over 1.5 × the target, and ITL p99 at most 2 × the target. Exits with 1 if
one fails. What chunks cost in throughput stands beside them. Makes MODEL, of
random weights in the Qwen3-0.6B shape, if it is not there; without one the embedded model runs, to try it:

    python benchmarks/long_prompt.py --prompt-tokens 1000 --warm-tokens 300 --target-ms 4 --output-tokens 90
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import foreign_cores, output_flags, publish, spread
from make_model import ensure

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.cli.output import columns
from sagellm.engines.engine_core.building import default_step_target_ms

MAX_STEP, MAX_ITL = 1.5, 2.0  # × the target
CHUNKED, UNBOUNDED = "chunks by time", "unbounded"
PROMPT = "prompt"


@dataclass
class Run:
    """What was measured from the arrival of the prompt on."""

    steps_ms: list[float] = field(default_factory=list)  # until the prompt's first token
    itl_ms: list[float] = field(default_factory=list)  # of the streams, meanwhile
    ttft_s: float = 0.0
    took_s: float = 0.0  # to the end of all requests
    num_tokens: int = 0  # of the prompt and all outputs since

    def figures(self) -> dict[str, Any]:
        """Return the figures to keep."""
        return {
            "step_ms": {**spread(self.steps_ms, 2), "max": round(max(self.steps_ms), 2)},
            "itl_ms": {**spread(self.itl_ms, 2), "max": round(max(self.itl_ms), 2)},
            "ttft_s": round(self.ttft_s, 3),
            "tokens_per_s": round(self.num_tokens / self.took_s, 2),
        }


class Load:
    """Streams that decode on one engine, and the prompts that come to it."""

    def __init__(self, engine: LLMEngine, options: argparse.Namespace) -> None:
        self._engine, self._options = engine, options
        self._rng = np.random.default_rng(0)
        self._num_tokens: dict[str, int] = {}
        self._last_s: dict[str, float] = {}
        self._num_ended = 0  # streams

    def run(self) -> Run:
        """Run all of it once."""
        options = self._options
        num_warm = 16 + options.warm_tokens // 16  # tokens of each stream beside the shorter prompt
        for number in range(options.streams):
            self._add(f"stream-{number}", options.context_tokens, num_warm + options.output_tokens)
        while len(self._num_tokens) < options.streams:  # until all decode
            self._step()
        if options.warm_tokens:
            self._add("warm", options.warm_tokens, 1)
        while self._num_tokens["stream-0"] < num_warm:
            self._step()
        assert not options.warm_tokens or "warm" in self._num_tokens, "the streams outlive the warm-up"
        return self._measure()

    def _measure(self) -> Run:
        gc.collect()
        run = Run()
        self._step()  # whose tokens the first gaps begin with
        before = sum(self._num_tokens.values())
        begun_s = time.perf_counter()
        self._add(PROMPT, self._options.prompt_tokens, 8)
        while self._engine.has_unfinished_requests():
            step_ms, gaps_ms = self._step()
            if not run.ttft_s:
                if self._num_ended:
                    raise SystemExit("a stream ended before the prompt's first token; raise --output-tokens")
                run.steps_ms.append(step_ms)
                run.itl_ms += gaps_ms
                if PROMPT in self._num_tokens:
                    run.ttft_s = time.perf_counter() - begun_s
        run.took_s = time.perf_counter() - begun_s
        run.num_tokens = sum(self._num_tokens.values()) - before + self._options.prompt_tokens
        return run

    def _step(self) -> tuple[float, list[float]]:
        """Run a step; return its milliseconds, and the gaps of the streams that have a token from it."""
        begun_s = time.perf_counter()
        outputs = self._engine.step()
        now_s = time.perf_counter()
        gaps_ms = []
        for output in outputs:
            name = output.request_id
            self._num_tokens[name] = len(output.outputs[0].token_ids)
            if name != PROMPT and name in self._last_s:
                gaps_ms.append((now_s - self._last_s[name]) * 1000)
            self._last_s[name] = now_s
            self._num_ended += name.startswith("stream") and output.finished
        return (now_s - begun_s) * 1000, gaps_ms

    def _add(self, name: str, num_tokens: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(self._rng.integers(5, 1500, num_tokens).tolist(), params, request_id=name)


def measure(options: argparse.Namespace, kind: str) -> tuple[Run, float]:
    """Run the load on an engine of its own; return also its target in milliseconds."""
    settings: dict[str, Any] = {}
    if options.target_ms is not None:
        settings["step_target_ms"] = options.target_ms
    if kind == UNBOUNDED:
        settings["scheduler_passes"] = "chunk=none"
        settings["max_num_batched_tokens"] = options.prompt_tokens + options.streams
    if options.model is not None:
        settings["model"] = str(ensure(options.model))
    longest = options.context_tokens + options.output_tokens + options.warm_tokens // 16 + 64
    num_tokens = options.prompt_tokens + options.warm_tokens + options.streams * longest
    with LLMEngine(
        dtype=options.dtype,
        num_blocks=num_tokens // 16 + 2 * options.streams + 16,
        enable_prefix_caching=False,
        **settings,
    ) as engine:
        target_ms = engine.config.scheduler.step_target_ms or default_step_target_ms(
            engine.config.model.device
        )
        return Load(engine, options).run(), target_ms


def bars(found: dict[str, dict[str, Any]], target_ms: float) -> dict[str, bool]:
    """Return each bar as a sentence, and whether it holds."""
    chunked = found[CHUNKED]
    longest_ms, itl_ms = chunked["step_ms"]["max"], chunked["itl_ms"]["p99"]
    return {
        f"the longest step takes {longest_ms / target_ms:.2f} × the target of {target_ms:g} ms, at most "
        f"{MAX_STEP} ×": longest_ms <= MAX_STEP * target_ms,
        f"ITL p99 is {itl_ms / target_ms:.2f} × the target, at most {MAX_ITL:g} ×": itl_ms
        <= MAX_ITL * target_ms,
    }


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?")
    add("--dtype", default="float32")
    add("--streams", type=int, default=8)
    add("--prompt-tokens", type=int, default=8000)
    add("--context-tokens", type=int, default=64, help="of each stream; default: %(default)s")
    add("--output-tokens", type=int, default=512, help="of each stream, behind the warm-up; %(default)s")
    add("--warm-tokens", type=int, default=1024, help="of the prompt before; default: %(default)s")
    add("--target-ms", type=float, help="scheduler.step_target_ms; default: the engine's")
    output_flags(parser, "long-prompt")
    return parser.parse_args()


def main() -> int:
    """Measure both, print a table and the bars."""
    options = arguments()
    foreign, found = foreign_cores(), {}
    target_ms = 0.0
    for kind in (CHUNKED, UNBOUNDED):
        run, target_ms = measure(options, kind)
        found[kind] = run.figures()
    held = bars(found, target_ms)
    table = columns(
        ["", "steps", "median ms", "max ms", "ITL p50 ms", "ITL p99 ms", "TTFT s", "tokens/s"],
        [
            [
                kind,
                str(each["step_ms"]["n"]),
                *(f"{each['step_ms'][which]:.1f}" for which in ("median", "max")),
                *(f"{each['itl_ms'][which]:.1f}" for which in ("median", "p99")),
                f"{each['ttft_s']:.2f}",
                f"{each['tokens_per_s']:.1f}",
            ]
            for kind, each in found.items()
        ],
    )
    verdicts = "\n".join(f"{'holds' if holds else 'FAILS'}: {bar}" for bar, holds in held.items())
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("save", "json")}
    publish(
        "long_prompt",
        f"{table}\n\n{verdicts}",
        options,
        foreign_cores=foreign,
        settings=settings,
        target_ms=target_ms,
        runs=found,
        bars=held,
    )
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
