"""How many threads a step uses: as many as there are cores that no other process keeps busy.

A step on a CPU joins its threads a few hundred times, and OpenMP's threads spin while they wait. If another
process runs on one of their cores, each join lasts until the kernel gives that core back, milliseconds later:
a step on all cores then takes 10 to 40 times as long, one on the free cores 1 to 2 times. psutil would
be a dependency for the one file that is read here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sagellm.accel.threads import num_threads, set_num_threads
from sagellm.comm import read_cpu_limit
from sagellm.core import get_logger
from sagellm.engines.machine import FIXING_VARIABLES

logger = get_logger(__name__)

_WINDOW_S = 0.1  # the kernel counts in hundredths of a second
_READS_SHARE = 0.005  # of the time, at most, is spent reading; /proc/stat is long on machines with many CPUs
_TAKEN = 0.4  # above this share of use by others, a core counts as theirs


@dataclass(frozen=True, kw_only=True)
class CPUTime:
    """Counters of time, in seconds."""

    at_s: float
    busy_s: float  # of the CPUs this process may use, by any process, including the hypervisor
    own_s: float  # by this process


def read_cpu_time(stat: Path = Path("/proc/stat")) -> CPUTime | None:
    """Read the counters, or return None if the system has none."""
    try:
        allowed = os.sched_getaffinity(0)
        lines = stat.read_text(encoding="ascii").splitlines()
    except (AttributeError, OSError, ValueError):
        return None
    busy = 0
    for line in lines[1:]:  # the first is the sum of all
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break
        if int(name[3:]) in allowed:
            user, nice, system, _, _, irq, softirq, steal = map(int, (*fields, *"00000000")[:8])
            busy += user + nice + system + irq + softirq + steal
    return CPUTime(
        at_s=time.perf_counter(), busy_s=busy / os.sysconf("SC_CLK_TCK"), own_s=time.process_time()
    )


def cores_of_others(before: CPUTime, after: CPUTime) -> float:
    """Return how many cores other processes kept busy between two readings."""
    busy_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, busy_s) / max(after.at_s - before.at_s, 1e-9)


def free_threads(num_cpus: int, others: float, limit: float | None) -> int:
    """Return how many threads to use: one per free core, at least one, at most `limit` CPUs' worth."""
    num_free = int(num_cpus - others + 1 - _TAKEN)
    return max(1, num_free if limit is None else min(num_free, int(limit)))


def fixed_by(environment: Mapping[str, str]) -> str | None:
    """Return the variable with which the user has chosen the threads, or None."""
    return next((name for name in FIXING_VARIABLES if environment.get(name)), None)


class FreeCores:
    """Lowers the number of threads during a step while other processes keep cores busy.

    The number is restored at the end of the step, so it stays the user's own everywhere else, and is never
    raised. Reads the system at most ten times per second. For one thread at a time.
    """

    def __init__(self, read: Callable[[], CPUTime | None] = read_cpu_time) -> None:
        self._read = read
        self._last = read() if fixed_by(os.environ) is None else None
        self._next_s = 0.0 if self._last is None else self._last.at_s + _WINDOW_S
        self._num_cpus = len(os.sched_getaffinity(0)) if self._last is not None else 0
        self._limit = read_cpu_limit()
        self._num_threads: int | None = None  # None: the usual one
        self._has_told = False
        if self._last is not None:
            self._num_threads = free_threads(self._num_cpus, 0.0, self._limit)

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Run the block on the free cores."""
        usual = num_threads()
        if self._last is not None and usual > 1:
            self._look(self._last)
        if self._num_threads is None or self._num_threads >= usual:
            yield
            return
        set_num_threads(self._num_threads)
        try:
            yield
        finally:
            set_num_threads(usual)

    def _look(self, last: CPUTime) -> None:
        started_s = time.perf_counter()
        if started_s < self._next_s:
            return
        self._last = now = self._read()
        if now is None:
            self._num_threads = None
            return
        others = cores_of_others(last, now)
        self._num_threads = free_threads(self._num_cpus, others, self._limit)
        self._next_s = started_s + max(_WINDOW_S, (time.perf_counter() - started_s) / _READS_SHARE)
        if others > _TAKEN and not self._has_told:
            self._has_told = True
            logger.info(
                "others keep %.1f of %d cores busy: steps run on %d thread(s) until that ends "
                "(OMP_NUM_THREADS sets a fixed number)",
                others,
                self._num_cpus,
                self._num_threads,
            )
