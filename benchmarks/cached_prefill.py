"""TTFT of a prompt whose beginning is cached, against the same length computed from the start.

`python benchmarks/cached_prefill.py MODEL`: prompts of 2,048 tokens, 1,920 of them cached, one at a time, the
two kinds in turn. Also with half a block more, which is reused by copying a block. MODEL is a directory, such
as `benchmarks/make_model.py` makes.
"""

from __future__ import annotations

import argparse
import random
import time

from common import foreign_cores, report, spread

from sagellm.engines import LLMEngine, SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--cached", type=int, default=1920)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    foreign = foreign_cores()
    engine = LLMEngine(model=options.model, num_blocks=1024, max_num_batched_tokens=options.tokens)
    rng = random.Random(0)

    def some(num_tokens: int) -> list[int]:
        return [rng.randrange(100, 5000) for _ in range(num_tokens)]

    def ttft(prompt: list[int], num_cached: int) -> float:
        begin = time.perf_counter()
        output = engine.generate(prompt, ONE_TOKEN)[0]
        seconds = time.perf_counter() - begin
        if output.num_cached_tokens != num_cached:
            raise SystemExit(f"{output.num_cached_tokens} tokens were cached, {num_cached} expected")
        return seconds

    ttft(some(options.tokens), 0)  # warm-up
    times: dict[str, list[float]] = {"cold": [], "cached": [], "cached, and half a block": []}
    for _ in range(options.rounds):
        prompt = some(options.tokens)
        times["cold"].append(ttft(prompt, 0))
        for name, num_cached in (
            ("cached", options.cached),
            ("cached, and half a block", options.cached + 8),
        ):
            follow_up = [*prompt[:num_cached], 9, *some(options.tokens - num_cached - 1)]
            times[name].append(ttft(follow_up, num_cached))
    medians = {name: spread(values)["median"] for name, values in times.items()}
    report(
        "cached_prefill",
        num_tokens=options.tokens,
        num_cached_tokens=options.cached,
        ttft_s={name: spread(values) for name, values in times.items()},
        share_of_cold={name: round(value / medians["cold"], 4) for name, value in medians.items()},
        foreign_cores=foreign,
    )


if __name__ == "__main__":
    main()
