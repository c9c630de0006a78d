"""What every benchmark prints beside its figures: the machine, the versions, min, median and p99."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Name the CPU, the flags that choose kernels, the threads and the libraries."""
    import torch

    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = [
        f for f in fields.get("flags", "").split() if f.startswith(("avx512_bf16", "avx512_vnni", "amx"))
    ]
    return {
        "cpu": fields.get("model name", platform.machine()),
        "flags": flags,
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "sagellm": version("sagellm-engines"),
    }


def spread(values: list[float], digits: int = 4) -> dict[str, Any]:
    """Return min, median, p99 (nearest rank) and the number of values."""
    ordered = sorted(values)
    rank = min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)
    return {
        "min": round(ordered[0], digits),
        "median": round(statistics.median(ordered), digits),
        "p99": round(ordered[rank], digits),
        "n": len(ordered),
    }


def report(name: str, **figures: Any) -> None:
    """Print one JSON object: what was measured, then the machine."""
    json.dump({"benchmark": name, **figures, "machine": machine()}, sys.stdout, indent=1)
    print()


def peak_rss_mib() -> float:
    """Peak resident memory of this process (VmHWM), in MiB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmHWM")


def foreign_cores(seconds: float = 1.0) -> float:
    """Measure how many cores other processes keep busy, while this one sleeps."""

    def busy() -> float:
        fields = [int(x) for x in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]]
        return (sum(fields[:3]) + fields[5] + fields[6]) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(seconds)
    return round((busy() - before) / seconds, 2)
