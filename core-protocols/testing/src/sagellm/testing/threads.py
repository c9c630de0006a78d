"""Runs a piece of a test in many threads at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

NUM_THREADS = 8
"""How many threads the conformance kit runs at once."""


def run_in_threads(work: Callable[[int], None], *, num_threads: int, switch_interval_s: float = 1e-5) -> None:
    """Call `work(0)`, `work(1)`, … at the same moment and raise the first error of any of them.

    Meanwhile threads are switched far more often than usual, so that races have a chance to show.
    """
    barrier = Barrier(num_threads)

    def run(thread: int) -> None:
        barrier.wait()
        work(thread)

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval_s)
    try:
        with ThreadPoolExecutor(num_threads) as executor:
            for future in [executor.submit(run, thread) for thread in range(num_threads)]:
                future.result()
    finally:
        sys.setswitchinterval(usual_s)
