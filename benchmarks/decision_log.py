"""What the decision log costs: `python benchmarks/decision_log.py`.

The production core around an executor that computes nothing runs 256 decodes while 1,000 others wait.
Measured are the log's own calls, in steps in which nothing changes, and while requests end and others take
their places.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

from common import foreign_cores, output_flags, publish, spread
from host_step import NUM_WAITING, core_of, queue

from sagellm.engines.engine_core.decision_log import DecisionLog

NUM_RUNNING, CONTEXT = 256, 1024
NUM_ENDED = 8
CALLS = ("planned", "queued", "admitted", "finished")


class CallTimes:
    """The nanoseconds of each call of a log's methods."""

    def __init__(self, log: DecisionLog) -> None:
        self.took: dict[str, list[float]] = {name: [] for name in CALLS}
        for name in CALLS:
            self._measure(log, name)

    def _measure(self, log: DecisionLog, name: str) -> None:
        method, took = getattr(log, name), self.took[name]

        def measured(*args: Any) -> None:
            begun_ns = time.perf_counter_ns()
            method(*args)
            took.append((time.perf_counter_ns() - begun_ns) / 1000)

        setattr(log, name, measured)

    def take(self, name: str) -> list[float]:
        """Return the microseconds of the calls of a method since the last time."""
        took, self.took[name][:] = self.took[name].copy(), []
        return took


def measure(num_steps: int) -> dict[str, Any]:
    """Return the microseconds of each kind of call."""
    core, _ = core_of(NUM_RUNNING, NUM_RUNNING * (CONTEXT // 16 + 64), NUM_RUNNING * CONTEXT)
    times = CallTimes(core.scheduler.log)
    queue(core, [CONTEXT - 64] * NUM_RUNNING + [512] * NUM_WAITING, 1)
    while core.scheduler.num_running < NUM_RUNNING:
        core.step()
    found = {"queued": times.take("queued")}
    gc.collect()
    gc.freeze()
    for _ in range(20):
        core.step()
    times.take("planned")
    for _ in range(num_steps):
        core.step()
    found["a step without changes"] = times.take("planned")
    times.take("admitted")
    for _ in range(NUM_WAITING // NUM_ENDED):
        core.abort(core.scheduler.sequence_ids[:NUM_ENDED])
        core.step()
        core.step()
    found |= {name: times.take(name) for name in ("admitted", "finished")}
    gc.unfreeze()
    return {name: spread(values, 2) for name, values in found.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    output_flags(parser, "decision_log")
    options = parser.parse_args()
    busy = foreign_cores()
    rows = measure(options.steps)
    lines = [f"{NUM_RUNNING} running, {NUM_WAITING} waiting; µs: min median p99"]
    lines += [
        f"{name:<24} {each['min']:>8} {each['median']:>8} {each['p99']:>8}" for name, each in rows.items()
    ]
    publish("decision_log", "\n".join(lines), options, busy_cores=busy, rows=rows)


if __name__ == "__main__":
    main()
