"""What busy neighbours cost: `python benchmarks/neighbours.py [MODEL]`.

Greedy decode of one prompt alone, beside one and beside three processes that spin, in four settings: as
an engine comes, with all of torch's threads (OMP_NUM_THREADS), with all threads and a passive OpenMP wait
policy, and with one thread. Each is a fresh process; the time of a request is in ms. Needs an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import foreign_cores, output_flags, publish, spread

from sagellm.engines import LLMEngine, SamplingParams
from sagellm.engines.embedded import EMBEDDED

NEIGHBOURS = (0, 1, 3)
LONGEST_S = 600  # a neighbour ends by itself then, whatever becomes of this process
NUM_CPUS = str(len(os.sched_getaffinity(0)))
SETTINGS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "all threads": {"OMP_NUM_THREADS": NUM_CPUS},
    "all threads, passive": {"OMP_NUM_THREADS": NUM_CPUS, "OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
FIXED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def generate(options: argparse.Namespace) -> list[float]:
    """Return the milliseconds of each request, after a first that is not counted."""
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    prompt = list(range(5, 5 + options.prompt))
    times_ms = []
    with LLMEngine(model=options.model, num_blocks=128, enable_prefix_caching=False) as engine:
        for _ in range(options.requests + 1):
            started_s = time.perf_counter()
            engine.generate([prompt], params)
            times_ms.append(1e3 * (time.perf_counter() - started_s))
    return times_ms[1:]


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    """Keep so many processes spinning."""
    code = f"import time\nend = time.time() + {LONGEST_S}\nwhile time.time() < end: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace, setting: str) -> dict[str, Any]:
    """Generate in a fresh process with a setting's environment."""
    environment = {name: value for name, value in os.environ.items() if name not in FIXED}
    command = [sys.executable, __file__, options.model, "--worker"]
    command += [f"--{name}={getattr(options, name)}" for name in ("tokens", "prompt", "requests")]
    done = subprocess.run(
        command, env=environment | SETTINGS[setting], stdout=subprocess.PIPE, text=True, check=True
    )
    return spread(json.loads(done.stdout), digits=1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=EMBEDDED)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--requests", type=int, default=7, help="requests in each process")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    output_flags(parser, "neighbours")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(generate(options)))
        return
    others, rows = foreign_cores(), {name: {} for name in options.settings}
    for num_neighbours in NEIGHBOURS:
        with busy(num_neighbours):
            for name, row in rows.items():
                row[f"beside {num_neighbours}"] = measure(options, name)
    today = rows.get("all threads", rows[options.settings[0]])["beside 0"]["median"]
    lines = [f"{'ms, median (× all threads alone)':34}" + "".join(f"beside {n:<13}" for n in NEIGHBOURS)]
    for name, row in rows.items():
        figures = (f"{figure['median']:8.1f} ({figure['median'] / today:5.2f})" for figure in row.values())
        lines.append(f"{name:30}" + "".join(f"{text:>20}" for text in figures))
    publish(
        "neighbours",
        "\n".join(lines),
        options,
        foreign_cores=others,
        model=os.path.basename(options.model),
        prompt_tokens=options.prompt,
        output_tokens=options.tokens,
        request_ms=rows,
    )


if __name__ == "__main__":
    main()
