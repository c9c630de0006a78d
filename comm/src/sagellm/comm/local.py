"""The machine that this process runs on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, TypeVar

from sagellm.comm.cpu import read_cpu
from sagellm.comm.gpu import read_gpus
from sagellm.comm.memory import Memory, read_memory
from sagellm.comm.network import read_network
from sagellm.comm.numa import read_numa_nodes
from sagellm.comm.tree import Tree
from sagellm.core import (
    GPU,
    Link,
    NullTopology,
    NumaNode,
    Topology,
    TopologyMetrics,
    TopologyProtocol,
    get_logger,
)

_logger = get_logger(__name__)

_Part = TypeVar("_Part")
_NO_NODES: tuple[NumaNode, ...] = ()
_NO_GPUS: tuple[tuple[GPU, ...], tuple[Link, ...]] = ((), ())


class LocalTopology(TopologyProtocol):
    """Reads /proc and /sys below `root`, network interfaces by psutil and GPUs by NVML.

    Another root than `/` is a saved copy of some machine's files: network and GPUs, which are no
    files, are left out then, unless `nvml` (a module like `pynvml`) is given. One reading takes
    tens of milliseconds, most of it for NVML where there is a driver.
    """

    def __init__(self, root: Path = Path("/"), *, nvml: Any = None) -> None:
        self._root = Path(root)
        self._nvml = nvml
        self._metrics = TopologyMetrics(read_ns=0, warnings=())

    def read(self) -> Topology:
        """Read the machine afresh."""
        start_ns = perf_counter_ns()
        tree = Tree(self._root)
        cpu = _attempt(tree, "CPUs", lambda: read_cpu(tree), NullTopology().read().cpu)
        nothing = Memory(total_bytes=0, limit_bytes=0, available_bytes=0)
        memory = _attempt(tree, "memory", lambda: read_memory(tree), nothing)
        online, total_bytes = cpu.online_cpu_ids, memory.total_bytes
        nodes = _attempt(tree, "NUMA nodes", lambda: read_numa_nodes(tree, online, total_bytes), _NO_NODES)
        gpus, links = _attempt(tree, "GPUs", lambda: read_gpus(tree, self._nvml), _NO_GPUS)
        topology = Topology(
            hostname=_hostname(tree),
            cpu=cpu,
            numa_nodes=nodes,
            gpus=gpus,
            links=links,
            network=_attempt(tree, "network interfaces", lambda: read_network(tree), ()),
            memory_bytes=memory.total_bytes,
            memory_limit_bytes=memory.limit_bytes,
            memory_available_bytes=memory.available_bytes,
        )
        self._metrics = TopologyMetrics(read_ns=perf_counter_ns() - start_ns, warnings=tuple(tree.warnings))
        _logger.debug("read the machine in %.1f ms", self._metrics.read_ns / 1e6)
        for warning in tree.warnings:
            _logger.info("%s", warning)
        return topology

    def metrics(self) -> TopologyMetrics:
        """Return how the last reading went."""
        return self._metrics


def _attempt(tree: Tree, what: str, read: Callable[[], _Part], otherwise: _Part) -> _Part:
    """Read one part. Whatever goes wrong becomes a warning: no machine is too odd to start on."""
    try:
        return read()
    except Exception as error:
        tree.warn(f"the {what} cannot be read ({type(error).__name__}: {error})")
        return otherwise


def _hostname(tree: Tree) -> str:
    if tree.is_this_machine:
        return socket.gethostname()
    return tree.text("/proc/sys/kernel/hostname") or tree.text("/etc/hostname") or ""
