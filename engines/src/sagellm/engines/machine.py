"""The context of a measurement: the machine, and the versions of the software."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sagellm.core import (
    PluginRegistry,
    ProviderSpec,
    Topology,
    TopologyMetrics,
    TopologyProtocol,
    call_plugin,
)

FIXING_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
)
"""Variables by which a user chooses threads or their cores; if one is set, the engine chooses neither."""

KERNEL_FLAGS = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
"""The CPU flags that choose kernels, x86 first, then Arm."""

_VERSIONS = {"torch": "torch", "transformers": "transformers", "sagellm": "sagellm-engines"}


def kernel_flags(flags: Sequence[str]) -> list[str]:
    """Pick the flags that choose kernels, in the order of `KERNEL_FLAGS`."""
    return [flag for flag in KERNEL_FLAGS if flag in flags]


def read_topology(
    registry: PluginRegistry, spec: ProviderSpec | str | None = None
) -> tuple[Topology, TopologyMetrics]:
    """Read this machine with this topology reader; None: the configured one."""
    if spec is None:
        from sagellm.engines.config.sources import load_config

        spec = load_config().config.comm.topology
    reader: TopologyProtocol = registry.make("topology", spec)
    label = registry.find("topology", ProviderSpec.of(spec).name).label
    return call_plugin(label, "read()", reader.read), reader.metrics()


def describe_machine() -> dict[str, Any]:
    """Name the CPU with the flags that choose kernels, memory, GPUs, threads and versions.

    Loads no torch; `torch_threads` is included if torch is already loaded.
    """
    found, _ = read_topology(PluginRegistry.load())
    torch = sys.modules.get("torch")
    return {
        "cpu": found.cpu.model or platform.machine(),
        "flags": kernel_flags(found.cpu.flags),
        "cpus": os.cpu_count(),
        "memory_gib": round(found.memory_bytes / 2**30, 1),
        "gpus": [gpu.name for gpu in found.gpus],
        **({"torch_threads": torch.get_num_threads()} if torch is not None else {}),
        "python": platform.python_version(),
        **{name: installed_version(distribution) for name, distribution in _VERSIONS.items()},
    }


def peak_rss_mib(pid: int | None = None) -> float:
    """Return the peak resident memory of a process, or of this one (VmHWM), in MiB; Linux only."""
    status = Path(f"/proc/{pid or 'self'}/status")
    for line in status.read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise OSError(f"{status} has no VmHWM")


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
