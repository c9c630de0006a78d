"""What HTTP costs: `python benchmarks/serving.py MODEL [--small SMALL_MODEL]`.

(1) 32 requests (128 tokens in, 64 out) at once through HTTP, against the same through
`LLMEngine.generate`, turn by turn: output tokens per second, and their ratio. (2) 100 streams over the
small model: CPU time of the front's process for each streamed token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from common import foreign_cores, report, spread
from make_model import ensure

from sagellm.engines import LLMEngine
from sagellm.engines.bench import Lengths, LoadSettings, OfflineSettings, measure_throughput, run_serve
from sagellm.engines.testing import make_checkpoint

STREAMS, SMALL_STREAMS = 32, 100
INPUT, OUTPUT = Lengths.parse("128"), Lengths.parse("64")


@contextmanager
def served(model: Path, port: int, *flags: str) -> Iterator[psutil.Process]:
    """Serve a model in processes of its own; gives the front's."""
    sage = [sys.executable, "-m", "sagellm.engines.cli", "llm", "engine"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SAGELLM_RUNTIME_DIR": folder}
        os.chmod(folder, 0o700)
        start = [*sage, "start", str(model), f"--port={port}", *flags]
        subprocess.run(start, env=environment, check=True, stdout=subprocess.DEVNULL)
        try:
            entry = json.loads((Path(folder) / f"engine-{port}.json").read_text(encoding="utf-8"))
            yield psutil.Process(entry["pid"])
        finally:
            subprocess.run([*sage, "stop"], env=environment, check=True, stdout=subprocess.DEVNULL)


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
    parser.add_argument("--small", type=Path, default=None, help="default: a random checkpoint, made here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    model = ensure(options.model)
    others = foreign_cores()

    through_http, alone = [], []
    engine = LLMEngine(model=str(model), num_blocks=512, enable_prefix_caching=False)
    with served(model, options.port, "--num-blocks=512", "--no-enable-prefix-caching"):
        for seed in range(options.rounds):
            offline = OfflineSettings(num_prompts=STREAMS, input_len=INPUT, output_len=OUTPUT, seed=seed)
            alone.append(measure_throughput(engine, offline).output_throughput_tokens_per_s)
            through_http.append(load(options.port, STREAMS, OUTPUT, seed))
    del engine

    cost_us = []
    with tempfile.TemporaryDirectory() as folder:
        small = options.small or make_checkpoint(Path(folder) / "small", seed=0)
        long = Lengths.parse("256")
        with served(small, options.port, "--num-blocks=8192") as front:
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
