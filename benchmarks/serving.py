"""What HTTP costs: `python benchmarks/serving.py MODEL`.

(1) 32 requests (128 tokens in, 64 out) at once through HTTP, against the same through
`LLMEngine.generate`, turn by turn: output tokens per second, and their ratio. (2) 100 streams over the
embedded model: CPU time of the front's process for each streamed token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import psutil
from common import foreign_cores, report, spread
from make_model import ensure
from served import served

from sagellm.engines import LLMEngine
from sagellm.engines.embedded import EMBEDDED
from sagellm.lab.bench import Lengths, LoadSettings, OfflineSettings, measure_throughput, run_serve

STREAMS, SMALL_STREAMS = 32, 100
INPUT, OUTPUT = Lengths.parse("128"), Lengths.parse("64")


def load(port: int, num_prompts: int, output: Lengths, seed: int) -> float:
    """Return output tokens per second of so many requests at once."""
    settings = LoadSettings(
        base_url=f"http://127.0.0.1:{port}/v1",
        num_prompts=num_prompts,
        input_len=INPUT,
        output_len=output,
        vocab_size=500,
        seed=seed,
    )
    result = run_serve(settings)
    assert result.figures.num_failed == 0, result.figures.errors
    return result.figures.output_throughput_tokens_per_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--small", default=EMBEDDED, help="another model for the second part")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    model = ensure(options.model)
    others = foreign_cores()

    through_http, alone = [], []
    engine = LLMEngine(model=str(model), num_blocks=512, enable_prefix_caching=False)
    with served(str(model), options.port, "--num-blocks=512", "--no-enable-prefix-caching"):
        for seed in range(options.rounds):
            offline = OfflineSettings(num_prompts=STREAMS, input_len=INPUT, output_len=OUTPUT, seed=seed)
            alone.append(measure_throughput(engine, offline).output_throughput_tokens_per_s)
            through_http.append(load(options.port, STREAMS, OUTPUT, seed))
    del engine

    cost_us = []
    long = Lengths.parse("256")
    with served(options.small, options.port, "--num-blocks=8192") as running:
        front = psutil.Process(running.pid)
        for seed in range(options.rounds):
            before = front.cpu_times()
            load(options.port, SMALL_STREAMS, long, seed)
            after = front.cpu_times()
            seconds = after.user + after.system - before.user - before.system
            cost_us.append(1e6 * seconds / (SMALL_STREAMS * 256))
    report(
        "serving",
        foreign_cores=others,
        http_tok_s=spread(through_http),
        engine_tok_s=spread(alone),
        http_share=spread([a / b for a, b in zip(through_http, alone, strict=True)]),
        front_cpu_us_per_streamed_token=spread(cost_us),
    )


if __name__ == "__main__":
    main()
