"""How many threads a computation on the CPU uses, where torch may or may not have been imported.

Importing torch takes longer than loading a small model. Once it is there, its number is the one that counts.
"""

from __future__ import annotations

import os
import sys
from contextvars import ContextVar
from functools import cache
from pathlib import Path

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"

_chosen: ContextVar[int | None] = ContextVar("num_threads", default=None)


def num_threads() -> int:
    """Return torch's number of threads, or before it is imported the one that it would begin with."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):  # not while it is being imported
        return int(torch.get_num_threads())
    chosen = _chosen.get()
    return _usual() if chosen is None else chosen


def set_num_threads(number: int) -> None:
    """Set the number: torch's, or this context's before torch is imported."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(number)
    else:
        _chosen.set(number)


@cache
def _usual() -> int:
    """Return the cores that this process may use, siblings counted once, or what OpenMP's variables say."""
    num_cores = _num_cores()
    for name in _VARIABLES:
        first = os.environ.get(name, "").split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return min(int(first), num_cores)
    return num_cores


def _num_cores() -> int:
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:
        return os.cpu_count() or 1
    try:
        return len({(_read(cpu, "physical_package_id"), _read(cpu, "core_id")) for cpu in allowed})
    except OSError:
        return len(allowed)


def _read(cpu: int, name: str) -> str:
    return Path(_TOPOLOGY.format(cpu, name)).read_text(encoding="ascii").strip()
